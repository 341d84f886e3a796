"""The file `backup.json`: the content of a backup. It is written last, so a backup without it is
incomplete.

A data directory that a command makes: it is complete, or recognisably not.

The files are made under another name, with the ending of the command, and get the right one at the
end. A mount point cannot get another name. There the files are made in a folder inside it, and then
moved out of it, `manifest.json` last, because nothing serves a directory without it.
"""

import shutil
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Final

import msgspec

from holdfast.log.files.filesystem import OsFileSystem, replace_file
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


NAME: Final = "backup.json"
FORMAT: Final = 1


class BackupError(Exception):
    """A backup cannot be made or restored. The text names the file and says what to do."""


class BackupFile(msgspec.Struct, frozen=True):
    """One file of a backup."""

    path: str
    """The path below the backup."""
    bytes: int
    """Its length. Of a segment, later bytes do not count."""


class BackupManifest(msgspec.Struct, frozen=True):
    """The content of a backup."""

    format: int
    node_id: str
    kind: str
    """`node`, `pair` for a directory that nodes share, or `replica` of a cluster."""
    cluster_id: str
    began: str
    """The time, ISO 8601. The backup has everything that was acknowledged before."""
    version: str
    """The version of Holdfast that made it."""
    files: list[BackupFile]


def write_manifest(root: Path, manifest: BackupManifest) -> None:
    """Writes the file, durably."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    replace_file(OsFileSystem(root), NAME, [text, b"\n"])


def read_manifest(root: Path) -> BackupManifest:
    """Reads the file, and checks that every file of the backup has its length.

    Raises `BackupError`, which names the file.
    """
    path = root / NAME
    try:
        data = path.read_bytes()
        number = msgspec.json.decode(data, type=_Number).format
        if number != FORMAT:
            raise BackupError(f"{path}: format {number}, this program reads {FORMAT}")
        manifest = msgspec.json.decode(data, type=BackupManifest)
    except (FileNotFoundError, NotADirectoryError):
        why = f"is no backup, or an incomplete one: it has no {NAME}"
        if (root / "lake.json").exists():
            why = f"is a lake: holdfast restore --from-lake {root} DIR"
        raise BackupError(f"{root} {why}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BackupError(f"{path} is damaged: {error}") from None
    for file in manifest.files:
        _check(root, file)
    return manifest


def _check(root: Path, file: BackupFile) -> None:
    # The restore uses the path as it is, so it must be the plain one. `../NAME/x` is below a backup
    # of this name, and outside of the new directory.
    parts = PurePosixPath(file.path).parts
    if not parts or ".." in parts or "/".join(parts) != file.path or file.path.startswith("/"):
        raise BackupError(f"{root / NAME}: {file.path!r} is not below the backup")
    path = root / file.path
    try:
        is_link = path.resolve() != root.resolve() / file.path
        size = path.stat().st_size
    except OSError as error:
        raise BackupError(f"{path}: {error.strerror}; the backup is incomplete") from None
    except ValueError as error:
        raise BackupError(f"{root / NAME}: {file.path!r} is no path: {error}") from None
    except RuntimeError:
        is_link, size = True, 0  # A link to itself.
    if is_link:
        raise BackupError(f"{path} is a link, and a backup has none")
    # A segment that was the newest once may have grown since, under its name in the directory: if a
    # takeover drops an empty segment after it, or a deposed holder still writes behind the seal.
    if size < file.bytes or (size > file.bytes and path.suffix != ".log"):
        raise BackupError(f"{path} has {size} bytes, {NAME} says {file.bytes}")


class _Number(msgspec.Struct):
    format: int
