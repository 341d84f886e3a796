"""Tracks records of this node that are neither committed nor refused."""

from collections.abc import Callable
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.node_state import Promise
from holdfast.node.publish.delayed_table import is_due
from holdfast.node.refusal import Rejection
from holdfast.protocol.topics.names import SHARE_PREFIX

_GROUP: Final = SHARE_PREFIX.encode()
RECOGNISED: Final = log_record.FLAG_PACKET_ID | log_record.FLAG_PRODUCER | log_record.FLAG_WILL
"""The flags of messages that a leader recognises as repetitions, whichever node sends them."""


class PendingRecord:
    """A record of this node that is neither committed nor refused yet."""

    def __init__(self, record: Record, number: int, since: float) -> None:
        self.record = record
        self.partition = record.partition
        self.ticket = record.ticket
        # The number of the record in append order. Tickets start again at 1.
        self.number = number
        self.since = since
        # At least the size of the record in a frame, in a batch of its own.
        self.size_bytes = (
            200
            + len(record.topic)
            + len(record.client_id)
            + len(record.producer)
            + len(record.properties)
            + len(record.payload)
            + len(record.audience)
        )
        # True if a leader may have the record. This node's log shows it once it is aligned.
        self.in_doubt = False
        self.promise: Promise | None = None
        self.afterwards: list[Callable[[], None]] | None = None
        # True if committed or refused.
        self.done = False
        self.refusal: Rejection | None = None

    def is_promised(self) -> bool:
        """True if a promise waits for the record. None waits for a QoS 0 message or a will."""
        record = self.record
        if record.kind == log_record.MESSAGE:
            return bool(record.flags & log_record.FLAG_QOS_MASK) and not is_will(record)
        return record.kind != log_record.RETAINED

    def is_refusable(self) -> bool:
        """True if it is a message that its client can send again."""
        return self.record.kind == log_record.MESSAGE and not is_will(self.record)


def is_group_progress(record: Record) -> bool:
    """True if the record is the progress of a shared group, written by its coordinator.

    Its epoch is that of the group's home partition. The record of a deposed coordinator is not sent
    to the next leader, which is the coordinator now. Counter-example: it arrives after the next
    coordinator has begun without it, and this one then logs a lower position. The nodes report
    again what they have finished.
    """
    return record.kind == log_record.CURSOR and record.client_id.startswith(_GROUP)


def is_will(record: Record) -> bool:
    return record.flags & log_record.FLAG_WILL != 0 or is_due(record)


class Appender:
    """The interface of the leader's side for records of this node; Admission implements it."""

    def append(self, pending: PendingRecord) -> None:
        raise NotImplementedError
