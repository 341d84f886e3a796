"""Replicated state that a leader derives from its uncommitted records."""

from collections import deque
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.delivery.log_replay import message_of
from holdfast.node.publish.delayed_table import is_due
from holdfast.node.session.message import retained_size
from holdfast.node.state.packet_ids import NO_EPOCH

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
        # Topic -> (bytes of its retained message, 0 if it is removed; offset).
        self.retained: dict[bytes, tuple[int, int]] = {}
        # By how much these records will change the retained store.
        self.retained_bytes = 0
        self.retained_topics = 0
        # (offset, topic, bytes, topics) of each change, in order.
        self._retained_changes: deque[tuple[int, bytes, int, int]] = deque()
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

    def note_retained(self, record: Record, before: int) -> None:
        """Adds an appended record that sets or clears a retained topic. `before`: the bytes of the
        topic's message until now."""
        size = retained_size(message_of(record)) if record.payload else 0
        self.retained[record.topic] = (size, record.offset)
        self._change_retained(size - before, bool(size) - bool(before))
        change = (record.offset, record.topic, size - before, bool(size) - bool(before))
        self._retained_changes.append(change)

    def _change_retained(self, size: int, count: int) -> None:
        self.retained_bytes += size
        self.retained_topics += count

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
            at, topic, size, count = changes.popleft()
            self._change_retained(-size, -count)
            if self.retained.get(topic, (0, -1))[1] == at:
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
