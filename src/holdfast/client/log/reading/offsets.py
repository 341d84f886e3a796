"""Offset arithmetic of the Spark source: ranges, positions, admission and grouping.

The functions are pure: they open no file and import no Spark. A position in the log is a dict from
partition to the first offset that is *not* yet read. A partition that is missing from it begins at
the first offset that the log still has. In JSON (checkpoints, options) the keys are decimal
strings, and the key `generation` has the generation of the log unless that is 0.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.log.files.json_object import decode_object

Offsets = dict[int, int]

SPLIT_RECORDS_MIN: Final = 100
"""The fewest records that are worth a task of their own."""
EARLIEST: Final = "earliest"
LATEST: Final = "latest"
GENERATION: Final = "generation"
"""The key of the generation in the JSON form of a position."""


class DataLossError(Exception):
    """The log does not have some of the requested offsets any more. The text names them and says
    what to do. `lost` is the first such range, if the error is about one."""

    def __init__(self, text: str, lost: "OffsetRange | None" = None) -> None:
        super().__init__(text)
        self.lost = lost


class OffsetError(ValueError):
    """A position that the user gave cannot be used. The text says why."""


class RestoredError(DataLossError):
    """The log was restored since a position was taken, to before that position."""

    def __init__(self, before: int, now: int, lost: "Sequence[OffsetRange]", advice: str) -> None:
        first = lost[0]
        super().__init__(
            f"the position is of generation {before} of the log, which was restored and is at"
            f" generation {now}: from offset {first.start} of partition {first.partition} on it has"
            f" other messages than those that were read. {advice}",
            first,
        )


@dataclass(frozen=True)
class OffsetRange:
    """The offsets `start` (included) to `end` (excluded) of one partition."""

    partition: int
    start: int
    end: int

    @property
    def records(self) -> int:
        """The number of offsets in the range."""
        return self.end - self.start


@dataclass(frozen=True)
class PartitionBounds:
    """The offsets that the log has of one partition: `first` included, `end` excluded."""

    first: int
    end: int


@dataclass(frozen=True)
class LogGeneration:
    """The generation of a log (`log.files.layout.Manifest`), as a reader knows it."""

    number: int | None = None
    """None: the server is of a version without generations."""
    former: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """The offsets per partition up to which a former generation has the same records."""

    def carry(
        self, position: Mapping[int, int], before: int | None, bounds: Mapping[int, PartitionBounds]
    ) -> tuple[Offsets, list[OffsetRange]]:
        """Returns a position of generation `before` as one of this generation, and what it has
        passed that is not in the log any more.

        A reader goes on where the two generations part. If that is not known, it goes on at its
        position, or at the end of a log that ends before it. None: the position is of this log.
        """
        if before is None or self.number is None or before == self.number:
            return dict(position), []
        same = self.former.get(before)
        moved, lost = {}, []
        for partition, at in position.items():
            bound = bounds.get(partition)
            part = at if bound is None else bound.end
            if same is not None and partition < len(same):
                part = same[partition]
            moved[partition] = min(at, part)
            if part < at or (same is None and at):
                lost.append(OffsetRange(partition, moved[partition], at))
        return moved, lost


def generation_of(position: Mapping[str, int]) -> int:
    """Returns the generation in a position's JSON form. Raises OffsetError when it is none."""
    number = position.get(GENERATION, 0)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise OffsetError(f"generation {number!r} is not a number of 0 or more")
    return number


def log_identity(log: str, created: str | None, generation: int = 0) -> str:
    """Returns a text that distinguishes a log from all others, or an empty one if nothing does.

    In a cluster, `created` is empty, and `log` is its random id. A server before this version sends
    no `created`, and its `log` may be the name of a node, which is no identity.
    """
    if created is None or not (created or log):
        return ""
    name = f"directory {created}" if created else f"cluster {log}"
    return f"{name} generation {generation}" if generation else name


def generation_in(identity: str) -> tuple[str, int]:
    """Returns the two parts of an identity: the name of the log, and its generation."""
    name, has_generation, number = identity.partition(" generation ")
    return name, int(number) if has_generation else 0


def is_other_log(before: str, now: str) -> bool:
    """Returns whether two identities are of different logs, whatever their generations.

    Those of a directory and of a cluster do not compare: a node that joins a cluster gets another
    kind of identity.
    """
    old, new = generation_in(before)[0], generation_in(now)[0]
    return bool(before and now and old.split()[0] == new.split()[0] and old != new)


