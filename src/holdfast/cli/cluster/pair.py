"""`holdfast cluster --data`: the nodes that share a data directory.

    status     the holder of the lease and the standbys; exit code 1 without a holder
    handover   let the holder hand over to a standby, without loss or duplicates

Both use the directory itself, so they need the rights of a node and no admin port.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.addresses import plain_address
from holdfast.log.files.data_directory import DataDirectoryError, read_manifest
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.journal.epoch_folders import LEASE, CorruptEpoch, Epoch, newest_epoch
from holdfast.node.lease.directory import HolderInfo, LeaseDirectory

EXIT_NOBODY: Final = 1
EXIT_UNREADABLE: Final = 2
WATCH_S: Final = 1.0
"""The time in seconds that a holder may show no beat before it is called silent."""
POLL_S: Final = 0.02
HANDOVER_TIMEOUT_S: Final = 15.0


class NotShared(Exception):
    """The directory is not shared, or not in the needed state. The text says what to do."""


@dataclass(frozen=True)
class Status:
    """The lease of a shared directory at one moment."""

    epoch: Epoch
    holder: HolderInfo | None
    """The holder, or None if no node holds the lease."""
    is_renewing: bool
    """Whether the holder's counter grew during the observation."""
    nodes: list[HolderInfo]

    @property
    def standbys(self) -> list[HolderInfo]:
        holder = "" if self.holder is None else self.holder.node_id
        return [node for node in self.nodes if node.node_id != holder]

    def as_json(self) -> dict[str, object]:
        return {
            "epoch": self.epoch.number,
            "began": self.epoch.began,
            "holder": None if self.holder is None else _node_json(self.holder),
            "renewing": self.is_renewing,
            "standbys": [_node_json(node) for node in self.standbys],
        }


def run(args: argparse.Namespace) -> int:
    """Runs `status` or `handover` on `args.data`."""
    try:
        directory = _open(args.data)
        if args.cluster_command == "status":
            return _print_status(directory, args.json)
        return _hand_over(directory, args.timeout)
    except (DataDirectoryError, NotShared, CorruptEpoch) as error:
        print(f"holdfast: {error}", file=sys.stderr)
    except OSError as error:
        print(f"holdfast: {args.data}: {error.strerror or error}", file=sys.stderr)
    return EXIT_UNREADABLE


def is_shared(path: Path) -> bool:
    """Returns whether a directory has a lease, and so is shared."""
    return (path / LEASE).is_dir()


def _open(path: Path) -> LeaseDirectory:
    files = OsFileSystem(path)
    read_manifest(files, path)
    if not files.list(LEASE):
        raise NotShared(f"{path} is not shared: start its nodes with --standby")
    return LeaseDirectory(files)


def read_status(directory: LeaseDirectory) -> Status:
    """Observes the holder for up to WATCH_S. Raises `OSError` or `CorruptEpoch`."""
    epoch = newest_epoch(directory.root)
    nodes = directory.nodes()
    holder = directory.read_claim(epoch.number) if epoch.number else None
    if holder is None or directory.newest_claimed() != epoch.number:
        return Status(epoch, None, False, nodes)
    first = directory.read_beat(epoch.number)
    if first.is_released or not directory.is_locked(epoch.number):
        return Status(epoch, None, False, nodes)
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        if directory.read_beat(epoch.number).counter != first.counter:
            return Status(epoch, holder, True, nodes)
        time.sleep(POLL_S)
    return Status(epoch, holder, False, nodes)


def _print_status(directory: LeaseDirectory, as_json: bool) -> int:
    status = read_status(directory)
    if as_json:
        print(json.dumps(status.as_json(), indent=1))
    else:
        print("\n".join(status_lines(status, time.time_ns() // 1000)))
    return 0 if status.holder is not None and status.is_renewing else EXIT_NOBODY


def status_lines(status: Status, now_us: int) -> list[str]:
    """Returns the status as lines for people."""
    lines = [f"epoch    {status.epoch.number}"]
    if status.holder is None:
        lines.append("holder   none")
    else:
        silent = "" if status.is_renewing else ", does not renew the lease"
        lines.append(f"holder   {_node_text(status.holder, now_us)}{silent}")
    lines += [f"standby  {_node_text(node, now_us)}" for node in status.standbys]
    if not status.standbys:
        lines.append("standby  none: no node would take over")
    return lines


def _node_text(node: HolderInfo, now_us: int) -> str:
    address = plain_address(node.address) or "address not known"
    admin = f", admin {node.admin}" if node.admin else ""
    return f"{node.node_id} at {address}{admin}, {_duration(now_us - node.since_us)}"


def _duration(us: int) -> str:
    seconds = max(0, us) / 1_000_000
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"for {seconds / size:.0f} {unit}"
    return f"for {seconds:.1f} s"


def _node_json(node: HolderInfo) -> dict[str, object]:
    return {
        "node": node.node_id,
        "address": plain_address(node.address),
        "admin": node.admin,
        "pid": node.pid,
        "since_us": node.since_us,
    }


def _hand_over(directory: LeaseDirectory, timeout_s: float) -> int:
    before = read_status(directory)
    if before.holder is None:
        raise NotShared("no node has the lease: there is nothing to hand over")
    if not before.standbys:
        raise NotShared(f"no standby would take over from {before.holder.node_id}: start one first")
    started = time.monotonic()
    directory.request_handover(before.epoch.number)
    while time.monotonic() - started < timeout_s:
        epoch = newest_epoch(directory.root)
        if epoch.number > before.epoch.number:
            took_s = time.monotonic() - started
            print(
                f"{before.holder.node_id} handed over to {epoch.node_id} in {took_s:.2f} s,"
                f" epoch {epoch.number}"
            )
            return 0
        time.sleep(POLL_S)
    print(
        f"holdfast: {before.holder.node_id} has not handed over within {timeout_s:g} s: look at"
        " its log",
        file=sys.stderr,
    )
    return EXIT_NOBODY
