"""Who asks for a session, as the leader of its home partition knows them."""

from collections.abc import Callable

from holdfast.broker.recovery.state_records import will_from
from holdfast.broker.state import Held, NodeState
from holdfast.cluster.context import number_of, text_of
from holdfast.cluster.frame_kinds import BadFrame


class SessionRequest:
    def __init__(self, node: str, fields: dict[str, object]) -> None:
        self.node = node
        self.number = number_of(fields, "request")
        self.client_id = text_of(fields, "client")
        self.clean_start = bool(fields["clean"])
        self.expiry_s = number_of(fields, "expiry_s")
        username = fields["username"]
        self.username = None if username is None else str(username)
        # The user it has proved to be, "" for none; None: its node does not tell, or nobody can
        # prove a name there.
        self.user: str | None = None
        if "user" in fields:
            user = fields["user"]
            self.user = "" if user is None else str(user)
        will = fields.get("will")
        try:
            self.will = will_from(will) if isinstance(will, dict) else None
        except (KeyError, ValueError, TypeError) as error:
            raise BadFrame(f"will: {error!r}") from None
        # Until when the owner before is waited for.
        self.deadline = 0.0
        self.waits_for = ""
        # Its `open` record is on its way.
        self.is_opening = False
        # Its node does not know it any more: another process runs there.
        self.is_orphan = False

    @property
    def recorded(self) -> bool:
        return self.expiry_s > 0 or self.will is not None


class HeldOpened(Held):
    """SESSION_OPENED of a session that the log must know first."""

    def __init__(self, committed: Callable[[], None], refused: Callable[[], None]) -> None:
        super().__init__()
        self._committed = committed
        self._refused = refused

    def release(self, state: NodeState) -> None:
        self._committed()

    def refuse(self, state: NodeState, reason: int, text: str) -> None:
        """This node does not lead the home any more, or not since then."""
        self._refused()
