"""A node of a shared directory, simulated: the production parts that hold the lease, write the
journal and look after it (Mastership, JournalWriter, Standby, Storage, Maintenance), with a plain
loop in place of asyncio and a producer in place of clients.

`simulated` puts a schedule's threads, queues and clocks where these modules have the real ones.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from holdfast.config.schema import Config, Log, Retention
from holdfast.io.disk import journal_writer as disk
from holdfast.io.disk import maintenance, mastership, standby, storage
from holdfast.io.disk.journal_writer import GroupWriter, JournalWriter
from holdfast.io.disk.maintenance import Maintenance
from holdfast.io.disk.mastership import Mastership, Renewal
from holdfast.io.disk.standby import Standby
from holdfast.io.disk.storage import Storage
from holdfast.log.batch import Batch
from holdfast.log.files.layout import DataDirectory
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.partition import partition_of
from holdfast.log.record import FLAG_RETAIN, MESSAGE, Record
from holdfast.node.config import NodeConfig
from holdfast.node.lease.directory import HolderInfo
from holdfast.node.lease.standby_watch import LeaseTimes
from holdfast.node.lease.tenure import LeaseLost
from holdfast.node.node import Node
from holdfast.node.node_state import NodeState
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from tests.support.sim_files import Process
from tests.support.sim_schedule import Killed, SimEvent, SimQueue, SimThreading, ThreadSchedule

PARTITIONS = 3
SEGMENT_BYTES = 3000
CONFIG = NodeConfig(partitions=PARTITIONS, sys_interval_s=0)
TOPICS = [f"t/{number}" for number in range(5)]
WALL_US = 1_800_000_000_000_000
TIMES = LeaseTimes(timeout_s=0.5, heartbeat_s=0.1, poll_s=0.04)
EXIT_S = 0.02
"""From the decision to stop until the process is gone, at most ten times that."""


class Seen:
    """What happened, for the checkers. `now` is the true time."""

    def on_holding(
        self, node: "SimNode", epoch: int, storage: Storage, images: ReplicatedState
    ) -> None: ...

    def on_confirmed(self, node: "SimNode", epoch: int, began_at: float) -> None:
        """A look for newer epochs that began then found that we may promise."""

    def on_promised(self, node: "SimNode", epoch: int, records: list[Record]) -> None: ...

    def on_stopped(self, node: "SimNode", error: BaseException | None) -> None: ...


class SimNode:
    """One process. It is not started again: the next one is another SimNode."""

    def __init__(
        self,
        node_id: str,
        process: Process,
        seen: Seen,
        chance: random.Random,
        *,
        clock_rate: float = 1.0,
        segment_bytes: int = SEGMENT_BYTES,
        retention_bytes: int = 0,
    ) -> None:
        """`clock_rate`: seconds by its clock per true second."""
        self.node_id = node_id
        self.process = process
        self.seen = seen
        self.chance = chance
        self.clock_rate = clock_rate
        self.segment_bytes = segment_bytes
        self.clock_base_s = chance.random() * 1e6
        self.wall_shift_us = chance.randint(-(10**9), 10**9)
        self.hangs_until = 0.0
        """The event loop does nothing before."""
        self.has_ended = False
        self.silence_seen_s = 0.0
        """How long the holder had been silent when its beat was last read."""
        self.epoch = 0
        self.cluster_node = SimpleNamespace(context=SimpleNamespace(has_data=True), transfer=self)
        self._schedule = process.schedule
        self._callbacks: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._wakeup = SimEvent(process.schedule)
        self._images: ReplicatedState | None = None
        self._node: Node | None = None
        self._storage: Storage | None = None
        self._writer: JournalWriter | None = None
        self._in_flight: WriteGroup | None = None
        self._idle = SimEvent(process.schedule)
        self._produces = True
        self._produced = 0
        self._failure: BaseException | None = None
        self._is_stopping = False
        self._config = Config(
            log=Log(
                partitions=PARTITIONS,
                snapshot_bytes=1 << 16,
                reserve_bytes=1,
                retention=Retention(
                    age_s=0,
                    bytes=retention_bytes,
                    per_topic_last=chance.choice([0, 0, 3]),
                ),
            )
        )
        self.mastership: Mastership | None = None

    def now(self) -> float:
        return self.clock_base_s + self._schedule.now * self.clock_rate

    def wall_us(self) -> int:
        return WALL_US + int(self._schedule.now * 1e6) + self.wall_shift_us

    def start(self) -> None:
        self._schedule.spawn(self.process, self._run)

    def end(self) -> None:
        """As kill -9 does."""
        self.has_ended = True
        self.process.end()

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self._callbacks.append((callback, args))
        self._wakeup.set()

    # The event loop

    def _run(self) -> None:
        root = Path("/simulated")
        self.mastership = Mastership(
            self.process,
            root,
            Standby(self.process, root, self.segment_bytes, CONFIG),
            HolderInfo(self.node_id),
            TIMES,
            file_system="",
            kills_stale_holder=False,
            adopt=_adopt,
            call_soon=self.call_soon,
            on_holding=self._hold,
            on_failed=self._fail,
            on_handover=self._hand_over,
        )
        try:
            self.mastership.start()
        except (OSError, ValueError):
            # Server.start fails, and a supervisor starts it again.
            self.end()
            raise Killed from None
        beat_at = 0.0
        produce_at = 0.0
        while self._failure is None and not (self._is_stopping and self._in_flight is None):
            schedule = self._schedule
            if self.hangs_until > schedule.now:
                schedule.sleep(self.hangs_until - schedule.now)
            while self._callbacks and self._failure is None:
                callback, args = self._callbacks.popleft()
                callback(*args)
            renewal = self.mastership.renewal
            if self._writer is not None and renewal is not None:
                if self.now() >= beat_at:
                    beat_at = self.now() + TIMES.heartbeat_s
                    renewal.loop_is_alive()
                if schedule.now >= produce_at and not self._is_stopping:
                    produce_at = schedule.now + self.chance.random() ** 2 * 0.1
                    self._produce()
                self._write()
            self._wakeup.wait(0.02)
            self._wakeup.clear()
        if self._failure is None:
            self._stop_orderly()
        else:
            # Threads and files go on for a while.
            self._schedule.sleep(self.chance.random() * 10 * EXIT_S)
        self.seen.on_stopped(self, self._failure)
        self.end()
        raise Killed

    def _hold(self, images: ReplicatedState, storage: Storage) -> None:
        assert self.mastership is not None
        renewal = self.mastership.renewal
        assert renewal is not None
        self.epoch = renewal.tenure.epoch
        self.seen.on_holding(self, self.epoch, storage, images)
        self._images = images
        self._node = Node(CONFIG, storage.journal)
        self._node.tick(self.now(), self.wall_us())
        # The only node of a cluster leads every partition, in each life under another epoch.
        storage.journal.is_alone = True
        for partition in range(PARTITIONS):
            storage.journal.lead(partition, self.epoch)
        self._storage = storage
        self._writer = JournalWriter(
            storage.directory,
            self.call_soon,
            durable=True,
            confirm=lambda: self._confirm(renewal),
            on_written=self._written,
            on_failed=self._fail,
            on_full=lambda: None,
            on_space=lambda: None,
        )
        work = Maintenance(self, storage, self._config)  # type: ignore[arg-type]
        self._schedule.spawn(self.process, lambda: self._maintain(work))
        self._schedule.spawn(self.process, self._tidy)

    def _confirm(self, renewal: Renewal) -> None:
        began_at = self._schedule.now
        renewal.confirm()
        self.seen.on_confirmed(self, renewal.tenure.epoch, began_at)

    def _fail(self, error: BaseException) -> None:
        self._failure = error

    def _hand_over(self) -> None:
        self._is_stopping = True

    def _stop_orderly(self) -> None:
        """The order of Server.stop."""
        assert self.mastership is not None
        if self._writer is not None:
            self._writer.close()
        while self._callbacks:
            callback, args = self._callbacks.popleft()
            callback(*args)
        self.mastership.stop()

    # What clients do

    def _produce(self) -> None:
        state = self.state
        for _ in range(self.chance.randint(1, 4)):
            self._produced += 1
            topic = self.chance.choice(TOPICS).encode()
            size = self.chance.choice([0, 0, 50, 300])
            payload = b"%s %d %d " % (self.node_id.encode(), self.epoch, self._produced)
            is_retained = self.chance.random() < 0.3
            state.journal.append(
                Record(
                    partition_of(topic, PARTITIONS),
                    MESSAGE,
                    flags=1 | (FLAG_RETAIN if is_retained else 0),
                    timestamp_us=self.wall_us(),
                    topic=topic,
                    client_id=self.node_id.encode(),
                    payload=payload + b"x" * size,
                )
            )

    def _write(self) -> None:
        assert self._writer is not None
        if self._in_flight is None:
            group = self.state.journal.close_write_group()
            if group is not None:
                self._in_flight = group
                self._writer.submit(group)
            else:
                self._idle.set()

    def _written(self, group: WriteGroup) -> None:
        """Does the same as Broker._group_written: now clients learn of it."""
        assert self._images is not None
        state = self.state
        self._in_flight = None
        state.journal.wrote(group)
        state.journal.commit(group)
        self.node.tick(self.now(), self.wall_us())
        recorded = self.recorded_state()
        recorded.wall_us = self.wall_us()
        records = [record for data in group.data for record in _records_of(data)]
        for record in records:
            self._images.apply(record)
        recorded.delivered[:] = state.journal.high_watermark
        self.seen.on_promised(self, self.epoch, records)

    # What Maintenance needs of a Broker

    @property
    def node(self) -> Node:
        assert self._node is not None
        return self._node

    @property
    def writer(self) -> JournalWriter:
        assert self._writer is not None
        return self._writer

    @property
    def runtime(self) -> "SimNode":
        return self

    @property
    def state(self) -> NodeState:
        return self.node.state

    @property
    def reads(self) -> "SimNode":
        return self

    reserve_bytes = 0
    missing: frozenset[int] = frozenset()

    def refuse_publishes(self) -> None:
        self.node.state.disk_full = True

    def recorded_state(self) -> RecordedState:
        assert self._images is not None
        return self._images.state

    def begin_snapshot(self) -> tuple[list[int], Iterator[tuple[int, bytes]]]:
        assert self._images is not None
        return list(self.recorded_state().delivered), self._images.snapshot()

    async def drain_journal(self) -> None:
        while self._in_flight is not None or self.state.journal.pending_bytes:
            self._idle.clear()
            self._wakeup.set()
            self._idle.wait(0.05)

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        return work()

    def _maintain(self, work: Maintenance) -> None:
        while not self._is_stopping:
            self._schedule.sleep(self.chance.random() * 0.5)
            job = self.chance.choice([work.take_snapshot, work._retain, self._note_watermarks])
            try:
                _drive(job())
            except OSError:
                continue

    async def _note_watermarks(self) -> None:
        assert self._storage is not None
        self._storage.directory.write_watermarks(self.state.journal.checkpoint())

    def _tidy(self) -> None:
        assert self.mastership is not None
        while not self._is_stopping:
            self._schedule.sleep(self.chance.random() * 2)
            try:
                self.mastership.forget_old_epochs()
            except (OSError, LeaseLost):
                continue


def _adopt(root: Path, old: DataDirectory, number: int) -> DataDirectory:
    raise AssertionError("there is nothing to adopt")


def _records_of(data: bytes) -> list[Record]:
    return list(Batch(data).records())


def _drive(coroutine: Any) -> None:
    """Run a coroutine whose awaits never wait."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration:
        return


