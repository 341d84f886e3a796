"""Adds a subscription's properties to each message that its client receives."""

from typing import Final

PLACE_WISH: Final = 1 << 28
"""In the code of Additions, beside an identifier, which is lower: the client asked for the place of
each message."""
END_WISH: Final = 1 << 29
"""In the code of Additions: the client asked for a message at the end of the past."""
LOG_READER: Final = 1 << 30
"""In the code of Additions: `Subscription.reads_log`. Older versions ignore it."""
DRAINS: Final = 1 << 31
"""In the code of Additions, with LOG_READER: `Subscription.drains`. Older versions ignore it."""
IDENTIFIER_MASK: Final = PLACE_WISH - 1


class Additions:
    """The subscription identifiers of a delivery, and what its client asked to be told.

    A subscription without any has None, so a message for it is not looked at for them. The code is
    the form in the log: the identifier or 0, plus PLACE_WISH and END_WISH.
    """

    def __init__(self, ids: tuple[int, ...], tells_place: bool, tells_end: bool) -> None:
        self.ids = ids
        self.tells_place = tells_place
        self.tells_end = tells_end
        # The message is from before the SUBSCRIBE.
        self.is_past = False
        # The number of records that were lost before the message.
        self.lost = 0

    def of_past(self, is_past: bool, lost: int) -> "Additions":
        """These additions for one message of the past, or for one behind lost records."""
        additions = Additions(self.ids, self.tells_place, self.tells_end)
        additions.is_past = is_past
        additions.lost = lost
        return additions


def additions_of(code: int) -> Additions | None:
    """The additions of a subscription; None: it has none."""
    if not code & ~(LOG_READER | DRAINS):
        return None
    identifier = code & IDENTIFIER_MASK
    ids = (identifier,) if identifier else ()
    return Additions(ids, code & PLACE_WISH != 0, code & END_WISH != 0)


def identifier_of(additions: Additions | None) -> int:
    """The identifier of a subscription, 0 without one."""
    return additions.ids[0] if additions is not None and additions.ids else 0


def code_of(additions: Additions | None) -> int:
    """The code of a subscription's additions."""
    if additions is None:
        return 0
    code = identifier_of(additions)
    if additions.tells_place:
        code |= PLACE_WISH
    if additions.tells_end:
        code |= END_WISH
    return code


def merged(additions: list[Additions]) -> Additions | None:
    """The additions of overlapping subscriptions: all identifiers and all wishes."""
    if not additions:
        return None
    ids: list[int] = []
    tells_place = False
    tells_end = False
    for each in additions:
        ids.extend(each.ids)
        tells_place = tells_place or each.tells_place
        tells_end = tells_end or each.tells_end
    return Additions(tuple(ids), tells_place, tells_end)
