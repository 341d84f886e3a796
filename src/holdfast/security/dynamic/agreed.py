"""Packs the users that a cluster's nodes agree on, and finds the users who differ."""

import zlib
from typing import Final

from msgspec.structs import replace

from holdfast.security.dynamic.document import (
    DynamicSecurityError,
    SecurityDocument,
    SecurityUser,
    parse,
)
from holdfast.security.dynamic.edit import SecurityChanges
from holdfast.security.dynamic.file import DynamicSecurityFile
from holdfast.security.dynamic.users import DynamicUsers

UNPACKED_BYTES_MAX: Final = 64 << 20
"""The most bytes of the file that packed users stand for."""
LEVEL: Final = 1
"""The effort of the compression. Most bytes are hashes, which no effort makes smaller."""
_NO_STAMP: Final = (0, 0, 0)


def pack(document: SecurityDocument, bytes_max: int) -> bytes:
    """The compressed file of a document. Raises `DynamicSecurityError` if it is too large."""
    compressor = zlib.compressobj(LEVEL)
    pieces: list[bytes] = []
    size = written = 0
    for chunk in document.chunks():
        size += len(chunk)
        pieces.append(compressor.compress(chunk))
        written += len(pieces[-1])
        if size > UNPACKED_BYTES_MAX or written > bytes_max:
            break
    pieces.append(compressor.flush())
    written += len(pieces[-1])
    if size > UNPACKED_BYTES_MAX or written > bytes_max:
        raise DynamicSecurityError(
            f"the users of a cluster have at most {bytes_max} bytes, compressed"
        )
    return b"".join(pieces)


def unpack(data: bytes) -> SecurityDocument:
    """The document of packed users. Raises `DynamicSecurityError`."""
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(data, UNPACKED_BYTES_MAX)
    except zlib.error as error:
        raise DynamicSecurityError(f"the users of the cluster: {error}") from None
    if not decompressor.eof or decompressor.unused_data:
        raise DynamicSecurityError("the users of the cluster are cut off")
    return parse(content, "the users of the cluster")


def with_document(users: DynamicUsers, document: SecurityDocument, version: int) -> DynamicUsers:
    """The users by a document of this version, and by the other files of `users`."""
    file = DynamicSecurityFile(users.file.path, document, _NO_STAMP)
    made = DynamicUsers.of(file, users.password_file, users.acl_file)
    return replace(made, version=version)


def differences(before: SecurityDocument, after: SecurityDocument) -> SecurityChanges:
    """The users whose rights may differ, and those whose clients have to connect again, because
    their password or client id differs, or they are disabled or deleted."""
    changes = SecurityChanges()
    changes.are_for_all = (
        before.defaults != after.defaults
        or before.roles != after.roles
        or before.groups != after.groups
        or before.anonymous_group != after.anonymous_group
    )
    for name in before.users.keys() | after.users.keys():
        old, new = before.users.get(name), after.users.get(name)
        if old == new:
            continue
        changes.users.add(name)
        if old is None:
            # A client may have proved the name by another file.
            continue
        if new is None or new.disabled or _credentials(old) != _credentials(new):
            changes.expelled.add(name)
    return changes


def _credentials(user: SecurityUser) -> tuple[str, str, int, str | None]:
    return user.password, user.salt, user.iterations, user.clientid
