"""Finding, creating, locking and opening a data directory. Uses os and pathlib."""

import os
from pathlib import Path
from typing import Final

from holdfast.log.files.filesystem import TEMPORARY, FileSystem, OsFileSystem
from holdfast.log.files.json_object import decode_object
from holdfast.log.files.layout import (
    ASIDE,
    FORMAT,
    FORMAT_SHARED,
    JOURNAL,
    LOCK,
    MANIFEST,
    PROCESSES,
    QUARANTINE,
    SNAPSHOTS,
    DataDirectory,
    Manifest,
    sequences_of,
)
from holdfast.log.journal.epoch_folders import (
    CLAIMED_NAME,
    EPOCHS,
    LEASE,
    CorruptEpoch,
    Epoch,
    newest_epoch,
)
from holdfast.log.journal.watermarks import NAME as WATERMARKS

ACCESS: Final = ("access.json", "access.lock", "access-use.json")
"""The files of the admin port's users, which may be made before the directory is."""
PARTITIONS_MAX: Final = 65_536


class DataDirectoryError(Exception):
    """The directory cannot be used. The text says why and what to do. With `in_use`, another
    process has it at present."""

    def __init__(self, text: str, *, in_use: bool = False) -> None:
        super().__init__(text)
        self.in_use = in_use


class DirectoryLock:
    """The lock of the node that serves a directory, until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Locks the file.

        Raises `DataDirectoryError` if another process has the lock.
        """
        try:
            lock = OsFileSystem(path.parent).lock(path.name)
        except OSError as error:
            raise DataDirectoryError(f"cannot lock {path}: {error.strerror}") from error
        if lock is None:
            holder = path.read_bytes()[:20].decode("ascii", "replace").strip()
            raise DataDirectoryError(
                f"{path.parent} is served by another process"
                f"{f' ({holder})' if holder else ''}: stop it, or give another data directory",
                in_use=True,
            )
        self._lock = lock
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        self._lock.release()


def create_or_open(
    path: Path, node_id: str, partitions: int, created: str, incarnation: str = ""
) -> tuple[DataDirectory, DirectoryLock]:
    """Opens or creates the directory of a node that serves it alone. `created` is the present time,
    ISO 8601. `incarnation` is for a new directory of a replica; "" for a node without a cluster.

    Raises `DataDirectoryError` if the directory is in use, shared, of another node or kind of node,
    not writable, or no data directory.
    """
    lock = lock_root(path)
    files = OsFileSystem(path)
    try:
        if files.list(LEASE):
            raise DataDirectoryError(
                f"{path} is shared by several nodes: start this one with --standby, or give another"
                " data directory"
            )
        new = Manifest(node_id, partitions, created, incarnation=incarnation)
        directory = _open_locked(files, path, partitions, new)
        if directory.manifest.is_replica != (incarnation != ""):
            raise DataDirectoryError(
                f"{path} is a cluster node's: start it with cluster.peer_bind set, or give another"
                " data directory"
                if directory.manifest.is_replica
                else f"{path} was made by a node without a cluster: give a new data directory, or"
                " start without cluster.peer_bind"
            )
        if directory.manifest.node_id != node_id:
            raise DataDirectoryError(
                f"{path} belongs to node {directory.manifest.node_id!r}, this one is {node_id!r}:"
                " set node.id to that, or give another data directory"
            )
        return directory, lock
    except OSError as error:
        lock.release()
        raise DataDirectoryError(f"{path}: {error.strerror}") from error
    except DataDirectoryError:
        lock.release()
        raise


def create_or_open_shared(
    path: Path, node_id: str, partitions: int, created: str, incarnation: str
) -> Manifest:
    """Opens or creates a directory that several nodes share. It stays a shared one. The arguments
    are those of `create_or_open`, for a new directory.

    Raises `DataDirectoryError` if a node serves it alone, or it is not writable, or no data
    directory.
    """
    files = OsFileSystem(path)
    try:
        if not files.list(LEASE):
            lock = lock_root(path)
            try:
                new = Manifest(node_id, partitions, created, incarnation=incarnation)
                _open_locked(files, path, partitions, new)
                files.make_folder(LEASE)
                files.open_write(CLAIMED_NAME, create=True).close()
                files.sync_folder(LEASE)
                files.sync_folder("")
            except FileExistsError:
                pass  # another one, at the same time
            finally:
                lock.release()
        return _open_locked(files, path, partitions, None).manifest
    except OSError as error:
        raise DataDirectoryError(f"{path}: {error.strerror}") from error


def lock_root(path: Path) -> DirectoryLock:
    """Creates the directory if it is missing, and locks it.

    Raises `DataDirectoryError` if that is impossible.
    """
    files = OsFileSystem(path)
    try:
        _make_root(path)
        if not (path / MANIFEST).exists():
            foreign = [name for name in files.list("") if not _is_ours(name)]
            if foreign:
                raise DataDirectoryError(
                    f"{path} has no {MANIFEST} but other files ({foreign[0]}): give an empty or"
                    " new directory"
                )
        return DirectoryLock(path / LOCK)
    except OSError as error:
        raise DataDirectoryError(f"{path}: {error.strerror}") from error


