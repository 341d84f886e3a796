"""Numbers that leave the process, after the directory was put back to an earlier copy.

Each test makes a copy, goes on, puts the copy back, and goes on again. What is acknowledged
afterwards must reach whoever remembers the numbers from before. The table lists every such number,
also those whose test is elsewhere.
"""

import asyncio
import itertools
import json
import shutil
import sqlite3
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest

from holdfast.cli.backup.backup import make_backup
from holdfast.cli.backup.restoration import restore
from holdfast.client import Client, PublishQueue, SqliteStore
from holdfast.client.log import (
    AdminError,
    LogClient,
    LogGap,
    LogMessage,
    LogRestored,
    LogRestoredError,
    OffsetTable,
    Position,
)
from holdfast.log.files.data_directory import open_to_read
from holdfast.testing import Broker
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.federated import Member, line
from tests.e2e.pair import wait_until
from tests.e2e.wire import Wire
from tests.support.ports import free_port

PACKET_IDS: Final = "tests.e2e.test_put_back_packet_ids"
MODEL: Final = "tests.model.test_cluster_put_back"
OLDER: Final = "tests.e2e.test_cluster_older_copy"
MEMBER: Final = "tests.unit.federation.core.test_put_back"
BRONZE: Final = "tests.unit.lake.lake.test_bronze"
IDENTITY_FILE: Final = "tests.unit.federation.sidecar.test_identity"
NUMBERS: Final = {
    "offset: position of the log client": "test_a_position",
    "offset: cursor that follows": "test_a_cursor_that_follows_across_a_restore",
    "offset: commit of a group": "test_a_commit_of_a_reader_from_before",
    "offset: table in a sink's database": "test_a_position_in_a_table",
    "offset: pages of the records": "test_the_cursor_of_a_page",
    "offset: reads that are under way": "test_a_read_that_was_planned_before",
    "offset: checkpoint of a Spark query": "test_a_checkpoint_of_spark",
    "offset: two restores of one backup": "test_two_restores_of_one_backup_differ",
    "offset: commits of a lake": f"{BRONZE}:test_a_log_that_was_restored",
    "offset: place of a federation's message": "test_a_member_of_a_federation",
    "offset: log of a cluster": "test_a_cluster",
    "packet id of a publisher": f"{PACKET_IDS}:test_a_packet_id_of_a_publisher",
    "packet id towards a subscriber": f"{PACKET_IDS}:test_a_packet_id_towards_a_subscriber",
    "sequence of a publish queue": "test_a_sequence_of_a_producer",
    "position of a disk, term and vote": f"{OLDER}:test_a_machine_put_back_while_the_others_run",
    "ticket": f"{MODEL}:test_tickets_of_a_disk_that_was_put_back_are_others",
    "term, vote, epoch of a partition": f"{MODEL}:test_a_copy_begins_anew_when_a_whole_one_is_back",
    "epoch of a federation": f"{MEMBER}:test_what_is_done_arrives",
    "sequence and place of a federation": f"{MEMBER}:test_nothing_accepted_afterwards_is_missing",
    "start of a federation's member": f"{IDENTITY_FILE}:test_a_copy_of_a_directory_starts_apart",
}
"""Number -> the test, in this module or in another one."""

BEFORE, LOST, AFTER = 20, 15, 40
"""The messages before the copy, those after it that the restore loses, and those after that."""


@pytest.mark.parametrize("number", NUMBERS)
def test_every_number_has_its_test(number: str) -> None:
    module, _, name = NUMBERS[number].rpartition(":")
    assert callable(getattr(import_module(module or __name__), name))


def publish(broker: Broker, texts: list[str]) -> None:
    with Wire(broker.port) as wire:
        wire.connect("publisher")
        for text in texts:
            assert wire.publish("a/b", text.encode(), 1) in (0, 0x10)


