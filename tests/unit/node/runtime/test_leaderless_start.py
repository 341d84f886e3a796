"""A node that starts while a partition of its cluster has no leader."""

from holdfast.log.partition import partition_of
from holdfast.node.metadata.model import NodePhase
from holdfast.node.runtime.fitness import LEADERLESS_START_S
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from tests.unit.node.feeds.test_given_up import newest, process_at
from tests.unit.node.routing.test_lost_link import name_in, partitions, voting_stage


def test_a_node_serves_the_other_partitions() -> None:
    """The only disk of a partition is lost, and another node is restarted. A client whose session
    would be in that partition is refused, and does not wait for as long."""
    stage = voting_stage(3, 1)
    lost = partitions(stage)[0].leader
    node, other = (name for name in stage.world.hosts if name != lost)
    led = next(each for each, info in enumerate(partitions(stage)) if info.leader == other)
    names = [f"c{number}" for number in range(50)]

    def home(name: str) -> int:
        return partition_of(name.encode(), len(partitions(stage)))

    stage.world.hosts[lost].kill(power=False)
    stage.world.hosts[lost].wipe()
    stage.until(lambda: newest(stage).nodes[lost].state == NodePhase.DOWN)
    stage.until(lambda: not partitions(stage)[0].leader)

    host = stage.world.hosts[node]
    host.kill(power=False)
    host.start()
    stage.until(lambda: host.process is not None and host.process is not None)
    stage.run(LEADERLESS_START_S - 1.0)
    assert not process_at(stage, node).is_ready, "leaders may be chosen"
    stage.until(lambda: process_at(stage, node).is_ready)
    assert not partitions(stage)[0].leader
    process_at(stage, node).state.acl = None
    clients = dict(zip(map(home, names), names, strict=True))
    stage.login(node, "alice", clients[0], reason=reasons.SERVER_UNAVAILABLE)
    writer = stage.login(node, "alice", clients[led])
    stage.publish(writer, name_in(stage, led, 1), 3, 1)
    for _ in range(3):
        ack = writer.answer(m.Ack)
        assert isinstance(ack, m.Ack)
        assert ack.reason == 0
