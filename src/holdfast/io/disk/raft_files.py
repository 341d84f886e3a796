"""Files of the metadata's Raft, under DIR/raft.

    log         groups, one per write: durable length before it, term, vote, commit index, entries
    snapshot    written whole, then renamed

All integers are little-endian::

    group       magic 4s b"HFRG" · length u32 · crc u32 · synced u64 · content
    content     is_base u8 · term u64 · vote u8 length, text · commit u64 ·
                member u8 length, text · base index u64 · base term u64      (of the first group)
                first index u64 · entries (cluster.raft.codec)
    snapshot    magic 4s b"HFRS" · crc u32 · snapshot (cluster.raft.codec)

An entry replaces all entries from its index on. `member` is the Raft peer that owns the log.

`synced` is the length of the log that was durable when the group was written. It distinguishes
damage from a torn end: an unreadable group is damage if a later group declares it durable, or if
no interrupted write leaves such bytes. Otherwise it is the rest of a write that was never reported,
and recovery drops it.

A peer without its votes or entries must not continue. Counter-example: it votes for A, loses the
vote, and votes for B in the same term, so two leaders are elected. Damage is therefore an error.

Writes Raft's files in a thread.

`MetaStore` bounds its queue: it accepts no input while too many writes are in progress.
"""

import errno
import logging
import struct
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final
from zlib import crc32

from holdfast.io.disk.journal_writer import SPACE_POLL_S, CallSoon, DiskFullError
from holdfast.log.files.filesystem import (
    SECTOR_BYTES,
    FileSystem,
    WriteFile,
    is_scarce,
    may_be_torn,
    read_file,
    replace_file,
)
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.raft.codec import (
    decode_entries,
    decode_snapshot,
    encode_entries,
    encode_snapshot,
)
from holdfast.node.raft.log import RaftSnapshot, RaftState
from holdfast.node.raft.node import Write

logger = logging.getLogger("holdfast")

FOLDER: Final = "raft"
LOG: Final = f"{FOLDER}/log"
SNAPSHOT: Final = f"{FOLDER}/snapshot"
GROUP_MAGIC: Final = b"HFRG"
SNAPSHOT_MAGIC: Final = b"HFRS"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)

_GROUP: Final = struct.Struct("<4sIIQ")
_U64: Final = struct.Struct("<Q")
_BASE: Final = struct.Struct("<QQ")
_CHECKED: Final = struct.Struct("<4sI")

_REMEDY: Final = (
    "the node must be removed from the cluster (holdfast cluster remove) and join again with an "
    "empty data directory"
)


class DamagedRaft(Exception):
    """The files cannot be trusted. The text names the file and says what to do."""