def to_json(offsets: Mapping[int, int], generation: int | None = 0) -> dict[str, int]:
    """Converts a position to the form of checkpoints, ordered by partition."""
    found = {str(partition): offsets[partition] for partition in sorted(offsets)}
    return found | {GENERATION: generation} if generation else found


def from_json(offsets: Mapping[str, object]) -> Offsets:
    """Converts the form of checkpoints to a position, without its generation. Raises OffsetError
    when a value is no offset."""
    result: Offsets = {}
    for key, value in offsets.items():
        if key == GENERATION:
            continue
        if not (key.isascii() and key.isdecimal()):
            raise OffsetError(f"partition {key!r} is not a number")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise OffsetError(f"offset {value!r} of partition {key} is not a number of 0 or more")
        result[int(key)] = value
    return result


def parse_position(option: str, text: str) -> str | Offsets:
    """Parses `earliest`, `latest` or JSON such as `{"0": 12, "1": 7}`. Raises OffsetError."""
    word = text.strip().lower()
    if word in (EARLIEST, LATEST):
        return word
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise OffsetError(
            f'{option} is {text!r}; allowed: "earliest", "latest" or JSON offsets by partition '
            'such as {"0": 12, "1": 7}'
        )
    try:
        generation_of(value)
        return from_json(value)
    except OffsetError as error:
        raise OffsetError(f"{option}: {error}") from None


def parse_generation(option: str, text: str) -> int | None:
    """Returns the generation in a position parsed by `parse_position`; None if it has none."""
    if isinstance(parse_position(option, text), str):
        return None
    value = decode_object(text.encode())
    return generation_of(value) if GENERATION in value else None


def resolve(position: str | Offsets, bounds: Mapping[int, PartitionBounds]) -> Offsets:
    """Resolves a position to one offset per partition.

    Offsets that the user gave stay as they are, even if the log lacks them: `divide`
    decides about those. Partitions that the user left out begin at their first offset. A partition
    that the log does not have raises OffsetError.
    """
    if isinstance(position, str):
        latest = position == LATEST
        return {p: bound.end if latest else bound.first for p, bound in bounds.items()}
    unknown = sorted(set(position) - set(bounds))
    if unknown:
        raise OffsetError(
            f"the log has no records in partition {', '.join(map(str, unknown))}; "
            f"it has {_listing(sorted(bounds))}"
        )
    return {p: position.get(p, bound.first) for p, bound in bounds.items()}


def divide(
    ranges: Iterable[OffsetRange], bounds: Mapping[int, PartitionBounds], *, fail_on_data_loss: bool
) -> tuple[list[OffsetRange], list[OffsetRange]]:
    """Divides ranges into those that the log has and those that it lacks, ordered by partition.

    A part may be below the first offset, because retention deleted it. It may also be above the
    end: then this is another log, or one that lost its tail. Either raises DataLossError, unless
    `fail_on_data_loss` is false.
    """
    found, lost = [], []
    for item in sorted(ranges, key=lambda item: item.partition):
        start, end = item.start, item.end
        bound = bounds.get(item.partition, PartitionBounds(end, end))
        if start < bound.first or end > bound.end:
            if fail_on_data_loss:
                raise DataLossError(_missing(item.partition, start, end, bound))
            low, high = max(start, bound.first), min(end, bound.end)
            if low >= high:
                low = high = end
            lost += [
                OffsetRange(item.partition, first, last)
                for first, last in ((start, low), (high, end))
                if first < last
            ]
            start, end = low, high
        if start < end:
            found.append(OffsetRange(item.partition, start, end))
    return found, lost


