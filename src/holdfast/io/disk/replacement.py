"""Keeps a damaged data directory aside until the node has everything again."""

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from holdfast.io.disk import quarantine
from holdfast.io.disk.storage import StorageError
from holdfast.log.files.data_directory import DataDirectoryError
from holdfast.log.files.layout import ASIDE

logger = logging.getLogger("holdfast")

POLL_S: Final = 1.0
"""The interval in seconds in which a new node checks whether it has everything."""
AGAIN_S: Final = 60.0
"""The time in seconds after which it tries again to remove what was set aside."""


class AsideDirectory:
    """Sets the damaged directory aside, and removes it afterwards. When: see
    `node.runtime.replacement`."""

    def __init__(self, root: Path) -> None:
        """Sets the directory aside if that was decided, before it is opened.

        Raises `StorageError` if that fails.
        """
        self._root = root
        try:
            if quarantine.begin_anew(root):
                logger.warning("begins_anew text='the other nodes have what was here'")
            self.path = str(root / ASIDE) if quarantine.exists(root) else ""
            """The directory that was set aside, or ""."""
            self.kept = quarantine.kept(root)
            """The directories of records that the others went on without."""
            for name in self.kept:
                _warn(root / name)
        except (OSError, DataDirectoryError) as error:
            raise StorageError(f"{root}: the damaged log cannot be put aside: {error}") from error

    def mark(self, *, keep: bool) -> bool:
        """Stores the decision; returns False if that fails. The next start sets the directory
        aside. `keep`: it contains committed records that the others dropped."""
        try:
            quarantine.mark(self._root, keep=keep)
        except OSError as error:
            logger.critical("disk_not_put_aside error=%r", str(error))
            return False
        logger.warning("disk_put_aside to=%s", self._root / ASIDE)
        return True

    async def forget(
        self,
        has_everything: Callable[[], bool],
        partitions: Callable[[], Collection[int]],
        generation: Callable[[], int],
    ) -> None:
        """Waits until the node has everything, then removes what was set aside, unless the cluster
        may lack a part of it: see `quarantine.forget`."""
        while True:
            # Polled, because no event reports each change of an in-sync set.
            while not has_everything():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            try:
                kept = await asyncio.to_thread(
                    quarantine.forget, self._root, partitions(), generation()
                )
                break
            except (OSError, DataDirectoryError) as error:
                # Retention may have removed a file of the present log that was being read.
                logger.error("aside_not_removed error=%r", str(error))
            await asyncio.sleep(AGAIN_S)
        self.path = ""
        if kept is not None:
            self.kept = [*self.kept, kept.name]
            _warn(kept)
            return
        logger.info("aside_removed text='this node has everything again'")

    async def follow_kept(self, note: Callable[[list[str]], None]) -> None:
        """Calls `note` with `kept` again and again, and looks for removals while there are any."""
        while True:
            note(self.kept)
            await asyncio.sleep(POLL_S)
            if self.kept:
                self.kept = await asyncio.to_thread(quarantine.kept, self._root)


def _warn(kept: Path) -> None:
    text = (
        "it has records that the others went on without: list or publish them with"
        " `holdfast cluster diverged`, then remove it"
    )
    logger.warning("aside_kept directory=%s text=%r", kept, text)
