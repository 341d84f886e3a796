"""A cluster under a steady load for a long while: does anything change that should not?

A short ramp finds what the machine sustains, a share of that is the load. Changes are counted from
the metadata itself, in which every leader has an epoch and every partition a version: so none is
missed between two looks.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.measurement import OTHERS_BUSY_MAX, percentile
from bench.paced_load import Overloaded, PacedLoad, Timings
from bench.process import cpu_s, machine_busy_s, rss_bytes
from tests.e2e.cluster_processes import ClusterProcesses, until

NODES: Final = 3
MINUTE_S: Final = 60.0
LOOK_S: Final = 1.0
"""Before the end of a minute the nodes are asked, while the load goes on."""
RAMP_FROM: Final = 500.0
RAMP_FACTOR: Final = 1.25
RAMP_STEP_S: Final = 4.0
RAMP_STEPS_MAX: Final = 24
SUSTAINED_P99_MS: Final = 50.0
"""A rate is sustained if 99 % of its PUBACKs come within this time, and the generator itself is
not later than that."""
COLUMNS: Final = "{:>6} {:>8} {:>24} {:>24} {:>9} {:>8} {:>7} {:>7} {:>6} {:>5}"


@dataclass(frozen=True)
class Changes:
    """Counters of one moment, or the difference of two."""

    leaders: int = 0
    """Epochs begun, of all partitions."""
    partitions: int = 0
    """Other changes of a partition: who is in sync, who is a replica."""
    terms: int = 0
    """Of the metadata's Raft."""
    suspicions: int = 0
    """Said by a node of another one; without a second opinion nothing follows from it."""

    def since(self, before: "Changes") -> "Changes":
        return Changes(
            self.leaders - before.leaders,
            self.partitions - before.partitions,
            self.terms - before.terms,
            self.suspicions - before.suspicions,
        )


@dataclass
class Stretch:
    """A minute. Times in ms; the generator's lateness is in none of the others."""

    rate: float
    puback_ms: tuple[float, float, float]
    """Median, 99th percentile, maximum."""
    delivery_ms: tuple[float, float, float]
    late_p99_ms: float
    changes: Changes
    nodes_busy: float
    """Cores."""
    others_busy: float
    """Cores kept busy by anything but nodes and generator."""
    rss_mib: int
    """Of the largest node."""


@dataclass
class Steady:
    sustained_rate: float
    load: float
    stretches: list[Stretch] = field(default_factory=list)
    sent: int = 0
    missing: int = 0
    strayed: int = 0
    """Repeated or out of order."""

    def changes(self) -> Changes:
        every = [stretch.changes for stretch in self.stretches]
        return Changes(
            sum(one.leaders for one in every),
            sum(one.partitions for one in every),
            sum(one.terms for one in every),
            sum(one.suspicions for one in every),
        )

    def is_met(self) -> bool:
        changes = self.changes()
        is_quiet = not changes.leaders and not changes.partitions and not changes.terms
        return bool(self.stretches) and is_quiet and not self.missing and not self.strayed

    def verdict(self) -> str:
        changes = self.changes()
        text = (
            f"{changes.leaders} leaders, {changes.partitions} in-sync sets and {changes.terms} raft"
            f" terms changed; of {self.sent:,} messages {self.missing:,} are missing,"
            f" {self.strayed:,} repeated or out of order"
        )
        return f"{text}: {'pass' if self.is_met() else 'MISS'}"

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "met": self.is_met()}


def changes_in(status: dict[str, Any], suspicions: int = 0) -> Changes:
    """`status`: of GET /cluster."""
    leaders = sum(each["epoch"] for each in status["partitions"])
    versions = sum(each["version"] for each in status["partitions"])
    return Changes(leaders, versions - leaders, status["metadata_term"], suspicions)


def is_sustained(timings: Timings) -> bool:
    if not timings.puback_ms:
        return False
    puback_p99_ms = percentile(sorted(timings.puback_ms), 0.99)
    late_p99_ms = percentile(sorted(timings.late_ms), 0.99)
    return puback_p99_ms <= SUSTAINED_P99_MS and late_p99_ms <= SUSTAINED_P99_MS


def find_sustained(load: PacedLoad) -> float:
    """The highest rate of the ramp that was sustained. Raises RuntimeError: not even the first."""
    sustained = 0.0
    rate = RAMP_FROM
    for _ in range(RAMP_STEPS_MAX):
        load.take()
        try:
            timings = load.run_for(RAMP_STEP_S, rate)
        except Overloaded:
            break
        finally:
            load.drain()
        if not is_sustained(timings):
            break
        sustained = rate
        rate *= RAMP_FACTOR
    if not sustained:
        raise RuntimeError(
            f"not even {RAMP_FROM:g} messages a second are sustained: is the machine busy?"
        )
    return sustained


