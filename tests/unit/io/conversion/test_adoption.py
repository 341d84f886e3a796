"""Adoptions of a broker into a cluster's node, file by file and state by state."""

import asyncio
import errno
import hashlib
import operator
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.backup.manifest import NewDirectory
from holdfast.cli.cluster.adopt import PARTIAL, adopt_copy
from holdfast.cli.main import main
from holdfast.io.conversion.adoption import adopt
from holdfast.io.conversion.carried import CarriedState, carry
from holdfast.io.conversion.conversion import MADE_AGAIN
from holdfast.io.conversion.definitions import Definitions
from holdfast.io.conversion.raft_metadata import read_metadata
from holdfast.io.conversion.source import Source, recover
from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.io.disk.storage import Storage, StorageError
from holdfast.log.files.data_directory import (
    DataDirectoryError,
    create_or_open,
    lock_root,
    open_to_read,
)
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import BEFORE_ADOPTION, snapshot_name
from holdfast.log.journal.recovery import open_journal
from holdfast.log.record import CURSOR, MESSAGE, SESSION, Record
from holdfast.protocol.mqtt.reasons import NO_MATCHING_SUBSCRIBERS
from holdfast.testing import Broker
from holdfast_federation.sidecar.edge_broker.origin_offset import LogPlace, offset_in
from tests.e2e import wire
from tests.support.broker_in_process import loop_broker
from tests.support.edge_site import Site
from tests.support.peer_mesh import until
from tests.support.ports import free_port

KEPT = Path(__file__).parents[3] / "data" / "single"
"""Directories of a single broker, as version 0.1 left them."""
WAITING = {(0, 0), (0, 1), (1, 0), (1, 1), (2, 5), (3, 0), (3, 1)}
"""Partition and offset of the messages that wait for the other members in `member`."""
SETTINGS = {"log.partitions": 4, "log.segment_bytes": 1 << 16}
FOR_EVER = 0xFFFF_FFFF
TEAM = "$share/team/jobs/#"
LINE = "$share/$queue/line/#"


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a broker of version 0.1 that was killed. It has everything that a broker
    keeps, and of each something unfinished: sessions, an unreleased QoS 2 publish, a will, a shared
    group, a queue, a delayed message, a numbered producer and a ban."""
    return unpack("killed", tmp_path_factory.mktemp("lived") / "data")


def unpack(name: str, directory: Path) -> Path:
    with tarfile.open(KEPT / f"{name}.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    return directory


def messages(directory: Path) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Every message of the log, by partition and offset."""
    return messages_of(reading(directory))


def messages_of(source: Source) -> dict[tuple[int, int], tuple[Any, ...]]:
    found = {}
    for batch in source.batches():
        for record in batch.records():
            if record.kind == MESSAGE:
                found[record.partition, record.offset] = (
                    *(record.topic, record.payload, record.properties, record.client_id),
                    *(record.timestamp_us, record.producer, record.audience),
                    *(record.sequence, record.flags & 0x07),
                )
    return found


def reading(directory: Path) -> Source:
    return Source(directory, open_to_read(directory))


def state_of(directory: Path) -> CarriedState:
    return reading(directory).carried()


def state_by_log(directory: Path, copy: Path, now_us: int) -> CarriedState:
    """What a node that follows the log makes of it."""
    shutil.copytree(directory, copy)
    opened = open_to_read(copy)
    for sequence in opened.snapshots():
        (copy / snapshot_name(sequence)).unlink()
    journal = open_journal(opened, writes=False)
    for partition, end in enumerate(journal.journal.next_offset):
        journal.journal.advance(partition, end)
    return carry(recover(opened, journal, now_us), journal)


