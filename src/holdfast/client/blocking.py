"""The MQTT client for programs without an event loop.

    with Client("localhost") as client:
        client.subscribe(("commands/#", 1))
        client.publish("power", b"42", qos=1)            # returns when the server has it
        for message in client.messages(timeout_s=10):
            ...

It is the asyncio client (`holdfast.client.client`) on a loop in a thread of its own: the same
arguments, results and errors. Any thread may call it; each call waits for its result, and a call
that is interrupted (Ctrl-C) is cancelled there, too. Callbacks run in that thread: they must be
short, and must not call this client.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import wraps
from ssl import SSLContext
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from holdfast.client import client as aio
from holdfast.client.connection import PublishResult
from holdfast.client.errors import ClientError, NotConnected
from holdfast.client.options import Options
from holdfast.client.protocol.effects import Message
from holdfast.client.reconnect import Reconnect
from holdfast.client.servers import Server
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Packet, Properties

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_S: Final = 10.0
"""The seconds that `close` waits for the thread. It is a daemon, so it never delays the end of the
program."""


def _waiting(
    method: Callable[Concatenate[aio.Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    """The blocking form of a method of the asyncio client."""

    @wraps(method)
    def call(self: "Client", /, *arguments: P.args, **named: P.kwargs) -> T:
        return self._run(method(self._client, *arguments, **named))

    return call


def _in_its_thread(
    method: Callable[Concatenate[aio.Client, P], T],
) -> Callable[Concatenate["Client", P], T]:
    """The form of a method that does not wait: it runs in the client's thread."""

    @wraps(method)
    def call(self: "Client", /, *arguments: P.args, **named: P.kwargs) -> T:
        async def work() -> T:
            """Calls the method in the client's loop."""
            return method(self._client, *arguments, **named)

        return self._run(work())

    return call