class RaftFiles:
    """The log and the snapshot of one Raft peer.

    All methods block, may raise `OSError`, and must not run at the same time.
    """

    def __init__(self, files: FileSystem, member: str, *, is_new: bool) -> None:
        """Reads the files into `state`. `is_new`: the data directory was just created.

        Only then the files may be missing. Raises `DamagedRaft` if they cannot be trusted.
        """
        self._files = files
        self._member = member
        self._file: WriteFile | None = None
        self._end = 0
        self._synced = 0
        self._read = b""
        if LOG.rpartition("/")[2] in files.list(FOLDER):
            self.state = self._load()
        elif is_new:
            self.state = RaftState()
            files.make_folder(FOLDER)
            files.sync_folder("")
            self._replace_log(_first_group(self._member, self.state))
        else:
            raise DamagedRaft(f"{LOG} is missing: {_REMEDY}")
        self._file = files.open_write(LOG, create=False)
        if files.open_read(LOG).size() > self._end:
            self._file.truncate(self._end)
        # The log just read may be in the page cache only, if an earlier sync failed, and the next
        # group declares it durable. So it is written and synced again. Counter-example: a vote is
        # read, a power cut removes it, and the peer votes again in the same term.
        self._file.write(0, [self._read])
        self._read = b""
        self._file.sync()

    def write(self, write: Write) -> None:
        """Writes; durable on return if the write requires it.

        Raises `DiskFullError`, after which the write may be repeated. After another error the state
        of the files is unknown.
        """
        if write.snapshot is not None:
            try:
                self._write_snapshot(write, write.snapshot)
            except OSError as error:
                # Both files are first written under other names, so nothing has changed.
                _raise_if_full(error)
                raise
            return
        assert self._file is not None
        first = write.entries[0].index if write.entries else 0
        content = _head(write.term, write.vote, write.commit) + _U64.pack(first)
        group = _group(self._synced, content + encode_entries(write.entries))
        try:
            self._file.write(self._end, [group])
        except OSError as error:
            if error.errno in _FULL:
                self._file.truncate(self._end)
            _raise_if_full(error)
            raise
        self._end += len(group)
        if write.must_sync:
            self._file.sync()
            self._synced = self._end

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write_snapshot(self, write: Write, snapshot: RaftSnapshot) -> None:
        encoded = encode_snapshot(snapshot)
        replace_file(
            self._files, SNAPSHOT, [_CHECKED.pack(SNAPSHOT_MAGIC, crc32(encoded)), encoded]
        )
        state = RaftState(
            write.term,
            write.vote,
            write.commit,
            snapshot,
            write.base_index,
            write.base_term,
            list(write.entries),
        )
        self._replace_log(_first_group(self._member, state))
        old, self._file = self._file, self._files.open_write(LOG, create=False)
        if old is not None:
            old.close()

    def _replace_log(self, group: bytes) -> None:
        replace_file(self._files, LOG, [group])
        self._end = self._synced = len(group)

    # Reading

    def _load(self) -> RaftState:
        data = read_file(self._files, LOG)
        snapshot = self._load_snapshot()
        content, at = _read_group(data, 0)
        if content is None:
            raise DamagedRaft(f"{LOG} is damaged at its beginning: {_REMEDY}")
        state = RaftState(snapshot=snapshot)
        try:
            self._read_first(content, state)
            while at < len(data):
                content, end = _read_group(data, at)
                if content is None:
                    if _was_durable(data, at) or _was_complete(data, at):
                        raise DamagedRaft(f"{LOG} is damaged at byte {at}: {_REMEDY}")
                    logger.warning("raft_log_torn file=%s byte=%d of=%d", LOG, at, len(data))
                    break
                _read_content(content, state)
                at = end
        except (BadFrame, struct.error, IndexError, UnicodeDecodeError) as error:
            raise DamagedRaft(f"{LOG} is not understood at byte {at}, {error}: {_REMEDY}") from None
        self._end = self._synced = at
        self._read = data[:at]
        _match_snapshot(state)
        return state

    def _load_snapshot(self) -> RaftSnapshot | None:
        try:
            data = read_file(self._files, SNAPSHOT)
        except FileNotFoundError:
            return None
        encoded = data[_CHECKED.size :]
        if data[: _CHECKED.size] != _CHECKED.pack(SNAPSHOT_MAGIC, crc32(encoded)):
            raise DamagedRaft(f"{SNAPSHOT} is damaged: {_REMEDY}")
        try:
            return decode_snapshot(encoded)
        except BadFrame as error:
            raise DamagedRaft(f"{SNAPSHOT} is not understood, {error}: {_REMEDY}") from None

    def _read_first(self, content: bytes, state: RaftState) -> None:
        at = _read_head(content, state)
        if not content[0]:
            raise BadFrame("it does not begin with its base")
        member, at = _read_text(content, at)
        if member != self._member:
            raise DamagedRaft(
                f"{LOG} belongs to {member}, this is {self._member}: the data directory is put "
                f"together from two; {_REMEDY}"
            )
        state.base_index, state.base_term = _BASE.unpack_from(content, at)
        if state.base_index and state.snapshot is None:
            raise DamagedRaft(f"{SNAPSHOT} is missing: {_REMEDY}")
        state.entries = list(decode_entries(content, at + _BASE.size, state.base_index + 1))


def _raise_if_full(error: OSError) -> None:
    if error.errno in _FULL or is_scarce(error):
        raise DiskFullError from error


def _match_snapshot(state: RaftState) -> None:
    """Resets the log if a crash came between the snapshot and the log that follows it."""
    snapshot = state.snapshot
    if snapshot is None:
        return
    at = snapshot.index - state.base_index
    term = state.base_term
    if 0 < at <= len(state.entries):
        term = state.entries[at - 1].term
    if not 0 <= at <= len(state.entries) or term != snapshot.term:
        state.base_index, state.base_term = snapshot.index, snapshot.term
        state.entries = []


def _read_content(content: bytes, state: RaftState) -> None:
    if content[0]:
        raise BadFrame("a base in the middle")
    at = _read_head(content, state)
    (first,) = _U64.unpack_from(content, at)
    entries = decode_entries(content, at + _U64.size, first)
    if entries:
        keep = first - state.base_index - 1
        if not 0 <= keep <= len(state.entries):
            raise BadFrame(f"entry {first} does not follow")
        del state.entries[keep:]
        state.entries += entries


def _head(term: int, vote: str, commit: int, *, is_base: bool = False) -> bytes:
    return bytes((is_base,)) + _U64.pack(term) + _text(vote) + _U64.pack(commit)


def _read_head(content: bytes, state: RaftState) -> int:
    (state.term,) = _U64.unpack_from(content, 1)
    state.vote, at = _read_text(content, 1 + _U64.size)
    (state.commit,) = _U64.unpack_from(content, at)
    return at + _U64.size


