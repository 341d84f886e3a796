"""The data directory: its files, their names, and how they are read and made durable.

    manifest.json             format, node_id, partitions, created; never changes, except for the
                              format when nodes begin to share the directory. Of a replica also
                              cluster_id and incarnation; of a restored log its generation and
                              those before it; of a replica `restored`
    lock                      locked as long as a node serves the directory alone
    watermarks                of a replica: what is committed and durable, see `journal.watermarks`
    journal/<sequence>.log    segments; <sequence>.idx their indexes
    journal/start.json        the start of the journal, once retention has removed segments; of a
                              replica also under which epochs
    snapshots/<sequence>.snap
    quarantine/               copies of damaged places
    damaged/                  of a cluster: the files before, see `io.disk.quarantine`
    lease/, epochs/           if nodes share it: see `node.lease` and `journal.epoch_folders`

No function here knows the content of a segment.
"""

import contextlib
import json
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from holdfast.log.files.filesystem import (
    TEMPORARY,
    FileSystem,
    LimitedReadFile,
    ReadFile,
    WriteFile,
    read_file,
    replace_file,
)
from holdfast.log.files.json_object import decode_object
from holdfast.log.journal.epoch_folders import NEVER_SHARED, Epoch
from holdfast.log.journal.watermarks import NAME as WATERMARKS
from holdfast.log.journal.watermarks import Checkpoint, decode_checkpoint, encode_checkpoint
from holdfast.log.reading.index import IndexHead
from holdfast.log.reading.index_file import (
    HEAD_PREFIX_BYTES,
    CorruptIndex,
    decode_head,
    head_length,
)

FORMAT: Final = 1
FORMAT_SHARED: Final = 2
"""The format of a directory whose nodes serve it as a cluster of one, each epoch with its own
manifest. Version 0.1 would take the log for that of a single broker."""
MANIFEST: Final = "manifest.json"
LOCK: Final = "lock"
JOURNAL: Final = "journal"
SNAPSHOTS: Final = "snapshots"
QUARANTINE: Final = "quarantine"
ASIDE: Final = "damaged"
PROCESSES: Final = "processes"
"""The directory of the other processes of one machine (`serve --processes`)."""
BEFORE_ADOPTION: Final = "before-adoption"
"""The former content of a directory that a cluster of one has adopted."""
START: Final = "journal/start.json"
GENERATION_BITS: Final = 52
"""The length of a generation: programs that read JSON numbers as floats keep all of it."""
FORMER_MAX: Final = 8
"""The most former generations that a log lists."""


class Manifest(Struct, frozen=True):
    """The identity of a data directory. Only `cluster_id` is set later, when the node joins a
    cluster."""

    node_id: str
    partitions: int
    created: str
    """The time of creation, ISO 8601 in UTC."""
    cluster_id: str = ""
    """The cluster whose replica the directory is; "": none yet."""
    incarnation: str = ""
    """The name made with a replica's directory; "": no replica. A node with another name has lost
    its former disk."""
    generation: int = 0
    """The generation of the log: 0 from its creation, and a random number since it was restored.

    Invariant: two records with the same offset in one generation of a log are the same record. An
    offset that leaves the process therefore goes with its generation. Counter-example: a reader is
    at offset 100, the log is restored and ends at 90. Twenty messages later the reader goes on at
    100, and never reads ten of them."""
    former: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """The generations before it, the newest FORMER_MAX, each with the offset per partition up to
    which its records are those of this one. Empty in a cluster that had several nodes when it was
    restored."""
    restored: int = 0
    """A random number of a replica, from its restore until the cluster has agreed on its
    generation. 0 otherwise."""
    format: int = FORMAT

    @property
    def is_replica(self) -> bool:
        """True if the journal's end may be cut off again; see `log.journal.journal`."""
        return self.incarnation != ""

    @property
    def log_generation(self) -> int:
        """The generation of the log in this directory. A restored replica has one of its own until
        its cluster has agreed on one."""
        return self.restored or self.generation


