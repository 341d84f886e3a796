"""Numbers rows so that a broker drops what a repeated task publishes again: the property `hf-seq`.

A job is a streaming query, or a batch write with its writeId. Its rows are numbered in one of two
ways. Both give the same numbers in every attempt:

- Counted: each task is a producer, and a row's sequence is the batch and the row's index in the
  task. So each attempt of a task must get the same rows in the same order.
- By origin: the columns `partition` and `offset` say where the rows come from. Each origin
  partition is a producer, and a row's sequence is its offset. Spark may then divide the rows into
  tasks in any way that keeps the rows of one partition in one task.

The epoch of a producer is always 0. Two attempts publish the same rows with the same numbers, each
in ascending order, so it does not matter which of them is newer. An epoch per attempt would be
wrong: the broker compares sequences within one epoch only, and would store the rows of both.
"""

import hashlib
from typing import Final

from holdfast.client.identity import IDENTITY_PROPERTY, SEQUENCE_MAX
from holdfast.protocol.mqtt.properties import USER_PROPERTY

EPOCH: Final = 0
BATCH_SHIFT: Final = 32
"""The bits of a sequence below the batch id."""
BATCH_MAX: Final = (1 << 31) - 1
"""The largest batch id whose sequences fit into 63 bits."""
ROWS_MAX: Final = (1 << BATCH_SHIFT) - 1
"""The most rows in one task."""
REPEAT_SHIFT: Final = 16
"""The bits of a sequence below the origin offset, for rows with the same origin."""
REPEATS_MAX: Final = 1 << REPEAT_SHIFT
"""The most rows of one task with the same origin, as `explode` makes them."""
OFFSET_MAX: Final = (1 << 63 - REPEAT_SHIFT) - 2
"""The largest origin offset whose sequences fit into 63 bits."""
ORIGINS_MAX: Final = 10_000
"""The most origin partitions in one task."""

_NAME: Final = IDENTITY_PROPERTY.encode()


class IdentityError(ValueError):
    """Some rows cannot be numbered. The text says which, and what to do."""


class Stamp:
    """The encoder of one producer's user property `hf-seq`."""

    def __init__(self, producer: str) -> None:
        self._value = f"{producer}:{EPOCH}:".encode()
        self._head = b""
        # The range of sequences whose number of digits fits `_head`.
        self._least = 0
        self._end = 0

    def block(self, sequence: int) -> bytes:
        """Returns the property for a sequence."""
        if not self._least <= sequence < self._end:
            self._measure(sequence)
        return b"%b%d" % (self._head, sequence)

    def _measure(self, sequence: int) -> None:
        digits = len(str(sequence))
        self._least = 10 ** (digits - 1)
        self._end = self._least * 10
        length = len(self._value) + digits
        self._head = b"".join(
            (
                USER_PROPERTY.to_bytes(1, "big"),
                len(_NAME).to_bytes(2, "big"),
                _NAME,
                length.to_bytes(2, "big"),
                self._value,
            )
        )


def stream_job(query_id: str) -> str:
    """Returns the job of a streaming query."""
    return _digest("query", query_id)


def write_job(write_id: str) -> str:
    """Returns the job of a batch write."""
    return _digest("write", write_id)


def counted_producer(job: str, task_partition: int) -> str:
    """Returns the producer id of a task whose rows are counted."""
    return f"spark-{job}-{task_partition}"


def origin_producer(job: str, origin: int | str) -> str:
    """Returns the producer id of an origin partition. A name is hashed, because it may have any
    characters and length."""
    if isinstance(origin, int):
        return f"spark-{job}-o{origin}"
    return f"spark-{_digest(job, origin)}-n"


def first_sequence(batch: int) -> int:
    """Returns the sequence of the first row of a task in this batch. Raises IdentityError."""
    if not 0 <= batch <= BATCH_MAX:
        raise IdentityError(f"batch {batch}: the numbers reach to {BATCH_MAX}")
    return (batch << BATCH_SHIFT) + 1


class Origins:
    """The stamps of a task's rows by origin, and the range of offsets of each origin partition.

    Invariant: within a partition the offsets ascend. The broker drops a lower sequence as a
    repetition, so a row out of order would be lost silently.
    """

    def __init__(self, job: str) -> None:
        self.ranges: dict[int | str, tuple[int, int]] = {}
        """The first and the last offset per origin partition."""
        self._job = job
        self._stamps: dict[int | str, Stamp] = {}
        # The number of earlier rows with the last offset of the partition.
        self._repeats: dict[int | str, int] = {}

    def block(self, partition: int | str | None, offset: int | None) -> bytes:
        """Returns the property for the next row. Raises IdentityError."""
        if partition is None or offset is None:
            raise IdentityError(
                "a row has null in the columns partition or offset, which say where it comes from. "
                "Fill them, or drop both columns"
            )
        stamp = self._stamps.get(partition)
        if stamp is None:
            stamp = self._begin(partition, offset)
        first, last = self.ranges[partition]
        if offset > last:
            if offset > OFFSET_MAX:
                raise IdentityError(f"offset {offset}: 0 to {OFFSET_MAX}")
            self._repeats[partition] = repeat = 0
            self.ranges[partition] = (first, offset)
        elif offset == last:
            self._repeats[partition] = repeat = self._repeats[partition] + 1
            if repeat >= REPEATS_MAX:
                raise IdentityError(
                    f"more than {REPEATS_MAX} rows come from offset {offset} of partition "
                    f"{partition}. Drop the columns partition and offset"
                )
        else:
            raise IdentityError(
                f"offset {offset} of partition {partition} comes after {last}: the rows are not in "
                "the order of their origin, as after a shuffle. Set orderBy=offset, or drop the "
                "columns partition and offset"
            )
        return stamp.block((offset + 1 << REPEAT_SHIFT) + repeat)

    def _begin(self, partition: int | str, offset: int) -> Stamp:
        if len(self._stamps) >= ORIGINS_MAX:
            raise IdentityError(
                f"the rows of one task come from more than {ORIGINS_MAX} partitions. Is "
                "`partition` what the rows were read from?"
            )
        if offset < 0:
            raise IdentityError(f"offset {offset}: 0 to {OFFSET_MAX}")
        self.ranges[partition] = (offset, offset - 1)
        stamp = Stamp(origin_producer(self._job, partition))
        self._stamps[partition] = stamp
        return stamp


def check_overlap(tasks: list[dict[int | str, tuple[int, int]]]) -> None:
    """Checks that no origin partition is in two tasks of a batch.

    Otherwise the broker may take the rows of one task for repetitions of the other's. Each dict has
    the first and the last offset per origin partition of one task. Raises IdentityError.
    """
    seen: dict[int | str, tuple[int, int]] = {}
    for ranges in tasks:
        for partition, (first, last) in ranges.items():
            if partition in seen:
                raise IdentityError(
                    f"rows of partition {partition} were in two tasks (offsets {seen[partition][0]}"
                    f" to {seen[partition][1]} and {first} to {last}): the broker may have dropped "
                    "some as repetitions. Keep the partitioning of the source, or repartition by "
                    "the column partition, or drop the columns partition and offset"
                )
            seen[partition] = (first, last)


def _digest(kind: str, text: str) -> str:
    return hashlib.sha256(f"{kind}:{text}".encode()).hexdigest()[:32]


assert (OFFSET_MAX + 2 << REPEAT_SHIFT) - 1 <= SEQUENCE_MAX
assert first_sequence(BATCH_MAX) - 1 + ROWS_MAX <= SEQUENCE_MAX
