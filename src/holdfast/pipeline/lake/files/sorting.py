"""Sorting of Arrow tables by a table's keys, in Spark's order: nulls first, texts by their
bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Integers = npt.NDArray[np.int64]


def in_order(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Returns the rows sorted by some columns of texts, whole numbers, dates and times."""
    return in_groups(table, keys)[0]


def in_groups(
    table: pa.Table, keys: Sequence[str], order: Sequence[str] = ()
) -> tuple[pa.Table, Integers]:
    """Returns the rows sorted by keys and then by other columns, and the first row of each group
    with equal keys."""
    table = table.unify_dictionaries().combine_chunks()
    ranks = [ranks_of(table.column(name)) for name in (*keys, *order)]
    if ranks and not _are_sorted(ranks):
        places = np.lexsort(ranks[::-1])
        table = table.take(pa.array(places))
        ranks = [rank[places] for rank in ranks[: len(keys)]]
    begins = np.zeros(table.num_rows, np.bool_)
    begins[:1] = True
    for rank in ranks[: len(keys)]:
        begins[1:] |= rank[1:] != rank[:-1]
    return table, np.flatnonzero(begins)


def ranks_of(column: pa.ChunkedArray) -> Integers:
    """Returns whole numbers in the order of the values. That of a null is the least."""
    kind = column.type
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = array.chunk(0) if array.num_chunks else pa.array([], kind)
        encoded = array if pa.types.is_dictionary(kind) else array.dictionary_encode()
        order = pc.array_sort_indices(encoded.dictionary.cast(pa.binary())).to_numpy()
        # A name may be in a dictionary twice. The last rank is for null.
        names = encoded.dictionary.take(pa.array(order)).to_pylist()
        places = np.full(len(names) + 1, -1, np.int64)
        rank = -1
        for at, name in enumerate(names):
            rank += at == 0 or name != names[at - 1]
            places[order[at]] = rank
        ranks: Integers = places[encoded.indices.fill_null(-1).to_numpy()]
        return ranks
    whole = column.cast(pa.int32()) if pa.types.is_date32(kind) else column
    whole = whole.cast(pa.int64())
    found: Any = whole.fill_null(np.iinfo(np.int64).min) if whole.null_count else whole
    integers: Integers = found.to_numpy()
    return integers


def _are_sorted(ranks: Sequence[Integers]) -> bool:
    """Returns whether no row is less than the one before it."""
    tied = np.ones(max(0, len(ranks[0]) - 1), np.bool_)
    for rank in ranks:
        if np.any(tied & (rank[1:] < rank[:-1])):
            return False
        tied &= rank[1:] == rank[:-1]
        if not tied.any():
            break
    return True
