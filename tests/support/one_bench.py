"""A `NodeBench` whose node is a cluster of one: the simulator's process, with its disk and its
recovery. The test still decides when the disk is done, and when it crashes."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Final

from holdfast.broker.config import NodeConfig
from holdfast.broker.effects import Effect, ResumeInput
from holdfast.broker.node import Node
from holdfast.broker.session.connection import Connection
from holdfast.storage.journal.journal import Journal
from holdfast.storage.record import Record
from tests.sim.process import Process
from tests.support.node_bench import NodeBench, Peer
from tests.transcripts.stage import ONE, Setup, Stage

TURN_S: Final = 0.0004
"""A turn ends within it, and no write does."""
DISK_S: Final = 0.05
"""The time in which what is appended is on the disk and folded."""
SLOW_S: Final = 0.1
"""A write takes a part of it more."""
READY_S: Final = 10.0


class OneBench(NodeBench):
    """Whatever is called between two runs belongs to one turn, which has begun."""

    stage: Stage

    def _boot(
        self,
        batches: Iterable[bytes],
        snapshot: list[tuple[int, bytes]] | None = None,
        offsets: list[int] | None = None,
    ) -> None:
        config = {each.name: getattr(self.config, each.name) for each in fields(NodeConfig)}
        self.commits_connects = False
        self.stage = Stage(ONE, Setup(node=config, partitions=self.config.partitions))
        self.stage.hosts["n1"].slow_s = SLOW_S
        self._begin()

    @property
    def node(self) -> Node:
        return self.process.node

    @property
    def journal(self) -> Journal:
        return self.process.journal

    @property
    def process(self) -> Process:
        process = self.stage.hosts["n1"].process
        assert process is not None
        return process

    def _serves(self) -> bool:
        return self.process.is_ready and self.process.state.cluster.has_groups()

    def _begin(self) -> None:
        process = self.process
        process.flush = self._flush  # type: ignore[method-assign]
        process.carry_out = self._carry  # type: ignore[method-assign]
        process.touch()
        self.now, self.wall_us = self.node.state.now, self.node.state.wall_us

    def _flush(self, dirty: list[Connection]) -> None:
        for connection in dirty:
            connection.dirty = False
            peer = connection.transport
            if not isinstance(peer, Peer):
                continue
            data = b"".join(connection.out or ())
            connection.out = None
            connection.out_bytes = 0
            peer.deliver(data)
            if connection.closing:
                peer.closed = True
                connection.transport = None
                self.process.later(0.0, lambda: self._lost(connection))  # noqa: B023

    def _lost(self, connection: Connection) -> None:
        self.process.touch()
        self.node.handle_disconnected(connection)

    def _carry(self, effect: Effect) -> None:
        if isinstance(effect, ResumeInput) and effect.connection.transport is not None:
            self.node.handle_resumed(effect.connection)

    def run(self) -> None:
        self.stage.schedule.run(TURN_S)
        if self.auto_commit:
            self.settle()
        self._begin()

    def commit(self) -> None:
        self.stage.schedule.run(DISK_S)
        self._begin()

    def settle(self) -> None:
        """Run until nothing waits for the disk."""
        state = self.node.state
        self.commit()
        while self.journal.pending_bytes or state.delivered != self.journal.next_offset:
            self.commit()

    def advance(self, seconds: float) -> None:
        self.stage.schedule.run(seconds)
        self._begin()

    def crash(self, *, keep_uncommitted: bool = False, **_: object) -> None:  # type: ignore[override]
        """Kill the process, or with it the machine, and start it again."""
        host = self.stage.hosts["n1"]
        host.kill(power=not keep_uncommitted)
        self.stage.start("n1")
        self.stage.schedule.run_until(self._serves, READY_S)
        self._begin()

    def records(self) -> list[Record]:
        return [record for partition in self.stage.log() for record in partition]
