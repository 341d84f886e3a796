"""The system calls of a process, as strace writes them, and the rules of durability about them.

A call that strace completes in one line happened between the lines around it. One that is cut in
two (`<unfinished ...>`, `resumed`) began at its first line and ended at its second: a write counts
from its first line on, a sync from its second.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

CALLS: Final = (
    "openat,write,pwrite64,writev,pwritev,sendto,sendmsg,fdatasync,fsync,rename,renameat,"
    "renameat2,ftruncate,fallocate,unlink"
)
OPTIONS: Final = ("-D", "-f", "-q", "-y", "-xx", "-s", "65536", "-e", f"trace={CALLS}")
"""The options of strace, which then is no parent of what it traces: a signal reaches the traced
process."""
WRITES: Final = frozenset({"write", "pwrite64", "writev", "pwritev", "ftruncate", "fallocate"})
SENDS: Final = frozenset({"write", "writev", "sendto", "sendmsg"})
SYNCS: Final = frozenset({"fdatasync", "fsync"})
PUBACK: Final = 0x40
_HEX: Final = re.compile(r"(?:\\x[0-9a-f]{2})+")
_LINE: Final = re.compile(r"(\d+) +(?:<\.\.\. )?(\w+)(\(| resumed>)(.*)")


@dataclass(frozen=True)
class Call:
    name: str
    paths: tuple[str, ...]
    """The file or socket of its descriptor, or the files that it names."""
    data: bytes
    """The data that it writes."""
    is_begun: bool
    """False for the second line of a call that was cut in two."""
    is_done: bool
    """Whether it succeeded; False also for the first line of a call that was cut in two."""
    creates: bool = False


def _bytes_of(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def parse(lines: Iterable[str]) -> Iterator[Call]:
    """The calls in their order."""
    begun: dict[tuple[str, str], Call] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        thread, name, kind, rest = match.groups()
        is_done = re.search(r"\) += (?:\d+)", line) is not None
        if kind != "(":
            first = begun.pop((thread, name))
            yield Call(name, first.paths, first.data, False, is_done, first.creates)
            continue
        texts = [_bytes_of(text) for text in _HEX.findall(rest)]
        is_named = name.startswith(("open", "rename", "unlink"))
        names = texts[:] if is_named else texts[:1]
        if name.startswith("open"):
            # The folder of AT_FDCWD comes first.
            names = names[-1:]
        call = Call(
            name,
            tuple(each.decode(errors="replace") for each in names),
            b"" if is_named else b"".join(texts[1:]),
            True,
            is_done,
            "O_CREAT" in rest,
        )
        if "<unfinished" in line:
            begun[thread, name] = call
        yield call


@dataclass
class _File:
    is_dirty: bool = False
    tokens: list[bytes] = field(default_factory=list)


@dataclass
class SyncRules:
    """Finds the calls that promise what is not on the disk. `tokens`: the payload of each QoS 1
    packet id, which no other record contains."""

    tokens: dict[int, bytes]
    broken: list[str] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    rotated: int = 0
    renamed: int = 0
    _files: dict[str, _File] = field(default_factory=dict)
    _durable: set[bytes] = field(default_factory=set)
    _unsynced_folders: set[str] = field(default_factory=set)
    _newest_segment: str = ""

    def see_all(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._see(call)
        for folder in sorted(self._unsynced_folders):
            self.broken.append(f"{folder} has a new name, and was never synced")

    def _file(self, path: str) -> _File:
        return self._files.setdefault(path, _File())

    def _see(self, call: Call) -> None:
        path = call.paths[0] if call.paths else ""
        if path.startswith(("socket:", "TCP")):
            if call.name in SENDS and call.is_begun:
                self._sent(call.data)
        elif call.name.startswith("open"):
            if call.creates and call.is_done and path.endswith(".log"):
                self._created(path)
        elif call.name in WRITES:
            if call.is_begun and path.startswith("/"):
                self._wrote(path, call.data)
        elif call.name in SYNCS and call.is_done:
            self._synced(path)
        elif call.name.startswith("rename") and call.is_done:
            self._renamed(*call.paths[-2:])

    def _created(self, path: str) -> None:
        self._unsynced_folders.add(str(PurePosixPath(path).parent))
        before = self._newest_segment
        self._newest_segment = path
        if before and PurePosixPath(before).parent == PurePosixPath(path).parent:
            self.rotated += 1
            if self._file(before).is_dirty:
                self.broken.append(f"{path} was begun, and {before} was not synced")

    def _wrote(self, path: str, data: bytes) -> None:
        file = self._file(path)
        file.is_dirty = True
        if path.endswith(".log"):
            file.tokens += [token for token in self.tokens.values() if token in data]

    def _synced(self, path: str) -> None:
        self._unsynced_folders.discard(path)
        file = self._file(path)
        file.is_dirty = False
        folder = str(PurePosixPath(path).parent)
        if folder in self._unsynced_folders and file.tokens:
            self.broken.append(f"{path} has a record, and its name is not synced")
        self._durable.update(file.tokens)
        file.tokens.clear()

    def _renamed(self, before: str, after: str) -> None:
        if after.endswith(".idx"):
            # An index is built again from its segment.
            return
        self.renamed += 1
        if self._file(before).is_dirty:
            self.broken.append(f"{after} got its name, and its content was not synced")
        self._unsynced_folders.add(str(PurePosixPath(after).parent))

    def _sent(self, data: bytes) -> None:
        at = 0
        while at + 4 <= len(data) and data[at + 1] < 0x80:
            if data[at] == PUBACK:
                packet_id = int.from_bytes(data[at + 2 : at + 4], "big")
                self.acknowledged.append(packet_id)
                if self.tokens[packet_id] not in self._durable:
                    self.broken.append(f"PUBACK {packet_id} was sent before its record was synced")
            at += 2 + data[at + 1]
