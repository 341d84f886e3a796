"""Fields that few sessions need, kept apart to save memory. An idle client pays 8 bytes."""

from typing import Final

from holdfast.node.session.cursor import Cursor

NOT_TRUSTED: Final = (0, 0)
"""`Rarities.trusted` of a session that was opened in no log that was put back."""
FREED_BYTES: Final = 8192
"""A bit for each packet id, in sessions of a log that was put back, with QoS 2 to the client."""


class OwedRetained:
    """The part of a retained set that a subscription has not been sent: the topics behind `after`
    in the order of the store. `seam`: the offset per partition from which the subscription gets
    messages otherwise; None: from where the session continues."""

    def __init__(self, after: str = "", seam: list[int] | None = None) -> None:
        self.after = after
        self.seam = seam
        self.is_complete = False
        # It continues one of before a crash, or of another node.
        self.is_resumed = False
        # Whether the log says that something is owed, and whether it has the seam.
        self.is_logged = False
        self.is_seam_logged = False


class Rarities:
    """The state of a session that was without a client, or that a crash or lost records concern."""

    def __init__(self) -> None:
        # The time of the last disconnect in microseconds since 1970; 0: there was none.
        self.disconnected_us = 0
        # The timers of the delayed will and of the session's end. A fired or cancelled one may
        # still be here.
        self.will_timer: object | None = None
        self.expiry_timer: object | None = None
        # After a crash: per partition, the offset below which messages may have been sent before.
        self.maybe_sent: list[int] | None = None
        # The records that retention or damage took before the next message.
        self.lost = 0
        # The packet ids in `inbound` that are from before the log was put back.
        self.doubtful: set[int] | None = None
        self.freed: bytearray | None = None
        # By filter: the retained sets that are not sent completely, and those that have changed
        # since the session was logged, complete ones included.
        self.owed: dict[str, OwedRetained] | None = None
        self.owed_changes: dict[str, OwedRetained] | None = None
        # The places (partition, offset) of retained messages that have had a packet id since the
        # log last said how far the sets were sent. A resumed set passes them.
        self.owed_inflight: set[tuple[int, int]] | None = None
        # The packet ids of inflight messages that the cursor has not reached since the connection
        # began, by place (partition, offset). Each is sent again when the cursor reaches it.
        self.inflight_ahead: dict[tuple[int, int], int] | None = None
        # Of a cluster's replicated state only. `requests`: the newest numbers of nodes' requests
        # that opened the session, that of its owner last. `trusted`: the newest generation of the
        # log in which it was opened, unless that is 0, and the epoch of the first time. Packet ids
        # of earlier epochs are doubtful.
        self.requests: tuple[int, ...] = ()
        self.trusted = NOT_TRUSTED
        # Whether its node failed during or before the newest connection, so that the cursor may
        # lack messages that the node had sent last.
        self.lacks_sent = False
        # Whether its last connection was at this node, and had nothing left to replay.
        self.replays_over = False


NO_RARITIES: Final = Rarities()
"""The rare fields that all sessions without any of their own share. Nothing writes to them."""


class RareState(Cursor):
    """A cursor that gets its rare fields with `own_rare` when one of them is to be set."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = NO_RARITIES

    def own_rare(self) -> Rarities:
        """The rare fields to write to. They take 200 bytes, so a reader uses `rare`."""
        if self.rare is NO_RARITIES:
            self.rare = Rarities()
        return self.rare

    def owe(self, filter: str, owed: OwedRetained) -> None:
        """Begins a retained set, or begins it again."""
        rare = self.own_rare()
        if rare.owed is None:
            rare.owed = {}
        rare.owed[filter] = owed

    def note_owed(self, filter: str, owed: OwedRetained) -> None:
        """Notes a change of a retained set for the log."""
        rare = self.own_rare()
        if rare.owed_changes is None:
            rare.owed_changes = {}
        rare.owed_changes[filter] = owed
        if owed.is_complete:
            self._pop_owed(filter)

    def pop_owed_changes(self) -> dict[str, OwedRetained]:
        """Removes and returns the changes."""
        changes = self.rare.owed_changes
        if changes is None:
            return {}
        self.rare.owed_changes = None
        return changes

    def forget_owed(self, filter: str) -> None:
        """Owes nothing for a filter: its subscription has ended."""
        self._pop_owed(filter)
        if self.rare.owed_changes is not None:
            self.rare.owed_changes.pop(filter, None)

    def _pop_owed(self, filter: str) -> None:
        rare = self.rare
        if rare.owed is not None and rare.owed.pop(filter, None) is not None and not rare.owed:
            rare.owed = None
            rare.owed_inflight = None


def pop_ahead(session: RareState, place: tuple[int, int], wanted: int = 0) -> int:
    """Removes and returns the packet id of an inflight message ahead of the cursor; 0: it is not
    ahead, or it is not the `wanted` one."""
    ahead = session.rare.inflight_ahead
    packet_id = 0 if ahead is None else ahead.get(place, 0)
    if ahead is None or not packet_id or packet_id != (wanted or packet_id):
        return 0
    del ahead[place]
    if not ahead:
        session.rare.inflight_ahead = None
    return packet_id


def frees_first(session: RareState, packet_id: int) -> bool:
    """Whether this is the first QoS 2 message to the client with this packet id. It becomes False
    for the id. FREED_BYTES are kept for the session."""
    rare = session.own_rare()
    if rare.freed is None:
        rare.freed = bytearray(FREED_BYTES)
    at, bit = packet_id >> 3, 1 << (packet_id & 7)
    if rare.freed[at] & bit:
        return False
    rare.freed[at] |= bit
    return True
