"""Keeps a member's identity in a file, and locks its directory."""

import os
import secrets
import time
from pathlib import Path
from typing import Final

from holdfast.log.files.filesystem import OsFileSystem, OsLock, read_file, replace_file
from holdfast_federation.core.identity import (
    EPOCH_COUNTED_MAX,
    EPOCH_RANDOM_STEP,
    STEADY_S,
    BadIdentity,
    Identity,
    decode_identity,
)

IDENTITY: Final = "identity"
LOCK: Final = "lock"
DISPUTED: Final = "disputed"
IN_A_BROKER: Final = "federation"
"""The folder of a broker's member in the broker's data directory."""


def skip_starts(directory: Path, starts: int) -> None:
    """Skips starts of a member that no process runs. Raises `BadIdentity` and `OSError`."""
    files = OsFileSystem(directory)
    identity = decode_identity(read_file(files, IDENTITY))
    replace_file(files, IDENTITY, [identity.skipped(starts).encode()])


class IdentityFile:
    """The identity file of one directory, which is created if it is missing. Calls block.

    Each start has a higher epoch than the one before, stored durably before it is used. A reused
    epoch would give two messages the same id, and receivers would drop the second as a duplicate.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = OsFileSystem(directory)
        self._lock: OsLock | None = None
        self._identity: Identity | None = None

    def begin(self, id: str = "") -> Identity:
        """Locks the directory and returns the identity of this start, stored durably.

        `id`: 32 hexadecimal digits that it must have, or empty for any. Raises `BadIdentity` when
        the file or the lock prevents the start, `OSError` when the disk does.
        """
        self._files.make_folder(".")
        self._lock = self._files.lock(LOCK)
        if self._lock is None:
            raise BadIdentity(
                f"{self._directory} is in use by another process: stop it, or give this member a"
                " directory of its own"
            )
        try:
            before = self._read(id)
            identity = before.restarted(self._step() if before.epoch else 1)
            self._write(identity)
        except BaseException:
            self.release()
            raise
        return identity

    def disputed(self) -> int:
        """Returns the last epoch that another run of this member may have used; 0: none. Raises
        `BadIdentity` and `OSError`."""
        try:
            data = read_file(self._files, DISPUTED)
            return int(data)
        except FileNotFoundError:
            return 0
        except ValueError:
            path = self._directory / DISPUTED
            raise BadIdentity(f"{path} has no number: replace its content by 0") from None

    def dispute(self, epoch: int) -> None:
        """Stores that another run of this member has used epochs up to this one, so that the next
        start has a higher one and takes custody over. Raises `OSError`."""
        assert self._identity is not None
        # First, or a crash in between would leave custody under disputed epochs.
        replace_file(self._files, DISPUTED, [b"%d\n" % max(epoch, self._identity.epoch)])
        if epoch > self._identity.epoch:
            self._write(Identity(self._identity.node, epoch))

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _read(self, id: str) -> Identity:
        path = self._directory / IDENTITY
        try:
            identity = decode_identity(read_file(self._files, IDENTITY))
        except FileNotFoundError:
            return Identity(bytes.fromhex(id) if id else os.urandom(16))
        except BadIdentity as error:
            raise BadIdentity(f"{path}: {error}") from None
        if identity.epoch >= EPOCH_COUNTED_MAX:
            # An earlier version believed any epoch that others claimed for this member.
            raise BadIdentity(
                f"{path} has {identity.epoch} starts, which is not a count of starts: replace the"
                " number by 1000000, or by more if this member was ever started more often, and"
                " start again; its messages in custody are kept"
            )
        if id and identity.node.hex() != id:
            raise BadIdentity(
                f"{path} has the id {identity.node.hex()}, the configuration {id}: take one of them"
                " out, or give this member a directory of its own"
            )
        return identity

    def _step(self) -> int:
        age_s = time.time() - (self._directory / IDENTITY).stat().st_mtime
        return 1 if 0 <= age_s < STEADY_S else 1 + secrets.randbelow(EPOCH_RANDOM_STEP)

    def _write(self, identity: Identity) -> None:
        replace_file(self._files, IDENTITY, [identity.encode()])
        self._identity = identity
