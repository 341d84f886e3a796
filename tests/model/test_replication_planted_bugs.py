"""The simulator of replication finds what it is there to find: each mistake, made in the production
code for the length of a test, breaks a promise within a bounded number of seeds."""

from contextlib import AbstractContextManager
from typing import Any

import pytest

from holdfast.log.batch import Batch
from holdfast.node.replicate import follower as following
from holdfast.node.replicate import in_sync, log_matching
from holdfast.node.replicate.codec import CUT, GO_ON, OFFSET_ENTRY
from holdfast.node.replicate.follower import FollowerSide
from holdfast.node.replicate.in_sync import InSync
from holdfast.node.replicate.leader import LeaderSide
from holdfast.node.replicate.progress import LedPartition, Progress
from holdfast.node.replicate.replication import Replication
from tests.sim.schedule import Wrong
from tests.support.planted import Plant, Planted, changed
from tests.support.sim_replication import Faults, World

POWER = Faults({"power": 3.0, "power all": 1.0, "move leader": 3.0, "slow disk": 2.0}, nodes=(3,))
MOVES = Faults(
    {"power": 1.0, "move leader": 5.0, "tear": 2.0, "isolate": 3.0, "kill": 1.0}, nodes=(3,)
)
CUTS = Faults(
    {"one way": 2.0, "cut": 2.0, "isolate": 2.0, "power": 1.0, "kill": 1.0, "move leader": 1.0},
    nodes=(3,),
    min_insync=(1,),
)
FLAPS = Faults({"cut": 3.0, "tear": 3.0, "kill": 2.0, "isolate": 2.0}, nodes=(3,), min_insync=(1,))
SPLITS = Faults(
    {"isolate": 3.0, "cut": 3.0, "power": 3.0, "kill": 1.0, "move leader": 6.0},
    every_s=0.08,
    nodes=(3,),
    min_insync=(2,),
)
WIPES = Faults({"wipe": 2.0, "power": 1.0, "cut": 1.0, "move leader": 3.0}, nodes=(3,))


def received_counts_as_durable() -> AbstractContextManager[object]:
    def end(core: FollowerSide, partition: int) -> int:
        return int(core._state.log.next_offset[partition])

    return changed(FollowerSide, "_durable_end", end)


def truncation_to_the_watermark() -> AbstractContextManager[object]:
    ask = FollowerSide._send_follow

    def cut_and_ask(core: FollowerSide, followed: Any, source: Any, now: float) -> None:
        log = core._state.log
        watermark = log.high_watermark[followed.partition]
        if log.next_offset[followed.partition] > watermark:
            log.truncate(followed.partition, watermark)
        ask(core, followed, source, now)

    return changed(FollowerSide, "_send_follow", cut_and_ask)


def no_epoch_check_at_the_follower() -> AbstractContextManager[object]:
    def take_from_anybody(
        core: FollowerSide, node: str, batches: list[tuple[int, Batch]], now: float
    ) -> None:
        log = core._state.log
        source = core._sources[node]
        for epoch, batch in batches:
            source.received_bytes += batch.length
            source.has_ignored = True
            partition = batch.partition
            followed = core._partitions[partition]
            if followed.leader and batch.base_offset == log.next_offset[partition]:
                log.append_batch(batch)
                core._mark(followed)
                # Made durable before the acknowledgement leaves: that is not what is wrong here.
                log.synced(len(log.disk.entries))  # type: ignore[attr-defined]
                source.acknowledgements.append(
                    OFFSET_ENTRY.pack(partition, epoch, batch.end_offset)
                )

    return changed(FollowerSide, "handle_replicate", take_from_anybody)


def shrink_before_the_metadata() -> AbstractContextManager[object]:
    propose = InSync.propose

    def propose_and_forget(rules: InSync, led: LedPartition, now: float) -> None:
        propose(rules, led, now)
        if led.proposal is not None:
            led.counted = [one for one in led.counted if one.peer.node in led.proposal]

    return changed(InSync, "propose", propose_and_forget)


