"""Samples the messages of a lake's records, for hints about topics that no rule decides.

The sample is bounded, whatever clients publish: by files, bytes, topics, and MESSAGES_PER_TOPIC.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from holdfast.client.log.lake.commits import CommitLog
from holdfast.client.log.lake.files import LakeError
from holdfast.client.log.lake.objects import LakePath
from holdfast.client.log.lake.parquet import parquet_file
from holdfast_lake.lake.table import RECORDS
from holdfast_lake.tables.columns import names_of
from holdfast_lake.tables.field_roles import DAY_US, MESSAGES_PER_TOPIC, TopicMessages

FILES_MAX: Final = 24
"""The most files that are read, the largest ones of the last day with messages."""
BYTES_MAX: Final = 32 << 20
"""The most bytes of payloads that are read, apart from the last batch."""
TOPICS_MAX: Final = 1000
"""The most topics of a sample."""
NAMES_MAX: Final = 20_000
"""The most names of topics that are compared with the rules."""
BATCH_ROWS: Final = 8192
BATCH_BYTES: Final = 4 << 20
"""About the most bytes of the rows that are in memory together."""
_COLUMNS: Final = ("topic", "timestamp", "payload", "client_id")


class Sample:
    """Messages of some topics, with the clients that published them."""

    def __init__(self, lake: LakePath, is_wanted: Callable[[str], bool]) -> None:
        """Reads the newest files first."""
        self._is_wanted = is_wanted
        self._messages: dict[str, list[tuple[int, bytes, str]]] = {}
        self._others: set[str] = set()
        self._left_bytes = BYTES_MAX
        log = CommitLog(lake, RECORDS)
        last = log.last()
        live = [] if last is None else [file for file in log.live(last.version) if file.rows]
        ends_us = {file.path: file.times.get("timestamp", (0, 0))[1] for file in live}
        files = [each for each in live if ends_us[each.path] > max(ends_us.values()) - DAY_US]
        files = sorted(files, key=lambda each: (each.rows, ends_us[each.path]))[-FILES_MAX:]
        for each in sorted(files, key=lambda each: -ends_us[each.path]):
            # A run may be exchanging the file.
            with suppress(OSError, LakeError), parquet_file(lake / each.path, each.bytes) as file:
                if set(_COLUMNS) <= set(file.schema_arrow.names):
                    for number in range(file.num_row_groups):
                        self._read(file, number)

    def topics(self) -> tuple[dict[str, TopicMessages], dict[str, list[str]]]:
        """Returns the parsed messages of each topic, and the clients that published them."""
        found, clients = {}, {}
        for name, some in self._messages.items():
            some.sort(key=lambda each: each[0])
            found[name] = TopicMessages(name, [(payload, at) for at, payload, _ in some])
            found[name].parse()
            clients[name] = [client for _, _, client in some]
        return found, clients

    def _read(self, file: parquet.ParquetFile, number: int) -> None:
        """Reads the messages of a row group until the topics in it need no more."""
        names = file.read_row_group(number, ["topic"]).column(0).unique().to_pylist()
        group = file.metadata.row_group(number)
        rows_max = BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
        rows_max = max(1, min(BATCH_ROWS, rows_max))
        for batch in file.iter_batches(rows_max, [number], [*_COLUMNS]):
            if self._left_bytes <= 0 or not any(map(self._needs, names)):
                return
            self._left_bytes -= batch["payload"].nbytes
            topics = names_of(batch["topic"])
            is_needed = np.array([self._needs(name) for name in topics.names], np.bool_)
            batch = batch.filter(pa.array(is_needed[topics.codes]))
            times = batch["timestamp"].cast(pa.int64())
            columns = (batch["topic"], times, batch["payload"], batch["client_id"])
            rows = zip(*(column.to_pylist() for column in columns), strict=True)
            for name, at, payload, client in rows:
                some = self._messages[name]
                if payload and len(some) < MESSAGES_PER_TOPIC:  # an empty one clears a topic
                    some.append((at, payload, client or ""))

    def _needs(self, name: str) -> bool:
        """Returns whether a topic needs more messages."""
        some = self._messages.get(name)
        if some is not None:
            return len(some) < MESSAGES_PER_TOPIC
        is_full = len(self._others) == NAMES_MAX or len(self._messages) == TOPICS_MAX
        if is_full or name in self._others:
            return False
        if not self._is_wanted(name):
            self._others.add(name)
            return False
        self._messages[name] = []
        return True
