"""What is remembered of a stream of messages, to find repetitions, gaps and late ones.

A stream is what one counter counts: a topic, a device, or an edge node of Sparkplug. Everything
here is bounded, and the same whatever the steps in which the messages come.
"""

from hashlib import blake2b
from typing import Final

import msgspec

SEEN_MAX: Final = 256
"""Ids of messages remembered for each stream."""
ID_LENGTH_MAX: Final = 64
"""Longer ids are remembered by their hash."""
PRODUCERS_MAX: Final = 256
"""Where a stream is in several partitions, each producer counts once for each of them."""
IDLE_DAYS_MAX: Final = 7
"""What came before so many days without any message is forgotten."""
IDLE_US_MAX: Final = IDLE_DAYS_MAX * 86_400_000_000
DEVICES_MAX: Final = 1000
GAPS_MAX: Final = 64
"""Open gaps of a stream; of more the oldest can no longer be filled."""
REORDER_MAX: Final = 1000
"""A number lower by more than this begins a new run (the device has started again), as does a 0 or
1 that is not missing."""
JUMP_MAX: Final = 1_000_000
"""A number higher by more than this begins a new run, too."""

At = tuple[int, int, int, int]
"""Where a message is in a stream of several topics: when it was stored (microseconds), 0 to 2 for
births before what they explain, partition, offset."""
Gap = tuple[int, int, int]
"""First and last missing number, and when it was found (microseconds, the broker's time)."""


class Birth(msgspec.Struct, omit_defaults=True, array_like=True):
    """A birth of a Sparkplug edge node, and what its devices' births have said since."""

    at: At
    bd_sequence: int | None = None
    aliases: dict[str, tuple[str, int]] = {}
    """Alias (as text, which JSON wants) to name and datatype."""
    types: dict[str, int] = {}
    """Device, a zero character and the metric's name, to its datatype."""


class StreamState(msgspec.Struct, omit_defaults=True):
    """Of one stream, as JSON in the table's state."""

    run: int | None = None
    """What tells runs apart: the offset or time at which it began; None before the first number."""
    high: int = 0
    """The highest number of the run."""
    raw: int = 0
    """Sparkplug: the number on the wire that `high` was."""
    gaps: list[Gap] = []
    seen: dict[str, bool] = {}
    """Ids of the last messages, oldest first."""
    contents: dict[int, int] = {}
    """By the numbers of the last messages, checksums of their payloads; oldest first."""
    producers: dict[str, tuple[int, int]] = {}
    """By producer (see `producer_key`): the epoch and sequence of its last message, least recent
    first."""
    latest: dict[str, int] = {}
    """By device: the newest event time, least recently changed first."""
    births: list[Birth] = []
    online: dict[str, bool] = {}
    """Sparkplug: the devices of the edge node."""


class StreamPosition(msgspec.Struct, frozen=True):
    """Where a message is in its stream. All None without a number."""

    run: int | None = None
    sequence: int | None = None
    gap_before: int | None = None
    gap_opened_us: int | None = None


NOWHERE: Final = StreamPosition()


def producer_key(producer: str, partition: int, *, is_topic: bool) -> str:
    """Whose sequences only grow: a producer's within a log partition. `is_topic`: whether the
    stream is one topic, which is in one partition."""
    return producer if is_topic else f"{partition} {producer}"


def is_repetition(state: StreamState, producer: str, epoch: int, sequence: int) -> bool:
    """Of a message with a producer sequence. `producer`: see `producer_key`."""
    last = state.producers.get(producer)
    if last is not None and (epoch, sequence) <= last:
        return True
    state.producers.pop(producer, None)
    state.producers[producer] = (epoch, sequence)
    if len(state.producers) > PRODUCERS_MAX:
        del state.producers[next(iter(state.producers))]
    return False


def was_seen(state: StreamState, id: str) -> bool:
    if len(id) > ID_LENGTH_MAX:
        id = blake2b(id.encode(), digest_size=16).hexdigest()
    if id in state.seen:
        return True
    state.seen[id] = True
    if len(state.seen) > SEEN_MAX:
        del state.seen[next(iter(state.seen))]
    return False


def was_said(state: StreamState, number: int, checksum: int) -> bool:
    """Whether a message with this number had this content. A device that has started again uses
    its numbers again, for something else."""
    known = state.contents
    if number in known:
        if known[number] == checksum:
            return True
        del known[number]
    known[number] = checksum
    if len(known) > SEEN_MAX:
        del known[next(iter(known))]
    return False


def is_late(state: StreamState, device: str, event_us: int, lateness_us: int) -> bool:
    newest = state.latest.get(device)
    if newest is None or event_us > newest:
        state.latest.pop(device, None)
        state.latest[device] = event_us
        if len(state.latest) > DEVICES_MAX:
            del state.latest[next(iter(state.latest))]
        return False
    return event_us < newest - lateness_us


def follow(
    state: StreamState, number: int, begun: int, store_us: int, restarts: bool = True
) -> StreamPosition:
    """The place of a message that carries `number`. `begun` names the run if it begins one.
    `restarts`: whether numbers tell of a new run; otherwise `begin_run` does."""
    if state.run is None:
        begin_run(state, begun, number)
        return StreamPosition(state.run, number, 0)
    if number > state.high:
        missing = number - state.high - 1
        if missing > JUMP_MAX and restarts:
            begin_run(state, begun, number)
            return StreamPosition(state.run, number, 0)
        if missing:
            state.gaps.append((state.high + 1, number - 1, store_us))
            if len(state.gaps) > GAPS_MAX:
                del state.gaps[0]
        state.high = number
        return StreamPosition(state.run, number, missing, store_us if missing else None)
    opened = _fill(state, number)
    if opened is None and restarts and number < state.high:
        back = state.high - number
        if number <= 1 or back > REORDER_MAX:
            begin_run(state, begun, number)
    return StreamPosition(state.run, number, 0, opened)


def begin_run(state: StreamState, run: int, number: int, raw: int = 0) -> None:
    """What is missing of the run before stays missing."""
    state.run, state.high, state.raw = run, number, raw
    state.gaps = []


def _fill(state: StreamState, number: int) -> int | None:
    """When the gap was found that `number` was missing in, None if it was not missing."""
    for index, (first, last, opened_us) in enumerate(state.gaps):
        if first <= number <= last:
            parts = [(first, number - 1, opened_us), (number + 1, last, opened_us)]
            state.gaps[index : index + 1] = [part for part in parts if part[0] <= part[1]]
            while len(state.gaps) > GAPS_MAX:
                del state.gaps[0]
            return opened_us
    return None
