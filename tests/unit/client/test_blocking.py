"""The blocking client: the same as the asyncio one, from threads, with no thread left behind."""

import asyncio
import gc
import inspect
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest

from holdfast.client import (
    ConnectionLost,
    Message,
    NotConnected,
    Options,
    PublishRefused,
    PublishResult,
    Reconnect,
    blocking,
)
from holdfast.client import client as aio
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.publish import encode_publish
from tests.e2e.brokers import SOURCE
from tests.support.client_broker import Peer, Script, ScriptedBroker
from tests.support.ports import free_port

WAIT_S = 30


class Broker:
    """A ScriptedBroker in a thread of its own."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.port = 0

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with ScriptedBroker(*self._scripts) as broker:
            self.port = broker.port
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> "Broker":
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    left = [one for one in threading.enumerate() if one.name == "holdfast-client"]
    left = [one for one in left if one not in before]
    for one in left:
        one.join(WAIT_S)
    assert not [one for one in left if one.is_alive()]


async def echo(peer: Peer) -> None:
    """Sends back what is published, and acknowledges it."""
    await peer.accept()
    try:
        while (packet := await peer.receive()) is not None:
            if isinstance(packet, pk.Publish):
                await peer.send(
                    encode_publish(packet.topic, packet.payload, 0, False, False, 0, b"", 5)
                )
                if packet.qos:
                    code = reasons.QUOTA_EXCEEDED if packet.payload == b"refuse" else 0
                    await peer.send(encode_ack(pk.PUBACK, packet.packet_id, code, 5))
            elif isinstance(packet, pk.Subscribe):
                await peer.send(pk.Suback(packet.packet_id, [1] * len(packet.subscriptions)))
            elif isinstance(packet, pk.Unsubscribe):
                await peer.send(pk.Unsuback(packet.packet_id, [0] * len(packet.filters)))
            elif isinstance(packet, pk.Disconnect):
                return
    except ConnectionResetError:
        return


async def mute(peer: Peer) -> None:
    await peer.accept()
    try:
        while not isinstance(await peer.receive(), pk.Disconnect | None):
            pass
    except ConnectionResetError:
        pass


def parameters(function: object) -> dict[str, inspect.Parameter]:
    assert callable(function)
    found = dict(inspect.signature(function).parameters)
    # Waiting may be bounded here; there, `asyncio.timeout` does it.
    found.pop("timeout_s", None)
    return found


def test_it_has_every_public_method_of_the_other_with_the_same_signature() -> None:
    members = inspect.getmembers_static(aio.Client)
    public = {name: member for name, member in members if not name.startswith("_")}
    assert len(public) > 12
    for name, member in public.items():
        mine = getattr(blocking.Client, name)
        if isinstance(member, property):
            assert isinstance(mine, property), name
        else:
            assert parameters(mine) == parameters(member), name
            assert not inspect.iscoroutinefunction(mine), name
    assert parameters(blocking.Client.__init__) == parameters(aio.Client.__init__)
    attributes = {one for one in vars(aio.Client("host")) if not one.startswith("_")} - {"core"}
    assert attributes == {"servers", "connack_properties", "connections"}
    for name in attributes:
        assert isinstance(getattr(blocking.Client, name), property), name


def test_all_of_it() -> None:
    with Broker(echo) as broker, blocking.Client("127.0.0.1", broker.port) as client:
        assert client.is_connected
        assert client.server == client.servers[0]
        assert client.connections == 1
        assert client.connack_properties == {}
        assert client.subscribe("a", ("b", 1)) == [1, 1]
        assert client.unsubscribe("a") == [0]
        for qos in (0, 1):
            assert client.publish("t", f"{qos}", qos=qos).reason == 0
        with pytest.raises(PublishRefused):
            client.publish("t", b"refuse", qos=1)
        futures = [client.submit("t", b"%d" % number, qos=1) for number in range(100)]
        assert [one.result(WAIT_S).reason for one in futures] == [0] * 100
        client.flush()
        with pytest.raises(PublishRefused):
            client.submit("t", b"refuse", qos=1).result(WAIT_S)
        settled: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()
        batch = [("t", b"batch", False, None), ("t", b"refuse", False, None)]
        client.submit_batch(batch, lambda index, outcome: settled.put((index, outcome)))
        assert settled.get(timeout=WAIT_S) == (0, PublishResult(0, {}))
        index, refusal = settled.get(timeout=WAIT_S)
        assert index == 1
        assert isinstance(refusal, PublishRefused)
        client.until_ready()
        assert client.is_ready
        batch = [("t", b"unacknowledged", False, None)] * 2
        client.submit_batch(batch, lambda index, outcome: settled.put((index, outcome)), qos=0)
        for number in range(2):
            assert settled.get(timeout=WAIT_S) == (number, PublishResult(0, {}))
        expected = [
            *[b"0", b"1", b"refuse"],
            *[b"%d" % number for number in range(100)],
            *[b"refuse", b"batch", b"refuse", b"unacknowledged", b"unacknowledged"],
        ]
        received = islice(client.messages(timeout_s=WAIT_S), len(expected))
        assert [message.payload for message in received] == expected
        with pytest.raises(TimeoutError):
            client.receive(timeout_s=0.01)


def test_many_threads() -> None:
    with (
        Broker(echo) as broker,
        blocking.Client("127.0.0.1", broker.port, messages_max=10_000) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        sent = list(
            pool.map(
                lambda n: client.publish("t", b"%d" % n, qos=1).reason, range(500), timeout=WAIT_S
            )
        )
        assert sent == [0] * 500
        received = list(pool.map(lambda _: client.receive(WAIT_S), range(500), timeout=WAIT_S))
        payloads = sorted(int(one.payload) for one in received if one is not None)
        assert payloads == list(range(500))


def test_close_frees_every_thread_that_waits() -> None:
    with Broker(mute) as broker, ThreadPoolExecutor(4) as pool:
        client = blocking.Client("127.0.0.1", broker.port)
        client.connect()
        submitted = client.submit("t", b"", qos=1)
        waiting: list[Future[Any]] = [
            pool.submit(client.receive),
            pool.submit(client.publish, "t", b"", qos=1),
            pool.submit(client.subscribe, "t"),
            pool.submit(client.wait_closed),
        ]
        while len(client._client._publishes) < 2 or not client._client._requests:
            threading.Event().wait(0.005)
        client.close()
        for future in (waiting[1], waiting[2], submitted):
            with pytest.raises(NotConnected):
                future.result(WAIT_S)
        for future in (waiting[0], waiting[3]):
            try:
                assert future.result(WAIT_S) is None
            except NotConnected:
                pass
        with pytest.raises(NotConnected):
            client.publish("t", b"")
        assert client.wait_closed() is None
        client.disconnect()
        client.close()


def test_a_closed_client_can_connect_again() -> None:
    with Broker(echo, echo, mute) as broker:
        client = blocking.Client("127.0.0.1", broker.port)
        for _ in range(2):
            with client:
                client.publish("t", b"", qos=1)
                assert client.receive(WAIT_S) is not None
        # One that is forgotten ends with its last reference.
        client.connect()
        submitted = client.submit("t", b"", qos=1)
        thread = client._loop._thread if client._loop is not None else None
        assert thread is not None
        del client
        gc.collect()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        with pytest.raises(NotConnected):
            submitted.result(0)


def test_errors_are_the_same(closed_port: int) -> None:
    with pytest.raises(ConnectionLost), blocking.Client("127.0.0.1", closed_port):
        pass
    with pytest.raises(NotConnected):
        blocking.Client("127.0.0.1", closed_port).publish("t", b"")
    with pytest.raises(ValueError):
        blocking.Client()


@pytest.fixture
def closed_port() -> int:
    return free_port()


def test_interrupted_call_is_cancelled_and_the_client_goes_on() -> None:
    """Ctrl-C while waiting: the call that was given up does not take the next message."""

    def interrupt() -> None:
        assert waits.wait(WAIT_S)
        # Whether or not it waits already, the signal reaches it.
        os.kill(os.getpid(), signal.SIGINT)

    def wait() -> None:
        waits.set()
        client.receive()

    waits = threading.Event()
    with Broker(echo) as broker, blocking.Client("127.0.0.1", broker.port) as client:
        interrupter = threading.Thread(target=interrupt)
        # As a program begins, whatever was run in this process before.
        former = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
        finally:
            signal.signal(signal.SIGINT, former)
        interrupter.join(WAIT_S)
        assert client.publish("t", b"2", qos=1).reason == 0
        message = client.receive(WAIT_S)
        assert message is not None
        assert message.payload == b"2"


def test_callbacks_that_call_the_client_are_told_so() -> None:
    problems: list[Exception] = []
    done = threading.Event()

    def on_message(message: Message) -> None:
        try:
            client.publish("again", b"")
        except RuntimeError as error:
            problems.append(error)
        done.set()

    with Broker(echo) as broker:
        client = blocking.Client("127.0.0.1", broker.port, on_message=on_message)
        with client:
            client.publish("t", b"")
            assert done.wait(WAIT_S)
    assert "callback" in str(problems[0])


def test_reconnecting() -> None:
    async def cut(peer: Peer) -> None:
        await peer.accept()
        await peer.receive()
        peer.writer.transport.abort()

    with (
        Broker(cut, cut, echo) as broker,
        blocking.Client(
            "127.0.0.1",
            broker.port,
            reconnect=Reconnect(first_delay_s=0.005, delay_max_s=0.02),
            options=Options(client_id="c", session_expiry_s=60),
        ) as client,
    ):
        assert client.publish("t", b"x", qos=1).reason == 0
        assert client.connections == 3


@pytest.mark.parametrize("farewell", ["", "raise SystemExit(3)", "os.fork() or client.close()"])
def test_a_program_that_forgets_it_ends(farewell: str) -> None:
    """With a live connection, and in a forked child, too."""
    program = (
        "import os, sys\n"
        "from holdfast.client.blocking import Client\n"
        "client = Client('127.0.0.1', int(sys.argv[1]))\n"
        "client.connect()\n"
        f"{farewell}\n"
    )
    with Broker(mute) as broker:
        finished = subprocess.run(
            # From 3.12 on Python itself warns of a fork beside threads.
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(broker.port)],
            env={"PYTHONPATH": str(SOURCE)},
            timeout=WAIT_S,
            capture_output=True,
            check=False,
        )
    assert finished.returncode == (3 if "SystemExit" in farewell else 0), finished
    assert finished.stderr == b""


def test_a_forked_child_is_told_so() -> None:
    with Broker(mute) as broker, blocking.Client("127.0.0.1", broker.port) as client:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                client.publish("t", b"")
            except RuntimeError as error:
                code = 0 if "parent process" in str(error) else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
