"""An operator who changes the cluster while it works: drains nodes, takes that back, removes them
and lets them join again with an empty disk, and moves the leaders back. As `holdfast cluster` does
it, through whichever node answers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.node.metadata import operations
from holdfast.node.metadata.commands import Command
from holdfast.node.metadata.model import ClusterMetadata, NodePhase
from holdfast.node.metadata.operations import OperationError

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.process import Process
    from tests.sim.world import World

LOOK_S: Final = 0.05
Operation = Callable[[ClusterMetadata], Command | None]


class Operator:
    """At most one node at a time is drained or removed."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._chance = world.schedule.chance("operator")
        # A stream of its own: lives without zones are the same as before.
        self._pauses = world.schedule.chance("pauses")
        self._is_looking = False
        self._is_over = False
        # The node that is drained, and whether it is to be removed.
        self._drained: Host | None = None
        self._is_removing = False
        self._gives_up_at = 0.0
        self._has_resized = False

    @property
    def is_busy(self) -> bool:
        return self._drained is not None

    def strike(self, host: "Host") -> None:
        """Do something, to this node perhaps."""
        self._begin()
        if self._world.settings.zones and self._pauses.random() < 0.3:
            self._note("pause or resume moves")
            self._propose(lambda metadata: operations.pause(metadata, not metadata.is_paused))
        elif self._chance.random() < 0.3:
            self._note("rebalance")
            self._propose(operations.rebalance)
        elif self._drained is None and self._world.newest_metadata() is not None:
            self._drained = host
            self._is_removing = self._chance.random() < 0.5
            self._gives_up_at = self._world.schedule.now + self._chance.random() * 4
            self._note(f"drain {host.name}")
            self._propose(lambda metadata: operations.drain(metadata, host.name))

    def _begin(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._look()

    def begin_resizes(self) -> None:
        """A cluster that begins as one node grows with its nodes until it is resized."""
        self._has_resized = True
        self._begin()
        if self._world.settings.begins_alone:
            self._note("resize auto")
            self._propose(lambda metadata: operations.resize(metadata, is_automatic=True))

    def resize(self) -> None:
        """Want some replication, whether the cluster can have it or not."""
        factor = self._chance.randrange(5)
        least = self._chance.randrange(1 + (factor or 3))
        is_automatic = self._chance.random() < 0.4
        self._note("resize auto" if is_automatic else f"resize {factor} {least}")
        self._propose(
            lambda metadata: (
                operations.resize(metadata, is_automatic=True)
                if is_automatic
                else operations.resize(metadata, factor, least)
            )
        )

    def end(self) -> None:
        """Everybody is to be back."""
        self._is_over = True

    def _note(self, text: str) -> None:
        self._world.schedule.note("operator", text)

    def _via(self) -> "Process | None":
        processes = [
            host.process
            for host in self._world.hosts.values()
            if host.process is not None
            and not host.is_paused
            and host.process.cluster_node.context.metadata is not None
        ]
        return self._chance.choice(processes) if processes else None

    def _propose(self, make: Operation) -> None:
        process = self._via()
        if process is None:
            return
        metadata = process.cluster_node.context.metadata
        assert metadata is not None
        try:
            command = make(metadata)
        except OperationError as error:
            self._note(f"is refused: {error}")
            return
        if command is not None:
            process.touch()
            process.proposals.add(process.cluster_node.meta.propose(command, process.state.now))

    def _look(self) -> None:
        self._world.schedule.after(LOOK_S, self._look)
        metadata = self._world.newest_metadata()
        if metadata is None:
            return
        if self._is_over and self._has_resized:
            self._resize_back(metadata)
        if self._is_over and metadata.is_paused:
            self._propose(lambda metadata: operations.pause(metadata, False))
        # What was asked for may be done much later.
        for host in self._world.hosts.values():
            info = metadata.nodes.get(host.name)
            if host.was_removed(metadata):
                self._join_again(host)
            elif info is None:
                # On its way in.
                continue
            elif info.state == NodePhase.DRAINING:
                self._go_on(host)
            elif host is self._drained and self._world.schedule.now > self._gives_up_at:
                self._drained = None

    def _resize_back(self, metadata: ClusterMetadata) -> None:
        wanted = self._world.settings.replication(len(self._world.data_hosts))
        if metadata.wanted_replication != wanted:
            self._propose(lambda metadata: operations.resize(metadata, *wanted))

    def _go_on(self, host: "Host") -> None:
        """The node is being drained."""
        if self._is_removing and host is self._drained and not self._is_over:
            self._remove(host)
        elif self._is_over or self._world.schedule.now > self._gives_up_at:
            self._note(f"undrain {host.name}")
            self._propose(lambda metadata: operations.undrain(metadata, host.name))

    def _remove(self, host: "Host") -> None:
        process = self._via()
        if process is None:
            return
        metadata = process.cluster_node.context.metadata
        assert metadata is not None
        try:
            operations.remove(metadata, host.name)
        except OperationError:
            return
        self._note(f"remove {host.name}")
        process.touch()
        process.proposals.add(process.cluster_node.meta.remove(host.name, process.state.now))

    def _join_again(self, host: "Host") -> None:
        self._note(f"{host.name} was removed")
        host.kill(power=True)
        host.wipe()
        if host is self._drained:
            self._drained = None
        self._world.schedule.after(0.05 + self._chance.random() * 2, host.start)