class Client:
    """One session with one server at a time; every call waits for its result."""

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        *,
        servers: Sequence[str | Server] = (),
        reconnect: Reconnect | None = None,
        options: Options | None = None,
        client_id: str | None = None,
        tls: SSLContext | None = None,
        server_hostname: str | None = None,
        local_address: tuple[str, int] | None = None,
        messages_max: int = 1000,
        request_timeout_s: float = 30.0,
        on_message: Callable[[Message], None] | None = None,
        on_connect: Callable[[bool, Server], None] | None = None,
        on_connect_failed: Callable[[ClientError, Server], None] | None = None,
        on_connection_lost: Callable[[ClientError], None] | None = None,
        on_trace: Callable[[bool, Packet], None] | None = None,
    ) -> None:
        """The arguments are those of `holdfast.client.client.Client`. Invalid ones raise
        `ValueError`."""
        self._client = aio.Client(
            host,
            port,
            servers=servers,
            reconnect=reconnect,
            options=options,
            client_id=client_id,
            tls=tls,
            server_hostname=server_hostname,
            local_address=local_address,
            messages_max=messages_max,
            request_timeout_s=request_timeout_s,
            on_message=on_message,
            on_connect=on_connect,
            on_connect_failed=on_connect_failed,
            on_connection_lost=on_connection_lost,
            on_trace=on_trace,
        )
        self._lock = threading.Lock()
        self._loop: _LoopThread | None = None

    @property
    def client_id(self) -> str:
        """The client id, as assigned by the server if it was empty."""
        return self._client.client_id

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection with a session."""
        return self._client.is_connected

    @property
    def is_ready(self) -> bool:
        """Blocking form of `Client.is_ready`."""
        return self._client.is_ready

    @property
    def server(self) -> Server | None:
        """The server of the connection, None without one."""
        return self._client.server

    @property
    def servers(self) -> list[Server]:
        """The servers that the client tries."""
        return self._client.servers

    @property
    def connections(self) -> int:
        """The number of times that a server has accepted the client."""
        return self._client.connections

    @property
    def connack_properties(self) -> Properties:
        """The properties of the last CONNACK."""
        return self._client.connack_properties

    def __enter__(self) -> "Client":
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnects and ends the thread. After that only `connect` may be called."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or loop.is_of_parent():
            return
        try:
            loop.run(self._client.disconnect())
        finally:
            loop.close(self._client.abort)

    def connect(self, policy: Reconnect | None = None) -> bool:
        """Blocking form of `Client.connect`."""
        with self._lock:
            if self._loop is None:
                self._loop = _LoopThread()
                # A program that forgets `close` leaves no thread behind.
                weakref.finalize(self, self._loop.close, self._client.abort)
        return self._run(self._client.connect(policy))

    def disconnect(
        self, reason: int = reasons.SUCCESS, properties: Properties | None = None
    ) -> None:
        """Blocking form of `Client.disconnect`. Without a connection it does nothing."""
        if self._loop is not None:
            self._run(self._client.disconnect(reason, properties))

    def abort(self) -> None:
        """Blocking form of `Client.abort`."""

        async def abort() -> None:
            """Aborts in the client's loop."""
            self._client.abort()

        if self._loop is not None:
            self._run(abort())

    publish = _waiting(aio.Client.publish)

    def submit(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        qos: int = 0,
        retain: bool = False,
        properties: Properties | None = None,
        topic_alias: int = 0,
    ) -> "Future[PublishResult]":
        """The same as `Client.submit`, with a future for threads (`future.result(timeout)`)."""

        async def submit() -> Future[PublishResult]:
            """Submits in the client's loop."""
            future = await self._client.submit(
                topic,
                payload,
                qos=qos,
                retain=retain,
                properties=properties,
                topic_alias=topic_alias,
            )
            return _of_threads(future)

        return self._run(submit())

    until_ready = _waiting(aio.Client.until_ready)
    submit_batch = _in_its_thread(aio.Client.submit_batch)
    """`on_settled` is called in the client's thread."""
    flush = _waiting(aio.Client.flush)
    subscribe = _waiting(aio.Client.subscribe)
    unsubscribe = _waiting(aio.Client.unsubscribe)
    acknowledge = _in_its_thread(aio.Client.acknowledge)
    reauthenticate = _waiting(aio.Client.reauthenticate)

    def wait_closed(self) -> ClientError | None:
        """Blocking form of `Client.wait_closed`."""
        if self._loop is None:
            return None
        return self._run(self._client.wait_closed())

    def messages(self, timeout_s: float | None = None) -> Iterator[Message]:
        """The same as `Client.messages`. With a timeout it also ends when no message came for so
        long."""
        while True:
            try:
                message = self.receive(timeout_s)
            except TimeoutError:
                return
            if message is None:
                return
            yield message

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The same as `Client.receive`. After `timeout_s` it raises `TimeoutError`, and no message
        is lost."""

        async def receive() -> Message | None:
            """Receives in the client's loop."""
            async with asyncio.timeout(timeout_s):
                return await self._client.receive()

        return self._run(receive())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._loop
        if loop is None:
            work.close()
            raise NotConnected("there is no connection")
        return loop.run(work)


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._loop = asyncio.new_event_loop()
        # No work may reach a loop that will not run it.
        self._lock = threading.Lock()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="holdfast-client", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(_cancel_all())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def is_of_parent(self) -> bool:
        """Whether this is a forked child, which does not have the thread."""
        return os.getpid() != self._process_id

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work. Raises `NotConnected` after `close`. Raises `RuntimeError` in a
        forked child, and in the thread itself, which would wait for itself."""
        future: Future[T] | None = None
        try:
            if self.is_of_parent():
                raise RuntimeError("the client belongs to the parent process: make a new one")
            if threading.current_thread() is self._thread:
                raise RuntimeError("a callback cannot wait for its own client: use another thread")
            with self._lock:
                if self._is_closing:
                    raise NotConnected("the client is closed")
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
        finally:
            if future is None:
                work.close()
        try:
            return future.result()
        except CancelledError:
            raise NotConnected("the client was closed meanwhile") from None
        except BaseException:
            # Interrupted while waiting (Ctrl-C): the work must not continue unnoticed.
            future.cancel()
            raise

    def close(self, last_call: Callable[[], None]) -> None:
        """Ends the loop and its thread. `last_call` runs in the loop before its end."""
        if self.is_of_parent():
            return
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._loop.call_soon_threadsafe(last_call)
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _of_threads(future: "asyncio.Future[PublishResult]") -> "Future[PublishResult]":
    """A future for threads that gets the result of one of the loop."""
    result: Future[PublishResult] = Future()

    def pass_on(finished: "asyncio.Future[PublishResult]") -> None:
        if not result.set_running_or_notify_cancel():
            return
        error = finished.exception()
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(finished.result())

    future.add_done_callback(pass_on)
    return result
