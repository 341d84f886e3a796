"""Changes of the metadata of a cluster of one node, which is stopped."""

from pathlib import Path

from holdfast.io.disk.raft_files import RaftFiles
from holdfast.log.files.data_directory import open_to_read
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.node.metadata.commands import Command
from holdfast.node.metadata.effects import Persist
from holdfast.node.metadata.model import ClusterMetadata
from holdfast.node.metadata.state_machine import peer_id
from holdfast.node.metadata.store import MetaStore


def agree(directory: Path, command: Command) -> ClusterMetadata:
    """Write a command to the disk of the only voter, and return the metadata with its effect."""
    manifest = open_to_read(directory).manifest
    member = peer_id(manifest.node_id, manifest.incarnation)
    raft = RaftFiles(OsFileSystem(directory), member, is_new=False)
    store = MetaStore(
        manifest.node_id, manifest.incarnation, raft.state, nonce="n", random=lambda: 0.5, now=0.0
    )
    for now in (0.0, 10.0):
        store.handle_timers(now)
        if now:
            store.propose(command, now)
        while store.effects:
            effect = store.effects.pop(0)
            if isinstance(effect, Persist):
                raft.write(effect.write)
                store.persisted(now)
    raft.close()
    assert store.metadata is not None
    return store.metadata
