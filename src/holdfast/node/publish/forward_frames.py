"""Layout of FORWARD and FORWARD_RESULT, the frames between a node and a partition's leader."""

import struct
from typing import Final

from holdfast.log.batch import Batch, CorruptBatch
from holdfast.node.frame_kinds import BadFrame

FORWARD_HEAD: Final = struct.Struct("<II")
"""The head of each batch in FORWARD: epoch, attempt."""
_RESULT: Final = struct.Struct("<IBH")


class ForwardResult:
    """The result of a leader for one forwarded record.

    `epoch`: the epoch in which the node led the partition. It is 0 if the node has an older version
    that does not send it.
    """

    def __init__(self, partition: int, epoch: int, ticket: int, reason: int, text: str) -> None:
        self.partition = partition
        self.epoch = epoch
        self.ticket = ticket
        self.reason = reason
        self.text = text


def decode_forward(payload: bytes) -> list[tuple[int, int, Batch]]:
    """Returns (epoch, attempt, batch) for each batch of a FORWARD frame. Raises BadFrame when it is
    malformed."""
    found: list[tuple[int, int, Batch]] = []
    at = 0
    try:
        while at < len(payload):
            epoch, attempt = FORWARD_HEAD.unpack_from(payload, at)
            batch = Batch(payload, at + FORWARD_HEAD.size)
            found.append((epoch, attempt, batch))
            at += FORWARD_HEAD.size + batch.length
    except (struct.error, CorruptBatch) as error:
        raise BadFrame(f"forwarded records: {error}") from None
    return found


def encode_result(answers: list[ForwardResult]) -> bytes:
    """Encodes entries of (ticket, reason, text).

    An entry with ticket 0, which no record has, precedes the results of a partition. Its text is
    the partition and the epoch. Older versions find no record with that ticket and ignore the
    entry.
    """
    parts: list[bytes] = []
    partition = -1
    epoch = 0
    for answer in answers:
        if answer.partition != partition or answer.epoch != epoch:
            partition = answer.partition
            epoch = answer.epoch
            parts.append(_result(0, 0, f"{partition} {epoch}"))
        parts.append(_result(answer.ticket, answer.reason, answer.text))
    return b"".join(parts)


def _result(ticket: int, reason: int, text: str) -> bytes:
    data = text.encode()
    return _RESULT.pack(ticket, reason, len(data)) + data


def decode_result(payload: bytes) -> list[ForwardResult]:
    """Returns the results in a FORWARD_RESULT frame. Raises BadFrame when it is malformed."""
    found: list[ForwardResult] = []
    partition = 0
    epoch = 0
    at = 0
    try:
        while at < len(payload):
            ticket, reason, length = _RESULT.unpack_from(payload, at)
            at += _RESULT.size
            text = payload[at : at + length].decode()
            at += length
            if ticket:
                found.append(ForwardResult(partition, epoch, ticket, reason, text))
            else:
                first, second = text.split(" ")
                partition, epoch = int(first), int(second)
    except (struct.error, ValueError) as error:
        raise BadFrame(f"results of forwarding: {error}") from None
    return found
