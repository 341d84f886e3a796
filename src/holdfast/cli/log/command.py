"""`holdfast log`: reads a data directory, whether a broker serves it or not.

    inspect   the content: segments, partitions, times, snapshots, damage
    verify    every checksum, index and offset; exit code 1 if something is wrong
    dump      records, oldest first
    tail      the newest records, and with -f those that arrive
    trace     the way of one message, over the admin port of a broker
    groups    the consumer groups and the registered lakes
    why       why a client has, or has not, received a message

No subcommand writes. They show what the files contain: the last records may not be durable yet. For
a cluster's replica, dump and tail show the records that were valid and committed at its last
checkpoint. Damage is reported on standard error and skipped.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from holdfast.cli.log import trace
from holdfast.cli.log.records import (
    KINDS,
    Bound,
    ReplicaJournal,
    Selection,
    json_line,
    parse_bound,
    parse_filter,
    record_of,
    text_line,
)
from holdfast.cli.log.report import examine, report_lines
from holdfast.cli.text import count_text
from holdfast.client.log import LogClient, LogGap, LogOptionError
from holdfast.client.log.reading.offsets import DataLossError
from holdfast.log.batch import Batch, CorruptBatch
from holdfast.log.files.data_directory import DataDirectoryError, open_to_read
from holdfast.log.files.layout import DataDirectory
from holdfast.log.reading.segment_reader import Damage, SegmentReader
from holdfast.log.record import Record
from holdfast.numbers import whole_number

EXIT_DAMAGE: Final = 1
EXIT_UNREADABLE: Final = 2
POLL_S: Final = 0.1
"""The interval in seconds in which tail -f looks for new records."""
TAIL_RECORDS: Final = 10


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "log",
        help="inspect, verify, dump or follow a data directory",
        description="Look into a data directory, whether a broker serves it or not. Only reads.",
    )
    commands = parser.add_subparsers(dest="log_command", metavar="COMMAND", required=True)
    inspect = commands.add_parser("inspect", help="what it holds, and what is damaged")
    verify = commands.add_parser("verify", help="check everything; exit code 1 on damage")
    dump = commands.add_parser("dump", help="print records, oldest first")
    tail = commands.add_parser("tail", help="print the newest records")
    dump.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        nargs="?",
        help="data directory",
    )
    dump.add_argument(
        "--lake",
        default="",
        metavar="LAKE",
        help="a directory or URL of a lake, in place of DIR",
    )
    for each in (inspect, verify, tail):
        each.add_argument("directory", type=Path, metavar="DIR", help="data directory")
    for each in (inspect, verify, dump, tail):
        each.add_argument("--json", action="store_true", help="print JSON")
    for each in (dump, tail):
        _add_selection(each)
    for bound, text in (("from", "first"), ("to", "end before this")):
        dump.add_argument(
            f"--{bound}",
            type=parse_bound,
            default=Bound(),
            metavar="WHEN",
            help=f"{text} offset, or time like 2026-01-31T12:00:00Z",
        )
    tail.set_defaults(**{"from": Bound(), "to": Bound()})
    tail.add_argument("-f", "--follow", action="store_true", help="go on as records arrive")
    tail.add_argument(
        "-n",
        "--lines",
        type=_count,
        default=TAIL_RECORDS,
        metavar="N",
        help=f"records from before (default {TAIL_RECORDS})",
    )
    trace.add_parsers(commands)
    parser.set_defaults(run=run)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--partition", type=_count, action="append", default=[], metavar="P", help="repeatable"
    )
    parser.add_argument(
        "--topic",
        type=parse_filter,
        action="append",
        default=[],
        metavar="FILTER",
        help="messages and retained topics under a topic filter; repeatable",
    )
    parser.add_argument(
        "--kind", choices=KINDS, action="append", default=[], help="kind of record; repeatable"
    )
    parser.add_argument("--full", action="store_true", help="do not shorten payloads")


def _count(text: str) -> int:
    number = whole_number(text, 1 << 62)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 up")
    return number


def run(args: argparse.Namespace) -> int:
    """Runs a subcommand. Returns 1 for damage, 2 for a directory that cannot be read."""
    remote = trace.COMMANDS.get(args.log_command)
    if remote is not None:
        return remote(args)
    if args.log_command == "dump" and bool(args.lake) == (args.directory is not None):
        print("holdfast: give either a data directory or --lake LAKE", file=sys.stderr)
        return EXIT_UNREADABLE
    if args.log_command == "dump" and args.lake:
        return _dump_lake(args)
    try:
        directory = open_to_read(args.directory)
        return _COMMANDS[args.log_command](directory, args)
    except BrokenPipeError:
        raise
    except (DataDirectoryError, OSError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_UNREADABLE


def _inspect(directory: DataDirectory, args: argparse.Namespace) -> int:
    report = examine(directory, args.directory, deep=False)
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print("\n".join(report_lines(report)))
    return 0


def _verify(directory: DataDirectory, args: argparse.Namespace) -> int:
    report = examine(directory, args.directory, deep=True)
    if args.json:
        fields = {"ok": not report.problems, "problems": report.problems, "notes": report.notes}
        print(json.dumps(fields, indent=2))
    else:
        for line in report.problems:
            print(f"damage  {line}")
        for line in report.notes:
            print(f"note    {line}")
        records = count_text(sum(segment.records for segment in report.segments), "record")
        segments = count_text(len(report.segments), "segment")
        snapshots = count_text(len(report.snapshots), "snapshot")
        found = count_text(len(report.problems), "problem") if report.problems else "no damage"
        print(f"{found} in {records} of {segments} and {snapshots}")
    return EXIT_DAMAGE if report.problems else 0


def _dump(directory: DataDirectory, args: argparse.Namespace) -> int:
    printer = _Printer(args)
    if directory.manifest.is_replica:
        for record in ReplicaJournal(directory, printer.tell).records():
            printer.show_record(record)
        return EXIT_DAMAGE if printer.has_seen_damage else 0
    sequences = directory.segments()
    for sequence in sequences:
        try:
            reader = SegmentReader(directory, sequence)
        except FileNotFoundError:
            continue  # Retention removes the oldest ones meanwhile.
        for item in reader.read(newest=sequence == sequences[-1]):
            printer.show(item)
    return EXIT_DAMAGE if printer.has_seen_damage else 0


def _dump_lake(args: argparse.Namespace) -> int:
    """Prints the messages of a lake."""
    try:
        # Imported here, because a lake needs packages that no other command does.
        from holdfast.client.log.lake.errors import LakeError
    except ImportError as error:
        print(f"holdfast: a lake needs pip install 'holdfast[spark]': {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    printer = _Printer(args)
    start_us = printer.selection.start.time_us
    start = None if start_us is None else datetime.fromtimestamp(start_us / 1e6, UTC)
    try:
        log = LogClient.offline(lake=args.lake)
        with log.read(args.topic or "#", start=start, on_gap=printer.tell) as cursor:
            for message in cursor:
                printer.show_record(record_of(message))
    except (LakeError, LogOptionError, DataLossError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    return EXIT_DAMAGE if printer.has_seen_damage else 0


def _tail(directory: DataDirectory, args: argparse.Namespace) -> int:
    printer = _Printer(args)
    if directory.manifest.is_replica:
        return _tail_replica(directory, printer, args)
    reader, newest = _newest_records(directory, printer, args.lines)
    for record in newest:
        printer.print(record)
    sys.stdout.flush()
    follower = _Follower(directory, reader)
    while args.follow:
        for item in follower.arrived():
            printer.show(item)
        sys.stdout.flush()
        time.sleep(POLL_S)
    return EXIT_DAMAGE if printer.has_seen_damage else 0


def _tail_replica(directory: DataDirectory, printer: "_Printer", args: argparse.Namespace) -> int:
    log = ReplicaJournal(directory, printer.tell)
    for record in log.newest(args.lines, printer.selection):
        printer.print(record)
    sys.stdout.flush()
    follower = _Follower(directory, log.reader())
    while args.follow:
        checkpoint = directory.read_checkpoint()
        for item in follower.arrived():
            if isinstance(item, Damage):
                printer.tell(item)
            else:
                assert follower.reader is not None
                position = follower.reader.position - item.length
                log.add(item, follower.reader.sequence, position)
        for record in log.committed(checkpoint):
            printer.show_record(record)
        sys.stdout.flush()
        time.sleep(POLL_S)
    return EXIT_DAMAGE if printer.has_seen_damage else 0


class _Printer:
    """Prints the chosen records of batches, and reports damage."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.selection = Selection(
            frozenset(args.partition),
            tuple(args.topic),
            frozenset(KINDS[name] for name in args.kind),
            getattr(args, "from"),  # `from` is a keyword.
            args.to,
        )
        self.json: bool = args.json
        self.full: bool = args.full
        self.has_seen_damage = False

    def show(self, item: Batch | Damage) -> None:
        if isinstance(item, Damage):
            self.tell(item)
        else:
            for record in self.selection.records(item):
                self.print(record)

    def show_record(self, record: Record) -> None:
        if self.selection.has(record):
            self.print(record)

    def print(self, record: Record) -> None:
        print(json_line(record) if self.json else text_line(record, full=self.full))

    def tell(self, damage: Damage | LogGap) -> None:
        self.has_seen_damage = True
        sys.stdout.flush()
        missing = " are missing" if isinstance(damage, LogGap) else ""
        print(f"holdfast: {damage}{missing}", file=sys.stderr)


