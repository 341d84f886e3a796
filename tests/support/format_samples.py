"""One example of each thing that Holdfast writes to a disk or a peer: its value, its bytes, and how
the bytes are read.

`tests/data/formats/NAME-NUMBER.txt` has the bytes that each number of a format stands for, one
example a line. `tools/formats.py` writes those files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.client.log.lake import commits
from holdfast.io.disk import raft_files
from holdfast.log import snapshot
from holdfast.log.batch import ATTRIBUTE_GROUPED, ATTRIBUTE_MORE, FORMAT, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files import layout
from holdfast.log.files.data_directory import read_manifest
from holdfast.log.journal import watermarks
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.epoch_folders import Epoch, read_epoch, write_epoch
from holdfast.log.reading import index_file
from holdfast.log.record import FORGOTTEN, Record
from holdfast.node.admission.bans import Ban
from holdfast.node.publish.producers import (
    ProducerPosition,
    decode_producer,
    encode_producer,
    forgotten,
    forgotten_us,
)
from holdfast.node.raft.log import EntryKind, LogEntry, Membership, RaftSnapshot, RaftState
from holdfast.node.raft.state import Write
from holdfast.node.session.audience import Audience, decode_audience, encode_audience
from holdfast.node.session.state import decode_cursor, encode_cursor
from holdfast.node.state import session_records as sessions
from holdfast.node.state.ban_records import BanEntry, ban_entry, decode_ban
from holdfast.node.state.groups import MEMBERS, MembersEntry
from holdfast.security import peer_identity
from holdfast.security.access import access_file
from holdfast_federation.core import frames as federation
from holdfast_federation.core.identity import Identity, decode_identity
from holdfast_lake.lake.settings import LakeSettings, Registration
from tests.sim.disk import SimDisk

FOLDER: Final = Path(__file__).parents[1] / "data" / "formats"
TIME_US: Final = 1_790_000_000_000_000
A, B, C = (bytes((number,)) * 16 for number in (1, 2, 3))

NUMBERS: Final = {
    "manifest": layout.FORMAT,
    "batch": FORMAT,
    "index": index_file.FORMAT,
    "snapshot": snapshot.FORMAT,
    "watermarks": watermarks.FORMAT,
    "records": 1,
    "raft": 1,
    "lake": commits.FORMAT,
    "access": access_file.FORMAT,
    "epoch": 1,
    "cluster-wire": peer_identity.WIRE_VERSION,
    "federation-wire": federation.VERSION,
}
"""The present number of each format. Formats without a number in their bytes have 1."""


@dataclass(frozen=True)
class Sample:
    """An example of a format. `decode` reads bytes as the program does, and its result equals
    `value`. `is_exact`: this program writes just
    these bytes. Others depend on a library, or were written by an earlier one."""

    format: str
    name: str
    value: object
    data: bytes
    decode: Callable[[bytes], object]
    is_exact: bool = True

    @property
    def line(self) -> str:
        return f"{self.name} {self.data.hex()}"


def recorded(format: str, number: int) -> dict[str, bytes]:
    """The recorded bytes of one number of a format, by name. Raises `FileNotFoundError`."""
    lines = (FOLDER / f"{format}-{number}.txt").read_text().splitlines()
    return {name: bytes.fromhex(data) for name, data in (line.split() for line in lines)}


def disk_samples() -> Iterator[Sample]:
    """The examples of files."""
    yield from _disk()
    yield from _records()
    yield from _raft_files()
    yield from _lake()


def records_of(data: bytes) -> list[dict[str, Any]]:
    return [vars_of(record) for record in Batch(data).records()]


def vars_of(record: Record) -> dict[str, Any]:
    names = (
        *("partition", "offset", "kind", "flags", "timestamp_us", "topic", "client_id", "producer"),
        *("producer_epoch", "sequence", "properties", "payload", "ticket", "audience"),
    )
    return {name: getattr(record, name) for name in names}


def log_records() -> list[Record]:
    """A record of each kind, with each field."""
    everything: dict[str, Any] = {
        "topic": "a/ä".encode(),
        "client_id": b"client",
        "producer": b"producer",
        "producer_epoch": 7,
        "sequence": 8,
        "ticket": 9,
        "properties": b"\x03\x00\x01x",
        "payload": b"payload",
    }
    flags = (0, 1, 2, 0x05, 0x0A, 0x11, 0x21)
    found = [Record(3, 1, flag, TIME_US + flag, **everything) for flag in flags]
    audience = encode_audience(Audience(False, ["$share/g/a"]))
    found.append(Record(3, 1, 0x41, TIME_US, audience=audience, **everything))
    return found + [Record(3, kind, 0, TIME_US, **everything) for kind in range(2, 9)]


def batch(records: list[Record], attributes: int = 0) -> bytes:
    builder = BatchBuilder(3, 11)
    for record in records:
        builder.add(record)
    return builder.build(5, attributes=attributes, group=6 if attributes else 0)


def expected(records: list[Record]) -> list[dict[str, Any]]:
    return [vars_of(record) | {"offset": 11 + at} for at, record in enumerate(records)]


def _disk() -> Iterator[Sample]:
    records = log_records()
    yield Sample("batch", "all_kinds", expected(records), batch(records), records_of)
    grouped = batch(records[:1], ATTRIBUTE_GROUPED | ATTRIBUTE_MORE)
    yield Sample(
        "batch", "grouped", (6, 0x0C), grouped, lambda d: (Batch(d).group, Batch(d).attributes)
    )
    index = ActiveIndex(4, [0, 0, 0, 11])
    builder = BatchBuilder(3, 11)
    builder.epoch = 5
    for record in records:
        builder.add(record)
    index.add_built(0, len(builder.build(5)), builder)
    sealed = index_file.decode(index.encode())
    yield Sample(
        "index", "one_batch", _index(sealed), index.encode(), lambda d: _index(index_file.decode(d))
    )
    encoder = snapshot.SnapshotEncoder(17, [1, 2, 3], TIME_US)
    pieces = [*encoder.add(1, b"session"), *encoder.add(2, b"retained"), *encoder.finish()]
    content = (17, [1, 2, 3], TIME_US, [(1, b"session"), (2, b"retained")])
    yield Sample("snapshot", "two_entries", content, b"".join(pieces), _snapshot)
    checkpoint = watermarks.Checkpoint([3, 4], 5, 600)
    data = watermarks.encode_checkpoint(checkpoint)
    yield Sample(
        "watermarks",
        "two_partitions",
        checkpoint,
        data,
        lambda d: watermarks.decode_checkpoint(d, 2),
    )
    former = ((0, (1, 2, 3, 4)), (7, (5, 6, 7, 8)))
    for name, fields in (
        ("node", ()),
        ("replica", ("c1", "i1")),
        ("node_put_back", ("", "", 9, former)),
        ("replica_put_back", ("c1", "i1", 7, (), 9)),
    ):
        manifest = layout.Manifest("n1", 4, "2026-11-23T12:00:00+00:00", *fields)
        yield Sample("manifest", name, manifest, _written_manifest(manifest), _read_manifest)
    start = (5, [1, 2, 3, 4], [(0, 2, 1)])
    yield Sample("manifest", "start", start, _written_start(*start), _read_start)
    epoch = Epoch(3, "n1", "2026-11-23T12:00:00+00:00", {0: 100, 7: 50})
    yield Sample("epoch", "sealed", epoch, _written_epoch(epoch), _read_epoch)
    yield Sample(
        "epoch", "member_identity", Identity(A, 5), Identity(A, 5).encode(), decode_identity
    )


def _index(index: index_file.SealedIndex) -> object:
    head = index.head
    fields = attrgetter(
        "sequence", "start_offsets", "end_offsets", "log_bytes", "records", "epochs"
    )
    arrays = (index.base_offsets, index.positions, index.counts, index.partitions, index.attributes)
    return fields(head), [list(each) for each in arrays], index.message_counts()


def _snapshot(data: bytes) -> object:
    found = snapshot.Snapshot(lambda at, length: data[at : at + length], len(data))
    return found.sequence, found.offsets, found.created_us, list(found.entries())


def _directory(manifest: layout.Manifest | None = None) -> layout.DataDirectory:
    files = SimDisk()
    for folder in (layout.JOURNAL, layout.SNAPSHOTS):
        files.make_folder(folder)
    return layout.DataDirectory(files, manifest or layout.Manifest("n1", 4, "", "c1", "i1"))


def _written_manifest(manifest: layout.Manifest) -> bytes:
    directory = _directory()
    directory.write_manifest(manifest)
    return directory.read_file(layout.MANIFEST) or b""


def _read_manifest(data: bytes) -> layout.Manifest:
    directory = _directory()
    directory.replace_file(layout.MANIFEST, [data])
    return read_manifest(directory.files, Path("sample"))


def _written_start(sequence: int, offsets: list[int], epochs: list[tuple[int, int, int]]) -> bytes:
    directory = _directory()
    directory.write_start(sequence, offsets, epochs)
    return directory.read_file(layout.START) or b""


def _read_start(data: bytes) -> object:
    directory = _directory()
    directory.replace_file(layout.START, [data])
    start = directory.read_start()
    assert start is not None
    return (*start, directory.read_start_epochs())


def _written_epoch(epoch: Epoch) -> bytes:
    files = SimDisk()
    files.make_folder(epoch.folder)
    write_epoch(files, epoch)
    file = files.open_read(f"{epoch.folder}/epoch.json")
    return file.read(0, file.size())


def _read_epoch(data: bytes) -> Epoch | None:
    files = SimDisk()
    files.make_folder("epochs/0000000003")
    layout.DataDirectory(files, layout.Manifest("", 1, "")).replace_file(
        "epochs/0000000003/epoch.json", [data]
    )
    return read_epoch(files, 3)


def _records() -> Iterator[Sample]:
    """The payloads of records, which entries of snapshots also have."""
    will = sessions.WillEntry("w", b"gone", 1, True, b"\x02\x00\x00\x00\x05", 5, 3)
    entry = sessions.ReplayEntry([1, 2], [3, 4], {"t": 2}, [(0, 1)])
    row: sessions.SubscriptionRow = ("a/+", 1, True, False, 2, 7)
    for record in (
        sessions.OpenRecord("c", 3, 60, False, "u", True, "n1", 4, will),
        sessions.CloseRecord("c", 60, True, True),
        sessions.EndRecord("c"),
        sessions.SubscribeRecord("c", [row], [1, 2], [3, 4], {"a/+": entry}),
        sessions.UnsubscribeRecord("c", ["a/+"]),
        sessions.RetainedRecord("c", {"a/+": "a/b", "b/#": None}, [1, 2]),
        sessions.ReserveRecord("", 1000),
        sessions.QueueRecord("$share/$queue/a", [1, 2], "c"),
        sessions.MemberRecord("$share/g/a", "c", left=True),
        sessions.MembersRecord(""),
    ):
        data = sessions.encode_session(record)
        yield Sample("records", type(record).__name__, record, data, sessions.decode_record)
    whole = sessions.SessionEntry(
        client="c", epoch=3, expiry_s=60, username="u", proved=True, disconnected_us=TIME_US,
        open=False, owner="n1", subscriptions=[(*row, [1, 2])], inbound=[(5, 1)], cursor=b"\0" * 4,
        done=[(0, 9)], will=will, born=1, requests=[2], maybe_sent=True, replays={"a/+": entry},
    )  # fmt: skip
    yield Sample("records", "session", whole, sessions.encode_session(whole), sessions.decode_entry)
    opened = sessions.OpenRecord("c", 3, 60, False, "u", True, "n1", 4, will, 9)
    data = sessions.encode_session(opened)
    yield Sample("records", "OpenRecord.put_back", opened, data, sessions.decode_record)
    doubtful = msgspec.structs.replace(whole, doubtful=[5], trusted=(9, 3))
    data = sessions.encode_session(doubtful)
    yield Sample("records", "session.put_back", doubtful, data, sessions.decode_entry)
    queue = sessions.QueueRecord("$share/$queue/a", [1, 2], "c", "u", True)
    data = sessions.encode_session(queue)
    yield Sample("records", "QueueRecord.past", queue, data, sessions.decode_record)
    past = msgspec.structs.replace(whole, past=True)
    data = sessions.encode_session(past)
    yield Sample("records", "session.past", past, data, sessions.decode_entry)
    group = sessions.GroupEntry("$share/g/a", [1, 2], [(0, 1)], [(1, [4])], 2)
    data = sessions.encode_session(group)
    yield Sample("records", "group", group, data, lambda d: sessions.decode_group(d, 2))
    members = MembersEntry(1, "$share/g/a", [("c", 4), ("d", 5)])
    yield Sample("records", "members", members, msgspec.json.encode(members), MEMBERS.decode)
    data = encode_cursor([(0, 5), (1, 6)], {7: None}, [(1, 9)])
    value = ([(0, 5), (1, 6)], [(7, None)], [(1, 9)])
    yield Sample(
        "records",
        "cursor",
        value,
        data,
        lambda d: attrgetter("positions", "inflight", "done")(decode_cursor(d, 2)),
    )
    place = ProducerPosition(1)
    place.epoch, place.sequence, place.stored_us = 2, 3, TIME_US
    data = encode_producer(b"p", [place])
    yield Sample("records", "producer", (b"p", [(1, 2, 3, TIME_US)]), data, _producer)
    payload = forgotten(b"p", place, TIME_US).payload
    yield Sample("records", "forgotten", TIME_US, payload, _forgotten_us)
    ban = BanEntry(TIME_US, "too loud", "user amy", TIME_US, "client", "c")
    data = ban_entry(Ban("client", "c", TIME_US, "too loud", "user amy", TIME_US))
    yield Sample("records", "ban", ban, data, decode_ban)
    audience = Audience(True, ["$share/g/a", "$share/h/b"])
    yield Sample("records", "audience", audience, encode_audience(audience), decode_audience)


def _forgotten_us(data: bytes) -> int:
    return forgotten_us(Record(0, FORGOTTEN, payload=data))


def _producer(data: bytes) -> object:
    name, producer = decode_producer(data)
    fields = attrgetter("partition", "epoch", "sequence", "stored_us")
    return name, [fields(place) for place in producer.positions()]


ENTRIES: Final = (
    LogEntry(5, 2, EntryKind.NOTHING, b""),
    LogEntry(6, 2, EntryKind.COMMAND, b"\x02n1command"),
    LogEntry(7, 2, EntryKind.MEMBERS, Membership(("n1.a",), ("n2.b",)).encode()),
)
SNAPSHOT: Final = RaftSnapshot(4, 1, Membership(("n1.a", "n2.b"), ()), b"[]\nmetadata")


def _raft_files() -> Iterator[Sample]:
    disk = SimDisk()
    files = raft_files.RaftFiles(disk, "n1.a", is_new=True)
    first = [LogEntry(at, 2, each.kind, each.data) for at, each in enumerate(ENTRIES, 1)]
    files.write(Write(2, "n1.a", 0, tuple(first), True))
    files.write(Write(3, "n2.b", 2, (), True))
    file = disk.open_read(raft_files.LOG)
    value = (3, "n2.b", 2, 3, [each.data for each in ENTRIES])

    def read(data: bytes) -> object:
        fresh = SimDisk()
        fresh.make_folder(raft_files.FOLDER)
        writer = fresh.open_write(raft_files.LOG, create=True)
        writer.write(0, [data])
        writer.sync()
        state: RaftState = raft_files.RaftFiles(fresh, "n1.a", is_new=False).state
        return (
            state.term,
            state.vote,
            state.commit,
            len(state.entries),
            [e.data for e in state.entries],
        )

    yield Sample("raft", "log", value, file.read(0, file.size()), read)


def _lake() -> Iterator[Sample]:
    """A commit and the settings of a lake. Its rows are Parquet."""
    file = commits.File(
        path="t/a.parquet", rows=3, bytes=100, version=2, since=1, staged="t/_staged/a.parquet",
        partition={"site": "x", "line": None}, times={"time": (TIME_US, TIME_US + 1)},
    )  # fmt: skip
    commit = commits.Commit(
        table="t", lineage="l", version=2, revision=1, columns=[("n", "bigint")],
        partition_by=["site"], committed_at_us=TIME_US, took_s=0.5, rows=3, quarantined=1,
        rows_total=9, quarantined_total=2,
        consumed=commits.Consumed(table="records", lineage="r", upto=4, rows=12),
        offsets={"0": 7}, files=[file], counts={"repeated": 1}, removed=["t/b.parquet"],
        skipped=[commits.Skipped(partition=0, first=1, end=2, version=1, at_us=TIME_US)],
        merges=True, change="added n",
    )  # fmt: skip
    decode = msgspec.json.Decoder(commits.Commit).decode
    # Without the identity of its log, as the first lakes have it.
    yield Sample("lake", "commit", commit, msgspec.json.encode(commit), decode, is_exact=False)
    commit = msgspec.structs.replace(commit, log="cluster c0ffee")
    yield Sample("lake", "commit.log", commit, msgspec.json.encode(commit), decode, is_exact=False)
    file = msgspec.structs.replace(file, offsets={0: (2, 7)})
    commit = msgspec.structs.replace(
        commit, files=[file], begins={"0": 2},
        restored=[commits.LogRestore(version=2, offsets={"0": 4})],
    )  # fmt: skip
    yield Sample("lake", "commit.begins", commit, msgspec.json.encode(commit), decode)
    settings = LakeSettings(1, "parquet", {"path": "/data"}, [], [Registration("c", "n")])
    read = msgspec.json.Decoder(LakeSettings).decode
    yield Sample("lake", "settings", settings, msgspec.json.encode(settings), read)
    user = access_file.StoredUser("admin", "$argon2id$", 5)
    data = msgspec.json.encode(user)
    yield Sample("access", "user", user, data, msgspec.json.Decoder(access_file.StoredUser).decode)
