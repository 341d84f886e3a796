"""The leader: what it sends, when it commits, whom it wants in sync, and when it stops."""

import pytest
from msgspec.structs import replace

from holdfast.node.frame_kinds import COMMIT, REPLICATE, REPLICATE_ACK, BadFrame
from holdfast.node.metadata.model import PartitionInfo
from holdfast.node.replicate.codec import OFFSET_ENTRY, encode_ack
from holdfast.node.replicate.commit_frames import HOLD_S
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.replicate.effects import (
    BecameLeader,
    Committed,
    LeadershipEnded,
    ProposeInSync,
)
from tests.support.replica_cores import Cores


def test_committed_when_durable_on_every_replica_in_sync() -> None:
    cores = Cores()
    cores.append("a", 1, 2)
    cores.run()
    assert cores.numbers("b") == cores.numbers("c") == [1, 2]
    cores.sync("a", "b")
    cores.run()
    assert cores.watermark("a") == 0
    cores.sync("c")
    cores.run()
    assert [cores.watermark(name) for name in "abc"] == [2, 2, 2]
    assert [(effect.partition, effect.offset) for effect in cores["b"].of(Committed)] == [(0, 2)]


def test_the_leaders_own_disk_counts() -> None:
    cores = Cores()
    cores.append("a", 1)
    cores.run()
    cores.sync("b", "c")
    cores.run()
    assert cores.watermark("a") == 0
    cores.sync("a")
    assert cores.watermark("a") == 1


def test_one_frame_a_turn_for_each_follower_with_the_same_bytes() -> None:
    cores = Cores(partitions=3)
    for partition in (2, 0, 1):
        for number in (1, 2):
            cores["a"].log.append(partition, number)
    cores["a"].core.handle_taken(cores["a"].log.take(), cores.now)
    cores["a"].collect()
    first, second = cores["a"].frames
    assert (first.kind, second.kind) == (REPLICATE, REPLICATE)
    assert isinstance(first.payload, list)
    assert isinstance(second.payload, list)
    assert [id(part) for part in first.payload[-3:]] == [id(part) for part in second.payload[-3:]]
    cores.settle()
    assert [cores.watermark("c", partition) for partition in range(3)] == [2, 2, 2]


def test_a_turn_with_very_much_in_it_becomes_several_frames() -> None:
    cores = Cores(count=2, partitions=5, config=ReplicationConfig(frame_bytes=250))
    for partition in range(5):
        cores["a"].log.append(partition, partition)
    cores["a"].core.handle_taken(cores["a"].log.take(), cores.now)
    cores["a"].collect()
    assert cores.batches_for("a", "b") == 3
    cores.settle()
    assert [cores.numbers("b", partition) for partition in range(5)] == [[0], [1], [2], [3], [4]]


def test_an_observer_gets_everything_and_nobody_waits_for_it() -> None:
    cores = Cores(count=4, replicas=3)
    cores.append("a", 1)
    cores.run()
    assert cores.numbers("d") == [1]
    cores.sync("a", "b", "c")
    cores.run()
    assert cores.watermark("a") == 1
    assert cores.watermark("d") == 0, "not above what is durable there"
    cores.sync("d")
    assert cores.watermark("d") == 1


def test_batches_are_pipelined() -> None:
    cores = Cores()
    for number in range(5):
        cores.append("a", number)
    assert cores.batches_for("a", "b") == 5
    cores.settle()
    assert cores.watermark("b") == 5


def test_a_silent_replica_is_passed_only_when_the_metadata_says_it_is_out() -> None:
    cores = Cores()
    cores.cut("a", "c")
    cores.append("a", 1)
    cores.run()
    cores.sync("a", "b")
    cores.run()
    assert cores.proposed("a") == []
    cores.wait(1.3)
    assert cores.proposed("a") == [(0, ("a", "b"))]
    assert cores.watermark("a") == 0
    cores.change(in_sync=("a", "b"))
    cores.tell("a")
    assert cores.watermark("a") == 1
    cores.wait(5)
    assert cores.proposed("a") == []


def test_a_proposal_without_an_answer_is_made_again() -> None:
    cores = Cores()
    cores.cut("a", "c")
    cores.wait(1.3)
    assert len(cores["a"].of(ProposeInSync)) == 1
    cores.wait(1.3)
    assert len(cores["a"].of(ProposeInSync)) == 1


