"""The process that reads a lake for a node: what it answers, and what it refuses."""

import asyncio
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

pytest.importorskip("pyspark")

from holdfast.cli.log import lake_reader
from holdfast.cli.log.lake_reader import LakeReader, LakeRefused
from holdfast.client.log.lake import objects, parquet
from holdfast.client.log.lake.errors import LakeError
from holdfast.client.log.lake.records import LakeRecords
from holdfast.client.log.reading.offsets import log_identity
from holdfast.io.event_loop import lake_port
from holdfast.io.event_loop.lake_port import LakeAwayError, LakePort
from holdfast.log.batch import Batch
from holdfast.log.record import MESSAGE, Record
from holdfast.node.reads.fetch_frames import (
    NOWHERE,
    FetchedFrame,
    FetchFrame,
    ReadRange,
    decode_fetched,
    encode_fetch,
)
from holdfast.node.reads.lake_source import LakeAccess
from holdfast.protocol.topics.names import matches
from tests.support.journal_files import TIME_US
from tests.support.small_s3 import BUCKET, Handler, Refusal, small_s3
from tests.unit.client.log.test_lake_and_log import HOUR_US, Site

PARTITIONS = 4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "ROW_GROUP_ROWS", 16)
        return Site(folder, str(folder)).grown()


def records(site: Site) -> dict[tuple[int, int], Record]:
    return {
        (each.partition, each.offset): each
        for data in site.journal.batches
        for each in Batch(data).records()
        if each.kind == MESSAGE
    }


def identity(site: Site) -> str:
    lake = LakeRecords(site.root)
    lake.refresh()
    return lake.identity()


def ends(site: Site) -> list[int]:
    lake = LakeRecords(site.root)
    lake.refresh()
    return [lake.bounds[p].end for p in range(PARTITIONS)]


def ask(reader: LakeReader, frame: FetchFrame) -> tuple[FetchedFrame, list[Record]]:
    found: list[Record] = []
    for payload in reader.answer(encode_fetch(frame)):
        head, some = decode_fetched(payload)
        found += some
    return head, found


