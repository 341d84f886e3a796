"""The files of a lease, under DIR/lease.

    epochs            one page per epoch, written when it is claimed: the size tells the newest
    <epoch>.claim     created exclusively by the claimant; JSON: who it is; locked as long as it
                      lives and has not given up
    <epoch>.beat      16 bytes: a counter that grows while the holder lives, and RELEASED or 0
    handover          JSON: an operator's wish that the holder of an epoch hands over
    nodes/<id>.json   each node that runs, its role and addresses; locked as long as it lives

An epoch is *claimed* once its page is in `epochs`: that fences every older holder, which looks
there after each write and before each promise. It *counts* once epochs/<epoch>/epoch.json says
what it sealed (holdfast.storage.journal.epoch_folders).

Why one file that grows: opening it anew makes another node's write visible over NFS (close-to-open
consistency), where a look for a file that is not there yet may be answered from a cache. Why a
page each: two claimants never write to the same one, so neither can undo what the other wrote.
"""

import json
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final

from holdfast.storage.files.filesystem import FileSystem, Lock, WriteFile, read_whole, write_whole
from holdfast.storage.journal.epoch_folders import (
    CLAIM_BYTES,
    CLAIMED_NAME,
    EPOCH_DIGITS,
    LEASE,
    epoch_folders,
    newest_claimed,
)

NODES: Final = f"{LEASE}/nodes"
HANDOVER: Final = f"{LEASE}/handover"
RELEASED: Final = 1
"""The holder has stopped and everything it promised is in the journal."""
_BEAT: Final = struct.Struct(">QQ")


@dataclass(frozen=True)
class HolderInfo:
    """What the others need to know of a node."""

    node_id: str
    address: str = ""
    """Where its clients connect, host:port; goes into Server Reference."""
    admin: str = ""
    """host:port of its admin port, or empty."""
    machine: str = ""
    """Equal for processes that see one another's process ids."""
    pid: int = 0
    process_start: int = 0
    """Clock ticks from boot to the start of the process: tells it from a later one of the pid."""
    since_us: int = 0
    """Wall clock when it took its role."""
    role: str = ""
    """"holder" or "standby"; "" in a claim."""


@dataclass(frozen=True)
class LeaseBeat:
    counter: int
    is_released: bool


class LeaseDirectory:
    """Names and formats; nothing is kept between calls. Every method may raise OSError."""

    def __init__(self, root: FileSystem) -> None:
        self.root = root

    # Epochs

    def newest_claimed(self) -> int:
        """0 if none was."""
        return newest_claimed(self.root)

    def next_epoch(self) -> int:
        """One that nobody has begun to claim so far."""
        names = self.root.list(LEASE, must_exist=True)
        begun = [_number(name) for name in names if name.endswith(".claim")]
        return 1 + max([self.newest_claimed(), *begun, *epoch_folders(self.root)])

    def begin_claim(self, epoch: int, info: HolderInfo) -> Lock | None:
        """Create the claim file; None if somebody else was faster. The lock is the claimant's."""
        name = claim_name(epoch)
        try:
            file = self.root.open_write(name, create=True)
        except FileExistsError:
            return None
        lock = None
        try:
            lock = self.root.lock(name)
            file.write(0, [json.dumps(asdict(info), indent=1).encode() + b"\n"])
            file.sync()
            self.root.sync_folder(LEASE)
        except OSError:
            if lock is not None:
                lock.release()
            # Attempts on a full disk would leave a file each.
            with suppress(OSError):
                self.root.remove(name)
            raise
        finally:
            file.close()
        return lock

    def announce_epoch(self, epoch: int) -> None:
        """Write its page to `epochs`, durably: older holders are fenced when this returns."""
        file = self.root.open_write(CLAIMED_NAME, create=False)
        try:
            file.write(epoch * CLAIM_BYTES, [epoch.to_bytes(8, "big")])
            file.sync()
        finally:
            file.close()

    def read_claim(self, epoch: int) -> HolderInfo | None:
        """None if there is none, or it is being written."""
        return self._read_node(claim_name(epoch))

    def is_locked(self, epoch: int) -> bool:
        """Whether the claimant lives, as far as locks tell; True if there is no way to know."""
        try:
            return self.root.is_locked(claim_name(epoch))
        except FileNotFoundError:
            return True

    # Beats

    def create_beat(self, epoch: int) -> WriteFile:
        return self.root.open_write(f"{LEASE}/{_digits(epoch)}.beat", create=True)

    def read_beat(self, epoch: int) -> LeaseBeat:
        """A counter of 0 until the first one."""
        try:
            data = self.root.open_read(f"{LEASE}/{_digits(epoch)}.beat").read(0, _BEAT.size)
        except FileNotFoundError:
            data = b""
        if len(data) < _BEAT.size:
            return LeaseBeat(0, False)
        counter, flags = _BEAT.unpack(data)
        return LeaseBeat(counter, bool(flags & RELEASED))

    # Hand-over

    def request_handover(self, epoch: int) -> None:
        self._write_json(HANDOVER, {"epoch": epoch})

    def handover_requested(self, epoch: int) -> bool:
        try:
            content = self._read_json(HANDOVER)
        except FileNotFoundError:
            return False
        return isinstance(content, dict) and content.get("epoch") == epoch

    # Nodes

    def lock_node(self, node_id: str) -> Lock | None:
        """None if a node of this id runs on the directory already."""
        self.root.make_folder(NODES)
        return self.root.lock(f"{NODES}/{node_id}.lock")

    def write_node(self, info: HolderInfo) -> None:
        self._write_json(f"{NODES}/{info.node_id}.json", asdict(info))

    def remove_node(self, node_id: str) -> None:
        try:
            self.root.remove(f"{NODES}/{node_id}.json")
        except FileNotFoundError:
            return

    def nodes(self) -> list[HolderInfo]:
        """Those that run."""
        found = []
        for name in self.root.list(NODES):
            if name.endswith(".json"):
                info = self._read_node(f"{NODES}/{name}")
                if info is not None and self._node_lives(info.node_id):
                    found.append(info)
        return found

    def _node_lives(self, node_id: str) -> bool:
        try:
            return self.root.is_locked(f"{NODES}/{node_id}.lock")
        except FileNotFoundError:
            return False

    # Housekeeping

    def forget_before(self, epoch: int) -> None:
        """Remove claims and beats of older epochs; `epochs` keeps their numbers."""
        for name in self.root.list(LEASE):
            if name.endswith((".claim", ".beat")) and 0 < _number(name) < epoch:
                try:
                    self.root.remove(f"{LEASE}/{name}")
                except FileNotFoundError:
                    continue

    def _read_node(self, name: str) -> HolderInfo | None:
        try:
            content = self._read_json(name)
            return HolderInfo(**content) if isinstance(content, dict) else None
        except (FileNotFoundError, TypeError):
            return None

    def _read_json(self, name: str) -> object:
        """None if it is not whole."""
        data = read_whole(self.root, name)
        try:
            return json.loads(data)
        except ValueError:
            return None

    def _write_json(self, name: str, content: dict[str, object]) -> None:
        write_whole(self.root, name, [json.dumps(content, indent=1).encode() + b"\n"])


def write_beat(file: WriteFile, counter: int, flags: int) -> None:
    file.write(0, [_BEAT.pack(counter, flags)])


def claim_name(epoch: int) -> str:
    return f"{LEASE}/{_digits(epoch)}.claim"


def _digits(epoch: int) -> str:
    return f"{epoch:0{EPOCH_DIGITS}d}"


def _number(name: str) -> int:
    stem = name.partition(".")[0]
    return int(stem) if stem.isdecimal() else 0
