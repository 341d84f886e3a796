"""Several servers of one log: who is asked, what is believed, who reads where."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import holdfast.client.log.reading.reader_http as reader_http
import holdfast.client.log.reading.servers as servers
from holdfast.client.admin_connection import AdminError, NoAnswer
from holdfast.client.log import LogClient
from holdfast.client.log.reading.offsets import DataLossError, OffsetRange, PartitionBounds
from holdfast.client.log.reading.reader_http import read_ranges
from holdfast.client.log.reading.scan import Coverage
from holdfast.client.log.reading.servers import Servers
from tests.support.journal_files import Journal, Server, record, serving
from tests.support.ports import free_port

PARTITIONS = 6
BATCHES = 60


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_http, "PAUSE_S", 0.001)
    monkeypatch.setattr(reader_http, "PATIENCE_S", 0.1)
    monkeypatch.setattr(servers, "PAUSE_S", 0.001)
    monkeypatch.setattr(servers, "LAG_PAUSE_S", 0.001)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Server]]:
    """Three replicas of a log, each the leader of two partitions."""
    with ExitStack() as stack:
        found = []
        for number in range(3):
            journal = Journal(tmp_path / f"n{number}", partitions=PARTITIONS)
            for index in range(BATCHES):
                journal.append(index % PARTITIONS, [record("t", b"%d" % index)] * 3)
            server = stack.enter_context(serving(journal))
            server.log = "cluster"
            server.leads = [2 * number, 2 * number + 1]
            found.append(server)
        yield found


@pytest.fixture
def log(nodes: list[Server]) -> Iterator[Servers]:
    found = Servers([("127.0.0.1", node.port) for node in nodes])
    yield found
    found.close()


RANGES = [OffsetRange(p, 0, BATCHES // PARTITIONS * 3) for p in range(PARTITIONS)]


def read(nodes: list[Server], *ranges: OffsetRange, loss: bool = False) -> Coverage:
    coverage = Coverage(ranges, fail_on_data_loss=not loss)
    for _ in read_ranges([("127.0.0.1", node.port) for node in nodes], ranges, coverage):
        continue
    return coverage


def test_the_bounds_are_what_all_have_together(nodes: list[Server], log: Servers) -> None:
    nodes[0].journal.first_offset[1] = 5
    nodes[2].journal.next_offset[3] = 7
    assert log.bounds() == {p: PartitionBounds(0, 30) for p in range(PARTITIONS)}
    assert log.partitions == PARTITIONS


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("tasks", [1, 2, 3, 5, 16])
def test_who_leads_is_not_asked_for_it(
    nodes: list[Server], log: Servers, tasks: int, whole: bool
) -> None:
    log.bounds()
    work = log.assign(RANGES, tasks, whole=whole)
    assert 1 <= len(work) <= tasks
    leads = {node.port: node.leads for node in nodes}
    found: dict[int, list[tuple[int, int]]] = {p: [] for p in range(PARTITIONS)}
    for each in work:
        assert sorted(each.servers) == sorted(("127.0.0.1", node.port) for node in nodes)
        for item in each.ranges:
            found[item.partition].append((item.start, item.end))
            if tasks > 1:
                assert item.partition not in leads[each.servers[0][1]]
    for pieces in found.values():
        pieces.sort()
        assert pieces[0][0] == 0
        assert pieces[-1][1] == 30
        assert all(before[1] == after[0] for before, after in pairwise(pieces))
        assert len(pieces) == 1 or not whole
    if tasks >= 3:
        assert len({each.servers[0] for each in work}) == 3


def test_a_node_without_the_records_is_not_preferred(nodes: list[Server], log: Servers) -> None:
    nodes[1].journal.next_offset[0] = 3
    nodes[2].journal.first_offset[1] = 9
    log.bounds()
    for each in log.assign(RANGES, 3, whole=True):
        for item in each.ranges:
            assert (item.partition, each.servers[0][1]) not in {
                (0, nodes[1].port),
                (1, nodes[2].port),
            }


def test_what_was_seen_before_is_waited_for(nodes: list[Server], log: Servers) -> None:
    for node in nodes:
        node.journal.next_offset[2] = 12
    answer = nodes[1].answer

    def learn(target: str, body: bytes = b"") -> tuple[int, bytes, dict[str, str]]:
        if nodes[1].requests == 3:
            nodes[1].journal.next_offset[2] = 30
        return answer(target, body)

    nodes[1].answer = learn  # type: ignore[method-assign]
    assert log.bounds({2: 30})[2].end == 30
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "LAG_WAIT_S", 0.05)
        assert log.bounds({2: 31})[2].end == 30


def test_one_that_is_gone_does_not_matter(nodes: list[Server]) -> None:
    log = Servers([("127.0.0.1", free_port()), ("127.0.0.1", nodes[0].port)])
    try:
        assert log.bounds()[5].end == 30
        assert [each.servers[0][1] for each in log.assign(RANGES, 2, whole=True)] == (
            [nodes[0].port] * 2
        )
    finally:
        log.close()


def test_different_logs_are_an_error(nodes: list[Server], log: Servers) -> None:
    nodes[1].log = "another"
    with pytest.raises(AdminError, match=r"different logs: .* has cluster, .* has another"):
        log.bounds()


def test_one_has_removed_what_another_still_has(nodes: list[Server]) -> None:
    nodes[0].journal.first_offset[4] = 9
    assert read(nodes[:2], RANGES[4]).done
    nodes[1].journal.first_offset[4] = 6
    with pytest.raises(DataLossError, match="offsets 0 to 6 of partition 4"):
        read(nodes[:2], RANGES[4])
    assert read(nodes[:2], RANGES[4], loss=True).skipped == 6


def test_one_lags_the_next_has_it(nodes: list[Server]) -> None:
    nodes[0].journal.next_offset[4] = 9
    assert read(nodes[:2], RANGES[4]).done
    with pytest.raises(AdminError, match="nothing for what was committed before"):
        read(nodes[:1], RANGES[4])


def test_one_has_damage_the_next_has_not(nodes: list[Server]) -> None:
    batches = nodes[0].journal.batches
    place = 4 + 2 * PARTITIONS
    batches[place] = batches[place][:-9] + b"?" + batches[place][-8:]
    coverage = read(nodes[:2], RANGES[4])
    assert (coverage.done, coverage.skipped) == (True, 0)
    with pytest.raises(DataLossError, match=r"offsets 6 to 9 of partition 4.*wrong checksum"):
        read(nodes[:1], RANGES[4])
    assert read(nodes[:1], RANGES[4], loss=True).skipped == 3


class Clock:
    """In place of the module `time`: what takes long takes no time."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def monotonic(self) -> float:
        return self.passed_s

    def sleep(self, pause_s: float) -> None:
        self.passed_s += pause_s


