"""Admits records at the leader: it stores a repeated record only once.

Repetitions are recognised by QoS 2 packet ids, producer sequences and the session epochs of wills.
The replicated state has those of the committed records. `UncommittedState` has those of appended
records that are not committed. It is rebuilt from the log when this node becomes leader of a
partition, and dropped when it stops.

Invariant: both give the same verdict about a record, wherever the commit is between the records
before it. A verdict depends on the record and on earlier ones of its partition. Another partition
may lag here. Therefore a QoS 2 record names the epoch in which the life of its session began, and
repeats only a message that was stored since. Counter-example: a device begins with Clean Start and
uses its lowest packet id for a new message. The message of its old session with that id is not
committed yet. Without the life, the new message would be acknowledged and not stored.

Invariant: a repetition is acknowledged only when everything appended before it is committed.
Counter-example: the original record is appended and not committed. The leader acknowledges the
repetition and dies, and the next leader has no such record.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.batch import ATTRIBUTE_STATE, Batch
from holdfast.log.record import Record
from holdfast.node.context import ClusterContext
from holdfast.node.delivery.log_replay import message_of
from holdfast.node.frame_kinds import FORWARD_RESULT
from holdfast.node.node_state import NodeState
from holdfast.node.publish.completion import removal
from holdfast.node.publish.delayed_table import is_due, is_waiting
from holdfast.node.publish.forward_frames import ForwardResult, encode_result
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.offset_voider import OffsetVoider
from holdfast.node.publish.pending_records import Appender, PendingRecord
from holdfast.node.publish.producers import forgets
from holdfast.node.refusal import EARLIER_REFUSED, Rejection
from holdfast.node.state.packet_ids import NO_EPOCH
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.retained_store import (
    NO_MESSAGE,
    NOTHING,
    Amount,
    Retained,
    add,
    retained_of,
)
from holdfast.protocol.mqtt import reasons

NO_FLAG: Final = 0


class UncommittedState:
    """The packet ids, sequences and wills in the uncommitted records of one partition that this
    node leads."""

    def __init__(self) -> None:
        # (client id, packet id) -> (session epoch of the stored message, NO_EPOCH if it is
        # released; offset)
        self.inbound: dict[tuple[bytes, int], tuple[int, int]] = {}
        # client id -> (epoch of the newest session that stored or released a packet id, offset)
        self.sessions: dict[bytes, tuple[int, int]] = {}
        # producer id -> (epoch, sequence, time in microseconds, offset). NO_EPOCH: it is forgotten.
        self.producers: dict[bytes, tuple[int, int, int, int]] = {}
        # client id -> (session epoch, offset)
        self.wills: dict[bytes, tuple[int, int]] = {}
        # Topic -> (bytes of its retained message, 0 if it is removed; its owner, offset).
        self.retained: dict[bytes, tuple[int, str, int]] = {}
        # By how much these records will change the retained store, and the share of each owner.
        self.retained_growth = NOTHING
        self.retained_by: dict[str, Amount] = {}
        # (offset, topic, its entry in `retained` and the one before) of each change, in order.
        self._retained_changes: deque[tuple[int, bytes, Retained, Retained]] = deque()
        # Client id or key of a queue -> offset of its newest SESSION record.
        self.changes: dict[bytes, int] = {}
        # Offset of a delayed message -> offset of the record that ends it.
        self.delayed: dict[int, int] = {}
        # (offset, record kind or flag, key) in order. Invariant: each value above has its entry.
        self._entries: deque[tuple[int, int, tuple[bytes, int]]] = deque()
        # Per node, the attempt in which one of its records was refused. No later record of that
        # attempt is stored.
        self.refused: dict[str, int] = {}
        # Repetitions that wait for a commit: (offset, origin, ticket)
        self.repeated: deque[tuple[int, str, int]] = deque()

    def note(self, record: Record) -> None:
        """Adds what the appended record says."""
        offset = record.offset
        assert not self._entries or self._entries[-1][0] < offset, "records come out of order"
        kind = record.kind
        flags = record.flags
        client_id = record.client_id
        epoch = record.producer_epoch
        sequence = record.sequence
        if kind == log_record.DELAYED or (flags & log_record.FLAG_DELAYED and is_due(record)):
            self.delayed[sequence] = offset
            self._entries.append((offset, log_record.FLAG_DELAYED, (b"", sequence)))
        elif kind == log_record.RELEASE:
            key = (client_id, sequence)
            self.inbound[key] = (NO_EPOCH, offset)
            self.sessions[client_id] = (epoch, offset)
            self._entries.append((offset, log_record.FLAG_PACKET_ID, key))
        elif kind == log_record.WILL or flags & log_record.FLAG_WILL:
            if sequence >= self.wills.get(client_id, (0, 0))[0]:
                self.wills[client_id] = (sequence, offset)
                self._entries.append((offset, log_record.FLAG_WILL, (client_id, 0)))
        elif kind == log_record.SESSION:
            self.changes[client_id] = offset
            self._entries.append((offset, NO_FLAG, (client_id, 0)))
        elif kind == log_record.FORGOTTEN:
            self._note_producer(record, NO_EPOCH)
        elif kind != log_record.MESSAGE:
            return
        elif flags & log_record.FLAG_PACKET_ID:
            key = (client_id, sequence)
            self.inbound[key] = (epoch, offset)
            self.sessions[client_id] = (epoch, offset)
            self._entries.append((offset, log_record.FLAG_PACKET_ID, key))
        elif flags & log_record.FLAG_PRODUCER:
            self._note_producer(record, epoch)

    def _note_producer(self, record: Record, epoch: int) -> None:
        position = (epoch, record.sequence, record.timestamp_us, record.offset)
        self.producers[record.producer] = position
        self._entries.append((record.offset, log_record.FLAG_PRODUCER, (record.producer, 0)))

    def note_retained(self, record: Record, before: Retained) -> None:
        """Adds an appended record that sets or clears a retained topic. `before`: the topic's
        message until now."""
        after = retained_of(message_of(record)) if record.payload else NO_MESSAGE
        self.retained[record.topic] = (*after, record.offset)
        self._retained_changes.append((record.offset, record.topic, after, before))
        self._count_retained(after, 1)
        self._count_retained(before, -1)

    def _count_retained(self, retained: Retained, sign: int) -> None:
        size, owner = retained
        if size:
            self.retained_growth = add(self.retained_growth, (sign * size, sign))
            own = add(self.retained_by.pop(owner, NOTHING), (sign * size, sign))
            if own != NOTHING:
                self.retained_by[owner] = own

    def check(self, applied: int) -> None:
        """Raises `AssertionError` for an invariant that does not hold. `applied`: the first offset
        that the replicated state does not have."""
        offsets = {offset for offset, _, _ in self._entries}
        assert all(offset >= applied for offset in offsets), "an applied record is uncommitted"
        known = {offset for _, offset in (*self.inbound.values(), *self.sessions.values())}
        known.update(each[-1] for each in self.producers.values())
        known.update(offset for _, offset in self.wills.values())
        known.update(self.changes.values(), self.delayed.values())
        assert known <= offsets, "a value without its entry"
        ends = [end for end, _, _ in self.repeated]
        assert ends == sorted(ends), "repetitions out of order"

    def forget_below(self, offset: int) -> None:
        """Removes the records below `offset`, which the replicated state has now."""
        changes = self._retained_changes
        while changes and changes[0][0] < offset:
            at, topic, after, before = changes.popleft()
            self._count_retained(after, -1)
            self._count_retained(before, 1)
            if self.retained.get(topic, (0, "", -1))[2] == at:
                del self.retained[topic]
        entries = self._entries
        while entries and entries[0][0] < offset:
            at, flag, key = entries.popleft()
            if flag == log_record.FLAG_PACKET_ID:
                if self.inbound.get(key, (NO_EPOCH, -1))[1] == at:
                    del self.inbound[key]
                if self.sessions.get(key[0], (0, -1))[1] == at:
                    del self.sessions[key[0]]
            elif flag == NO_FLAG:
                if self.changes.get(key[0], -1) == at:
                    del self.changes[key[0]]
            elif flag == log_record.FLAG_DELAYED:
                if self.delayed.get(key[1], -1) == at:
                    del self.delayed[key[1]]
            elif flag == log_record.FLAG_WILL:
                if self.wills.get(key[0], (0, -1))[1] == at:
                    del self.wills[key[0]]
            elif self.producers.get(key[0], (0, 0, 0, -1))[3] == at:
                del self.producers[key[0]]


NO_ATTEMPT: Final = -2
"""The attempt number of this node's own records, which need none: this node sees a refusal at
once."""
OTHER_OWNER: Final = Rejection("another node has the session", reasons.SESSION_TAKEN_OVER)
VOIDING: Final = Rejection("offsets of lost records are made void first")
FEW_REPLICAS: Final = Rejection("too few replicas are in sync")
DISK_FULL: Final = Rejection("the leader's disk is full")
DELAY_OVER: Final = Rejection(
    "it was published or cancelled before, or that is on its way to the log",
    reasons.IMPLEMENTATION_SPECIFIC_ERROR,
)
STORE: Final = 0
REPEATED: Final = 1
REFUSED: Final = 2


def is_recognised(record: Record) -> bool:
    """True if the uncommitted or the replicated state may decide about the record, or a record
    about later ones. Others are stored as long as there is room."""
    kind = record.kind
    if kind == log_record.MESSAGE:
        return record.flags & log_record.STATE_FLAGS != 0
    return kind != log_record.CURSOR


def _retains(record: Record) -> bool:
    """True if the record sets or clears a retained topic."""
    if record.kind != log_record.MESSAGE:
        return record.kind == log_record.RETAINED
    return record.flags & log_record.FLAG_RETAIN != 0 and not is_waiting(record)


class Admission(Appender):
    """The decision on each record that reaches this leader: store it, skip a repetition, or refuse
    it.

    Invariant: once a message of a client is refused, no later message of it is stored before the
    client sends the refused one again. Otherwise two messages of one publisher change their order.
    """

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        replicated: ReplicatedState,
        may_append: Callable[[int], bool],
    ) -> None:
        """`may_append`: are enough replicas of a partition in sync and alive?"""
        self._state = state
        self._context = context
        self._replicated = replicated
        self._may_append = may_append
        self.forwarding: RecordForwarder | None = None
        self.voider = OffsetVoider(state, context, replicated)
        self._uncommitted: dict[int, UncommittedState] = {}
        # The reason of the last verdict REFUSED.
        self.refusal = OTHER_OWNER
        self.removed: Record | None = None
        # The node and the attempt of the present record.
        self._origin = ""
        self._attempt = NO_ATTEMPT
        # node -> results to send at the end of the turn.
        self._results: dict[str, list[ForwardResult]] = {}
        self.repeated = 0
        self.refused = 0

    def start_leading(self, partition: int, uncommitted: list[Batch]) -> None:
        """Rebuilds the uncommitted state of a partition from its uncommitted batches. A part of the
        first one may be applied: its commit ends within it, or a turn has applied a slice."""
        tail = UncommittedState()
        self._uncommitted[partition] = tail
        applied = self._state.delivered[partition]
        for batch in uncommitted:
            for record in batch.records():
                if record.offset >= applied:
                    self._note(tail, record)
        self.voider.lead(partition)

    def stop_leading(self, partition: int) -> None:
        """Drops the uncommitted state of a partition."""
        self.voider.stop_leading(partition)
        self._uncommitted.pop(partition, None)

    def committed(self, partition: int, offset: int) -> None:
        """Acknowledges the repetitions that waited until the records below `offset` are committed
        and applied."""
        self.voider.applied(partition)
        tail = self._uncommitted.get(partition)
        if tail is None:
            return
        tail.forget_below(offset)
        while tail.repeated and tail.repeated[0][0] <= offset:
            _, origin, ticket = tail.repeated.popleft()
            self._answer(origin, partition, ticket, None)

    def note_again(self, records: list[Record]) -> None:
        """Rebuilds the uncommitted state of all partitions from the records that are appended and
        not applied."""
        for partition, before in self._uncommitted.items():
            self._uncommitted[partition] = UncommittedState()
            self._uncommitted[partition].refused = before.refused
            assert not before.repeated, "a repetition waits though this node is alone"
        for record in records:
            self._note(self._uncommitted[record.partition], record)

    def append(self, pending: PendingRecord) -> None:
        """Admits a record of this node."""
        self._origin = self._context.node_id
        self._attempt = NO_ATTEMPT
        self._append(self._context.node_id, pending.record)

    def append_own(self, record: Record) -> int:
        """Appends a record of this node that waits in no queue. Returns the verdict."""
        self._origin = self._context.node_id
        self._attempt = NO_ATTEMPT
        self.removed = None
        tail = self._uncommitted[record.partition]
        outcome = self._decide(tail, record)
        if outcome == STORE:
            self._store(tail, record)
        elif outcome == REPEATED:
            self.repeated += 1
        else:
            self.refused += 1
        return outcome

    def forwarded(self, origin: str, epoch: int, attempt: int, batch: Batch) -> int:
        """Admits records of another node. `attempt`: see RecordForwarder. Returns the end of the
        log before them, or -1 if they are ignored.

        Records for a partition that this node does not lead, or leads in another epoch, are
        ignored. Their node receives the new metadata as this node does, and sends them to the next
        leader.
        """
        partition = batch.partition
        if partition >= len(self._context.leading) or self._context.leading[partition] != epoch:
            return -1
        begin = self._context.journal.next_offset[partition]
        self._origin = origin
        self._attempt = attempt
        is_plain = not batch.attributes & ATTRIBUTE_STATE
        if is_plain and not self._refusal(self._uncommitted[partition], partition):
            # Plain records have no packet id or sequence, so none is a known repetition.
            return self._context.journal.extend(batch)
        for index in range(batch.count):
            self._append(origin, batch.record(index))
        return begin

    def _append(self, origin: str, record: Record) -> None:
        partition = record.partition
        tail = self._uncommitted[partition]
        assert self._context.leading[partition], "records of a partition that is not led"
        outcome = self._decide(tail, record)
        if outcome == REFUSED:
            self.refused += 1
            self._answer(origin, partition, record.ticket, self.refusal)
            return
        if outcome == REPEATED:
            self.repeated += 1
            end = self._context.journal.next_offset[partition]
            if self._state.delivered[partition] >= end:
                self._answer(origin, partition, record.ticket, None)
            else:
                tail.repeated.append((end, origin, record.ticket))
            return
        self._store(tail, record)

    def _decide(self, tail: UncommittedState, record: Record) -> int:
        if record.kind == log_record.MESSAGE:
            return self._admit(tail, record)
        if record.kind == log_record.DELAYED:
            return self._admit_end(tail, record)
        return STORE

    def _store(self, tail: UncommittedState, record: Record) -> None:
        """Appends a record. Without room for its retained message, `removed` is set and appended
        behind it."""
        journal = self._context.journal
        self.removed = None
        lacks_room = self.retained_refusal(record) != ""
        if lacks_room:
            self._replicated.state.note_retained_limit(record.topic.decode())
            if record.kind == log_record.RETAINED:
                record.payload = b""
        journal.append(record)
        if record.is_state():
            self._note(tail, record)
        if lacks_room and record.payload:
            gone = removal(record.partition, record.offset, record.topic, record.timestamp_us)
            journal.append(gone)
            self._note(tail, gone)
            self.removed = gone

    def _note(self, tail: UncommittedState, record: Record) -> None:
        if _retains(record):
            tail.note_retained(record, self._retained(tail, record.topic))
        if record.kind == log_record.RELEASE and self._is_superseded(tail, record):
            return
        if record.kind == log_record.FORGOTTEN and not self._is_forgotten(tail, record):
            return
        tail.note(record)

    def _is_forgotten(self, tail: UncommittedState, record: Record) -> bool:
        """True if the position that a FORGOTTEN record names has not moved: see
        `ProducerTable.forget`."""
        pending = tail.producers.get(record.producer)
        if pending is not None:
            return forgets(record, *pending[:3])
        producer = self._replicated.state.producers.by_id.get(record.producer)
        place = None if producer is None else producer.position(record.partition)
        return place is not None and forgets(record, place.epoch, place.sequence, place.stored_us)

    def _retained(self, tail: UncommittedState | None, topic: bytes) -> Retained:
        """The bytes and the owner of a topic's retained message, behind all that is appended."""
        known = None if tail is None else tail.retained.get(topic)
        if known is not None:
            return known[0], known[1]
        message = self._replicated.state.retained.get(topic.decode())
        return NO_MESSAGE if message is None else retained_of(message)

    def retained_refusal(self, record: Record) -> str:
        """The reason why the retained store has no room for the message of a record, behind all
        that this node has appended; "": it has. If the message is stored nevertheless, the topic
        has none, because the old one is out of date."""
        if not record.payload or not _retains(record):
            return ""
        size, owner = retained_of(message_of(record))
        tail = self._uncommitted.get(record.partition)
        before, owner_before = self._retained(tail, record.topic)
        more: Amount = (size - before, 0 if before else 1)
        own = more if owner == owner_before or not before else (size, 1)
        pending = NOTHING
        for each in self._uncommitted.values():
            more = add(more, each.retained_growth)
            pending = add(pending, each.retained_by.get(owner, NOTHING))
        if before:
            # The number of topics does not grow.
            more = (more[0], 0)
        state = self._replicated.state
        return state.retained.refusal(state.config, owner, more, own, pending)

    def _is_superseded(self, tail: UncommittedState, record: Record) -> bool:
        """True if a later owner of the session has stored or released packet ids in this
        partition."""
        epoch = record.producer_epoch
        known = tail.sessions.get(record.client_id)
        if known is not None:
            return epoch < known[0]
        return self._replicated.is_superseded(record.client_id.decode(), record.partition, epoch)

    def _refuse(self, refusal: Rejection) -> int:
        self.refusal = refusal
        return REFUSED

    def _admit(self, tail: UncommittedState, record: Record) -> int:
        flags = record.flags
        client_id = record.client_id
        sequence = record.sequence
        if flags & log_record.FLAG_PACKET_ID:
            if self._is_superseded(tail, record):
                # The client has sent the message again to the later owner unless it was
                # acknowledged. It may even have received that acknowledgement and released the id.
                # Storing the message here would store it twice.
                return self._refuse(OTHER_OWNER)
            known = tail.inbound.get((client_id, sequence))
            if known is not None:
                stored_epoch = known[0]
            else:
                client = client_id.decode()
                stored_epoch = self._replicated.inbound_at(client, record.partition, sequence)
            if stored_epoch >= self._replicated.life(record):
                return REPEATED
        elif flags & log_record.FLAG_PRODUCER:
            outcome = self._admit_sequence(tail, record)
            if outcome != STORE:
                return outcome
        elif flags & log_record.FLAG_WILL:
            pending = tail.wills.get(client_id)
            if pending is not None and pending[0] >= sequence:
                return REPEATED
            if self._replicated.has_fired(client_id.decode(), sequence, record.topic):
                return REPEATED
            # A refused will would be lost, because no client sends it again.
            return STORE
        elif flags & log_record.FLAG_DELAYED and is_due(record):
            return self._admit_due(tail, record)
        refusal = self._refusal(tail, record.partition)
        if refusal is None:
            return STORE
        if self._attempt >= 0:
            tail.refused[self._origin] = self._attempt
        return self._refuse(refusal)

    def _admit_due(self, tail: UncommittedState, record: Record) -> int:
        """Publishes a delayed message once, whichever node that led the partition publishes it."""
        place = (record.partition, record.sequence)
        if record.sequence in tail.delayed:
            return REPEATED
        is_applied = record.sequence < self._state.delivered[record.partition]
        if is_applied and place not in self._replicated.state.delayed.by_place:
            return REPEATED
        return STORE

    def ends_delayed(self, place: tuple[int, int]) -> bool:
        """Whether an uncommitted record ends the delayed message of this partition and offset."""
        tail = self._uncommitted.get(place[0])
        return tail is not None and place[1] in tail.delayed

    def changes_session(self, home: int, client_id: str) -> bool:
        """Whether a SESSION record of the client or queue is appended here and not applied."""
        tail = self._uncommitted.get(home)
        newest = -1 if tail is None else tail.changes.get(client_id.encode(), -1)
        return newest >= self._state.delivered[home]

    def _admit_end(self, tail: UncommittedState, record: Record) -> int:
        """Ends a delayed message that is not over. One of QoS 0 may have been delivered before its
        record has come here."""
        waiting = self._replicated.state.delayed.by_place.get((record.partition, record.sequence))
        is_applied = record.sequence < self._state.delivered[record.partition]
        is_over = waiting.is_delivered if waiting is not None else is_applied
        if is_over or record.sequence in tail.delayed:
            return self._refuse(DELAY_OVER)
        return STORE

    def _refusal(self, tail: UncommittedState, partition: int) -> Rejection | None:
        """Returns the reason to refuse every new message of the origin now."""
        if not self._may_append(partition):
            return FEW_REPLICAS
        if partition in self.voider.ends:
            return VOIDING
        if self._state.disk_full:
            return DISK_FULL
        if tail.refused.get(self._origin, -1) == self._attempt:
            return EARLIER_REFUSED
        return None

    def _admit_sequence(self, tail: UncommittedState, record: Record) -> int:
        """Applies the rules of `producer_dedup.admit` to the committed and the uncommitted
        state."""
        producer_id = record.producer
        epoch = record.producer_epoch
        sequence = record.sequence
        stored_epoch = -1
        stored_sequence = 0
        pending = tail.producers.get(producer_id)
        if pending is not None:
            stored_epoch, stored_sequence = pending[:2]
        else:
            table = self._replicated.state.producers
            place = table.find_position(producer_id, record.partition, self._state.wall_us)
            if place is not None:
                stored_epoch = place.epoch
                stored_sequence = place.sequence
        if epoch < stored_epoch:
            self._state.stats.producer_fenced += 1
            text = f"producer epoch is fenced: {epoch} is below {stored_epoch}"
            return self._refuse(Rejection(text, reasons.IMPLEMENTATION_SPECIFIC_ERROR))
        if epoch == stored_epoch and sequence <= stored_sequence:
            self._state.stats.producer_duplicates += 1
            return REPEATED
        return STORE

    def _answer(self, origin: str, partition: int, ticket: int, refusal: Rejection | None) -> None:
        """Sends the result of a record in a partition that this node leads."""
        if not ticket:
            return
        if origin == self._context.node_id:
            assert self.forwarding is not None
            self.forwarding.refuse(ticket, refusal)
            return
        epoch = self._context.leading[partition]
        reason, text = (0, "") if refusal is None else (refusal.reason, refusal.text)
        answer = ForwardResult(partition, epoch, ticket, reason, text)
        self._results.setdefault(origin, []).append(answer)

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        self.voider.check()
        for partition, epoch in enumerate(self._context.leading):
            assert bool(epoch) == (partition in self._uncommitted), "the partitions led here"
            if epoch:
                assert self._context.journal.epochs[partition] == epoch, "appends under another"
                self._uncommitted[partition].check(self._state.delivered[partition])

    def drop_results(self, node: str) -> None:
        """Drops the results for a node whose link has ended: see ClusterContext.drop_frames."""
        self._results.pop(node, None)

    def flush(self) -> None:
        """Sends the gathered results at the end of a turn."""
        if not self._results:
            return
        results = self._results
        self._results = {}
        for origin, answers in results.items():
            self._context.send(origin, FORWARD_RESULT, encode_result(answers))
