"""What a seed's run is like: how many nodes, who plays, which faults, how dense."""

import random
from dataclasses import replace
from typing import Final

from tests.sim.casts import (
    CASTS,
    DEVICES,
    FEDERATORS,
    GROUPS,
    LEAVERS,
    LOG,
    QOS0,
    QUEUES,
    RETAINED,
    SCHEDULED,
    TIMED,
    TRAVELLERS,
)
from tests.sim.faults import (
    ALL,
    DAMAGE,
    DECAY,
    DISKS,
    FULL_DISK,
    GO_BACK,
    HANG_DISK,
    HOSTILE,
    ISOLATE,
    KILL,
    LAG,
    LASTING,
    LEAVE,
    NETWORK,
    OPERATE,
    PAUSE,
    POWER,
    PROCESSES,
    RESET,
    RESIZE,
    SEVER,
    SKEW,
    WIPE,
)
from tests.sim.world import Settings

FAULTS: Final = (
    ALL, ALL, PROCESSES, NETWORK, DISKS, (PAUSE,), ("reset", KILL), (OPERATE, LEAVE, KILL), HOSTILE,
    DECAY,
)  # fmt: skip
PLAYING: Final = ((LOG,), (LOG,), (LOG, QOS0), (TIMED,), (GROUPS,), (LOG, TIMED), CASTS)
ALSO_PLAYING: Final = ((QUEUES,), (SCHEDULED,), (GROUPS, QUEUES), (LOG, SCHEDULED, TRAVELLERS))
"""In a quarter of the seeds, instead of the others."""
LEAVING: Final = ((SEVER, KILL), (LAG, KILL), (LAG, RESET, KILL), (SEVER, LAG), (RESET, KILL))
"""The faults of the seeds with LEAVERS, which are a tenth of all, instead of the others."""
RESIZING: Final = (
    (RESIZE, KILL), (RESIZE, ISOLATE, RESET), (RESIZE, OPERATE, KILL), (RESIZE, LEAVE, POWER),
    (RESIZE, PAUSE, KILL), (RESIZE, HANG_DISK, FULL_DISK),
)  # fmt: skip
"""The faults of the seeds in which the replication changes, which are a tenth of all. In half of
them the cluster begins as one node."""
DEVICES_PLAY: Final = 0.4
FEDERATORS_PLAY: Final = 0.1
"""In so many of the seeds, beside the others."""
SLICED: Final = 0.2
"""In so many of the seeds each slice of a large job has 1 to 3 steps."""
IN_MEMORY: Final = 0.15
"""In so many of the seeds without the loss of a disk, records count before they are synced."""
GATHERING: Final = 0.15
"""In so many of the seeds records may wait for others."""
REMOTE_READS: Final = 0.2
"""In so many of the seeds nodes read a part of the log at others."""
ZONED: Final = 0.3
"""In so many of the seeds the nodes are in zones."""
PAIRS: Final = 0.1
"""In so many of the seeds two nodes play, of which one votes."""
FED: Final = 0.25
"""In so many of the fresh seeds there are gateways, or nodes that store a part of the log."""
RETAINED_PLAY: Final = 0.1
"""In so many of the fresh seeds, beside the others."""
TIMED_SKEW_S: Final = 0.02
"""Where times are looked at, but for runs in which clocks are moved."""


