"""Finds a shared directory's file system, and whether a lease is safe there."""

import os
from pathlib import Path
from typing import Final

NETWORK: Final = frozenset({"nfs4", "cephfs", "ceph", "glusterfs", "fuse.glusterfs", "lustre"})
"""File systems of several machines: a write must reach the server before others see it."""
REFUSED: Final = {
    "nfs": "NFS version 3 has no locks that end with their holder: mount it with vers=4.1",
    "cifs": "SMB has no hard links and locks as this needs them: use NFS 4.1",
    "smb3": "SMB has no hard links and locks as this needs them: use NFS 4.1",
    "vfat": "this file system has no hard links: use ext4, xfs or NFS 4.1",
    "exfat": "this file system has no hard links: use ext4, xfs or NFS 4.1",
}
_RECOVER_LOST_LOCKS: Final = Path("/sys/module/nfs/parameters/recover_lost_locks")


def file_system_type(path: Path, mounts: str | None = None) -> str:
    """Returns the type named in /proc/self/mountinfo (`mounts`: its text), "" if unknown."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return ""
    wanted = os.path.realpath(path)
    longest = -1
    found = ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = fields[4].encode().decode("unicode_escape")
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        # The later of two mounts on one point covers the earlier one.
        if inside and len(point) >= longest:
            longest = len(point)
            found = after.split()[0]
    return found


def objection(kind: str) -> str:
    """Returns why a file system of this type cannot be shared, "" if it can."""
    if kind == "nfs4":
        try:
            recovers = _RECOVER_LOST_LOCKS.read_text().strip() in ("Y", "1")
        except OSError:
            recovers = False
        if recovers:
            return (
                "the kernel parameter nfs.recover_lost_locks is on: a client that lost its lock"
                " would write on; set it to 0"
            )
    return REFUSED.get(kind, "")
