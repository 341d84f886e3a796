"""Founds and reads the metadata of a cluster in a data directory."""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from holdfast.io.disk.raft_files import FOLDER, DamagedRaft, RaftFiles
from holdfast.log.files.filesystem import FileSystem, OsFileSystem
from holdfast.log.files.layout import Manifest
from holdfast.node.metadata.commands import Resize
from holdfast.node.metadata.effects import Persist
from holdfast.node.metadata.model import AUTOMATIC, ClusterMetadata, NodeInfo
from holdfast.node.metadata.state_machine import peer_id
from holdfast.node.metadata.store import MetaStore
from holdfast.node.raft.log import RaftState
from holdfast.node.raft.node import Write

ELECTION_S: Final = 10.0
"""More than an election timeout, on the clock of a store that runs without other nodes."""


def found_cluster(files: FileSystem, manifest: Manifest) -> None:
    """Writes the metadata of a new cluster whose only node is that of the manifest. Its replication
    follows the number of nodes.

    Raises `ValueError` for a name that no node has, and `OSError`.
    """
    member = peer_id(manifest.node_id, manifest.incarnation)
    raft = RaftFiles(files, member, is_new=True)
    try:
        store = _store(manifest, raft.state)
        # The node enters its addresses when it starts.
        node = NodeInfo(manifest.node_id, manifest.incarnation, "", "", "")
        store.create_cluster(manifest.cluster_id, manifest.partitions, *AUTOMATIC[0], node, 0.0)
        _run(store, raft.write)
        store.propose(Resize(0, True, 0, 0), ELECTION_S)
        _run(store, raft.write)
        if store.metadata is None:
            raise ValueError("the cluster cannot be founded")
    finally:
        raft.close()


def read_metadata(root: Path, manifest: Manifest) -> ClusterMetadata | None:
    """The metadata that a stopped node has committed; None if it never joined a cluster.

    Raises `DamagedRaft` and `OSError`. The files stay as they are.
    """
    if not (root / FOLDER).exists():
        return None
    with TemporaryDirectory() as copy:
        # Opening them writes them again.
        shutil.copytree(root / FOLDER, Path(copy) / FOLDER)
        member = peer_id(manifest.node_id, manifest.incarnation)
        raft = RaftFiles(OsFileSystem(Path(copy)), member, is_new=False)
        raft.close()
        store = _store(manifest, raft.state)
        # The only voter of a cluster commits what its log has; others know less than they have.
        _run(store, lambda write: None)
        return store.metadata


def _store(manifest: Manifest, state: RaftState) -> MetaStore:
    return MetaStore(
        manifest.node_id,
        manifest.incarnation,
        state,
        nonce=secrets.token_hex(8),
        random=secrets.SystemRandom().random,
        now=0.0,
    )


def _run(store: MetaStore, write: Callable[[Write], object]) -> None:
    """Carries out what the store wants from its disk, over one election timeout."""
    for now in (0.0, ELECTION_S):
        store.handle_timers(now)
        while store.effects:
            effect = store.effects.pop(0)
            if isinstance(effect, Persist):
                write(effect.write)
                store.persisted(now)


__all__ = ["DamagedRaft", "found_cluster", "read_metadata"]
