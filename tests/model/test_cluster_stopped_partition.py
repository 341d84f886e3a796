"""A partition whose invariant does not hold at one node: that node stops it, and only it.

The other nodes go on, with what the node led there, and its clients go to them. It leads and
follows the other partitions as before. A restart reads the log again, and then nothing is missing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from holdfast.log.record import Record
from holdfast.node.replicate.progress import LIVE
from tests.model.test_cluster_put_back import Story
from tests.sim import checks
from tests.sim.process import Process
from tests.sim.world import Settings

SETTINGS = Settings(duration_s=1.0)
LED, APPLIED = "a follower is sent too little", "a record changes what it must not"


@contextmanager
def _planted() -> Iterator[None]:
    """The checks of each turn would find what is planted, and its note ends a run."""
    with (
        patch.object(checks, "IMPOSSIBLE", frozenset({"replica_diverged"})),
        patch.object(checks, "check_invariants", lambda process, turn=0: None),
    ):
        yield


def _plant(process: Process, kind: str) -> int:
    """Spoil the state of a partition that the node leads, and return it."""
    leading = process.cluster_node.replication.leading
    partition = next(each.partition for each in leading.led if each is not None)
    led = leading.led[partition]
    assert led is not None
    if kind == LED:
        progress = next(each for each in led.followers.values() if each.state == LIVE)
        progress.sent -= 1
        return partition
    apply = process.images.apply

    def fail(record: Record) -> None:
        if record.partition == partition:
            raise AssertionError("planted")
        apply(record)

    process.images.apply = fail  # type: ignore[method-assign]
    return partition


@pytest.mark.parametrize("kind", [LED, APPLIED])
@pytest.mark.parametrize("seed", range(3))
def test_one_node_stops_one_partition(seed: int, kind: str) -> None:
    with _planted():
        story = Story(seed, settings=SETTINGS)
        world = story.world
        host = story.host("n1")
        process = host.process
        assert process is not None
        partition = _plant(process, kind)
        others = [
            number
            for number, epoch in enumerate(process.cluster_node.context.leading)
            if epoch and number != partition
        ]
        for party in world.parties:
            party.is_active = True
        story.run(4.0)
        for party in world.parties:
            party.is_active = False

        def unsettled() -> str:
            return next(filter(None, (party.unsettled() for party in world.parties)), "")

        world._wait(20.0, unsettled, "not settled beside the stopped partition")
        assert host.process is process, "the process has ended"
        state = process.state
        assert list(state.stopped) == [f"partition {partition}"]
        assert state.stats.invariants_broken == 1
        assert state.redirect
        assert not any(socket.connection.session for socket in process.sockets.values())
        metadata = world.newest_metadata()
        assert metadata is not None
        assert metadata.partitions[partition].leader not in ("", "n1")
        assert "n1" not in metadata.partitions[partition].in_sync
        for number in others:
            assert "n1" in metadata.partitions[number].in_sync
        host.kill(power=False)
    host.start()
    story.settle()
    assert host.process is not None
    assert not host.process.state.stopped
    world.checks.same_images()
    world.checks.same_sessions()
    for party in world.parties:
        party.check()
