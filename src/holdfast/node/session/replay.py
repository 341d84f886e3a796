"""State of a subscription that began in the past, see `node.delivery.replay`."""


class Replay:
    """The way of a subscription from its start in the past to the live tail.

    A record counts from `floors` on, if its topic has one there: the subscription began with the
    last records of each topic. `seam` is the end of the log at SUBSCRIBE: records below it are of
    the past. `again` are the offsets in `Session.done` that were finished for other subscriptions,
    before this one began.
    """

    def __init__(
        self, seam: list[int], floors: dict[bytes, int], again: set[tuple[int, int]] | None = None
    ) -> None:
        self.seam = seam
        self.floors = floors
        self.again = again
