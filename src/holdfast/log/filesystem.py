"""The narrow waist between the log and an operating system. Uses os.

OsFileSystem is the real one; the crash tests have another in memory, which tears writes and
forgets what was not synced. Names are relative to the data directory.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

TEMPORARY: Final = ".tmp"
WRITE_BYTES: Final = 1 << 20
"""At most so much is joined for one write call."""


class ReadFile(Protocol):
    def read(self, position: int, length: int) -> bytes:
        """Fewer bytes only at the end of the file. Raises OSError."""

    def size(self) -> int: ...


class WriteFile(Protocol):
    """Errors are OSErrors; after one nothing is known of what the call did."""

    def write(self, position: int, data: Sequence[bytes]) -> None:
        """All of it."""

    def sync(self) -> None:
        """Return when the content, and the size, are on the disk."""

    def truncate(self, size_bytes: int) -> None: ...

    def allocate(self, size_bytes: int) -> None:
        """Reserve space; the file is at least that large afterwards, with zeros."""

    def close(self) -> None: ...


class FileSystem(Protocol):
    """Errors are OSErrors. What creates, renames or removes is durable after sync_folder."""

    def list(self, folder: str) -> list[str]:
        """Names in the folder, sorted; empty if there is no such folder."""

    def make_folder(self, folder: str) -> None:
        """Missing parents too; not an error if it is there."""

    def open_read(self, name: str) -> ReadFile: ...

    def open_write(self, name: str, *, create: bool) -> WriteFile:
        """`create`: it must not be there yet; else it must."""

    def rename(self, name: str, new_name: str) -> None:
        """Replaces what has the new name."""

    def remove(self, name: str) -> None: ...

    def sync_folder(self, folder: str) -> None: ...

    def free_bytes(self) -> int:
        """What an ordinary user may still write."""


class OsReadFile:
    """Closes with its last reference, so that one thread cannot close what another reads."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

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

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class OsWriteFile:
    def __init__(self, path: Path, create: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self._descriptor = os.open(path, flags, 0o640)

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


class OsFileSystem:
    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))
        except FileNotFoundError:
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

    def sync_folder(self, folder: str) -> None:
        descriptor = os.open(self.root / folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self) -> int:
        stat = os.statvfs(self.root)
        return stat.f_bavail * stat.f_frsize


class TemporaryFile:
    """A file written under a temporary name that takes its own when it is whole."""

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

    def finish(self, *, sync: bool = True) -> None:
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
