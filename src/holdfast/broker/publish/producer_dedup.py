"""What a producer sequence (`hf-seq`) means for one PUBLISH, and for those after it: of QoS 1, and
of QoS 2 where the client has asked for that.

The order of a producer's messages survives a refusal that is not for good: once a sequence was
refused for want of space, every later one on the same connection is refused too, until the client
starts again from there. docs/producers.md has the whole contract.
"""

from typing import Final

from holdfast.broker.publish.producers import InvalidSequence, Producer, SequenceReader
from holdfast.broker.session.connection import Connection
from holdfast.broker.state import NodeState
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.publish import Publish
from holdfast.storage import record as log_record
from holdfast.storage.record import Record

HOLES_MAX: Final = 256
"""Producers with a refused sequence on one connection."""
EVICTION_BURST_S: Final = 60.0
"""Evictions closer together than this make one line in the log."""

UNNUMBERED: Final = 0
"""The message has no producer sequence."""
STORE: Final = 1
"""The table has it; the caller appends it, with the sequencer's fields."""
ANSWER: Final = 2
"""The caller sends the sequencer's `reason` and `text`, and nothing else."""


class Sequencer(SequenceReader):
    """One connection's side of it: what was read last, how to answer, and the holes."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = reasons.SUCCESS
        self.text = ""
        # Per producer id the (epoch, sequence) refused for want of space; at most HOLES_MAX.
        self.holes: dict[bytes, tuple[int, int]] = {}

    def answer(self, reason: int, text: str) -> int:
        self.reason = reason
        self.text = text
        return ANSWER

    def is_behind_hole(self) -> bool:
        """A hole is filled by what was refused, or anything before it. A higher epoch begins
        anew, so it is not held back."""
        hole = self.holes.get(self.producer_id)
        if hole is None:
            return False
        if self.epoch == hole[0] and self.sequence > hole[1]:
            return True
        del self.holes[self.producer_id]
        return False

    def note_refused(self, producer_id: bytes, epoch: int, sequence: int) -> bool:
        """A message that was accepted as STORE could not be stored after all, in a cluster. False
        if too many producers have a hole."""
        hole = self.holes.get(producer_id)
        if hole is not None:
            if hole[0] > epoch or (hole[0] == epoch and hole[1] <= sequence):
                return True
        elif len(self.holes) >= HOLES_MAX:
            return False
        self.holes[producer_id] = (epoch, sequence)
        return True

    def note_hole(self) -> None:
        if len(self.holes) >= HOLES_MAX:
            # A new connection starts without holes, and its client where it was.
            raise ProtocolViolation(
                reasons.QUOTA_EXCEEDED,
                f"disk full, and {HOLES_MAX} producers wait for space on this connection",
            )
        self.holes[self.producer_id] = (self.epoch, self.sequence)


def sequencer_of(connection: Connection) -> Sequencer:
    sequencer = connection.sequencer
    if sequencer is None:
        sequencer = Sequencer()
        connection.sequencer = sequencer
    assert isinstance(sequencer, Sequencer)
    return sequencer


def admit(
    state: NodeState,
    connection: Connection,
    sequencer: Sequencer,
    partition: int,
    publish: Publish,
    at: int,
) -> int:
    """UNNUMBERED, STORE or ANSWER for an authorised PUBLISH with PROPERTY_HEAD at `at` of
    its properties. Raises ProtocolViolation if too many producers wait for space."""
    try:
        if not sequencer.read(publish.properties, at):
            return UNNUMBERED
    except InvalidSequence as error:
        return sequencer.answer(reasons.PAYLOAD_FORMAT_INVALID, str(error))
    table = state.producers
    epoch = sequencer.epoch
    sequence = sequencer.sequence
    producer = table.by_id.get(sequencer.producer_id)
    place = None if producer is None else producer.place(partition)
    if place is None or place.stored_us < state.wall_us - table.expiry_us:
        place = None
        producer = table.find(sequencer.producer_id, state.wall_us)
    if producer is not None and producer.owner and not _may_use(state, connection, producer):
        state.stats.authorizations_denied += 1
        return sequencer.answer(reasons.NOT_AUTHORIZED, "the producer belongs to another user")
    is_stored = False
    if place is not None:
        if epoch < place.epoch:
            state.stats.producer_fenced += 1
            text = f"producer epoch is fenced: {epoch} is below {place.epoch}"
            return sequencer.answer(reasons.IMPLEMENTATION_SPECIFIC_ERROR, text)
        is_stored = epoch == place.epoch and sequence <= place.sequence
    if sequencer.holes and sequencer.is_behind_hole():
        state.stats.refused_disk_full += 1
        text = "an earlier sequence of the producer was refused: send that first"
        return sequencer.answer(reasons.QUOTA_EXCEEDED, text)
    if is_stored:
        state.stats.producer_duplicates += 1
        return sequencer.answer(reasons.SUCCESS, "")
    if state.disk_full:
        sequencer.note_hole()
        state.stats.refused_disk_full += 1
        return sequencer.answer(reasons.QUOTA_EXCEEDED, "")
    if state.config.authenticates_users or table.binds:
        _bind(state, connection, sequencer, partition, producer)
    if place is not None:
        table.advance(sequencer.producer_id, place, epoch, sequence, state.wall_us)
        return STORE
    evicted = table.store(
        sequencer.producer_id,
        partition,
        epoch,
        sequence,
        state.wall_us,
        connection.client_id.encode(),
    )
    if evicted:
        note_evicted(state, evicted)
    return STORE


def read_sequence(
    state: NodeState,
    connection: Connection,
    sequencer: Sequencer,
    partition: int,
    publish: Publish,
    at: int,
) -> int:
    """`admit` in a cluster, where the leader of the partition knows what is stored. Of two users
    who claim a new producer at two nodes at the same time both may write for a moment."""
    try:
        if not sequencer.read(publish.properties, at):
            return UNNUMBERED
    except InvalidSequence as error:
        return sequencer.answer(reasons.PAYLOAD_FORMAT_INVALID, str(error))
    producer = state.producers.by_id.get(sequencer.producer_id)
    if producer is not None and producer.owner and not _may_use(state, connection, producer):
        state.stats.authorizations_denied += 1
        return sequencer.answer(reasons.NOT_AUTHORIZED, "the producer belongs to another user")
    if sequencer.holes and sequencer.is_behind_hole():
        text = "an earlier sequence of the producer was refused: send that first"
        return sequencer.answer(reasons.QUOTA_EXCEEDED, text)
    if state.config.authenticates_users:
        owner = verified_user(state, connection)
        if producer is None or producer.place(partition) is None or producer.owner != owner:
            _append_owner(state, sequencer, partition, owner)
    return STORE


def _bind(
    state: NodeState,
    connection: Connection,
    sequencer: Sequencer,
    partition: int,
    producer: Producer | None,
) -> None:
    """Whose the producer is goes into each partition it writes to, before its first message there:
    so a log that has the message has this. First come."""
    known = "" if producer is None else producer.owner
    owner = known or verified_user(state, connection)
    if owner == known and producer is not None and producer.place(partition) is not None:
        return
    state.producers.bind(sequencer.producer_id, partition, owner, state.wall_us)
    if state.producers.binds:
        _append_owner(state, sequencer, partition, owner)


def _append_owner(state: NodeState, sequencer: Sequencer, partition: int, owner: str) -> None:
    state.append(
        Record(
            partition,
            log_record.PRODUCER,
            flags=log_record.FLAG_PRODUCER,
            timestamp_us=state.wall_us,
            client_id=owner.encode(),
            producer=sequencer.producer_id,
            producer_epoch=sequencer.epoch,
            sequence=sequencer.sequence,
        )
    )


def note_refused(state: NodeState, connection: Connection, record: Record) -> None:
    """If its producer has numbered the message: nothing later of the producer is taken on this
    connection before it."""
    if not record.flags & log_record.FLAG_PRODUCER:
        return
    sequencer = sequencer_of(connection)
    if not sequencer.note_refused(record.producer, record.producer_epoch, record.sequence):
        # A new connection starts without holes, and its client where it was.
        connection.close(state.dirty)


def note_evicted(state: NodeState, evicted: int) -> None:
    state.stats.producer_evicted += evicted
    if not state.producers_noted_at or state.now >= state.producers_noted_at + EVICTION_BURST_S:
        state.note("warning", "producers_evicted", {"producers_max": state.config.producers_max})
    state.producers_noted_at = state.now


def _may_use(state: NodeState, connection: Connection, producer: Producer) -> bool:
    if not state.config.authenticates_users:
        return True
    return verified_user(state, connection) == producer.owner


def verified_user(state: NodeState, connection: Connection) -> str:
    """The user that the client has proved to be, "" if it has proved nothing."""
    return connection.username or ""
