"""Merges the users and tokens that a cluster agrees on with those of a node's own file.

The file of a node has the agreed ones, so that a restart knows them before the node has met the
others. `AgreedMark` names the cluster and the version, and the names that the command line has
changed in the file since.

Invariants
- The agreed entry of a name counts at every node. The exception is a name that was changed in a
  node's file since: that change counts there at once, and everywhere when it is agreed on.
- A file without the mark of this cluster is adopted: its names are added, and an agreed name stays
  as it is. Counter-example with the file in place of the agreed ones: a node that was away during
  the upgrade returns, and every token that was made meanwhile is refused.
"""

import zlib
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.security.access.access_file import (
    FILE_BYTES_MAX,
    AccessData,
    AccessError,
    AgreedMark,
    parse,
)

OF_CLUSTER: Final = "the users of the cluster"
T = TypeVar("T")


def pack(data: AccessData, bytes_max: int) -> bytes:
    """The users and tokens, compressed. Raises `AccessError` if they are too many."""
    packed = zlib.compress(msgspec.json.encode(replace(data, agreed=None)))
    if len(packed) > bytes_max:
        raise AccessError(
            f"{OF_CLUSTER} and its tokens have {len(packed)} bytes, compressed; {bytes_max} are"
            " possible: remove some"
        )
    return packed


def unpack(data: bytes) -> AccessData:
    """The users and tokens of `pack`. Raises `AccessError`."""
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(data, FILE_BYTES_MAX)
    except zlib.error as error:
        raise AccessError(f"{OF_CLUSTER}: {error}") from None
    if not decompressor.eof or decompressor.unused_data:
        raise AccessError(f"{OF_CLUSTER} are cut off")
    return parse(content, OF_CLUSTER)


def merged(own: AccessData, agreed: AccessData, cluster_id: str) -> AccessData:
    """The users and tokens to agree on: the agreed ones with the changes of a node's file."""
    adopts = _mark_of(own, cluster_id) is None
    users, tokens = _changed(own, cluster_id)
    return AccessData(
        users=_with(agreed.users, own.users, users, adopts=adopts),
        tokens=_with(agreed.tokens, own.tokens, tokens, adopts=adopts),
    )


def taken(
    own: AccessData, agreed: AccessData, cluster_id: str, version: int, settled: AccessData | None
) -> AccessData:
    """The content of a node's file with agreed users and tokens of a version. `settled`: the file
    whose changes are agreed on now; a later change stays in the file, and is not agreed on yet."""
    if _mark_of(own, cluster_id) is None:
        users = [name for name in own.users if name not in agreed.users]
        tokens = [id for id in own.tokens if id not in agreed.tokens]
    else:
        users, tokens = _changed(own, cluster_id)
    settled = agreed if settled is None else settled
    users = [name for name in users if not _same(name, own.users, settled.users, agreed.users)]
    tokens = [id for id in tokens if not _same(id, own.tokens, settled.tokens, agreed.tokens)]
    return AccessData(
        users=_with(agreed.users, own.users, users, adopts=False),
        tokens=_with(agreed.tokens, own.tokens, tokens, adopts=False),
        agreed=AgreedMark(cluster_id, version, sorted(users), sorted(tokens)),
    )


def _mark_of(own: AccessData, cluster_id: str) -> AgreedMark | None:
    mark = own.agreed
    return mark if mark is not None and mark.cluster == cluster_id else None


def _changed(own: AccessData, cluster_id: str) -> tuple[list[str], list[str]]:
    mark = _mark_of(own, cluster_id)
    return (list(own.users), list(own.tokens)) if mark is None else (mark.users, mark.tokens)


def _same(name: str, own: Mapping[str, T], *others: Mapping[str, T]) -> bool:
    return any(own.get(name) == other.get(name) for other in others)


def _with(
    agreed: Mapping[str, T], own: Mapping[str, T], names: Iterable[str], *, adopts: bool
) -> dict[str, T]:
    made = dict(agreed)
    for name in names:
        if name not in own:
            made.pop(name, None)
        elif not (adopts and name in agreed):
            made[name] = own[name]
    return made
