"""Packet ids of clients' own QoS 2 messages, as the log has them.

A message and its release are in the partition of its topic, and the session is in its home
partition. The batches of a write group are not in the order of their records, so an id may come
before the session that used it. The epoch says to which life of the session it belongs.
"""

from typing import Final

from holdfast.log.record import Record
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import RecordedState

LIFE_DIGITS_MAX: Final = 10
"""The most digits of an epoch, which has 32 bits."""
EARLY_MAX = 10_000
"""The most clients with packet ids of sessions not opened yet: more than a write group has."""


def life_of(record: Record) -> int:
    """The epoch in which the life of the session began that sent a QoS 2 message; 0 if the record
    does not say so, because a single node or an older version wrote it."""
    digits = record.producer
    return int(digits) if len(digits) <= LIFE_DIGITS_MAX and digits.isdigit() else 0


class SenderPacketIds:
    """The part of recovery that gives sessions the packet ids that are not released."""

    def __init__(self, state: RecordedState) -> None:
        self.state = state
        # Per client id, the lowest epoch whose packet ids belong to its session. For a session of a
        # snapshot it is the snapshot's: earlier ids are in the snapshot, or were released.
        self._first_epochs: dict[str, int] = {}
        # Per client id, the packet ids (partition, epoch) of a session that a later batch opens.
        self._early_ids: dict[str, dict[int, tuple[int, int]]] = {}

    def _note_inbound(self, record: Record) -> None:
        """Records the packet id of a QoS 2 message. Records without an epoch (0, older versions)
        count."""
        client_id = record.client_id.decode()
        epoch = record.producer_epoch
        session = self.state.sessions.get(client_id)
        if epoch and (session is None or epoch > session.epoch):
            if client_id not in self._early_ids and len(self._early_ids) >= EARLY_MAX:
                del self._early_ids[next(iter(self._early_ids))]
            ids = self._early_ids.setdefault(client_id, {})
            ids[record.sequence] = (record.partition, epoch)
        elif session is not None and not 0 < epoch < self._first_epochs.get(client_id, 0):
            session.hold_inbound(record.sequence, record.partition)

    def _begin_life(self, session: Session, epoch: int) -> None:
        """Notes the epoch in which a session began, or that of its snapshot."""
        self._first_epochs[session.client_id] = epoch

    def _apply_early_ids(self, session: Session) -> None:
        """Gives a session that was just opened the packet ids that were used since."""
        early = self._early_ids.pop(session.client_id, {})
        for packet_id, (partition, epoch) in early.items():
            if epoch >= session.epoch:
                session.hold_inbound(packet_id, partition)

    def _release_inbound(self, record: Record) -> None:
        client_id = record.client_id.decode()
        session = self.state.sessions.get(client_id)
        if session is None or session.inbound is None:
            return
        if 0 < record.producer_epoch < self._first_epochs.get(client_id, 0):
            return
        # The id may have been used again since, for a message of another partition.
        if session.inbound.get(record.sequence) == record.partition:
            del session.inbound[record.sequence]