def _first_group(member: str, state: RaftState) -> bytes:
    content = b"".join(
        (
            _head(state.term, state.vote, state.commit, is_base=True),
            _text(member),
            _BASE.pack(state.base_index, state.base_term),
            encode_entries(state.entries),
        )
    )
    return _group(0, content)


def _group(synced: int, content: bytes) -> bytes:
    checked = _U64.pack(synced) + content
    return _GROUP.pack(GROUP_MAGIC, len(content), crc32(checked), synced) + content


def _read_group(data: bytes, at: int) -> tuple[bytes | None, int]:
    """Returns (content, end), with None as content if there is no complete group."""
    if at + _GROUP.size > len(data):
        return None, at
    magic, length, crc, synced = _GROUP.unpack_from(data, at)
    end = at + _GROUP.size + length
    if magic != GROUP_MAGIC or end > len(data):
        return None, at
    content = data[at + _GROUP.size : end]
    if crc32(_U64.pack(synced) + content) != crc:
        return None, at
    return content, end


def _was_durable(data: bytes, position: int) -> bool:
    """Returns whether a later group declares the bytes at `position` durable."""
    at = data.find(GROUP_MAGIC, position + 1)
    while at >= 0:
        content, _ = _read_group(data, at)
        if content is not None and _GROUP.unpack_from(data, at)[3] > position:
            return True
        at = data.find(GROUP_MAGIC, at + 1)
    return False


def _was_complete(data: bytes, at: int) -> bool:
    """Returns whether the unreadable group at `at` was written to its end."""
    if at + _GROUP.size > len(data):
        return False
    magic, length, crc, synced = _GROUP.unpack_from(data, at)
    content = data[at + _GROUP.size :]
    if crc32(_U64.pack(synced) + content) == crc:
        # Its magic or its length has changed. Only if a sector ends in them and its part of them
        # was never written, is the group torn.
        begin = data[at : at + -at % SECTOR_BYTES]
        return not 0 < len(begin) < _GROUP.size or any(begin)
    is_short = magic == GROUP_MAGIC and length > len(content)
    return not is_short and not may_be_torn(data[at:], at)


def _text(text: str) -> bytes:
    data = text.encode()
    return bytes((len(data),)) + data


def _read_text(content: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + content[at]
    if end > len(content):
        raise BadFrame("a text that is cut short")
    return content[at + 1 : end].decode(), end


CLOSE_TIMEOUT_S: Final = 30.0


class RaftWriter:
    """Writes in the order of submission and reports each write once.

    A message of Raft that depends on a write waits for the report. Otherwise a crash could undo a
    vote that others have counted.
    """

    def __init__(
        self,
        files: RaftFiles,
        call_soon: CallSoon,
        *,
        confirm: Callable[[], None] | None = None,
        on_written: Callable[[], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        """`confirm`: as for `JournalWriter`. `on_written`: called when the oldest unreported write
        is done.

        `on_failed`: called when nothing will be written any more; the node must stop. Both run in
        the loop (`call_soon_threadsafe`). While the disk is full, writes wait: the node neither
        votes nor acknowledges, and the others continue without it.
        """
        self._files = files
        self._call_soon = call_soon
        self._confirm = confirm
        self._on_written = on_written
        self._on_failed = on_failed
        self._writes: SimpleQueue[Write | None] = SimpleQueue()
        self._closing = threading.Event()
        self.is_full = False
        """Whether a write waits for space."""
        self._thread = threading.Thread(target=self._run, name="raft-writer", daemon=True)
        self._thread.start()

    def submit(self, write: Write) -> None:
        self._writes.put(write)

    def close(self) -> None:
        """Writes everything submitted and stops. Writes that wait for space are dropped."""
        self._closing.set()
        self._writes.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while (write := self._writes.get()) is not None:
                if not self._write(write):
                    break
                if self._confirm is not None:
                    self._confirm()
                self._report(self._on_written)
            self._files.close()
        except Exception as error:  # noqa: BLE001
            # Never retried: a failed fsync may have dropped the pages it should have written.
            self._report(self._on_failed, error)

    def _write(self, write: Write) -> bool:
        """Writes, waiting for space if needed. Returns False if `close` came first."""
        while True:
            try:
                self._files.write(write)
            except DiskFullError:
                if not self.is_full:
                    self.is_full = True
                    logger.warning("raft_disk_full")
                if self._closing.wait(SPACE_POLL_S):
                    return False
                continue
            self.is_full = False
            return True

    def _report(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._call_soon(callback, *args)
        except RuntimeError:
            # The loop is closed, so there is no receiver for the report.
            return
