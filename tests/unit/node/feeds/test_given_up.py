"""Records that an operator gives up: a node that was only fed leads the partition from then on."""

from holdfast.node.metadata import operations
from holdfast.node.metadata.model import NOT_RESTORED, NodePhase
from tests.sim.process import Process
from tests.unit.node.routing.test_lost_link import name_in, partitions, voting_stage
from tests.unit.node.test_rights_cluster import Stage


def process_at(stage: Stage, node: str) -> Process:
    found = stage.world.hosts[node].process
    assert found is not None
    return found


def test_a_fed_node_leads_what_is_given_up() -> None:
    """It has the state of the partition and none of its records. It goes on behind the last offset
    that was fed, so no offset that clients have seen is given to another record."""
    stage = voting_stage(3, 1)
    lost = partitions(stage)[0].leader
    node, other = (name for name in stage.world.hosts if name != lost)
    topic = name_in(stage, 0, 1)
    reader = stage.login(other, "alice", "reader", expiry_s=600)
    stage.subscribe(reader, topic, 1)
    writer = stage.login(node, "alice", "writer")
    before = stage.publish(writer, topic, 20, 1)
    stage.until(lambda: reader.payloads == before)
    journal = process_at(stage, node).cluster_node.context.journal
    end = journal.high_watermark[0]
    assert journal.start_offsets[0] == journal.next_offset[0], "it has none of the records"

    stage.world.hosts[lost].kill(power=False)
    stage.world.hosts[lost].wipe()
    metadata = stage.world.newest_metadata()

    def is_down() -> bool:
        nonlocal metadata
        metadata = stage.world.newest_metadata()
        assert metadata is not None
        return metadata.nodes[lost].state == NodePhase.DOWN and not metadata.partitions[0].leader

    stage.until(is_down)
    assert metadata is not None
    generation = (metadata.generation or NOT_RESTORED).number + 1
    process = process_at(stage, node)
    process.touch()
    command = operations.unsafe_recover(metadata, node, None, (lost,), generation)
    process.cluster_node.meta.propose(command, process.state.now)
    stage.until(lambda: partitions(stage)[0].leader == node)
    late = stage.login(other, "alice", "late")
    stage.subscribe(late, topic, 1)
    after = stage.publish(writer, topic, 20, 1)
    stage.until(lambda: late.payloads == after and reader.payloads == before + after)
    stage.until(lambda: len(writer.packets) == 40)
    assert journal.start_offsets[0] >= end
    # The session is at a node that was fed, too, and goes on there.
    reader.lose()
    missed = stage.publish(writer, topic, 5, 1)
    reader = stage.login(node, "alice", "reader", clean=False, expiry_s=600)
    stage.until(lambda: reader.payloads == missed)

    # The node with the empty disk comes back, and has what the others have.
    stage.world.hosts[lost].start()
    stage.until(lambda: process_at(stage, lost).is_ready, 60.0)
    reader.lose()
    missed = stage.publish(writer, topic, 5, 1)
    reader = stage.login(lost, "alice", "reader", clean=False, expiry_s=600)
    stage.until(lambda: reader.payloads == missed)
