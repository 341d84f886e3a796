"""Who has a session, and who asks for one, as the leader of its home partition knows them."""

from holdfast.cluster.fabric import number_of, text_of
from holdfast.node.recording import will_from
from holdfast.replication.kinds import BadFrame


class Owner:
    """`recorded`: the log knows."""

    def __init__(self, node: str, epoch: int, recorded: bool, request: int = 0) -> None:
        self.node = node
        self.epoch = epoch
        self.recorded = recorded
        # With which it asked.
        self.request = request


class Request:
    def __init__(self, node: str, fields: dict[str, object]) -> None:
        self.node = node
        self.number = number_of(fields, "request")
        self.client_id = text_of(fields, "client")
        self.clean_start = bool(fields["clean"])
        self.expiry_s = number_of(fields, "expiry_s")
        username = fields["username"]
        self.username = None if username is None else str(username)
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
