"""Publishing, and the retained messages: list, read, delete, restore.

Everything that changes goes in as an MQTT client's PUBLISH (`loopback`), so rights, limits and the
order of the log are those of every other message. A retained message is deleted as MQTT does it, by
an empty one, which live subscribers receive, too.
"""

import base64
import binascii
from collections.abc import Iterator
from functools import partial
from typing import Final

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Flag, Text, Whole, bad_request
from holdfast.api.nodes.loopback import LoopbackClient, LoopbackRefusal
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.views.pages import AFTER, LIMIT, BestRows, place_after
from holdfast.api.views.payloads import Content, RetainedRow, content_of, retained_row
from holdfast.api.views.slices import ITEMS
from holdfast.log.batch import Batch
from holdfast.log.record import FLAG_QOS_MASK, FLAG_RETAIN, MESSAGE, RETAINED, Record
from holdfast.node.node_state import CallbackPromise
from holdfast.node.publish.delayed import end_delayed
from holdfast.node.publish.delayed_table import Delayed
from holdfast.node.session.message import Message
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Properties
from holdfast.protocol.topics.names import InvalidFilter, InvalidTopic, check_filter, decode_topic
from holdfast.protocol.topics.retained import RetainedScan
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

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


PUBLISH_BYTES_MAX: Final = 2 << 20
"""The most bytes of the body of a publish, base64 included."""
DELETE_MAX: Final = 10_000
"""The most retained messages that one request deletes or restores."""
RESTORE_BYTES_MAX: Final = 2 << 20
VISITS: Final = 256
"""The topics that one step of a scan of retained messages visits."""
COMMANDS: Final = "$CONTROL"

FILTER: Final = Text("filter", "the topics", default="#", most=65_535)
DELETE_FILTER: Final = Text("filter", "the topics", required=True, most=65_535)
AFTER_TOPIC: Final = Text("after", "`next` of the page before: a topic", most=65_535)
TOPIC: Final = Text("topic", "the topic", required=True, most=65_535)
MOST: Final = Whole("most", "the most messages to delete", least=1, most=DELETE_MAX,
                    default=DELETE_MAX)  # fmt: skip
DRY_RUN: Final = Flag("dry_run", "only list what would be deleted", default=False)
SYSTEM: Final = Flag("system", "the topics that begin with $ instead of the others",
                     default=False)  # fmt: skip
BYTES: Final = Whole("bytes", "the most bytes of the payload", default=65_536,
                     most=1 << 20)  # fmt: skip


class PublishRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A message to publish."""

    topic: str
    payload: str = ""
    """The payload as text."""
    payload_base64: str = ""
    """The payload, if it is no text."""
    qos: int = 1
    retain: bool = False
    client: str = ""
    """A client id with whose rights the message is published; by default those of the operator."""
    user: str | None = None
    """A user name with whose rights it is published; by default that of `client`'s session."""
    expiry_s: int | None = None
    content_type: str = ""
    response_topic: str = ""
    user_properties: list[tuple[str, str]] = []


class Published(Struct):
    """The acknowledgement of a published message."""

    code: int
    """The MQTT reason code: 0, or 16 if nobody was subscribed."""
    reason: str
    publisher: str
    """The name of the publisher in the log."""


class RetainedPage(Struct):
    """A page of retained messages, by topic."""

    messages: list[RetainedRow]
    next: str = ""
    total: int = 0
    """All retained messages of the broker, whatever the filter."""


class RetainedContent(Struct):
    """A retained message with its payload."""

    message: RetainedRow
    content: Content


class RecordPlace(Struct, forbid_unknown_fields=True):
    """The record of a retained message."""

    topic: str
    partition: int
    offset: int


class Deleted(Struct):
    """The retained messages that were deleted. `deleted` is the body that restores them."""

    deleted: list[RecordPlace]
    more: bool
    """Whether there are more than `most` below the filter."""
    not_in_log: int = 0
    """Those of them whose record the log does not have, so they cannot be restored."""


class RestoreRequest(Struct, forbid_unknown_fields=True):
    """The records of retained messages that are set again."""

    deleted: list[RecordPlace]


class NotRestored(Struct):
    """A message that was not restored."""

    topic: str
    reason: str


class Restored(Struct):
    """The result of a restore."""

    restored: int
    not_restored: list[NotRestored]


