"""Messages for the fold, without Spark: as its tests write them, and what it makes of them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from holdfast.client.log.lake.commits import COUNTS, QUARANTINED, ROWS, STATE
from holdfast_lake.decoders.decoded import PAYLOAD_BYTES_MAX
from holdfast_lake.tables.columns import INPUT, Piece
from holdfast_lake.tables.readings import Folder
from holdfast_lake.tables.rules import Rule, with_defaults
from holdfast_lake.tables.stream import REPEATED

TIME_US = 1_790_000_000_000_000
TYPES = [
    pa.string(), pa.string(), pa.binary(), pa.int64(), pa.int32(), pa.int64(), pa.int64(),
    pa.string(), pa.string(), pa.int64(), pa.int64(), pa.int32(),
]  # fmt: skip
Producer = tuple[str, int, int]


class Log:
    """Messages as the fold gets them, of one stream or several."""

    def __init__(self, *rules: Rule) -> None:
        self.rules = with_defaults(rules)
        self.rows: list[tuple[Any, ...]] = []

    def add(
        self,
        topic: str,
        payload: bytes | None,
        *,
        at_s: float | None = None,
        stream: str | None = None,
        producer: Producer | None = None,
        offset: int | None = None,
        client: str = "c",
    ) -> None:
        """Stored one second after the other, unless `at_s` says when."""
        number = len(self.rows)
        store_us = TIME_US + round((number if at_s is None else at_s) * 1_000_000)
        rank = 0 if "/NBIRTH/" in topic else 1 if "/DBIRTH/" in topic else 2
        size = PAYLOAD_BYTES_MAX + 1 if payload is None else len(payload)
        self.rows.append(
            (stream or topic, topic, payload, size, 0, number if offset is None else offset,
             store_us, client, *(producer or (None, None, None)), rank)
        )  # fmt: skip

    def read(self, steps: Sequence[int] = (), *, together: bool = True) -> "Found":
        """`steps`: numbers of messages at which another step begins. `together`: see Folder."""
        found = Found()
        states: dict[str, tuple[str, int]] = {}
        edges = [0, *sorted(steps), len(self.rows)]
        for begin, end in pairwise(edges):
            rows = sorted(self.rows[begin:end], key=_stream)
            folder = Folder(self.rules, together=together)
            found.add(folder.fold(iter([batch(rows)]), states))
            states = states | found.states
            found.states = {}
        found.states = states
        return found


class Found:
    def __init__(self) -> None:
        self.readings: list[dict[str, Any]] = []
        """Without those of repetitions."""
        self.repeated: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.quarantine: list[dict[str, Any]] = []
        self.states: dict[str, tuple[str, int]] = {}
        """Text, and when the last message was stored."""

    def add(self, pieces: Iterable[Piece]) -> None:
        for output, batch in pieces:
            rows = batch.to_pylist()
            if output == ROWS:
                for row in rows:
                    again = row["metric"] == REPEATED
                    (self.repeated if again else self.readings).append(row)
            elif output == COUNTS:
                self.counts.update({row["name"]: row["count"] for row in rows})
            elif output == QUARANTINED:
                self.quarantine += rows
            else:
                assert output == STATE
                for row in rows:
                    last_us = round(row["last_time"].timestamp() * 1_000_000)
                    self.states[row["stream"]] = (row["state"], last_us)

    def values(self) -> list[tuple[str, str, Any]]:
        return [(row["device"], row["metric"], value(row)) for row in self.readings]

    def reasons(self) -> list[str]:
        return [row["reason"] for row in self.quarantine]


def _stream(row: tuple[Any, ...]) -> str:
    return str(row[0])


def value(row: dict[str, Any]) -> Any:
    for name in ("value_double", "value_boolean", "value_string"):
        if row[name] is not None:
            return row[name]
    return None


def batch(rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [[] for _ in INPUT]
    arrays = [pa.array(values, kind) for values, kind in zip(columns, TYPES, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=list(INPUT))
