"""The part of the replicated state that a leader needs of its uncommitted records."""

from collections import deque
from typing import Final

from holdfast.broker.publish.delayed_table import is_due
from holdfast.cluster.state.packet_ids import NO_EPOCH
from holdfast.storage import record as log_record
from holdfast.storage.record import Record

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
        # producer id -> (epoch, sequence, offset)
        self.producers: dict[bytes, tuple[int, int, int]] = {}
        # client id -> (session epoch, offset)
        self.wills: dict[bytes, tuple[int, int]] = {}
        # Client id or key of a queue -> offset of its newest SESSION record.
        self.changes: dict[bytes, int] = {}
        # Offset of a delayed message -> offset of the record that ends it.
        self.delayed: dict[int, int] = {}
        # (offset, record kind or flag, key) in order.
        self._entries: deque[tuple[int, int, tuple[bytes, int]]] = deque()
        # producer id -> (epoch, sequence) that was refused for lack of replicas or space. No later
        # sequence of the producer is stored before it.
        self.holes: dict[bytes, tuple[int, int]] = {}
        # Per node, the attempt in which one of its records was refused. No later record of that
        # attempt is stored.
        self.refused: dict[str, int] = {}
        # Repetitions that wait for a commit: (offset, origin, ticket)
        self.repeated: deque[tuple[int, str, int]] = deque()

    def note(self, record: Record) -> None:
        """Adds what the appended record says."""
        offset = record.offset
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
        elif kind != log_record.MESSAGE:
            return
        elif flags & log_record.FLAG_PACKET_ID:
            key = (client_id, sequence)
            self.inbound[key] = (epoch, offset)
            self.sessions[client_id] = (epoch, offset)
            self._entries.append((offset, log_record.FLAG_PACKET_ID, key))
        elif flags & log_record.FLAG_PRODUCER:
            self.producers[record.producer] = (epoch, sequence, offset)
            self._entries.append((offset, log_record.FLAG_PRODUCER, (record.producer, 0)))

    def forget_below(self, offset: int) -> None:
        """Removes the records below `offset`, which the replicated state has now."""
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
            elif self.producers.get(key[0], (0, 0, -1))[2] == at:
                del self.producers[key[0]]