def settings_for(
    seed: int,
    nodes: int = 0,
    faults: tuple[str, ...] | None = None,
    duration_s: float = 6.0,
    casts: tuple[str, ...] | None = None,
    gateways: int = 0,
) -> Settings:
    """`nodes` 0, `faults` and `casts` None: as the seed has it."""
    chance = random.Random(f"plan/{seed}")
    count = nodes or chance.choice((3, 3, 3, 5))
    if not nodes and random.Random(f"pairs/{seed}").random() < PAIRS:
        count = 2
    is_planned = faults is None
    if faults is None:
        faults = chance.choice(FAULTS)
    is_wiped = WIPE in faults or GO_BACK in faults or DAMAGE in faults
    min_insync = 2 if is_wiped else chance.choice((1, 2))
    mean_s = chance.choice((0.4, 1.0, 2.0))
    turn_s = chance.choice((0.0002, 0.001, 0.004))
    outbox_messages = chance.choice((5, 30, 1000))
    snapshot_s = chance.choice((0.7, 3.0, 1000.0))
    segment_bytes = chance.choice((8 << 10, 64 << 10))
    retention_bytes = chance.choice((0, 8 << 10))
    if casts is None:
        casts = chance.choice(PLAYING)
        # A stream of its own: the other seeds are the same runs as before.
        also = random.Random(f"casts/{seed}")
        if also.random() < 0.25:
            casts = also.choice(ALSO_PLAYING)
        leaving = random.Random(f"leavers/{seed}")
        if is_planned and leaving.random() < 0.1:
            casts, faults = (LEAVERS,), leaving.choice(LEAVING)
        resizing = random.Random(f"resizing/{seed}")
        if is_planned and LEAVERS not in casts and resizing.random() < 0.1:
            faults = resizing.choice(RESIZING)
        for cast, share in ((DEVICES, DEVICES_PLAY), (FEDERATORS, FEDERATORS_PLAY)):
            if random.Random(f"{cast}/{seed}").random() < share:
                casts = (*casts, cast)
    has_witness = nodes == 0 and count == 3 and chance.random() < 0.25
    loses_one = chance.random() < 0.25
    if DAMAGE in faults:
        # The disk of another node may have lost something that nobody has read.
        loses_one = False
        segment_bytes = 8 << 10
        # A start replays everything, and so finds it.
        snapshot_s = 1000.0
    reserve_bytes = chance.choice((0, 1500))
    is_resized = RESIZE in faults
    durable = is_wiped or is_resized or random.Random(f"memory/{seed}").random() >= IN_MEMORY
    if count == 2:
        # The other one has no majority without the one that votes.
        loses_one = False
    if has_witness and loses_one:
        # One of two is left.
        min_insync = 1
        loses_one = durable and not is_wiped
    # A node that is alone has everything, and nobody to ask.
    begins_alone = is_resized and random.Random(f"alone/{seed}").random() < 0.5
    zones = random.Random(f"zones/{seed}")
    slices = random.Random(f"slices/{seed}")
    slice_steps = slices.randint(1, 3) if slices.random() < SLICED else 0
    return Settings(
        slice_steps=slice_steps,
        durable=durable,
        gathers=random.Random(f"gathers/{seed}").random() < GATHERING,
        nodes=count,
        gateways=gateways,
        zones=zones.choice((2, 3, 3, count)) if zones.random() < ZONED else 0,
        replication_factor=3,
        min_insync=2 if is_wiped or not durable else min_insync,
        has_witness=has_witness,
        casts=casts,
        faults=faults,
        mean_s=mean_s,
        duration_s=duration_s,
        turn_s=turn_s,
        outbox_messages=outbox_messages,
        snapshot_s=snapshot_s,
        segment_bytes=segment_bytes,
        reserve_bytes=reserve_bytes,
        retention_bytes=retention_bytes,
        skew_s=TIMED_SKEW_S if {TIMED, DEVICES} & {*casts} and SKEW not in faults else 1.0,
        loses_one=loses_one,
        reads_remotely=not begins_alone and random.Random(f"remote/{seed}").random() < REMOTE_READS,
        begins_alone=begins_alone,
    )


def widened(seed: int, settings: Settings) -> Settings:
    """The same, with nodes that do not store all of the log, and readers of retained messages. The
    seeds that tests know are played without."""
    chance = random.Random(f"wide/{seed}")
    if chance.random() < RETAINED_PLAY:
        settings = replace(settings, casts=(*settings.casts, RETAINED))
    is_alone = settings.begins_alone or settings.nodes == 2
    if chance.random() >= FED or is_alone or settings.reads_remotely:
        return settings
    settings = replace(settings, gateways=chance.choice((0, 1, 1, 2)), loses_one=False)
    keeps_disks = settings.durable and not {WIPE, GO_BACK, DAMAGE, *LASTING} & {*settings.faults}
    if not keeps_disks or settings.has_witness:
        return settings
    factor = chance.choice((1, 2, 2, 3))
    return replace(settings, replication_factor=factor, min_insync=min(settings.min_insync, factor))
