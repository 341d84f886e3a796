"""What one simulated process sees of a simulated disk that it shares: every call takes a while,
another process may come in between, and some fail.

Calls on the disk itself (SimDisk) take no time; checkers use that.
"""

import errno
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.log.files.filesystem import Lock, ReadFile, WriteFile
from tests.sim.disk import SimDisk
from tests.support.sim_schedule import Killed, Owner, ThreadSchedule


@dataclass
class Weather:
    """What goes wrong with the directory, for all processes."""

    chance: random.Random
    call_s: float = 0.0001
    """How long a call takes on average."""
    stalls: dict[str, float] = field(default_factory=dict)
    """Probability that a call of this name ("": all others) takes up to `stall_s_max`."""
    stall_s_max: float = 1.5
    eio: float = 0.0
    """Probability that a call fails."""
    is_gone: bool = False
    is_read_only: bool = False


class Process(Owner):
    """A simulated process with its view of the shared directory."""

    def __init__(self, schedule: ThreadSchedule, disk: SimDisk, weather: Weather) -> None:
        super().__init__()
        self.schedule = schedule
        self.disk = disk
        self.weather = weather
        self.is_troubled = True
        """Calls may stall and fail."""

    def end(self) -> None:
        self.schedule.kill(self)
        self.disk.release_locks(self)

    # FileSystem

    def list(self, folder: str, *, must_exist: bool = False) -> list[str]:
        self.call("list")
        if self.weather.is_gone:
            if must_exist:
                raise FileNotFoundError(folder)
            return []
        return self.disk.list(folder, must_exist=must_exist)

    def make_folder(self, folder: str) -> None:
        self._change("make_folder", "")
        self.disk.make_folder(folder)

    def open_read(self, name: str) -> ReadFile:
        self._look("open_read", name)
        return _Reading(self, self.disk.open_read(name))

    def open_write(self, name: str, *, create: bool) -> WriteFile:
        self._change("create" if create else "open_write", name)
        return _Writing(self, self.disk.open_write(name, create=create), name)

    def rename(self, name: str, new_name: str) -> None:
        self._change("rename", new_name)
        self.disk.rename(name, new_name)

    def remove(self, name: str) -> None:
        self._change("remove", name)
        self.disk.remove(name)

    def link(self, name: str, new_name: str) -> None:
        self._change("link", new_name)
        self.disk.link(name, new_name)

    def remove_folder(self, folder: str) -> None:
        self._change("remove_folder", folder)
        self.disk.remove_folder(folder)

    def sync_folder(self, folder: str) -> None:
        self._look("sync_folder", f"{folder}/" if folder else "")
        self.disk.sync_folder(folder)

    def free_bytes(self) -> int:
        return self.disk.free_bytes()

    def lock(self, name: str) -> Lock | None:
        self._change("lock", name)
        return self.disk.lock_as(self, name)

    def is_locked(self, name: str) -> bool:
        self._change("is_locked", name)
        return self.disk.is_locked(name)

    # Time and trouble

    def call(self, name: str) -> None:
        """It happens at its beginning, or at its end: so the delay comes before it only."""
        if self.is_killed:
            raise Killed
        weather = self.weather
        chance = weather.chance
        duration_s = chance.random() * 2 * weather.call_s
        if self.is_troubled:
            stalls = weather.stalls.get(name, weather.stalls.get("", 0.0))
            if stalls and chance.random() < stalls:
                duration_s += chance.random() ** 2 * weather.stall_s_max
        self.schedule.sleep(duration_s)
        if self.is_troubled and weather.eio and chance.random() < weather.eio:
            raise OSError(errno.EIO, "Input/output error")

    def _look(self, call: str, name: str) -> None:
        self.call(call)
        folder = name.rpartition("/")[0]
        if self.weather.is_gone or (folder and folder not in self.disk.folders):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)

    def _change(self, call: str, name: str) -> None:
        self._look(call, name)
        if self.weather.is_read_only:
            raise OSError(errno.EROFS, "Read-only file system", name)


class _Reading:
    def __init__(self, process: Process, file: ReadFile) -> None:
        self._process = process
        self._file = file

    def read(self, position: int, length: int) -> bytes:
        self._process.call("read")
        return self._file.read(position, length)

    def size(self) -> int:
        self._process.call("size")
        return self._file.size()


class _Writing:
    def __init__(self, process: Process, file: WriteFile, name: str) -> None:
        self.name = name
        self._process = process
        self._file = file

    def write(self, position: int, data: Sequence[bytes]) -> None:
        """In two pieces now and then: another process may see the first alone."""
        process = self._process
        process.call("write")
        self._may_write()
        whole = b"".join(data)
        if process.weather.chance.random() < 0.3:
            half = process.weather.chance.randint(0, len(whole))
            self._file.write(position, [whole[:half]])
            process.call("write")
            position += half
            whole = whole[half:]
        self._file.write(position, [whole])

    def sync(self) -> None:
        self._process.call("sync")
        self._file.sync()

    def truncate(self, size_bytes: int) -> None:
        self._process.call("truncate")
        self._may_write()
        self._file.truncate(size_bytes)

    def allocate(self, size_bytes: int) -> None:
        self._process.call("allocate")
        self._may_write()
        self._file.allocate(size_bytes)

    def close(self) -> None:
        return None

    def _may_write(self) -> None:
        if self._process.weather.is_read_only:
            raise OSError(errno.EROFS, "Read-only file system")