class MessageRoutes:
    """The routes of publishing and of retained messages."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node

    def endpoints(self) -> list[Endpoint]:
        v1, operator = "/api/v1", Scope.OPERATOR
        return [
            Endpoint("POST", f"{v1}/publish", operator, "publish a message", self._publish,
                     Published, body=PublishRequest, body_bytes_max=PUBLISH_BYTES_MAX,
                     audited=("topic", "qos", "retain", "client", "user", "expiry_s"),
                     refusals=(409, 503)),
            Endpoint("GET", f"{v1}/retained", Scope.VIEWER, "the retained messages of a filter",
                     self._list, RetainedPage, (FILTER, SYSTEM, LIMIT, AFTER_TOPIC),
                     refusals=(503,)),
            Endpoint("GET", f"{v1}/retained/message", Scope.READER,
                     "a retained message with its payload", self._read, RetainedContent,
                     (TOPIC, BYTES), refusals=(404, 503)),
            Endpoint("DELETE", f"{v1}/retained", operator,
                     "delete the retained messages of a filter", self._delete, Deleted,
                     (DELETE_FILTER, MOST, DRY_RUN), refusals=(409, 503)),
            Endpoint("POST", f"{v1}/retained/restore", operator,
                     "set deleted retained messages again, while the log has them",
                     self._restore, Restored, body=RestoreRequest,
                     body_bytes_max=RESTORE_BYTES_MAX, refusals=(409, 503)),
        ]  # fmt: skip

    # Publish

    async def _publish(self, call: Call) -> Published:
        request = call.body(PublishRequest)
        topic, payload, properties = _message_of(request)
        if request.topic.startswith(COMMANDS) and call.caller.scope < Scope.ADMIN:
            # `user` gives the rights of any user, so an operator could command as an administrator.
            raise ApiRefusal(403, f"commands to {COMMANDS} need the role admin")
        identity = self._identity(request)
        call.after = {"topic": request.topic, "bytes": len(payload), "qos": request.qos,
                      "retain": request.retain, "client": request.client,
                      "user": request.user}  # fmt: skip
        try:
            async with LoopbackClient(self._node.broker, call.caller.name, identity) as client:
                code = await client.publish(topic, payload, request.qos, request.retain, properties)
        except LoopbackRefusal as error:
            raise _refused(error) from None
        return Published(code, reasons.NAMES.get(code, hex(code)), client.publisher)

    def _identity(self, request: PublishRequest) -> tuple[str | None, str] | None:
        if not request.client and request.user is None:
            return None
        user = request.user
        if user is None:
            session = self._node.find_session(request.client)
            user = None if session is None else session.username
        return user, request.client

    # Retained messages

    async def _list(self, call: Call) -> RetainedPage:
        filter = _checked(call[FILTER])
        after = call.get(AFTER_TOPIC) or ""
        retained = self._node.state.retained
        if call[SYSTEM] and filter.startswith(("+", "#")):
            filter = "$SYS/#"
        scan = RetainedScan(retained, filter, False, after)
        found = await self._matching(scan, call[LIMIT])
        rows = [retained_row(message) for _, message in found]
        following = found[-1][0] if len(found) == call[LIMIT] else ""
        return RetainedPage(rows, following, len(retained))

    async def _matching(self, scan: RetainedScan[Message], limit: int) -> list[tuple[str, Message]]:
        found: list[tuple[str, Message]] = []

        def steps() -> Iterator[None]:
            while not scan.done and len(found) < limit:
                found.extend(scan.next(min(VISITS, limit - len(found)), VISITS))
                yield

        await self._node.slices.run(steps())
        return found

    async def _read(self, call: Call) -> RetainedContent:
        message = self._node.state.retained.get(call[TOPIC])
        if message is None:
            raise ApiRefusal(404, f"no message is retained at {shown(call[TOPIC])}")
        content = content_of(message.payload, message.properties, call[BYTES])
        return RetainedContent(retained_row(message), content)

    async def _delete(self, call: Call) -> Deleted:
        scan = RetainedScan(self._node.state.retained, _checked(call[DELETE_FILTER]), False, "")
        found = await self._matching(scan, call[MOST] + 1)
        chosen, more = found[: call[MOST]], len(found) > call[MOST]
        places = [
            RecordPlace(topic, message.partition, message.offset)
            for topic, message in chosen
            if message.partition >= 0 and message.offset >= 0
        ]
        done = Deleted(places, more, len(chosen) - len(places))
        call.before = done
        if not call[DRY_RUN]:
            try:
                async with LoopbackClient(self._node.broker, call.caller.name) as client:
                    for topic, _ in chosen:
                        await client.publish(topic.encode(), b"", 1, True)
            except LoopbackRefusal as error:
                raise _refused(error) from None
        return done

    async def _restore(self, call: Call) -> Restored:
        wanted = call.body(RestoreRequest).deleted
        if len(wanted) > DELETE_MAX:
            raise bad_request(f"deleted: {len(wanted)} messages, at most {DELETE_MAX}")
        done = Restored(0, [])
        call.after = done
        try:
            async with LoopbackClient(self._node.broker, call.caller.name) as client:
                for place in wanted:
                    reason = await self._restore_one(client, place)
                    if reason:
                        done.not_restored.append(NotRestored(place.topic, reason))
                    else:
                        done.restored += 1
        except LoopbackRefusal as error:
            raise _refused(error) from None
        return done

    async def _restore_one(self, client: LoopbackClient, place: RecordPlace) -> str:
        """Restores one message. Returns the reason if that is impossible."""
        if self._node.state.retained.get(place.topic) is not None:
            return "a message is retained there now"
        record = await self._record(place)
        if record is None or record.kind not in (MESSAGE, RETAINED):
            return "the log does not have the record any more"
        if record.topic != place.topic.encode() or not record.flags & FLAG_RETAIN:
            return "the record is of another message"
        if not record.payload:
            return "the record deletes the message"
        # QoS 1 even for a message of QoS 0, because this must not be lost.
        qos = max(1, record.flags & 3)
        await client.publish(record.topic, record.payload, qos, True, record.properties)
        return ""

    async def _record(self, place: RecordPlace) -> Record | None:
        if not 0 <= place.partition < self._node.state.config.partitions:
            return None
        log = await self._node.log((place.partition,))
        if not 0 <= place.offset < log.ends[place.partition]:
            return None
        work = partial(log.read_batches, place.partition, place.offset, place.offset + 1, 1)
        for data in await log.in_thread(work):
            batch = Batch(data, check=False)
            if batch.base_offset <= place.offset < batch.end_offset:
                return batch.record(place.offset - batch.base_offset)
        return None


def _checked(filter: str) -> str:
    try:
        check_filter(filter)
    except InvalidFilter as error:
        raise bad_request(f"filter={shown(filter)}: {error}") from None
    return filter


def _message_of(request: PublishRequest) -> tuple[bytes, bytes, bytes]:
    """The topic, payload and properties of a request. Raises `ApiRefusal` (400)."""
    if not 0 <= request.qos <= 2:
        raise bad_request(f"qos: {request.qos}, it is 0, 1 or 2")
    if request.payload and request.payload_base64:
        raise bad_request("payload and payload_base64: give one of them")
    properties: Properties = {}
    if request.expiry_s is not None:
        properties[p.MESSAGE_EXPIRY_INTERVAL] = request.expiry_s
    if request.content_type:
        properties[p.CONTENT_TYPE] = request.content_type
    if request.response_topic:
        properties[p.RESPONSE_TOPIC] = request.response_topic
    if request.user_properties:
        properties[p.USER_PROPERTY] = request.user_properties
    try:
        topic = request.topic.encode()
        decode_topic(topic)
        payload = request.payload.encode()
        if request.payload_base64:
            payload = base64.b64decode(request.payload_base64, validate=True)
        return topic, payload, p.encode_block(properties)
    except (InvalidTopic, binascii.Error, ValueError) as error:
        raise bad_request(f"the message cannot be encoded: {error}") from None


def _refused(error: LoopbackRefusal) -> ApiRefusal:
    if error.reason == reasons.NOT_AUTHORIZED:
        return ApiRefusal(409, "the message was refused: not authorised to publish there")
    if error.reason == reasons.IMPLEMENTATION_SPECIFIC_ERROR:
        return ApiRefusal(409, f"the message was not published: {error}")
    return ApiRefusal(503, f"the message was refused: {error}")