class PutBack:
    """A broker whose directory is put back while its readers wait."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.admin_port = free_port()
        self.broker = self._broker()
        self.broker.start()
        publish(self.broker, [f"before {number}" for number in range(BEFORE)])
        make_backup(self.data, directory / "backup")
        publish(self.broker, [f"lost {number}" for number in range(LOST)])

    def _broker(self) -> Broker:
        settings = {"log.partitions": 2, "admin.port": self.admin_port, "admin.enabled": True}
        return Broker(data=self.data, settings=settings)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.admin_port}"

    @property
    def log(self) -> LogClient:
        return LogClient(self.address)

    def put_back(self, after: int = AFTER) -> None:
        """Restore, and go on until the log has more than it had before."""
        self.broker.stop()
        shutil.rmtree(self.data)
        restore(self.directory / "backup", self.data, None)
        self.broker = self._broker()
        self.broker.start()
        publish(self.broker, [f"after {number}" for number in range(after)])


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PutBack]:
    made = PutBack(tmp_path)
    yield made
    made.broker.close()


def texts(messages: list[LogMessage]) -> list[str]:
    return [message.payload.decode() for message in messages]


ALL_AFTER = [f"after {number}" for number in range(AFTER)]


def read(log: LogClient, start: Position | None, gaps: list[LogGap]) -> tuple[list[str], Position]:
    with log.read(start=start, on_gap=gaps.append) as cursor:
        return texts([*cursor]), cursor.position


def test_a_position(site: PutBack) -> None:
    log = site.log
    found, position = read(log, None, [])
    assert found[BEFORE:] == [f"lost {number}" for number in range(LOST)]
    with site.log.read(end=position) as cursor:
        early = [next(cursor) for _ in range(5)]
        unharmed = cursor.position
    assert texts(early)[-1] == "before 4"
    site.put_back()
    for kept in (position, Position.parse(str(position))):
        with pytest.raises(LogRestoredError, match="generation 0 of the log, which was restored"):
            log.read(start=kept)
        gaps: list[LogGap] = []
        found, again = read(log, kept, gaps)
        assert found == ALL_AFTER
        [gap] = gaps
        assert isinstance(gap, LogRestored)
        assert gap.offsets == LOST
        assert read(log, Position.parse(str(again)), []) == ([], again)
    # A reader that has nothing of what is lost goes on without a word.
    with log.read(start=unharmed) as cursor:
        assert texts([*cursor]) == [
            *(f"before {number}" for number in range(5, BEFORE)),
            *ALL_AFTER,
        ]


def test_a_cursor_that_follows_across_a_restore(site: PutBack) -> None:
    strict, gaps = site.log.read(follow=True, idle_s=20.0), list[LogGap]()
    lenient = site.log.read(follow=True, idle_s=20.0, on_gap=gaps.append)
    for cursor in (strict, lenient):
        assert len([next(cursor) for _ in range(BEFORE + LOST)]) == BEFORE + LOST
    site.put_back()
    with pytest.raises(LogRestoredError):
        next(strict)
    assert texts([next(lenient) for _ in range(AFTER)]) == ALL_AFTER
    assert [gap.offsets for gap in gaps] == [LOST]
    for cursor in (strict, lenient):
        cursor.close()


def test_a_commit_of_a_reader_from_before(site: PutBack) -> None:
    with site.log.read(group="g") as cursor:
        assert len([*cursor]) == BEFORE + LOST
        site.put_back()
        with pytest.raises(AdminError, match="another generation"):
            cursor.commit()
    with site.log.read(group="g") as cursor:
        assert texts([*cursor])[BEFORE:] == ALL_AFTER
        cursor.commit()
    with site.log.read(group="g") as cursor:
        assert [*cursor] == []


def test_a_position_in_a_table(site: PutBack) -> None:
    site.put_back(after=0)
    position = read(site.log, None, [])[1]
    generation = position.generation
    assert generation
    with closing(sqlite3.connect(":memory:")) as database:
        table = OffsetTable(database, "sink")
        assert table.load() is None
        table.store(position)
        database.commit()
        stored = OffsetTable(database, "sink").load()
        assert stored is not None
        assert stored.generation == generation
        # A table of the version before has no generation, so it is that of a new log.
        database.execute("delete from holdfast_offsets where log_partition = -1")
        stored = OffsetTable(database, "sink").load()
        assert stored is not None
        assert stored.generation == 0


def page(site: PutBack, after: str) -> tuple[int, str]:
    choice = {"order": "oldest", "limit": 30} | ({"after": after} if after else {})
    query = urllib.parse.urlencode(choice)
    try:
        with urllib.request.urlopen(
            f"http://{site.address}/api/v1/log/records?{query}"
        ) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_cursor_of_a_page(site: PutBack) -> None:
    following = json.loads(page(site, "")[1])["next"]
    site.put_back()
    status, text = page(site, following)
    assert (status, "was restored since this cursor" in text) == (410, True)
    following = json.loads(page(site, "")[1])["next"]
    status, text = page(site, following)
    assert (status, "after 20" in text) == (200, True)


def test_a_read_that_was_planned_before(site: PutBack) -> None:
    """The tasks of a Spark query read ranges that the driver has found in the log before."""
    pytest.importorskip("pyspark")
    from holdfast.client.log.reading.offsets import DataLossError
    from holdfast.log.columns.decode import SCHEMA
    from holdfast_lake.source.options import parse
    from holdfast_lake.source.source import LogAccess, read_work

    options = parse({"servers": site.address})
    with closing(LogAccess(options)) as access:
        bounds = access.log.bounds()
        ranges = access.ranges({}, {p: each.end for p, each in bounds.items()}, bounds)
        [work, *_] = access.plan_tasks(ranges, tasks=1)
    site.put_back()
    with pytest.raises(DataLossError, match="was restored during the read"):
        list(read_work(options, work, SCHEMA))


def test_a_checkpoint_of_spark(site: PutBack) -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from holdfast.client.log.reading.offsets import RestoredError
    from holdfast.log.columns.decode import SCHEMA
    from holdfast_lake.source.options import parse
    from holdfast_lake.source.source import HoldfastStreamReader, read_work

    stopped = ExitStack()

    def reader(fails: str) -> HoldfastStreamReader:
        options = {"servers": site.address, "startingOffsets": "earliest", "failOnDataLoss": fails}
        made = HoldfastStreamReader(parse(options), SCHEMA)
        # Spark does that at the end of each query.
        stopped.callback(made.stop)
        return made

    def rows(query: HoldfastStreamReader, start: dict[str, int], end: dict[str, int]) -> list[str]:
        found = []
        for work in query.partitions(start, end):
            for batch in read_work(query.options, work, SCHEMA):
                found += [payload.decode() for payload in batch.column("payload").to_pylist()]
        return found

    with stopped:
        query = reader("true")
        begin = query.initialOffset()
        checkpoint = query.latestOffset(begin, ReadAllAvailable())
        assert len(rows(query, begin, checkpoint)) == BEFORE + LOST
        assert "generation" not in checkpoint  # the form of the version before
        site.put_back()
        for call in (
            lambda: reader("true").latestOffset(checkpoint, ReadAllAvailable()),
            lambda: reader("true").partitions(begin, checkpoint),
        ):
            with pytest.raises(RestoredError, match="failOnDataLoss=false"):
                call()
        query = reader("false")
        end = query.latestOffset(checkpoint, ReadAllAvailable())
        assert end["generation"] == open_to_read(site.data).manifest.generation
        assert rows(query, checkpoint, end) == ALL_AFTER
        # A micro-batch of before that Spark repeats, and the next one behind it.
        assert rows(query, begin, checkpoint) == [f"before {number}" for number in range(BEFORE)]
        assert rows(reader("true"), end, end) == []


def test_two_restores_of_one_backup_differ(site: PutBack) -> None:
    """A position in the first one is none in the second one, though both have the same
    former generation."""
    site.put_back()
    first = read(site.log, None, [])[1]
    site.put_back(AFTER + 10)
    with pytest.raises(LogRestoredError):
        site.log.read(start=first)
    second = open_to_read(site.data).manifest
    assert second.generation not in (0, first.generation)
    assert [number for number, _ in second.former] == [0]


HOURS_PASS: Final = """
import holdfast_federation.sidecar.edge_broker.member_log as member_log
member_log.STEADY_S = -1
"""
"""Run by each process at its start: the last start of a member counts as long ago."""


@pytest.mark.parametrize(
    ("is_restored", "starts", "is_alone"),
    [(True, 2, False), (False, 2, False), (False, 1, False), (False, 1, True)],
)
def test_a_member_of_a_federation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_restored: bool,
    starts: int,
    is_alone: bool,
) -> None:
    """The other member has messages of the lost offsets and epochs. Without `holdfast restore`, as
    when a snapshot of a machine is put back, the member learns of them from the other one, unless
    its epoch is later than all of them. It may accept messages before it meets the other one."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HOURS_PASS)
    monkeypatch.setenv("HOLDFAST_TEST_PATH", str(tmp_path / "site"))
    numbers = iter(range(1000))
    sent: list[str] = []

    def publish_at(member: Member, count: int) -> None:
        with Wire(member.port) as wire:
            wire.connect("publisher")
            for number in itertools.islice(numbers, count):
                assert wire.publish("a/b", b"%d" % number, 1) == 0
                sent.append(str(number))

    with line(tmp_path, "ab") as [a, b], Wire(b.port) as subscriber:
        subscriber.connect("subscriber", clean=False, expiry_s=3600)
        subscriber.subscribe(("a/#", 1))
        a.await_sending("a/#")
        publish_at(a, BEFORE)
        received = [subscriber.message(20).payload.decode() for _ in range(BEFORE)]
        make_backup(a.data, tmp_path / "backup")
        a.kill()
        for _ in range(starts):
            a.start()
            a.await_sending("a/#")
            publish_at(a, LOST)
            received += [subscriber.message(20).payload.decode() for _ in range(LOST)]
            a.kill()
        shutil.rmtree(a.data)
        if is_restored:
            restore(tmp_path / "backup", a.data, None)
        else:
            shutil.copytree(tmp_path / "backup", a.data)
        if is_alone:
            b.kill()
        a.start()
        a.await_sending("a/#")
        publish_at(a, AFTER)
        if is_alone:
            b.start()
            subscriber = Wire(b.port)
            subscriber.connect("subscriber", clean=False, expiry_s=3600)
        wait_until(lambda: a.federation().get("running"), "the member runs")
        publish_at(a, AFTER)
        while not set(sent) <= set(received):
            received.append(subscriber.message(30).payload.decode())
        if is_restored:
            assert received == sent, "once and in order"


