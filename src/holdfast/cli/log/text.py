"""Formats a directory's report, which `holdfast log inspect` prints."""

from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.cli.log.records import time_text
from holdfast.cli.log.report import DirectoryReport, SegmentReport
from holdfast.cli.text import count_text, size_text, table

_RIGHT: Final = frozenset(
    {"sequence", "partition", "start", "end", "records", "batches", "entries", "missing", "size"}
)
"""The columns of numbers."""


def report_lines(report: DirectoryReport) -> list[str]:
    """Returns the report as lines for people."""
    return [
        *_summary(report),
        *_section("segments", _segment_rows(report)),
        *_section("partitions", _partition_rows(report)),
        *_section("snapshots", _snapshot_rows(report)),
        *_list("quarantine", report.quarantine),
        *_list("problems", report.problems),
        *_list("notes", report.notes),
    ]


_PARTITION_COLUMNS: Final = ("partition", "start", "end", "records", "missing")


def _summary(report: DirectoryReport) -> Iterator[str]:
    segments = report.segments
    records = sum(segment.records for segment in segments)
    yield f"data directory  {report.path}"
    yield f"node            {report.node_id}, created {report.created}"
    if report.epoch:
        yield f"epoch           {report.epoch}, of node {report.epoch_node_id}"
    with_records = sum(partition.records > 0 for partition in report.partitions.values())
    yield f"partitions      {report.partition_count}, {with_records} with records"
    size = size_text(sum(segment.size_bytes for segment in segments))
    counts = f"{count_text(records, 'record')} in {count_text(len(segments), 'segment')}"
    yield f"journal         {counts}, {size}"
    if segments:
        end = segments[-1].sequence + segments[-1].records
        yield f"sequences       {segments[0].sequence} to {end}"
    times = [segment for segment in segments if segment.first_us is not None]
    if times:
        first = min(segment.first_us or 0 for segment in times)
        last = max(segment.last_us or 0 for segment in times)
        yield f"times           {time_text(first)} to {time_text(last)}"
    yield f"damage          {len(report.problems) or 'none'}"


def _segment_rows(report: DirectoryReport) -> Iterator[dict[str, str]]:
    for segment in report.segments:
        yield {
            "sequence": str(segment.sequence),
            "records": str(segment.records),
            "batches": str(segment.batches),
            "size": size_text(segment.size_bytes),
            "first time": _optional_time(segment.first_us),
            "last time": _optional_time(segment.last_us),
            "state": _segment_state(segment),
        }


def _segment_state(segment: SegmentReport) -> str:
    states = []
    if segment.damage_bytes:
        states.append(f"{segment.damage_bytes} bytes damaged")
    if segment.unfinished_bytes:
        states.append(f"{segment.unfinished_bytes} bytes unfinished")
    if segment.superseded:
        states.append(f"{segment.superseded} records superseded")
    if segment.missing:
        states.append(f"{segment.missing} records missing")
    if segment.index:
        states.append(f"index {'missing' if segment.index == 'missing' else 'wrong'}")
    return ", ".join(states) or "whole"


def _partition_rows(report: DirectoryReport) -> Iterator[dict[str, str]]:
    for number, partition in sorted(report.partitions.items()):
        missing = partition.end - partition.start - partition.records
        counts = (number, partition.start, partition.end, partition.records, missing)
        if partition.end:
            yield dict(zip(_PARTITION_COLUMNS, map(str, counts), strict=True))


def _snapshot_rows(report: DirectoryReport) -> Iterator[dict[str, str]]:
    for snapshot in report.snapshots:
        yield {
            "sequence": str(snapshot.sequence),
            "entries": "-" if snapshot.entries is None else str(snapshot.entries),
            "size": size_text(snapshot.size_bytes),
            "created": _optional_time(snapshot.created_us),
            "state": snapshot.error or "whole",
        }


def _optional_time(timestamp_us: int | None) -> str:
    return "-" if timestamp_us is None else time_text(timestamp_us)


def _section(title: str, rows: Iterator[dict[str, str]]) -> Iterator[str]:
    """Returns a table with the columns of its rows, or nothing without rows."""
    return _list(title, list(table(list(rows), _RIGHT)))


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield title
        yield from (f"  {line}" for line in lines)
