"""Sends a publish queue's messages from its store to the client, and records the outcomes.

One task (the pump) does everything that has to wait: loading, checkpoints, renewals, a congested
client. If none of that is needed, the acknowledgement that empties the window sends the next
messages itself.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import random
from typing import Final

from holdfast.client.client import Client
from holdfast.client.connection import Outcome, PublishResult
from holdfast.client.errors import ClientError, PublishRefused
from holdfast.client.identity import IDENTITY_PROPERTY
from holdfast.client.options import LEVEL_5
from holdfast.client.pubqueue.core import QueueCore
from holdfast.client.pubqueue.messages import (
    Failed,
    MessageExpired,
    ProducerFenced,
    QueueClosed,
    QueueEntry,
    StoreError,
    StoreFull,
)
from holdfast.client.pubqueue.store import Opened
from holdfast.client.pubqueue.writer import Put, Writer
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Properties

logger = logging.getLogger("holdfast.client")

LOADED_MAX: Final = 2_000
"""The most messages of a store on disk in memory. More are loaded once half of them have left."""
LOADED_BYTES_MAX: Final = 8 << 20
"""The same limit in bytes. Both apply."""
BATCH_BYTES_MAX: Final = 1 << 18
"""The bytes at which a batch ends, with the message that reaches them."""
STORE_RETRY_S: Final = 1.0
"""The seconds between a full disk and the next attempt."""
_RETRIED: Final = frozenset(
    {
        reasons.UNSPECIFIED_ERROR,
        reasons.SERVER_BUSY,
        reasons.PACKET_IDENTIFIER_IN_USE,
        reasons.QUOTA_EXCEEDED,
    }
)
"""The refusals that may be temporary. After any other one a message leaves the queue."""
_IDENTITY_REFUSED: Final = ("producer epoch is fenced", "producer belongs to another user")
"""The reason strings of Holdfast for a wrong sender, not a wrong message. A broker leaves them out
if they would make a reply too large, see `_is_fenced`."""
NOT_AUTHORIZED_LOG_S: Final = 60.0
"""The least seconds between two log lines about a queue that may not publish."""

OnDelivered = Callable[[QueueEntry, PublishResult], None]
OnFailed = Callable[[QueueEntry, ClientError], None]


@dataclass
class QueueCounts:
    """Messages since the queue was opened. Each one that left the queue counts in one of them."""

    put: int = 0
    delivered: int = 0
    refused: int = 0
    """Messages that the server refused permanently."""
    expired: int = 0
    resent: int = 0
    """Messages passed to the client again after a refusal or a lost connection."""
    overtaken: int = 0
    """Messages after which a later one was stored first. Only with a window above 1."""


class Sender:
    """The sender of one queue. `on_left` gets each message that left, `on_stopped` the error."""

    def __init__(
        self,
        client: Client,
        window: int,
        on_left: Callable[[QueueEntry], None],
        on_stopped: Callable[[ClientError], None],
        on_delivered: OnDelivered | None,
        on_failed: OnFailed | None,
        waits_for_rights: bool = True,
    ) -> None:
        """`waits_for_rights`: a message that is not authorised is sent again; otherwise it fails.
        Invalid arguments raise `ValueError`."""
        self.core = QueueCore(window, random)
        self.producer = ""
        self._client = client
        self._on_left = on_left
        self._on_stopped = on_stopped
        self._on_delivered = on_delivered
        self._on_failed = on_failed
        self._waits_for_rights = waits_for_rights
        self._not_authorized_logged_at = -NOT_AUTHORIZED_LOG_S
        self.refusal: PublishRefused | None = None
        """The broker's last refusal, if it may pass; None once it has accepted a message."""
        self._counts = QueueCounts()
        self._has_properties = client.core.options.level >= LEVEL_5
        self._writer: Writer
        self._pump: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._offline = False
        # The pump has a message that waits for the client.
        self._submitting = False
        # The highest sequence in the store, and the highest one that the core has.
        self._tail = 0
        self._loaded_to = 0
        # After `close` outcomes are ignored: the next opening sends those again.
        self._is_over = False

    @property
    def counts(self) -> QueueCounts:
        """The counters, up to date."""
        self._counts.resent = self.core.resent
        self._counts.overtaken = self.core.overtaken
        return self._counts

    def start(self, writer: Writer, opened: Opened) -> None:
        """Begins to send the messages of an open store."""
        self._writer = writer
        self.producer = opened.producer
        self._tail = opened.last_sequence
        if not opened.count:
            self._loaded_to = self._tail
        self._pump = asyncio.create_task(self._run(), name="publish-queue")
        self._wake.set()

    def added(self, puts: list[Put]) -> None:
        """Adds messages that are in the store now, ascending."""
        self._counts.put += len(puts)
        is_loaded = self._loaded_to == self._tail
        self._tail = puts[-1].entry.sequence
        if is_loaded:
            for put in puts:
                if self._writer.store.blocking and self._has_loaded(LOADED_MAX, LOADED_BYTES_MAX):
                    break
                self.core.add(put.entry)
                self._loaded_to = put.entry.sequence
        self._wake.set()

    def close(self) -> None:
        """Ends the pump. Messages inflight stay with the client, and their outcomes are ignored."""
        self._is_over = True
        if self._pump is not None:
            self._pump.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def stop(self) -> None:
        """Sends no more, but processes outcomes."""
        self.core.stop()

    def _has_loaded(self, count: int, size: int) -> bool:
        return len(self.core.pending) >= count or self.core.pending_size >= size

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                try:
                    await self._prepare()
                except StoreFull as error:
                    logger.warning("publish_queue_waits error=%r", str(error))
                    self._wake_in(STORE_RETRY_S)
                    continue
                await self._send_ready()
                self._arm()
        except StoreError as error:
            self._on_stopped(error)
        except Exception as error:
            logger.exception("publish_queue_stopped")
            self._on_stopped(ClientError(f"the queue has stopped: {error!r}"))

    async def _prepare(self) -> None:
        """Loads and makes durable what the next message requires."""
        core = self.core
        if self._needs_load():
            tail = self._tail
            entries = await self._writer.read(self._loaded_to, LOADED_MAX, LOADED_BYTES_MAX)
            for entry in entries:
                core.add(entry)
            self._loaded_to = entries[-1].sequence if entries else tail
        self._expire()
        if core.needs_checkpoint():
            await self._writer.checkpoint()
            core.checkpoint()
        elif core.needs_renewal():
            core.renew(await self._writer.renew())

    def _needs_load(self) -> bool:
        if self._loaded_to >= self._tail:
            return False
        return not self._has_loaded(LOADED_MAX // 2, LOADED_BYTES_MAX // 2)

    def _expire(self) -> None:
        for entry in self.core.take_expired(time.time()):
            self._counts.expired += 1
            self._fail(entry, MessageExpired("not sent in time"))

    async def _send_ready(self) -> None:
        """Sends within the window; waits while the client does."""
        core, client = self.core, self._client
        now = asyncio.get_running_loop().time()
        if self._offline:
            if not client.is_connected:
                when = core.timer()
                if when is not None and when <= now:
                    core.back_off(now)
                return
            self._offline = False
        while True:
            if client.is_ready:
                if self._send_batch(now):
                    return
                continue
            entry = core.next(now)
            if entry is None:
                return
            self._submitting = True
            try:
                future = await client.submit(
                    entry.topic,
                    entry.payload,
                    qos=1,
                    retain=entry.retain,
                    properties=self._properties(entry),
                )
            except ClientError as error:
                self._unsuccessful(entry.sequence, error)
            except ValueError as error:
                self._unsuccessful(entry.sequence, PublishRefused(str(error)))
            else:
                future.add_done_callback(partial(self._submitted, entry.sequence))
            finally:
                self._submitting = False

    def _send_batch(self, now: float) -> bool:
        """Sends within the window in one write, with a ready client. False: there is more."""
        core = self.core
        entries: list[QueueEntry] = []
        size = 0
        messages: list[tuple[str, bytes, bool, Properties | None]] = []
        while True:
            if core.next_expiry():
                self._expire()
            entry = core.next(now) if size < BATCH_BYTES_MAX else None
            if entry is None:
                break
            size += entry.size
            entries.append(entry)
            messages.append((entry.topic, entry.payload, entry.retain, self._properties(entry)))
        if entries:
            self._client.submit_batch(
                messages, lambda index, outcome: self._resolved(entries[index].sequence, outcome)
            )
        return size < BATCH_BYTES_MAX

    def _continue(self) -> None:
        """Continues after an outcome: sends at once if possible, otherwise wake the pump.

        It waits for the other messages inflight, so that acknowledgements that arrive together lead
        to one write.
        """
        core = self.core
        if not core.inflight and core.pending and self._client.is_ready:
            is_plain = not (self._offline or self._submitting or core.next_expiry())
            if is_plain and not self._needs_load() and not core.needs_checkpoint():
                is_all = self._send_batch(asyncio.get_running_loop().time())
                if is_all and not core.next_expiry():
                    return
        self._wake.set()

    def _properties(self, entry: QueueEntry) -> Properties | None:
        if not self._has_properties:
            return None
        identity = (IDENTITY_PROPERTY, f"{self.producer}:{entry.epoch}:{entry.sequence}")
        if not entry.properties:
            return {pr.USER_PROPERTY: [identity]}
        properties = dict(entry.properties)
        others = properties.get(pr.USER_PROPERTY, [])
        assert isinstance(others, list)
        properties[pr.USER_PROPERTY] = [*others, identity]
        return properties

    def _arm(self) -> None:
        """Wakes the pump at the next time at which it has work."""
        if self._needs_load() or self.core.needs_checkpoint() or self.core.needs_renewal():
            self._wake.set()
            return
        loop = asyncio.get_running_loop()
        when = self.core.timer()
        delays = [when - loop.time()] if when is not None else []
        if expires_at := self.core.next_expiry():
            delays.append(expires_at - time.time())
        if delays:
            self._wake_in(max(0.0, min(delays)))

    def _wake_in(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake.set)

    # Outcomes

    def _submitted(self, sequence: int, future: "asyncio.Future[PublishResult]") -> None:
        if future.cancelled():
            self._resolved(sequence, QueueClosed("the wait was cancelled"))
            return
        error = future.exception()
        if error is None:
            self._resolved(sequence, future.result())
        else:
            failure = error if isinstance(error, ClientError) else ClientError(repr(error))
            self._resolved(sequence, failure)

    def _resolved(self, sequence: int, outcome: Outcome) -> None:
        if self._is_over:
            return
        if isinstance(outcome, PublishResult):
            self._delivered(sequence, outcome)
        else:
            self._unsuccessful(sequence, outcome)

    def _delivered(self, sequence: int, result: PublishResult) -> None:
        entry = self.core.delivered(sequence)
        if entry is None:
            return
        self.refusal = None
        self._counts.delivered += 1
        self._writer.remove(sequence)
        self._on_left(entry)
        if self._on_delivered is not None:
            try:
                self._on_delivered(entry, result)
            except Exception:
                logger.exception("on_delivered failed sequence=%d", sequence)
        self._continue()

    def _unsuccessful(self, sequence: int, error: ClientError) -> None:
        now = asyncio.get_running_loop().time()
        if not isinstance(error, PublishRefused):
            self._offline = True
            self.core.retry(sequence, now, refused=False)
        elif self._is_fenced(error):
            self.core.retry(sequence, now, refused=False)
            text = f"the broker refuses the identity of producer {self.producer}"
            self._on_stopped(ProducerFenced(text, error.reason, error.detail))
        elif self._may_pass(error):
            self.refusal = error
            self.core.retry(sequence, now, refused=True)
        else:
            entry = self.core.failed(sequence)
            if entry is not None:
                self._counts.refused += 1
                self._fail(entry, error)
        self._wake.set()

    def _is_fenced(self, error: PublishRefused) -> bool:
        """Whether Holdfast refuses the producer. It uses this reason only for that, maybe without
        text."""
        if error.reason == reasons.IMPLEMENTATION_SPECIFIC_ERROR and not error.detail:
            return self._has_properties
        return any(text in error.detail for text in _IDENTITY_REFUSED)

    def _may_pass(self, error: PublishRefused) -> bool:
        if error.reason in _RETRIED:
            return True
        if error.reason != reasons.NOT_AUTHORIZED or not self._waits_for_rights:
            return False
        # The cause is more often a wrong rule of the broker than a wrong message. A durable queue
        # must not empty itself because of one.
        now = time.monotonic()
        if now >= self._not_authorized_logged_at + NOT_AUTHORIZED_LOG_S:
            self._not_authorized_logged_at = now
            logger.warning("publish_queue_not_authorized error=%r", str(error))
        return True

    def _fail(self, entry: QueueEntry, error: ClientError) -> None:
        self._writer.fail(Failed(entry, error.reason, str(error), time.time()))
        self._on_left(entry)
        if self._on_failed is None:
            logger.warning("message_failed sequence=%d error=%r", entry.sequence, str(error))
            return
        try:
            self._on_failed(entry, error)
        except Exception:
            logger.exception("on_failed failed sequence=%d", entry.sequence)