def test_the_set_is_not_shrunk_below_min_insync() -> None:
    """The watermark could not move either way, and whoever stays in it may lead."""
    cores = Cores(min_insync=2)
    cores.cut("a", "b")
    cores.cut("a", "c")
    assert cores["a"].core.may_append(0)
    cores.wait(3)
    assert cores.proposed("a") == []
    assert cores["a"].core.leads(0)
    assert not cores["a"].core.may_append(0)
    cores.connect("ab")
    assert cores["a"].core.may_append(0)
    assert cores.proposed("a") == [(0, ("a", "b"))]


def test_below_min_insync_nothing_is_committed_or_taken() -> None:
    cores = Cores(min_insync=2)
    cores.change(in_sync=("a",))
    cores.tell()
    assert not cores["a"].core.may_append(0)
    cores.append("a", 1)
    cores.sync("a")
    assert cores.watermark("a") == 0


def test_a_lower_min_insync_commits_what_waits() -> None:
    cores = Cores(min_insync=2)
    cores.change(in_sync=("a",))
    cores.tell()
    cores.append("a", 1)
    cores.sync("a")
    assert cores.watermark("a") == 0
    cores.metadata = replace(cores.metadata, min_insync=1, version=cores.metadata.version + 1)
    cores.tell()
    assert cores.watermark("a") == 1
    assert cores["a"].core.may_append(0)


def test_who_was_held_up_itself_accuses_nobody() -> None:
    cores = Cores()
    cores.append("a", 1)
    cores["a"].frames.clear()
    cores.now += 10
    cores["a"].core.handle_timers(cores.now)
    cores["a"].collect()
    assert cores.proposed("a") == []
    cores.wait(1.3)
    assert cores.proposed("a") == [(0, ("a",))]


def test_a_replica_that_gets_on_slowly_is_not_silent() -> None:
    cores = Cores()
    for number in range(12):
        cores.append("a", number)
        cores.run()
        cores.sync("a", "c")
        cores.wait(0.4)
        cores["b"].log.synced(number)
        cores["b"].core.handle_durable(cores.now)
        cores["b"].collect()
        cores.run()
    assert cores.proposed("a") == []


def test_who_comes_back_counts_before_the_metadata_says_so() -> None:
    cores = Cores()
    cores.cut("a", "c")
    cores.change(in_sync=("a", "b"))
    cores.tell()
    cores.write("a", 1, 2)
    assert cores.watermark("a") == 2
    cores.connect("ac")
    assert cores.proposed("a") == []
    cores.settle()
    assert cores.proposed("a") == [(0, ("a", "b", "c"))]
    cores.append("a", 3)
    cores.run()
    cores.sync("a", "b")
    cores.run()
    assert cores.watermark("a") == 2, "c may be in sync already"
    cores.sync("c")
    cores.run()
    assert cores.watermark("a") == 3


def test_who_was_proposed_counts_until_the_metadata_moves_on() -> None:
    cores = Cores()
    cores.cut("a", "c")
    cores.change(in_sync=("a", "b"))
    cores.tell()
    cores.write("a", 1)
    cores.connect("ac")
    cores.settle()
    assert cores.proposed("a") == [(0, ("a", "b", "c"))]
    cores.cut("a", "c")
    cores.append("a", 2)
    cores.settle()
    cores.wait(5)
    assert cores.watermark("a") == 1, "the proposal may still come through"
    assert set(cores.proposed("a")) == {(0, ("a", "b"))}, "which makes the first one void"
    cores.change()
    cores.tell("a")
    assert cores.watermark("a") == 2


def test_only_members_enter_the_in_sync_set() -> None:
    cores = Cores(count=4, replicas=3)
    cores.write("a", 1)
    cores.wait(3)
    assert cores.proposed("a") == []
    cores.change(adding=("d",))
    cores.tell("a")
    assert cores.proposed("a") == [(0, ("a", "b", "c", "d"))]


