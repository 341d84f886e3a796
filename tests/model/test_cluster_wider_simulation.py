"""Of each cast and each way a cluster is changed, one run; and that what is looked at takes place.
`make sim` has more of them: test_cluster_simulation."""

from unittest.mock import patch

from holdfast.node.metadata import operations
from holdfast.node.metadata.model import WITNESS
from holdfast.node.node_state import NodeState
from holdfast.node.ownership import acquisition
from holdfast.node.ownership.live_sessions import live_session
from holdfast.node.session.session import Session
from tests.sim.casts import ALL_CASTS, GROUPS, LOG, QOS0, TIMED
from tests.sim.faults import HANG_DISK, ISOLATE, KILL, OPERATE, RESIZE
from tests.sim.plans import settings_for, widened
from tests.sim.teams import Member
from tests.sim.timed import LONG_S
from tests.sim.world import Settings, World


def play(seed: int, *casts: str, faults: tuple[str, ...] = (), **other: object) -> World:
    settings = Settings(
        casts=casts,
        faults=faults,
        mean_s=0.5,
        duration_s=3.0,
        skew_s=0.02,
        **other,  # type: ignore[arg-type]
    )
    world = World(seed, settings)
    try:
        world.run()
    except Exception as error:
        trace = "\n".join(world.schedule.trace)
        raise AssertionError(f"seed {seed}: {error}\n{trace}") from error
    return world


def traced(world: World, text: str) -> bool:
    return any(text in line for line in world.schedule.trace)


def test_qos0() -> None:
    world = play(1, QOS0, faults=(KILL, ISOLATE))
    assert len(world.checks.quiet_whispers) > 50


def test_wills_sessions_and_messages_in_time() -> None:
    world = play(2, TIMED, faults=(KILL,))
    checks = world.checks
    lives = [life for lives in checks.sessions.lives.values() for life in lives.values()]
    assert any(life.will_delay_s and life.fired_us >= 0 for life in lives)
    assert any(life.will_delay_s and life.fired_us < 0 for life in lives)
    assert checks.sessions.ends
    messages = [checks.messages[text] for text in checks.stored]
    assert any(message.expiry_s != LONG_S for message in messages)


def test_shared_groups() -> None:
    world = play(1, GROUPS, faults=(KILL,))
    teams = {party.team for party in world.parties if isinstance(party, Member)}
    assert len(teams) == 3
    for team in teams:
        names = {each.member.client.name for found in team.receipts.values() for each in found}
        assert len(names) == len(team.members)


def test_a_witness_and_one_other_go_on() -> None:
    world = play(3, LOG, faults=(KILL,), has_witness=True, loses_one=True, min_insync=1)
    metadata = world.newest_metadata()
    assert metadata is not None
    assert metadata.nodes["n3"].role == WITNESS
    assert "n3" in metadata.voters
    assert not any("n3" in info.members for info in metadata.partitions)


def test_an_operator_at_work() -> None:
    world = World(1, Settings(casts=(LOG,), faults=(OPERATE,), mean_s=0.3, duration_s=3.0))
    world.run()
    assert any(host.incarnations > 1 for host in world.hosts.values())


def test_a_disk_that_hangs() -> None:
    world = play(1, LOG, faults=(HANG_DISK, KILL))
    assert traced(world, "disk hangs")


def test_messages_are_new_unless_a_node_was_lost() -> None:
    """Sessions that move between nodes that live do not get what waits for them with DUP."""
    for faults in ((), (KILL,)):
        taken: list[bool] = []

        def note(state: NodeState, recorded: Session, taken: list[bool] = taken) -> Session:
            session = live_session(state, recorded)
            taken.append(session.rare.maybe_sent is not None)
            return session

        with patch.object(acquisition, "live_session", note):
            play(0, LOG, faults=faults)
        assert taken
        assert any(taken) == bool(faults)


def test_plans_have_everything() -> None:
    plans = [widened(seed, settings_for(seed)) for seed in range(200)]
    assert {cast for plan in plans for cast in plan.casts} == set(ALL_CASTS)
    assert any(plan.has_witness and plan.loses_one for plan in plans)
    for plan in plans:
        assert plan.min_insync == 2 or "wipe" not in plan.faults
        assert not (plan.has_witness and plan.loses_one and plan.min_insync > 1)


def test_a_cluster_of_one() -> None:
    world = play(3, LOG, GROUPS, TIMED, faults=(KILL, HANG_DISK), nodes=1, min_insync=1)
    assert world.checks.acknowledged > 100


def test_others_join_a_node_that_serves_alone() -> None:
    world = play(7, LOG, faults=(KILL,), begins_alone=True, min_insync=1)
    assert world.checks.acknowledged > 100
    assert all(len(host.process.links) == 2 for host in world.hosts.values() if host.process)


def test_a_node_that_serves_alone_grows_and_is_resized() -> None:
    """The replication follows the nodes, then operators, and is the planned one in the end."""
    world = play(4, LOG, faults=(RESIZE, RESIZE, KILL), begins_alone=True, min_insync=2)
    assert traced(world, "resize auto")
    metadata = world.newest_metadata()
    assert metadata is not None
    assert (metadata.replication_factor, metadata.min_insync) == (3, 2)
    assert metadata.wanted_replication == (3, 2)


def test_the_last_node_commits_alone_again() -> None:
    """After the removal of the other one, by the process that has served with it."""
    world = play(5, LOG, begins_alone=True, min_insync=1, nodes=2, replication_factor=2)
    first, second = world.hosts.values()
    process = first.process
    assert process is not None
    context, meta = process.cluster_node.context, process.cluster_node.meta
    assert not context.is_alone
    assert context.metadata is not None
    command = operations.drain(context.metadata, second.name)
    assert command is not None
    process.touch()
    meta.propose(command, process.state.now)
    world.schedule.run(5.0)
    assert operations.partitions_held(context.metadata, second.name) == 0
    process.touch()
    meta.remove(second.name, process.state.now)
    world.schedule.run(1.0)
    second.kill(power=True)
    world.schedule.run(2.0)
    assert first.process is process
    assert list(context.metadata.nodes) == [first.name]
    assert context.is_alone
