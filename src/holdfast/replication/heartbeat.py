"""The HEARTBEAT frame: proof that the sender's event loop runs, and what it thinks of others.

u64 sequence, u32 lag of its loop in ms, u8 flags, u16 count of suspected nodes; then each as u8
length and ASCII id. Big-endian.
"""

from collections.abc import Collection
from dataclasses import dataclass
from struct import Struct
from typing import Final

from holdfast.replication.kinds import BadFrame
from holdfast.replication.metadata import NODE_ID, NODES_MAX

_HEAD: Final = Struct(">QIBH")
_LEAVING: Final = 1
_UNWELL: Final = 2
_LAG_MAX_MS: Final = (1 << 32) - 1


@dataclass(frozen=True)
class Heartbeat:
    sequence: int
    """Grows by one with each of a link's sender; it says which is newer."""
    lag_s: float = 0.0
    """How late the sender's event loop was at worst of late."""
    is_leaving: bool = False
    """The sender stops in good order and waits to be relieved of what it leads."""
    is_well: bool = True
    """The sender's loop has been running well of late: it would say whom it does not hear."""
    suspected: frozenset[str] = frozenset()


def encode_heartbeat(beat: Heartbeat) -> bytes:
    lag_ms = min(int(beat.lag_s * 1000), _LAG_MAX_MS)
    flags = (_LEAVING if beat.is_leaving else 0) | (0 if beat.is_well else _UNWELL)
    head = _HEAD.pack(beat.sequence, lag_ms, flags, len(beat.suspected))
    return head + _encode_names(beat.suspected)


def _encode_names(names: Collection[str]) -> bytes:
    return b"".join(bytes([len(name)]) + name.encode("ascii") for name in sorted(names))


def decode_heartbeat(payload: bytes) -> Heartbeat:
    """Raises BadFrame. Flags that this version does not know are ignored."""
    if len(payload) < _HEAD.size:
        raise BadFrame(f"heartbeat of {len(payload)} bytes, at least {_HEAD.size} are needed")
    sequence, lag_ms, flags, count = _HEAD.unpack_from(payload)
    if count > NODES_MAX:
        raise BadFrame(f"heartbeat that suspects {count} nodes, a cluster has {NODES_MAX}")
    names = set()
    position = _HEAD.size
    for _ in range(count):
        end = position + 1 + (payload[position] if position < len(payload) else 0)
        name = payload[position + 1 : end].decode("latin-1")
        if end > len(payload) or NODE_ID.fullmatch(name) is None:
            raise BadFrame(f"heartbeat with a node id that is none at byte {position}")
        names.add(name)
        position = end
    if position != len(payload):
        raise BadFrame(f"heartbeat with {len(payload) - position} bytes too many")
    is_leaving = bool(flags & _LEAVING)
    return Heartbeat(sequence, lag_ms / 1000, is_leaving, not flags & _UNWELL, frozenset(names))
