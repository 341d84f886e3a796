"""What a seed's run is like: how many nodes, which faults, how dense."""

import random

from holdfast.sim.faults import ALL, NETWORK, PROCESSES
from holdfast.sim.world import Settings


def settings_for(
    seed: int, nodes: int = 0, faults: tuple[str, ...] | None = None, duration_s: float = 6.0
) -> Settings:
    """`nodes` 0, `faults` None: as the seed has it."""
    chance = random.Random(f"plan/{seed}")
    count = nodes or chance.choice((3, 3, 3, 5))
    if faults is None:
        faults = chance.choice((ALL, ALL, PROCESSES, NETWORK, ("pause",), ("reset", "kill")))
    min_insync = 2 if "wipe" in faults else chance.choice((1, 2))
    return Settings(
        nodes=count,
        replication_factor=3,
        min_insync=min_insync,
        faults=faults,
        mean_s=chance.choice((0.4, 1.0, 2.0)),
        duration_s=duration_s,
        turn_s=chance.choice((0.0002, 0.001, 0.004)),
        outbox_messages=chance.choice((5, 30, 1000)),
        snapshot_s=chance.choice((0.7, 3.0, 1000.0)),
        segment_bytes=chance.choice((8 << 10, 64 << 10)),
        retention_bytes=chance.choice((0, 8 << 10)),
    )
