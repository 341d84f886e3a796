"""How long messages stay away when a link or a member is lost on their way, in many graphs: the
longest time without a delivery, in virtual time."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Final

import pytest

from holdfast_federation.core.config import FederationConfig
from tests.support.seeds import block_of_seeds, run_seeds
from tests.support.sim_federation import Weather, World, random_edges
from tests.support.sim_federation_member import node_id

SEEDS = 32
"""How many graphs, an eighth of them for each fault and weather; a failure names its seed."""
EVERY_S = 0.02
"""Between messages."""
SLOW = Weather(delay_s=(0.001, 0.03), sync_s=(0.001, 0.02))
"""As between processes that wait for a processor."""
HEALED_S = 0.25
"""The longest silence after a loss that a member notices at once: announcement, path, sending."""
HEALED_SLOWLY_S = 0.6
"""The same where processes wait for a processor."""
_CONFIG = FederationConfig()
NOTICED_S = _CONFIG.probe_after_s + _CONFIG.probes_max * _CONFIG.probe_interval_s
"""The time until each peer of a frozen relay has noticed it. The relay's peer on the path sends it
messages, and notices it earlier, after 1.9 s. But the next path may lead through the same relay by
another peer, which has sent it nothing: seeds 1989483553 and 1989483466 (slow)."""

Fault = Callable[[World, list[int]], None]


def close_a_link(world: World, path: list[int]) -> None:
    """It is dialled again at once."""
    at = world.rng.randrange(len(path) - 1)
    world.kill_link(path[at], path[at + 1])


def cut_a_link(world: World, path: list[int]) -> None:
    """It closes, and cannot be dialled."""
    at = world.rng.randrange(len(path) - 1)
    one, other = sorted((node_id(path[at]), node_id(path[at + 1])))
    world.cut.add((one, other))
    world.kill_link(path[at], path[at + 1])


def end_a_relay(world: World, path: list[int]) -> None:
    """Its connections close."""
    world.crash(world.rng.choice(path[1:-1]))


def freeze_a_relay(world: World, path: list[int]) -> None:
    """Nobody closes a connection."""
    world.crash(world.rng.choice(path[1:-1]), is_silent=True)


CASES: Final[list[tuple[Fault, Weather, float]]] = [
    (close_a_link, Weather(), HEALED_S),
    (close_a_link, SLOW, HEALED_SLOWLY_S),
    (cut_a_link, Weather(), HEALED_S),
    (cut_a_link, SLOW, HEALED_SLOWLY_S),
    (end_a_relay, Weather(), HEALED_S),
    (end_a_relay, SLOW, HEALED_SLOWLY_S),
    (freeze_a_relay, Weather(), NOTICED_S + HEALED_S),
    (freeze_a_relay, SLOW, NOTICED_S + HEALED_SLOWLY_S),
]
"""The fault, the weather, and the longest time without a delivery. A seed modulo 8 is its case."""


def longest_silence(seed: int, fault: Fault, weather: Weather) -> float:
    rng = random.Random(seed)
    count = rng.choice((6, 9, 12, 16))
    world = World(count, random_edges(count, rng), seed, weather)
    world.run_until(world.is_stable, 60.0)
    depths = world.members[0].member.routes.tree(node_id(0)).depths
    if max(depths.values()) < 2:
        # Without a relay it tells nothing.
        return longest_silence(seed + 10_000, fault, weather)
    last = int.from_bytes(max(depths, key=lambda node: (depths[node], node)), "big")
    world.members[last].subscribe("t")
    world.run(1.0 + rng.random())
    ids = []
    begun = world.now
    is_done = False
    while world.now < begun + 3.5:
        if not is_done and world.now >= begun + 0.5:
            is_done = True
            found = world.members[0].member.routes.paths(node_id(0), node_id(last))[0]
            fault(world, [int.from_bytes(node, "big") for node in found])
        id = world.publish(0, "t", rng.choice((1, 2)))
        assert id is not None
        ids.append(id)
        world.run(EVERY_S)
    world.run(2.0)
    assert not [id for id in ids if last not in world.arrivals[id]]
    times = sorted(world.arrivals[id][last] for id in ids)
    return max(later - earlier for earlier, later in pairwise(times))


@pytest.mark.parametrize(
    ("seed", "weather", "healed_s"),
    [(1989483553, Weather(), HEALED_S), (1989483466, SLOW, HEALED_SLOWLY_S)],
)
def test_the_second_path_leads_through_the_frozen_relay_too(
    seed: int, weather: Weather, healed_s: float
) -> None:
    silence_s = longest_silence(seed, freeze_a_relay, weather)
    assert NOTICED_S < silence_s < NOTICED_S + healed_s


def heal(seed: int) -> None:
    fault, weather, limit_s = CASES[seed % len(CASES)]
    silence_s = longest_silence(seed, fault, weather)
    assert silence_s < limit_s, f"{silence_s:.3f} s"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", range(len(CASES)))
def test_messages_go_another_way_soon(block: int) -> None:
    run_seeds(block_of_seeds(block, len(CASES), SEEDS), heal)
