"""`GET /api/v1/trace`, the way of one message, and `/api/v1/trace/why`, one client's part of it."""

from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from typing import Final, Literal

from msgspec import Struct, field

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, Whole, bad_request
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.nodes.whole_log import removed
from holdfast.api.views.history import (
    HISTORY_BYTES_MAX,
    SessionHistory,
    pieces_before,
    records_of,
)
from holdfast.api.views.records import LogRecord, log_record
from holdfast.api.views.trace import (
    NO_LOCAL,
    GroupStatus,
    GroupTrace,
    MessageTrace,
    SessionTrace,
    Status,
    TracedMessage,
    TraceScan,
    TraceStep,
    matching_groups,
    member_trace,
    session_trace,
)
from holdfast.log.batch import Batch
from holdfast.log.partition import partition_of
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.record import FLAG_PACKET_ID, FLAG_QOS_MASK, FLAG_RETAIN, MESSAGE, RELEASE, Record
from holdfast.protocol.topics.names import InvalidTopic, decode_topic, is_shared, split_shared
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

NOW: Final = ("sent", "waiting", "expired", "too_large", "qos0", "unknown")
"""The statuses that the present state decides."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Asked(Struct, frozen=True):
    """A question: a client, a topic and a time."""

    client: str
    topic: str
    time_us: int | None


class Reason(Struct, frozen=True):
    """The answer."""

    status: Status | Literal["no_message"]
    sentence: str
    unknown: list[str] = field(default_factory=list)


def time_text(timestamp_us: int) -> str:
    """A time in UTC with milliseconds."""
    try:
        when = EPOCH + timedelta(microseconds=timestamp_us)
    except OverflowError:
        return f"{timestamp_us} us since 1970"
    return when.strftime("%Y-%m-%dT%H:%M:%S.") + f"{when.microsecond // 1000:03d}Z"


def reason_of(
    asked: Asked,
    message: TracedMessage | None,
    history: SessionHistory | None,
    now: SessionTrace | None,
    *,
    is_known_now: bool,
    is_here: bool = False,
) -> Reason:
    """Decides by what is certain first: the message, the present rights, the cursor, the history.

    `now`: what became of the message by the present state. `is_known_now`: whether the session
    exists now and outlives its connection; `is_here`: whether it exists at all.
    """
    if message is None or history is None:
        when = "now" if asked.time_us is None else time_text(asked.time_us)
        text = (
            f"The log has no message of {asked.topic} within a minute of {when}: none was published"
            " then, or it was of QoS 0 and not logged, or retention has removed it."
        )
        return Reason("no_message", text)
    record = message.record
    place = f"{record.partition}/{record.offset}"
    name = f"message {place} of {asked.topic} ({time_text(record.timestamp_us)})"
    client = asked.client
    if now is not None and now.status == "not_permitted":
        text = f"{client} may not read {asked.topic} by the present rules, so it was not sent"
        return Reason("not_permitted", f"{text} {name}.", ["the rules of that time"])
    if not is_known_now and not (history.filters or history.shared or history.later):
        text = f"The log knows no session of {client} at that time"
        if is_here:
            text += ": its session ends with its connection, and such sessions are not in the log"
        return Reason("unknown", f"{text}, so nothing is known about {name}.")
    if not history.filters:
        shared = _shared(client, name, history, now)
        if shared is not None:
            return shared
    missing = _not_subscribed(client, name, message, history, now, is_known_now=is_known_now)
    if missing is not None:
        return missing
    if not record.flags & FLAG_QOS_MASK:
        text = f"{name[0].upper()}{name[1:]} was published at QoS 0: {client} was sent it if it"
        return Reason("qos0", f"{text} was connected then, and the log has no trace of that.")
    if now is not None and now.status in NOW:
        return Reason(now.status, f"{client} and {name}: {now.text}.")
    return _passed(client, name, message, history, now)


def _shared(
    client: str, name: str, history: SessionHistory, now: SessionTrace | None
) -> Reason | None:
    """The reason if the client was sent the message as a member of a shared group, or not at all.
    None: it was no member, or it subscribed itself, too."""
    if now is not None and now.status in ("sent", "delivered") and split_group(now.filter):
        return Reason(now.status, f"{client} and {name}: {now.text}.")
    if now is not None and not split_group(now.filter):
        return None
    filters = sorted(history.shared) or ([] if now is None else [now.filter])
    if not filters or (history.has_begun and not history.shared):
        return None
    group = split_group(filters[0])
    if history.inflight_us:
        at = time_text(history.inflight_us)
        return Reason("delivered", f"{client} was sent {name} at {at}, as a member of {group}.")
    text = f"{client} was a member of the shared group {group}, of which one member was sent {name}"
    return Reason("shared", f"{text}.", ["which member of the group it was"])


def split_group(filter: str) -> str:
    """The name of the group of a shared filter, or ""."""
    return split_shared(filter)[0] if is_shared(filter) else ""


def _not_subscribed(
    client: str,
    name: str,
    message: TracedMessage,
    history: SessionHistory,
    now: SessionTrace | None,
    *,
    is_known_now: bool,
) -> Reason | None:
    """The reason if the session was not subscribed, or None if it was, or that is unknown."""
    if history.filters:
        return None
    if history.no_local or (now is not None and now.text == NO_LOCAL):
        return Reason("not_subscribed", f"{client} was not sent {name}: {NO_LOCAL}.")
    first = next((each for each in history.later if each[1] != "clean"), None)
    if history.has_begun or (now is not None and now.status == "not_subscribed"):
        text = f"{client} was not subscribed to the topic of {name}"
        if first is not None and first[1] == "subscribe":
            text += f"; it subscribed to {first[2]} at {time_text(first[0])}"
            if message.record.flags & FLAG_RETAIN:
                text += ", and the message is retained, so it may have been sent it then"
        unknown = ["a session of that client that ended with its connection"]
        return Reason("not_subscribed", f"{text}.", unknown)
    if is_known_now and now is None and first is None:
        text = f"{client} is not subscribed to the topic of {name}, and the log has no change since"
        return Reason("not_subscribed", f"{text}.")
    return None


def _passed(
    client: str,
    name: str,
    message: TracedMessage,
    history: SessionHistory,
    now: SessionTrace | None,
) -> Reason:
    ended_us, passed_us = history.ended_us, history.passed_us or history.acknowledged_us
    if history.filters and ended_us and (not passed_us or ended_us <= passed_us):
        text = f"{client} was subscribed, and its session ended at {time_text(ended_us)}"
        return Reason("ended", f"{text} before its cursor had passed {name}.")
    if history.moved_us and not passed_us:
        text = f"An operator moved {client} in the log at {time_text(history.moved_us)}, past"
        return Reason("moved", f"{text} {name}.", ["whether it had received the message before"])
    if message.expires_us and passed_us and passed_us >= message.expires_us:
        text = (
            f"{name[0].upper()}{name[1:]} expired at {time_text(message.expires_us)}, before"
            f" {client} was sent it: its cursor passed it at {time_text(passed_us)}."
        )
        return Reason("expired", text)
    if (now is not None and now.status == "delivered") or passed_us:
        when = f" at {time_text(passed_us)}" if passed_us else ""
        text = f"{client} received {name}: its cursor passed it{when}, and it is not inflight."
        unknown = [] if passed_us else ["when: the log has no cursor record of the session for it"]
        return Reason("delivered", text, unknown)
    text = f"{client} was subscribed at the time of {name}; what became of it is not in the log"
    return Reason("unknown", f"{text} any more.")


PARTITION: Final = Whole("partition", "the partition of the message", most=65_535)
OFFSET: Final = Whole("offset", "its offset")
TOPIC: Final = Text("topic", "the topic of the message", most=65_535)
TIME_US: Final = Whole("time_us", "its time, in microseconds since 1970; default: now")
WHY_TOPIC: Final = Text("topic", "the topic", required=True, most=65_535)
CLIENT: Final = Text("client", "the client id", required=True, most=65_535)
NEAR_S: Final = 60
"""The time in seconds around `time_us` in which a message of a topic is looked for."""
NEAR_READS_MAX: Final = 32
"""The most reads of the log that look for it. Each reads at most 16 MiB."""
CHECKED_MAX: Final = 20
"""The most sessions of a trace that are past the message and are looked up in the log, because a
session that subscribed later is past it, too."""
CHECKED_BYTES_MAX: Final = 2 << 20
"""The most bytes that this reads before the message, and behind it, for each of them."""
RELEASE_BYTES_MAX: Final = 4 << 20
"""The most bytes behind a QoS 2 message in which its PUBREL is looked for."""


class Why(Struct):
    """The answer to why a client has, or has not, received a message."""

    sentence: str
    status: str
    record: LogRecord | None = None
    unknown: list[str] = []
    """The facts that the log does not have."""


class TraceRoutes:
    """The routes of traces."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node

    def endpoints(self) -> list[Endpoint]:
        v1 = "/api/v1/trace"
        return [
            Endpoint("GET", v1, Scope.READER, "the way of one message", self._trace, MessageTrace,
                     (PARTITION, OFFSET, TOPIC, TIME_US), refusals=(404, 410, 421, 503)),
            Endpoint("GET", f"{v1}/why", Scope.READER,
                     "why a client has, or has not, received a message", self._why, Why,
                     (CLIENT, WHY_TOPIC, TIME_US), refusals=(421, 503)),
        ]  # fmt: skip

    # The message

    async def _find(self, call: Call) -> Record:
        partition, offset, topic = call.get(PARTITION), call.get(OFFSET), call.get(TOPIC)
        if topic is not None and partition is None and offset is None:
            found = await self._at_time(topic, call.get(TIME_US))
            if found is None:
                text = f"the log has no message of {shown(topic)} within {NEAR_S} s of that time"
                raise ApiRefusal(404, text)
            return found
        if partition is None or offset is None or topic is not None:
            raise bad_request("give partition and offset, or topic and time_us")
        return await self._at(partition, offset)

    async def _at(self, partition: int, offset: int) -> Record:
        state = self._node.broker.node.state
        if partition >= state.config.partitions:
            raise bad_request(f"partition={partition}: there are 0 to"
                              f" {state.config.partitions - 1}")  # fmt: skip
        log = await self._node.log_and_lake((partition,))
        if offset < log.first_offset(partition):
            raise removed(log)
        end = log.ends[partition]
        if offset >= end:
            raise ApiRefusal(404, f"partition {partition} ends at {end}")
        work = partial(log.read_batches, partition, offset, offset + 1, 1)
        for data in await log.in_thread(work):
            batch = Batch(data, check=False)
            if batch.base_offset <= offset < batch.end_offset:
                record = batch.record(offset - batch.base_offset)
                if record.kind == MESSAGE:
                    return record
                raise ApiRefusal(404, f"{partition}/{offset} is a record of another kind")
        raise ApiRefusal(404, "the record cannot be read here: ask another node")

    async def _at_time(self, topic: str, time_us: int | None) -> Record | None:
        """The message of a topic that is nearest to a time."""
        state = self._node.broker.node.state
        raw = _topic(topic)
        wanted_us = state.wall_us if time_us is None else time_us
        count = state.config.partitions
        chosen = partition_of(raw, count)
        log = await self._node.log_and_lake((chosen,))
        near_us = NEAR_S * 1_000_000
        bounds = [
            await log.in_thread(partial(log.offset_for_time, chosen, max(0, at_us)))
            for at_us in (wanted_us - near_us, wanted_us + near_us)
        ]
        limits = list(log.ends)
        positions = list(limits)
        positions[chosen] = min(bounds[0], limits[chosen])
        limits[chosen] = min(max(bounds), limits[chosen])
        interests = [ReadInterest(topic, None)]
        best: Record | None = None
        for _ in range(NEAR_READS_MAX):
            work = partial(log.read, positions, limits, interests, 1000, 4 << 20)
            result = await log.in_thread(work)
            for record in result.records:
                distance = abs(record.timestamp_us - wanted_us)
                if best is None or distance <= abs(best.timestamp_us - wanted_us):
                    best = record
            positions = result.positions
            if result.done:
                break
        return best

    # The way of a message

    async def _trace(self, call: Call) -> MessageTrace:
        record = await self._find(call)
        node = self._node
        message = TracedMessage(record)
        scan = TraceScan(node.state, list(node.recorded.sessions.values()), message)
        await node.slices.run(scan.steps())
        for each in scan.sessions:
            each.node = each.node or node.node_id
        unknown = [
            "whether the publisher received the acknowledgement",
            "deliveries at QoS 0, and those to sessions that end with their connection",
            "sessions that have unsubscribed from the topic or ended since",
            "whether an earlier connection of a session took packets of this size",
        ]
        passed = [each for each in scan.sessions if each.status == "delivered"]
        for each in passed[:CHECKED_MAX]:
            await self._check(each, record, message)
            scan.counts["delivered"] -= 1
            scan.counts[each.status] += 1
        if scan.counts["delivered"] > CHECKED_MAX:
            unknown.append(f"which sessions beyond {CHECKED_MAX} subscribed after the message")
        return MessageTrace(
            log_record(record, 4096),
            [*self._publishing(record), await self._acknowledged(record), _lake()],
            scan.sessions,
            self._groups(record, message.topic),
            dict(+scan.counts),
            unknown,
        )

    async def _check(self, found: SessionTrace, record: Record, message: TracedMessage) -> None:
        """Looks up whether a session that is past a message was sent it."""
        history = await self._history(found.client, record, CHECKED_BYTES_MAX)
        asked = Asked(found.client, message.topic, record.timestamp_us)
        reason = reason_of(asked, message, history, found, is_known_now=True, is_here=True)
        if reason.status != "no_message" and reason.status != found.status:
            found.status, found.text = reason.status, reason.sentence

    def _publishing(self, record: Record) -> list[TraceStep]:
        publisher = record.client_id.decode("utf-8", "replace")
        place = f"{record.partition}/{record.offset}"
        qos = record.flags & FLAG_QOS_MASK
        steps = [
            TraceStep("publisher", True, f"client {publisher} published it at QoS {qos}"),
            TraceStep("append", True, f"its node took it as {place}", record.timestamp_us),
        ]
        text = "this broker has no replicas"
        metadata = self._node.cluster_node.context.metadata
        if metadata is not None and len(metadata.nodes) > 1:
            info = metadata.partitions[record.partition]
            text = (
                f"in sync now: {', '.join(info.in_sync)}; the leader is {info.leader or 'none'}."
                " The log does not say who was in sync then"
            )
        steps.append(TraceStep("replicas", True, text))
        end = self._node.committed()[record.partition]
        steps.append(TraceStep("commit", True, f"committed: the partition's end is {end}"))
        return steps

    async def _acknowledged(self, record: Record) -> TraceStep:
        """A PUBREL of the publisher proves that it had received the PUBREC."""
        text = "sent after the commit; the log does not say whether it arrived"
        qos = record.flags & FLAG_QOS_MASK
        if qos == 0:
            return TraceStep("acknowledge", True, "QoS 0 has no acknowledgement")
        if qos == 1 or not record.flags & FLAG_PACKET_ID:
            return TraceStep("acknowledge", False, text)
        log = await self._node.log((record.partition,))
        start, end = record.offset + 1, log.ends[record.partition]
        size_bytes = 0
        while start < end and size_bytes < RELEASE_BYTES_MAX:
            work = partial(log.read_batches, record.partition, start, end, 1 << 20)
            batches = await log.in_thread(work)
            if not batches:
                break
            for data in batches:
                batch = Batch(data, check=False)
                size_bytes += len(data)
                start = batch.end_offset
                for each in batch.records():
                    if each.kind == RELEASE and _is_release_of(each, record):
                        text = "the publisher has released it (PUBREL), so it had the PUBREC"
                        return TraceStep("acknowledge", True, text, each.timestamp_us)
        return TraceStep("acknowledge", False, text + "; no PUBREL was found")

    def _groups(self, record: Record, topic: str) -> list[GroupTrace]:
        node, groups = self._node, self._node.cluster_node.replicated.groups
        found: list[GroupTrace] = []
        # Those without a durable member are known by their members here.
        for key in matching_groups(list(node.recorded.groups | node.state.groups), topic):
            status: GroupStatus = "unknown"
            if key in groups.positions:
                finished = groups.is_finished(key, record.partition, record.offset)
                status = "finished" if finished else "waiting"
            found.append(GroupTrace(key, status))
        return found

    # Why

    async def _why(self, call: Call) -> Why:
        client, topic = call[CLIENT], call[WHY_TOPIC]
        _topic(topic)
        time_us = call.get(TIME_US)
        record = await self._at_time(topic, time_us)
        asked = Asked(client, topic, time_us)
        if record is None:
            found = reason_of(asked, None, None, None, is_known_now=False)
            return Why(found.sentence, found.status, None, found.unknown)
        node = self._node
        message = TracedMessage(record)
        session = node.find_session(client)
        now = None
        if session is not None and session.expiry_s:
            positions = session.positions
            if node.state.sessions.get(client) is session:
                positions = session.resume_positions(node.state.delivered)
            now = session_trace(node.state, session, message, positions)
            if now is None:
                now = member_trace(session, message)
        history = await self._history(client, record, HISTORY_BYTES_MAX)
        durable = session is not None and session.expiry_s > 0
        reason: Reason = reason_of(
            asked, message, history, now, is_known_now=durable, is_here=session is not None
        )
        return Why(reason.sentence, reason.status, log_record(record, 200), reason.unknown)

    async def _history(self, client: str, record: Record, bytes_max: int) -> SessionHistory:
        """Reads what the log has of a session around a record, at most `bytes_max` on each side."""
        key = client.encode()
        home = partition_of(key, self._node.broker.node.state.config.partitions)
        log = await self._node.log((home,))
        history = SessionHistory(
            record.topic.decode("utf-8", "replace"),
            record.partition,
            record.offset,
            key == record.client_id,
        )
        middle = await log.in_thread(partial(log.offset_for_time, home, record.timestamp_us))
        end = log.ends[home]
        pieces: list[list[Record]] = []
        at = begun = min(middle, end)
        async for piece in pieces_before(log.in_thread, log, key, home, begun, bytes_max):
            pieces.append(piece.records)
            at = piece.start
        # The log is complete from its beginning, so a session without a record did not exist.
        history.has_begun = at <= 0
        for each in chain.from_iterable(reversed(pieces)):
            history.before(each)
        start, left = begun, bytes_max
        while start < end and left > 0:
            work = partial(records_of, log, key, home, start, end)
            found, start, size_bytes = await log.in_thread(work)
            left -= max(1, size_bytes)
            for each in found:
                history.behind(each)
        return history


def _is_release_of(release: Record, record: Record) -> bool:
    return release.client_id == record.client_id and release.sequence == record.sequence


def _topic(topic: str) -> bytes:
    try:
        raw = topic.encode()
        decode_topic(raw)
    except (InvalidTopic, UnicodeEncodeError) as error:
        raise bad_request(f"topic={shown(topic)}: {error}") from None
    return raw


def _lake() -> TraceStep:
    text = "a broker does not know the lakes that read its log: see `holdfast pipeline status`"
    return TraceStep("lake", False, text)
