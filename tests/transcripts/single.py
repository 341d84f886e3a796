"""The process of a single broker in the simulator: the turns of `holdfast.broker.runtime` over the
production core, on the simulated disk."""

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, cast

from holdfast.broker.effects import Note
from holdfast.broker.node import Node
from holdfast.broker.runtime import Runtime
from holdfast.server.disk.storage import Storage
from holdfast.storage.files.data_directory import create, read_manifest
from holdfast.storage.files.layout import MANIFEST, DataDirectory, Manifest
from tests.sim.host import Host
from tests.sim.loop import EventLoop
from tests.sim.process import Process
from tests.sim.reads import SimReads
from tests.sim.storing import JournalDisk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.transcripts.stage import Stage


class SingleCores:
    """The directory and the journal, as `server/server.py` opens them."""

    def __init__(self, host: Host, owner: object) -> None:
        path = cast("Path", PurePosixPath(host.name))
        if MANIFEST in host.disk.list(""):
            directory = DataDirectory(host.disk, read_manifest(host.disk, path))
        else:
            directory = create(host.disk, Manifest(host.name, host.world.settings.partitions, ""))
        lock = host.disk.lock_as(owner, "lock")
        assert lock is not None
        self.directory = directory
        self.storage = Storage.recover(path, directory, lock, host.world.settings.segment_bytes)


class SingleProcess(EventLoop):
    """The driver of a `Runtime`."""

    def __init__(self, host: Host, number: int) -> None:
        super().__init__(host, number)
        self.cores = SingleCores(host, self)
        storage = self.cores.storage
        self.journal = storage.journal
        self.node: Node = Node(host.world.node_config(host.name), self.journal)
        self.state = self.node.state
        self.state.client_id_prefix = f"auto-{host.name}-{number}-"
        self.node.tick(host.clock(), host.wall_us())
        storage.recover_into(self.state)
        self.disk = JournalDisk(self, self.cores.directory)
        reads = SimReads(self, self.disk, storage.reader)
        self.runtime: Runtime = Runtime(self.node, self.disk, reads, self)
        self.touch()
        self.node.start()

    def turn_ended(self) -> None:
        cast("Stage", self.host.world).on_turn(self.host)

    def noted(self, note: Note) -> None:
        cast("Stage", self.host.world).on_note(self.host, note)

    def leave(self) -> None:
        """A shutdown in good order."""
        self.touch()
        self.node.shut_down("")
        self.later(0.1, self.host.has_left)


class SingleHost(Host):
    """The machine of a single broker."""

    def _new_process(self) -> Process:
        # A machine uses of its process only what an event loop has, while it is alone.
        return cast("Process", SingleProcess(self, self.process_number))
