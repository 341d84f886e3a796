"""Messages as the fold receives them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

INPUT: Final = (
    "stream", "topic", "payload", "bytes", "partition", "offset", "store_us", "client_id",
    "producer_id", "producer_epoch", "producer_sequence", "rank",
)  # fmt: skip

Codes = npt.NDArray[np.int32]


class TableMessage(NamedTuple):
    """One row of INPUT."""

    stream: str
    topic: str
    payload: bytes | None
    bytes: int
    partition: int
    offset: int
    store_us: int
    client_id: str | None
    producer_id: str | None
    producer_epoch: int
    producer_sequence: int
    rank: int


@dataclass
class Names:
    """A column of texts, most of which repeat."""

    names: Sequence[str]
    """The distinct texts, sorted by their bytes."""
    codes: Codes
    """The index of each row's text, -1 for null."""

    def array(self, rows: npt.NDArray[np.int64]) -> pa.Array:
        """Returns some rows, which have no nulls, as a dictionary array."""
        return pa.DictionaryArray.from_arrays(
            pa.array(self.codes[rows]), pa.array(self.names, pa.string())
        )


def names_of(column: pa.Array) -> Names:
    """Returns a column of texts, or of a dictionary of texts, as Names."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    codes = column.indices.fill_null(-1).to_numpy()
    # Most texts of a slice's dictionary may be used in other slices only.
    used = np.unique(codes[codes >= 0])
    names = column.dictionary.take(pa.array(used)).to_pylist()
    order = sorted(range(len(names)), key=lambda index: names[index].encode())
    place = np.full(len(column.dictionary) + 1, -1, np.int32)
    place[used[order]] = np.arange(len(names), dtype=np.int32)
    return Names([names[index] for index in order], place[codes])


class Rows:
    """A batch of INPUT. Each column is converted to Python or numpy when it is first needed."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.count = batch.num_rows

    def message(self, row: int) -> TableMessage:
        """Returns one message."""
        return self._messages[row]

    @cached_property
    def _messages(self) -> list[TableMessage]:
        columns = [
            self.payloads if name == "payload" else self.batch.column(name).to_pylist()
            for name in INPUT
        ]
        return list(map(TableMessage._make, zip(*columns, strict=True)))

    @cached_property
    def payloads(self) -> list[bytes | None]:
        """The payload of each message."""
        payloads: list[bytes | None] = self.batch.column("payload").to_pylist()
        return payloads

    @cached_property
    def streams(self) -> Names:
        """The stream of each message."""
        return names_of(self.batch.column("stream"))

    @cached_property
    def topics(self) -> Names:
        """The topic of each message."""
        return names_of(self.batch.column("topic"))

    @cached_property
    def clients(self) -> Names:
        """The client id of each message."""
        return names_of(self.batch.column("client_id"))

    @cached_property
    def producers(self) -> Names:
        """The producer id of each message."""
        return names_of(self.batch.column("producer_id"))

    def integers(self, name: str) -> npt.NDArray[Any]:
        """Returns a column of integers. Nulls are 0."""
        column = self.batch.column(name)
        found: npt.NDArray[Any] = (column.fill_null(0) if column.null_count else column).to_numpy()
        return found