def test_rows_may_be_worked_on_for_longer_than_servers_may_be_silent(nodes: list[Server]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(reader_http, "time", clock)
        patch.setattr(reader_http, "FETCH_BYTES", 500)
        coverage = Coverage([RANGES[0]], fail_on_data_loss=True)
        address = ("127.0.0.1", nodes[0].port)
        chunks = read_ranges([address], [RANGES[0]], coverage)
        next(chunks)
        clock.passed_s += 2 * reader_http.PATIENCE_S
        nodes[0].fail_next = 2
        for _ in chunks:
            continue
    assert coverage.done


def test_a_gateway_names_the_nodes_that_are_read(nodes: list[Server], tmp_path: Path) -> None:
    """Only the gateway is given. Its own offsets, which are none, count for nothing."""
    with serving(Journal(tmp_path / "gateway", partitions=PARTITIONS)) as gateway:
        gateway.sends_to = [node.port for node in nodes]
        given = [("127.0.0.1", gateway.port)]
        log = Servers(given)
        assert log.bounds() == {p: PartitionBounds(0, 30) for p in range(PARTITIONS)}
        work = log.assign(RANGES, 3, whole=False)
        assert len(work) == 3
        assert {each.servers[0][1] for each in work} == {node.port for node in nodes}
        assert all(given[0] not in each.servers for each in work)
        assert log.with_log() == [("127.0.0.1", node.port) for node in nodes]
        log.close()
        client = LogClient(f"127.0.0.1:{gateway.port}")
        assert len(list(client.read())) == BATCHES * 3
        gateway.sends_to = [free_port()]
        lonely = Servers(given, pause=lambda seconds: None)
        with pytest.raises(NoAnswer, match="no answer from") as told:
            lonely.bounds()
        assert str(told.value).count("?") == 1
        lonely.close()
