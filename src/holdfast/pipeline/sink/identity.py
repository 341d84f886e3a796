"""The numbers that let a broker drop what a repeated task publishes again: `hf-seq`.

A job is a streaming query or a batch write with its writeId. Its rows are numbered in one of two
ways, both the same in every attempt:

- counted: each task is a producer, and a row's sequence is the batch and the row's place in the
  task. So each attempt of a task must get the same rows in the same order.
- by origin: the rows have columns `partition` and `offset` that say where they come from. Each
  partition of the origin is a producer, and a row's sequence is its offset. How Spark divides the
  rows into tasks does not matter then, as long as one partition's rows are in one task.

A producer's epoch is always 0: which of two attempts is the newer one does not matter, since both
publish the same rows with the same numbers, each in ascending order.
"""

import hashlib
from typing import Final

from holdfast.client.identity import IDENTITY_PROPERTY, SEQUENCE_MAX
from holdfast.protocol.mqtt.properties import USER_PROPERTY

EPOCH: Final = 0
BATCH_SHIFT: Final = 32
BATCH_MAX: Final = (1 << 31) - 1
ROWS_MAX: Final = (1 << BATCH_SHIFT) - 1
"""Rows in one task."""
REPEAT_SHIFT: Final = 16
REPEATS_MAX: Final = 1 << REPEAT_SHIFT
"""Rows of one task with the same origin, as an `explode` makes them."""
OFFSET_MAX: Final = (1 << 63 - REPEAT_SHIFT) - 2
ORIGINS_MAX: Final = 10_000
"""Origin partitions in one task."""

_NAME: Final = IDENTITY_PROPERTY.encode()


class IdentityError(ValueError):
    """Rows that cannot be numbered. The text says which, and what to do."""


class Stamp:
    """Writes one producer's user property."""

    def __init__(self, producer: str) -> None:
        self._value = f"{producer}:{EPOCH}:".encode()
        self._head = b""
        # The sequences with as many digits as `_head` says.
        self._least = 0
        self._end = 0

    def block(self, sequence: int) -> bytes:
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
    return _digest("query", query_id)


def write_job(write_id: str) -> str:
    return _digest("write", write_id)


def counted_producer(job: str, task_partition: int) -> str:
    return f"spark-{job}-{task_partition}"


def origin_producer(job: str, origin: int | str) -> str:
    """A name is hashed: it may have any characters and any length."""
    if isinstance(origin, int):
        return f"spark-{job}-o{origin}"
    return f"spark-{_digest(job, origin)}-n"


def first_sequence(batch: int) -> int:
    """Of the first row of a task in this batch. Raises IdentityError."""
    if not 0 <= batch <= BATCH_MAX:
        raise IdentityError(f"batch {batch}: the numbers reach to {BATCH_MAX}")
    return (batch << BATCH_SHIFT) + 1


class Origins:
    """The stamps of a task's rows by where they come from, and how far each partition has come."""

    def __init__(self, job: str) -> None:
        self.ranges: dict[int | str, tuple[int, int]] = {}
        """Per origin partition the first and the last offset."""
        self._job = job
        self._stamps: dict[int | str, Stamp] = {}
        # Rows so far with the last offset of its partition.
        self._repeats: dict[int | str, int] = {}

    def block(self, partition: int | str | None, offset: int | None) -> bytes:
        """The property for the next row. Raises IdentityError."""
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
    """Of the tasks of one batch, per origin partition the first and the last offset: no partition
    may be in two tasks, where the broker would take the rows of one for repetitions of the
    other's. Raises IdentityError."""
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