def test_a_new_leader_counts_a_follower_from_its_own_end_on() -> None:
    """Up to there anything may have been committed by the leader before."""
    cores = Cores()
    cores.cut("a", "c")
    cores.change(in_sync=("a", "b"))
    cores.tell()
    cores.write("a", 1)
    cores.append("a", 2)
    cores.run()
    cores.sync("a", "b")
    cores["b"].frames.clear()
    assert cores.watermark("b") == 1
    cores.cut("a", "b")
    cores.change(leader="b", epoch=2, in_sync=("b", "a"))
    cores.tell("b", "c")
    cores.run()
    cores.read("b")
    cores.run()
    assert cores.numbers("c") == [1, 2]
    cores["c"].log.synced(1)
    cores["c"].core.handle_durable(cores.now)
    cores["c"].collect()
    cores.run()
    assert cores.proposed("b") == [], "c has what b knows to be committed, and not all that is"
    cores.settle()
    assert cores.proposed("b") == [(0, ("b", "a", "c"))]


def test_a_new_leader_commits_what_earlier_ones_have_appended() -> None:
    cores = Cores()
    cores.append("a", 1, 2)
    cores.run()
    cores.sync()
    for node in cores.nodes.values():
        node.frames.clear()
    assert cores.watermark("b") == 0
    cores.change(leader="b", epoch=2)
    cores.tell()
    cores.run()
    assert [cores.watermark(name) for name in "abc"] == [2, 2, 2]


def test_a_deposed_leader_stops_and_drops_what_it_has_not_closed() -> None:
    cores = Cores()
    cores["a"].log.append(0, 7)
    cores.change(leader="b", epoch=2)
    cores.tell("a")
    assert not cores["a"].core.leads(0)
    stopped = cores["a"].effects[-1]
    assert isinstance(stopped, LeadershipEnded)
    assert stopped.epoch == 1
    assert cores["a"].log.disk.cuts == [0]
    assert cores["a"].log.next_offset[0] == 0
    assert cores["a"].log.take() == []


def test_a_follower_of_a_newer_leader_tells_the_old_one() -> None:
    cores = Cores()
    cores.change(leader="b", epoch=2)
    cores.tell("b", "c")
    cores.append("a", 1)
    cores.run()
    assert cores.numbers("b") == cores.numbers("c") == []
    assert not cores["a"].core.leads(0)
    cores.sync("a")
    assert cores.watermark("a") == 0
    cores.tell("a")
    cores.run()
    assert cores.numbers("a") == []


def test_questions_before_the_metadata_are_answered_after_it() -> None:
    cores = Cores(partitions=2)
    for partition in (0, 1):
        cores.change(partition, leader="b", epoch=2)
    cores.tell("a", "c")
    cores.run()
    assert not cores["b"].core.leads(0)
    cores.tell("b")
    assert len(cores["b"].frames) == 2, "one frame for each follower"
    cores.run()
    cores.append("b", 1)
    cores.settle()
    assert [cores.watermark(name) for name in "abc"] == [1, 1, 1]


def test_who_restarts_leads_only_under_a_new_epoch() -> None:
    cores = Cores()
    cores.write("a", 1)
    cores.append("a", 2)
    cores.run()
    cores.restart("a")
    cores.connect("ab", "ac")
    assert not cores["a"].core.leads(0)
    assert cores["a"].of(ProposeInSync) == []
    cores["a"].core.handle_current(cores.now)
    cores["a"].collect()
    assert not cores["a"].core.leads(0)
    (asked,) = cores["a"].of(ProposeInSync)
    assert asked.expected_version == 1
    assert asked.info == PartitionInfo(("a", "b", "c"), (), "a", 2, ("a", "b", "c"), 1)
    cores.wait(1.3)
    assert len(cores["a"].of(ProposeInSync)) == 1
    cores.change(epoch=2)
    cores.tell()
    assert [effect.epoch for effect in cores["a"].of(BecameLeader)] == [2]
    cores.settle()
    assert cores.numbers("b") == cores.numbers("c") == [1], "2 was lost before it was durable here"
    assert not cores["a"].of(ProposeInSync)


def test_a_node_on_another_disk_than_the_metadata_knows_does_not_lead() -> None:
    cores = Cores()
    nodes = dict(cores.metadata.nodes)
    cores.change(leader="b", epoch=2)
    cores.metadata = replace(cores.metadata, nodes=nodes | {"b": nodes["a"]})
    cores.tell("b")
    assert not cores["b"].core.leads(0)
    cores.wait(3)
    assert cores.proposed("b") == []


