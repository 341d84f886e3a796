"""Marks many messages of one stream at a time, equal to those of stream.py one by one.

A span is marked together as long as its numbers only grow: no repetition, no number that comes late
or begins a new run. The message at which that ends is left to stream.py.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from holdfast.pipeline.tables.stream import (
    DEVICES_MAX,
    GAPS_MAX,
    JUMP_MAX,
    PRODUCERS_MAX,
    SEEN_MAX,
    StreamState,
)

SPAN_MIN: Final = 8
"""The fewest messages for which the check of all together pays off."""

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_Key = TypeVar("_Key")


class MarkedProducer(NamedTuple):
    """The producer of a span, and the sequences of its messages."""

    id: str
    epoch: int
    sequences: Integers


class Places(NamedTuple):
    """The positions (stream.StreamPosition) of messages that all have numbers."""

    run: int
    gaps_before: Integers


def length_in_order(
    state: StreamState,
    producer: MarkedProducer | None,
    ids: Sequence[str] | None,
    numbers: Integers | None,
    length: int,
) -> int:
    """Returns how many of `length` messages, from the first on, can be marked together.

    Their producer's sequences, ids and numbers must be new, and the numbers must be in order.
    """
    if producer is not None:
        length = min(length, _new_sequences(state, producer))
    if numbers is not None:
        length = min(length, _growing(state, numbers))
        if ids is None and producer is None and length >= SPAN_MIN:
            length = _are_new_numbers(state, numbers[:length])
    if ids is not None and length >= SPAN_MIN:
        length = _new_ids(state, ids[:length])
    return length


def _new_sequences(state: StreamState, producer: MarkedProducer) -> int:
    sequences = producer.sequences
    last = state.producers.get(producer.id)
    if last is not None and (producer.epoch, int(sequences[0])) <= last:
        return 0
    return _until(sequences[1:] > sequences[:-1]) + 1


def _new_ids(state: StreamState, ids: Sequence[str]) -> int:
    new: set[str] = set()
    for index, id in enumerate(ids):
        if id in state.seen or id in new:
            return index
        new.add(id)
    return len(ids)


def _growing(state: StreamState, numbers: Integers) -> int:
    steps = np.diff(numbers, prepend=_before(state, numbers))
    return _until((steps > 0) & (steps <= JUMP_MAX + 1))


def _before(state: StreamState, numbers: Integers) -> int:
    """Returns the number before the first one. If the run begins here, no number is missing between
    them."""
    return state.high if state.run is not None else int(numbers[0]) - 1


def _are_new_numbers(state: StreamState, numbers: Integers) -> int:
    known = state.contents
    if not known or max(known) < numbers[0]:
        return len(numbers)
    return _until(~np.isin(numbers, np.array(list(known), np.int64)))


def _until(fine: Mask) -> int:
    """Returns the index of the first element that is false."""
    if fine.all():
        return len(fine)
    return int(fine.argmin())


def remember(
    state: StreamState,
    producer: MarkedProducer | None,
    ids: Sequence[str] | None,
    numbers: Integers | None,
    payloads: Sequence[bytes],
    *,
    any_content: bool,
) -> None:
    """Notes that these messages have come. `length_in_order` must hold for all of them.

    With `any_content` a repeated id is a repetition whatever the payload.
    """
    if producer is not None:
        state.producers.pop(producer.id, None)
        state.producers[producer.id] = (producer.epoch, int(producer.sequences[-1]))
        _trim(state.producers, PRODUCERS_MAX)
    if ids is not None:
        last_ids = ids[-SEEN_MAX:]
        if any_content:
            state.seen.update(dict.fromkeys(last_ids, True))
        else:
            state.seen.update(zip(last_ids, map(crc32, payloads[-SEEN_MAX:]), strict=True))
        _trim(state.seen, SEEN_MAX)
    elif numbers is not None and producer is None:
        last = numbers[-SEEN_MAX:].tolist()
        state.contents.update(zip(last, map(crc32, payloads[-SEEN_MAX:]), strict=True))
        _trim(state.contents, SEEN_MAX)


def follow_all(state: StreamState, numbers: Integers, begun: int, store_us: Integers) -> Places:
    """Applies `stream.follow` to each number in turn. `begun` names the run if it begins one."""
    gaps = np.diff(numbers, prepend=_before(state, numbers)) - 1
    if state.run is None:
        state.run, state.raw, state.gaps = begun, 0, []
    state.high = int(numbers[-1])
    for at in np.flatnonzero(gaps)[-GAPS_MAX:].tolist():
        number = int(numbers[at])
        state.gaps.append((number - int(gaps[at]), number - 1, int(store_us[at])))
    del state.gaps[:-GAPS_MAX]
    return Places(state.run, gaps)


def mark_late(state: StreamState, device: str, event_us: Integers, lateness_us: int) -> Mask:
    """Applies `stream.is_late` to each event time of a device in turn."""
    newest = state.latest.get(device)
    least = np.iinfo(np.int64).min
    # The newest event time before each message.
    before = np.maximum.accumulate(
        np.concatenate(([least if newest is None else newest], event_us))
    )
    highest = int(before[-1])
    if newest is None or highest > newest:
        state.latest.pop(device, None)
        state.latest[device] = highest
        _trim(state.latest, DEVICES_MAX)
    before = before[:-1]
    return (before > least) & (event_us < before - lateness_us)


def _trim(known: dict[_Key, Any], most: int) -> None:
    """Removes the oldest entries."""
    while len(known) > most:
        del known[next(iter(known))]
