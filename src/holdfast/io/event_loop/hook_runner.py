"""Calls hooks in threads.

Invariants
- No call runs in the event loop. Each that somebody waits for has a timeout, and fails closed.
- The threads are daemons: a hook that hangs never keeps the process from its end.
- The events that wait for a hook are bounded; more are dropped and counted, never waited for.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from holdfast.hooks import Grants, HookClient, HookMessage, Hooks
from holdfast.node.admission.observer import ClientObserver
from holdfast.node.session.connection import Connection
from holdfast.node.stats import Stats
from holdfast.protocol.topics.trie import SubscriptionTrie
from holdfast.security.acl import ClientRules, given_rules
from holdfast.security.identity.identity import (
    HOOK,
    Answer,
    ClientIdentity,
    LoginRefusal,
    LoginRequest,
)

logger = logging.getLogger("holdfast")

T = TypeVar("T")

THREADS: Final = 4
"""The threads for calls that a client waits for. That many may hang before all clients are
refused."""
EVENTS_MAX: Final = 10_000
"""The most events that wait for the hooks."""

Event = Callable[[], None]


class HookThreads:
    """Daemon threads that run calls in the order in which they were given."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def submit(self, call: Callable[[], None]) -> None:
        """Runs the call in a thread. It must not raise."""
        self._calls.put(call)

    def close(self) -> None:
        """Ends the threads after the calls so far."""
        for _ in range(self._count):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class HookSource:
    """The hooks that authenticate and authorise."""

    method = HOOK

    def __init__(self, hooks: Sequence[Hooks], timeout_s: float) -> None:
        self._authenticate = [hook for hook in hooks if _overrides(hook, "authenticate")]
        self._authorise = [hook for hook in hooks if _overrides(hook, "authorise")]
        self._timeout_s = timeout_s
        self._threads: HookThreads | None = None

    @property
    def authenticates(self) -> bool:
        """Whether a hook wants to see each CONNECT."""
        return bool(self._authenticate)

    @property
    def authorises(self) -> bool:
        """Whether a hook gives rights."""
        return bool(self._authorise)

    async def start(self) -> None:
        self._threads = HookThreads(THREADS, "hook")

    async def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    async def authenticate(self, request: LoginRequest) -> Answer:
        """The first reply of a hook that is not None. Raises what a hook raised, `TypeError` for
        one that is no reply, and `TimeoutError`."""
        for hook in self._authenticate:
            answer = await self._call(partial(hook.authenticate, request))
            if answer is not None:
                return _checked(answer)
        return None

    async def authorise(self, client: HookClient) -> ClientRules | None:
        """The rights that the first hook with an opinion gives. Raises as `authenticate`."""
        for hook in self._authorise:
            grants = await self._call(partial(hook.authorise, client))
            if grants is None:
                continue
            if not isinstance(grants, Grants):
                raise TypeError(f"authorise returned {type(grants).__name__}, not Grants")
            publish, subscribe = list(grants.publish), list(grants.subscribe)
            return given_rules("hook", publish, subscribe, client.username, client.client_id)
        return None

    async def _call(self, call: Callable[[], T]) -> T:
        if self._threads is None:
            raise RuntimeError("the hooks are not started")
        done: Future[T] = Future()
        self._threads.submit(partial(_run_call, call, done))
        # The timeout cancels the future, so a call that has not begun never does.
        async with asyncio.timeout(self._timeout_s):
            return await asyncio.wrap_future(done)


def _run_call(call: Callable[[], T], done: "Future[T]") -> None:
    if not done.set_running_or_notify_cancel():
        return
    # The waiter may be gone by the time of the result.
    with contextlib.suppress(RuntimeError):
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)


def _checked(answer: object) -> Answer:
    if not isinstance(answer, ClientIdentity | LoginRefusal):
        raise TypeError(f"authenticate returned {type(answer).__name__}")
    return answer


def _overrides(hook: Hooks, name: str) -> bool:
    return getattr(type(hook), name) is not getattr(Hooks, name)


class HookEvents(ClientObserver):
    """The events of clients, passed to the hooks in batches of one turn."""

    def __init__(
        self, hooks: Sequence[Hooks], loop: asyncio.AbstractEventLoop, stats: Stats
    ) -> None:
        super().__init__()
        self._stats = stats
        self._loop = loop
        self._hooks = hooks
        self._filters = SubscriptionTrie()
        for hook in hooks:
            if _overrides(hook, "on_publish"):
                for filter in hook.publish_filters:
                    self._filters.add(filter, hook, hook)
        self.observes_messages = len(self._filters) > 0
        self._connects = [hook for hook in hooks if _overrides(hook, "on_connect")]
        self._disconnects = [hook for hook in hooks if _overrides(hook, "on_disconnect")]
        self._batch: list[Event] = []
        self._waiting = 0
        self._threads = HookThreads(1, "hook-events")

    def close(self) -> None:
        """Ends the thread after the events so far."""
        self._threads.close()

    def connected(self, connection: Connection) -> None:
        if self._connects:
            client = client_of(connection)
            for hook in self._connects:
                self._add(partial(hook.on_connect, client))

    def disconnected(self, connection: Connection, reason: str) -> None:
        if self._disconnects:
            client = client_of(connection)
            for hook in self._disconnects:
                self._add(partial(hook.on_disconnect, client, reason))

    def published(
        self, connection: Connection, topic: str, payload: bytes, qos: int, retain: bool
    ) -> bool:
        hooks = self._filters.match(topic)
        if hooks:
            message = HookMessage(connection.client_id, topic, payload, qos, retain)
            for hook in dict.fromkeys(hooks):
                assert isinstance(hook, Hooks)
                self._add(partial(hook.on_publish, message))
        return bool(hooks)

    def _add(self, event: Event) -> None:
        if self._waiting >= EVENTS_MAX:
            self._stats.hook_events_dropped += 1
            return
        self._waiting += 1
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(event)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        self._threads.submit(partial(self._run, batch))

    def _run(self, batch: list[Event]) -> None:
        """Calls the hooks, in the thread."""
        for event in batch:
            try:
                event()
            except Exception as error:  # noqa: BLE001
                # Code of the operator may raise anything, and later events still count.
                logger.error("hook_failed error=%r", str(error) or type(error).__name__)
        with contextlib.suppress(RuntimeError):
            # The loop is closed when the process ends.
            self._loop.call_soon_threadsafe(self._done, len(batch))

    def _done(self, count: int) -> None:
        self._waiting -= count


def client_of(connection: Connection) -> HookClient:
    """The client of a connection, as hooks see it."""
    return HookClient(
        connection.client_id, connection.username, connection.remote, connection.listener.name
    )