def test_a_replica_that_lost_its_disk_leaves_the_set_at_once() -> None:
    cores = Cores(min_insync=2)
    cores.write("a", 1)
    cores["c"].disk.entries.clear()
    cores["c"].disk.synced = 0
    cores["c"].disk.watermarks = [0]
    cores.restart("c")
    cores.connect("ac")
    cores.wait(0.3)
    assert cores.proposed("a") == [(0, ("a", "b"))]


def test_no_timer_and_no_frames_when_nothing_happens() -> None:
    cores = Cores(count=5, partitions=64, replicas=3)
    cores.write("a", 1, partition=5)
    cores.wait(5)
    assert [node.core.timer() for node in cores.nodes.values()] == [None] * 5
    assert not any(node.frames for node in cores.nodes.values())


@pytest.mark.parametrize(
    ("received", "end"),
    [(0, 3), (1 << 30, 0)],
    ids=["an end that was not sent", "bytes that were not sent"],
)
def test_an_acknowledgement_of_what_was_not_sent_is_refused(received: int, end: int) -> None:
    cores = Cores()
    frame = encode_ack(received, [OFFSET_ENTRY.pack(0, 1, end)])
    with pytest.raises(BadFrame):
        cores["a"].core.handle_frame("b", REPLICATE_ACK, frame, cores.now)


def test_lag_is_counted_in_records() -> None:
    cores = Cores(config=ReplicationConfig())
    cores.append("a", 1, 2, 3)
    assert cores["a"].core.leading.lags()[0] == {"b": 3, "c": 3}
    cores.settle()
    assert cores["a"].core.leading.lags()[0] == {"b": 0, "c": 0}


def streaming(*needing: str) -> Cores:
    """Cores of which only these nodes need commits at once, after two batches in one moment."""
    cores = Cores()
    cores["a"].core.commits.needing = lambda partition, begin, end: needing
    for number in range(2):
        cores.append("a", number)
        cores.settle()
    return cores


def release(cores: Cores, *nodes: str) -> None:
    """The end of a turn with frames for these nodes."""
    cores["a"].core.commits.send_held(nodes, cores.now)
    cores["a"].collect()
    cores.run()


def test_a_commit_waits_for_the_next_frame_to_a_node_that_does_not_need_it() -> None:
    cores = streaming("b")
    assert [cores.watermark(name) for name in "abc"] == [2, 2, 1]
    release(cores, "b")
    assert cores.watermark("c") == 1
    release(cores, "c")
    assert cores.watermark("c") == 2


def test_a_held_commit_waits_for_a_bounded_time() -> None:
    cores = streaming()
    due = cores["a"].core.timer()
    assert due is not None
    assert due <= cores.now + HOLD_S
    cores.now += HOLD_S
    release(cores)
    assert [cores.watermark(name) for name in "abc"] == [2, 2, 2]


def test_a_commit_waits_only_if_batches_leave_often() -> None:
    cores = streaming()
    release(cores, "b", "c")
    cores.now += 2 * HOLD_S
    cores.append("a", 2)
    cores.settle()
    assert [cores.watermark(name) for name in "abc"] == [3, 3, 3]


def test_a_node_that_waits_for_commits_gets_the_held_one_and_the_next_ones() -> None:
    cores = streaming()
    cores.append("a", 2)
    cores.run()
    core = cores["a"].core
    core.commits.await_commits("b", (0,))
    cores["a"].collect()
    cores.run()
    assert [cores.watermark(name) for name in "bc"] == [2, 1]
    cores.settle()
    assert [cores.watermark(name) for name in "bc"] == [3, 1]
    # Up to the end of the log at that time, and no longer.
    cores.append("a", 3)
    cores.settle()
    assert [cores.watermark(name) for name in "abc"] == [4, 3, 1]


def test_no_held_commit_leaves_once_the_partition_is_not_led() -> None:
    # The watermark may then be that of the next leader's log.
    cores = streaming()
    assert cores["a"].core.commits.is_holding()
    cores.change(leader="b", epoch=2)
    cores.tell("a")
    cores["a"].frames.clear()
    cores["a"].core.commits.send_held(("b", "c"), cores.now)
    cores["a"].collect()
    assert not [frame for frame in cores["a"].frames if frame.kind == COMMIT]


def test_no_held_commit_leaves_over_another_link() -> None:
    cores = streaming()
    cores.cut("a", "b")
    cores.connect("ab")
    cores["a"].core.check()
    cores.settle()
    assert cores.watermark("b") == 2, "FOLLOW_FROM has it"
