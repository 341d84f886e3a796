"""Sends a publish queue's messages from its store to the client, and records the outcomes.

One task (the pump) does everything that has to wait: loading, checkpoints, renewals, a congested
client. If none of that is needed, the acknowledgement that empties the window sends the next
messages itself.

Order: messages leave by ascending sequence. After a temporary refusal no message is sent until
everything inflight is settled. Then sending begins again at the lowest unconfirmed one, alone until
one is confirmed. So order holds with any window at a broker that, like Holdfast, refuses the
messages after a refused one. With window 1 it holds at every broker.

Epochs: a broker refuses a message with an epoch below the newest it has stored. So the first
message of a newer epoch leaves only after all of the older one are settled and durably removed
(`needs_checkpoint`): none of them can be sent again afterwards.

Renewal: `needs_renewal` asks for a new epoch for all waiting messages, in two cases. A later
message was stored although an earlier one was refused: the broker would take the earlier one for a
repetition and drop it. Or the message that was refused for now has left the queue, and the broker
would wait for it for ever.
"""

import asyncio
import logging
import time
from collections import deque
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
from holdfast.client.reconnect import Backoff, Reconnect
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Properties

RETRY_MAX_S: Final = 5.0
"""The longest delay before a refused message is sent again."""
RETRY: Final = Reconnect(first_delay_s=0.05, delay_max_s=RETRY_MAX_S, multiplier=2.0)


class QueueCore:
    """The messages of a queue that are in memory, waiting or inflight. `random` returns numbers in
    [0, 1); `now` is monotonic seconds.

    Invariant: within an epoch, no message is sent while an earlier one waits to be sent again.
    """

    def __init__(self, window: int, random: Callable[[], float]) -> None:
        if window < 1:
            raise ValueError(f"window {window}: 1 or more messages")
        self.window = window
        self.pending: deque[QueueEntry] = deque()
        """The messages loaded and not inflight, ascending."""
        self.pending_size = 0
        """The sum of their sizes in bytes."""
        self.inflight: dict[int, QueueEntry] = {}
        """The messages inflight by sequence, in sending order."""
        self.resent = 0
        self.overtaken = 0
        """Messages that a later one has overtaken at the server."""
        self.stopped = False
        self._backoff = Backoff(random)
        self._to_resend: list[QueueEntry] = []
        # After a refusal no message is sent before this time, and before all inflight are settled.
        self._is_resending = False
        self._resume_at = 0.0
        self._probing = False
        self._epoch = -1
        self._delivered_last = 0
        # The lowest message that was refused for now and not stored since; 0: none.
        self._refused_first = 0
        self._refused_has_left = False

    def add(self, entry: QueueEntry) -> None:
        """Adds a message. Sequences must ascend."""
        self.pending.append(entry)
        self.pending_size += entry.size

    def next(self, now: float) -> QueueEntry | None:
        """The message to pass to the client now, or None."""
        if not self.pending or self.stopped:
            return None
        if self._is_resending:
            if self.inflight or now < self._resume_at:
                return None
            self._is_resending = False
            self._probing = True
        if len(self.inflight) >= (1 if self._probing else self.window):
            return None
        entry = self.pending[0]
        if entry.epoch != self._epoch or self.needs_renewal():
            return None
        self.pending.popleft()
        self.pending_size -= entry.size
        self.inflight[entry.sequence] = entry
        if entry.attempts:
            self.resent += 1
        entry.attempts += 1
        return entry

    def needs_checkpoint(self) -> bool:
        """Whether the removals so far must become durable before the next message is sent. Then
        call `checkpoint`."""
        return (
            bool(self.pending)
            and not self.inflight
            and not self._to_resend
            and self.pending[0].epoch != self._epoch
        )

    def checkpoint(self) -> None:
        """Begins the next message's epoch, because the removals are durable."""
        if self.needs_checkpoint():
            self._begin_epoch(self.pending[0].epoch)

    def needs_renewal(self) -> bool:
        """Whether all waiting messages need a new epoch. Make it durable, then call `renew`."""
        return (
            bool(self.pending)
            and not self.inflight
            and self.pending[0].epoch == self._epoch
            and (self.pending[0].sequence < self._delivered_last or self._refused_has_left)
        )

    def renew(self, epoch: int) -> None:
        """Gives all waiting messages the new epoch."""
        for entry in self.pending:
            entry.epoch = epoch
        self._begin_epoch(epoch)

    def timer(self) -> float | None:
        """The time at which `next` may return a message without another event, or None."""
        if self._is_resending and not self.inflight and self.pending and not self.stopped:
            return self._resume_at
        return None

    def delivered(self, sequence: int) -> QueueEntry | None:
        """Records that the server has a message. None: it was not inflight."""
        entry = self.inflight.pop(sequence, None)
        if entry is None:
            return None
        self._delivered_last = max(self._delivered_last, sequence)
        if sequence == self._refused_first:
            self._refused_first = 0
        if self._is_resending:
            self._requeue_resends()
        else:
            self._probing = False
            self._backoff.reset()
        return entry

    def failed(self, sequence: int) -> QueueEntry | None:
        """Records that the server refused a message permanently; it leaves the queue."""
        entry = self.inflight.pop(sequence, None)
        if entry is None:
            return None
        if sequence == self._refused_first:
            self._refused_first = 0
            self._refused_has_left = True
        if self._is_resending:
            self._requeue_resends()
        return entry

    def retry(self, sequence: int, now: float, refused: bool) -> None:
        """Sends a message again, because it was refused for now, or (not `refused`) its connection
        ended."""
        entry = self.inflight.pop(sequence, None)
        if entry is None:
            return
        if not refused:
            # The next connection has no refused message to wait for.
            self._refused_first = 0
        elif not self._refused_first or sequence < self._refused_first:
            self._refused_first = sequence
        self._to_resend.append(entry)
        if not self._is_resending:
            self.back_off(now)
        self._requeue_resends()

    def back_off(self, now: float) -> None:
        """Sends nothing for the next back-off delay."""
        self._is_resending = True
        self._resume_at = now + self._backoff.next_s(RETRY)

    def oldest_put_at(self) -> float | None:
        """The time of the oldest message in seconds since 1970, or None."""
        times = [entry.put_at for entry in (*self.inflight.values(), *self._to_resend)]
        if self.pending:
            times.append(self.pending[0].put_at)
        return min(times, default=None)

    def stop(self) -> None:
        """Sends no more. Messages inflight may still be settled."""
        self.stopped = True

    def take_expired(self, clock: float) -> list[QueueEntry]:
        """Removes and returns the expired messages at the head that were never sent. `clock` is
        seconds since 1970."""
        expired: list[QueueEntry] = []
        while (when := self.next_expiry()) and when <= clock:
            entry = self.pending.popleft()
            self.pending_size -= entry.size
            expired.append(entry)
        return expired

    def next_expiry(self) -> float:
        """The time at which the next message expires, in seconds since 1970, or 0."""
        if not self.pending or self.pending[0].attempts:
            return 0.0
        return self.pending[0].expires_at

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._delivered_last = 0
        self._refused_first = 0
        self._refused_has_left = False

    def _requeue_resends(self) -> None:
        """Moves the messages to be sent again to the front, in order, once none is inflight."""
        if self.inflight or not self._to_resend:
            return
        self._to_resend.sort(key=lambda entry: entry.sequence)
        self.overtaken += sum(entry.sequence < self._delivered_last for entry in self._to_resend)
        self.pending.extendleft(reversed(self._to_resend))
        self.pending_size += sum(entry.size for entry in self._to_resend)
        self._to_resend.clear()


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
