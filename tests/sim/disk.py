"""A file system in memory that crashes, tears writes, forgets what was not synced, and fills up.

It implements `log.files.filesystem.FileSystem`. Every call that changes something is a step; at
step `crash_at` the call does half of its work and raises Crash. `after_crash` is the disk as the
next process finds it. A name is on the disk once its folder was synced, and is found there if the
names of all folders above it are, too.

Locks belong to an owner, any object that stands for a process: `lock_as`, `release_locks`.
"""

import errno
import random
from collections.abc import Sequence

from holdfast.log.files.filesystem import ReadFile, WriteFile

SECTOR_BYTES = 512


class Crash(BaseException):
    """Power is gone. Not an Exception: nothing may handle it and go on."""


class SimContent:
    """One file's bytes: what is on the disk for sure, and what was written since."""

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = bytearray(durable)
        self.now = bytearray(durable)
        self.unsynced: list[tuple[int, bytes]] = []
        # The smallest size since the last sync: what was durable behind it is gone.
        self._smallest = len(durable)
        # Part of `now` will not get to the disk by itself.
        self.is_dropped = False

    def write(self, position: int, data: bytes) -> None:
        missing = position + len(data) - len(self.now)
        if missing > 0:
            self.now.extend(bytes(missing))
        self.now[position : position + len(data)] = data
        self.unsynced.append((position, data))

    def resize(self, size_bytes: int) -> None:
        if size_bytes > len(self.now):
            self.now.extend(bytes(size_bytes - len(self.now)))
            return
        del self.now[size_bytes:]
        self._smallest = min(self._smallest, size_bytes)
        self.unsynced = [
            (position, data[: max(0, size_bytes - position)])
            for position, data in self.unsynced
            if position < size_bytes
        ]

    def sync(self) -> None:
        durable = self.durable
        del durable[self._smallest :]
        durable.extend(bytes(len(self.now) - len(durable)))
        for position, data in self.unsynced:
            durable[position : position + len(data)] = data
        self._smallest = len(durable)
        self.unsynced = []

    def forget(self) -> None:
        """A sync has failed: what it should have written is in the cache alone, and is not tried
        again."""
        self.unsynced = []
        self.is_dropped = True

    def surviving(self, survival: str, chance: random.Random) -> bytes:
        """`survival`: "none" or "all" of the unsynced writes; "torn": a prefix of their bytes;
        "sectors": of each sector of the file, a prefix of the writes to it. The cache has whole
        sectors, so the bytes of a later write reach the disk only with those of an earlier one."""
        if survival == "all" and self.is_dropped:
            self.sync()
            return bytes(self.durable)
        if survival == "all":
            return bytes(self.now)
        if survival == "none":
            return bytes(self.durable)
        content = bytearray(self.durable)
        sectors = [
            (position + max(at, 0), data[max(at, 0) : at + SECTOR_BYTES])
            for position, data in self.unsynced
            for at in range(-(position % SECTOR_BYTES), len(data), SECTOR_BYTES)
        ]
        if survival == "torn":
            sectors = sectors[: chance.randint(0, len(sectors))]
            if sectors:
                position, data = sectors[-1]
                sectors[-1] = (position, data[: chance.randint(0, len(data))])
        else:
            lost: set[int] = set()
            kept: list[tuple[int, bytes]] = []
            for position, data in sectors:
                if position // SECTOR_BYTES not in lost and chance.random() < 0.5:
                    kept.append((position, data))
                else:
                    lost.add(position // SECTOR_BYTES)
            sectors = kept
        for position, data in sectors:
            missing = position + len(data) - len(content)
            if missing > 0:
                content.extend(bytes(missing))
            content[position : position + len(data)] = data
        if len(self.now) < len(content):
            del content[len(self.now) :]
        return bytes(content)


class SimReadFile:
    def __init__(self, content: SimContent) -> None:
        self._content = content

    def read(self, position: int, length: int) -> bytes:
        return bytes(self._content.now[position : position + length])

    def size(self) -> int:
        return len(self._content.now)


class SimWriteFile:
    def __init__(self, disk: "SimDisk", content: SimContent) -> None:
        self._disk = disk
        self._content = content

    def write(self, position: int, data: Sequence[bytes]) -> None:
        whole = b"".join(data)
        if self._disk.step():
            self._content.write(position, whole[: len(whole) // 2])
            raise Crash
        growth = position + len(whole) - len(self._content.now)
        if growth > self._disk.free_bytes():
            fits = max(0, len(whole) - (growth - self._disk.free_bytes()))
            self._content.write(position, whole[:fits])
            raise OSError(errno.ENOSPC, "No space left on device")
        self._content.write(position, whole)

    def sync(self) -> None:
        if self._disk.fail_sync:
            self._content.forget()
            raise OSError(errno.EIO, "Input/output error")
        if self._disk.step():
            raise Crash
        self._content.sync()

    def truncate(self, size_bytes: int) -> None:
        if self._disk.step():
            raise Crash
        self._content.resize(size_bytes)

    def allocate(self, size_bytes: int) -> None:
        if size_bytes - len(self._content.now) > self._disk.free_bytes():
            raise OSError(errno.ENOSPC, "No space left on device")
        self.truncate(max(size_bytes, len(self._content.now)))

    def close(self) -> None:
        return None


class SimLock:
    def __init__(self, disk: "SimDisk", content: SimContent) -> None:
        self._disk = disk
        self._content = content

    def release(self) -> None:
        self._disk.locks.pop(self._content, None)


class SimDisk:
    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        self.fail_sync = False
        self.steps = 0
        self.crash_at = -1
        self.files: dict[str, SimContent] = {}
        # Names as they are on the disk; others are lost in a crash.
        self.durable_names: dict[str, SimContent] = {}
        self.folders: set[str] = set()
        self.durable_folders: set[str] = set()
        # Locks are of a file, not of a name.
        self.locks: dict[SimContent, object] = {}

    def step(self) -> bool:
        """Count one; True if the power goes off in the middle of it."""
        self.steps += 1
        return self.steps == self.crash_at

    def list(self, folder: str, *, must_exist: bool = False) -> list[str]:
        if must_exist and folder and folder not in self.folders:
            raise FileNotFoundError(folder)
        prefix = f"{folder}/" if folder else ""
        names = {
            name.removeprefix(prefix).partition("/")[0]
            for names in (self.files, self.folders)
            for name in names
            if name.startswith(prefix)
        }
        return sorted(names)

    def make_folder(self, folder: str) -> None:
        for name in (*_parents(folder), folder):
            if name not in self.folders:
                if self.step():
                    raise Crash
                self.folders.add(name)

    def open_read(self, name: str) -> ReadFile:
        if name not in self.files:
            raise FileNotFoundError(name)
        return SimReadFile(self.files[name])

    def open_write(self, name: str, *, create: bool) -> WriteFile:
        if create:
            if name in self.files:
                raise FileExistsError(name)
            if self.step():
                raise Crash
            self.files[name] = SimContent()
        elif name not in self.files:
            raise FileNotFoundError(name)
        return SimWriteFile(self, self.files[name])

    def rename(self, name: str, new_name: str) -> None:
        if name not in self.files:
            raise FileNotFoundError(name)
        if self.step():
            raise Crash
        self.files[new_name] = self.files.pop(name)

    def remove(self, name: str) -> None:
        if name not in self.files:
            raise FileNotFoundError(name)
        if self.step():
            raise Crash
        del self.files[name]

    def link(self, name: str, new_name: str) -> None:
        if name not in self.files:
            raise FileNotFoundError(name)
        if new_name in self.files:
            raise FileExistsError(new_name)
        if self.step():
            raise Crash
        self.files[new_name] = self.files[name]

    def remove_folder(self, folder: str) -> None:
        if folder not in self.folders:
            raise FileNotFoundError(folder)
        if self.list(folder):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", folder)
        if self.step():
            raise Crash
        self.folders.remove(folder)

    def sync_folder(self, folder: str) -> None:
        if self.step():
            raise Crash
        for name in [name for name in self.durable_names if _parent(name) == folder]:
            del self.durable_names[name]
        for name, content in self.files.items():
            if _parent(name) == folder:
                self.durable_names[name] = content
        self.durable_folders = {
            name
            for name in self.durable_folders | self.folders
            if (name in self.folders if _parent(name) == folder else name in self.durable_folders)
        }

    def lock(self, name: str) -> SimLock | None:
        return self.lock_as(self, name)

    def lock_as(self, owner: object, name: str) -> SimLock | None:
        if name not in self.files:
            self.open_write(name, create=True)
        content = self.files[name]
        if content in self.locks:
            return None
        self.locks[content] = owner
        return SimLock(self, content)

    def is_locked(self, name: str) -> bool:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name] in self.locks

    def release_locks(self, owner: object) -> None:
        """The process has ended."""
        self.locks = {content: by for content, by in self.locks.items() if by is not owner}

    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(len(each.now) for each in set(self.files.values()))

    def damage(self, name: str, chance: random.Random) -> int:
        """Change a byte; the position of it."""
        content = self.files[name]
        position = chance.randrange(len(content.now))
        for data in (content.now, content.durable):
            if position < len(data):
                data[position] ^= 0xFF
        return position

    def after_crash(self, survival: str, seed: int) -> "SimDisk":
        """See SimContent.surviving; names survive by the same rule."""
        chance = random.Random(seed)
        names = dict(self.durable_names)
        folders = self.durable_folders
        if survival == "all" or (survival != "none" and chance.random() < 0.5):
            names = dict(self.files)
            folders = self.folders
        disk = SimDisk(self.capacity_bytes)
        known = self.folders | self.durable_folders
        disk.folders = {
            name for name in folders if all(above in folders for above in _parents(name))
        }
        survivors: dict[SimContent, SimContent] = {}
        for name, content in names.items():
            if all(above in disk.folders for above in _parents(name) if above in known):
                if content not in survivors:
                    survivors[content] = SimContent(content.surviving(survival, chance))
                disk.files[name] = survivors[content]
        disk.durable_names = dict(disk.files)
        disk.durable_folders = set(disk.folders)
        return disk

    def after_kill(self) -> "SimDisk":
        """The process is gone, the machine is not: what was not synced still is not."""
        self.crash_at = -1
        self.steps = 0
        return self

    def copy(self) -> "SimDisk":
        return self.after_crash("all", 0)


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _parents(name: str) -> list[str]:
    """Outermost first."""
    parts = name.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