def joined(ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    """Merges ranges that touch or overlap, ordered by partition and offset."""
    found: list[OffsetRange] = []
    for item in sorted(ranges, key=lambda item: (item.partition, item.start)):
        last = found[-1] if found else None
        if last is not None and last.partition == item.partition and item.start <= last.end:
            found[-1] = OffsetRange(item.partition, last.start, max(last.end, item.end))
        else:
            found.append(item)
    return found


def ranges_to_read(
    start: Mapping[int, int], end: Mapping[int, int], bounds: Mapping[int, PartitionBounds]
) -> list[OffsetRange]:
    """Returns the ranges between two positions. A partition missing from `start` begins at its
    first offset."""
    begins = {p: start.get(p, bounds[p].first if p in bounds else stop) for p, stop in end.items()}
    return [OffsetRange(p, begins[p], stop) for p, stop in end.items() if begins[p] < stop]


def available(
    start: Mapping[int, int], bounds: Mapping[int, PartitionBounds], *, fail_on_data_loss: bool
) -> Offsets:
    """Returns the position up to which a reader at `start` may read: the end of every partition.

    It is never below `start`, because Spark must not see a position decrease. If the log ends below
    `start`, this raises DataLossError: the broker would give the offsets between to other records,
    and the query would never read those.
    """
    result = dict(start)
    for partition, bound in bounds.items():
        begin = start.get(partition, bound.first)
        if bound.end < begin and fail_on_data_loss:
            raise DataLossError(
                f"partition {partition} was read up to offset {begin}, but the log now ends at "
                f"{bound.end}: it lost its tail or is another log. Start again from a new "
                "checkpoint, or set failOnDataLoss=false to wait until the log has passed that "
                "offset (what is written below it is skipped)"
            )
        result[partition] = max(begin, bound.end)
    return result


def admit(
    start: Mapping[int, int], end: Mapping[int, int], floor: Mapping[int, int], records_max: int
) -> Offsets:
    """Returns an end between `start` and `end` that admits at most `records_max` offsets.

    Every partition gets an equal share, and the rest of a share that is too large goes to the
    others. So a busy partition cannot starve a quiet one. A partition missing from `start` begins
    at `floor`.
    """
    begins = {p: start.get(p, floor.get(p, stop)) for p, stop in end.items()}
    lags = {p: max(0, end[p] - begins[p]) for p in end}
    result = dict(begins)
    left = records_max
    waiting = sorted((p for p in lags if lags[p]), key=lambda p: lags[p])
    while waiting and left > 0:
        share = left // len(waiting)
        if share == 0:
            # Fewer offsets are left than partitions. The longest lags get one each, and another
            # partition comes first when they have shrunk.
            for partition in waiting[-left:]:
                result[partition] += 1
            break
        satisfied = [p for p in waiting if lags[p] <= share]
        if not satisfied:
            extra = left - share * len(waiting)
            for index, partition in enumerate(reversed(waiting)):
                result[partition] += share + (1 if index < extra else 0)
            break
        for partition in satisfied:
            result[partition] += lags[partition]
            left -= lags[partition]
        waiting = waiting[len(satisfied) :]
    return result


def group(ranges: Sequence[OffsetRange], tasks_max: int) -> list[list[OffsetRange]]:
    """Divides ranges among at most `tasks_max` tasks with about equal numbers of records.

    A partition stays whole, so one task reads the records of a topic, in order.
    """
    groups: list[list[OffsetRange]] = [[] for _ in range(min(tasks_max, len(ranges)))]
    sizes = [0] * len(groups)
    for item in sorted(ranges, key=lambda item: (-item.records, item.partition)):
        lightest = sizes.index(min(sizes))
        groups[lightest].append(item)
        sizes[lightest] += item.records
    for members in groups:
        members.sort(key=lambda item: item.partition)
    return groups


def split(ranges: Sequence[OffsetRange], tasks_max: int) -> list[list[OffsetRange]]:
    """Divides every range into equal parts, one for each of at most `tasks_max` tasks.

    The first task gets the first part of each range, and so on. Records that were written at the
    same time lie together in the journal, so each task reads one stretch of it.
    """
    total = sum(item.records for item in ranges)
    count = max(1, min(tasks_max, total // SPLIT_RECORDS_MIN)) if ranges else 0
    groups: list[list[OffsetRange]] = []
    for number in range(count):
        members = []
        for item in sorted(ranges, key=lambda item: item.partition):
            start = item.start + item.records * number // count
            end = item.start + item.records * (number + 1) // count
            if start < end:
                members.append(OffsetRange(item.partition, start, end))
        groups.append(members)
    return groups


def _missing(partition: int, start: int, end: int, bound: PartitionBounds) -> str:
    return (
        f"offsets {start} to {end} of partition {partition} were asked for, the log has "
        f"{bound.first} to {bound.end}: the rest was removed by retention or lost. "
        "Keep the log for longer, or set failOnDataLoss=false to go on with what is left"
    )


def _listing(partitions: Sequence[int]) -> str:
    if not partitions:
        return "no records at all"
    return "partitions " + ", ".join(map(str, partitions))
