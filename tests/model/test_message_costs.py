"""The turns, frames and disk writes that one message costs, in the simulator without chance.

The counts are exact and depend on no machine, so they are upper bounds that only fall. Each message
is alone, or follows the one before after a millisecond. The turns, frames and writes of the cluster
at rest, counted before, are subtracted.
"""

from collections import Counter
from dataclasses import dataclass

import pytest

from holdfast.log.journal.segment import WriteGroup
from tests.sim.host import Host
from tests.sim.network import Item
from tests.transcripts.actors import Peer
from tests.transcripts.commands import Director
from tests.transcripts.frames import NAMES
from tests.transcripts.stage import ONE, THREE, Setup, Stage

MESSAGES = 40
ALONE_S = 0.03
"""The time between two messages of which each is alone."""
FAST_S = 0.001
BEATS = ("HEARTBEAT", "POSITION", "RAFT")
"""The frames whose number depends on time alone."""


@dataclass
class Costs:
    """The counts of a message, without those of the time that it takes."""

    turns: float
    frames: float
    writes: float


class Counts:
    """Counts what all nodes of a stage do."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.turns = 0
        self.frames: Counter[str] = Counter()
        self.writes = 0
        stage.on_turn = self._count_turn
        stage.on_push(self._count_frame)
        for host in stage.hosts.values():
            assert host.process is not None
            self._watch_disk(host)

    def _count_turn(self, host: Host) -> None:
        self.turns += 1

    def _count_frame(self, source: str, target: str, item: Item) -> None:
        assert not isinstance(item, str), "a link was lost"
        self.frames[NAMES.get(item[0], str(item[0]))] += 1

    def _watch_disk(self, host: Host) -> None:
        assert host.process is not None
        disk = host.process.disk
        submit = disk.submit

        def count(group: WriteGroup) -> None:
            self.writes += 1
            submit(group)

        disk.submit = count  # type: ignore[method-assign]

    def run(self, messages: int, gap_s: float, play: Director | None) -> Costs:
        """The costs of a message. `play`: None: time passes without messages."""
        self.turns = self.writes = 0
        self.frames.clear()
        for _ in range(messages):
            if play is not None:
                play.play("publish p t x q1 &")
            self._stage.schedule.run(gap_s)
        frames = sum(count for kind, count in self.frames.items() if kind not in BEATS)
        return Costs(self.turns / messages, frames / messages, self.writes / messages)


def stage_of(nodes: int) -> Stage:
    """Nodes with one partition, which n1 leads."""
    stage = Stage(ONE if nodes == 1 else THREE, Setup(nodes=nodes, partitions=1))
    metadata = stage.newest_metadata()
    assert metadata is not None and metadata.partitions[0].leader == "n1"
    return stage


def costs_of(nodes: int, publisher: str, subscriber: str, gap_s: float) -> Costs:
    """The costs of a message of one partition, which n1 leads."""
    stage = stage_of(nodes)
    director = Director(stage, lambda peer, direction, line: None)
    director.play(f"connect p clean at={publisher}")
    if subscriber:
        director.play(f"connect s clean at={subscriber}")
        director.play("subscribe s t@1")
    director.play("wait 1")
    counts = Counts(stage)
    rest = counts.run(MESSAGES, gap_s, None)
    spent = counts.run(MESSAGES, gap_s, director)
    return Costs(
        spent.turns - rest.turns, spent.frames - rest.frames, spent.writes - rest.writes
    )


@pytest.mark.parametrize(
    ("nodes", "publisher", "subscriber", "turns", "frames", "writes"),
    [
        # The publish and the end of the disk write; the PUBACK of the subscriber.
        (1, "n1", "", 2, 0, 1),
        (1, "n1", "n1", 3, 0, 1),
        # At the leader the publish and two acknowledgements, at each follower the batch, the end of
        # its disk write and the commit. The leader's own disk causes no turn.
        (3, "n1", "", 9, 6, 3),
        (3, "n1", "n2", 10, 6, 3),
        (3, "n2", "n3", 11, 7, 3),
        # Two nodes store nothing of the message, and get a mark.
        (5, "n1", "n5", 12, 8, 3),
    ],
)
def test_a_message_alone_costs_no_more_than_it_needs(
    nodes: int, publisher: str, subscriber: str, turns: int, frames: int, writes: int
) -> None:
    spent = costs_of(nodes, publisher, subscriber, ALONE_S)
    # Timers of the second are in both counts, but not equally often.
    assert spent.turns <= turns + 0.2
    assert spent.frames <= frames
    assert spent.writes <= writes


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_slow_disk_delays_the_puback_by_no_more_than_its_write(node: str) -> None:
    # The acknowledgements of the followers arrive before the leader's own disk has the record, or
    # the other way round. Nothing else happens before the next heartbeat, after 100 ms at most.
    stage = stage_of(3)
    host = stage.hosts[node]
    came: list[float] = []

    def told(peer: Peer, direction: str, line: str) -> None:
        if line.startswith("PUBACK"):
            came.append(stage.schedule.now)

    director = Director(stage, told)
    director.play("connect p clean at=n1")
    host.slow_s = 0.02
    for _ in range(10):
        began = stage.schedule.now
        director.play("publish p t x q1 &")
        stage.schedule.run(0.037)
        write_s = host.sync_s()
        assert came and came.pop() - began < write_s + 0.004