def _make_root(path: Path) -> None:
    """Creates the directory. New names are synced up to the first folder that existed."""
    path = path.absolute()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=0o750, parents=True, exist_ok=True)
    for folder in missing:
        OsFileSystem(folder.parent).sync_folder("")


def _open_locked(
    files: FileSystem, path: Path, partitions: int, new: Manifest | None
) -> DataDirectory:
    """Opens the directory; creates it with the manifest `new` if it has none."""
    if new is not None and MANIFEST not in files.list(""):
        if sequences_of(files.list(JOURNAL), ".log"):
            raise DataDirectoryError(f"{path} has a journal but no {MANIFEST}: restore it")
        create(files, new)
    manifest = read_manifest(files, path)
    if manifest.partitions != partitions:
        raise DataDirectoryError(
            f"{path} was created with {manifest.partitions} partitions, not {partitions}, and the"
            f" number cannot change: set log.partitions to {manifest.partitions}, with"
            " cluster.peer_bind cluster.partitions"
        )
    return DataDirectory(files, manifest)


def create(files: FileSystem, manifest: Manifest) -> DataDirectory:
    """Creates a data directory. The manifest comes last, so a crash leaves a complete directory or
    none."""
    for folder in (JOURNAL, SNAPSHOTS, QUARANTINE):
        files.make_folder(folder)
    files.sync_folder("")
    directory = DataDirectory(files, manifest)
    directory.write_manifest(manifest)
    return directory


def present_processes(data: Path) -> list[int]:
    """The numbers of the processes, besides 0, that have a directory."""
    try:
        names = os.listdir(data / PROCESSES)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if name.isdecimal() and int(name) > 0)


def open_to_read(path: Path) -> DataDirectory:
    """Opens any data directory without its lock, served or not. In a shared one it is the newest
    epoch that counts.

    Raises `DataDirectoryError` if it cannot be read.
    """
    files = OsFileSystem(path)
    manifest = read_manifest(files, path)
    try:
        epoch = newest_epoch(files)
        return open_epoch(files, path, epoch) if epoch.number else DataDirectory(files, manifest)
    except CorruptEpoch as error:
        raise DataDirectoryError(f"{path}: {error}") from error
    except OSError as error:
        raise DataDirectoryError(f"{path}: {error.strerror}") from error


def open_epoch(root: FileSystem, path: Path, epoch: Epoch) -> DataDirectory:
    """Opens an epoch of a shared directory, with its own manifest, or that of the directory if it
    has none.

    Raises `DataDirectoryError` if the manifest cannot be read, and `OSError`.
    """
    files = epoch.files(root)
    with_manifest = files if MANIFEST in files.list("") else root
    return DataDirectory(files, read_manifest(with_manifest, path / epoch.folder), epoch)


def read_manifest(files: FileSystem, path: Path) -> Manifest:
    """Reads the manifest; `path` is for error texts.

    Raises `DataDirectoryError` if it is missing, damaged or of another format.
    """
    try:
        file = files.open_read(MANIFEST)
        content = decode_object(file.read(0, file.size()))
        format, partitions = content["format"], content["partitions"]
        node_id, created = content["node_id"], content["created"]
        cluster_id, incarnation = content.get("cluster_id", ""), content.get("incarnation", "")
        generation, restored = int(content.get("generation", 0)), int(content.get("restored", 0))
        former = tuple(
            (int(number), tuple(int(offset) for offset in offsets))
            for number, offsets in content.get("former", ())
        )
    except (FileNotFoundError, NotADirectoryError):
        raise DataDirectoryError(
            f"{path} is no Holdfast data directory: it has no {MANIFEST}"
        ) from None
    except OSError as error:
        raise DataDirectoryError(f"{path / MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise DataDirectoryError(
            f"{path / MANIFEST} is damaged: restore it; it holds format, node_id, partitions,"
            " created"
        ) from None
    if format not in (FORMAT, FORMAT_SHARED):
        raise DataDirectoryError(
            f"{path / MANIFEST}: format {format}, this program reads {FORMAT} and {FORMAT_SHARED}"
        )
    if not isinstance(partitions, int) or not 0 < partitions <= PARTITIONS_MAX:
        raise DataDirectoryError(
            f"{path / MANIFEST}: {partitions!r} partitions, allowed 1 to {PARTITIONS_MAX}"
        )
    return Manifest(
        str(node_id),
        partitions,
        str(created),
        str(cluster_id),
        str(incarnation),
        generation,
        tuple(each for each in former if len(each[1]) == partitions),
        restored,
        format,
    )


def _is_ours(name: str) -> bool:
    return name.removesuffix(TEMPORARY) in (
        MANIFEST,
        LOCK,
        JOURNAL,
        SNAPSHOTS,
        QUARANTINE,
        LEASE,
        EPOCHS,
        WATERMARKS,
        ASIDE,
        PROCESSES,
        *ACCESS,
        "lost+found",
    )
