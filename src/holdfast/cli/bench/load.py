"""The load: publishers that follow the clock, and subscribers that check what arrives.

Message `n` of a run is due at its start plus `n / rate`, whatever the broker does, and its latency
counts from there. A generator that waited for the broker would send nothing while the broker
stalls, and so would hide the stall ("coordinated omission").
"""

import asyncio
import resource
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from holdfast.client import Client, ClientError, Message
from holdfast.client.connection import Outcome

_BITS: Final = 8
"""The exact bits of a latency: two that differ by less than 1 % may share a bucket."""


class Latencies:
    """A histogram of durations in microseconds.

    Durations below 256 µs are exact. Longer ones are rounded down by less than 1 %. An hour of any
    load needs fewer than 4,000 buckets.
    """

    def __init__(self) -> None:
        self.count = 0
        self.max_us = 0
        self._buckets: dict[int, int] = {}

    def add(self, duration_us: int) -> None:
        """Counts one duration; one below zero counts as zero."""
        duration_us = max(duration_us, 0)
        shift = max(duration_us.bit_length() - _BITS, 0)
        bucket = duration_us >> shift << shift
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.max_us = max(self.max_us, duration_us)

    def quantile_us(self, share: float) -> int | None:
        """The duration that `share` (0 to 1) of all do not exceed; None without any."""
        if not self.count:
            return None
        wanted = share * self.count
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return bucket
        return self.max_us


STAMP: Final = struct.Struct("!IQ")
"""The beginning of a payload: the publisher, and the number of its message."""
TICK_S: Final = 0.001
BATCH_MAX: Final = 500
"""The most messages that one publisher sends at once."""
CONNECTS_MAX: Final = 100
"""The most connections that are opened at once."""
QUIET_S: Final = 5.0
"""The silence in seconds after the last message that ends the wait for missing ones."""


class LoadError(Exception):
    """A load that cannot be made or go on. The text has the client and the reason."""


@dataclass(frozen=True)
class LoadPlan:
    """The shape of a load. `rate` is in messages per second of all publishers together."""

    publishers: int
    subscribers: int
    qos: int
    rate: float
    size_bytes: int
    duration_s: float
    warm_up_s: float
    shares_topics: bool
    """Whether each subscriber receives all messages, in place of its share."""
    prefix: str

    def topic(self, publisher: int) -> str:
        """The topic of a publisher. As many publishers as subscribers have one each."""
        return f"{self.prefix}/{publisher % max(self.subscribers, 1)}"

    def filter(self, subscriber: int) -> str:
        return f"{self.prefix}/+" if self.shares_topics else f"{self.prefix}/{subscriber}"

    @property
    def copies(self) -> int:
        """The number of subscribers that receive a message."""
        return self.subscribers if self.shares_topics else min(self.subscribers, 1)


@dataclass
class Outcomes:
    """The figures of a run. Latencies are those of messages due after the warm-up."""

    sent: int = 0
    acknowledged: int = 0
    delivered: int = 0
    refused: int = 0
    astray: int = 0
    """Messages that arrived again, or before an earlier one of their publisher."""
    first_refusal: str = ""
    acknowledgement: Latencies = field(default_factory=Latencies)
    delivery: Latencies = field(default_factory=Latencies)
    lateness: Latencies = field(default_factory=Latencies)
    """By how much the generator missed the times at which messages were due."""
    waiting: int = 0
    """Messages that were due and not sent, because the broker had not read the earlier ones."""
    busy: float = 0.0
    """The share of a core that the generator used while it measured."""


class _Publisher:
    """One publisher, and the numbers of its messages."""

    def __init__(self, load: "Load", index: int, client: Client) -> None:
        self._load = load
        self._index = index
        self._client = client
        self._topic = load.plan.topic(index)
        self._padding = bytes(load.plan.size_bytes - STAMP.size)
        self.next = 0

    def send_due(self, now_us: int, due: int) -> None:
        """Sends the messages with numbers below `due`, as far as the broker reads."""
        client, load = self._client, self._load
        end = min(due, self.next + BATCH_MAX)
        if self.next >= end or not client.is_ready:
            return
        first = self.next
        batch = [
            (self._topic, STAMP.pack(self._index, number) + self._padding, False, None)
            for number in range(first, end)
        ]
        self.next = end
        outcomes = load.outcomes
        outcomes.sent += end - first
        for number in range(first, end):
            if load.is_measured(due_us := load.due_us(self._index, number)):
                outcomes.lateness.add(now_us - due_us)
        client.submit_batch(batch, partial(self._settle, first), load.plan.qos)

    def _settle(self, first: int, index: int, outcome: Outcome) -> None:
        outcomes = self._load.outcomes
        if isinstance(outcome, ClientError):
            outcomes.refused += 1
            outcomes.first_refusal = outcomes.first_refusal or str(outcome)
            return
        outcomes.acknowledged += 1
        due_us = self._load.due_us(self._index, first + index)
        if self._load.plan.qos and self._load.is_measured(due_us):
            outcomes.acknowledgement.add(_now_us() - due_us)


