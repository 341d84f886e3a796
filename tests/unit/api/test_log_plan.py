"""Reads of the log for the admin port while the node forgets the log of the partition."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.api.endpoints import ApiRefusal
from holdfast.api.log.record_counts import CountQuestion, RecordCountRoutes
from holdfast.api.log_plan import NotStored, ReadPlanner, ReadRequest, RemovedRecords
from holdfast.api.nodes.log_answers import LogAnswers
from holdfast.api.nodes.whole_log import (
    BatchesQuestion,
    HistoryQuestion,
    TimeQuestion,
    WholeLog,
    ask_nobody,
)


class ForgetfulBroker:
    """The log of its partition ends at 20 and begins at 0. It is forgotten after `is_stored`."""

    def __init__(self, *, forgets: bool) -> None:
        journal = SimpleNamespace(restarts=0, high_watermark=[20])
        self.node: Any = SimpleNamespace(
            state=SimpleNamespace(journal=journal, config=SimpleNamespace(partitions=1))
        )
        remote = SimpleNamespace(is_stored=lambda partition: True)
        self.runtime: Any = SimpleNamespace(cluster_node=SimpleNamespace(remote_reads=remote))

        def first_offset(partition: int) -> int:
            journal.restarts += forgets
            return 20

        self.reader: Any = SimpleNamespace(first_offset=first_offset)

    def generation(self) -> int:
        return 0


def test_a_log_that_is_forgotten_is_not_one_that_retention_has_shortened() -> None:
    """The reader would take the records for removed. Other nodes have them."""
    request = ReadRequest([(0, 5, 20)])
    with pytest.raises(RemovedRecords):
        ReadPlanner().plan(ForgetfulBroker(forgets=False), request)  # type: ignore[arg-type]
    with pytest.raises(NotStored):
        ReadPlanner().plan(ForgetfulBroker(forgets=True), request)  # type: ignore[arg-type]


class Reading:
    """A node that forgets the log of its only partition, which ends at 20, while its reading thread
    works, so that the thread finds nothing. `forgets`: otherwise nothing is there."""

    def __init__(self, *, forgets: bool) -> None:
        self.journal = SimpleNamespace(restarts=0, high_watermark=[20], written=[20], segments=[])
        state = SimpleNamespace(
            journal=self.journal, config=SimpleNamespace(partitions=1, node_id="n1")
        )
        self.node: Any = SimpleNamespace(state=state)
        remote = SimpleNamespace(is_stored=lambda partition: True)
        self.runtime: Any = SimpleNamespace(cluster_node=SimpleNamespace(remote_reads=remote))
        history = SimpleNamespace(
            offsets=[], searched=0, is_done=lambda: True, complete_from_us=0, width_us=1, counts=[]
        )

        def extents() -> Any:
            self.journal.restarts += forgets
            return SimpleNamespace(plan=lambda *arguments: None)

        self.reader: Any = SimpleNamespace(
            first_offset=lambda partition: 0,
            read_batches=lambda *arguments: [],
            offset_for_time=lambda *arguments: 0,
            topic_history=lambda *arguments: history,
            starts=SimpleNamespace(histogram=lambda *arguments: history),
            extents=extents,
        )
        self.reads = self
        self.loop = SimpleNamespace(time=lambda: 0.0)
        self._forgets = forgets

    # Of the broker, its reads and its node's operations.

    def generation(self) -> int:
        return 0

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        self.journal.restarts += self._forgets
        return work()

    @property
    def readable_broker(self) -> Any:
        return self

    def committed(self) -> list[int]:
        return [20]

    def offer(self, *arguments: Any) -> None:
        pass

    ask = ask_nobody


async def whole(broker: Any, read: Callable[[WholeLog], Any]) -> None:
    log = WholeLog(broker, ask_nobody)
    await log.open()
    await log.in_thread(lambda: read(log))


async def first_offset(broker: Any) -> None:
    log = WholeLog(broker, ask_nobody)
    await log.open()
    await broker.in_thread(lambda: None)
    log.first_offset(0)


def answers(broker: Any) -> LogAnswers:
    return LogAnswers(broker, broker)


async def counts(broker: Any) -> None:
    routes = RecordCountRoutes(broker, broker)
    await routes._count_here(CountQuestion("#", 0, 1, 1, None))


async def plan(broker: Any) -> None:
    try:
        ReadPlanner().plan(broker, ReadRequest([(0, 5, 20)]))
    except NotStored as error:
        raise ApiRefusal(421, str(error)) from None


READS: dict[str, Callable[[Any], Awaitable[object]]] = {
    "slice": lambda broker: whole(broker, lambda log: log.read_batches(0, 0, 20, 1)),
    "time": lambda broker: whole(broker, lambda log: log.offset_for_time(0, 1)),
    "topic": lambda broker: whole(broker, lambda log: log.topic_history(b"t", 0, 20)),
    "first offset": first_offset,
    "slice for a node": lambda broker: answers(broker)._batches(BatchesQuestion(0, 0, 20, 1)),
    "time for a node": lambda broker: answers(broker)._time(TimeQuestion(0, 1)),
    "topic for a node": lambda broker: answers(broker)._history(HistoryQuestion(b"t", 0, 20)),
    "counts": lambda broker: counts(broker),
    "plan": plan,
}


@pytest.mark.parametrize("name", READS)
def test_a_log_that_is_forgotten_during_a_read_is_not_empty(name: str) -> None:
    """The answer would be short and look complete. The request is sent again, or elsewhere."""
    asyncio.run(READS[name](Reading(forgets=False)))  # type: ignore[arg-type]
    with pytest.raises(ApiRefusal):
        asyncio.run(READS[name](Reading(forgets=True)))  # type: ignore[arg-type]


def test_each_read_in_a_thread_looks_whether_the_log_is_still_there() -> None:
    """The other routes read through a `WholeLog`."""
    source = Path(__file__).parents[3] / "src/holdfast/api"
    unguarded = {
        path.name
        for path in source.rglob("*.py")
        if "reads.in_thread(" in (text := path.read_text()) and "restarts" not in text
    }
    # It reads open files, after a plan.
    assert unguarded == {"log_routes.py"}
