"""`GET /api/v1/events`: one stream (SSE) of what changes at all nodes.

A node gathers its changes every TICK_S while somebody watches, here or at another node, and
otherwise costs nothing. A reader that does not keep up is dropped; its browser connects again and
begins with a fresh state.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct
from starlette.responses import StreamingResponse

from holdfast.api.endpoints import EVENT_STREAM, ApiRefusal, Call, Endpoint
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.views.events import ChangeWatch, EventBatch
from holdfast.io.event_loop.failures import watched
from holdfast.security.access.scopes import Scope

TICK_S: Final = 0.2
"""The interval in seconds of a node's batches: at most five a second."""
OTHERS_S: Final = 1.0
"""The interval in seconds at which the other nodes are asked."""
READERS_MAX: Final = 16
"""The most streams of one node."""
QUEUE_MAX: Final = 100
"""The most batches that wait for one reader; one more ends its stream."""
RING_MAX: Final = 100
"""The most batches that other nodes may still ask for."""
KEPT_S: Final = 10.0
"""The time in seconds for which a node goes on gathering after another node has asked."""
STREAM_S: Final = 3600.0
"""The longest stream in seconds. The next one needs credentials that are still valid."""
IDLE_S: Final = 15.0
"""The time in seconds without events after which a comment is sent. Proxies then do not end the
stream, and it ends here if its credentials have ended meanwhile."""
NOTHING: Final = b": nothing\n\n"
"""That comment."""


class EventQuestion(Struct):
    """The batches of another node behind a number of one of its feeds."""

    feed: str = ""
    after: int = 0


class EventAnswer(Struct):
    """The newest batches of a node."""

    feed: str
    batches: list[EventBatch]


class EventReader:
    """One reader's queue."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[EventBatch | None] = asyncio.Queue(QUEUE_MAX + 1)
        self.is_slow = False

    def put(self, batch: EventBatch) -> None:
        """Queues a batch, or ends the stream of a reader that does not keep up."""
        if self.is_slow:
            return
        if self.waiting.qsize() < QUEUE_MAX:
            self.waiting.put_nowait(batch)
            return
        self.is_slow = True
        while not self.waiting.empty():
            self.waiting.get_nowait()
        self.waiting.put_nowait(None)


class EventFeed:
    """The changes of this node, and the readers of all nodes' changes."""

    def __init__(self, node: OwnNode, everywhere: Everywhere) -> None:
        self._node = node
        self._everywhere = everywhere
        self._name = secrets.token_hex(4)
        self._readers: set[EventReader] = set()
        self._ring: deque[EventBatch] = deque(maxlen=RING_MAX)
        self._asked_at = -KEPT_S
        self._gathering: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._known: dict[str, tuple[str, int]] = {}
        everywhere.offer("events", EventQuestion, self._answer)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/events", Scope.VIEWER, "a stream (SSE) of what changes",
                     self._stream, EventBatch, refusals=(503,), media_type=EVENT_STREAM),
        ]  # fmt: skip

    async def _stream(self, call: Call) -> StreamingResponse:
        broker = self._node.broker
        if len(self._readers) >= READERS_MAX:
            raise ApiRefusal(503, f"{READERS_MAX} streams are open already",
                             {"Retry-After": "5"})  # fmt: skip
        return sse_response(self._events(broker.loop))

    async def _events(self, loop: asyncio.AbstractEventLoop) -> AsyncIterator[bytes]:
        reader = EventReader()
        self._readers.add(reader)
        deadline = loop.time() + STREAM_S
        try:
            self._start()
            yield b"retry: 2000\n\n"
            while loop.time() < deadline:
                try:
                    async with asyncio.timeout(IDLE_S):
                        batch = await reader.waiting.get()
                except TimeoutError:
                    yield NOTHING
                    continue
                if batch is None:
                    yield b'event: dropped\ndata: {"reason":"the reader does not keep up"}\n\n'
                    return
                yield sse_event(batch)
        finally:
            self._readers.discard(reader)

    async def _answer(self, question: EventQuestion) -> EventAnswer:
        self._asked_at = self._node.broker.loop.time()
        self._start()
        after = question.after if question.feed == self._name else 0
        batches = [each for each in self._ring if each.number > after]
        if question.feed != self._name:
            # A reader that has just begun wants the state, not the past.
            batches = batches[-1:]
        return EventAnswer(self._name, batches)

    def _start(self) -> None:
        if self._gathering is None:
            self._gathering = watched(self._gather())
        if self._asking is None and self._readers:
            self._asking = watched(self._ask())

    async def _gather(self) -> None:
        """Gathers until nobody watches."""
        try:
            with suppress(ApiRefusal):
                loop = self._node.broker.loop
                watch = ChangeWatch(self._node.server, self._node.broker)
                self._name = secrets.token_hex(4)
                self._ring.clear()
                while self._readers or loop.time() - self._asked_at < KEPT_S:
                    batch = watch.batch()
                    if batch is not None:
                        self._ring.append(batch)
                        self._pass_on(batch)
                    await asyncio.sleep(TICK_S)
        finally:
            self._gathering = None

    async def _ask(self) -> None:
        """Asks the other nodes until nobody reads here."""
        try:
            while self._readers:
                for node in self._everywhere.others():
                    feed, after = self._known.get(node, ("", 0))
                    question = EventQuestion(feed, after)
                    with suppress(ApiRefusal):
                        answer = await self._everywhere.ask(node, "events", question, EventAnswer)
                        for batch in answer.batches:
                            self._pass_on(batch)
                            after = batch.number
                        if feed != answer.feed and not answer.batches:
                            after = 0
                        self._known[node] = answer.feed, after
                await asyncio.sleep(OTHERS_S)
        finally:
            self._asking = None
            self._known.clear()

    def _pass_on(self, batch: EventBatch) -> None:
        for reader in self._readers:
            reader.put(batch)


def sse_event(value: object) -> bytes:
    """One event of a stream."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def sse_response(events: AsyncIterator[bytes]) -> StreamingResponse:
    """A stream of events."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type=EVENT_STREAM, headers=headers)
