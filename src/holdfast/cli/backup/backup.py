"""Makes a backup of a data directory, whether a process serves it or not.

A backup is what a crash at one moment would leave: a prefix of the log, and snapshots that it
covers. Files that never change are linked: sealed segments, their indexes, snapshots. They are
replaced or removed, and never written again. Everything else is copied, above all the newest
segment and the log of Raft, to which the node appends.

The order makes it one moment although the node goes on. Each line is read before the next one:

1. `watermarks`, which may lag behind the log and is never ahead of it;
2. snapshots: a snapshot gets its name when all records before it are on the disk, so the log that
   is read later has them;
3. segments, oldest first, then `journal/start.json`. Retention writes it before it removes
   segments, so a start that is read later names segments that are there, or later ones;
4. the log of Raft before its snapshot. The other way round, the node could replace both in between,
   and the log would begin behind the snapshot. A log that is older than the snapshot is what a
   crash between the two leaves.

If retention has removed a file that was listed, or what the linked snapshot needs, the backup
begins again.
"""

import os
import re
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from errno import EMLINK, EPERM, EXDEV
from pathlib import Path
from typing import Final

from holdfast import __version__
from holdfast.cli.backup.manifest import (
    FORMAT,
    NAME,
    BackupError,
    BackupFile,
    BackupManifest,
    write_manifest,
)
from holdfast.io.disk.older_copy import REMEMBERED
from holdfast.log.files.data_directory import open_to_read, present_processes
from holdfast.log.files.filesystem import TEMPORARY, OsFileSystem
from holdfast.log.files.layout import (
    ASIDE,
    BEFORE_ADOPTION,
    JOURNAL,
    LOCK,
    MANIFEST,
    PROCESSES,
    SNAPSHOTS,
    START,
    DataDirectory,
)
from holdfast.log.journal.epoch_folders import EPOCHS, FOLDERS, LEASE
from holdfast.log.journal.watermarks import NAME as WATERMARKS

COPY_BYTES: Final = 1 << 20
"""The bytes that are copied at a time."""
ATTEMPTS: Final = 5
"""The most attempts while retention removes files."""
DATABASE_WAIT_S: Final = 60.0
"""The longest wait in seconds for a database that another process has locked."""
DATABASE_PAUSE_S: Final = 0.05
RAFT: Final = ("raft/log", "raft/snapshot")
FIXED: Final = (*FOLDERS, ASIDE)
"""The folders whose files are replaced and never written again, but for the newest segment."""
CLAIMED: Final = re.compile(rf"{LEASE}/(\d+)\..*")
LEFT_OUT: Final = frozenset({LOCK, NAME, REMEMBERED, "access.lock", "lost+found"})
_NO_LINK: Final = (EXDEV, EPERM, EMLINK)


class Changed(Exception):
    """The directory changed in a way that the copy does not show: retention, or a takeover."""


