"""The search of the log for the events of a client, in a log of large messages."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.api.endpoints import Call
from holdfast.api.log import session_history
from holdfast.api.log.session_history import BEFORE, CLIENT, LIMIT
from holdfast.api.log.session_history import SessionHistoryRoutes as Routes
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.routes import trace_routes
from holdfast.api.views import history
from holdfast.log.record import SESSION
from holdfast.node.state.session_records import EndRecord, SubscribeRecord, encode_session
from tests.support.journal_files import build, record

MESSAGES = 100
MESSAGE_BYTES = 1024
SEARCH_BYTES = 16 * MESSAGE_BYTES


class LargeLog:
    """A log of large messages, each in a batch of its own. Each tenth is followed by the end of a
    session, at the time of its offset."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.ends = [MESSAGES]
        self.batches: list[bytes] = []
        for number in range(MESSAGES):
            one = record("t", bytes(MESSAGE_BYTES))
            if number % 10 == 0:
                end = encode_session(EndRecord("c"))
                one = record("", end, kind=SESSION, flags=0, timestamp_us=number, client_id="c")
            self.batches.append(build(0, number, [one]))

    def offset_for_time(self, partition: int, time_us: int) -> int:
        return MESSAGES

    def first_offset(self, partition: int) -> int:
        return 0

    def read_batches(self, partition: int, start: int, end: int, bytes_max: int) -> list[bytes]:
        found: list[bytes] = []
        while start < end and sum(map(len, found)) < bytes_max:
            found.append(self.batches[start])
            start += 1
        self.read_bytes += sum(map(len, found))
        return found

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        return work()


def node_of(log: LargeLog) -> OwnNode:
    """A node with this log."""

    async def opened(partitions: tuple[int, ...]) -> LargeLog:
        assert partitions == (0,)
        return log

    state = SimpleNamespace(config=SimpleNamespace(partitions=1))
    broker = SimpleNamespace(node=SimpleNamespace(state=state))
    return cast(OwnNode, SimpleNamespace(broker=broker, readable_broker=broker, log=opened))


def test_one_request_reads_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_history, "SEARCH_BYTES_MAX", SEARCH_BYTES)
    monkeypatch.setattr(history, "PIECE_BYTES", 2 * MESSAGE_BYTES)
    monkeypatch.setattr(history, "READ_BYTES", 2 * MESSAGE_BYTES)
    log = LargeLog()
    everywhere = SimpleNamespace(offer=lambda *_: None)
    routes = Routes(node_of(log), cast(Everywhere, everywhere))
    (endpoint,) = routes.endpoints()
    times: list[int] = []
    at, requests = MESSAGES, 0
    while at:
        values = {CLIENT.name: "c", LIMIT.name: 50, BEFORE.name: at}
        call = Call(cast(Any, None), endpoint, cast(Any, None), cast(Any, values))
        log.read_bytes = 0
        page = cast(Any, asyncio.run(cast(Any, endpoint.handler(call))))
        assert log.read_bytes < SEARCH_BYTES + 6 * MESSAGE_BYTES
        assert page.next < at
        times += [event.at_us for event in page.events]
        at, requests = page.next, requests + 1
    assert times == list(range(MESSAGES - 10, -1, -10))
    assert requests < 20


def test_the_newest_records_before_a_message_are_read_when_the_bound_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The budget ends in the first step backwards. The subscription is the last record in it."""
    monkeypatch.setattr(history, "PIECE_BYTES", 2 * MESSAGE_BYTES)
    monkeypatch.setattr(history, "READ_BYTES", 2 * MESSAGE_BYTES)
    log = LargeLog()
    rows = [("t", 1, False, False, 0, 0)]
    subscribed = encode_session(SubscribeRecord("c", cast(Any, rows), [0]))
    last = record("", subscribed, kind=SESSION, flags=0, timestamp_us=7, client_id="c")
    log.batches[-1] = build(0, MESSAGES - 1, [last])
    routes = trace_routes.TraceRoutes(node_of(log))
    found = asyncio.run(routes._history("c", record("t", b""), SEARCH_BYTES))
    assert found.filters == {"t": (1, 7)}
    assert log.read_bytes < SEARCH_BYTES + 6 * MESSAGE_BYTES
