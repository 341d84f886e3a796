"""Records gather before a commit where that costs publishers nothing but the wait."""

import heapq
from typing import Any

import pytest

from bench.core import WALL_US, Core, Row
from holdfast.log.journal.group_commit_delay import STAY_S, TRIAL_S, CommitPace, JournalWaits
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.record import MESSAGE, Record
from holdfast.node.runtime.ports import RuntimePorts
from holdfast.node.runtime.replacement import Replacement
from holdfast.node.runtime.runtime import GATHERED_BYTES, Runtime

SYNC_S = 0.001
WAIT_S = 0.001
ANSWER_S = 0.0005
"""The time until a publisher that waits for its acknowledgements has sent the next message."""


class Load:
    """A disk whose commits take SYNC_S, with publishers that come at a rate of their own, or wait
    for each acknowledgement."""

    def __init__(self, *, rate: float = 0.0, waiting: int = 0, together: int = 1) -> None:
        self.pace = CommitPace(WAIT_S)
        self.arrivals = [0.0] * waiting
        self.rate = rate
        self.waiting = waiting
        self.together = together
        self.now = 0.0
        self.records = 0
        self.commits = 0
        self.gathered = 0

    def run(self, duration_s: float) -> None:
        """Count from 0."""
        self.records = self.commits = self.gathered = 0
        end = self.now + duration_s
        sequence = 0
        while self.now < end:
            if not self.waiting and not self.arrivals:
                heapq.heappush(self.arrivals, self.now + 1 / self.rate)
            self.now = max(self.now, heapq.heappop(self.arrivals))
            group = self.together
            wait_s = self.pace.wait_s(self.now, sequence + group)
            self.now += wait_s
            self.gathered += wait_s > 0
            while self.arrivals and self.arrivals[0] <= self.now:
                heapq.heappop(self.arrivals)
                group += self.together
            self.now += SYNC_S
            if self.waiting:
                for _ in range(group // self.together):
                    heapq.heappush(self.arrivals, self.now + ANSWER_S)
            else:
                group += int((wait_s + SYNC_S) * self.rate) * self.together
            sequence += group
            self.records += group
            self.commits += 1


def test_messages_of_a_rate_of_their_own_share_commits() -> None:
    load = Load(rate=2000.0)
    load.run(1.0)
    load.run(10.0)
    assert load.gathered > 0.8 * load.commits
    assert load.records > 3 * load.commits


@pytest.mark.parametrize("publishers", [1, 4])
def test_publishers_that_wait_for_acknowledgements_are_not_held_up(publishers: int) -> None:
    load = Load(waiting=publishers)
    load.run(30.0)
    load.run(40.0)
    free = publishers / (SYNC_S + ANSWER_S)
    assert load.records > 0.98 * 40.0 * free
    assert load.gathered, "it is tried again"


@pytest.mark.parametrize("load", [Load(rate=200.0), Load(rate=600.0, together=32)])
def test_nothing_waits_where_a_wait_would_gather_nothing_or_groups_are_large(load: Load) -> None:
    load.run(10.0)
    assert load.commits
    assert load.gathered == 0


def test_a_pause_ends_a_trial_without_a_result() -> None:
    pace = CommitPace(WAIT_S)
    for step in range(100):
        assert pace.wait_s(10.0 + step * TRIAL_S / 100, step) == 0.0
    assert pace.wait_s(10.0 + TRIAL_S, 100) == WAIT_S
    # Only these came for a long time. Gathering was not the cause.
    assert pace.wait_s(20.0, 101) == 0.0
    for step in range(100):
        assert pace.wait_s(20.0 + step * TRIAL_S / 100, 101 + step) == 0.0
    assert pace.wait_s(20.0 + TRIAL_S, 201) == WAIT_S
    assert pace.wait_s(20.01 + 2 * TRIAL_S, 301) == WAIT_S
    assert pace.wait_s(20.0 + 2 * TRIAL_S + STAY_S / 2, 302) == WAIT_S


class Turns:
    """A node that is its whole cluster, its turns by hand, and the groups that its writer was
    given."""

    is_full = False
    free_bytes = 1 << 40

    def __init__(self, durable_s: float) -> None:
        core = Core(Row(1), "one")
        machine = core.machines[0]
        self.node = machine.node
        self.groups: list[WriteGroup] = []
        self.now = core.now
        ports: Any = RuntimePorts(self, self, self, self, self, machine)  # type: ignore[arg-type]
        replacement = Replacement("n1", self.node.state, "")
        cluster_node = machine.runtime.cluster_node
        self.runtime = Runtime(cluster_node, ports, replacement, 1.0, JournalWaits(durable_s))
        self.turn(self.now)

    def space(self) -> int:
        return self.free_bytes

    def submit(self, group: WriteGroup) -> None:
        self.groups.append(group)

    def set_awaited(self, *, is_awaited: bool) -> bool:
        return False

    def take_written(self) -> WriteGroup | None:
        return None

    def touch(self) -> None:
        self.runtime.begin(self.now, WALL_US + round(self.now * 1e6))

    def flush(self, dirty: object) -> None:
        """There are no clients."""

    def write_watermarks(self, watermarks: object) -> None:
        """Nothing is kept."""

    def review(self) -> None:
        """There are no links."""

    def pending_bytes(self, node_id: str) -> int:
        return 0

    def append(self, size: int = 10) -> None:
        self.node.state.append(
            Record(0, MESSAGE, flags=1, timestamp_us=1, topic=b"t", payload=bytes(size))
        )

    def turn(self, now: float) -> None:
        self.now = now
        self.touch()
        self.runtime.turn()

    def write(self) -> None:
        """End the group that was submitted."""
        self.runtime.group_written(self.groups[-1])

    def feed_until_it_gathers(self) -> None:
        for _ in range(1000):
            self.append()
            submitted = len(self.groups)
            self.turn(self.now + WAIT_S / 2)
            if len(self.groups) == submitted:
                return
            self.write()
        raise AssertionError("it does not gather")


def test_gathering_records_go_at_their_time_in_one_group() -> None:
    turns = Turns(WAIT_S)
    turns.feed_until_it_gathers()
    submitted = len(turns.groups)
    turns.append()
    turns.turn(turns.now + WAIT_S / 2)
    assert len(turns.groups) == submitted
    due = turns.runtime.timer()
    assert due is not None
    assert due <= turns.now + WAIT_S / 2 + 1e-9
    turns.turn(due)
    assert len(turns.groups) == submitted + 1
    assert turns.groups[-1].end_sequence == turns.node.state.journal.sequence
    turns.write()
    assert turns.node.state.journal.committed_sequence == turns.node.state.journal.sequence


def test_what_waits_for_the_disk_and_what_is_large_waits_for_nothing_else() -> None:
    turns = Turns(WAIT_S)
    turns.feed_until_it_gathers()
    submitted = len(turns.groups)
    written: list[bool] = []
    turns.runtime.when_written(lambda: written.append(True))
    assert len(turns.groups) == submitted + 1
    turns.write()
    assert written == [True]

    turns = Turns(WAIT_S)
    turns.feed_until_it_gathers()
    submitted = len(turns.groups)
    turns.append(GATHERED_BYTES)
    turns.turn(turns.now)
    assert len(turns.groups) == submitted + 1


def test_without_a_wait_every_turn_commits() -> None:
    turns = Turns(0.0)
    for step in range(1, 1000):
        turns.append()
        turns.turn(turns.now + WAIT_S / 2)
        assert len(turns.groups) == step
        turns.write()
