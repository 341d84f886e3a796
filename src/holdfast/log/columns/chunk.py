"""Raw bytes of the log with the batches that count in them."""

from dataclasses import dataclass, field

Data = bytes | bytearray | memoryview


@dataclass
class Chunk:
    """Raw bytes, and the byte positions at which the wanted, verified batches begin in them,
    ascending.

    Of the batch at `positions[i]` the offsets `starts[i]` to `ends[i]` count. Byte positions are
    multiples of 8.
    """

    data: Data
    positions: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    records: int = 0
    """The number of offsets that count, over all batches."""
