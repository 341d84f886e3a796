"""The state that few sessions have. An idle client pays 8 bytes for it."""

from holdfast.broker.session.cursor import Cursor


class Rarities:
    """The state of a session that was without a client, or that a crash or lost records concern."""

    def __init__(self) -> None:
        self.disconnected_us = 0
        self.will_timer: object | None = None
        self.expiry_timer: object | None = None
        self.maybe_sent: list[int] | None = None
        self.lost = 0
        self.doubtful: set[int] | None = None


class RareState(Cursor):
    """A cursor that gets its rarities when one of them is set."""

    def __init__(self) -> None:
        super().__init__()
        self._rarities: Rarities | None = None

    @property
    def disconnected_us(self) -> int:
        """The time of the last disconnect in microseconds since 1970; 0: there was none."""
        return 0 if self._rarities is None else self._rarities.disconnected_us

    @disconnected_us.setter
    def disconnected_us(self, value: int) -> None:
        self._rare().disconnected_us = value

    @property
    def will_timer(self) -> object | None:
        """The timer of the delayed will. A fired or cancelled one may still be here."""
        return None if self._rarities is None else self._rarities.will_timer

    @will_timer.setter
    def will_timer(self, value: object | None) -> None:
        self._rare().will_timer = value

    @property
    def expiry_timer(self) -> object | None:
        """The timer of the session's end. A fired or cancelled one may still be here."""
        return None if self._rarities is None else self._rarities.expiry_timer

    @expiry_timer.setter
    def expiry_timer(self, value: object | None) -> None:
        self._rare().expiry_timer = value

    @property
    def maybe_sent(self) -> list[int] | None:
        """After a crash: per partition, the offset below which messages may have been sent
        before."""
        return None if self._rarities is None else self._rarities.maybe_sent

    @maybe_sent.setter
    def maybe_sent(self, value: list[int] | None) -> None:
        if value is not None or self._rarities is not None:
            self._rare().maybe_sent = value

    @property
    def lost(self) -> int:
        """The records that retention or damage took before the next message."""
        return 0 if self._rarities is None else self._rarities.lost

    @lost.setter
    def lost(self, value: int) -> None:
        if value or self._rarities is not None:
            self._rare().lost = value

    @property
    def doubtful(self) -> set[int] | None:
        """The packet ids in `inbound` that are from before the log was put back."""
        return None if self._rarities is None else self._rarities.doubtful

    @doubtful.setter
    def doubtful(self, value: set[int] | None) -> None:
        if value is not None or self._rarities is not None:
            self._rare().doubtful = value

    def _rare(self) -> Rarities:
        rarities = self._rarities
        if rarities is None:
            rarities = self._rarities = Rarities()
        return rarities
