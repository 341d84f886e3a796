"""The HEARTBEAT frame: proof that the sender's event loop runs, with its opinion of others.

The payload is big-endian: u64 sequence, u32 lag of the loop in ms, u8 flags, u16 count of suspected
nodes; then each as u8 length and ASCII id. A u16 count of heard nodes follows; then each as u8
length, ASCII id and u64 sequence.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from holdfast.node.frame_kinds import BadFrame
from holdfast.node.metadata.model import NODE_ID, NODES_MAX

_HEAD: Final = Struct(">QIBH")
_COUNT: Final = Struct(">H")
_SEQUENCE: Final = Struct(">Q")
_LEAVING: Final = 1
_UNWELL: Final = 2
_STALLED: Final = 4
_DAMAGED: Final = 8
_FULL: Final = 16
_ASKS_TO_STOP: Final = 32
_LAG_MAX_MS: Final = (1 << 32) - 1


@dataclass(frozen=True)
class Heartbeat:
    """The content of one heartbeat."""

    sequence: int
    """The number of the heartbeat of this sender; the higher one is newer."""
    lag_s: float = 0.0
    """The worst lateness of the sender's event loop since its last heartbeat, in seconds."""
    is_leaving: bool = False
    """The sender stops in good order and waits to be relieved of its leaderships."""
    is_well: bool = True
    """The sender's loop runs well, so its suspicions are complete."""
    suspected: frozenset[str] = frozenset()
    """The nodes that the sender suspects."""
    is_stalled: bool = False
    """The sender's disk has not finished a write for too long."""
    is_damaged: bool = False
    """The sender's log is damaged."""
    received: Mapping[str, int] = field(default_factory=dict)
    """The newest heartbeat of each node that came over the present link."""
    is_full: bool = False
    """The sender's disk has no room for more of the log."""
    asks_to_stop: bool = False
    """The sender will stop as soon as the others can do without it."""


def encode_heartbeat(beat: Heartbeat) -> bytes:
    lag_ms = min(int(beat.lag_s * 1000), _LAG_MAX_MS)
    flags = _LEAVING * beat.is_leaving | _UNWELL * (not beat.is_well)
    flags |= _STALLED * beat.is_stalled | _DAMAGED * beat.is_damaged
    flags |= _FULL * beat.is_full | _ASKS_TO_STOP * beat.asks_to_stop
    head = _HEAD.pack(beat.sequence, lag_ms, flags, len(beat.suspected))
    heard = [_COUNT.pack(len(beat.received))]
    for name, sequence in beat.received.items():
        heard.append(_encode_names((name,)) + _SEQUENCE.pack(sequence))
    return head + _encode_names(beat.suspected) + b"".join(heard)


def _encode_names(names: Collection[str]) -> bytes:
    return b"".join(bytes([len(name)]) + name.encode("ascii") for name in sorted(names))


def decode_heartbeat(payload: bytes) -> Heartbeat:
    """The heartbeat in a payload. Flags that this version does not know are ignored.

    Raises `BadFrame` if the payload is invalid.
    """
    if len(payload) < _HEAD.size:
        raise BadFrame(f"heartbeat of {len(payload)} bytes, at least {_HEAD.size} are needed")
    sequence, lag_ms, flags, count = _HEAD.unpack_from(payload)
    _check_count(count)
    names = set()
    position = _HEAD.size
    for _ in range(count):
        name, position = _decode_name(payload, position)
        names.add(name)
    heard, position = _decode_received(payload, position)
    if position != len(payload):
        raise BadFrame(f"heartbeat with {len(payload) - position} bytes too many")
    is_leaving = bool(flags & _LEAVING)
    return Heartbeat(
        sequence,
        lag_ms / 1000,
        is_leaving,
        not flags & _UNWELL,
        frozenset(names),
        bool(flags & _STALLED),
        bool(flags & _DAMAGED),
        heard,
        bool(flags & _FULL),
        bool(flags & _ASKS_TO_STOP),
    )


def _check_count(count: int) -> None:
    if count > NODES_MAX:
        raise BadFrame(f"heartbeat that names {count} nodes, a cluster has {NODES_MAX}")


def _decode_name(payload: bytes, position: int) -> tuple[str, int]:
    """The name at `position`, and the position after it."""
    end = position + 1 + (payload[position] if position < len(payload) else 0)
    name = payload[position + 1 : end].decode("latin-1")
    if end > len(payload) or NODE_ID.fullmatch(name) is None:
        raise BadFrame(f"heartbeat with a node id that is none at byte {position}")
    return name, end


def _decode_received(payload: bytes, position: int) -> tuple[dict[str, int], int]:
    """The heard nodes at `position`, and the position after them."""
    if len(payload) < position + _COUNT.size:
        raise BadFrame("heartbeat without the list of nodes that the sender receives from")
    (count,) = _COUNT.unpack_from(payload, position)
    _check_count(count)
    position += _COUNT.size
    heard: dict[str, int] = {}
    for _ in range(count):
        name, position = _decode_name(payload, position)
        if len(payload) < position + _SEQUENCE.size:
            raise BadFrame(f"heartbeat that ends in the sequence of {name}")
        (heard[name],) = _SEQUENCE.unpack_from(payload, position)
        position += _SEQUENCE.size
    return heard, position