class DataDirectory:
    """The names and small files of one data directory, or of one epoch of a shared one."""

    def __init__(self, files: FileSystem, manifest: Manifest, epoch: Epoch = NEVER_SHARED) -> None:
        """Uses the file system `files` of the epoch's folder."""
        self.files = files
        self.manifest = manifest
        self.epoch = epoch
        self.sealed = dict(epoch.sealed)
        """The number of the first bytes that count, by segment sequence."""

    def write_manifest(self, manifest: Manifest) -> None:
        """Writes the manifest, durably."""
        content: dict[str, object] = {
            "format": manifest.format,
            "node_id": manifest.node_id,
            "partitions": manifest.partitions,
            "created": manifest.created,
        }
        if manifest.is_replica:
            content["cluster_id"] = manifest.cluster_id
            content["incarnation"] = manifest.incarnation
        if manifest.generation:
            content["generation"] = manifest.generation
        if manifest.former:
            content["former"] = manifest.former
        if manifest.restored:
            content["restored"] = manifest.restored
        self.replace_file(MANIFEST, [json.dumps(content, indent=1).encode() + b"\n"])
        self.manifest = manifest

    # Segments and their indexes

    def segments(self) -> list[int]:
        """The sequences that name the segments, oldest first."""
        return sequences_of(self.files.list(JOURNAL, must_exist=True), ".log")

    def indexes(self) -> list[int]:
        """The sequences of the segments that have an index file."""
        return sequences_of(self.files.list(JOURNAL, must_exist=True), ".idx")

    def open_segment(self, sequence: int) -> ReadFile:
        """Opens a segment for reading, up to its seal if it has one."""
        file = self.files.open_read(segment_name(sequence))
        limit_bytes = self.sealed.get(sequence)
        return file if limit_bytes is None else LimitedReadFile(file, limit_bytes)

    def create_segment(self, sequence: int) -> WriteFile:
        """Creates a segment. Its name is durable when this returns."""
        file = self.files.open_write(segment_name(sequence), create=True)
        self.files.sync_folder(JOURNAL)
        return file

    def append_to_segment(self, sequence: int) -> WriteFile:
        return self.files.open_write(segment_name(sequence), create=False)

    def remove_segment(self, sequence: int) -> None:
        """Removes a segment and its index, if they exist. The removal is durable after
        sync_journal."""
        self._remove(segment_name(sequence))
        self.remove_index(sequence)

    def remove_index(self, sequence: int) -> None:
        """Removes an index, if it is there. Its segment is scanned instead, and gets a new one."""
        self._remove(index_name(sequence))

    def sync_journal(self) -> None:
        self.files.sync_folder(JOURNAL)

    def read_index_head(self, sequence: int) -> IndexHead | None:
        """The head of a segment's index; None if there is no index.

        Raises `CorruptIndex` if it is damaged.
        """
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
        """The complete .idx file; None if there is none."""
        return self.read_file(index_name(sequence))

    def write_index(self, sequence: int, data: bytes) -> None:
        """Writes an index without a sync. After a crash a damaged or missing index is built again
        from its segment."""
        self.replace_file(index_name(sequence), [data], sync=False)

    # Where the journal begins

    def read_start(self) -> tuple[int, list[int]] | None:
        """The sequence of the first segment and the start offset of each partition. None if no
        segment was ever removed, or the file is damaged; the indexes then have the same."""
        start = self._read_start()
        return None if start is None else (start[0], start[1])

    def read_start_epochs(self) -> list[tuple[int, int, int]]:
        """The epochs at the start of a replica's journal, as in write_start; empty if read_start
        returns None."""
        start = self._read_start()
        return [] if start is None else start[2]

    def write_start(
        self, sequence: int, offsets: Sequence[int], epochs: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """Writes the start of the journal, durably, before older segments are removed. `epochs` is
        the result of Journal.start_epochs."""
        content: dict[str, object] = {
            "sequence": sequence,
            "offsets": list(offsets),
            "crc": _start_crc(sequence, offsets, epochs),
        }
        if epochs:
            content["epochs"] = epochs
        self.replace_file(START, [json.dumps(content).encode()])

    def _read_start(self) -> tuple[int, list[int], list[tuple[int, int, int]]] | None:
        data = self.read_file(START)
        if data is None:
            return None
        try:
            content = decode_object(data)
            sequence, offsets = int(content["sequence"]), [int(o) for o in content["offsets"]]
            epochs = [
                (int(partition), int(epoch), int(start))
                for partition, epoch, start in content.get("epochs", ())
            ]
            valid = content["crc"] == _start_crc(sequence, offsets, epochs)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None
        if not valid or len(offsets) != self.manifest.partitions:
            return None
        return sequence, offsets, epochs

    # Of a replica

    def join_cluster(self, cluster_id: str) -> None:
        """Notes durably that the node belongs to this cluster."""
        self.write_manifest(replace(self.manifest, cluster_id=cluster_id))

    def read_checkpoint(self) -> Checkpoint:
        """The checkpoint of a replica; all zeros if there is none."""
        data = self.read_file(WATERMARKS)
        found = None if data is None else decode_checkpoint(data, self.manifest.partitions)
        return Checkpoint([0] * self.manifest.partitions, 0, 0) if found is None else found

    def read_watermarks(self) -> list[int]:
        """The offset of each partition that is known to be committed."""
        return self.read_checkpoint().offsets

    def write_watermarks(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint (see Journal.checkpoint), durably: a power cut leaves this one or the
        one before. Counter-example without the sync: a power cut leaves an empty file, so no byte
        is known to be synced. The next start then takes rot in acknowledged records for a torn
        end."""
        self.replace_file(WATERMARKS, [encode_checkpoint(checkpoint)])

    # Snapshots and quarantine

    def snapshots(self) -> list[int]:
        """The sequences at which the snapshots start, oldest first."""
        return sequences_of(self.files.list(SNAPSHOTS, must_exist=True), ".snap")

    def open_snapshot(self, sequence: int) -> ReadFile:
        return self.files.open_read(snapshot_name(sequence))

    def remove_snapshot(self, sequence: int) -> None:
        self._remove(snapshot_name(sequence))

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.remove(name)

    def quarantine(self, sequence: int, position: int, pieces: Sequence[bytes]) -> str:
        """Keeps a copy of a damaged place of a segment, and returns its name."""
        name = f"{QUARANTINE}/{sequence:020d}-{position}.bad"
        if name.removeprefix(f"{QUARANTINE}/") not in self.files.list(QUARANTINE):
            self.files.make_folder(QUARANTINE)
            self.replace_file(name, pieces)
        return name

    def sync_names(self) -> None:
        """Makes the names of segments and snapshots durable."""
        for folder in (JOURNAL, SNAPSHOTS):
            self.files.sync_folder(folder)

    # Whole files

    def read_file(self, name: str) -> bytes | None:
        try:
            return read_file(self.files, name)
        except FileNotFoundError:
            return None

    def replace_file(self, name: str, pieces: Sequence[bytes], *, sync: bool = True) -> None:
        """Replaces a file. After a crash it has its old or its new content (if `sync`)."""
        replace_file(self.files, name, pieces, sync=sync)

    def remove_temporary_files(self) -> None:
        """Removes the files of interrupted writers."""
        for folder in (JOURNAL, SNAPSHOTS, QUARANTINE):
            for name in self.files.list(folder):
                if name.endswith(TEMPORARY):
                    self.files.remove(f"{folder}/{name}")


def segment_name(sequence: int) -> str:
    return f"{JOURNAL}/{sequence:020d}.log"


def index_name(sequence: int) -> str:
    return f"{JOURNAL}/{sequence:020d}.idx"


def snapshot_name(sequence: int) -> str:
    return f"{SNAPSHOTS}/{sequence:020d}.snap"


def sequences_of(names: list[str], ending: str) -> list[int]:
    """The sequences in the names with this ending, in their order."""
    stems = [name.removesuffix(ending) for name in names if name.endswith(ending)]
    return [int(stem) for stem in stems if len(stem) == 20 and stem.isdecimal()]


def _start_crc(
    sequence: int, offsets: Sequence[int], epochs: Sequence[tuple[int, int, int]]
) -> int:
    checked: list[object] = [sequence, list(offsets)]
    if epochs:
        checked.append(list(epochs))
    return crc32(json.dumps(checked).encode())
