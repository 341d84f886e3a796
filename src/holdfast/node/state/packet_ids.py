"""QoS 2 packet ids of clients' own messages, as the replicated state has them.

A message and its release are in the partition of its topic, so an id is stored with the session
epoch of the message. Ids of an earlier life of the session are ignored. Counter-example: a clean
start is applied first, and then a QoS 2 record of the old session with packet id 7. A new message
with id 7 would be dropped as a repetition. The first record of a later life removes those of its
partition.
"""

from typing import Final

from holdfast.log.record import Record
from holdfast.node.session.rare_fields import NOT_TRUSTED
from holdfast.node.session.session import Session
from holdfast.node.state.inbound_ids import life_of
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.recovery import Recovery

NO_ID: Final = 0
"""A packet id that no packet has."""
NO_EPOCH: Final = -1
"""An epoch that no session has."""


class ReplicatedPacketIds(Recovery):
    """The part of the replicated state that recognises repeated QoS 2 messages."""

    def __init__(self, state: RecordedState) -> None:
        super().__init__(state)
        # Per client id: (partition, packet id) -> epoch of the session that sent it. With NO_ID:
        # the epoch of the newest session that sent or released an id in that partition.
        self.inbound: dict[str, dict[tuple[int, int], int]] = {}

    def _begin_life(self, session: Session, epoch: int) -> None:
        session.life = epoch

    def _note_inbound(self, record: Record) -> None:
        ids = self.inbound.setdefault(record.client_id.decode(), {})
        partition = record.partition
        if ids.get((partition, NO_ID), NO_EPOCH) < life_of(record):
            for place in [each for each in ids if each[0] == partition]:
                del ids[place]
        ids[(partition, record.sequence)] = record.producer_epoch
        ids[(partition, NO_ID)] = record.producer_epoch

    def _release_inbound(self, record: Record) -> None:
        client_id = record.client_id.decode()
        if self.is_superseded(client_id, record.partition, record.producer_epoch):
            return
        ids = self.inbound.setdefault(client_id, {})
        ids.pop((record.partition, record.sequence), None)
        ids[(record.partition, NO_ID)] = record.producer_epoch

    def is_superseded(self, client_id: str, partition: int, epoch: int) -> bool:
        """True if a later session of the client has sent or released a packet id in the
        partition."""
        ids = self.inbound.get(client_id)
        return ids is not None and epoch < ids.get((partition, NO_ID), 0)

    def life(self, record: Record) -> int:
        """Returns the epoch in which the life of the session began that sent the QoS 2 message.

        An older version does not write it. Then it is what the home partition says here, which may
        be that of an earlier life.
        """
        epoch = record.producer_epoch
        session = self.state.sessions.get(record.client_id.decode())
        return life_of(record) or (epoch if session is None else min(session.life, epoch))

    def inbound_at(self, client_id: str, partition: int, packet_id: int) -> int:
        """Returns the session epoch under which a QoS 2 message with this id is stored in the
        partition and not released, or NO_EPOCH.

        A message with the same id is a repetition unless its session's life began after that epoch.
        Only the record of that message says when it began. Counter-example: this node leads the
        topic's partition, and lags behind the session's home. The client begins with Clean Start,
        and its new message is taken for a repetition of the old session's.
        """
        ids = self.inbound.get(client_id)
        return NO_EPOCH if ids is None else ids.get((partition, packet_id), NO_EPOCH)

    def inbound_epoch(self, client_id: str) -> int:
        """Returns the epoch of the client's newest session with packet ids, or 0 without one."""
        ids = self.inbound.get(client_id)
        if ids is None:
            return 0
        partitions = range(self.state.config.partitions)
        return max(ids.get((partition, NO_ID), 0) for partition in partitions)

    def inbound_ids(self, client_id: str) -> dict[int, int]:
        """Returns packet id -> partition of the ids stored since the session began and not
        released."""
        return {packet_id: place[1] for packet_id, place in self._unreleased(client_id).items()}

    def doubtful_ids(self, client_id: str, generation: int) -> set[int] | None:
        """Returns those of `inbound_ids` that are from before the log was put back, or None.

        `generation`: that of the log. If another one opened the session, the leader of its home
        does not know it yet, or is of an older version. Then all of them count as doubtful, which
        concerns only clients that repeat a message without DUP.
        """
        session = self.state.sessions.get(client_id)
        known, first = NOT_TRUSTED if session is None else session.rare.trusted
        held = self._unreleased(client_id)
        return {each for each in held if known != generation or held[each][0] < first} or None

    def _unreleased(self, client_id: str) -> dict[int, tuple[int, int]]:
        """Returns packet id -> (epoch, partition) of the newest message with it."""
        session = self.state.sessions.get(client_id)
        born = 0 if session is None else session.life
        found: dict[int, tuple[int, int]] = {}
        for (partition, packet_id), epoch in self.inbound.get(client_id, {}).items():
            if epoch >= born and packet_id != NO_ID:
                found[packet_id] = max((epoch, partition), found.get(packet_id, NOT_TRUSTED))
        return found

    def _forget_inbound(self, client_id: str, epoch: int) -> None:
        """Removes the packet ids of an ended session, except those of a later session.

        Records of a later session may be applied first, because they are in other partitions.
        """
        ids = self.inbound.pop(client_id, {})
        later = {key: known for key, known in ids.items() if known > epoch}
        if later:
            self.inbound[client_id] = later
