"""Exceptions that no code expected: contained to one connection, or the end of the process."""

import ast
import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

import pytest

from holdfast.client import Client
from holdfast.io.disk.maintenance import Maintenance
from holdfast.io.event_loop.failures import stop_on_unexpected, watched
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.packets import Auth, Connect, Properties
from holdfast.security.enhanced_authentication import Success
from tests.support.broker_in_process import loop_broker
from tests.support.source_tree import modules, statements

SERVERS = ("api", "server", "holdfast_federation/sidecar", "holdfast_federation/manager")

POISON = "POISON"
TIMEOUT_S = 20

P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TIMEOUT_S))

    return run


def fail() -> NoReturn:
    raise ZeroDivisionError("a defect")


async def failures_of(cause: Callable[[], Awaitable[object]]) -> list[BaseException]:
    loop = asyncio.get_running_loop()
    found: list[BaseException] = []
    stop_on_unexpected(loop, found.append)
    await cause()
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@in_loop
async def test_a_callback_that_fails_stops_the_process() -> None:
    found: list[BaseException] = []
    loop = asyncio.get_running_loop()
    stop_on_unexpected(loop, found.append)
    loop.call_soon(fail)
    await until(lambda: bool(found))
    assert isinstance(found[0], ZeroDivisionError)


@in_loop
async def test_a_task_that_nobody_waits_for_stops_the_process() -> None:
    found: list[BaseException] = []
    stop_on_unexpected(asyncio.get_running_loop(), found.append)

    async def work() -> None:
        fail()

    kept = watched(work())
    await until(lambda: bool(found))
    assert kept.done()


@in_loop
async def test_a_task_that_is_cancelled_is_no_failure() -> None:
    async def cause() -> None:
        task = watched(asyncio.Event().wait())  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert await failures_of(cause) == []


@pytest.mark.parametrize(
    ("module", "stops"), [("uvicorn.protocols", 0), ("holdfast.io.sockets", 1)]
)
@in_loop
async def test_a_protocol_that_fails(module: str, stops: int) -> None:
    """One of a library has lost its connection, which is all it had."""
    protocol = type("Some", (asyncio.Protocol,), {"__module__": module})()

    async def cause() -> None:
        context = {"message": "failed", "exception": KeyError("x"), "protocol": protocol}
        asyncio.get_running_loop().call_exception_handler(context)

    assert len(await failures_of(cause)) == stops


@in_loop
async def test_a_packet_that_makes_the_node_fail(tmp_path: Path) -> None:
    """Its connection is cut at once, and nobody else notices."""
    async with loop_broker(tmp_path) as broker:
        state = broker.broker.node.state
        state.admission.authenticators[POISON] = fail  # type: ignore[assignment]
        found: list[BaseException] = []
        stop_on_unexpected(asyncio.get_running_loop(), found.append)
        other = Client("127.0.0.1", broker.port)
        await other.connect()
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        properties = {p.AUTHENTICATION_METHOD: POISON}
        writer.write(encode(Connect(5, True, 60, "poison", properties=properties), 5))
        async with asyncio.timeout(10):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        writer.close()
        await other.publish("t", b"still served", qos=1)
        await until(lambda: state.connections == 1)
        await other.disconnect()
        assert state.stats.internal_errors == 1
        assert found == []


class Once:
    """Admits a client, and fails when it authenticates again."""

    method = POISON
    made = 0

    def __init__(self) -> None:
        Once.made += 1
        if Once.made > 1:
            fail()

    def start(self, client_id: str, data: bytes | None) -> Success:
        return Success(b"", "u")

    def step(self, data: bytes | None) -> Success:
        raise NotImplementedError


@in_loop
async def test_a_packet_that_was_read_before_its_turn_and_makes_the_node_fail(
    tmp_path: Path,
) -> None:
    """It waited in the connection's input until the session was in the log."""
    async with loop_broker(tmp_path) as broker:
        state = broker.broker.node.state
        Once.made = 0
        state.admission.authenticators[POISON] = Once
        found: list[BaseException] = []
        stop_on_unexpected(asyncio.get_running_loop(), found.append)
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        method: Properties = {p.AUTHENTICATION_METHOD: POISON}
        lasting: Properties = {**method, p.SESSION_EXPIRY_INTERVAL: 60}
        writer.write(
            encode(Connect(5, True, 60, "poison", properties=lasting), 5)
            + encode(Auth(reasons.REAUTHENTICATE, method), 5)
        )
        async with asyncio.timeout(10):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1000)
        writer.close()
        await until(lambda: state.connections == 0)
        assert state.stats.internal_errors == 1
        assert found == []


@in_loop
async def test_after_a_failure_nothing_is_promised(tmp_path: Path) -> None:
    async with loop_broker(tmp_path) as broker:
        client = Client("127.0.0.1", broker.port)
        await client.connect()
        broker.broker.has_failed = True
        publishing = asyncio.ensure_future(client.publish("t", b"x", qos=1))
        journal = broker.broker.node.state.journal
        await until(lambda: journal.pending_bytes > 0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not publishing.done()
        broker.broker.has_failed = False
        broker.broker.touch()
        await publishing
        await client.disconnect()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("too large")])
@in_loop
async def test_maintenance_that_fails_is_tried_again(error: Exception) -> None:
    """Whatever it failed of: without snapshots and retention a disk fills."""
    maintenance = Maintenance.__new__(Maintenance)
    maintenance.failing = {}
    failing = True

    async def retain() -> None:
        if failing:
            raise error

    await maintenance.attempt(retain)
    assert maintenance.failing == {"retain": str(error)}
    failing = False
    await maintenance.attempt(retain)
    assert maintenance.failing == {}


# The class of it: a task whose failure nobody would hear of.

HEARD = ("add_done_callback", "asyncio.wait(", "asyncio.shield(")
EXPLAINED = {
    "holdfast_federation/sidecar/edge_mqtt/edge.py:start": "returned to the edge, which watches it",
    "holdfast_federation/manager/server.py:start": "waited for by manager.server, and ends with it",
}


def tasks() -> Iterator[tuple[str, str]]:
    """(file:function, its source) for each function that begins a task."""
    for package in SERVERS:
        for name, path in modules(package):
            text = path.read_text()
            if "create_task(" not in text and "ensure_future(" not in text:
                continue
            for node in statements(ast.parse(text)):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                source = ast.get_source_segment(text, node) or ""
                if "create_task(" in source or "ensure_future(" in source:
                    yield f"{name}:{node.name}", source


def test_no_task_fails_unheard() -> None:
    unheard = {
        name for name, source in tasks() if not any(word in source for word in HEARD)
    } - EXPLAINED.keys()
    assert unheard == set(), "begin it with event_loop.failures.watched, or wait for it"
