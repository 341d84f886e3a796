"""One record of the log: with a larger part of its payload, decoded, and the topic's value before.

The payload alone is `GET /api/v1/log/payload`, whole, whatever its size.
"""

import asyncio
from functools import partial
from typing import Any, Final

from msgspec import Struct
from starlette.responses import Response

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Whole, bad_request
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.nodes.whole_log import ABSENT, removed
from holdfast.api.views.records import LogRecord, log_record
from holdfast.log.batch import Batch
from holdfast.log.partition import partition_of
from holdfast.log.record import MESSAGE, Record
from holdfast.security.access.scopes import Scope

SPARKPLUG: Final = b"spBv1.0/"
SPARKPLUG_BYTES_MAX: Final = 262_144
"""The largest Sparkplug payload that is decoded for a reply."""
SEARCH_S: Final = 1.0
"""The time in seconds after which the search for the value before ends."""
PARTITION: Final = Whole("partition", "its partition", required=True, most=65_535)
OFFSET: Final = Whole("offset", "its offset", required=True)
BYTES: Final = Whole("bytes", "the most bytes of each payload", default=16_384, most=1 << 20)


class RecordDetail(Struct):
    """One record."""

    record: LogRecord
    previous: LogRecord | None = None
    """The message of the same topic before this one."""
    is_first: bool = False
    """Whether the log has no message of the topic before this one."""
    sparkplug: dict[str, Any] | None = None
    """A Sparkplug B payload: its time, its number, and its metrics by name. Metrics that were named
    at birth only have the name `alias N`."""
    previous_sparkplug: dict[str, Any] | None = None
    problem: str = ""
    """The reason why a Sparkplug payload could not be decoded."""


class OneRecordRoutes:
    """The routes of one record."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node

    def endpoints(self) -> list[Endpoint]:
        v1, refusals = "/api/v1/log", (404, 410, 421, 503)
        return [
            Endpoint("GET", f"{v1}/record", Scope.READER,
                     "one record, with the value of its topic before", self._one, RecordDetail,
                     (PARTITION, OFFSET, BYTES), refusals=refusals),
            Endpoint("GET", f"{v1}/payload", Scope.READER, "the whole payload of one record",
                     self._payload, bytes, (PARTITION, OFFSET), refusals=refusals,
                     media_type="application/octet-stream"),
        ]  # fmt: skip

    async def _one(self, call: Call) -> RecordDetail:
        record = await self._read(call)
        found = RecordDetail(log_record(record, call[BYTES]))
        if record.kind != MESSAGE:
            return found
        previous, found.is_first = await self._previous(record)
        if previous is not None:
            found.previous = log_record(previous, call[BYTES])
        if record.topic.startswith(SPARKPLUG):
            # Decoding a large payload takes longer than a turn of the loop may.
            found.sparkplug, found.problem = await asyncio.to_thread(_sparkplug, record)
            if previous is not None and found.sparkplug is not None:
                found.previous_sparkplug, _ = await asyncio.to_thread(_sparkplug, previous)
        return found

    async def _payload(self, call: Call) -> Response:
        record = await self._read(call)
        name = f"payload-{record.partition}-{record.offset}.bin"
        headers = {
            # Never shown as a page of this port, whatever it contains.
            "Content-Disposition": f'attachment; filename="{name}"',
            "Content-Security-Policy": "sandbox",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        return Response(record.payload, 200, headers, "application/octet-stream")

    async def _read(self, call: Call) -> Record:
        """The record in question. Raises `ApiRefusal` (400, 404, 410)."""
        partition, offset = call[PARTITION], call[OFFSET]
        count = self._node.broker.node.state.config.partitions
        if partition >= count:
            raise bad_request(f"partition={partition}: this log has 0 to {count - 1}")
        log = await self._node.log_and_lake((partition,))
        ends = log.ends
        if offset < log.first_offset(partition):
            raise removed(log)
        if offset >= ends[partition]:
            raise ApiRefusal(404, f"partition {partition} ends at {ends[partition]}")
        work = partial(log.read_batches, partition, offset, offset + 1, 1)
        for data in await log.in_thread(work):
            batch = Batch(data, check=False)
            if batch.base_offset <= offset < batch.end_offset:
                record = batch.record(offset - batch.base_offset)
                if record.kind == ABSENT:
                    raise ApiRefusal(404, "the lake has no message at this offset")
                return record
        raise ApiRefusal(404, "the record cannot be read here: ask another node")

    async def _previous(self, record: Record) -> tuple[Record | None, bool]:
        """The message of the topic before a record, and whether there is certainly none."""
        broker = self._node.readable_broker
        home = partition_of(record.topic, broker.node.state.config.partitions)
        if home != record.partition:
            return None, False
        log = await self._node.log_and_lake((home,))
        history = log.topic_history(record.topic, record.partition, record.offset)
        deadline = broker.loop.time() + SEARCH_S
        while not history.offsets and not history.is_done():
            if broker.loop.time() > deadline:
                return None, False
            await log.in_thread(history.step)
        if not history.offsets:
            # The messages of a topic are listed in the log, and not in the lake.
            return None, log.first_offset(home) == log.begin_of_log(home)
        work = partial(log.fetch, record.partition, history.offsets[0])
        return await log.in_thread(work), False


def _sparkplug(record: Record) -> tuple[dict[str, Any] | None, str]:
    """The metrics of a payload, or the reason why there are none."""
    # The decoder belongs to the pipeline, and a start of the broker does not need it.
    from holdfast_lake.decoders.decoded import Decoded, DecodeError
    from holdfast_lake.decoders.sparkplug import add_metric, parse_payload

    if len(record.payload) > SPARKPLUG_BYTES_MAX:
        return None, f"payloads of more than {SPARKPLUG_BYTES_MAX} bytes are not decoded"
    try:
        payload = parse_payload(record.payload)
        decoded = Decoded()
        for metric in payload.metrics:
            name = f"alias {metric.alias}" if metric.name is None else metric.name
            add_metric(decoded, name, metric, metric.datatype or 0)
    except DecodeError as error:
        return None, str(error)
    metrics: dict[str, Any] = dict(zip(decoded.names, decoded.values, strict=True))
    # A double has not all digits of these.
    metrics.update({decoded.names[at]: digits for at, digits in (decoded.exact or {}).items()})
    found = {"timestamp": payload.time_ms, "seq": payload.sequence, "metrics": metrics}
    return found, decoded.reason() or ""