class Load:
    """A run of a plan. `connect` makes a client: its name and its receiver of messages."""

    def __init__(
        self, plan: LoadPlan, connect: Callable[[str, Callable[[Message], None]], Client]
    ) -> None:
        self.plan = plan
        self.outcomes = Outcomes()
        self._new_client = connect
        self._clients: list[Client] = []
        self._publishers: list[_Publisher] = []
        self._start_us = self._measured_us = 0

    def due_us(self, publisher: int, number: int) -> int:
        """The time at which a message is due. The publishers take turns."""
        order = number * self.plan.publishers + publisher
        return self._start_us + int(order * 1_000_000 / self.plan.rate)

    def is_measured(self, due_us: int) -> bool:
        return due_us >= self._measured_us

    async def run(self) -> Outcomes:
        """Connects, publishes at the plan's rate and waits for the rest. Raises `LoadError`."""
        try:
            await self._connect_all()
            await self._publish_all()
            await self._wait_for_rest()
        except ClientError as error:
            raise LoadError(str(error)) from error
        finally:
            await asyncio.gather(
                *(client.disconnect() for client in self._clients), return_exceptions=True
            )
        return self.outcomes

    async def _connect_all(self) -> None:
        gate = asyncio.Semaphore(CONNECTS_MAX)

        async def connect(name: str, receive: Callable[[Message], None], filter: str) -> Client:
            client = self._new_client(name, receive)
            async with gate:
                try:
                    await client.connect()
                    self._clients.append(client)
                    if filter:
                        await client.subscribe((filter, self.plan.qos))
                except ClientError as error:
                    raise LoadError(f"{name}: {error}") from error
            return client

        plan = self.plan
        await asyncio.gather(
            *(
                connect(f"{plan.prefix}-sub-{index}", self._receiver(), plan.filter(index))
                for index in range(plan.subscribers)
            )
        )
        clients = await asyncio.gather(
            *(
                connect(f"{plan.prefix}-pub-{index}", self._receiver(), "")
                for index in range(plan.publishers)
            )
        )
        self._publishers = [_Publisher(self, *each) for each in enumerate(clients)]

    def _receiver(self) -> Callable[[Message], None]:
        """A function that takes the messages of one subscriber."""
        expected: dict[int, int] = {}
        outcomes = self.outcomes

        def receive(message: Message) -> None:
            now_us = _now_us()
            publisher, number = STAMP.unpack_from(message.payload)
            outcomes.delivered += 1
            if number < expected.get(publisher, 0):
                outcomes.astray += 1
            else:
                expected[publisher] = number + 1
            due_us = self.due_us(publisher, number)
            if self.is_measured(due_us):
                outcomes.delivery.add(now_us - due_us)

        return receive

    async def _publish_all(self) -> None:
        plan = self.plan
        self._start_us = _now_us()
        self._measured_us = self._start_us + int(plan.warm_up_s * 1_000_000)
        end_us = self._measured_us + int(plan.duration_s * 1_000_000)
        cpu_s, since_us = 0.0, 0
        total = int((plan.warm_up_s + plan.duration_s) * plan.rate)
        while (now_us := _now_us()) < end_us:
            if not since_us and now_us >= self._measured_us:
                cpu_s, since_us = _cpu_s(), now_us
            due = min(total, int((now_us - self._start_us) * plan.rate / 1_000_000) + 1)
            self._send_due(due)
            await asyncio.sleep(TICK_S)
        self._send_due(total)
        self.outcomes.busy = (_cpu_s() - cpu_s) / ((_now_us() - since_us) / 1_000_000)
        self.outcomes.waiting = total - self.outcomes.sent

    def _send_due(self, due: int) -> None:
        count = self.plan.publishers
        for index, publisher in enumerate(self._publishers):
            # Of the messages below `due`, those with this publisher's turn.
            publisher.send_due(_now_us(), (due - index + count - 1) // count)

    async def _wait_for_rest(self) -> None:
        """Waits until everything is acknowledged and delivered, or nothing has come for a while."""
        outcomes, plan = self.outcomes, self.plan
        seen, since = (-1, -1), time.monotonic()
        while time.monotonic() - since < QUIET_S:
            if (
                outcomes.acknowledged + outcomes.refused >= outcomes.sent
                and outcomes.delivered >= (outcomes.sent - outcomes.refused) * plan.copies
            ):
                return
            now = (outcomes.acknowledged, outcomes.delivered)
            if now != seen:
                seen, since = now, time.monotonic()
            await asyncio.sleep(0.01)


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
