"""The machine of a node: its disk, its clocks, and the process that runs on it, if one does."""

from collections import deque
from typing import TYPE_CHECKING, Final

from holdfast.io.disk import older_copy, unsynced
from holdfast.io.disk.journal_writer import DiskFullError
from holdfast.log.files.layout import JOURNAL
from holdfast.node.metadata.model import DATA, WITNESS, ClusterMetadata
from tests.sim.disk import Crash, SimDisk
from tests.sim.links import identity_of
from tests.sim.mirror import Mirror
from tests.sim.network import PeerConnection
from tests.sim.process import Process
from tests.sim.schedule import Work

if TYPE_CHECKING:
    from tests.sim.world import World

EPOCH_US: Final = 1_760_000_000_000_000
CAPACITY_BYTES: Final = 1 << 40
START_AGAIN_S: Final = 0.5
AT_ONCE_S: Final = 0.0005


class Host:
    """An Endpoint of the network. `creates_cluster`: at its first start, the others wait."""

    def __init__(self, world: "World", name: str, creates_cluster: bool, role: str = DATA) -> None:
        self.world = world
        self.schedule = world.schedule
        self.name = name
        self.creates_cluster = creates_cluster
        self.role = role
        self.is_witness = role == WITNESS
        zones = world.settings.zones
        self.zone = f"z{int(name[1:]) % zones}" if zones else ""
        self.chance = self.schedule.chance(name)
        self.disk = SimDisk(CAPACITY_BYTES)
        self.mirror = Mirror(world.checks, name, world.settings.partitions)
        self.process: Process | None = None
        self.process_number = 0
        self.incarnations = 0
        self.boots = 0
        self.is_on = True
        self.paused_until = 0.0
        self.skew_us = int((self.chance.random() - 0.5) * 2e6 * world.settings.skew_s)
        # How much longer than usual the disk takes.
        self.slow_s = 0.0
        # When what its disk has begun is done at the latest.
        self.busy_until = 0.0
        # The end of the last time without space on the disk.
        self.was_full_until = float("-inf")
        # Until when it does nothing at all.
        self._hung_until = 0.0
        self._boot_s = self.chance.random() * 1000
        self._backlog: deque[Work] = deque()
        # Until when its processor is busy, if CPU time is charged.
        self._busy_until = 0.0
        self._works_off = False
        # The process has asked to be started again.
        self._starts_anew = False
        self._is_set_aside = False
        self.aside = ""
        """The directory that was put aside, until this node has everything again."""
        self.is_damaged = False
        """Bytes of the log were changed; the process may not have read them yet."""
        # More is committed than is on the disk here.
        self.mirror_behind = False

    @property
    def boot(self) -> str:
        """The name of the time since the machine was started."""
        return f"boot{self.boots}"

    @property
    def is_incomplete(self) -> bool:
        """Whether the disk may lack acknowledged records."""
        return unsynced.may_lack_records(self.disk, self.boot)

    def mark(self) -> unsynced.UnsyncedMark:
        """Look at the mark of the directory, and renew it if the disk lacks nothing."""
        return unsynced.UnsyncedMark(
            self.disk, self.boot, durable=self.world.settings.durable or self.is_witness
        )

    # Clocks

    def clock(self) -> float:
        return self.schedule.now + self._boot_s

    def schedule_time(self, when: float) -> float:
        return when - self._boot_s

    def true_us(self) -> int:
        return EPOCH_US + int(self.schedule.now * 1e6)

    def wall_us(self) -> int:
        return self.true_us() + self.skew_us

    def sync_s(self) -> float:
        taken_s = 0.0003 + self.chance.random() * 0.001 + self.slow_s * self.chance.random()
        self.busy_until = max(self.busy_until, self.schedule.now + taken_s)
        return taken_s

    # The disk

    def hang(self, duration_s: float) -> None:
        self._hung_until = max(self._hung_until, self.schedule.now + duration_s)
        self.schedule.note(self.name, f"disk hangs for {duration_s:.2f} s")

    def unhang(self) -> None:
        self._hung_until = 0.0

    def hangs_for_s(self) -> float:
        return max(0.0, self._hung_until - self.schedule.now)

    # The process

    @property
    def is_running(self) -> bool:
        return self.process is not None

    @property
    def is_paused(self) -> bool:
        return self.paused_until > self.schedule.now

    def new_incarnation(self) -> str:
        self.incarnations += 1
        return self.incarnation

    @property
    def incarnation(self) -> str:
        return f"{self.name}disk{self.incarnations}"

    def was_removed(self, metadata: ClusterMetadata) -> bool:
        """With the disk that it has."""
        return (self.name, self.incarnation) in metadata.removed

    def start(self) -> None:
        if self.process is not None:
            return
        if self.hangs_for_s():
            self.schedule.after(self.hangs_for_s(), self.start)
            return
        self.is_on = True
        self._starts_anew = False
        if self._is_set_aside:
            self._is_set_aside = False
            self.world.check_voters_without(self)
            self.wipe()
        self.process_number += 1
        self.schedule.note(self.name, "starts")
        try:
            self.process = self._new_process()
        except OSError as error:
            self.schedule.note(self.name, f"cannot start: {error}")
            self.disk.locks.clear()
            self.schedule.after(START_AGAIN_S, self.start)
            return
        self.mirror.reload(self.process.cores.storage, is_damaged=self.is_damaged)

    def _new_process(self) -> Process:
        return Process(self, self.process_number)

    def pause(self, duration_s: float) -> None:
        if self.process is None or self.is_paused:
            return
        self.paused_until = self.schedule.now + duration_s
        number = self.process_number
        self.schedule.note(self.name, f"pauses for {duration_s:.2f} s")
        self.schedule.at(self.paused_until, lambda: self._go_on(number))

    def resume(self) -> None:
        """At once, if it is paused."""
        if self.is_paused:
            self.paused_until = self.schedule.now
            self._go_on(self.process_number)

    def _go_on(self, number: int) -> None:
        if self.process is None or self.process_number != number or self.is_paused:
            return
        self.schedule.note(self.name, "goes on")
        self._work_off(number)

    def _work_off(self, number: int) -> None:
        """What has arrived meanwhile comes in pieces, with turns of the event loop between."""
        if self.process is None or self.process_number != number or self.is_paused:
            return
        self._works_off = False
        for _ in range(self.chance.randint(1, 10)):
            if self._backlog and self.process is not None and not self._is_busy:
                self._do(self._backlog.popleft())
        if self._backlog:
            self._continue(max(self.schedule.now + AT_ONCE_S, self._busy_until))

    def _continue(self, when: float) -> None:
        if not self._works_off:
            self._works_off = True
            number = self.process_number
            self.schedule.at(when, lambda: self._work_off(number))

    @property
    def _is_busy(self) -> bool:
        return self._busy_until > self.schedule.now

    def _do(self, work: Work) -> None:
        """With `World.cpu_clock`, the next work of this host begins when the CPU time of this one
        has passed. So a call that takes longer than `suspect_s` has its consequences."""
        clock = self.world.cpu_clock
        if clock is None:
            work()
            return
        begun = clock()
        work()
        self._busy_until = self.schedule.now + clock() - begun

    def post(self, work: Work, *, is_own: bool = False) -> None:
        """`is_own`: of the process itself, nothing that has come from outside."""
        if self.process is None:
            return
        if self.is_paused or self._is_busy or (self._backlog and not is_own):
            self._backlog.append(work)
            if self._is_busy and not self.is_paused:
                self._continue(self._busy_until)
        else:
            self._do(work)

    def kill(self, *, power: bool) -> None:
        """`power`: the machine goes off, and what was not synced may be lost or torn."""
        process = self.process
        if process is None:
            return
        self.schedule.note(self.name, "loses power" if power else "is killed")
        process.is_over = True
        self.process = None
        self.paused_until = 0.0
        self._backlog.clear()
        self._busy_until = 0.0
        self._works_off = False
        self.is_on = not power
        self._break_writes(process)
        survival = self.chance.choice(("none", "torn", "sectors", "all")) if power else "all"
        if power:
            self.boots += 1
            self.disk = self.disk.after_crash(survival, self.chance.randrange(1 << 30))
        else:
            self.disk.release_locks(process)
            self.disk.after_kill()
        self.world.network.ended(self.name, quietly=power)
        for socket in list(process.sockets.values()):
            socket.node_ended()

    def has_left(self) -> None:
        """The process has ended in good order. One that was paused ends late, maybe after the last
        fault: nobody else starts it again then."""
        self.kill(power=False)
        if self._starts_anew:
            self.schedule.after(0.05 + self.chance.random() * 0.2, self.start)
        elif self.world.faults.is_over:
            self.schedule.after(START_AGAIN_S, self.start)

    def _break_writes(self, process: Process) -> None:
        """What was under way may be done, or half done."""
        self.disk.steps = 0
        self.disk.crash_at = self.chance.choice((-1, 1, 1, 2, 2, 3))
        try:
            process.disk.break_writes()
        except (Crash, DiskFullError):
            pass
        self.disk.crash_at = -1

    def take_new_incarnation(self) -> bool:
        """The others have said that the disk is an older copy: the next process is another one.
        False: the disk is full."""
        if not older_copy.mark(self.disk, f"{self.name}disk{self.incarnations + 1}"):
            return False
        self.world.check_voters_without(self)
        self.incarnations += 1
        self.creates_cluster = False
        self._starts_anew = True
        return True

    def set_aside(self) -> None:
        """The next process begins with an empty directory, and keeps this one for a while."""
        self.schedule.note(self.name, "sets its directory aside")
        self.world.check_voters_without(self)
        self.aside = "damaged"
        self._is_set_aside = self._starts_anew = True

    def damage(self) -> bool:
        """Change a byte of the log, in a segment that is complete. False: there is none."""
        segments = [
            name
            for name in self.disk.files
            if name.startswith(f"{JOURNAL}/") and name.endswith(".log")
        ]
        if len(segments) < 2:
            return False
        name = self.chance.choice(sorted(segments)[:-1])
        position = self.disk.damage(name, self.chance)
        self.is_damaged = True
        self.schedule.note(self.name, f"byte {position} of {name} changes")
        return True

    def wipe(self) -> None:
        """Another disk, and empty."""
        assert self.process is None
        self.schedule.note(self.name, "gets an empty disk")
        self.disk = SimDisk(CAPACITY_BYTES)
        self.creates_cluster = self.is_damaged = False
        self.mirror.clear()

    # The network's view

    def link(self, other: str) -> PeerConnection | None:
        return None if self.process is None else self.process.links.get(other)

    def shuns(self, other: str) -> bool:
        process, host = self.process, self.world.hosts[other]
        if process is None:
            return False
        return process.peer_links.shuns(host)

    def link_up(self, connection: PeerConnection, other: str) -> None:
        process = self.process
        peer = self.world.hosts[other].process
        if process is not None and peer is not None:
            process.link_up(connection, other, identity_of(other, peer))

    def link_down(self, connection: PeerConnection, other: str) -> None:
        if self.process is not None:
            self.process.link_down(connection, other)

    def frame(self, connection: PeerConnection, other: str, kind: int, data: bytes) -> None:
        if self.process is not None:
            self.process.frame(connection, other, kind, data)

    def refused(self, other: str) -> None:
        if self.process is not None:
            self.process.runtime.links.link_refused(other)