@dataclass
class Copied:
    """The files of a backup so far."""

    source: Path
    target: Path
    files: list[BackupFile] = field(default_factory=list)
    linked_bytes: int = 0
    copied_bytes: int = 0
    links: bool = True
    """False once the system has refused a link: another file system, or another owner."""

    def link(self, name: str) -> None:
        """Links a file that never changes, or copies it where links are impossible."""
        if self.links:
            place = self._place(name)
            try:
                os.link(self.source / name, place)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                self.links = False
            else:
                folder = (self.source / name).parent
                is_here = folder.resolve() == self.source.resolve() / Path(name).parent
                if is_here and stat.S_ISREG(place.lstat().st_mode):
                    self.linked_bytes += self._add(name)
                    return
                # A link has got a second name, or a file elsewhere: `copy` decides.
                place.unlink()
        self.copy(name)

    def copy(self, name: str) -> None:
        """Copies a file that may grow meanwhile, durably. Raises `BackupError` for a file that the
        owner of the directory may not have meant for it, see `_check_file`."""
        with (self.source / name).open("rb") as there, self._place(name).open("wb") as here:
            self._check_file(there.fileno(), name)
            shutil.copyfileobj(there, here, COPY_BYTES)
            here.flush()
            found = os.fstat(there.fileno())
            os.fchmod(here.fileno(), stat.S_IMODE(found.st_mode))
            os.utime(here.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fsync(here.fileno())
        self.copied_bytes += self._add(name)

    def _check_file(self, descriptor: int, name: str) -> None:
        """Checks that an open file is where its name says, or its owner is the directory's.

        Counter-example: root makes a backup, and a name in the directory is a link to a file of
        root. Whoever may read the backup reads that file then. The check is of the open file,
        because the owner can replace each name at any time.
        """
        owner = self.source.stat().st_uid
        if os.geteuid() != 0 or os.fstat(descriptor).st_uid == owner:
            return
        real = os.readlink(f"/proc/self/fd/{descriptor}")
        if real != str(self.source.resolve() / name):
            raise BackupError(
                f"{self.source / name} is the file {real} of another user: replace the link by the"
                " file, or remove it"
            )

    def copy_database(self, name: str) -> None:
        """Copies an SQLite database as one of its transactions has left it. Raises `BackupError` if
        the process that has it open does not let it be read."""
        source, place = self.source / name, self._place(name)
        deadline = time.monotonic() + DATABASE_WAIT_S
        with source.open("rb") as file:
            self._check_file(file.fileno(), name)
        while not _copied_database(source, place):
            if time.monotonic() > deadline:
                raise BackupError(
                    f"{source} was locked for {DATABASE_WAIT_S:g} s: stop the process that has it"
                    " open, make the backup, and start it again"
                )
            time.sleep(DATABASE_PAUSE_S)
        with place.open("rb") as file:
            os.fsync(file.fileno())
        self.copied_bytes += self._add(name)

    def finish(self) -> None:
        """Makes the names durable."""
        files = OsFileSystem(self.target)
        folders = {Path(file.path).parent for file in self.files}
        for folder in {above for each in folders for above in (each, *each.parents)}:
            files.sync_folder("" if str(folder) == "." else str(folder))

    def _place(self, name: str) -> Path:
        place = self.target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _add(self, name: str) -> int:
        size = (self.target / name).stat().st_size
        self.files.append(BackupFile(name, size))
        return size


def _copied_database(source: Path, place: Path) -> bool:
    """Copies a database that no process has locked. Returns False if one has.

    SQLite's copy tries again without end, so it is interrupted at the first attempt.
    """

    def check(status: int, left: int, total: int) -> None:
        if status not in (sqlite3.SQLITE_OK, sqlite3.SQLITE_DONE):
            raise _Locked

    uri = f"{source.absolute().as_uri()}?mode=ro"
    try:
        with (
            closing(sqlite3.connect(uri, uri=True, timeout=0)) as there,
            closing(sqlite3.connect(place)) as here,
        ):
            there.backup(here, progress=check, sleep=0.01)
    except _Locked:
        return False
    return True


class _Locked(Exception):
    pass


def make_backups(source: Path, target: Path) -> list[tuple[BackupManifest, Copied]]:
    """Makes a backup of `source` in `target`, and of the other processes that serve `source`. The
    first one has begun first. Raises as `make_backup`."""
    made = [make_backup(source, target)]
    for index in present_processes(source):
        place = Path(PROCESSES, str(index))
        if (source / place / MANIFEST).exists():
            made.append(make_backup(source / place, target / place))
    return made


def make_backup(source: Path, target: Path) -> tuple[BackupManifest, Copied]:
    """Makes a backup of `source` in `target`, which is new or empty.

    Raises `BackupError`, `OSError`, or `DataDirectoryError` if the source is no data directory.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BackupError(f"{target} is not empty: give a new directory for each backup")
    if target.resolve().is_relative_to(source.resolve()):
        raise BackupError(f"{target} is inside {source}: give a directory outside of it")
    reason = ""
    for _ in range(ATTEMPTS):
        began = datetime.now(UTC).isoformat(timespec="milliseconds")
        directory = open_to_read(source)
        copied = Copied(source, target)
        try:
            _copy(directory, copied)
        except (FileNotFoundError, Changed) as error:
            reason = str(error)
            _clear(target)
            continue
        manifest = BackupManifest(
            FORMAT,
            directory.manifest.node_id,
            _kind(directory),
            directory.manifest.cluster_id,
            began,
            __version__,
            copied.files,
        )
        copied.finish()
        write_manifest(target, manifest)
        return manifest, copied
    raise BackupError(f"{source} has changed during each of {ATTEMPTS} attempts: {reason}")


def _kind(directory: DataDirectory) -> str:
    if directory.epoch.number:
        return "pair"
    return "replica" if directory.manifest.is_replica else "node"


def _copy(directory: DataDirectory, copied: Copied) -> None:
    epoch = directory.epoch.folder
    below = f"{epoch}/" if epoch else ""
    copied.target.mkdir(mode=0o750, parents=True, exist_ok=True)
    for folder in FOLDERS:
        (copied.target / epoch / folder).mkdir(parents=True, exist_ok=True)
    names = list(_names(copied.source))
    if f"{below}{WATERMARKS}" in names:
        copied.copy(f"{below}{WATERMARKS}")
    for sequence in directory.snapshots():
        copied.link(f"{below}{SNAPSHOTS}/{sequence:020d}.snap")
    sequences = directory.segments()
    for sequence in sequences:
        name = f"{below}{JOURNAL}/{sequence:020d}"
        if sequence == sequences[-1]:
            copied.copy(f"{name}.log")
        else:
            copied.link(f"{name}.log")
            if (copied.source / f"{name}.idx").exists():
                copied.link(f"{name}.idx")
    if (copied.source / f"{below}{START}").exists():
        copied.copy(f"{below}{START}")
    for name in RAFT:
        if (copied.source / f"{below}{name}").exists():
            copied.copy(f"{below}{name}")
    for name in names:
        _copy_other(name, epoch, directory.epoch.number, copied)
    _check(directory, copied)


def _copy_other(name: str, epoch: str, number: int, copied: Copied) -> None:
    """Copies a file without an order. In a shared directory only the newest epoch counts."""
    if name.startswith(f"{LEASE}/nodes/"):
        return
    if epoch and name.startswith(f"{EPOCHS}/") and not name.startswith(f"{epoch}/"):
        return
    claimed = CLAIMED.fullmatch(name)
    if claimed is not None and int(claimed[1]) != number:
        return
    inside = name.removeprefix(f"{epoch}/") if epoch else name
    if inside in (WATERMARKS, *RAFT):
        return
    folder = inside.partition("/")[0]
    if folder in (JOURNAL, SNAPSHOTS):
        return
    if name.endswith(".db"):
        copied.copy_database(name)
    elif folder in FIXED:
        copied.link(name)
    elif not name.endswith((".db-wal", ".db-shm", ".db-journal")):
        copied.copy(name)


def _names(source: Path) -> Iterator[str]:
    for path in sorted(source.rglob("*")):
        name = str(path.relative_to(source))
        is_other = name.startswith((f"{BEFORE_ADOPTION}/", f"{PROCESSES}/"))
        is_left_out = is_other or name.endswith(TEMPORARY) or name in LEFT_OUT
        if path.is_file() and not is_left_out:
            yield name


def _check(before: DataDirectory, copied: Copied) -> None:
    """Checks that the copy is one moment. Raises `Changed`."""
    if open_to_read(copied.source).epoch.number != before.epoch.number:
        raise Changed("another node has taken over")
    made = open_to_read(copied.target)
    start = made.read_start()
    snapshots = made.snapshots()
    if start is None:
        return
    if made.segments() and made.segments()[0] > start[0]:
        raise Changed("retention has removed segments")
    if not snapshots or snapshots[-1] < start[0]:
        raise Changed("retention has removed what the snapshot needs")


def _clear(target: Path) -> None:
    for path in target.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
