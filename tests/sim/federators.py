"""The federators of one member: each node that believes it runs the member begins a start and
stores values. What a federator was told is stored stays, whatever fails."""

from typing import TYPE_CHECKING, Final

from holdfast.node import federation_session as federating
from holdfast.node.state.member_values import IDENTITY
from tests.sim.workload import Party

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.world import World

KEYS: Final = (b"a", b"b", b"c")
STUBBORN: Final = 0.7
"""The share of federators that go on although their node does not run the member any more."""


class _Run:
    """One start at one process."""

    def __init__(self, start: int, token: bytes) -> None:
        self.start = start
        self.token = token
        self.is_begun = False
        self.is_over = False
        self.is_waiting = True


class Federators(Party):
    """It has no client. Values are numbers that grow, in the order in which they are stored."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.chance = world.schedule.chance("federators")
        self.is_active = False
        self.stored: dict[bytes, int] = {}
        """By key, the newest number that its federator was told is stored."""
        self.begun: dict[int, bytes] = {}
        """The starts that began, with their tokens."""
        self._runs: dict[Process, _Run] = {}
        self._number = 0
        world.schedule.after(0.1, self._look)

    def is_ready(self) -> bool:
        return True

    def _look(self) -> None:
        self.world.schedule.after(0.01 + self.chance.random() * 0.05, self._look)
        for host in self.world.data_hosts:
            process = host.process
            if process is not None and process.is_ready and not host.is_paused and self.is_active:
                self._work(process)

    def _work(self, process: "Process") -> None:
        process.touch()
        state = process.state
        run = self._runs.get(process)
        is_here = process.cluster_node.member.node(state.now) == state.config.node_id
        if run is not None and not is_here and self.chance.random() > STUBBORN:
            run.is_over = True
        if run is not None and run.is_over:
            del self._runs[process]
        elif run is None and is_here:
            self._number += 1
            run = _Run(process.images.state.member.start + 1, b"%d" % self._number)
            self._runs[process] = run
            self._store(process, run, IDENTITY, run.token)
        elif run is not None and not run.is_waiting:
            self._number += 1
            self._store(process, run, self.chance.choice(KEYS), b"%d" % self._number)

    def _store(self, process: "Process", run: _Run, key: bytes, value: bytes) -> None:
        run.is_waiting = True
        values = process.images.state.member.values

        def done(is_stored: bool) -> None:
            if not is_stored or values.get(IDENTITY) != run.token:
                run.is_over = True
                return
            run.is_waiting = False
            if key != IDENTITY:
                self.stored[key] = max(self.stored.get(key, 0), int(value))
            elif self.begun.setdefault(run.start, run.token) != run.token:
                self.world.checks.fail(f"start {run.start} began twice")

        federating.store_values(process.state, run.start, [(key, value)], done)

    def check(self) -> None:
        for host in self.world.data_hosts:
            assert host.process is not None
            member = host.process.images.state.member
            for key, number in self.stored.items():
                found = int(member.values.get(key, b"0"))
                if found < number:
                    self.world.checks.fail(f"{host.name} has {found} under {key!r}, not {number}")
            if self.begun and member.start < max(self.begun):
                self.world.checks.fail(f"{host.name} is in start {member.start}")
