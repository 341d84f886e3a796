"""A lost link to the Raft leader keeps no node from agreeing on metadata, and deposes no leader:
the frames go through another node."""

import pytest

from tests.sim.world import Settings, World

WITHIN_S = 5.0
"""The most seconds from the loss of a link until the proposal of every node is agreed."""
TOPOLOGIES = {
    "three": Settings(casts=()),
    "two and a witness": Settings(casts=(), has_witness=True, replication_factor=2, min_insync=1),
    "four, one does not vote": Settings(casts=(), nodes=4),
}


def ready(settings: Settings) -> World:
    world = World(3, settings)
    for host in world.hosts.values():
        host.start()
    world._wait(20.0, world._not_ready, "not ready")

    def lacks_voters() -> str:
        metadata = world.newest_metadata()
        voters = () if metadata is None else metadata.voters
        return "" if len(voters) == 3 else f"voters: {voters}"

    world._wait(20.0, lacks_voters, "voters")
    agree(world)
    return world


def agree(world: World) -> None:
    """Waits for a read of the metadata at each node. That is a proposal whose outcome the node
    learns from its own log."""
    began = world.schedule.now
    waiting = {}
    for name, host in world.hosts.items():
        assert host.process is not None
        waiting[name] = host.process.cluster_node.metadata_reads.begin()
    while waiting:
        assert world.schedule.now - began < WITHIN_S, f"no agreement for {sorted(waiting)}"
        for name, read in list(waiting.items()):
            process = world.hosts[name].process
            assert process is not None
            process.touch()
            if process.cluster_node.metadata_reads.has_passed(read):
                del waiting[name]
        world.schedule.run(0.05)


def leader(world: World) -> str:
    processes = [host.process for host in world.hosts.values() if host.process is not None]
    return next(each.host.name for each in processes if each.cluster_node.meta.is_leader)


def term(world: World) -> int:
    processes = [host.process for host in world.hosts.values() if host.process is not None]
    return max(each.cluster_node.meta.term for each in processes)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("direction", ["both ways", "from the leader", "to the leader"])
def test_every_node_proposes_while_a_link_of_the_leader_is_lost(
    topology: str, direction: str
) -> None:
    nodes = TOPOLOGIES[topology].nodes
    for number in range(1, nodes) if direction == "both ways" else (1, nodes - 1):
        world = ready(TOPOLOGIES[topology])
        first = leader(world)
        second = [name for name in world.hosts if name != first][number - 1]
        if direction != "to the leader":
            world.network.cut(first, second)
        if direction != "from the leader":
            world.network.cut(second, first)
        before = term(world)
        agree(world)
        world.schedule.run(10.0)
        assert leader(world) == first
        assert term(world) == before
        agree(world)