class Observer:
    """Looks at the nodes, in another thread: the load's clock must not wait for their answers."""

    def __init__(self, cluster: ClusterProcesses) -> None:
        self._cluster = cluster
        self._pids = [node.process.pid for node in cluster.nodes.values() if node.process]
        self._found: Changes | None = None
        self._thread: threading.Thread | None = None
        self.brokers_s = self.own_s = self.busy_s = self.at = 0.0
        self.look()
        self.changes = self.result()
        self.note_usage()

    def look(self) -> None:
        self._found = None
        self._thread = threading.Thread(target=self._look, name="observer")
        self._thread.start()

    def result(self) -> Changes:
        assert self._thread is not None
        self._thread.join()
        if self._found is None:
            raise RuntimeError("no node says how the cluster is")
        return self._found

    def _look(self) -> None:
        status = self._cluster.status()
        if status.get("partitions"):
            texts = [node.log_text() for node in self._cluster.nodes.values()]
            self._found = changes_in(status, sum(text.count("node_suspected") for text in texts))

    def note_usage(self) -> tuple[float, float]:
        """Cores kept busy since the last time: by the nodes, by others."""
        before = (self.brokers_s, self.own_s, self.busy_s, self.at)
        self.brokers_s, self.own_s = sum(map(cpu_s, self._pids)), time.process_time()
        self.busy_s, self.at = machine_busy_s(), time.monotonic()
        took_s = self.at - before[3]
        brokers_s, own_s = self.brokers_s - before[0], self.own_s - before[1]
        others_s = self.busy_s - before[2] - brokers_s - own_s
        return brokers_s / took_s, max(0.0, others_s / took_s)

    def rss_mib(self) -> int:
        return max(map(rss_bytes, self._pids)) >> 20


def measure(
    directory: Path,
    minutes: float,
    share: float,
    rate: float | None,
    show: Callable[[Stretch, int], None],
    began: Callable[[Steady], None],
) -> Steady:
    """`rate`: what is sustained, instead of a ramp. `began` when the load is known, `show` after
    each minute."""
    with ClusterProcesses(directory, NODES) as cluster:
        load = PacedLoad([node.port for node in cluster.nodes.values()])
        try:
            sustained = rate or find_sustained(load)
            found = Steady(sustained, sustained * share)
            _settle(cluster)
            began(found)
            _run(cluster, load, found, minutes, show)
        finally:
            load.close()
    return found


def _settle(cluster: ClusterProcesses) -> None:
    """What the start and the ramp have changed is changed back."""
    cluster.wait_healthy()
    until(lambda: _is_at_rest(cluster.status()), "every partition is where it belongs")


def _is_at_rest(status: dict[str, Any]) -> bool:
    keys = ("under_replicated", "leaderless", "moving", "not_preferred")
    return bool(status) and not any(status[key] for key in keys)


def _run(
    cluster: ClusterProcesses,
    load: PacedLoad,
    found: Steady,
    minutes: float,
    show: Callable[[Stretch, int], None],
) -> None:
    load.take()
    sent_before = load.sent()
    observer = Observer(cluster)
    left_s = minutes * MINUTE_S
    while left_s > 0:
        stretch_s = min(MINUTE_S, left_s)
        left_s -= stretch_s
        look_s = min(LOOK_S, stretch_s / 2)
        timings = load.run_for(stretch_s - look_s, found.load)
        observer.look()
        timings.add(load.run_for(look_s, found.load))
        before, observer.changes = observer.changes, observer.result()
        usage = observer.note_usage()
        if left_s <= 0:
            # Whatever is under way belongs to the last minute.
            load.drain()
            timings.add(load.take())
            observer.look()
            observer.changes = observer.result()
        changes = observer.changes.since(before)
        stretch = _stretch(timings, stretch_s, changes, usage, observer.rss_mib())
        found.stretches.append(stretch)
        show(stretch, len(found.stretches))
    found.sent = load.sent() - sent_before
    found.missing, found.strayed = load.missing(), load.strayed()


def _stretch(
    timings: Timings,
    took_s: float,
    changes: Changes,
    usage: tuple[float, float],
    rss_mib: int,
) -> Stretch:
    return Stretch(
        len(timings.late_ms) / took_s,
        _spread(timings.puback_ms),
        _spread(timings.delivery_ms),
        _spread(timings.late_ms)[1],
        changes,
        *usage,
        rss_mib,
    )


def _spread(times_ms: list[float]) -> tuple[float, float, float]:
    if not times_ms:
        raise RuntimeError("nothing was acknowledged, or nothing delivered, for a whole minute")
    ordered = sorted(times_ms)
    return percentile(ordered, 0.5), percentile(ordered, 0.99), ordered[-1]


def print_heading(found: Steady) -> None:
    print(
        f"sustained: {found.sustained_rate:,.0f} messages/s; the load is {found.load:,.0f}/s"
        f" ({found.load / found.sustained_rate:.0%}), QoS 1, at {NODES} nodes"
    )
    titles = ["minute", "rate/s", "PUBACK p50, p99, max ms", "delivery p50, p99, max"]
    titles += ["late p99", "leaders", "in sync", "terms", "cores", "MiB"]
    print(COLUMNS.format(*titles), flush=True)


def print_stretch(stretch: Stretch, number: int) -> None:
    changes = stretch.changes
    line = COLUMNS.format(
        number,
        f"{stretch.rate:,.0f}",
        "{:.2f}, {:.2f}, {:.1f}".format(*stretch.puback_ms),
        "{:.2f}, {:.2f}, {:.1f}".format(*stretch.delivery_ms),
        f"{stretch.late_p99_ms:.2f}",
        changes.leaders,
        changes.partitions,
        changes.terms,
        f"{stretch.nodes_busy:.2f}",
        stretch.rss_mib,
    )
    if changes.suspicions:
        line += f"  {changes.suspicions} suspected"
    if stretch.others_busy > OTHERS_BUSY_MAX:
        line += f"  disturbed: others kept {stretch.others_busy:.1f} cores busy"
    print(line, flush=True)