def newcomer_counts_when_the_metadata_says_so() -> AbstractContextManager[object]:
    propose = InSync.propose

    def propose_and_wait(rules: InSync, led: LedPartition, now: float) -> None:
        counted = list(led.counted)
        propose(rules, led, now)
        led.counted = counted

    return changed(InSync, "propose", propose_and_wait)


def newcomer_needs_the_watermark_alone() -> AbstractContextManager[object]:
    has_come = InSync.has_caught_up

    def has_come_early(rules: InSync, led: LedPartition, progress: Progress, now: float) -> bool:
        start, led.start = led.start, 0
        try:
            return has_come(rules, led, progress, now)
        finally:
            led.start = start

    return changed(InSync, "has_caught_up", has_come_early)


def own_disk_does_not_count() -> AbstractContextManager[object]:
    def advance(leading: LeaderSide, led: LedPartition) -> None:
        ends = [progress.matched for progress in led.counted]
        log = leading._state.log
        offset = min([*ends, led.end])
        if offset > log.durable_offset[led.partition]:
            log.durable_offset[led.partition] = offset
        before = log.high_watermark[led.partition]
        if leading._state.commit(led.partition, offset):
            leading.commits.note_moved(led, before)

    return changed(LeaderSide, "_advance", advance)


def epoch_led_in_two_lives() -> AbstractContextManager[object]:
    return changed(Replication, "_may_lead", lambda *_: True)


def empty_disk_taken_for_the_old_one() -> AbstractContextManager[object]:
    return changed(in_sync, "is_genuine", lambda *_: True)


def proposal_forgotten_too_soon() -> AbstractContextManager[object]:
    """Proposed again without the newcomer, while the first proposal is still under way."""
    propose = InSync.propose

    def propose_and_forget(rules: InSync, led: LedPartition, now: float) -> None:
        before = led.proposal
        propose(rules, led, now)
        if before is not None and led.proposal is not None:
            wanted = {*led.info.in_sync, *led.proposal}
            led.counted = [one for one in led.counted if one.peer.node in wanted]

    return changed(InSync, "propose", propose_and_forget)


def logs_not_compared() -> AbstractContextManager[object]:
    """Go on wherever the follower's log ends, if the leader's is as long."""

    def action(log: Any, led: LedPartition, progress: Any, entry: Any, *_: int) -> int:
        return GO_ON if entry[4] <= led.end else CUT

    return changed(log_matching, "_action", action)


def cut_at_the_leaders_end_of_an_epoch_we_lack() -> AbstractContextManager[object]:
    """KIP-101 without KIP-279."""

    def cut(log: Any, partition: int, cut_epoch: int, offset: int) -> int:
        return min(offset, int(log.next_offset[partition]))

    return changed(following, "cut_offset", cut)


PLANTED: dict[str, tuple[Plant, Faults]] = {
    "received counts as durable": (received_counts_as_durable, POWER),
    "truncation to the watermark": (truncation_to_the_watermark, MOVES),
    "no epoch check at the follower": (no_epoch_check_at_the_follower, MOVES),
    "shrink before the metadata": (shrink_before_the_metadata, CUTS),
    "newcomer counts late": (newcomer_counts_when_the_metadata_says_so, CUTS),
    "newcomer needs the watermark alone": (newcomer_needs_the_watermark_alone, MOVES),
    "proposal forgotten too soon": (proposal_forgotten_too_soon, FLAPS),
    "logs not compared": (logs_not_compared, MOVES),
    "cut where the leader's epoch ends": (cut_at_the_leaders_end_of_an_epoch_we_lack, SPLITS),
    "own disk does not count": (own_disk_does_not_count, POWER),
    "epoch led in two lives": (epoch_led_in_two_lives, POWER),
    "empty disk taken for the old one": (empty_disk_taken_for_the_old_one, WIPES),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    plant, faults = PLANTED[name]
    Planted(plant, lambda seed: World(seed, faults).play(), finds=(Wrong, AssertionError)).check()