@pytest.mark.long
def test_a_cluster(tmp_path: Path) -> None:
    """All nodes are restored, and agree on one new generation. Then one node is, while the others
    go on, and the generation stays."""

    def put_back(cluster: ClusterProcesses, *names: str) -> None:
        for name in names:
            shutil.rmtree(cluster.nodes[name].data)
            restore(tmp_path / name, cluster.nodes[name].data, None)
        cluster.restart(*names)
        cluster.wait_healthy()

    def back_up(cluster: ClusterProcesses) -> None:
        for name, node in cluster.nodes.items():
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            make_backup(node.data, tmp_path / name)

    def publish_at(cluster: ClusterProcesses, name: str, count: int) -> None:
        with Wire(cluster.nodes["n1"].port) as wire:
            wire.connect("publisher")
            for number in range(count):
                assert wire.publish("a/b", f"{name} {number}".encode(), 1) in (0, 0x10)

    with ClusterProcesses(tmp_path / "cluster", 3, {"cluster": {"partitions": 2}}) as cluster:
        log = LogClient([f"127.0.0.1:{node.admin_port}" for node in cluster.nodes.values()])
        publish_at(cluster, "before", BEFORE)
        back_up(cluster)
        publish_at(cluster, "lost", LOST)
        assert cluster.generations() == {0}
        position = read(log, None, [])[1]
        cluster.kill9(*cluster.nodes)
        put_back(cluster, *cluster.nodes)
        generation = cluster.await_generation()
        publish_at(cluster, "after", AFTER)
        with pytest.raises(LogRestoredError):
            [*log.read(start=position)]
        assert set(ALL_AFTER) <= set(texts([*log.read()]))
        until(
            lambda: (
                {
                    (each.generation, each.restored)
                    for node in cluster.nodes.values()
                    for each in [open_to_read(node.data).manifest]
                }
                == {(generation, 0)}
            ),
            "the manifests have it",
        )
        back_up(cluster)
        publish_at(cluster, "more", LOST)
        cluster.kill9("n3")
        put_back(cluster, "n3")
        until(lambda: cluster.generations() == {generation}, "the same generation")
        assert read(log, position, [])[0][-LOST:] == [f"more {number}" for number in range(LOST)]


def test_a_sequence_of_a_producer(site: PutBack) -> None:
    """A publish queue has messages confirmed that the restored broker has never seen. It goes on
    with higher sequences, and all of them are stored."""

    async def put(count: int) -> None:
        store = SqliteStore(site.directory / "queue.db")
        async with (
            Client("127.0.0.1", site.broker.port, client_id="q") as client,
            PublishQueue(client, store) as queue,
        ):
            for _ in range(count):
                sent.append(next(numbers))
                await queue.put("q/a", b"%d" % sent[-1])

    numbers = iter(range(1000))
    sent: list[int] = []
    asyncio.run(put(10))
    site.put_back(after=0)
    first = len(sent)
    asyncio.run(put(10))
    with site.log.read("q/#") as cursor:
        found = [int(each.payload) for each in cursor]
    assert found == [*range(first, len(sent))]
