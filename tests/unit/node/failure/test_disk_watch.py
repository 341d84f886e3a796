"""When a node says that its disk does not answer, and what follows from it."""

import pytest

from holdfast.node.failure.disk_watch import LATE_S, NEVER, DiskWatch
from holdfast.node.replicate.config import ReplicationConfig
from tests.support.replica_cores import Cores

STALL_S = 3.0


def until(watch: DiskWatch, end: float) -> list[tuple[float, bool]]:
    """When it changed, and to what; timers run when they are due."""
    changes = []
    while (due := watch.timer()) <= end:
        if watch.handle_timers(due):
            changes.append((due, watch.is_stalled))
    return changes


def test_a_write_that_does_not_end() -> None:
    watch = DiskWatch(STALL_S)
    assert watch.timer() == NEVER
    watch.journal.began(10.0)
    assert until(watch, 12.9) == []
    assert until(watch, 100.0) == [(13.0, True)]
    assert watch.timer() == NEVER
    assert not watch.ended(watch.journal, 100.0)
    assert until(watch, 200.0) == [(103.0, False)]
    assert watch.timer() == NEVER


@pytest.mark.parametrize("name", ["journal", "metadata"])
def test_either_of_the_two_counts(name: str) -> None:
    watch = DiskWatch(STALL_S)
    watch.journal.began(10.0)
    watch.metadata.began(10.0)
    clock = getattr(watch, name)
    other = watch.metadata if name == "journal" else watch.journal
    assert not watch.ended(other, 10.1)
    assert clock.under_way == 1
    assert until(watch, 20.0) == [(13.0, True)]


def test_many_writes_that_end_one_after_the_other() -> None:
    """A queue is long; none of them takes long."""
    watch = DiskWatch(STALL_S)
    for _ in range(100):
        watch.metadata.began(0.0)
    for number in range(1, 101):
        assert until(watch, number * 1.0) == []
        assert not watch.ended(watch.metadata, number * 1.0)
    assert watch.timer() == NEVER


def test_a_write_that_was_too_slow_is_told_though_it_has_ended() -> None:
    watch = DiskWatch(STALL_S)
    watch.journal.began(0.0)
    assert watch.ended(watch.journal, 3.1)
    assert watch.is_stalled
    assert until(watch, 10.0) == [(6.1, False)]


def test_a_disk_that_stalls_again_and_again_is_not_well_in_between() -> None:
    watch = DiskWatch(STALL_S)
    now = 0.0
    watch.journal.began(now)
    assert until(watch, 3.0) == [(3.0, True)]
    for _ in range(5):
        now += 5.0
        assert not watch.ended(watch.journal, now)
        watch.journal.began(now)
        assert until(watch, now + 4.9) == []
    assert watch.is_stalled


def test_our_own_pause_is_no_stall() -> None:
    """The report of the write waits behind the pause, too."""
    watch = DiskWatch(STALL_S)
    watch.journal.began(0.0)
    assert not watch.handle_timers(60.0)
    assert not watch.ended(watch.journal, 60.0)
    watch.journal.began(60.0)
    assert not watch.handle_timers(60.0 + STALL_S + 2 * LATE_S)
    ((at, is_stalled),) = until(watch, 200.0)
    assert is_stalled
    assert at == pytest.approx(63.0 + 3 * LATE_S)


def test_who_waits_for_space_is_not_stalled() -> None:
    watch = DiskWatch(STALL_S)
    watch.journal.began(0.0)
    for now in range(3, 60, 3):
        watch.journal.waits_for_space(float(now))
        assert not watch.handle_timers(float(now))


def test_a_follower_that_stays_where_it_is_does_not_come_back() -> None:
    """It has all that is committed, for as long as nothing more can be committed: in sync again,
    it would be waited for again, and left again, for ever."""
    cores = Cores(config=ReplicationConfig(silent_s=1.0))
    cores.append("a", 1)
    cores.run()
    cores.sync("a")
    cores.run()
    # Neither has answered for too long; the set may not become smaller than one.
    cores.wait(1.3)
    assert cores.proposed("a") == [(0, ("a",))]
    cores.change(in_sync=("a", "c"))
    cores.tell("a")
    # c is waited for, so nothing is committed: b has what is, and yet says nothing.
    assert cores.watermark("a") == 0
    assert cores.proposed("a") == [(0, ("a",))]
    cores.change(in_sync=("a",))
    cores.tell("a")
    assert cores.watermark("a") == 1
    assert cores.proposed("a") == []
    # With its disk it gets on, and is back.
    cores.settle()
    assert cores.proposed("a") == [(0, ("a", "b"))]


def test_the_watermark_moves_before_anybody_comes_back() -> None:
    cores = Cores()
    cores.append("a", 1)
    cores.run()
    cores.sync("a", "b")
    cores.run()
    cores.wait(1.3)
    assert cores.proposed("a") == [(0, ("a", "b"))]
    cores.change(in_sync=("a", "b"))
    # This node was held up itself: nobody counts as silent for now.
    cores["a"].core.leading._in_sync.restart_silences(cores.now)
    cores.tell("a")
    assert cores.watermark("a") == 1
    assert cores.proposed("a") == []


def test_nobody_comes_back_that_is_not_heard() -> None:
    """Its socket is open, and it has had everything: so it would be taken in, and out again."""
    cores = Cores()
    cores.write("a", 1)
    core = cores["a"].core
    core.handle_unhealthy(frozenset({"b"}), cores.now)
    cores.change(in_sync=("a", "c"))
    cores.tell("a")
    cores.wait(5)
    assert cores.proposed("a") == []
    core.handle_unhealthy(frozenset(), cores.now)
    cores["a"].collect()
    assert cores.proposed("a") == [(0, ("a", "c", "b"))]
