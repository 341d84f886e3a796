"""The publish queue's core against a model of the whole way: store, client, network, and a broker
that refuses for now and for good.

One broker is like Holdfast: it drops repetitions, and holds back what follows a refused message
until the connection ends. The other knows no identities. Whatever the interleaving, every message
is stored or reported as failed, by the first broker exactly once; nothing is ever fenced; and the
order is broken only where docs/publish-queue.md says it may be.
"""

import random
from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.client.pubqueue.messages import QueueEntry
from holdfast.client.pubqueue.sender import QueueCore
from tests.support.seeds import run_seeds

PARTITIONS = 2
QUOTA, BUSY, DENIED, FENCED = 0x97, 0x89, 0x87, 0x83
Wire = tuple[int, int, int]
"""Epoch, sequence, number of the message (its content)."""


class Broker:
    def __init__(self, drops_repetitions: bool) -> None:
        self.drops_repetitions = drops_repetitions
        self.places: dict[int, tuple[int, int]] = {}
        self.hole: tuple[int, int] | None = None
        self.stored: list[int] = []
        self.is_full = False
        self.busy_for: set[int] = set()
        """Messages that the broker without identities refuses once."""
        self.denied: set[int] = set()

    def publish(self, message: Wire) -> int:
        epoch, sequence, number = message
        partition = number % PARTITIONS
        if number in self.denied:
            return DENIED
        if not self.drops_repetitions:
            if number in self.busy_for:
                self.busy_for.discard(number)
                return BUSY
            self.stored.append(number)
            return 0
        last_epoch, last = self.places.get(partition, (-1, 0))
        if epoch < last_epoch:
            return FENCED
        if self.hole is not None:
            if epoch == self.hole[0] and sequence > self.hole[1]:
                return QUOTA
            self.hole = None
        if epoch == last_epoch and sequence <= last:
            return 0
        if self.is_full:
            self.hole = (epoch, sequence)
            return QUOTA
        self.places[partition] = (epoch, sequence)
        self.stored.append(number)
        return 0


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.broker = Broker(True)
        self.numbers = 0
        self.failed: list[int] = []
        self.last_sequence = 0
        self.epoch = 0
        # The store: what is durable, and removals that are not.
        self.disk: dict[int, tuple[int, int]] = {}
        self.removed: list[int] = []
        # The client: sent and unacknowledged, in order; and the network both ways.
        self.unacknowledged: dict[int, Wire] = {}
        self.out: deque[Wire] = deque()
        self.back: deque[tuple[int, int]] = deque()
        self.may_overtake = False
        self.core: QueueCore

    @initialize(
        window=st.sampled_from([1, 2, 3, 8]), seed=st.integers(0, 99), identities=st.booleans()
    )
    def begin(self, window: int, seed: int, identities: bool) -> None:
        self.broker = Broker(identities)
        self.window = window
        self.random = random.Random(seed)
        self.open()

    def open(self) -> None:
        self.epoch += 1
        self.core = QueueCore(self.window, self.random.random)
        for sequence, (epoch, number) in sorted(self.disk.items()):
            self.core.add(self.entry(sequence, epoch, number))

    def entry(self, sequence: int, epoch: int, number: int) -> QueueEntry:
        return QueueEntry(sequence, epoch, "t", str(number).encode(), None, False, 0.0, 0.0, 1)

    def write_removals(self) -> None:
        for sequence in self.removed:
            del self.disk[sequence]
        self.removed.clear()

    def pump(self) -> None:
        core = self.core
        if core.needs_checkpoint():
            self.write_removals()
            core.checkpoint()
        elif core.needs_renewal():
            self.write_removals()
            self.epoch += 1
            self.disk = {one: (self.epoch, number) for one, (_, number) in self.disk.items()}
            core.renew(self.epoch)
        while (entry := core.next(self.now)) is not None:
            message = (entry.epoch, entry.sequence, int(entry.payload))
            assert entry.sequence not in self.unacknowledged
            self.unacknowledged[entry.sequence] = message
            self.out.append(message)

    def broker_step(self) -> None:
        message = self.out.popleft()
        reason = self.broker.publish(message)
        assert reason != FENCED, message
        self.back.append((message[1], reason))

    def acknowledge(self) -> None:
        sequence, reason = self.back.popleft()
        del self.unacknowledged[sequence]
        if reason in (QUOTA, BUSY):
            self.core.retry(sequence, self.now, refused=True)
            return
        if reason == 0:
            assert self.core.delivered(sequence) is not None
        else:
            entry = self.core.failed(sequence)
            assert entry is not None
            self.failed.append(int(entry.payload))
        self.removed.append(sequence)

    def would_be_dropped(self) -> bool:
        """A message was refused and a later one stored in its partition, and the queue has not
        renewed its epoch yet: a crash right now is more than is promised to be survived."""
        stored = set(self.broker.stored)
        for epoch, number in self.disk.values():
            place = self.broker.places.get(number % PARTITIONS, (-1, 0))
            sequence = next(key for key, value in self.disk.items() if value[1] == number)
            if number not in stored and number not in self.failed and (epoch, sequence) <= place:
                return True
        return False

    @rule(count=st.integers(1, 4))
    def put(self, count: int) -> None:
        for _ in range(count):
            self.last_sequence += 1
            self.disk[self.last_sequence] = (self.epoch, self.numbers)
            self.core.add(self.entry(self.last_sequence, self.epoch, self.numbers))
            self.numbers += 1
        self.pump()

    @rule()
    def send(self) -> None:
        self.pump()

    @precondition(lambda self: self.out)
    @rule(count=st.integers(1, 8))
    def reach_broker(self, count: int) -> None:
        for _ in range(min(count, len(self.out))):
            self.broker_step()

    @precondition(lambda self: self.back)
    @rule(count=st.integers(1, 8))
    def reach_client(self, count: int) -> None:
        for _ in range(min(count, len(self.back))):
            self.acknowledge()
        self.pump()

    @rule(seconds=st.sampled_from([0.03, 0.2, 6.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.pump()

    @rule()
    def become_full(self) -> None:
        self.broker.is_full = not self.broker.is_full

    @precondition(lambda self: self.numbers and not self.broker.drops_repetitions)
    @rule(back=st.integers(0, 8))
    def be_busy(self, back: int) -> None:
        self.broker.busy_for.add(max(0, self.numbers - 1 - back))
        self.may_overtake |= self.window > 1

    @precondition(lambda self: self.numbers)
    @rule(back=st.integers(0, 3))
    def deny(self, back: int) -> None:
        number = max(0, self.numbers - 1 - back)
        if number not in self.broker.stored:
            self.broker.denied.add(number)

    @rule(reached=st.integers(0, 8))
    def cut(self, reached: int) -> None:
        """The client sends again what is not acknowledged, on a connection without holes."""
        for _ in range(min(reached, len(self.out))):
            self.broker_step()
        self.may_overtake |= (
            self.window > 1 and self.core.timer() is None and bool(self.core._is_resending)
        )
        # Refusals the client has not heard of are as good as never given.
        self.may_overtake |= self.window > 1 and any(reason == QUOTA for _, reason in self.back)
        self.back.clear()
        self.out = deque(self.unacknowledged.values())
        self.broker.hole = None

    @precondition(lambda self: not self.would_be_dropped())
    @rule(reached=st.integers(0, 8))
    def crash(self, reached: int) -> None:
        """kill -9 of the publisher: what was not durable is gone, what was under way may arrive."""
        for _ in range(min(reached, len(self.out))):
            self.broker_step()
        if self.would_be_dropped():
            return
        self.out.clear()
        self.back.clear()
        self.unacknowledged.clear()
        self.removed.clear()
        self.broker.hole = None
        self.open()

    @rule()
    def write(self) -> None:
        self.write_removals()

    @invariant()
    def nothing_twice(self) -> None:
        if self.broker.drops_repetitions:
            assert len(self.broker.stored) == len(set(self.broker.stored))

    @invariant()
    def in_order(self) -> None:
        if not self.may_overtake:
            assert self.core.overtaken == 0
            first = list(dict.fromkeys(self.broker.stored))
            assert first == sorted(first)

    @invariant()
    def window_is_kept(self) -> None:
        assert len(self.unacknowledged) <= self.window

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.broker.is_full = False
        self.broker.busy_for.clear()
        for _ in range(20 + 4 * self.numbers):
            self.tick(6.0)
            while self.out:
                self.broker_step()
            while self.back:
                self.acknowledge()
        self.write_removals()
        assert not self.disk
        assert sorted(set(self.broker.stored) | set(self.failed)) == list(range(self.numbers))
        self.nothing_twice()


def walk(seed: int) -> None:
    """A long run with the odds set by hand: refusals and cuts come while much is in flight."""
    choose = random.Random(seed)
    machine = Machine()
    machine.begin(choose.choice([1, 2, 3, 8]), seed, choose.random() < 0.8)
    for _ in range(80):
        dice = choose.random()
        if dice < 0.15:
            machine.put(choose.randint(1, 4))
        elif dice < 0.50 and machine.out:
            machine.reach_broker(choose.randint(1, 3))
        elif dice < 0.75 and machine.back:
            machine.reach_client(choose.randint(1, 3))
        elif dice < 0.83:
            machine.tick(choose.choice([0.03, 0.2, 6.0]))
        elif dice < 0.90:
            machine.become_full()
        elif dice < 0.93:
            machine.write()
        elif dice < 0.97:
            machine.cut(choose.randint(0, 3))
        elif dice < 0.98 and machine.numbers:
            machine.deny(choose.randint(0, 3))
        elif dice < 0.99 and machine.numbers and not machine.broker.drops_repetitions:
            machine.be_busy(choose.randint(0, 8))
        elif not machine.would_be_dropped():
            machine.crash(choose.randint(0, 8))
        machine.nothing_twice()
        machine.in_order()
        machine.window_is_kept()
    machine.teardown()


def test_long_runs() -> None:
    run_seeds(range(400), walk)


def test_every_interleaving() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=60, stateful_step_count=50, deadline=None)
    )
