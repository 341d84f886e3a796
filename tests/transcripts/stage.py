"""The nodes of a transcript: the simulator without chance.

Every delay is a constant, so a turn more or less in the code does not move all that follows: frames
take 0.35 ms, bytes of clients 0.6 ms, fdatasync 0.5 to 1.1 ms, a turn begins 0.25 ms after its
first input. Only the nodes' constants differ, so that n1 stands for election before n2 and n3.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast.log.batch import Batch
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.effects import Note
from holdfast.security.acl import AclFile
from tests.sim.checks import Checks
from tests.sim.host import EPOCH_US, Host
from tests.sim.network import Item
from tests.sim.process import Process
from tests.sim.schedule import Schedule, Violation
from tests.sim.world import Settings, World

ONE: Final = "one"
THREE: Final = "three"
FORMS: Final = (ONE, THREE)
NODES: Final = {ONE: 1, THREE: 3}

BEGIN_S: Final = 4.0
"""The time of the first command. All nodes are ready long before."""
STEP_S: Final = 0.1
"""The time from one command to the next."""
PARTITIONS: Final = 4
READ_BYTES: Final = 64 << 20


class Steady(random.Random):
    """A stream of one number."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self._value = value

    def random(self) -> float:
        return self._value


class SteadySchedule(Schedule):
    """Virtual time without chance."""

    def chance(self, name: str) -> random.Random:
        """Return one for each of a node `n1` and its second process `n1/2`, because request numbers
        and elections need it."""
        node, _, process = name.partition("/")
        if not node.removeprefix("n").isdigit():
            return Steady(0.5)
        return Steady(0.1 + 0.2 * int(node.removeprefix("n")) + 0.001 * int(process or 0))


class StageChecks(Checks):
    """The checks of the simulator that need no knowledge of the clients."""

    def __init__(self, stage: "Stage", partitions: int) -> None:
        super().__init__(stage, partitions)
        self._stage = stage

    def _take(self, record: Record) -> None:
        """They know of no client that has published it."""

    def turn_ended(self, process: Process) -> None:
        super().turn_ended(process)
        self._stage.on_turn(process.host)

    def noted(self, process: Process, note: Note) -> None:
        super().noted(process, note)
        self._stage.on_note(process.host, note)


@dataclass
class Setup:
    """The lines of a transcript that come before its first command."""

    node: dict[str, Any] = field(default_factory=dict)
    """Fields of `NodeConfig`."""
    acl: list[str] = field(default_factory=list)
    nodes: int = 0
    """0: as the form says."""
    partitions: int = PARTITIONS


class Stage(World):
    """The nodes of one form."""

    def __init__(self, form: str, setup: Setup) -> None:
        self.form = form
        self.setup = setup
        nodes = setup.nodes or NODES[form]
        self.on_turn: Callable[[Host], None] = lambda host: None
        self.on_note: Callable[[Host, Note], None] = lambda host, note: None
        settings = Settings(
            nodes=nodes,
            partitions=setup.partitions,
            replication_factor=min(3, nodes),
            min_insync=min(2, nodes),
            casts=(),
            skew_s=0.0,
            turn_s=0.0005,
            snapshot_s=1e6,
            outbox_messages=NodeConfig().outbox_messages,
        )
        super().__init__(0, settings, SteadySchedule(0))
        self.network.late = 0.0
        for host in self.hosts.values():
            self._start(host)
        self.schedule.advance(BEGIN_S)
        missing = self.not_ready()
        if missing:
            raise Violation(missing)
        self.begin_us = EPOCH_US + int(BEGIN_S * 1e6)

    def _new_checks(self) -> Checks:
        return StageChecks(self, self.settings.partitions)

    def node_config(self, name: str) -> NodeConfig:
        config = NodeConfig(node_id=name, partitions=self.settings.partitions, sys_interval_s=0)
        return replace(config, **self.setup.node)

    def _start(self, host: Host) -> None:
        host.start()
        assert host.process is not None
        if self.setup.acl:
            text = "\n".join(self.setup.acl)
            host.process.state.acl = AclFile.parse(text, "acl")

    def not_ready(self) -> str:
        """The first thing that is missing before clients can connect; "": nothing."""
        metadata = self.newest_metadata()
        if metadata is None or len(metadata.voters) < len(self.hosts):
            return "not all nodes vote"
        return self._not_ready()

    # What happens to nodes

    def start(self, name: str) -> None:
        self._start(self.hosts[name])

    def kill(self, name: str) -> None:
        self.hosts[name].kill(power=False)

    def stop(self, name: str) -> None:
        """In good order."""
        process = self.hosts[name].process
        assert process is not None
        process.leave()

    def on_push(self, work: Callable[[str, str, Item], None]) -> None:
        """Call `work` with sender, receiver and frame when a frame leaves."""
        self.network.on_push = work

    # What is left

    def log(self) -> list[list[Record]]:
        """The committed records of each partition. Every node has the same."""
        logs = {}
        for host in self.hosts.values():
            if host.process is not None:
                logs[host.name] = _log_of(host.process)
        first = next(iter(logs))
        for name, found in logs.items():
            for partition in range(self.settings.partitions):
                mine = [(each.kind, each.payload) for each in logs[first][partition]]
                if mine != [(each.kind, each.payload) for each in found[partition]]:
                    raise Violation(f"{name} has another partition {partition} than {first}")
        return logs[first]

    def check(self) -> None:
        """Check what must hold at the end of every transcript."""
        if any(host.process is None for host in self.hosts.values()):
            return
        missing = self.checks.at_rest()
        if missing:
            raise Violation(missing)
        self.checks.same_images()
        self.checks.same_sessions(without_short_ones=True)


def _log_of(process: Process) -> list[list[Record]]:
    journal = process.journal
    found: list[list[Record]] = []
    for partition, end in enumerate(journal.high_watermark):
        records: list[Record] = []
        start = journal.start_offsets[partition]
        while start < end:
            reader = process.cores.storage.reader
            for data in reader.read_batches(partition, start, end, READ_BYTES):
                batch = Batch(data)
                records += [each for each in batch.records() if each.offset < end]
                start = batch.end_offset
        found.append(records)
    return found
