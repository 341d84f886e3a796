"""I/O workers that the system does not let start, that hang, and the pings between them and the
broker."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.io.workers import pool
from holdfast.io.workers.channel import WorkerChannel
from holdfast.io.workers.pool import IoWorkers
from holdfast.protocol.relay.frames import PONG, RelayReader, frame


def test_a_worker_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has no memory or descriptor for a process. An exception of the timer would stop
    the broker, with the clients of all other workers."""
    start = subprocess.Popen
    failures = 2

    def lacking(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(12, "Cannot allocate memory")
        return start(*args, **kwargs)

    unexpected: list[dict[str, Any]] = []

    async def replace() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, each: unexpected.append(each))
        workers = IoWorkers()
        workers.start(1)
        try:
            (first,) = workers._workers
            monkeypatch.setattr(subprocess, "Popen", lacking)
            first.process.kill()
            async with asyncio.timeout(10):
                while first in workers._workers or not workers._workers:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            workers.close()

    monkeypatch.setattr(pool, "QUICK_S", 0.0)
    monkeypatch.setattr(pool, "RETRY_S", 0.01)
    asyncio.run(replace())
    assert not unexpected
    assert not failures


def test_a_broker_that_was_stopped_blames_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings without an answer count. A broker that was stopped for a minute has sent none."""
    monkeypatch.setattr(pool, "HANG_S", 3 * pool.PING_S)

    async def watch() -> None:
        workers = IoWorkers()
        # It sends the first ping. Nobody reads the answers here.
        workers.start(1)
        try:
            (worker,) = workers._workers
            worker.started_at -= 60
            for _ in range(2):
                workers._watch()
                assert worker.process.poll() is None
            workers._watch()
            assert worker.process.wait(10) == -signal.SIGKILL
        finally:
            workers.close()

    asyncio.run(watch())


class Stream:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.reader = RelayReader()
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.reader.feed(data)

    def abort(self) -> None:
        self.is_aborted = True

    def frames(self) -> list[tuple[int, int]]:
        found = []
        while self.reader.next():
            found.append((self.reader.kind, self.reader.number))
        return found


class Channel:
    """A channel to a worker that the test plays. No broker serves behind it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.calls: list[str] = []
        lost = self.calls.append
        self.channel = WorkerChannel(self.loop, {}, lambda _: None, lambda: lost("lost"))
        self.stream = Stream()
        self.channel.connection_made(self.stream)  # type: ignore[arg-type]

    def call(self, name: str) -> Any:
        return lambda: self.calls.append(name)

    def turn(self) -> None:
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()


@pytest.fixture
def played() -> Iterator[Channel]:
    channel = Channel()
    yield channel
    channel.loop.close()


def test_each_answer_belongs_to_the_oldest_ping(played: Channel) -> None:
    played.channel.ping()
    played.channel.ping(played.call("first"))
    played.channel.ping(played.call("second"))
    played.channel.data_received(frame(PONG, 0))
    assert played.calls == []
    played.channel.data_received(frame(PONG, 0))
    assert played.calls == ["first"]
    played.channel.connection_lost(None)
    assert played.calls == ["first", "second", "lost"]
    played.channel.ping(played.call("third"))
    assert played.calls[-1] == "third"


def test_an_answer_to_no_ping_ends_the_worker(played: Channel) -> None:
    played.channel.data_received(frame(PONG, 0))
    assert played.stream.is_aborted


def test_a_ping_before_the_stream_waits_for_no_answer() -> None:
    loop = asyncio.new_event_loop()
    channel = WorkerChannel(loop, {}, lambda _: None, lambda: None)
    calls: list[str] = []
    channel.ping()
    channel.ping(lambda: calls.append("now"))
    loop.close()
    assert calls == ["now"]