def _newest_records(
    directory: DataDirectory, printer: _Printer, count: int
) -> tuple[SegmentReader | None, list[Record]]:
    """Returns the newest `count` chosen records, oldest first, and the reader behind them."""
    newest: SegmentReader | None = None
    found: list[Record] = []
    for sequence in reversed(directory.segments()):
        try:
            reader = SegmentReader(directory, sequence)
        except FileNotFoundError:
            break  # Removed by retention, so older segments are removed too.
        positions: list[int] = []
        for item in reader.read(newest=newest is None):
            if isinstance(item, Damage):
                printer.tell(item)
            else:
                positions.append(reader.position - item.length)
        newest = newest or reader
        while positions and len(found) < count:
            with contextlib.suppress(CorruptBatch):  # The broker has truncated it since.
                batch = reader.read_batch(positions.pop())
                found += reversed(printer.selection.records(batch))
        if len(found) >= count:
            break
    return newest, found[:count][::-1]


class _Follower:
    """Continues at the position of a reader, and into newer segments."""

    def __init__(self, directory: DataDirectory, reader: SegmentReader | None) -> None:
        self.directory = directory
        self.reader = reader

    def arrived(self) -> Iterator[Batch | Damage]:
        """Yields what has been written since the last call."""
        while True:
            reader = self.reader
            # Listed before reading: if there is a newer segment, this one is complete.
            newer = [
                sequence
                for sequence in self.directory.segments()
                if reader is None or sequence > reader.sequence
            ]
            if reader is not None:
                yield from reader.read(newest=not newer)
            if not newer:
                return
            try:
                self.reader = SegmentReader(self.directory, newer[0])
            except FileNotFoundError:
                continue  # Retention has removed it.


_COMMANDS: Final = {"inspect": _inspect, "verify": _verify, "dump": _dump, "tail": _tail}
