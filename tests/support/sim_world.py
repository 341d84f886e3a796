"""Nodes on one simulated directory, what happens to them, and what must hold whatever happens.

- A record that was promised is in every later holder's journal, at its place, until retention gives
  it up; and in what a reader finds at the end.
- A holder's journal in memory is what a fresh start would find; its state too.
- Epochs grow; nobody promises after a newer holder's first promise, unless it had looked before.
- A holder that beats is not given up.
- When all is well again, somebody holds and promises.
"""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from holdfast.io.disk import mastership
from holdfast.io.disk.storage import Storage
from holdfast.log.files.data_directory import create
from holdfast.log.files.filesystem import WriteFile
from holdfast.log.files.layout import DataDirectory, Manifest
from holdfast.log.journal.epoch_folders import (
    CLAIMED_NAME,
    LEASE,
    CorruptEpoch,
    Epoch,
    newest_epoch,
)
from holdfast.log.journal.recovery import OpenedJournal, open_journal, replay
from holdfast.log.journal.segment import Segment
from holdfast.log.record import CONTROL, FLAG_RETAIN, Record
from holdfast.log.snapshot import Snapshot
from holdfast.node.lease import directory as lease_directory
from holdfast.node.lease.directory import LeaseBeat, LeaseDirectory
from holdfast.node.lease.standby_watch import EXPIRED, HolderWatch
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from tests.sim.disk import SimDisk
from tests.sim.schedule import Wrong
from tests.support.sim_files import Process, Weather
from tests.support.sim_node import (
    CONFIG,
    PARTITIONS,
    SEGMENT_BYTES,
    TIMES,
    Seen,
    SimNode,
    simulated,
)
from tests.support.sim_schedule import Owner, ThreadSchedule

CALM_S = 6.0
"""After the last fault, until somebody must have held and promised."""
SURVIVALS = ("none", "all", "torn", "sectors")
MANIFEST = Manifest("shared", PARTITIONS, "2026-01-01T00:00:00Z", incarnation="first")


class Idle(Wrong):
    """Nobody holds the lease although somebody could."""


@dataclass
class Faults:
    """What may happen; weights of what happens how often, and how long it goes on."""

    duration_s: float = 5.0
    every_s: float = 0.4
    nodes: int = 3
    kinds: dict[str, float] = field(
        default_factory=lambda: {
            "kill": 2.0,
            "pause": 4.0,
            "freeze": 2.0,
            "thread": 2.0,
            "hang": 1.0,
            "power": 0.7,
            "full": 1.0,
            "squeeze": 0.5,
            "gone": 1.0,
            "read_only": 0.7,
            "eio": 0.7,
            "wall": 0.5,
            "handover": 1.0,
            "standbys": 0.5,
        }
    )
    stalls: float | None = None
    """Probability that a call takes long; None: drawn by the seed."""
    stalled_calls: tuple[str, ...] = ()
    """These alone; empty: drawn by the seed."""
    call_s: tuple[float, ...] = (0.0001, 0.0001, 0.0005, 0.003)
    """How long a call takes; one of these."""
    clock_rates: tuple[float, ...] = (1.0, 1.02, 0.98, 0.7, 1.8)
    """Of each process, one of these."""
    segment_bytes: tuple[int, ...] = (SEGMENT_BYTES, SEGMENT_BYTES, 600)
    retention_bytes: tuple[int, ...] = (0, 5000, 20_000)
    """Of each process: it keeps so much; 0: everything."""


CALLS = (
    "list", "open_read", "open_write", "create", "rename", "remove", "link", "sync_folder", "lock",
    "is_locked", "read", "size", "write", "sync",
)  # fmt: skip


