"""Interface between the log and the operating system. Uses os.

OsFileSystem is the real one. The crash tests have another in memory, which tears writes and forgets
what was not synced. Names are relative to the data directory.
"""

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

T = TypeVar("T")

TEMPORARY: Final = ".tmp"
WRITE_BYTES: Final = 1 << 20
"""The most bytes joined for one write call."""
SECTOR_BYTES: Final = 512
"""The bytes that a disk writes completely or not at all."""
OPEN_WAIT_S: Final = 30.0
"""The most seconds that an opening waits for a descriptor."""
OPEN_PAUSE_S: Final = 0.01
"""The first pause in seconds between two attempts; later ones grow up to OPEN_PAUSE_S_MAX."""
OPEN_PAUSE_S_MAX: Final = 1.0
"""The longest pause in seconds between two attempts."""


class ReadFile(Protocol):
    def read(self, position: int, length: int) -> bytes:
        """The bytes at `position`, fewer only at the end of the file. Raises `OSError`."""

    def size(self) -> int: ...


class WriteFile(Protocol):
    """A file open for writing. Errors are `OSError`; the call may then have had any effect."""

    def write(self, position: int, data: Sequence[bytes]) -> None:
        """Writes all pieces, one after the other."""

    def sync(self) -> None:
        """Waits until the content and the size are on the disk."""

    def truncate(self, size_bytes: int) -> None: ...

    def allocate(self, size_bytes: int) -> None:
        """Reserves space. The file is then at least that large, with zeros."""

    def close(self) -> None: ...


class Lock(Protocol):
    """A lock, until `release` or the end of the process."""

    def release(self) -> None: ...


class FileSystem(Protocol):
    """The files of one directory. Errors are `OSError`. sync_folder makes changed names durable."""

    def list(self, folder: str, *, must_exist: bool = False) -> list[str]:
        """The names in the folder, sorted; of a missing one none, or `FileNotFoundError`."""

    def make_folder(self, folder: str) -> None:
        """Creates the folder and missing parents, unless it exists."""

    def open_read(self, name: str) -> ReadFile: ...

    def open_write(self, name: str, *, create: bool) -> WriteFile:
        """Opens a file for writing. With `create` it must not exist yet; without it must."""

    def rename(self, name: str, new_name: str) -> None:
        """Renames a file. A file with the new name is replaced."""

    def remove(self, name: str) -> None: ...

    def link(self, name: str, new_name: str) -> None:
        """Gives a file a second name. Raises `FileExistsError` if it is taken."""

    def remove_folder(self, folder: str) -> None:
        """Removes an empty folder."""

    def sync_folder(self, folder: str) -> None: ...

    def free_bytes(self) -> int:
        """The bytes that an ordinary user may still write."""

    def lock(self, name: str) -> Lock | None:
        """Locks a file, created if missing. Returns None if another process has the lock."""

    def is_locked(self, name: str) -> bool:
        """True if another process has the lock. Raises `FileNotFoundError` without the file."""


class SubFolder:
    """A folder of a file system, as a file system."""

    def __init__(self, files: FileSystem, folder: str) -> None:
        self._files = files
        self._folder = folder

    def _name(self, name: str) -> str:
        return f"{self._folder}/{name}" if name else self._folder

    def list(self, folder: str, *, must_exist: bool = False) -> list[str]:
        return self._files.list(self._name(folder), must_exist=must_exist)

    def make_folder(self, folder: str) -> None:
        self._files.make_folder(self._name(folder))

    def open_read(self, name: str) -> ReadFile:
        return self._files.open_read(self._name(name))

    def open_write(self, name: str, *, create: bool) -> WriteFile:
        return self._files.open_write(self._name(name), create=create)

    def rename(self, name: str, new_name: str) -> None:
        self._files.rename(self._name(name), self._name(new_name))

    def remove(self, name: str) -> None:
        self._files.remove(self._name(name))

    def link(self, name: str, new_name: str) -> None:
        self._files.link(self._name(name), self._name(new_name))

    def remove_folder(self, folder: str) -> None:
        self._files.remove_folder(self._name(folder))

    def sync_folder(self, folder: str) -> None:
        self._files.sync_folder(self._name(folder))

    def free_bytes(self) -> int:
        return self._files.free_bytes()

    def lock(self, name: str) -> Lock | None:
        return self._files.lock(self._name(name))

    def is_locked(self, name: str) -> bool:
        return self._files.is_locked(self._name(name))


