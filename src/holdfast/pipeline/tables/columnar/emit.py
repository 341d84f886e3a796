"""Emits readings of messages with the same fields as one batch, in the table's order."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.pipeline.tables.columnar.parse import (
    NUMBER,
    TEXT,
    TRUTH,
    FieldGroup,
    Integers,
    Values,
)
from holdfast.pipeline.tables.columns import READINGS, TIME, TIME_END_US
from holdfast.pipeline.tables.messages import Names, Rows

Codes = npt.NDArray[np.int32]

NONE: Final = np.iinfo(np.int64).min
"""The value that stands for null in an array of marks."""


class Marks:
    """The marks of the messages of a batch: one element each, NONE for null."""

    def __init__(self, store_us: Integers) -> None:
        count = len(store_us)
        self.store_us = store_us
        self.event_us = store_us.copy()
        self.claimed_us = np.full(count, NONE, np.int64)
        self.sent_us = np.full(count, NONE, np.int64)
        self.runs = np.full(count, NONE, np.int64)
        self.sequences = np.full(count, NONE, np.int64)
        self.gaps_before = np.full(count, NONE, np.int64)
        self.gaps_opened_us = np.full(count, NONE, np.int64)
        self.late = np.zeros(count, np.bool_)
        self.marked = np.zeros(count, np.bool_)
        """True for messages that become readings: their marks are known, and they are no
        repetitions."""


def readings(rows: Rows, devices: Names, marks: Marks, group: FieldGroup) -> pa.RecordBatch | None:
    """Returns the readings of the marked messages of a group, or None if there are none."""
    places = np.flatnonzero(marks.marked[group.rows])
    if not len(places):
        return None
    offsets, partitions = rows.integers("offset"), rows.integers("partition")
    keys = (offsets, partitions, marks.event_us, devices.codes)
    places = places[np.lexsort([key[group.rows[places]] for key in keys])]
    chosen = group.rows[places]
    cell, metric = _cells(devices.codes[chosen], _ranks(group.names))
    of = chosen[cell]
    columns: dict[str, pa.Array] = {
        "device": devices.array(of),
        "metric": pa.DictionaryArray.from_arrays(
            pa.array(metric), pa.array(group.names, pa.string())
        ),
        "event_time": _optional(marks.event_us, of).cast(TIME),
        "store_time": _optional(marks.store_us, of).cast(TIME),
        "sent_time": _optional(marks.sent_us, of).cast(TIME),
        "claimed_time": _optional(np.minimum(marks.claimed_us, TIME_END_US - 1), of).cast(TIME),
        "topic": rows.topics.array(of),
        "partition": pa.array(partitions[of]),
        "offset": pa.array(offsets[of]),
        "position": pa.array(metric),
        "message_id": _ids(group, places, cell),
        "stream": rows.streams.array(of),
        "run": _optional(marks.runs, of),
        "sequence": _optional(marks.sequences, of),
        "gap_before": _optional(marks.gaps_before, of),
        "gap_opened_at": _optional(marks.gaps_opened_us, of).cast(TIME),
        "is_late": pa.array(marks.late[of]),
        "is_historical": pa.array(np.zeros(len(of), np.bool_)),
        "quality": pa.nulls(len(of), pa.int32()),
    }
    columns |= _values(group.values, places, cell, metric)
    return pa.RecordBatch.from_arrays([columns[name] for name in READINGS.names], schema=READINGS)


def _ids(group: FieldGroup, places: Integers, cell: Integers) -> pa.Array:
    if group.ids is None:
        return pa.nulls(len(cell), pa.string())
    ids = pa.array([group.ids[place] for place in places.tolist()], pa.string())
    return ids.take(pa.array(cell))


def _ranks(names: Sequence[str]) -> Integers:
    """Returns the rank of each name."""
    ranks = np.empty(len(names), np.int64)
    # Names are compared by bytes, as Spark and Arrow compare texts.
    ranks[sorted(range(len(names)), key=lambda index: names[index].encode())] = np.arange(
        len(names)
    )
    return ranks


def _cells(devices: Codes, ranks: Integers) -> tuple[Integers, Codes]:
    """Returns the message and the metric of each reading, as indexes.

    The order is device by device, metric by metric, message by message.
    """
    count, width = len(devices), len(ranks)
    begins = np.flatnonzero(np.diff(devices, prepend=devices[0] - 1))
    lengths = np.diff(begins, append=count)
    begin, length = np.repeat(begins, lengths), np.repeat(lengths, lengths)
    within = np.arange(count) - begin
    places = begin * width + within + ranks[:, None] * length
    message = np.empty(count * width, np.int64)
    metric = np.empty(count * width, np.int32)
    message[places] = np.arange(count)
    metric[places] = np.arange(width, dtype=np.int32)[:, None]
    return message, metric


def _optional(values: Integers, rows: Integers) -> pa.Array:
    found = values[rows]
    missing = found == NONE
    if missing.all():
        return pa.nulls(len(found), pa.int64())
    return pa.array(found, mask=missing) if missing.any() else pa.array(found)


def _values(
    values: Sequence[Values], places: Integers, cell: Integers, metric: Codes
) -> dict[str, pa.Array]:
    """Returns the value columns.

    `places` are the indexes of the messages in the group. `cell` and `metric` come from `_cells`.
    """
    count = len(cell)
    doubles, no_double = np.zeros(count), np.ones(count, np.bool_)
    truths, no_truth = np.zeros(count, np.bool_), np.ones(count, np.bool_)
    texts: list[pa.Array] = []
    text_at = np.full(count, -1, np.int64)
    for number, each in enumerate(values):
        at = np.flatnonzero(metric == number)
        of = places[cell[at]]
        for kind in (NUMBER, TRUTH, TEXT):
            chosen = each.of_kind(kind)
            if chosen is False:
                continue
            some = slice(None) if chosen is True else chosen[of]
            if kind == NUMBER and each.doubles is not None:
                doubles[at[some]] = each.doubles[of[some]]
                no_double[at[some]] = False
            elif kind == TRUTH and each.truths is not None:
                truths[at[some]] = each.truths[of[some]]
                no_truth[at[some]] = False
            elif kind == TEXT and each.texts is not None:
                text_at[at[some]] = sum(map(len, texts)) + of[some]
                texts.append(pa.array(each.texts, pa.string()))
    return {
        "value_double": pa.array(doubles, mask=no_double),
        "value_boolean": pa.array(truths, mask=no_truth),
        "value_string": _texts(texts, text_at),
    }


def _texts(texts: Sequence[pa.Array], at: Integers) -> pa.Array:
    if not texts:
        return pa.DictionaryArray.from_arrays(
            pa.nulls(len(at), pa.int32()), pa.array([], pa.string())
        )
    encoded = pa.concat_arrays(texts).dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy()[at]
    missing = (at < 0) | (codes < 0)
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=missing), encoded.dictionary)
