"""Decodes the request of a large read of the log, and plans the response.

The request is JSON::

    {"ranges": [[partition, start, end], ...], "bytes": M, "filters": [...], "prefixes": [...],
     "generation": G}

The response contains about M bytes of raw batches, with all wanted offsets from the starts on.
Other offsets may lie between them. Partitions that this node does not store are left out; with no
other one the reply is 421. `filters` (MQTT filters) and `prefixes` (of topics) leave out
batches without a match. Only committed offsets are wanted. `generation` is that of the log in which
the reader found the offsets. Without it nothing is checked.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from holdfast.io.event_loop.broker import Broker
from holdfast.log.reading.byte_ranges import Plan, Wanted
from holdfast.log.reading.topic_postings import TopicChoice
from holdfast.protocol.topics.names import InvalidFilter, check_filter

PATH: Final = "/api/v1/log/read"
REQUEST_BYTES_MAX: Final = 1 << 20
READ_BYTES_DEFAULT: Final = 4 << 20
READ_BYTES_MAX: Final = 64 << 20
FILTERS_MAX: Final = 1000
PAUSE_S: Final = 0.00005


class BadRead(Exception):
    """The request is malformed. The text says what is wrong."""


class OtherGeneration(Exception):
    """The log was restored since the reader found its offsets."""


class NotStored(Exception):
    """This node stores none of the wanted partitions. `partition` is the first of them."""

    def __init__(self, partition: int) -> None:
        super().__init__(f"partition {partition} is not stored here")
        self.partition = partition


class RemovedRecords(Exception):
    """Wanted records were removed by retention. `first` is the first offset that each of the
    partitions still has."""

    def __init__(self, first: list[tuple[int, int]]) -> None:
        super().__init__("older records were removed by retention")
        self.first = first


Texts = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=FILTERS_MAX)]


class ReadRequest(msgspec.Struct):
    """The body of a request."""

    ranges: list[Wanted]
    bytes: Annotated[int, Meta(ge=0, le=READ_BYTES_MAX)] = READ_BYTES_DEFAULT
    filters: Texts = []
    prefixes: Texts = []
    generation: int | None = None


class ReadPlanner:
    """The planner of one connection's requests. It remembers the topics that its filters match, so
    one thread at a time uses it."""

    def __init__(self) -> None:
        self._filters: tuple[list[str], list[str]] = ([], [])
        self._choice: TopicChoice | None = None

    def plan(self, broker: Broker, request: ReadRequest) -> Plan:
        """Plans the response, which leaves out partitions that are not stored here. Raises
        `BadRead`, `OtherGeneration`, `NotStored` and `RemovedRecords`."""
        own = broker.generation()
        if request.generation not in (None, own):
            raise OtherGeneration("the log has another generation: it was restored")
        wanted = _ranges(request, broker.node.state.config.partitions)
        restarts = broker.node.state.journal.restarts
        is_stored = broker.runtime.cluster_node.remote_reads.is_stored
        stored = [each for each in wanted if is_stored(each[0])]
        if wanted and not stored:
            raise NotStored(wanted[0][0])
        wanted = stored
        choice = self._topics(request)
        reader, journal = broker.reader, broker.node.state.journal
        first = [(p, reader.first_offset(p)) for p, start, _ in wanted]
        if any(start < floor for (_, start, _), (_, floor) in zip(wanted, first, strict=True)):
            if restarts == journal.restarts:
                raise RemovedRecords(first)
            # The log was forgotten meanwhile, and other nodes have these records.
            raise NotStored(wanted[0][0])
        committed = journal.high_watermark
        limited = [(p, start, min(end, committed[p])) for p, start, end in wanted]
        plan = reader.extents().plan(limited, request.bytes, choice)
        if restarts != journal.restarts and stored:
            raise NotStored(stored[0][0])
        return plan

    def _topics(self, request: ReadRequest) -> TopicChoice | None:
        filters, prefixes = request.filters, request.prefixes
        for each in filters:
            try:
                check_filter(each)
            except InvalidFilter as error:
                raise BadRead(str(error)) from None
        if not filters and not prefixes:
            return None
        if self._choice is None or self._filters != (filters, prefixes):
            self._filters = (filters, prefixes)
            self._choice = TopicChoice(filters, prefixes, lambda: time.sleep(PAUSE_S))
        return self._choice


class Pace:
    """The rate of bytes that the readers of a node share, in any threads. Each waits for its
    turn."""

    def __init__(self, bytes_per_s: Callable[[], int]) -> None:
        """`bytes_per_s`: the present rate; 0: no limit."""
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, size_bytes: int) -> float:
        """Returns the seconds to wait before so many bytes are sent."""
        rate = self._bytes_per_s()
        if not rate:
            return 0.0
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + size_bytes / rate
        return begin - now


def decode_request(body: bytes) -> ReadRequest:
    """The request in a body. Raises `BadRead`."""
    try:
        return msgspec.json.decode(body, type=ReadRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRead(str(error)) from None


def header_of(plan: Plan) -> str:
    """The header `holdfast-log` of a response: {"next": [[partition, offset], ...], "passed":
    [[partition, start, end], ...]}. `next` says how far the response goes. `passed` are the offsets
    that it leaves out, because filters and prefixes match nothing there."""
    told = {"next": sorted(plan.next.items()), "passed": plan.passed}
    return json.dumps(told, separators=(",", ":"))


def _ranges(request: ReadRequest, partitions: int) -> list[Wanted]:
    found: dict[int, Wanted] = {}
    for partition, start, end in request.ranges:
        if not 0 <= partition < partitions or start < 0 or partition in found:
            raise BadRead(
                f"partition {partition} from {start}: this node has partitions 0 to "
                f"{partitions - 1}, each may be asked for once, offsets begin at 0"
            )
        found[partition] = (partition, start, end)
    return list(found.values())