def digest(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def test_nothing_is_lost_on_the_way(lived: Path, tmp_path: Path) -> None:
    before, cluster = digest(lived), tmp_path / "cluster"
    original = state_of(lived)
    assert {each.client for each in original.sessions} == {"away", "member", "publisher"}
    assert {group.key for group in original.groups} == {TEAM, LINE}
    assert len(original.entries) >= 4
    manifest = adopt_copy(lived, cluster)
    assert digest(lived) == before
    assert messages(cluster) == messages(lived)
    assert state_of(cluster).lasting() == original.lasting()
    by_log = state_by_log(cluster, tmp_path / "by log", reading(cluster).now_us)
    assert by_log.lasting() == original.lasting()
    assert manifest.cluster_id
    assert not (cluster / BEFORE_ADOPTION).exists()


def test_an_adopted_cluster_follows_its_nodes(lived: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    manifest = adopt_copy(lived, new)
    metadata = read_metadata(new, manifest)
    assert metadata is not None
    assert metadata.cluster_id == manifest.cluster_id
    assert (metadata.replication_factor, metadata.min_insync) == (1, 1)
    assert metadata.replication is not None
    assert metadata.replication.is_automatic


def test_the_directory_of_a_node_is_copied_as_it_is(lived: Path, tmp_path: Path) -> None:
    one, new = adopted_copy(lived, tmp_path), tmp_path / "new"
    before = digest(one)
    adopt_copy(one, new)
    assert digest(one) == before
    assert digest(new) == {
        name: each for name, each in before.items() if not name.startswith(BEFORE_ADOPTION)
    }


@pytest.mark.parametrize("dropped", range(0, 20, 3))
def test_a_definition_that_is_missing(
    lived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: int
) -> None:
    """The command compares what it has made before it gives it a name. Not a group's cursor,
    which its start and its members may tell as well: then nothing is missing."""
    records = Definitions.records

    def fewer(definitions: Definitions, carried: CarriedState) -> Iterator[Any]:
        number = 0
        for record in records(definitions, carried):
            is_asked = record.kind != CURSOR or record.client_id.decode() not in (LINE, TEAM)
            if not is_asked or number != dropped:
                yield record
            number += is_asked

    count = len(list(records(Definitions(4, 0, "n1"), state_of(lived)))) - 2
    monkeypatch.setattr(Definitions, "records", fewer)
    if dropped < count:
        with pytest.raises((StorageError, AssertionError)):
            adopt_copy(lived, tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Killed(BaseException):
    """The end of the process."""


class Countdown:
    """Ends the process at a change of the disk, once `left` of them remain."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stop()
        for kind, names in (
            (OsFileSystem, ("sync_folder", "rename", "open_write", "make_folder")),
            (Path, ("rename", "rmdir", "mkdir")),
        ):
            for name in names:
                monkeypatch.setattr(kind, name, self._counted(getattr(kind, name)))

    def stop(self) -> None:
        self.left = 10**9

    def _counted(self, method: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise Killed
            return method(*args, **options)

        return counted


@pytest.mark.parametrize("is_mount", [False, True], ids=["folder", "mount point"])
def test_a_kill_at_each_change_of_the_disk(
    lived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mount: bool
) -> None:
    """The old directory is whole, and no node takes what is there of the new one."""
    before, target = digest(lived), tmp_path / "new"
    countdown = Countdown(monkeypatch)
    monkeypatch.setattr(Path, "is_mount", lambda path: is_mount and path == target)
    leave = NewDirectory.__exit__

    def leave_or_die(made: NewDirectory, kind: Any, error: Any, trace: Any) -> None:
        if not isinstance(error, Killed):
            leave(made, kind, error, trace)

    monkeypatch.setattr(NewDirectory, "__exit__", leave_or_die)
    kills = int(is_mount)
    while True:
        countdown.stop()
        if is_mount:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
        countdown.left = kills + 1
        try:
            adopt_copy(lived, target)
        except Killed:
            countdown.stop()
        else:
            break
        assert digest(lived) == before
        if target.exists() and (target / "manifest.json").exists():
            # Everything is in its place, only the last names may not be durable.
            assert state_of(target).lasting() == state_of(lived).lasting()
            shutil.rmtree(target)
        elif target.exists() and any(target.iterdir()):
            with pytest.raises(DataDirectoryError):
                create_or_open(target, "n1", 4, "now", "abc")
        kills += 2
    countdown.stop()
    assert kills > 20
    assert state_of(target).lasting() == state_of(lived).lasting()


def test_refusals(
    lived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(old: Path, new: Path) -> str:
        before = digest(old) if old.exists() else {}
        assert main(["cluster", "adopt", str(old), str(new)]) == 1
        assert before == (digest(old) if old.exists() else {})
        (line,) = capsys.readouterr().err.splitlines()
        return line

    new = tmp_path / "new"
    assert "is inside" in refused(lived, lived / "new")
    assert "no Holdfast data directory" in refused(tmp_path / "none", new)
    lock = lock_root(lived)
    assert "is served by another process" in refused(lived, new)
    lock.release()
    with monkeypatch.context() as patch:
        patch.setattr(OsFileSystem, "free_bytes", lambda files: 1000)
        assert "has 1000 bytes free" in refused(lived, new)
    for name, content, text in (
        ("adopted/file", "", "is half adopted: start its broker once"),
        ("lease/file", "", "is shared by several nodes"),
        ("manifest.json", '{"format": 99, "partitions": 4, "node_id": "n1", "created": ""}', "99"),
    ):
        other = tmp_path / "other"
        shutil.copytree(lived, other)
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_text(content)
        assert text in refused(other, new)
        shutil.rmtree(other)
    assert not list(tmp_path.glob("new*"))
    new.mkdir()
    (new / "file").touch()
    assert "not empty" in refused(lived, new)
    assert not list(tmp_path.glob(f"*{PARTIAL}"))


def test_a_disk_that_gets_full(
    lived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("holdfast.io.disk.journal_writer.GroupWriter.write", fail)
    new = tmp_path / "new"
    assert main(["cluster", "adopt", str(lived), str(new)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line
    assert not list(tmp_path.iterdir())


def places_of(site: Site) -> list[LogPlace]:
    found = [offset_in(each.properties) for each in site.host.published]
    return [each for each in found if each is not None]


def test_an_adopted_member_hands_over_what_waits_under_the_same_places(tmp_path: Path) -> None:
    """Its records have the names that other members may know, also after a restore."""
    data = unpack("member", tmp_path / "data")
    assert main(["backup", str(data), str(tmp_path / "backup")]) == 0
    assert main(["restore", str(tmp_path / "backup"), str(tmp_path / "restored")]) == 0

    async def scenario(root: Path) -> None:
        before = open_to_read(root).manifest
        adopt(root, "n1", 4)
        async with loop_broker(root) as broker:
            site = await Site(broker).start()
            await until(lambda: len(site.host.published) == 7)
            assert {each[2:] for each in places_of(site)} == WAITING
            site.deliver("in", b"again", 1, 1)
            await until(lambda: site.done == [b"again"])
            assert site.loop_broker.broker.node.state.stats.producer_duplicates == 1
            await site.edge.stop()
        after = open_to_read(root).manifest
        assert (after.created, after.log_generation) == (before.created, before.log_generation)
        assert after.former == before.former

    asyncio.run(scenario(tmp_path / "restored"))
    asyncio.run(scenario(data))


def test_a_broker_that_leaves_a_federation_keeps_its_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    federation = {"federation.name": "test", "federation.listen": f"127.0.0.1:{free_port()}"}
    for settings in (SETTINGS | federation, SETTINGS, SETTINGS):
        with Broker(data=data, settings=settings) as broker, wire.Wire(broker.port) as client:
            client.connect("c", expiry_s=60)
            assert client.publish("a", b"1", 1) == NO_MATCHING_SUBSCRIBERS
        assert open_to_read(data).manifest.is_replica
    assert caplog.text.count("federation_left") == 1


def test_the_new_directory_is_a_link(lived: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "new").symlink_to("disk")
    adopt_copy(lived, tmp_path / "new")
    assert (tmp_path / "new").is_symlink()
    assert (tmp_path / "disk" / "manifest.json").exists()
    assert {each.name for each in tmp_path.iterdir()} == {"disk", "new"}


def test_retention_has_removed_the_beginning(tmp_path: Path) -> None:
    """What the removed records defined is in the snapshot alone, and goes into the new one."""
    data, new = unpack("cut", tmp_path / "data"), tmp_path / "new"
    directory = open_to_read(data)
    opened = reading(data)
    assert any(opened.journal.start_offsets)
    (session,) = opened.carried().sessions
    assert list(session.inbound) == [999]
    assert len(opened.carried().entries) == 1
    adopt_copy(data, new)
    after = reading(new)
    assert messages(new) == messages(data)
    assert after.journal.start_offsets == opened.journal.start_offsets
    assert after.carried().lasting() == opened.carried().lasting()
    for number in directory.snapshots():
        directory.remove_snapshot(number)
    with pytest.raises(StorageError, match="begins behind its newest snapshot"):
        adopt_copy(data, tmp_path / "other")


def test_a_member_expires_before_the_conversion(tmp_path: Path) -> None:
    """The queue has its QoS 1 messages again. Its QoS 2 ones are finished, and its group ends."""
    data, cluster = tmp_path / "data", tmp_path / "cluster"
    unpack("expired", data)
    adopt_copy(data, cluster)
    assert state_of(cluster).lasting() == state_of(data).lasting()
    with Broker(data=data, settings=SETTINGS) as broker, wire.Wire(broker.port) as member:
        member.connect("another")
        member.subscribe(("$queue/line/#", 2), (TEAM, 2))
        assert [member.message().payload for _ in range(2)] == [b"0", b"2"]
        member.ping()
        assert not member.inbox


def replaced(directory: Path) -> dict[str, str]:
    """Return the digests of what an adoption makes again. The rest serves both kinds of nodes."""
    return {
        name: each for name, each in digest(directory).items() if name.split("/")[0] in MADE_AGAIN
    }


def adopted_copy(lived: Path, tmp_path: Path) -> Path:
    """The directory of the broker in its place, adopted."""
    data = tmp_path / "adopted"
    shutil.copytree(lived, data)
    adopt(data, "n1", 4)
    return data


def test_a_directory_is_adopted_in_its_place(lived: Path, tmp_path: Path) -> None:
    data = adopted_copy(lived, tmp_path)
    assert state_of(data).lasting() == state_of(lived).lasting()
    assert messages(data) == messages(lived)
    assert digest(data / BEFORE_ADOPTION) == replaced(lived)
    assert not list(data.glob("adopted*"))
    before = digest(data)
    adopt(data, "n1", 4)
    assert digest(data) == before
    # What is there from before is no part of a backup, and no part of another conversion.
    adopt_copy(data, tmp_path / "cluster")
    assert not (tmp_path / "cluster" / BEFORE_ADOPTION).exists()
    assert main(["backup", str(data), str(tmp_path / "backup")]) == 0
    assert not (tmp_path / "backup" / BEFORE_ADOPTION).exists()


def test_a_cluster_of_one_serves_what_a_broker_left(lived: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(lived, data)
    with Broker(data=data, settings=SETTINGS) as broker:
        with wire.Wire(broker.port) as publisher:
            assert publisher.connect("publisher", clean=False, expiry_s=60).session_present
            publisher.send(wire.publish("a/half", b"half", 2, 999, dup=True))
            assert publisher.expect(wire.PUBREC).reason == 0
        with wire.Wire(broker.port) as banned:
            assert banned.connect("intruder").reason == 0x8A
        with wire.Wire(broker.port) as member:
            assert member.connect("member", clean=False, expiry_s=60).session_present
            seen = [member.message() for _ in range(8)]
        assert len({(each.topic, each.payload) for each in seen}) == 8


@pytest.mark.parametrize("parity", [0, 1])
def test_a_kill_at_each_change_of_an_adoption(
    lived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parity: int
) -> None:
    """The next start adopts the directory, and no other program serves a part of it."""
    state, countdown = state_of(lived).lasting(), Countdown(monkeypatch)
    kills = parity
    while True:
        data = tmp_path / f"{kills}"
        shutil.copytree(lived, data)
        countdown.left = kills + 1
        try:
            adopt(data, "n1", 4)
        except Killed:
            countdown.stop()
        else:
            break
        if not (data / "manifest.json").exists():
            for incarnation in ("", "abc"):
                with pytest.raises(DataDirectoryError, match="has no manifest"):
                    create_or_open(data, "n1", 4, "now", incarnation)
        adopt(data, "n1", 4)
        assert digest(data / BEFORE_ADOPTION) == replaced(lived)
        assert state_of(data).lasting() == state
        shutil.rmtree(data)
        kills += 2
    assert kills > 40


def test_an_adoption_passes_what_a_broker_passes(lived: Path, tmp_path: Path) -> None:
    """A record that is not understood, of which the broker had no state either."""
    data = tmp_path / "data"
    shutil.copytree(lived, data)
    storage = Storage.open(data, "n1", 4, 1 << 16)
    storage.journal.append(Record(0, SESSION, client_id=b"x", payload=b"?"))
    group = storage.journal.close_write_group()
    assert group is not None
    writer = GroupWriter(storage.directory, durable=False)
    writer.write(group)
    writer.close()
    storage.close()
    # A session that has logged no position is at the end of the log, which the record has moved.
    before = Source(data, open_to_read(data)).carried().lasting()
    adopt(data, "n1", 4)
    assert state_of(data).lasting() == before
    assert before[1:] == state_of(lived).lasting()[1:]


def test_an_adoption_is_refused(
    lived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    shutil.copytree(lived, data)

    def refused(text: str, partitions: int = 4, node_id: str = "n1") -> None:
        before = digest(data)
        with pytest.raises(StorageError, match=text):
            adopt(data, node_id, partitions)
        assert digest(data) == before
        assert not list(data.glob("adopted*"))

    refused("4 partitions, not 8", partitions=8)
    refused("belongs to node 'n1'", node_id="n2")
    with monkeypatch.context() as patch:
        patch.setattr(OsFileSystem, "free_bytes", lambda files: 1000)
        refused("has 1000 bytes free, and its adoption needs about")
    lock = lock_root(data)
    refused("is served by another process")
    lock.release()
    (data / BEFORE_ADOPTION).mkdir()
    (data / BEFORE_ADOPTION / "file").touch()
    refused("before-adoption is not empty")


@pytest.mark.parametrize("part", [0.0, 0.4, 0.8])
def test_damage_becomes_void_records(lived: Path, tmp_path: Path, part: float) -> None:
    """A broker passes it: the other messages keep their offsets, and no other record gets
    those that are lost."""
    data = tmp_path / "data"
    shutil.copytree(lived, data)
    segment = next((data / "journal").glob("*.log"))
    content = bytearray(segment.read_bytes())
    content[int(len(content) * part) + 60] ^= 1
    segment.write_bytes(content)
    source = Source(data, open_to_read(data))
    before, ends = source.carried().lasting(), source.journal.next_offset
    broken = {
        place: each for place, each in messages_of(source).items() if place[1] < ends[place[0]]
    }
    assert source.lost
    adopt(data, "n1", 4)
    assert messages(data) == broken
    adopted = reading(data)
    assert adopted.carried().lasting()[1:] == before[1:]
    assert all(map(operator.ge, adopted.journal.next_offset, ends))