class _Time:
    """Stands in for the module `time`."""

    CLOCK_BOOTTIME = 0

    def __init__(self, current: Callable[[], SimNode]) -> None:
        self._current = current

    def clock_gettime(self, clock: int) -> float:
        return self._current().now()

    def monotonic(self) -> float:
        return self._current().now()

    def time_ns(self) -> int:
        return self._current().wall_us() * 1000


@contextmanager
def simulated(schedule: ThreadSchedule, node_of: Callable[[Any], SimNode]) -> Iterator[None]:
    """`node_of`: whose process that is."""

    def current() -> SimNode:
        return node_of(schedule.current.owner)

    def exit_process(code: int) -> None:
        current().end()
        raise Killed

    async def in_thread(_: Any, work: Callable[[], Any]) -> Any:
        return work()

    async def pause(duration_s: float) -> None:
        schedule.sleep(duration_s)

    threading = SimThreading(schedule)
    clock = _Time(current)
    with ExitStack() as stack:
        for module, name, value in (
            (mastership, "threading", threading),
            (mastership, "time", clock),
            (mastership, "datetime", SimpleNamespace(now=lambda _: datetime.fromtimestamp(0, UTC))),
            (mastership, "os", SimpleNamespace(_exit=exit_process, getpid=lambda: 1)),
            (mastership, "machine_identity", lambda: ""),
            (mastership, "process_start", lambda _: 0),
            (standby, "time", clock),
            (storage, "threading", threading),
            (storage, "time", clock),
            (disk, "threading", threading),
            (disk, "SimpleQueue", partial(SimQueue, schedule)),
            (disk, "GroupWriter", partial(GroupWriter, allocate_bytes=1024)),
            (maintenance, "asyncio", SimpleNamespace(Lock=asyncio.Lock, sleep=pause)),
            (maintenance.Maintenance, "_in_thread", in_thread),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield
