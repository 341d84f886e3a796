"""A data directory that a command makes: it is complete, or recognisably not.

The files are made under another name, with the ending of the command, and get the right one at the
end. A mount point cannot get another name. There the files are made in a folder inside it, and then
moved out of it, `manifest.json` last, because nothing serves a directory without it.
"""

import shutil
from pathlib import Path
from types import TracebackType
from typing import Final

from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import MANIFEST

OF_FILE_SYSTEM: Final = "lost+found"
"""The folder that a new file system has."""


class NotEmpty(Exception):
    """The directory has files already. The text names it."""


class NewDirectory:
    """A directory that does not exist yet, or is empty. As a context manager it removes what is not
    complete."""

    def __init__(self, target: Path, ending: str) -> None:
        """Prepares the target. Raises `NotEmpty` for files that no interrupted command has left."""
        # A link keeps its name, and gets what it points to.
        self.target = target.resolve()
        self._is_mount = self.target.is_mount()
        name = ending if self._is_mount else f"{self.target.name}{ending}"
        self.partial = (self.target if self._is_mount else self.target.parent) / name
        """The place of the files until they are complete."""
        if target.exists():
            left = {OF_FILE_SYSTEM, ending} if self._is_mount else set()
            if not target.is_dir() or {each.name for each in target.iterdir()} - left:
                raise NotEmpty(f"{target} is not empty: move it away, or give another directory")

    def __enter__(self) -> Path:
        """Removes what is left of an interrupted command, and returns the place for the files."""
        if self.partial.exists():
            shutil.rmtree(self.partial)
        return self.partial

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives the files their place, durably; after an error remove them."""
        if error is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
        elif self._is_mount:
            self._move_out()
        else:
            if self.target.exists():
                self.target.rmdir()
            self.partial.rename(self.target)
            OsFileSystem(self.target.parent).sync_folder("")

    def _move_out(self) -> None:
        files = OsFileSystem(self.target)
        names = [each.name for each in self.partial.iterdir() if each.name != MANIFEST]
        for name in (*sorted(names), MANIFEST):
            if name == MANIFEST:
                files.sync_folder("")
            (self.partial / name).rename(self.target / name)
        files.sync_folder("")
        self.partial.rmdir()
        files.sync_folder("")