def frame(**fields: object) -> FetchFrame:
    fields.setdefault("ranges", [])
    return FetchFrame(number=7, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_reads_go_on_and_miss_nothing(
    site: Site, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the budgets, the filters and the time for a piece."""
    rng = random.Random(seed)
    if seed % 2:
        monkeypatch.setattr(lake_reader, "SCAN_S", 0.0)
    if seed % 3:
        monkeypatch.setattr(lake_reader, "FOUND_S", 0.0)
    reader = LakeReader(site.root)
    limit = ends(site)
    begins = [rng.randrange(end // 2) for end in limit]
    filters: list[tuple[str, int]] = rng.choice(
        [[("#", -1)], [("plant/3", -1), ("plant/5", 0)], [("plant/+", 0)], [("none", -1)]]
    )
    starts = [[rng.randrange(end) for end in limit]]
    positions, got, turns = list(begins), [], 0
    while positions != limit:
        head, some = ask(
            reader,
            frame(
                ranges=[ReadRange(p, at, limit[p]) for p, at in enumerate(positions)],
                filters=filters, starts=starts,
                records_max=rng.choice((1, 7, 500)), bytes_max=rng.choice((1, 1 << 20)),
            ),
        )  # fmt: skip
        assert head.positions != positions
        assert head.lost == 0
        assert all(positions[each.partition] <= each.offset for each in some)
        positions, turns = head.positions, turns + 1
        assert all(each.offset < positions[each.partition] for each in some)
        got += some
        if rng.random() < 0.1:
            reader = LakeReader(site.root)
    expected = {
        place: each
        for place, each in records(site).items()
        if begins[place[0]] <= place[1] < limit[place[0]]
        and any(
            matches(filter, each.topic.decode())
            and (index < 0 or starts[index][place[0]] <= place[1])
            for filter, index in filters
        )
    }
    assert len(got) == len(expected)
    assert {(each.partition, each.offset) for each in got} == set(expected)
    for p in range(PARTITIONS):
        own = [each.offset for each in got if each.partition == p]
        assert own == sorted(own)
    for each in got:
        wanted = expected[each.partition, each.offset]
        for name in ("topic", "payload", "timestamp_us", "client_id", "properties", "flags"):
            assert getattr(each, name) == getattr(wanted, name), name


def test_a_store_that_fails_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request of a lake in an object store may be refused. A later one has the records."""
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 16)
    with small_s3(monkeypatch) as store:
        site = Site(tmp_path, f"s3://{BUCKET}/{tmp_path.name}").grown()
        reader, limit = LakeReader(site.root), ends(site)
        positions, got, failures = [0] * PARTITIONS, [], 0
        while positions != limit:
            refusals = [Refusal(404, "NoSuchKey"), None, Refusal(403, "AccessDenied")]
            store.refuse = lambda *_, left=refusals: left.pop() if left else None
            ranges = [ReadRange(p, at, limit[p]) for p, at in enumerate(positions)]
            wanted = frame(ranges=ranges, filters=[("#", -1)], records_max=40, bytes_max=1 << 20)
            for _ in range(4):
                try:
                    head, some = ask(reader, wanted)
                    break
                except (LakeError, OSError) as error:
                    failures += not isinstance(error, LakeRefused)
                    store.refuse = lambda *_: None
            positions = head.positions
            got += [(each.partition, each.offset) for each in some]
        assert failures > 1
        assert sorted(got) == sorted(place for place in records(site) if place[1] < limit[place[0]])


def test_pages_of_many_readers_ask_the_store_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more readers than open scans. The cache has a bound, and ends with a failure."""
    with small_s3(monkeypatch) as store:
        site = Site(tmp_path, f"s3://{BUCKET}/{tmp_path.name}").grown()
        reader, limit = LakeReader(site.root), ends(site)
        asked: list[int] = []
        readers = [[each] * PARTITIONS for each in range(2 * lake_reader.SCANS_MAX)]
        for _ in range(3):
            before = store.requests
            for number, positions in enumerate(readers):
                ranges = [ReadRange(p, at, limit[p]) for p, at in enumerate(positions)]
                wanted = frame(ranges=ranges, filters=[("#", -1)], records_max=2, bytes_max=99)
                head, some = ask(reader, wanted)
                assert len(some) == 2
                readers[number] = head.positions
            asked.append(store.requests - before)
        assert asked[0] > 0 == asked[1] == asked[2]
        cache = reader._cache
        assert 0 < cache._bytes == sum(size for _, size in cache._kept.values())
        assert cache.get(("large",), lambda: (1, lake_reader.CACHE_BYTES + 1)) == 1
        assert (cache._bytes, cache._kept) == (0, {})
        store.refuse = lambda *_: Refusal(403, "AccessDenied")
        with pytest.raises(LakeError):
            ask(reader, wanted)
        assert reader._cache is not cache


def test_what_neither_has_counts_as_lost(site: Site) -> None:
    """Retention has removed records that the lake has not read."""
    reader, limit = LakeReader(site.root), ends(site)
    begin = [limit[0] - 1, limit[1] + 2, *limit[2:]]
    ranges = [ReadRange(p, at, limit[p] + 5) for p, at in enumerate(begin)]
    head, some = ask(reader, frame(ranges=ranges, filters=[("#", -1)], records_max=500))
    assert head.positions == [begin[0], *(end + 5 for end in limit[1:])]
    assert head.lost == 3 + 5 + 5
    assert not some
    ranges = [ReadRange(p, at, limit[p] + 5) for p, at in enumerate(head.positions)]
    head, _ = ask(reader, frame(ranges=ranges, filters=[("#", -1)], records_max=500, bytes_max=99))
    assert (head.positions[0], head.lost) == (limit[0], 0)


def test_single_records(site: Site) -> None:
    reader, there = LakeReader(site.root), records(site)
    limit = ends(site)
    places = sorted(place for place in there if place[1] < limit[place[0]])
    wanted = [places[40], places[3], places[90], (0, limit[0] + 9), places[5]]
    head, some = ask(reader, frame(wanted=wanted, bytes_max=1 << 20))
    assert head.looked_at == 5
    found = {(each.partition, each.offset): each.payload for each in some}
    assert found == {place: there[place].payload for place in wanted if place in set(places)}
    head, some = ask(reader, frame(wanted=wanted, bytes_max=1))
    assert (head.looked_at, len(some)) == (1, 1)


def test_starts(site: Site) -> None:
    """A time, the last records of one topic and of many, and what is not asked for."""
    reader, there, limit = LakeReader(site.root), records(site), ends(site)
    time_us = TIME_US + 20 * HOUR_US
    queries: list[tuple[str, int, int, list[int]]] = [
        ("#", time_us, 0, []), ("plant/3", 0, 5, []), ("plant/+", 0, 2, []), ("#", 0, 0, [1] * 4),
    ]  # fmt: skip
    left = [{}, {"plant/3": 3}, {"plant/4": 0, "plant/5": 1}, {}]
    ranges = [ReadRange(p, 0, end) for p, end in enumerate(limit)]
    head, _ = ask(reader, frame(ranges=ranges, queries=queries, left=left))
    by_time, by_topic, by_filter, known = head.starts
    for p in range(PARTITIONS):
        own = [o for (q, o), each in there.items() if q == p and each.timestamp_us >= time_us]
        first = min((each for each in own if each < limit[p]), default=NOWHERE)
        assert by_time.offsets[p] == first
    assert known.offsets == [NOWHERE] * PARTITIONS

    def last(topic: str, count: int) -> int:
        places = [
            o for (p, o), each in there.items() if each.topic.decode() == topic if o < limit[p]
        ]
        return sorted(places)[-count:][0]

    assert by_topic.floors == [("plant/3", last("plant/3", 3))]
    counts = {f"plant/{n}": 2 for n in range(12)} | {"plant/5": 1}
    del counts["plant/4"]
    assert dict(by_filter.floors) == {topic: last(topic, n) for topic, n in counts.items()}


def test_a_lake_of_another_log_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LakeRecords, "identity", lambda self: "cluster same")
    with pytest.raises(LakeRefused, match="another log"):
        ask(LakeReader(site.root), frame(log="another"))
    ask(LakeReader(site.root), frame(log="same"))


def test_a_lake_of_another_generation_is_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a read that has begun before the generation changed. The pipeline continues it."""
    at = 0
    monkeypatch.setattr(LakeRecords, "identity", lambda self: log_identity("same", "", at))
    reader = LakeReader(site.root)
    begun = frame(
        log="same", ranges=[ReadRange(0, 0, ends(site)[0])], filters=[("#", -1)], records_max=1,
        bytes_max=1,
    )  # fmt: skip
    head, some = ask(reader, begun)
    assert len(some) == 1
    begun.ranges[0].start = head.positions[0]
    begun.generation = 3
    for _ in range(2):
        with pytest.raises(LakeError, match="generation 0 of the log") as error:
            ask(reader, begun)
        assert not isinstance(error.value, LakeRefused)
    at = 3
    _, more = ask(reader, begun)
    assert [each.offset > some[0].offset for each in more] == [True]


def test_a_place_without_a_lake_is_tried_again(tmp_path: Path) -> None:
    reader = LakeReader(str(tmp_path / "lake"))
    with pytest.raises(LakeError, match="is no lake with records"):
        ask(reader, frame())
    site = Site(tmp_path, str(tmp_path))
    site.publish(5)
    site.run(topics="plant/#")
    with pytest.raises(LakeRefused, match="only messages of the topics plant/#"):
        ask(reader, frame())


class Reads:
    """The part of `RemoteReads` that a port drives."""

    def __init__(self) -> None:
        self.lake = LakeAccess()
        self.answers: asyncio.Queue[FetchedFrame | str] = asyncio.Queue()

    def handle(self, node: str, payload: bytes) -> None:
        self.answers.put_nowait(decode_fetched(payload)[0])

    def lake_failed(self, text: str, *, is_final: bool = False) -> None:
        self.answers.put_nowait(text)

    def disconnected(self, node: str) -> None:
        self.answers.put_nowait("disconnected")


def run_port(place: str, body: "Callable[[LakePort, Reads], object]") -> None:
    async def run() -> None:
        reads = Reads()
        port = LakePort(
            asyncio.get_running_loop(), place, reads, lambda: None, lambda: frame()  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            await asyncio.wait_for(body(port, reads), 60)  # type: ignore[arg-type]
        finally:
            await port.stop()

    asyncio.run(run())


async def request_beside(port: LakePort, site: Site) -> None:
    """Requests of the admin port have answers of their own, or fail with the process."""

    def wanted(partition: int, start: int) -> FetchFrame:
        return frame(
            ranges=[ReadRange(partition, start, 9)], filters=[("#", -1)], records_max=9,
            bytes_max=999,
        )  # fmt: skip

    async def read(partition: int) -> list[Record]:
        """An answer ends early if it has taken FOUND_S."""
        found: list[Record] = []
        position = 0
        while position < 9:
            head, more = await port.request(wanted(partition, position))
            (position,) = head.positions
            found += more
        return found

    answers = await asyncio.gather(*map(read, range(4)))
    for partition, found in enumerate(answers):
        assert [(each.partition, each.offset) for each in found] == sorted(
            place for place in records(site) if place[0] == partition and place[1] < 9
        )
    assert port._process is not None
    port._process.send_signal(signal.SIGSTOP)
    failing = asyncio.ensure_future(port.request(wanted(0, 0)))
    await asyncio.sleep(0)
    port._process.kill()
    with pytest.raises(LakeAwayError, match="ended with exit code"):
        await failing


def test_the_process_is_started_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_port, "CHECK_S", 0.01)
    monkeypatch.setattr(lake_port, "GREET_S", 0.01)

    async def body(port: LakePort, reads: Reads) -> None:
        assert isinstance(await reads.answers.get(), FetchedFrame)
        process = port._process
        assert process is not None
        process.kill()
        while not isinstance(answer := await reads.answers.get(), str):
            pass
        assert "ended with exit code -9" in answer
        while not isinstance(answer := await reads.answers.get(), FetchedFrame):
            assert "starting" in answer
        assert reads.lake.ask is not None
        reads.lake.ask(encode_fetch(frame(ranges=[ReadRange(0, 0, 3)], filters=[("#", -1)])))
        while not (isinstance(answer, FetchedFrame) and answer.positions):
            answer = await reads.answers.get()
        await request_beside(port, site)

    run_port(site.root, body)


def test_the_lake_is_opened_before_the_first_check(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_port, "CHECK_S", 3600.0)

    async def body(port: LakePort, reads: Reads) -> None:
        assert isinstance(await reads.answers.get(), FetchedFrame)

    run_port(site.root, body)


def test_a_lake_in_a_store_is_opened_with_requests_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store responds to none of them before it has all."""
    response = Handler.response
    commits = 5
    older, newest = Barrier(commits - 1), Barrier(2)
    together = {f"{each:08}.json": older for each in range(1, commits)}
    together |= {f"{each:08}.json": newest for each in (commits, commits + 1)}

    def respond(handler: Handler, key: str, *rest: Any) -> Any:
        if is_slow and key.rpartition("/")[2] in together:
            together[key.rpartition("/")[2]].wait(60)
        return response(handler, key, *rest)

    is_slow = False
    monkeypatch.setattr(Handler, "response", respond)
    with small_s3(monkeypatch) as store:
        site = Site(tmp_path, f"s3://{BUCKET}/plant")
        for _ in range(commits):
            site.publish(5)
            site.run()
        is_slow, before = True, store.requests
        reader = LakeReader(site.root)
        reader.begin()
        ask(reader, frame())
        # A listing and the settings of the lake besides.
        assert store.requests - before == commits + 3


def test_what_a_store_says_is_told_before_the_process_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with small_s3(monkeypatch) as store:
        store.refuse = lambda *_: Refusal(503, "SlowDown")

        async def body(port: LakePort, reads: Reads) -> None:
            while "starting" in (answer := str(await reads.answers.get())):
                pass
            assert "does not serve s3://lake/plant/" in answer
            assert "503 Service Unavailable, SlowDown" in answer
            # Two requests at once: a listing, and the settings of the lake.
            assert store.requests == 2 * (objects.SHORT_RETRIES_MAX + 1)

        run_port(f"s3://{BUCKET}/plant", body)


def test_a_process_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads requests, and answers none."""
    (tmp_path / "hanging.py").write_text("import sys\nwhile sys.stdin.buffer.read(1): pass\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    monkeypatch.setattr(lake_port, "READER", "hanging")
    monkeypatch.setattr(lake_port, "CHECK_S", 0.01)
    monkeypatch.setattr(lake_port, "ANSWER_S", 0.05)

    async def body(port: LakePort, reads: Reads) -> None:
        assert "has not answered for 0.05 s" in str(await reads.answers.get())
        while "ended with exit code -9" not in str(await reads.answers.get()):
            pass

    run_port("lake", body)
