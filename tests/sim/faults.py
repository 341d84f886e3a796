"""What goes wrong, and when: every kind of fault, several at a time, within what a cluster must
survive without losing anything.

The budget: any number of processes and machines may stop at any time, their disks intact but for
what was not synced; one node may lose its disk, once, while the others are in sync. A disk may go
back to an earlier copy in its place, while the others also have all that was agreed and remember
that disk: an older copy does not know itself that it is one. They run until they have told it, and
it runs while it stands apart.
"""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.node.replicate.disk_position import find_loss
from tests.sim.host import EPOCH_US
from tests.sim.operating import Operator
from tests.sim.process import LEAVE_S

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.world import World

KILL: Final = "kill"
POWER: Final = "power"
OUTAGE: Final = "outage"
PAUSE: Final = "pause"
ISOLATE: Final = "isolate"
ONE_WAY: Final = "one-way"
DEAF: Final = "deaf"
"""One way between two nodes, for seconds: they disagree, and the others hear both."""
BRIDGE: Final = "bridge"
RESET: Final = "reset"
SLOW_DISK: Final = "slow-disk"
FULL_DISK: Final = "full-disk"
SKEW: Final = "skew"
LATE: Final = "late"
WIPE: Final = "wipe"
HANG_DISK: Final = "hang-disk"
GO_BACK: Final = "go-back"
"""A disk is put back from an earlier copy."""
WRONG_CLOCK: Final = "wrong-clock"
"""Of one node, by hours, years, or never set; it jumps."""
LEAVE: Final = "leave"
"""A restart in good order."""
DAMAGE: Final = "damage"
"""A byte of a log changes, unnoticed until it is read."""
SEVER: Final = "sever"
"""One link between two nodes, two of five, both directions, from the first fault to the end of all
faults."""
LAG: Final = "lag"
"""One node does not follow one partition from the first fault to the end of all faults."""
LASTING: Final = (SEVER, LAG)
OPERATE: Final = "operate"
"""No fault: an operator changes the cluster."""
RESIZE: Final = "resize"
"""The same, and the number of its replicas."""
ALL: Final = (
    KILL, POWER, OUTAGE, PAUSE, ISOLATE, ONE_WAY, DEAF, BRIDGE, RESET, SLOW_DISK, FULL_DISK, SKEW,
    LATE, WIPE, HANG_DISK, LEAVE, OPERATE,
)  # fmt: skip
PROCESSES: Final = (KILL, POWER, OUTAGE, LEAVE)
DISKS: Final = (SLOW_DISK, FULL_DISK, HANG_DISK, POWER)
NETWORK: Final = (ISOLATE, ONE_WAY, DEAF, BRIDGE, RESET, LATE)

DECAY: Final = (DAMAGE, KILL, LEAVE, RESET, SLOW_DISK)
"""A disk loses something while nodes come and go, and clients read old records."""
HOSTILE: Final = (GO_BACK, WRONG_CLOCK, KILL, ISOLATE, LEAVE, RESET)
"""What operators do without meaning to."""

WRONG_CLOCKS_S: Final = (0.0, 0.0, 3600.0, 172_800.0, 94_608_000.0, -EPOCH_US / 1e6)
SKEW_MAX_S: Final = 60.0
"""Of one clock from the true time."""


