"""The publish queue: messages that are put into it reach the broker, in order, at QoS 1.

    async with Client(servers=[...], reconnect=Reconnect()) as client:
        async with PublishQueue(client, SqliteStore("outbox.db"), window=64) as queue:
            await queue.put("meter/power", b"42")        # in the file when it returns

A message leaves the queue when the broker has confirmed it, or refused it permanently (then
`on_failed` is called, and `failed` lists it). Each message has an id, by which Holdfast stores it
once even if it is sent again. See docs/publish-queue.md.
"""

import asyncio
import logging
import time
from collections import deque
from typing import Final

from holdfast.client.client import Client
from holdfast.client.errors import ClientError, QueueFull, TimedOut
from holdfast.client.options import LEVEL_5
from holdfast.client.pubqueue.format import Format, SequenceFormat
from holdfast.client.pubqueue.messages import (
    Failed,
    MessagesLeft,
    QueueClosed,
    QueueEntry,
    checked_entry,
)
from holdfast.client.pubqueue.sender import OnDelivered, OnFailed, QueueCounts, Sender
from holdfast.client.pubqueue.store import MemoryStore, QueueStore
from holdfast.client.pubqueue.writer import Put, ThreadWriter, Writer
from holdfast.protocol.mqtt.packets import Properties


class Room:
    """The room of a queue. Invariant: no message takes room while another one waits for it."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        """Limits below 1 raise `ValueError`."""
        if messages_max < 1:
            raise ValueError(f"messages_max {messages_max}: 1 or more")
        if bytes_max < 1:
            raise ValueError(f"bytes_max {bytes_max}: 1 or more")
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.length = 0
        self.size = 0
        self.waiting: deque[Put] = deque()

    def has_room(self, size: int) -> bool:
        """Whether a message fits without overtaking waiting ones."""
        return not self.waiting and self._fits(size)

    def reserve(self, size: int) -> None:
        """Takes room for a message."""
        self.length += 1
        self.size += size

    def release(self, size: int) -> None:
        """Gives back the room of a message."""
        self.length -= 1
        self.size -= size

    def resize(self, difference: int) -> None:
        """Corrects the room of a message whose size has changed."""
        self.size += difference

    def next_waiting(self) -> Put | None:
        """The next waiting message that now has room, or None."""
        while self.waiting:
            put = self.waiting[0]
            if put.is_cancelled():
                self.waiting.popleft()
                continue
            if not self._fits(put.reserved):
                return None
            self.reserve(put.reserved)
            return self.waiting.popleft()
        return None

    def describe(self) -> str:
        """The use of the limits, for texts."""
        return (
            f"the queue has {self.length} of {self.messages_max} messages, "
            f"{self.size} of {self.bytes_max} bytes"
        )

    def _fits(self, size: int) -> bool:
        return self.length < self.messages_max and self.size + size <= self.bytes_max


logger = logging.getLogger("holdfast.client")

MESSAGES_MAX: Final = 100_000
BYTES_MAX: Final = 64 << 20
CLOSE_TIMEOUT_S: Final = 10.0
PUTS_IN_A_ROW: Final = 64
"""The puts without a wait after which the event loop gets its turn."""


class PublishQueue:
    """A queue of messages that survives connections, and with a SqliteStore also restarts.

    Invariant: a message leaves the queue only when the broker has confirmed or permanently refused
    it, or when it has expired.
    """

    def __init__(
        self,
        client: Client,
        store: QueueStore | None = None,
        *,
        window: int = 1,
        form: Format | None = None,
        messages_max: int = MESSAGES_MAX,
        bytes_max: int = BYTES_MAX,
        when_full: str = "block",
        when_not_authorized: str = "wait",
        expiry_s: float = 0.0,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        on_delivered: OnDelivered | None = None,
        on_failed: OnFailed | None = None,
    ) -> None:
        """`store`: by default a MemoryStore. `window`: the most messages inflight. `form`: by
        default SequenceFormat. `bytes_max` counts payloads, topics, properties and 64 bytes per
        message.

        `when_full`: "block" lets `put` wait for room, "refuse" raises QueueFull.
        `when_not_authorized`: "wait" sends a message that the broker does not authorise again until
        it does, in its order; "fail" gives it up. `expiry_s`: the seconds until the client must
        have a message, 0 for ever. `close_timeout_s`: the seconds that leaving `async with` waits
        for confirmations. The callbacks are called in the event loop, and perhaps again for the
        same message after a restart. Invalid arguments raise `ValueError`.
        """
        if when_full not in ("block", "refuse"):
            raise ValueError(f'when_full {when_full!r}: "block" or "refuse"')
        if when_not_authorized not in ("wait", "fail"):
            raise ValueError(f'when_not_authorized {when_not_authorized!r}: "wait" or "fail"')
        self._form: Format = form if form is not None else SequenceFormat()
        self._has_properties = client.core.options.level >= LEVEL_5
        if self._form.needs_properties and not self._has_properties:
            raise ValueError(
                "the default form needs MQTT 5: set Options.level to 5, or use PaperFormat"
            )
        self.error: ClientError | None = None
        """The error for which the queue has stopped: ProducerFenced or StoreError."""
        self._store: QueueStore = store if store is not None else MemoryStore()
        self._sender = Sender(
            client,
            window,
            self._left,
            self._stop,
            on_delivered,
            on_failed,
            waits_for_rights=when_not_authorized == "wait",
        )
        self._room = Room(messages_max, bytes_max)
        self._blocks = when_full == "block"
        self._expiry_s = expiry_s
        self._close_timeout_s = close_timeout_s
        self._is_open = False
        self._writer: Writer | None = None
        self._empty = asyncio.Event()
        self._puts_in_a_row = 0

    # Observation

    @property
    def length(self) -> int:
        """The number of messages that are neither confirmed nor failed."""
        return self._room.length

    @property
    def size_bytes(self) -> int:
        """The bytes that they count in `bytes_max`."""
        return self._room.size

    @property
    def age_s(self) -> float:
        """The seconds since the oldest of them was put, or 0."""
        put_at = self._sender.core.oldest_put_at()
        return max(0.0, time.time() - put_at) if put_at is not None else 0.0

    @property
    def counts(self) -> QueueCounts:
        """The counters, as a live view."""
        return self._sender.counts

    @property
    def refusal(self) -> ClientError | None:
        """The broker's last refusal, if it may pass and no message was delivered since; otherwise
        None."""
        return self._sender.refusal

    @property
    def producer(self) -> str:
        """The producer id of this queue at the broker; "" before it is open."""
        return self._sender.producer

    # Life

    async def __aenter__(self) -> "PublishQueue":
        await self.open()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            await self.close()
            return
        try:
            await self.close(0.0)
        except ClientError as second:
            logger.warning("publish_queue_closed error=%r", str(second))

    async def open(self) -> None:
        """Opens the store and begins to send. A queue is opened once. Raises `StoreError`."""
        if self._writer is not None:
            raise QueueClosed("a queue is opened once: make another")
        kind = ThreadWriter if self._store.blocking else Writer
        self._writer = kind(self._store, self._form, self._added, self._dropped, self._stop)
        opened = await self._writer.open()
        self._room.length, self._room.size = opened.count, opened.size
        self._is_open = True
        self._sender.start(self._writer, opened)

    async def close(self, timeout_s: float | None = None) -> int:
        """Waits up to `timeout_s` (None: `close_timeout_s`) for the confirmation of all messages,
        then closes the store. Returns the number of messages left in it. Raises `MessagesLeft` if
        they were only in memory, or `StoreError`."""
        writer = self._writer
        if writer is None or not self._is_open:
            return 0
        self._is_open = False
        self._refuse_waiting(QueueClosed("the queue was closed"))
        try:
            await self.flush(self._close_timeout_s if timeout_s is None else timeout_s)
        except ClientError as error:
            logger.info("publish_queue_not_flushed left=%d error=%r", self.length, str(error))
        finally:
            self._sender.close()
            await writer.close()
        if self.length and not self._store.blocking:
            raise MessagesLeft(self.length)
        return self.length

    # Messages

    async def put(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        retain: bool = False,
        properties: Properties | None = None,
        expiry_s: float | None = None,
    ) -> int:
        """Adds a message and returns its sequence. A store on disk has it then.

        Raises `QueueFull`, `QueueClosed`, `StoreError`, `ProducerFenced`, or `ValueError` for a
        message that no server could accept. Messages of one task leave in the order of its puts,
        those of concurrent ones in the order of the calls. A cancelled put may have happened or
        not.
        """
        if properties and not self._has_properties:
            raise ValueError("properties need MQTT 5")
        life_s = self._expiry_s if expiry_s is None else expiry_s
        entry = checked_entry(self._form, topic, payload, retain, properties, life_s)
        if self.error is not None:
            raise self.error
        writer, room = self._open_writer(), self._room
        if room.has_room(entry.size):
            room.reserve(entry.size)
            if not self._store.blocking:
                writer.add(Put(entry, None))
                await self._yield_to_loop()
                return entry.sequence
            put = Put(entry, asyncio.get_running_loop().create_future())
            writer.add(put)
        elif entry.size > room.bytes_max or not self._blocks:
            raise QueueFull(f"no room for {entry.size} bytes: {room.describe()}")
        else:
            put = Put(entry, asyncio.get_running_loop().create_future())
            room.waiting.append(put)
        assert put.done is not None
        return await put.done

    async def flush(self, timeout_s: float | None = None) -> None:
        """Waits until the queue is empty. Raises `TimedOut`, or the error for which the queue has
        stopped."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.length:
                    if self.error is not None:
                        raise self.error
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            raise TimedOut(f"{self.length} messages not confirmed in {timeout_s:g} s") from None

    async def failed(self) -> list[Failed]:
        """Messages that left the queue without delivery, oldest first. The store keeps a limited
        number. Raises `StoreError`."""
        return await self._open_writer().list_failed()

    async def forget_failed(self) -> int:
        """Removes them from the store and returns their number. Raises `StoreError`."""
        return await self._open_writer().forget_failed()

    def _open_writer(self) -> Writer:
        if self._writer is None or not self._is_open:
            raise QueueClosed("the queue is not open")
        return self._writer

    async def _yield_to_loop(self) -> None:
        self._puts_in_a_row += 1
        if self._puts_in_a_row >= PUTS_IN_A_ROW:
            self._puts_in_a_row = 0
            await asyncio.sleep(0)

    # Reports of the writer

    def _added(self, puts: list[Put]) -> None:
        if not puts:
            return
        for put in puts:
            self._room.resize(put.entry.size - put.reserved)
        self._sender.added(puts)

    def _dropped(self, puts: list[Put]) -> None:
        for put in puts:
            self._room.release(put.reserved)
        self._made_room()

    # Reports of the sender

    def _left(self, entry: QueueEntry) -> None:
        self._room.release(entry.size)
        self._made_room()

    def _made_room(self) -> None:
        assert self._writer is not None
        while (put := self._room.next_waiting()) is not None:
            self._writer.add(put)
        if not self._room.length:
            self._empty.set()

    def _stop(self, error: ClientError) -> None:
        """Stops to send and to accept messages, and keeps those in the queue."""
        if self.error is None:
            logger.error("publish_queue_stopped error=%r", str(error))
            self.error = error
        self._sender.stop()
        self._refuse_waiting(error)
        self._empty.set()

    def _refuse_waiting(self, error: ClientError) -> None:
        while self._room.waiting:
            put = self._room.waiting.popleft()
            if put.done is not None and not put.done.done():
                put.done.set_exception(error)
