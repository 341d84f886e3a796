"""Reads the file of dynamic security, and replaces it as a whole with each change.

Invariant: the file that a change replaces is the one that this process wrote or read last. So a
change by another program is never overwritten, and two brokers never share a file.
"""

import os
import stat
from pathlib import Path

from msgspec import Struct

from holdfast.security.dynamic.document import (
    FILE_BYTES_MAX,
    DynamicSecurityError,
    SecurityDocument,
    parse,
)
from holdfast.security.files import replace_file


class DynamicSecurityFile(Struct, frozen=True):
    """The file at one moment: its content, and the stamp that tells it from others."""

    path: Path
    document: SecurityDocument
    stamp: tuple[int, int, int]

    @classmethod
    def load(cls, path: Path, *, is_replaced: bool = True) -> "DynamicSecurityFile":
        """Reads a file, which the process may replace (`is_replaced`). Raises
        `DynamicSecurityError`."""
        try:
            with path.open("rb") as file:
                stamp = _stamp(os.fstat(file.fileno()))
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise DynamicSecurityError(
                f"{path}: cannot read the users: {error.strerror}"
                " ('holdfast passwd --dynamic-security -c FILE USER' makes a file)"
            ) from None
        if len(data) > FILE_BYTES_MAX:
            raise DynamicSecurityError(f"{path}: more than {FILE_BYTES_MAX} bytes")
        if is_replaced and not os.access(path.parent, os.W_OK | os.X_OK):
            raise DynamicSecurityError(
                f"{path}: the directory cannot be written, but the broker replaces the file"
            )
        return cls(path, parse(data, str(path)), stamp)

    def is_current(self) -> bool:
        """Whether the file on disk is this one."""
        try:
            return _stamp(self.path.stat()) == self.stamp
        except OSError:
            return False

    def replaced(self, document: SecurityDocument) -> "DynamicSecurityFile":
        """Writes another content, durably. Raises `DynamicSecurityError`."""
        if not self.is_current():
            raise DynamicSecurityError(
                f"{self.path} was changed by another program: reload the broker first"
            )
        try:
            stamp = write(self.path, document, self.path.stat())
        except OSError as error:
            raise DynamicSecurityError(f"{self.path} cannot be written: {error.strerror}") from None
        return DynamicSecurityFile(self.path, document, stamp)


def write(
    path: Path, document: SecurityDocument, like: os.stat_result | None = None
) -> tuple[int, int, int]:
    """Writes a file, durably, and returns its stamp. It has mode 0600, or the mode and owner of
    `like`, the file that it replaces. Raises `OSError`."""

    def prepare(descriptor: int) -> None:
        if like is not None:
            os.fchmod(descriptor, stat.S_IMODE(like.st_mode) & 0o660)
            if os.geteuid() == 0:
                os.fchown(descriptor, like.st_uid, like.st_gid)

    return _stamp(replace_file(path, document.chunks(), prepare))


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size
