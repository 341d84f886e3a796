"""Lists the starts of a broker's member, each with the ends of the broker's log.

The name of a log in the place of a message (`LogPlace`) has the start in which the record was
appended. It stays the same however often the record is exported. Smallest counter-example without
it: the record at offset 7 is exported, and the directory is put back to offset 5. The next record
at offset 7 is another one, and a destination takes it for a repetition.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

STARTS_MAX: Final = 64
"""The most starts that are kept. Records from before them have the log's name without a start."""
LogStart = tuple[int, list[int]]
"""The epoch of a start, and the end of each partition at that time."""


def next_starts(starts: Sequence[LogStart], epoch: int, ends: Sequence[int]) -> list[LogStart]:
    """Returns all starts with this one, the newest last. It replaces the last one if no record was
    appended since."""
    kept = starts[:-1] if starts and starts[-1][1] == list(ends) else starts
    return [*kept, (epoch, list(ends))][-STARTS_MAX:]


def decode_starts(data: bytes) -> list[LogStart]:
    """Decodes the starts. Raises `ValueError` for damaged data."""
    try:
        return msgspec.json.decode(data, type=list[LogStart])
    except msgspec.DecodeError as error:
        raise ValueError(f"the starts of the log: {error}") from None


def start_of(starts: Sequence[LogStart], partition: int, offset: int) -> int:
    """Returns the start in which a record was appended; 0: before all of them."""
    for epoch, ends in reversed(starts):
        if ends[partition] <= offset:
            return epoch
    return 0
