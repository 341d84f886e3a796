"""The turns, frames and disk writes that one message costs, in the simulator without chance.

The counts are exact and depend on no machine, so they are upper bounds that only fall. Each message
is alone, or in a stream in which each is done before the next one. The turns, frames and writes of
the cluster at rest, counted before, are subtracted.
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
STREAM_S = 0.004
"""The same where the next message comes soon."""
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
    assert metadata is not None
    assert metadata.partitions[0].leader == "n1"
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
    return Costs(spent.turns - rest.turns, spent.frames - rest.frames, spent.writes - rest.writes)


@pytest.mark.parametrize(
    ("nodes", "publisher", "subscriber", "gap_s", "turns", "frames", "writes"),
    [
        # The publish and the end of the disk write; the PUBACK of the subscriber.
        (1, "n1", "", ALONE_S, 2, 0, 1),
        (1, "n1", "n1", ALONE_S, 3, 0, 1),
        # At the leader the publish and two acknowledgements, at each follower the batch, the end of
        # its disk write and the commit. The leader's own disk causes no turn.
        (3, "n1", "", ALONE_S, 9, 6, 3),
        (3, "n1", "n2", ALONE_S, 10, 6, 3),
        (3, "n2", "n3", ALONE_S, 11, 7, 3),
        # Two nodes store nothing of the message, and get a mark.
        (5, "n1", "n5", ALONE_S, 12, 8, 3),
        # A commit that a node does not need at once comes with the next batch.
        (3, "n1", "", STREAM_S, 7, 6, 3),
        (3, "n1", "n2", STREAM_S, 8, 6, 3),
        # Both followers need it: one has the publisher, the other one the subscriber.
        (3, "n2", "n3", STREAM_S, 10, 7, 3),
        (5, "n1", "n5", STREAM_S, 9, 7, 3),
    ],
)
def test_a_message_costs_no_more_than_it_needs(
    nodes: int,
    publisher: str,
    subscriber: str,
    gap_s: float,
    turns: int,
    frames: int,
    writes: int,
) -> None:
    spent = costs_of(nodes, publisher, subscriber, gap_s)
    # Timers of the second are in both counts, but not equally often.
    assert spent.turns <= turns + 0.2
    assert spent.frames <= frames + 0.1
    assert spent.writes <= writes


class Stopwatch:
    """Measures the time from each publish to its last line with a given begin."""

    def __init__(self, stage: Stage, awaited: tuple[str, ...]) -> None:
        self._stage = stage
        self._awaited = awaited
        self._came: set[str] = set()
        self.last_at = 0.0
        self.director = Director(stage, self._told)

    def _told(self, peer: Peer, direction: str, line: str) -> None:
        word = line.split()[0]
        if direction == "<" and word in self._awaited:
            self._came.add(word)
            self.last_at = self._stage.schedule.now

    def publish(self, gap_s: float) -> float:
        """The time in seconds until all has come, within `gap_s`."""
        self._came.clear()
        began = self._stage.schedule.now
        self.director.play("publish p t x q1 &")
        self._stage.schedule.run(gap_s)
        assert self._came == set(self._awaited)
        return self.last_at - began


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_slow_disk_delays_the_puback_by_no_more_than_its_write(node: str) -> None:
    # The acknowledgements of the followers arrive before the leader's own disk has the record, or
    # the other way round. Nothing else happens before the next heartbeat, after 100 ms at most.
    stage = stage_of(3)
    stopwatch = Stopwatch(stage, ("PUBACK",))
    stopwatch.director.play("connect p clean at=n1")
    stage.hosts[node].slow_s = 0.02
    for _ in range(10):
        assert stopwatch.publish(0.037) < stage.hosts[node].sync_s() + 0.004


@pytest.mark.parametrize(
    ("publisher", "subscriber"), [("n1", "n2"), ("n2", "n1"), ("n2", "n3"), ("n4", "n5")]
)
def test_no_client_waits_for_a_commit_that_is_held_back(publisher: str, subscriber: str) -> None:
    # Of the nodes that get no commit at once, none has the publisher or the subscriber.
    stage = stage_of(5 if publisher == "n4" else 3)
    stopwatch = Stopwatch(stage, ("PUBACK", "PUBLISH"))
    stopwatch.director.play(f"connect p clean at={publisher}")
    stopwatch.director.play(f"connect s clean at={subscriber}")
    stopwatch.director.play("subscribe s t@1")
    for _ in range(40):
        assert stopwatch.publish(0.0061) < 0.006