class LimitedReadFile:
    """The first `limit_bytes` of a file; later bytes do not count, whatever is written there."""

    def __init__(self, file: ReadFile, limit_bytes: int) -> None:
        self._file = file
        self._limit_bytes = limit_bytes

    def read(self, position: int, length: int) -> bytes:
        return self._file.read(position, max(0, min(length, self._limit_bytes - position)))

    def size(self) -> int:
        return min(self._limit_bytes, self._file.size())


class Descriptors:
    """The wait for a file descriptor when the process, or the machine, has none left. Nothing was
    changed, so an opening may be repeated. A process that serves sets `may_wait`; without it,
    errors are raised at once."""

    def __init__(self) -> None:
        self.may_wait: Callable[[OSError, float], bool] | None = None
        """A function of the error and the seconds waited so far; False ends the wait."""
        self.waits = 0
        """The number of openings that had to wait."""

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        """Opens a file. Raises `OSError`; for want of descriptors only after OPEN_WAIT_S."""
        return self.once_free(partial(os.open, path, flags, mode))

    def once_free(self, take: Callable[[], T]) -> T:
        """The result of `take`, which needs a descriptor. Raises `OSError` like `open`."""
        waited_s = 0.0
        while True:
            try:
                return take()
            except OSError as error:
                if not is_scarce(error) or waited_s >= OPEN_WAIT_S or self.may_wait is None:
                    raise
                if not self.may_wait(error, waited_s):
                    raise
            self.waits += waited_s == 0
            pause_s = min(OPEN_PAUSE_S_MAX, max(OPEN_PAUSE_S, waited_s / 4))
            time.sleep(pause_s)
            waited_s += pause_s


DESCRIPTORS: Final = Descriptors()
"""The descriptors of this process."""


