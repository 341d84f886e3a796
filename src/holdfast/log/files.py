"""The data directory: which files it has, how they are opened, created and made durable. Uses os.

    manifest.json             format, node_id, partitions, created; never changes. Of a replica
                              also cluster_id and incarnation
    lock                      locked as long as a node serves the directory alone
    watermarks                of a replica: what is committed and durable, see log/watermarks.py
    journal/<sequence>.log    segments; <sequence>.idx their indexes
    journal/start.json        where the journal begins, once retention has removed something; of a
                              replica also under which epochs
    snapshots/<sequence>.snap
    quarantine/               copies of damaged places
    damaged/                  of a cluster: what was here before, see holdfast.drivers.set_aside
    lease/, epochs/           if nodes share it: see holdfast.lease and log/epochs.py

Nothing here knows what is in a segment.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from zlib import crc32

from holdfast.log.epochs import (
    CLAIMED_NAME,
    EPOCHS,
    LEASE,
    NEVER_SHARED,
    CorruptEpoch,
    Epoch,
    newest_epoch,
)
from holdfast.log.filesystem import (
    TEMPORARY,
    FileSystem,
    LimitedReadFile,
    OsFileSystem,
    ReadFile,
    WriteFile,
    read_whole,
    write_whole,
)
from holdfast.log.index import (
    HEAD_PREFIX_BYTES,
    CorruptIndex,
    IndexHead,
    decode_head,
    head_length,
)
from holdfast.log.watermarks import NAME as WATERMARKS
from holdfast.log.watermarks import Checkpoint, decode_checkpoint, encode_checkpoint

FORMAT: Final = 1
PARTITIONS_MAX: Final = 65_536
MANIFEST: Final = "manifest.json"
LOCK: Final = "lock"
JOURNAL: Final = "journal"
SNAPSHOTS: Final = "snapshots"
QUARANTINE: Final = "quarantine"
ASIDE: Final = "damaged"
START: Final = "journal/start.json"


class DataDirectoryError(Exception):
    """The directory cannot be used. The text says why and what to do. `in_use`: another process
    has it, for now."""

    def __init__(self, text: str, *, in_use: bool = False) -> None:
        super().__init__(text)
        self.in_use = in_use


class DirectoryLock:
    """Held by the node that serves a directory, until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Raises DataDirectoryError if another process has it."""
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


@dataclass(frozen=True)
class Manifest:
    node_id: str
    partitions: int
    created: str
    """ISO 8601, UTC."""
    cluster_id: str = ""
    """Of the cluster whose replica the directory is; "": none yet."""
    incarnation: str = ""
    """Made with a replica's directory, so a node with a new disk is known to have lost what it
    had; "": no replica."""

    @property
    def is_replica(self) -> bool:
        """Whether the journal's end may be cut off again, see holdfast.log.journal."""
        return self.incarnation != ""


