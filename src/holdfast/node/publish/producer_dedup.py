"""Drops repeated PUBLISHes by their producer sequence (`hf-seq`): at QoS 1, and at QoS 2 if the
client has asked for that.

A temporary refusal keeps the order of a producer's messages. Once a sequence was refused for want
of space, or by a rate or bound, every later one on the same connection is refused too, until the
client starts again from there. docs/producers.md has the whole contract.
"""

from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.node_state import NodeState
from holdfast.node.publish.producers import (
    InvalidSequence,
    Producer,
    SequenceReader,
    forgotten,
)
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import Connection
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import Disconnect
from holdfast.protocol.mqtt.publish import Publish

REFUSED_PRODUCERS_MAX: Final = 256
"""The most producers with a refused sequence on one connection."""

UNNUMBERED: Final = 0
"""The outcome for a message without a producer sequence."""
STORE: Final = 1
"""The outcome for a new message. The table has it; the caller appends it with the sequencer's
fields."""
REPLY: Final = 2
"""The outcome for a message that is not stored. The caller sends the sequencer's `refusal`."""

OTHER_USER: Final = Rejection("the producer belongs to another user", reasons.NOT_AUTHORIZED)
FOLLOWS_REFUSED: Final = Rejection(
    "an earlier sequence of the producer was refused: send that first"
)


class Sequencer(SequenceReader):
    """The producer sequences of one connection: the last one read, the reply to it, and those
    refused. Invariant: on this connection no later sequence of a producer is stored before a
    refused one.
    """

    def __init__(self) -> None:
        super().__init__()
        # The reply to the last one: a refusal; None: it was stored before.
        self.refusal: Rejection | None = None
        # Producer id -> the first (epoch, sequence) refused for want of space.
        self.refused_sequences: dict[bytes, tuple[int, int]] = {}

    def reply(self, refusal: Rejection | None) -> int:
        """Records the reply and returns REPLY."""
        self.refusal = refusal
        return REPLY

    def follows_refused(self) -> bool:
        """Whether the message comes after a refused one of its producer. The refused message, or
        an earlier one, ends that. A higher epoch starts again, so no refusal affects it."""
        refused = self.refused_sequences.get(self.producer_id)
        if refused is None:
            return False
        if self.epoch == refused[0] and self.sequence > refused[1]:
            return True
        del self.refused_sequences[self.producer_id]
        return False

    def note_refused(self, producer_id: bytes, epoch: int, sequence: int) -> bool:
        """Records the refusal of a message that was accepted as STORE and that the cluster refused
        later. False: too many producers wait."""
        refused = self.refused_sequences.get(producer_id)
        if refused is not None:
            if refused[0] > epoch or (refused[0] == epoch and refused[1] <= sequence):
                return True
        elif len(self.refused_sequences) >= REFUSED_PRODUCERS_MAX:
            return False
        self.refused_sequences[producer_id] = (epoch, sequence)
        return True

    def note_refused_for_now(self) -> None:
        """Records that the message is refused for now."""
        if len(self.refused_sequences) >= REFUSED_PRODUCERS_MAX:
            # A new connection starts without refusals, and its client where it was.
            raise ProtocolViolation(
                reasons.QUOTA_EXCEEDED,
                f"no space, and {REFUSED_PRODUCERS_MAX} producers wait for it on this connection",
            )
        self.refused_sequences[self.producer_id] = (self.epoch, self.sequence)


def sequencer_of(connection: Connection) -> Sequencer:
    """The Sequencer of a connection, made on first use."""
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
    refusal: Rejection | None,
) -> int:
    """UNNUMBERED, STORE or REPLY for an authorised PUBLISH with PROPERTY_HEAD at `at` of its
    properties. `refusal`: the reason why nothing new may be stored now. Raises
    `ProtocolViolation` if too many producers wait for space.

    The table has what is applied here, which decides for good. The leader of the partition decides
    about the rest. If two users claim a new producer at two nodes at the same time, both may write
    for a short time.
    """
    try:
        if not sequencer.read(publish.properties, at):
            return UNNUMBERED
    except InvalidSequence as error:
        return sequencer.reply(Rejection(str(error), reasons.PAYLOAD_FORMAT_INVALID))
    table = state.producers
    epoch = sequencer.epoch
    sequence = sequencer.sequence
    place = table.find_position(sequencer.producer_id, partition, state.wall_us)
    producer = table.find(sequencer.producer_id, state.wall_us)
    if producer is not None and producer.owner and not _may_use(state, connection, producer):
        state.stats.authorizations_denied += 1
        return sequencer.reply(OTHER_USER)
    is_stored = False
    if place is not None:
        if epoch < place.epoch:
            state.stats.producer_fenced += 1
            text = f"producer epoch is fenced: {epoch} is below {place.epoch}"
            return sequencer.reply(Rejection(text, reasons.IMPLEMENTATION_SPECIFIC_ERROR))
        is_stored = epoch == place.epoch and sequence <= place.sequence
    if sequencer.refused_sequences and sequencer.follows_refused():
        state.stats.refused_disk_full += 1
        return sequencer.reply(FOLLOWS_REFUSED)
    if is_stored:
        state.stats.producer_duplicates += 1
        return sequencer.reply(None)
    if refusal is not None:
        sequencer.note_refused_for_now()
        return sequencer.reply(refusal)
    _bind(state, connection, sequencer, partition, producer)
    return STORE


def _bind(
    state: NodeState,
    connection: Connection,
    sequencer: Sequencer,
    partition: int,
    producer: Producer | None,
) -> None:
    """Appends the producer's user to each partition that it writes to, before its first message
    there. So a log that has the message has the user. The first user to write owns the producer."""
    if not (state.config.authenticates_users or state.producers.binds):
        return
    known = "" if producer is None else producer.owner
    owner = known or verified_user(state, connection)
    if owner == known and producer is not None and producer.position(partition) is not None:
        return
    if owner or state.producers.binds:
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
    """Records the sequence of a refused message, if it has one. Later ones are then refused on
    this connection until it is stored."""
    if not record.flags & log_record.FLAG_PRODUCER:
        return
    sequencer = sequencer_of(connection)
    if not sequencer.note_refused(record.producer, record.producer_epoch, record.sequence):
        # A new connection starts without refusals, and its client where it was.
        if connection.version >= 5:
            packet = Disconnect(reasons.QUOTA_EXCEEDED, {})
            connection.send(encode(packet, connection.version), state.dirty)
        connection.close(state.dirty)


def forget_some(state: NodeState) -> None:
    """Appends that some expired producers, and those above the limit, are forgotten.

    The leader of partition 0 does so, with whatever it applies: of several nodes each would choose
    the same producers.
    """
    table = state.producers
    expired = table.expired(state.wall_us)
    excess = table.excess()
    if excess:
        state.stats.producer_evicted += len(excess)
        if state.repeats.count("producers_evicted", state.now):
            fields: dict[str, object] = {"producers_max": state.config.producers_max}
            state.note("warning", "producers_evicted", fields)
    for producer_id, place in expired + excess:
        state.append(forgotten(producer_id, place, state.wall_us))


def _may_use(state: NodeState, connection: Connection, producer: Producer) -> bool:
    if not state.config.authenticates_users:
        return True
    return verified_user(state, connection) == producer.owner


def verified_user(state: NodeState, connection: Connection) -> str:
    """The user name that the client has proved, or ""."""
    return connection.username or ""
