"""The records of the log as JSON, page by page, newest or oldest first."""

from functools import partial
from typing import Final

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, Whole, bad_request
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.views.pages import CURSOR_CHARACTERS_MAX, PAGE_MAX, BadCursor
from holdfast.api.views.records import LogPage, RecordQuery, RecordScan, decode_positions
from holdfast.protocol.topics.names import InvalidFilter, check_filter
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown
from holdfast.server.event_loop.broker import Broker
from holdfast.storage.record import KIND_NAMES

KINDS: Final = {name: kind for kind, name in KIND_NAMES.items()}
SCANS_MAX: Final = 4
"""The most requests that scan the log at the same time."""

PARTITION: Final = Whole("partition", "records of this partition only", most=65_535)
START: Final = Whole("start", "with `partition`: the first offset; with `newest`, the end")
FROM_US: Final = Whole("from_us", "records from this time on, in microseconds since 1970")
TO_US: Final = Whole("to_us", "records before this time")
FILTER: Final = Text("filter", "messages and retained updates of these topics", most=65_535)
KIND: Final = Text("kind", "records of this kind", choices=tuple(KINDS))
CLIENT: Final = Text("client", "records of this publisher or session", most=65_535)
ORDER: Final = Text("order", "the order of the page", choices=("newest", "oldest"),
                    default="newest")  # fmt: skip
LIMIT: Final = Whole("limit", "the most records", least=1, most=PAGE_MAX, default=50)
AFTER: Final = Text("after", "`next` of the page before", most=CURSOR_CHARACTERS_MAX)
BYTES: Final = Whole("bytes", "the most bytes of each payload", default=200, most=65_536)


class RecordRoutes:
    """The route of the log's records."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node
        self._scans = 0

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/log/records", Scope.READER, "the records of the log as JSON",
                     self._list, LogPage,
                     (PARTITION, START, FROM_US, TO_US, FILTER, KIND, CLIENT, ORDER, LIMIT, AFTER,
                      BYTES), refusals=(503,)),
        ]  # fmt: skip

    async def _list(self, call: Call) -> LogPage:
        broker = self._node.readable_broker
        query = await self._query(call, broker)
        if self._scans >= SCANS_MAX:
            raise ApiRefusal(503, f"{SCANS_MAX} requests scan the log already: try again",
                             {"Retry-After": "1"})  # fmt: skip
        self._scans += 1
        try:
            scan = RecordScan(broker.reader, query)
            while not scan.is_done():
                await broker.reads.in_thread(scan.step)
            return scan.page()
        finally:
            self._scans -= 1

    async def _query(self, call: Call, broker: Broker) -> RecordQuery:
        state, reader = broker.node.state, broker.reader
        count = state.config.partitions
        first = [reader.first_offset(partition) for partition in range(count)]
        ends = self._node.committed()
        for parameter, bound in ((FROM_US, first), (TO_US, ends)):
            time_us = call.get(parameter)
            for partition in range(count) if time_us is not None else ():
                work = partial(reader.offset_for_time, partition, time_us or 0)
                offset = await broker.reads.in_thread(work)
                bound[partition] = min(max(offset, first[partition]), ends[partition])
        newest = call[ORDER] == "newest"
        chosen, start = call.get(PARTITION), call.get(START)
        if chosen is not None:
            if chosen >= count:
                raise bad_request(f"partition={chosen}: this log has 0 to {count - 1}")
            for partition in range(count):
                if partition != chosen:
                    ends[partition] = first[partition]
            if start is not None:
                side = ends if newest else first
                side[chosen] = min(max(start, first[chosen]), ends[chosen])
        elif start is not None:
            raise bad_request("start: it needs a partition")
        begin, bounds = (ends, first) if newest else (first, ends)
        after = call.get(AFTER)
        if after is not None:
            begin = _continued(after, first, ends, newest=newest)
        filter = call.get(FILTER) or ""
        if filter:
            try:
                check_filter(filter)
            except InvalidFilter as error:
                raise bad_request(f"filter={shown(filter)}: {error}") from None
        kind = KINDS.get(call.get(KIND) or "", 0)
        client = call.get(CLIENT)
        clients = frozenset(() if client is None else (client.encode(),))
        return RecordQuery(begin, bounds, call[LIMIT], newest, kind, filter, clients, call[BYTES])


def _continued(after: str, first: list[int], ends: list[int], *, newest: bool) -> list[int]:
    """The positions of a cursor, within what the log has and the request chooses."""
    try:
        given = decode_positions(after, len(first))
    except BadCursor as error:
        raise bad_request(f"after={shown(after)}: {error}") from None
    if newest:
        return list(map(min, given, ends))
    return list(map(max, given, first))