def is_scarce(error: BaseException) -> bool:
    """True if only a descriptor was missing."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


class OsReadFile:
    """A file open for reading. It closes with its last reference, so no thread closes another's."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = DESCRIPTORS.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, position: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, position)
        if len(data) == length or not data:
            return data
        pieces = [data]
        got = len(data)
        while got < length:
            data = os.pread(self._descriptor, length - got, position + got)
            if not data:
                break
            pieces.append(data)
            got += len(data)
        return b"".join(pieces)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def fileno(self) -> int:
        return self._descriptor

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class OsWriteFile:
    def __init__(self, path: Path, create: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self._descriptor = -1
        self._descriptor = DESCRIPTORS.open(path, flags, 0o640)

    def write(self, position: int, data: Sequence[bytes]) -> None:
        chunk: list[bytes] = []
        chunk_bytes = 0
        for piece in data:
            if chunk and chunk_bytes + len(piece) > WRITE_BYTES:
                position = self._write(position, b"".join(chunk))
                chunk = []
                chunk_bytes = 0
            chunk.append(piece)
            chunk_bytes += len(piece)
        self._write(position, chunk[0] if len(chunk) == 1 else b"".join(chunk))

    def _write(self, position: int, data: bytes) -> int:
        done = os.pwrite(self._descriptor, data, position)
        if done < len(data):
            view = memoryview(data)
            while done < len(data):
                done += os.pwrite(self._descriptor, view[done:], position + done)
        return position + len(data)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._descriptor, size_bytes)

    def allocate(self, size_bytes: int) -> None:
        os.posix_fallocate(self._descriptor, 0, size_bytes)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class OsLock:
    """An open file description lock: unlike a POSIX lock it is not dropped when another
    descriptor of the file is closed, and unlike flock it works over NFS."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def release(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_FLOCK: Final = "hhlli0l"
"""struct flock: l_type, l_whence, l_start, l_len, l_pid."""


def _try_lock(descriptor: int) -> bool:
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


class OsFileSystem:
    """A directory of the operating system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self, folder: str, *, must_exist: bool = False) -> list[str]:
        try:
            return sorted(DESCRIPTORS.once_free(partial(os.listdir, self.root / folder)))
        except FileNotFoundError:
            if must_exist:
                raise
            return []

    def make_folder(self, folder: str) -> None:
        (self.root / folder).mkdir(mode=0o750, parents=True, exist_ok=True)

    def open_read(self, name: str) -> OsReadFile:
        return OsReadFile(self.root / name)

    def open_write(self, name: str, *, create: bool) -> OsWriteFile:
        return OsWriteFile(self.root / name, create)

    def rename(self, name: str, new_name: str) -> None:
        os.replace(self.root / name, self.root / new_name)

    def remove(self, name: str) -> None:
        os.unlink(self.root / name)

    def link(self, name: str, new_name: str) -> None:
        os.link(self.root / name, self.root / new_name)

    def remove_folder(self, folder: str) -> None:
        os.rmdir(self.root / folder)

    def lock(self, name: str) -> OsLock | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = DESCRIPTORS.open(self.root / name, flags, 0o640)
        try:
            locked = _try_lock(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        if not locked:
            os.close(descriptor)
            return None
        return OsLock(descriptor)

    def is_locked(self, name: str) -> bool:
        descriptor = DESCRIPTORS.open(self.root / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0)
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
            return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
        finally:
            os.close(descriptor)

    def sync_folder(self, folder: str) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
        descriptor = DESCRIPTORS.open(self.root / folder, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self) -> int:
        stat = os.statvfs(self.root)
        return stat.f_bavail * stat.f_frsize


def may_be_torn(data: bytes, position: int) -> bool:
    """True if an interrupted write may have left these bytes at this position of a file: a sector,
    or the end, has only zeros.

    Other bytes that fit no checksum were once complete and have changed since, so they may have
    been promised. Counter-example: one bit changes in the last records that a leader has stored.
    They are taken for the rest of a write, and its followers remove them, too.
    """
    end = SECTOR_BYTES - position % SECTOR_BYTES
    begin = 0
    while begin < len(data):
        if not data[begin:end].strip(b"\0"):
            return True
        begin, end = end, end + SECTOR_BYTES
    return data.endswith(bytes(8))


def read_file(files: FileSystem, name: str) -> bytes:
    file = files.open_read(name)
    return file.read(0, file.size())


def replace_file(
    files: FileSystem, name: str, pieces: Sequence[bytes], *, sync: bool = True
) -> None:
    """Replaces a file. After a crash it has its old or its new content (if `sync`)."""
    file = TemporaryFile(files, name)
    try:
        file.write(pieces)
    except BaseException:
        file.discard()
        raise
    file.finish(sync=sync)


class TemporaryFile:
    """A file under a temporary name, which gets its own name when it is complete."""

    def __init__(self, files: FileSystem, name: str) -> None:
        self._files = files
        self._name = name
        self._position = 0
        try:
            self._file = files.open_write(name + TEMPORARY, create=True)
        except FileExistsError:
            files.remove(name + TEMPORARY)
            self._file = files.open_write(name + TEMPORARY, create=True)

    def write(self, pieces: Sequence[bytes]) -> None:
        if pieces:
            self._file.write(self._position, pieces)
            self._position += sum(map(len, pieces))

    def sync(self) -> None:
        self._file.sync()

    def finish(self, *, sync: bool = True) -> None:
        """Renames the file. The content is synced first, or a crash could leave an empty file."""
        if sync:
            self._file.sync()
        self._file.close()
        self._files.rename(self._name + TEMPORARY, self._name)
        if sync:
            self._files.sync_folder(self._name.rpartition("/")[0])

    def discard(self) -> None:
        self._file.close()
        try:
            self._files.remove(self._name + TEMPORARY)
        except FileNotFoundError:
            return
