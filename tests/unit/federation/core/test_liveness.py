"""When a link counts as down, and what it costs to know."""

import random

import pytest

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.routing.link_health import LinkTable
from tests.support.sim_federation import LAN_EDGES, Weather, World, edges_of
from tests.support.sim_federation_member import node_id

PEER = node_id(1)


def lan() -> World:
    world = World(12, edges_of(LAN_EDGES), 1, subscriptions={0: ["t"], 5: ["t"]})
    world.run_until(world.is_stable, 20.0)
    world.run(3.0)
    return world


def silent_for(burdened_at: float | None) -> tuple[float, int]:
    """Until the link is lost, and the times that the peer was asked. It was heard last at 0."""
    links = LinkTable(FederationConfig())
    links.up(PEER, 0.0)
    asked = 0
    now = 0.0
    while not (due := links.due(now)).down:
        asked += len(due.probes)
        now = links.timer(now)
        if burdened_at is not None and now > burdened_at:
            now = burdened_at
            links.burdened(PEER, now)
            burdened_at = None
    return now, asked


def test_a_peer_that_is_silent_after_a_message_is_given_less_time() -> None:
    for burdened_at, lost_at in ((None, 2.65), (0.0, 1.9), (0.5, 2.4), (1.5, 2.65)):
        now, asked = silent_for(burdened_at)
        assert now == pytest.approx(lost_at)
        assert asked == 3


def test_any_word_counts() -> None:
    links = LinkTable(FederationConfig())
    links.up(PEER, 0.0)
    for step in range(1, 100):
        now = step * 1.25
        links.burdened(PEER, now - 1.2)
        assert links.due(now).probes == []
        links.note_received(PEER, now)


def test_a_peer_that_answers_late_is_given_more_time_for_a_while() -> None:
    config = FederationConfig()
    links = LinkTable(config)
    links.up(PEER, 0.0)
    links.burdened(PEER, 0.0)
    assert links.due(1.3).probes == [PEER]
    assert links.due(1.5).probes == [PEER]
    links.note_received(PEER, 1.6)
    links.burdened(PEER, 1.6)
    assert links.due(1.6 + 2.0).probes == []
    assert links.due(1.6 + 2.05).probes == [PEER]
    links.note_received(PEER, 3.7)
    later = 1.6 + config.slow_s
    links.note_received(PEER, later)
    links.burdened(PEER, later)
    assert links.due(later + 1.3).probes == [PEER]


def test_a_member_that_stood_still_itself_asks_before_it_concludes() -> None:
    links = LinkTable(FederationConfig())
    links.up(PEER, 0.0)
    links.burdened(PEER, 0.0)
    now = 60.0
    asks = []
    while not (due := links.due(now)).down:
        asks += [now] * len(due.probes)
        now = max(now, links.timer(now))
    assert asks == pytest.approx([60.0, 60.2, 60.4])
    assert now == pytest.approx(60.6)


def test_traffic_that_is_answered_costs_no_control() -> None:
    world = lan()
    before = world.control_frames
    for _ in range(500):
        world.publish(11, "t", 1)
        world.run(0.02)
    assert (world.control_frames - before) / 10.0 <= 21.0


@pytest.mark.parametrize("every_s", [0.02, 0.9, 1.5, 2.5])
def test_traffic_one_way_costs_a_question_and_an_answer_now_and_then(every_s: float) -> None:
    world = lan()
    before = world.control_frames
    for _ in range(int(20 / every_s)):
        world.publish(11, "t", 0)
        world.run(every_s)
    # Three of the links are asked every 1.3 s instead of a HELLO every second.
    assert (world.control_frames - before) / 20.0 <= 21.0 + 3 * (2 / 1.3 - 1.0) + 0.5


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_members_that_are_starved_keep_their_links(seed: int) -> None:
    """Everything takes up to half a second more each way, as where processes wait for others."""
    rng = random.Random(seed)
    world = World(
        12, edges_of(LAN_EDGES), seed, Weather(delay_s=(0.0, 0.5)), subscriptions={5: ["t"]}
    )
    world.run_until(world.is_stable, 60.0)
    world.run(5.0)
    links = dict(world.links)
    for _ in range(300):
        world.publish(11, "t", rng.choice((0, 1)))
        world.run(rng.choice((0.02, 0.3)))
    world.run(5.0)
    assert world.links == links
    assert not world.missing()


# A broker that is away, or a link that is back


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_what_waited_for_a_broker_comes_soon_after_it_is_back(loss: float) -> None:
    """The wait after the broker's return has a bound that its absence does not change: the member
    delivers what it has at once, and each confirmation brings the next messages."""
    waits = []
    for away_s in (10.0, 3600.0):
        world = World(2, [(0, 1)], 1, subscriptions={1: ["t"]})
        world.run_until(world.is_stable, 20.0)
        # Nothing is stored there until then.
        world.synced_at[1] = world.now + away_s
        for _ in range(300):
            world.publish(0, "t", 1)
        world.weather.loss = loss
        world.run(away_s - 0.1)
        assert len(world.missing()) == 300
        begin = world.now
        world.settle(600.0)
        waits.append(max(max(times.values()) for times in world.arrivals.values()) - begin)
    # 300 syncs of at most 5 ms each, and perhaps one wait for what the link lost.
    slack_s = world.config.retry_max_s if loss else 0.5
    assert max(waits) < 0.1 + 300 * 0.005 + slack_s


def test_a_message_from_a_lost_link_goes_when_the_link_is_back() -> None:
    """A driver that is late announces the loss and the return together: no graph changes."""
    config = FederationConfig(flood_delay_s=0.5)
    world = World(2, [(0, 1)], 1, config=config, subscriptions={1: ["t"]})
    world.run_until(world.is_stable, 20.0)
    world.run(3.0)
    version = world.members[0].member.database.graph_version
    world.kill_link(0, 1)
    id = world.publish(0, "t", 1)
    assert id is not None
    world.run(0.15)
    world.connect(node_id(0), node_id(1))
    world.run_until(lambda: 1 in world.arrivals[id], 1.0)
    assert world.members[0].member.database.graph_version == version


def test_a_wanted_link_that_was_lost_stays_when_it_is_back() -> None:
    """A repair ends when all wanted links are up. A wanted link is none, although it was missing
    when this member looked for others."""
    world = World(3, [(0, 1), (1, 2), (0, 2)])
    world.run_until(world.is_stable, 10.0)
    world.kill_link(0, 1)
    world.run_until(world.is_stable, 10.0)
    links = dict(world.links)
    world.run(3 * world.config.repair_close_s)
    assert world.links == links
