"""The replacement of a cluster node's damaged data directory.

The directory is set aside as soon as the node is in sync nowhere and its vote is not needed, so the
others have everything. It is removed when the node has everything again.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.cluster.metadata.model import ClusterMetadata, NodePhase
from holdfast.server.disk import quarantine as set_aside
from holdfast.server.disk.storage import StorageError
from holdfast.storage.files.data_directory import DataDirectoryError
from holdfast.storage.files.layout import ASIDE

logger = logging.getLogger("holdfast")

POLL_S: Final = 1.0
"""The interval in seconds in which a new node checks whether it has everything."""


class Replacement:
    """Decides once whether the damaged directory is set aside, and removes it afterwards."""

    def __init__(self, root: Path, node_id: str) -> None:
        """Set the directory aside if that was decided, before it is opened.

        Raises `StorageError` if that fails.
        """
        self._root = root
        self._node_id = node_id
        # Set when the directory was marked, or when replacement is impossible.
        self._is_decided = False
        self._is_waiting = False
        try:
            if set_aside.begin_anew(root):
                logger.warning("begins_anew text='the other nodes have what was here'")
            self.has_aside = set_aside.exists(root)
        except (OSError, DataDirectoryError) as error:
            raise StorageError(f"{root}: the damaged log cannot be put aside: {error}") from error

    def step(
        self, metadata: ClusterMetadata | None, is_dispensable: bool, *, has_diverged: bool = False
    ) -> bool:
        """Decide about a damaged or diverged directory; returns True once.

        True means that the process must restart now, so that the directory is set aside.
        `has_diverged`: it contains committed records that the others dropped. `is_dispensable`: see
        `ClusterNode`.
        """
        if self._is_decided:
            return False
        if self.has_aside:
            self._is_decided = True
            logger.critical(
                "disk_damages_again text='what was damaged before is in %s, and this node has not"
                " got everything since: replace the disk, start with an empty directory'",
                self._root / ASIDE,
            )
            return False
        if not is_dispensable:
            self._note_last_copies(metadata)
            return False
        self._is_decided = True
        try:
            set_aside.mark(self._root, keep=has_diverged)
        except OSError as error:
            logger.critical("disk_not_put_aside error=%r", str(error))
            return False
        logger.warning("disk_put_aside to=%s", self._root / ASIDE)
        return True

    def _note_last_copies(self, metadata: ClusterMetadata | None) -> None:
        info = metadata.nodes.get(self._node_id) if metadata is not None else None
        if self._is_waiting or metadata is None or info is None or info.state != NodePhase.DOWN:
            return
        partitions = [
            number for number, one in enumerate(metadata.partitions) if self._node_id in one.in_sync
        ]
        if not partitions:
            # The node's vote alone is still needed.
            return
        self._is_waiting = True
        logger.critical(
            "damaged_last_copy partitions=%s text='they wait until another node that was in sync is"
            " back; to go on without what only this one has: holdfast cluster unsafe-recover with"
            " another node'",
            partitions,
        )

    async def forget_aside(self, metadata: Callable[[], ClusterMetadata | None]) -> None:
        """Wait until the node is in sync wherever it is a replica, then remove what was set
        aside."""
        # Polled, because no event reports each change of an in-sync set.
        while not self._is_in_sync(metadata()):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        try:
            kept = await asyncio.to_thread(set_aside.forget, self._root)
        except OSError as error:
            logger.error("aside_not_removed error=%r", str(error))
            return
        self.has_aside = False
        if kept is not None:
            text = "it has committed records that the others went on without: remove it when read"
            logger.warning("aside_kept directory=%s text=%r", kept, text)
            return
        logger.info("aside_removed text='this node has everything again'")

    def _is_in_sync(self, metadata: ClusterMetadata | None) -> bool:
        partitions = metadata.partitions if metadata is not None else ()
        held = [info for info in partitions if self._node_id in info.replicas]
        return bool(held) and all(self._node_id in info.in_sync for info in held)