class DataDirectory:
    """Names and small files of one data directory, or of one epoch of a shared one."""

    def __init__(self, files: FileSystem, manifest: Manifest, epoch: Epoch = NEVER_SHARED) -> None:
        """`files`: of the epoch's folder."""
        self.files = files
        self.manifest = manifest
        self.epoch = epoch
        self.sealed = dict(epoch.sealed)
        """Segments of which only the first so many bytes count, by sequence."""

    # Segments and their indexes

    def segments(self) -> list[int]:
        """Sequences that name the segments, oldest first."""
        return _sequences(self.files.list(JOURNAL, must_exist=True), ".log")

    def indexes(self) -> list[int]:
        return _sequences(self.files.list(JOURNAL, must_exist=True), ".idx")

    def open_segment(self, sequence: int) -> ReadFile:
        file = self.files.open_read(segment_name(sequence))
        limit_bytes = self.sealed.get(sequence)
        return file if limit_bytes is None else LimitedReadFile(file, limit_bytes)

    def create_segment(self, sequence: int) -> WriteFile:
        """Its name is durable when this returns."""
        file = self.files.open_write(segment_name(sequence), create=True)
        self.files.sync_folder(JOURNAL)
        return file

    def append_to_segment(self, sequence: int) -> WriteFile:
        return self.files.open_write(segment_name(sequence), create=False)

    def remove_segment(self, sequence: int) -> None:
        """With its index; not an error if it is gone. Not durable before sync_journal."""
        for name in (segment_name(sequence), index_name(sequence)):
            try:
                self.files.remove(name)
            except FileNotFoundError:
                continue

    def sync_journal(self) -> None:
        self.files.sync_folder(JOURNAL)

    def read_index_head(self, sequence: int) -> IndexHead | None:
        """None if there is no index. Raises CorruptIndex."""
        try:
            file = self.files.open_read(index_name(sequence))
        except FileNotFoundError:
            return None
        length = head_length(file.read(0, HEAD_PREFIX_BYTES))
        size_bytes = file.size()
        if length > size_bytes:
            raise CorruptIndex(f"an index of {size_bytes} bytes, its head alone has {length}")
        head = decode_head(file.read(0, length))
        if head.sequence != sequence:
            raise CorruptIndex(f"the index of segment {head.sequence} under the name {sequence}")
        if size_bytes != head.head_bytes + head.body_bytes:
            raise CorruptIndex(
                f"an index of {size_bytes} bytes, its head says {head.head_bytes + head.body_bytes}"
            )
        return head

    def read_index(self, sequence: int) -> bytes | None:
        """The whole .idx file; None if there is none."""
        return self.read_whole(index_name(sequence))

    def write_index(self, sequence: int, data: bytes) -> None:
        """Not synced: after a crash a damaged or missing index is made anew from its segment."""
        self.write_whole(index_name(sequence), [data], sync=False)

    # Where the journal begins

    def read_start(self) -> tuple[int, list[int]] | None:
        """(sequence of the first segment, offsets per partition); None if nothing was ever
        removed, or if the file is damaged: then the indexes say it too."""
        start = self._read_start()
        return None if start is None else (start[0], start[1])

    def read_start_epochs(self) -> list[tuple[int, int, int]]:
        """Of a replica, as in write_start; empty where read_start gives None."""
        start = self._read_start()
        return [] if start is None else start[2]

    def write_start(
        self, sequence: int, offsets: Sequence[int], epochs: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """Durable when it returns; call before older segments are removed. `epochs`: see
        Journal.start_epochs."""
        content: dict[str, object] = {
            "sequence": sequence,
            "offsets": list(offsets),
            "crc": _start_crc(sequence, offsets, epochs),
        }
        if epochs:
            content["epochs"] = epochs
        self.write_whole(START, [json.dumps(content).encode()])

    def _read_start(self) -> tuple[int, list[int], list[tuple[int, int, int]]] | None:
        data = self.read_whole(START)
        if data is None:
            return None
        try:
            content = json.loads(data)
            sequence, offsets = int(content["sequence"]), [int(o) for o in content["offsets"]]
            epochs = [
                (int(partition), int(epoch), int(start))
                for partition, epoch, start in content.get("epochs", ())
            ]
            valid = content["crc"] == _start_crc(sequence, offsets, epochs)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        if not valid or len(offsets) != self.manifest.partitions:
            return None
        return sequence, offsets, epochs

    # Of a replica

    def join_cluster(self, cluster_id: str) -> None:
        """The node is a member from here on, durably."""
        manifest = replace(self.manifest, cluster_id=cluster_id)
        _write_manifest(self, manifest)
        self.manifest = manifest

    def read_checkpoint(self) -> Checkpoint:
        data = self.read_whole(WATERMARKS)
        found = None if data is None else decode_checkpoint(data, self.manifest.partitions)
        return Checkpoint([0] * self.manifest.partitions, 0, 0) if found is None else found

    def read_watermarks(self) -> list[int]:
        """Per partition, what is known to be committed."""
        return self.read_checkpoint().offsets

    def write_watermarks(self, checkpoint: Checkpoint, *, sync: bool) -> None:
        """See Journal.checkpoint. Without `sync` a power cut may leave none."""
        self.write_whole(WATERMARKS, [encode_checkpoint(checkpoint)], sync=sync)

    # Snapshots and quarantine

    def snapshots(self) -> list[int]:
        """Sequences they start at, oldest first."""
        return _sequences(self.files.list(SNAPSHOTS, must_exist=True), ".snap")

    def open_snapshot(self, sequence: int) -> ReadFile:
        return self.files.open_read(snapshot_name(sequence))

    def remove_snapshot(self, sequence: int) -> None:
        try:
            self.files.remove(snapshot_name(sequence))
        except FileNotFoundError:
            return

    def quarantine(self, sequence: int, position: int, pieces: Sequence[bytes]) -> str:
        """Keep a copy of a damaged place of a segment; its name."""
        name = f"{QUARANTINE}/{sequence:020d}-{position}.bad"
        if name.removeprefix(f"{QUARANTINE}/") not in self.files.list(QUARANTINE):
            self.files.make_folder(QUARANTINE)
            self.write_whole(name, pieces)
        return name

    def sync_names(self) -> None:
        """Make durable which files there are."""
        for folder in (JOURNAL, SNAPSHOTS):
            self.files.sync_folder(folder)

    # Whole files

    def read_whole(self, name: str) -> bytes | None:
        try:
            return read_whole(self.files, name)
        except FileNotFoundError:
            return None

    def write_whole(self, name: str, pieces: Sequence[bytes], *, sync: bool = True) -> None:
        """Replace a file; it has either its old or its new content after a crash (if `sync`)."""
        write_whole(self.files, name, pieces, sync=sync)

    def remove_temporary_files(self) -> None:
        """What writers that were interrupted left behind."""
        for folder in (JOURNAL, SNAPSHOTS, QUARANTINE):
            for name in self.files.list(folder):
                if name.endswith(TEMPORARY):
                    self.files.remove(f"{folder}/{name}")


def create_or_open(
    path: Path, node_id: str, partitions: int, created: str, incarnation: str = ""
) -> tuple[DataDirectory, DirectoryLock]:
    """For the node that serves the directory alone. `created`: the time now, ISO 8601.
    `incarnation`: of a replica's directory, if it is made now; "" for a node without a cluster.

    Raises DataDirectoryError: in use, shared, of another node, of a node of the other sort, not
    writable, or no data directory.
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


def create_or_open_shared(path: Path, node_id: str, partitions: int, created: str) -> Manifest:
    """For a node that shares the directory with others: it is one, and will stay shared.

    Raises DataDirectoryError: served by a node alone, not writable, or no data directory.
    """
    files = OsFileSystem(path)
    try:
        if not files.list(LEASE):
            lock = lock_root(path)
            try:
                _open_locked(files, path, partitions, Manifest(node_id, partitions, created))
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
    """Create the directory if need be and lock it. Raises DataDirectoryError."""
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
    """Its name must be durable too, up to the first folder that was there."""
    path = path.absolute()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=0o750, parents=True, exist_ok=True)
    for folder in missing:
        OsFileSystem(folder.parent).sync_folder("")


def _open_locked(
    files: FileSystem, path: Path, partitions: int, new: Manifest | None
) -> DataDirectory:
    """`new`: the manifest to create it with if there is none."""
    if new is not None and MANIFEST not in files.list(""):
        if _sequences(files.list(JOURNAL), ".log"):
            raise DataDirectoryError(f"{path} has a journal but no {MANIFEST}: restore it")
        create(files, new)
    manifest = read_manifest(files, path)
    if manifest.partitions != partitions:
        raise DataDirectoryError(
            f"{path} was created with {manifest.partitions} partitions, log.partitions is"
            f" {partitions}: the number cannot change, set it to {manifest.partitions}"
        )
    return DataDirectory(files, manifest)


def create(files: FileSystem, manifest: Manifest) -> DataDirectory:
    """A new data directory; the manifest comes last, so a crash leaves none or all."""
    for folder in (JOURNAL, SNAPSHOTS, QUARANTINE):
        files.make_folder(folder)
    files.sync_folder("")
    directory = DataDirectory(files, manifest)
    _write_manifest(directory, manifest)
    return directory


def _write_manifest(directory: DataDirectory, manifest: Manifest) -> None:
    content = {
        "format": FORMAT,
        "node_id": manifest.node_id,
        "partitions": manifest.partitions,
        "created": manifest.created,
    }
    if manifest.is_replica:
        content["cluster_id"] = manifest.cluster_id
        content["incarnation"] = manifest.incarnation
    directory.write_whole(MANIFEST, [json.dumps(content, indent=1).encode() + b"\n"])


def open_to_read(path: Path) -> DataDirectory:
    """Any data directory, served or not, without its lock; of a shared one the newest epoch that
    counts. Raises DataDirectoryError."""
    files = OsFileSystem(path)
    manifest = read_manifest(files, path)
    try:
        epoch = newest_epoch(files)
    except CorruptEpoch as error:
        raise DataDirectoryError(f"{path}: {error}") from error
    except OSError as error:
        raise DataDirectoryError(f"{path}: {error.strerror}") from error
    return DataDirectory(epoch.files(files), manifest, epoch)


def read_manifest(files: FileSystem, path: Path) -> Manifest:
    """`path`: for the text of an error. Raises DataDirectoryError."""
    try:
        file = files.open_read(MANIFEST)
        content = json.loads(file.read(0, file.size()))
        format, partitions = content["format"], content["partitions"]
        node_id, created = content["node_id"], content["created"]
        cluster_id, incarnation = content.get("cluster_id", ""), content.get("incarnation", "")
    except (FileNotFoundError, NotADirectoryError):
        raise DataDirectoryError(
            f"{path} is no Holdfast data directory: it has no {MANIFEST}"
        ) from None
    except OSError as error:
        raise DataDirectoryError(f"{path / MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataDirectoryError(
            f"{path / MANIFEST} is damaged: restore it; it holds format, node_id, partitions,"
            " created"
        ) from None
    if format != FORMAT:
        raise DataDirectoryError(f"{path / MANIFEST}: format {format}, this program reads {FORMAT}")
    if not isinstance(partitions, int) or not 0 < partitions <= PARTITIONS_MAX:
        raise DataDirectoryError(
            f"{path / MANIFEST}: {partitions!r} partitions, allowed 1 to {PARTITIONS_MAX}"
        )
    return Manifest(str(node_id), partitions, str(created), str(cluster_id), str(incarnation))


def segment_name(sequence: int) -> str:
    return f"{JOURNAL}/{sequence:020d}.log"


def index_name(sequence: int) -> str:
    return f"{JOURNAL}/{sequence:020d}.idx"


def snapshot_name(sequence: int) -> str:
    return f"{SNAPSHOTS}/{sequence:020d}.snap"


def _sequences(names: list[str], ending: str) -> list[int]:
    stems = [name.removesuffix(ending) for name in names if name.endswith(ending)]
    return [int(stem) for stem in stems if len(stem) == 20 and stem.isdecimal()]


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
        "lost+found",
    )


def _start_crc(
    sequence: int, offsets: Sequence[int], epochs: Sequence[tuple[int, int, int]]
) -> int:
    checked: list[object] = [sequence, list(offsets)]
    if epochs:
        checked.append(list(epochs))
    return crc32(json.dumps(checked).encode())