class Faults:
    def __init__(self, world: "World", kinds: tuple[str, ...], mean_s: float) -> None:
        """`mean_s`: between two faults, on average."""
        self._world = world
        self._kinds = kinds
        self._mean_s = mean_s
        self._chance = world.schedule.chance("faults")
        self.is_over = False
        self._wiped = False
        # Whose disk went back, and the incarnation then.
        self._copy: Host | None = None
        self._copied = 0
        # Whose clock is the wrong one: one of them only.
        self._skewed = self._chance.choice(list(world.hosts.values()))
        self.count = 0
        # Only the lasting faults last.
        self.is_calm = False
        # The node that does not follow a partition, and which one.
        self._laggard: Host | None = None
        self._lagging = 0
        self._causes: dict[str, Callable[[Host], None]] = {
            KILL: self._kill,
            POWER: self._power,
            OUTAGE: self._outage,
            PAUSE: self._pause,
            ISOLATE: self._isolate,
            ONE_WAY: self._one_way,
            DEAF: self._deaf,
            BRIDGE: self._bridge,
            RESET: self._reset,
            SLOW_DISK: self._slow_disk,
            FULL_DISK: self._full_disk,
            SKEW: self._skew,
            LATE: self._late,
            WIPE: self._wipe,
            GO_BACK: self._go_back,
            WRONG_CLOCK: self._wrong_clock,
            HANG_DISK: self._hang_disk,
            DAMAGE: self._damage,
            LEAVE: self._leave,
            OPERATE: self._operate,
            RESIZE: self._resize,
        }
        self._operator = Operator(world)

    def begin(self) -> None:
        if SEVER in self._kinds:
            self._sever()
        if LAG in self._kinds:
            self._lag()
        if RESIZE in self._kinds:
            self._operator.begin_resizes()
        self._kinds = tuple(each for each in self._kinds if each not in LASTING)
        if self._kinds:
            self._wait()

    def _wait(self) -> None:
        self._world.schedule.after(self._chance.expovariate(1 / self._mean_s), self._strike)

    def _strike(self) -> None:
        if self.is_calm:
            return
        self._wait()
        host = self._chance.choice(list(self._world.hosts.values()))
        kind = self._chance.choice(self._kinds)
        self.count += 1
        self._causes[kind](host)
        if self._chance.random() < 0.15:
            # Another one in the middle of what follows from the first.
            self._world.schedule.after(self._chance.random() * 0.6, self._again)

    def _again(self) -> None:
        if not self.is_calm:
            host = self._chance.choice(list(self._world.hosts.values()))
            self.count += 1
            self._causes[self._chance.choice(self._kinds)](host)

    def end(self) -> None:
        """Everything works again."""
        self.is_over = True
        self._world.schedule.note("faults", "all is well again")
        self._world.network.severed.clear()
        self.calm()
        self._follow_again()

    def calm(self) -> None:
        """Everything works again, except for what lasts."""
        self.is_calm = True
        self._operator.end()
        world = self._world
        world.network.heal()
        world.network.late = 0.01
        world.network.late_s = 0.02
        for host in world.hosts.values():
            host.slow_s = 0.0
            host.unhang()
            host.disk.capacity_bytes = 1 << 40
            host.resume()
            host.start()

    # Processes and machines

    def _restart(self, host: "Host", longest_s: float = 4.0) -> None:
        self._world.schedule.after(0.05 + self._chance.random() ** 2 * longest_s, host.start)

    def _is_needed(self, host: "Host") -> bool:
        """It remembers a disk that went back, whose node has not heard so."""
        copy = self._copy
        if copy is None or host is copy or copy.incarnations != self._copied:
            return False
        if copy.process is not None and copy.process.is_isolated:
            self._copy = None
        return self._copy is not None

    def _kill(self, host: "Host") -> None:
        if not self._is_needed(host):
            host.kill(power=False)
            self._restart(host)

    def _power(self, host: "Host") -> None:
        if not self._is_needed(host) and self._may_lose_power(host):
            host.kill(power=True)
            self._restart(host)

    def _may_lose_power(self, host: "Host") -> bool:
        """Return whether this host may lose its power. If records count before they are synced, one
        host at a time may, until it has its records again."""
        return self._world.settings.durable or not any(
            other.is_incomplete for other in self._world.hosts.values() if other is not host
        )

    def _outage(self, _: "Host") -> None:
        if not self._world.settings.durable:
            return
        if any(map(self._is_needed, self._world.hosts.values())):
            return
        for host in self._world.hosts.values():
            host.kill(power=True)
            self._restart(host, 2.0)

    def _leave(self, host: "Host") -> None:
        process = host.process
        if process is None or host.is_paused or process.is_isolated or self._is_needed(host):
            return
        process.leave()
        # It is down within this time, or is killed by another fault.
        self._world.schedule.after(LEAVE_S + 0.2 + self._chance.random(), host.start)

    def _operate(self, host: "Host") -> None:
        self._operator.strike(host)

    def _resize(self, host: "Host") -> None:
        self._operator.resize()

    def _pause(self, host: "Host") -> None:
        host.pause(0.1 + self._chance.random() ** 3 * 8)

    # The network

    def _for_a_while(self) -> None:
        self._world.schedule.after(0.1 + self._chance.random() ** 2 * 6, self._world.network.heal)

    def _isolate(self, host: "Host") -> None:
        self._world.schedule.note("faults", f"{host.name} is isolated")
        for other in self._world.hosts:
            if other != host.name:
                self._world.network.cut(host.name, other)
                self._world.network.cut(other, host.name)
        self._for_a_while()

    def _one_way(self, host: "Host") -> None:
        others = [name for name in self._world.hosts if name != host.name]
        targets = others if self._chance.random() < 0.4 else [self._chance.choice(others)]
        is_outgoing = self._chance.random() < 0.5
        self._world.schedule.note(
            "faults", f"{'from' if is_outgoing else 'to'} {host.name} is cut: {targets}"
        )
        for other in targets:
            if is_outgoing:
                self._world.network.cut(host.name, other)
            else:
                self._world.network.cut(other, host.name)
        self._for_a_while()

    def _deaf(self, host: "Host") -> None:
        network = self._world.network
        other = self._chance.choice([name for name in self._world.hosts if name != host.name])
        self._world.schedule.note("faults", f"{host.name} does not hear {other}")
        network.cut(other, host.name)
        self._world.schedule.after(
            2.0 + self._chance.random() * 3, lambda: network.mend(other, host.name)
        )

    def _bridge(self, host: "Host") -> None:
        """Only this node reaches everybody."""
        others = [name for name in self._world.hosts if name != host.name]
        middle = len(others) // 2
        self._world.schedule.note("faults", f"{host.name} is a bridge")
        for first, second in itertools.product(others[:middle], others[middle:]):
            self._world.network.cut(first, second)
            self._world.network.cut(second, first)
        self._for_a_while()

    def _sever(self) -> None:
        pairs = [tuple(self._chance.sample(list(self._world.hosts), 2))]
        # Each pair of five nodes has a third node that hears both, whichever two links are lost.
        chance = self._world.schedule.chance("second link")
        pairs += [tuple(chance.sample(list(self._world.hosts), 2))] * (len(self._world.hosts) > 4)
        for first, second in pairs:
            self._world.schedule.note("faults", f"{first} - {second} is severed")
            for source, target in ((first, second), (second, first)):
                self._world.network.cut(source, target)
                self._world.network.severed.add((source, target))

    def _lag(self) -> None:
        self._laggard = self._chance.choice(self._world.data_hosts)
        self._lagging = self._chance.randrange(self._world.settings.partitions)
        self._world.schedule.note(
            "faults", f"{self._laggard.name} does not follow partition {self._lagging}"
        )
        self._keep_lagging()

    def _keep_lagging(self) -> None:
        """Also after a restart."""
        if self.is_over or self._laggard is None:
            return
        self._world.schedule.after(0.1, self._keep_lagging)
        process = self._laggard.process
        if process is not None and process.is_ready:
            process.cluster_node.replication.suspend(self._lagging)

    def _follow_again(self) -> None:
        process = None if self._laggard is None else self._laggard.process
        if process is not None:
            node, partition = process.cluster_node, self._lagging
            lacking = node.transfer.missing | node.transfer.unsaved.keys()
            if partition not in lacking and node.context.may_follow(partition):
                node.replication.resume(partition, process.state.now)

    def _reset(self, host: "Host") -> None:
        others = [name for name in self._world.hosts if name != host.name]
        other = self._chance.choice(others)
        self._world.schedule.note("faults", f"{host.name} - {other} is reset")
        self._world.network.reset(host.name, other)

    def _late(self, _: "Host") -> None:
        network = self._world.network
        network.late = self._chance.random() * 0.3
        network.late_s = self._chance.random() * 0.4
        self._world.schedule.note("faults", f"{network.late:.2f} of frames are late")

    # Disks and clocks

    def _slow_disk(self, host: "Host") -> None:
        host.slow_s = self._chance.random() ** 2 * 1.5
        self._world.schedule.note(host.name, f"disk is slow: {host.slow_s:.2f} s")

        def well() -> None:
            host.slow_s = 0.0

        self._world.schedule.after(self._chance.random() * 3, well)

    def _hang_disk(self, host: "Host") -> None:
        """Nothing comes back from it, for seconds."""
        host.hang(0.2 + self._chance.random() ** 2 * 7)

    def _full_disk(self, host: "Host") -> None:
        self._world.schedule.note(host.name, "disk will be full")
        disk = host.disk
        used = disk.capacity_bytes - disk.free_bytes()
        disk.capacity_bytes = used + self._chance.randrange(3000)

        def well() -> None:
            host.disk.capacity_bytes = 1 << 40

        for_s = self._chance.random() * 3
        host.was_full_until = max(host.was_full_until, self._world.schedule.now + for_s)
        self._world.schedule.after(for_s, well)

    def _skew(self, host: "Host") -> None:
        host.skew_us = int((self._chance.random() - 0.5) * 2e6 * SKEW_MAX_S)
        self._world.schedule.note(host.name, f"wall clock is off by {host.skew_us / 1e6:.1f} s")

    def _wrong_clock(self, _: "Host") -> None:
        host = self._skewed
        host.skew_us = int(self._chance.choice(WRONG_CLOCKS_S) * 1e6)
        self._world.schedule.note(host.name, f"wall clock is off by {host.skew_us / 1e6:.1f} s")

    def _go_back(self, host: "Host") -> None:
        """Once, and only what the others have, as with `_wipe`. They run, so that they remember."""
        if host.process is None or self._wiped:
            return
        earlier = host.disk.copy()
        claim = host.process.cluster_node.positions.claim().text()
        self._world.schedule.note(host.name, "its disk is copied")
        number = host.incarnations

        def put_back() -> None:
            metadata = self._world.newest_metadata()
            if self.is_over or self._wiped or metadata is None or not self._world.is_in_sync():
                return
            if self._operator.is_busy or len(metadata.voters) < self._world.settings.nodes:
                return
            if host.incarnations != number or any(
                each.is_paused or (each.process is not None and each.process.is_leaving)
                for each in self._world.hosts.values()
            ):
                return
            if not all(
                each is host or _can_do_without(each, host, claim)
                for each in self._world.hosts.values()
            ):
                return
            self._wiped = True
            host.kill(power=True)
            self._world.schedule.note(host.name, "its disk is put back from the copy")
            host.disk = earlier
            self._copy = host
            self._copied = host.incarnations
            self._restart(host, 0.5)

        self._world.schedule.after(0.2 + self._chance.random() * 2, put_back)

    def _wipe(self, host: "Host") -> None:
        """Once, and only what the others have, its vote included."""
        if self._others_have_all():
            self._wiped = True
            host.kill(power=True)
            host.wipe()
            self._restart(host)

    def _damage(self, host: "Host") -> None:
        """As `_wipe`: the node gives up the whole disk when it finds it."""
        if self._others_have_all():
            self._wiped = host.damage()

    def _others_have_all(self) -> bool:
        """Any disk may be lost now, and none was before."""
        metadata = self._world.newest_metadata()
        return (
            not self._wiped
            and metadata is not None
            and self._world.is_in_sync()
            and not self._operator.is_busy
            and len(metadata.voters) == self._world.settings.nodes
        )


def _can_do_without(other: "Host", host: "Host", claim: str) -> bool:
    """The other one has the term and the changes that are on the host's disk, and has received that
    this disk is further than `claim`. Smallest counter-example: two of three voters agree on a
    change while the third is down. One of the two goes back to before it, the other one is cut off:
    the older copy and the third one are a majority that knows nothing of the change."""
    process, its = host.process, other.process
    if process is None or its is None:
        return False
    meta, found = process.cluster_node.meta, its.cluster_node.meta.durable
    known = its.cluster_node.disk_memory.positions
    has_all = found[0] >= meta.durable[0] and found[1] >= meta.log_end[1]
    return has_all and bool(find_loss(known, host.name, process.cores.incarnation, claim))
