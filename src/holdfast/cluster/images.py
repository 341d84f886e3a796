"""What the committed records say: sessions, retained messages, producers.

Every node has it whole, and on every node it is the same at the same offsets: only committed
records change it. Live connections have their own state, in the node where they are; what they
append comes back here.

Records of one partition arrive in order, those of several partitions do not. So QoS 2 packet ids
and wills, which are told in the partitions of their messages, are kept by session epoch: what
belongs to an earlier life of a session does not count.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.recovery import (
    SNAPSHOT_GROUP,
    SNAPSHOT_SESSION,
    Recovery,
    session_fields,
    snapshot_entries,
)
from holdfast.node.state import NodeState
from holdfast.session.session import Session

FIRED_MAX: Final = 20_000
"""Wills remembered as published. Of one that is older nobody asks again."""
ENDED_MAX: Final = 20_000
"""Sessions remembered that have ended. Of one that is older nothing is on its way any more."""
SNAPSHOT_EPOCHS: Final = 100
"""JSON: `fired` and `ended`."""


class Images(Recovery):
    def __init__(self, state: NodeState) -> None:
        super().__init__(state)
        # Per client id: (partition, packet id) -> epoch of the session that sent it.
        self.inbound: dict[str, dict[tuple[int, int], int]] = {}
        # Per session: the epoch in which it began.
        self.born: dict[str, int] = {}
        # Per client id the newest session epoch whose will was published.
        self.fired: OrderedDict[str, int] = OrderedDict()
        # Per client id the epoch of the newest session that has ended.
        self.ended: OrderedDict[str, int] = OrderedDict()

    def apply_snapshot_entry(self, kind: int, data: bytes) -> None:
        if kind != SNAPSHOT_EPOCHS:
            super().apply_snapshot_entry(kind, data)
            return
        fields = json.loads(data)
        self.fired = OrderedDict(fields["fired"])
        self.ended = OrderedDict(fields["ended"])

    def _note_inbound(self, record: Record) -> None:
        ids = self.inbound.setdefault(record.client_id.decode(), {})
        ids[(record.partition, record.sequence)] = record.producer_epoch

    def _release_inbound(self, record: Record) -> None:
        client_id = record.client_id.decode()
        ids = self.inbound.get(client_id)
        if ids is not None:
            ids.pop((record.partition, record.sequence), None)
            if not ids:
                del self.inbound[client_id]

    def is_inbound(self, client_id: str, partition: int, packet_id: int, epoch: int) -> bool:
        """Is a QoS 2 message with this id stored in the partition and not released? `epoch`: of
        the session that asks."""
        ids = self.inbound.get(client_id)
        if ids is None:
            return False
        stored_epoch = ids.get((partition, packet_id), -1)
        return stored_epoch >= self.born.get(client_id, epoch)

    def _will_done(self, client_id: str, epoch: int) -> None:
        super()._will_done(client_id, epoch)
        _remember(self.fired, client_id, epoch, FIRED_MAX)

    def has_fired(self, client_id: str, epoch: int) -> bool:
        return self.fired.get(client_id, -1) >= epoch

    def _change_session(self, fields: dict[str, object], timestamp_us: int, epoch: int) -> None:
        client_id = str(fields["client"])
        before = self.state.sessions.get(client_id)
        super()._change_session(fields, timestamp_us, epoch)
        after = self.state.sessions.get(client_id)
        if after is before:
            return
        if before is not None:
            _remember(self.ended, client_id, epoch, ENDED_MAX)
        if after is None:
            self.born.pop(client_id, None)
            self.inbound.pop(client_id, None)
        else:
            self.born[client_id] = after.epoch

    def _restore_session(self, fields: dict[str, object]) -> Session:
        session = super()._restore_session(fields)
        self.born[session.client_id] = int(str(fields.get("born", session.epoch)))
        inbound = fields["inbound"]
        assert isinstance(inbound, list)
        if inbound:
            self.inbound[session.client_id] = {
                (int(partition), int(packet_id)): session.epoch for packet_id, partition in inbound
            }
        session.inbound = None
        return session

    def settle_one(self, session: Session) -> bool:
        """See Recovery.settle. False if the session has no connection and has expired."""
        if session not in self.touched:
            return True
        self.touched.discard(session)
        self._settle(session)
        return session in self.open or self._rearm(session)

    def fields(self, session: Session) -> dict[str, object]:
        """The session as a snapshot's entry."""
        self.settle_one(session)
        fields = session_fields(self.state, session)
        born = self.born.get(session.client_id, session.epoch)
        fields["born"] = born
        ids = self.inbound.get(session.client_id, {})
        fields["inbound"] = [
            [packet_id, partition] for (partition, packet_id), epoch in ids.items() if epoch >= born
        ]
        return fields

    def snapshot(self) -> Iterator[tuple[int, bytes]]:
        """Entries for a snapshot file; the state may move on between two of them."""
        for session in list(self.state.sessions.values()):
            if self.state.sessions.get(session.client_id) is session:
                data = json.dumps(self.fields(session), ensure_ascii=False, separators=(",", ":"))
                yield SNAPSHOT_SESSION, data.encode()
        for key, positions in list(self.group_positions.items()):
            place = {"key": key, "positions": positions}
            yield SNAPSHOT_GROUP, json.dumps(place, separators=(",", ":")).encode()
        for kind, entry in snapshot_entries(self.state):
            if kind not in (SNAPSHOT_SESSION, SNAPSHOT_GROUP):
                yield kind, entry
        epochs = {"fired": list(self.fired.items()), "ended": list(self.ended.items())}
        yield SNAPSHOT_EPOCHS, json.dumps(epochs, separators=(",", ":")).encode()


def _remember(epochs: OrderedDict[str, int], client_id: str, epoch: int, count_max: int) -> None:
    if epoch > epochs.get(client_id, -1):
        epochs[client_id] = epoch
        epochs.move_to_end(client_id)
        if len(epochs) > count_max:
            epochs.popitem(last=False)


def changes_images(record: Record) -> bool:
    """Does the record matter beyond being delivered?"""
    return record.kind != log_record.MESSAGE or record.flags & STATE_FLAGS != 0


STATE_FLAGS: Final = (
    log_record.FLAG_RETAIN
    | log_record.FLAG_PACKET_ID
    | log_record.FLAG_PRODUCER
    | log_record.FLAG_WILL
)
