"""Files of a lease, under DIR/lease.

    epochs            one page per epoch, written when it is claimed: the size tells the newest
    <epoch>.claim     created exclusively by the claimant; JSON: who it is; locked as long as it
                      lives and has not given up
    <epoch>.beat      16 bytes: a counter that grows while the holder lives, and RELEASED or 0
    handover          JSON: an operator's wish that the holder of an epoch hands over
    nodes/<id>.json   each node that runs, its role and addresses; locked as long as it lives
    nodes/<id>.one    written by a process that serves as a cluster of one: its number and start

An epoch is *claimed* once its page is in `epochs`. That fences every older holder, because a holder
reads `epochs` after each write and before each promise. The epoch *counts* once
epochs/<epoch>/epoch.json has its seals (`log.journal.epoch_folders`).

A single growing file is used because opening it again makes another node's write visible over NFS
(close-to-open consistency). A check for a file that does not exist yet may be served from a cache.
Each epoch has its own page so that two claimants never write to the same one. Neither can undo the
other's write.
"""

import json
import struct
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from holdfast.log.files.filesystem import FileSystem, Lock, WriteFile, read_file, replace_file
from holdfast.log.files.json_object import decode_object
from holdfast.log.journal.epoch_folders import (
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
"""The flag of a holder that has stopped, with everything it promised in the journal."""
_BEAT: Final = struct.Struct(">QQ")


class HolderInfo(Struct, frozen=True):
    """The description of a node for the other nodes of the directory."""

    node_id: str
    address: str = ""
    """The host:port for its clients; the Server Reference of MQTT."""
    admin: str = ""
    """The host:port of its admin port, or ""."""
    machine: str = ""
    """A name that is equal for processes that see one another's process ids."""
    pid: int = 0
    process_start: int = 0
    """The clock ticks from boot to the start of the process. They distinguish it from a later
    process with the same id."""
    since_us: int = 0
    """The wall clock in microseconds when it took its role."""
    role: str = ""
    """"holder" or "standby"; "" in a claim."""


class LeaseBeat(Struct, frozen=True):
    """The content of a beat file."""

    counter: int
    is_released: bool


class LeaseDirectory:
    """The names and formats of the lease's files. It keeps no state between calls. Every method may
    raise `OSError`."""

    def __init__(self, root: FileSystem) -> None:
        self.root = root

    # Epochs

    def newest_claimed(self) -> int:
        """The newest claimed epoch; 0 without one."""
        return newest_claimed(self.root)

    def next_epoch(self) -> int:
        """An epoch that no node has begun to claim."""
        names = self.root.list(LEASE, must_exist=True)
        begun = [_epoch_of(name) for name in names if name.endswith(".claim")]
        return 1 + max([self.newest_claimed(), *begun, *epoch_folders(self.root)])

    def begin_claim(self, epoch: int, info: HolderInfo) -> Lock | None:
        """Creates the claim file and returns its lock; None if another node was faster."""
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
        """Writes the epoch's page to `epochs`, durably. Older holders are fenced when this
        returns."""
        file = self.root.open_write(CLAIMED_NAME, create=False)
        try:
            file.write(epoch * CLAIM_BYTES, [epoch.to_bytes(8, "big")])
            file.sync()
        finally:
            file.close()

    def read_claim(self, epoch: int) -> HolderInfo | None:
        """The claimant; None if there is no claim, or it is being written."""
        return self._read_node(claim_name(epoch))

    def is_locked(self, epoch: int) -> bool:
        """True if the claimant lives, according to its lock, or if locks cannot show it."""
        try:
            return self.root.is_locked(claim_name(epoch))
        except FileNotFoundError:
            return True

    # Beats

    def create_beat(self, epoch: int) -> WriteFile:
        """Creates the beat file of an epoch."""
        return self.root.open_write(f"{LEASE}/{_digits(epoch)}.beat", create=True)

    def read_beat(self, epoch: int) -> LeaseBeat:
        """The last beat of the epoch's holder; its counter is 0 before the first."""
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
        """Asks the holder of this epoch to hand over."""
        self._write_json(HANDOVER, {"epoch": epoch})

    def handover_requested(self, epoch: int) -> bool:
        """True if an operator asked the holder of this epoch to hand over."""
        try:
            content = self._read_json(HANDOVER)
        except FileNotFoundError:
            return False
        return content is not None and bool(content.get("epoch") == epoch)

    # Nodes

    def lock_node(self, node_id: str) -> Lock | None:
        """Locks the node id. Returns None if a node of this id runs on the directory already."""
        self.root.make_folder(NODES)
        return self.root.lock(f"{NODES}/{node_id}.lock")

    def write_node(self, info: HolderInfo) -> None:
        """Publishes the description of a running node, which a power cut ends, too."""
        self._write_json(f"{NODES}/{info.node_id}.json", asdict(info), sync=False)

    def mark_form(self, info: HolderInfo) -> None:
        """Announces that the node serves as a cluster of one."""
        replace_file(self.root, f"{NODES}/{info.node_id}.one", [_form(info)], sync=False)

    def nodes_without_form(self) -> list[str]:
        """The running nodes that serve a directory only as a single broker, as version 0.1 does. A
        mark of an earlier process does not count."""
        present = self.root.list(NODES)
        return [
            info.node_id
            for info in self.nodes()
            if f"{info.node_id}.one" not in present
            or read_file(self.root, f"{NODES}/{info.node_id}.one") != _form(info)
        ]

    def remove_node(self, node_id: str) -> None:
        """Removes the description of a node that stops."""
        for ending in ("json", "one"):
            with suppress(FileNotFoundError):
                self.root.remove(f"{NODES}/{node_id}.{ending}")

    def nodes(self) -> list[HolderInfo]:
        """The nodes that run."""
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
        """Removes the claims and beats of older epochs. `epochs` keeps their numbers."""
        for name in self.root.list(LEASE):
            if name.endswith((".claim", ".beat")) and 0 < _epoch_of(name) < epoch:
                try:
                    self.root.remove(f"{LEASE}/{name}")
                except FileNotFoundError:
                    continue

    def _read_node(self, name: str) -> HolderInfo | None:
        try:
            content = self._read_json(name)
            return None if content is None else HolderInfo(**content)
        except (FileNotFoundError, TypeError):
            return None

    def _read_json(self, name: str) -> Any:
        """The content of the file; None if it is incomplete."""
        data = read_file(self.root, name)
        try:
            return decode_object(data)
        except ValueError:
            return None

    def _write_json(self, name: str, content: dict[str, object], *, sync: bool = True) -> None:
        replace_file(self.root, name, [json.dumps(content, indent=1).encode() + b"\n"], sync=sync)


def write_beat(file: WriteFile, counter: int, flags: int) -> None:
    """Renews the lease: writes the counter and the flags."""
    file.write(0, [_BEAT.pack(counter, flags)])


def _form(info: HolderInfo) -> bytes:
    return f"{info.machine} {info.pid} {info.process_start}".encode()


def claim_name(epoch: int) -> str:
    """The name of an epoch's claim file."""
    return f"{LEASE}/{_digits(epoch)}.claim"


def _digits(epoch: int) -> str:
    return f"{epoch:0{EPOCH_DIGITS}d}"


def _epoch_of(name: str) -> int:
    stem = name.partition(".")[0]
    return int(stem) if stem.isdecimal() else 0