class World(Seen):
    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.seed = seed
        self.faults = faults or Faults()
        self.chance = random.Random(seed)
        self.schedule = ThreadSchedule(seed)
        self.weather = Weather(random.Random(seed + 1))
        self.weather.call_s = self.chance.choice(self.faults.call_s)
        self.segment_bytes = self.chance.choice(self.faults.segment_bytes)
        self.disk = _new_disk()
        self.nodes: dict[str, SimNode] = {}
        self.by_owner: dict[Owner, SimNode] = {}
        self.troubled = True
        self.has_scars = False
        """Records that were never promised may be missing."""
        # (partition, offset) -> payload
        self.promised: dict[tuple[int, int], bytes] = {}
        self.retained: dict[str, int] = {}
        """Topic -> offset of its newest promised retained record."""
        self.removed_below = [0] * PARTITIONS
        self.holder_epochs: list[int] = []
        self.first_promise_at: dict[int, float] = {}
        self.last_promise_at = 0.0
        self.beaten_at: dict[str, float] = {}
        """Beat file -> when its last beat was written, or a little earlier."""
        self.storages: dict[int, Storage] = {}
        self.takeovers = 0
        self.trace: list[str] = []

    def play(self) -> None:
        """Raises Wrong."""
        faults = self.faults
        self._draw_stalls()
        logger = logging.getLogger("holdfast")
        disabled, logger.disabled = logger.disabled, True
        try:
            with simulated(self.schedule, self.by_owner.__getitem__), self._watched():
                for number in range(faults.nodes):
                    self._start(f"n{number}")
                self.schedule.spawn(Owner(), self._supervise)
                self.schedule.spawn(Owner(), self._trouble)
                self.schedule.run(faults.duration_s)
                self._calm_down()
                self.schedule.run(faults.duration_s + CALM_S)
                self._check_alive()
                self._check_end()
                self.schedule.close()
        finally:
            logger.disabled = disabled

    def _accuse(self, text: str) -> None:
        """From where production code would catch an exception."""
        self.schedule.failures.append(Wrong(text))

    def note(self, text: str) -> None:
        self.trace.append(f"{self.schedule.now:9.4f} {text}")

    # What happens

    def _draw_stalls(self) -> None:
        stalls = self.faults.stalls
        calls = self.faults.stalled_calls
        if stalls is None:
            stalls = self.chance.choice([0.0, 0.002, 0.02, 0.2])
            if self.chance.random() < 0.7:
                calls = tuple(self.chance.sample(CALLS, 2))
        if calls:
            self.weather.stalls = {**dict.fromkeys(CALLS, 0.001), **dict.fromkeys(calls, stalls)}
        else:
            self.weather.stalls = {"": min(stalls, 0.01)}

    def _start(self, node_id: str) -> None:
        process = Process(self.schedule, self.disk, self.weather)
        process.is_troubled = self.troubled
        node = SimNode(
            node_id,
            process,
            self,
            random.Random(self.chance.random()),
            clock_rate=self.chance.choice(self.faults.clock_rates),
            segment_bytes=self.segment_bytes,
            retention_bytes=self.chance.choice(self.faults.retention_bytes),
        )
        self.nodes[node_id] = node
        self.by_owner[process] = node
        node.start()

    def _supervise(self) -> None:
        while True:
            self.schedule.sleep(0.05)
            for node_id, node in list(self.nodes.items()):
                if node.has_ended and self.chance.random() < 0.3:
                    self.note(f"start {node_id}")
                    self._start(node_id)

    def _trouble(self) -> None:
        faults = self.faults
        kinds = list(faults.kinds)
        weights = list(faults.kinds.values())
        while self.troubled:
            self.schedule.sleep(self.chance.random() * 2 * faults.every_s)
            if self.troubled and kinds:
                self._happen(self.chance.choices(kinds, weights)[0])

    def _happen(self, kind: str) -> None:
        chance = self.chance
        duration_s = chance.choice([0.001, 0.02, 0.3, 0.8]) * (0.5 + chance.random())
        holders = [node for node in self.nodes.values() if _holds(node)]
        anyone = list(self.nodes.values())
        node = chance.choice(holders if holders and chance.random() < 0.7 else anyone)
        self.note(f"{kind} {node.node_id} {duration_s:.3f}")
        if kind == "kill":
            node.end()
        elif kind == "pause":
            self.schedule.hold(node.process, chance.random() * 1.5)
        elif kind == "freeze":
            self._freeze(node)
        elif kind == "thread":
            self.schedule.hold_one(node.process, chance.random() * 1.5)
        elif kind == "hang":
            node.hangs_until = self.schedule.now + chance.random() * 1.5
        elif kind == "power":
            self._cut_power()
        elif kind == "wall":
            node.wall_shift_us += chance.randint(-(10**10), 10**10)
        elif kind == "handover":
            lease = LeaseDirectory(self.disk)
            with suppress(OSError):
                lease.request_handover(lease.newest_claimed())
        elif kind == "standbys":
            for each in anyone:
                if each not in holders:
                    self.schedule.hold(each.process, 0.7)
        elif kind == "full":
            self._fill(duration_s)
        elif kind == "squeeze":
            # A full disk, and who finds it full is held up.
            self._fill(0.3)
            self._later(chance.random() * 0.1, lambda: self._freeze(node))
        elif kind == "gone":
            self.weather.is_gone = True
            self._later(duration_s, lambda: setattr(self.weather, "is_gone", False))
        elif kind == "read_only":
            self.weather.is_read_only = True
            self._later(duration_s, lambda: setattr(self.weather, "is_read_only", False))
        else:
            assert kind == "eio"
            self.weather.eio = 0.05
            self._later(duration_s, lambda: setattr(self.weather, "eio", 0.0))

    def _freeze(self, node: SimNode) -> None:
        """As a virtual machine that is moved: its clock stands still, too."""
        if node.process.held_until <= self.schedule.now:
            pause_s = self.chance.random() * 1.5
            self.schedule.hold(node.process, pause_s)
            node.clock_base_s -= pause_s * node.clock_rate

    def _fill(self, duration_s: float) -> None:
        room_bytes = self.chance.randint(0, 600)
        self.disk.capacity_bytes -= self.disk.free_bytes() - room_bytes
        self._later(duration_s, lambda: setattr(self.disk, "capacity_bytes", 1 << 40))

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        def wait() -> None:
            self.schedule.sleep(delay_s)
            action()

        self.schedule.spawn(Owner(), wait)

    def _cut_power(self) -> None:
        for node in self.nodes.values():
            if not node.has_ended:
                node.end()
        survival = self.chance.choice(SURVIVALS)
        # Of a write that was under way the end may be there without the beginning.
        self.has_scars = self.has_scars or survival == "sectors"
        self.disk = self.disk.after_crash(survival, self.chance.randint(0, 1 << 30))
        self.disk.capacity_bytes = 1 << 40

    def _calm_down(self) -> None:
        self.note("calm")
        self.troubled = False
        self.disk.capacity_bytes = 1 << 40
        weather = self.weather
        weather.is_gone = weather.is_read_only = False
        weather.eio = 0.0
        weather.stalls = {}

    # What must hold

    def on_holding(
        self, node: SimNode, epoch: int, storage: Storage, images: ReplicatedState
    ) -> None:
        assert node.mastership is not None
        self.note(f"hold {node.node_id} epoch={epoch} {node.mastership.took_over_because}")
        self.takeovers += 1
        if self.holder_epochs and epoch <= max(self.holder_epochs):
            if epoch in self.holder_epochs:
                raise Wrong(f"epoch {epoch} is held twice")
            # Decided earlier, and told later: it will promise nothing.
            return
        self.holder_epochs.append(epoch)
        self.storages[epoch] = storage
        if LeaseDirectory(self.disk).newest_claimed() != epoch:
            return
        found = self._read(self._newest_epoch())
        self._check_promised(found, f"holder {epoch}")
        journal = storage.journal
        fresh = found.opened.journal
        if journal.next_offset != fresh.next_offset or journal.sequence != fresh.sequence:
            raise Wrong(
                f"holder {epoch} goes on at {journal.next_offset}, the files end at"
                f" {fresh.next_offset}"
            )
        retained = _retained(images.state)
        images.check()
        if sorted(images.snapshot()) != sorted(found.recovered().snapshot()):
            raise Wrong(f"holder {epoch} has another state than a fresh start")
        for topic, offset in self.retained.items():
            if topic not in retained or retained[topic][0] < offset:
                raise Wrong(f"holder {epoch} has an older retained message of {topic}")
        for sequence in found.directory.snapshots():
            if sequence > journal.sequence:
                raise Wrong(f"holder {epoch} has a snapshot from beyond its journal's end")

    def on_confirmed(self, node: SimNode, epoch: int, began_at: float) -> None:
        for other, promised_at in self.first_promise_at.items():
            if other > epoch and promised_at < began_at:
                self._accuse(
                    f"epoch {epoch} was confirmed by a look at {began_at:.4f}, after {other} had"
                    f" promised at {promised_at:.4f}"
                )

    def on_promised(self, node: SimNode, epoch: int, records: list[Record]) -> None:
        now = self.schedule.now
        self.first_promise_at.setdefault(epoch, now)
        self.last_promise_at = now
        for record in records:
            place = (record.partition, record.offset)
            if self.promised.setdefault(place, record.payload) != record.payload:
                raise Wrong(f"{place} is promised twice: {self.promised[place]!r}, now by {epoch}")
            if record.flags & FLAG_RETAIN:
                topic = record.topic.decode()
                self.retained[topic] = max(self.retained.get(topic, -1), record.offset)

    def on_stopped(self, node: SimNode, error: BaseException | None) -> None:
        self.note(f"stop {node.node_id} epoch={node.epoch} {error!r}")

    def _newest_epoch(self) -> Epoch:
        try:
            return newest_epoch(self.disk)
        except CorruptEpoch as error:
            raise Wrong(f"an epoch is damaged: {error}") from error

    def _read(self, epoch: Epoch) -> "Found":
        directory = DataDirectory(epoch.files(self.disk), MANIFEST, epoch)
        return Found(directory, open_journal(directory, SEGMENT_BYTES, writes=False))

    def _check_promised(self, found: "Found", who: str) -> None:
        opened = found.opened
        if opened.damage and not self.has_scars:
            raise Wrong(f"{who} finds {opened.damage}")
        for segment in opened.journal.segments:
            if segment.head.gaps and not self.has_scars:
                raise Wrong(f"{who} finds {segment.head.gaps} in {segment.sequence}")
        for partition, start in enumerate(opened.journal.start_offsets):
            if start > self.removed_below[partition]:
                raise Wrong(f"{who}: partition {partition} begins at {start}")
        contents: dict[tuple[int, int], Record] = {}
        ends: dict[int, int] = {}
        for record in replay(opened, state_only=False):
            missing = record.offset - ends.get(record.partition, record.offset)
            if missing < 0 or (missing and not self.has_scars):
                raise Wrong(f"{who} finds offset {record.offset} of {record.partition} misplaced")
            ends[record.partition] = record.offset + 1
            contents[record.partition, record.offset] = record
        starts = opened.journal.start_offsets
        for (partition, offset), payload in self.promised.items():
            if offset < starts[partition]:
                continue
            there = contents.get((partition, offset))
            if there is None:
                raise Wrong(f"{who} lacks {payload!r} at {partition}:{offset}")
            if there.payload != payload and there.kind != CONTROL:
                raise Wrong(f"{who} has {there.payload!r} at {partition}:{offset}, not {payload!r}")

    def _check_alive(self) -> None:
        if self.last_promise_at < self.schedule.now - 1.0:
            raise Idle(f"nobody promised since {self.last_promise_at:.3f}")

    def _check_end(self) -> None:
        epoch = newest_epoch(self.disk)
        self._check_promised(self._read(epoch), "a reader")
        storage = self.storages.get(epoch.number)
        if storage is None:
            return
        names = set(DataDirectory(epoch.files(self.disk), MANIFEST).segments())
        for segment in storage.journal.segments[:-1]:
            if segment.sequence not in names:
                raise Wrong(f"segment {segment.sequence} of epoch {epoch.number} is gone")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Lets the world see beats, and what a standby makes of them."""
        world = self
        schedule = self.schedule
        write_beat = lease_directory.write_beat
        read_beat = LeaseDirectory.read_beat
        remove_segments = Storage.remove_segments

        def note_beat(file: WriteFile, counter: int, flags: int) -> None:
            began_at = schedule.now
            write_beat(file, counter, flags)
            world.beaten_at[file.name] = began_at  # type: ignore[attr-defined]

        def note_look(directory: LeaseDirectory, epoch: int) -> LeaseBeat:
            beat = read_beat(directory, epoch)
            node = world.by_owner[schedule.current.owner]
            node.silence_seen_s = schedule.now - world.beaten_at.get(beat_name(epoch), 0.0)
            return beat

        class CheckedWatch(HolderWatch):
            def judge(self, *args: Any) -> str:
                verdict = super().judge(*args)
                node = world.by_owner[schedule.current.owner]
                timeout_s = TIMES.timeout_s / node.clock_rate
                if verdict == EXPIRED and node.silence_seen_s < timeout_s * 0.95:
                    world._accuse(f"a holder silent for {node.silence_seen_s:.3f} s is given up")
                return verdict

        def note_retention(storage: Storage, removed: list[Segment]) -> None:
            if storage.directory.epoch.number == newest_epoch(world.disk).number:
                starts = storage.journal.start_offsets
                world.removed_below = list(map(max, world.removed_below, starts))
            remove_segments(storage, removed)

        with (
            patch.object(Storage, "remove_segments", note_retention),
            patch.object(mastership, "write_beat", note_beat),
            patch.object(LeaseDirectory, "read_beat", note_look),
            patch.object(mastership, "HolderWatch", CheckedWatch),
        ):
            yield


def beat_name(epoch: int) -> str:
    return f"{LEASE}/{epoch:010d}.beat"


def _holds(node: SimNode) -> bool:
    return not node.has_ended and node.mastership is not None and node.mastership.is_holder


def _retained(state: Any) -> dict[str, tuple[int, bytes]]:
    found = {}
    scan = state.retained.scan_all()
    while not scan.done:
        for topic, message in scan.next(100):
            found[topic] = (message.offset, message.payload)
    return found


@dataclass
class Found:
    """What a process that starts now finds."""

    directory: DataDirectory
    opened: OpenedJournal

    def recovered(self) -> ReplicatedState:
        recovery = ReplicatedState(RecordedState(CONFIG, self.opened.journal))
        offsets = None
        snapshots = self.directory.snapshots()
        if snapshots:
            file = self.directory.open_snapshot(snapshots[-1])
            snapshot = Snapshot(file.read, file.size())
            for kind, data in snapshot.entries():
                recovery.apply_snapshot_entry(kind, data)
            offsets = snapshot.offsets
        for record in replay(self.opened, offsets):
            recovery.apply(record)
        return recovery


def _new_disk() -> SimDisk:
    disk = SimDisk()
    create(disk, MANIFEST)
    disk.make_folder(LEASE)
    disk.open_write(CLAIMED_NAME, create=True)
    disk.sync_folder(LEASE)
    disk.sync_folder("")
    return disk
