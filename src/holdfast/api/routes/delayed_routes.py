"""Lists and cancels the delayed messages that wait. Every node of a cluster tracks all of them."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, Whole
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.views.pages import AFTER, LIMIT, BestRows, place_after
from holdfast.api.views.slices import ITEMS
from holdfast.log.record import FLAG_QOS_MASK, FLAG_RETAIN
from holdfast.node.node_state import CallbackPromise
from holdfast.node.publish.delayed import end_delayed
from holdfast.node.publish.delayed_table import Delayed
from holdfast.security.access.scopes import Scope

SEARCH: Final = Text("search", "a part of the topic or client id", most=1024)
PARTITION: Final = Whole("partition", "the partition of the message", required=True)
OFFSET: Final = Whole("offset", "its offset", required=True)


class DelayedRow(Struct):
    """A delayed message. Times are in microseconds since 1970."""

    partition: int
    offset: int
    """That of its record in the log. Both together name the message."""
    due_us: int
    topic: str
    client: str
    qos: int
    retain: bool
    bytes: int
    """The length of its payload."""
    at_us: int


class DelayedPage(Struct):
    """A page of delayed messages, the next one to be published first."""

    messages: list[DelayedRow]
    matched: int
    next: str = ""


class DelayedRoutes:
    """The routes of delayed messages."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node

    def endpoints(self) -> list[Endpoint]:
        path = "/api/v1/delayed"
        return [
            Endpoint("GET", path, Scope.VIEWER, "the delayed messages that wait, page by page",
                     self._list, DelayedPage, (SEARCH, LIMIT, AFTER), refusals=(503,)),
            Endpoint("DELETE", path, Scope.OPERATOR,
                     "cancel a delayed message: it is not published", self._cancel, DelayedRow,
                     (PARTITION, OFFSET), refusals=(404, 503)),
        ]  # fmt: skip

    async def _list(self, call: Call) -> DelayedPage:
        place = place_after(call, is_number=True)
        search = (call.get(SEARCH) or "").casefold()
        best: BestRows[DelayedRow] = BestRows(call[LIMIT], place, descending=False)
        waiting = list(self._node.state.delayed.by_place.values())

        def choose() -> Iterator[None]:
            for number, message in enumerate(waiting):
                if number % ITEMS == ITEMS - 1:
                    yield
                row = _row(message)
                if search in f"{row.topic}\n{row.client}".casefold():
                    best.add((row.due_us, f"{row.partition}/{row.offset}"), row)

        await self._node.slices.run(choose())
        return DelayedPage(best.page(), best.matched, best.following())

    async def _cancel(self, call: Call) -> DelayedRow:
        node = self._node
        place = (call[PARTITION], call[OFFSET])
        message = node.state.delayed.by_place.get(place)
        if message is None:
            raise ApiRefusal(404, f"no delayed message waits at {place[0]}/{place[1]}")
        call.before = row = _row(message)
        await node.commit(
            lambda done: end_delayed(node.state, place, CallbackPromise(done)), "the cancellation"
        )
        return row


def _row(message: Delayed) -> DelayedRow:
    record = message.record
    return DelayedRow(
        record.partition,
        record.offset,
        message.due_us,
        message.topic.decode("utf-8", "replace"),
        record.client_id.decode("utf-8", "replace"),
        record.flags & FLAG_QOS_MASK,
        record.flags & FLAG_RETAIN != 0,
        len(record.payload),
        record.timestamp_us,
    )
