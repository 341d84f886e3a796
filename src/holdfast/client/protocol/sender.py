"""Sends a client's messages within their window, and its requests."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Final

from holdfast.client.errors import NotConnected, QueueFull
from holdfast.client.options import LEVEL_5, Options
from holdfast.client.protocol.effects import Effect, Traced
from holdfast.client.protocol.negotiation import ServerLimits, packet_of
from holdfast.client.protocol.outgoing import OutgoingMessages, OutgoingPublish, PacketIds
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.packets import Properties, SubscriptionRequest
from holdfast.protocol.mqtt.properties import encode_block
from holdfast.protocol.mqtt.publish import encode_publish
from holdfast.protocol.topics.names import decode_topic

NEVER: Final = inf


class KeepAlive:
    """The timer of one connection.

    A ping is due when nothing was sent for the interval (the server would close the connection) or
    nothing received (it may be down). With a response timeout, one is also due half of it after the
    last input from a server that owes a reply. A server that is only slow replies to the ping; one
    that is down is detected at the end of the timeout.

    `is_owed`: a packet other than a ping waits for its reply.
    """

    def __init__(
        self,
        ping_timeout_s: float,
        response_timeout_s: float | None = None,
        ping_interval_s: float = 0.0,
    ) -> None:
        self.interval_s = 0.0
        """The keep alive in seconds; 0: it needs no pings."""
        self._ping_timeout_s = ping_timeout_s
        self._response_timeout_s = response_timeout_s
        self._ping_interval_s = ping_interval_s
        self._sent = 0.0
        self._received = 0.0
        self._requested_at = 0.0
        self._pinged: float | None = None
        self._is_paused = False

    def start(self, now: float) -> None:
        """Begins a connection."""
        self.interval_s = 0.0
        self._sent = self._received = self._requested_at = now
        self._pinged = None
        self._is_paused = False

    def sent(self, now: float) -> None:
        """Notes that a packet was sent."""
        self._sent = now

    def received(self, now: float) -> None:
        """Notes that bytes arrived."""
        self._received = now

    def note_request(self, now: float) -> None:
        """Notes a packet that needs a reply, while no other reply is owed."""
        self._requested_at = now

    def pinged(self, now: float) -> None:
        """Notes that a PINGREQ was sent."""
        self._pinged = now

    def note_pingresp(self) -> None:
        """Notes that its PINGRESP arrived."""
        self._pinged = None

    def set_paused(self, is_paused: bool, now: float) -> None:
        """Notes whether the client reads. While it does not, silence is no sign of the server's
        state."""
        self._is_paused = is_paused
        self._received = now
        if self._pinged is not None:
            self._pinged = now

    def progressed(self, now: float) -> None:
        """Notes that the server takes bytes. Until it has all of them it can owe no reply."""
        self.set_paused(self._is_paused, now)

    def ping_at(self, is_owed: bool) -> float:
        """The time of the next ping, or NEVER."""
        interval_s = self.interval_s
        if self._is_paused:
            return self._sent + interval_s if interval_s else NEVER
        if self._pinged is not None:
            return NEVER
        received = self._received
        due = NEVER
        if interval_s:
            due = (self._sent if self._sent < received else received) + interval_s
        if self._ping_interval_s:
            due = min(due, received + self._ping_interval_s)
        if is_owed and self._response_timeout_s is not None:
            since = self._requested_at if self._requested_at > received else received
            at = since + self._response_timeout_s / 2
            if at < due:
                due = at
        return due

    def times_out_at(self, is_owed: bool) -> float:
        """The time at which a silent server counts as down, or NEVER if no reply is awaited."""
        if self._is_paused:
            return NEVER
        pinged = self._pinged
        due = NEVER
        if pinged is not None:
            timeout_s = self._ping_timeout_s
            due = pinged + min(timeout_s, self.interval_s or timeout_s)
        elif not is_owed:
            return NEVER
        if self._response_timeout_s is not None:
            since = self._requested_at if is_owed or pinged is None else pinged
            at = (since if since > self._received else self._received) + self._response_timeout_s
            if at < due:
                due = at
        return due

    def timer(self, is_owed: bool) -> float | None:
        """The earlier of the two times, or None. Called for each packet that is sent."""
        ping_at = self.ping_at(is_owed)
        lost_at = self.times_out_at(is_owed)
        when = ping_at if ping_at < lost_at else lost_at
        return when if when < NEVER else None


FILTERS_MAX: Final = 50_000
"""The most filters remembered; each may need a packet id when all are sent again."""
PACKET_FILTERS_MAX: Final = 200
PACKET_BYTES_MAX: Final = 16_384
"""The most bytes of one repeated SUBSCRIBE (a single filter may be longer)."""
_FILTER_OVERHEAD_BYTES: Final = 3
_PACKET_OVERHEAD_BYTES: Final = 256
"""The bytes of header, packet id and properties, at most."""


@dataclass
class SubscriptionBatch:
    """The content of one repeated SUBSCRIBE."""

    requests: list[SubscriptionRequest]
    properties: Properties


class Subscriptions:
    """The filters that a server has granted, in the order of their first subscription."""

    def __init__(self) -> None:
        self._granted: dict[str, tuple[SubscriptionRequest, Properties]] = {}

    def __len__(self) -> int:
        return len(self._granted)

    def check_room(self, requests: list[SubscriptionRequest]) -> None:
        """Raises `QueueFull` if these are more filters than may be remembered."""
        fresh = {one.filter for one in requests if one.filter not in self._granted}
        if len(self._granted) + len(fresh) > FILTERS_MAX:
            raise QueueFull(f"more than {FILTERS_MAX} subscriptions")

    def grant(
        self, requests: list[SubscriptionRequest], properties: Properties, codes: list[int]
    ) -> None:
        """Records a SUBACK. A refusal changes nothing: an earlier grant of the filter still
        holds."""
        for request, code in zip(requests, codes, strict=True):
            if code < 0x80:
                self._granted[request.filter] = (request, properties)

    def remove(self, filters: list[str], codes: list[int]) -> None:
        """Records an UNSUBACK; MQTT 3 sends no codes."""
        for index, filter in enumerate(filters):
            if index >= len(codes) or codes[index] < 0x80:
                self._granted.pop(filter, None)

    def batches(self, packet_bytes_max: int) -> Iterator[SubscriptionBatch]:
        """All filters as SUBSCRIBEs that the server accepts."""
        limit_bytes = min(PACKET_BYTES_MAX, packet_bytes_max - _PACKET_OVERHEAD_BYTES)
        batch = SubscriptionBatch([], {})
        size_bytes = 0
        for request, properties in self._granted.values():
            more_bytes = len(request.filter.encode()) + _FILTER_OVERHEAD_BYTES
            if batch.requests and (
                properties != batch.properties
                or len(batch.requests) >= PACKET_FILTERS_MAX
                or size_bytes + more_bytes > limit_bytes
            ):
                yield batch
                batch = SubscriptionBatch([], {})
                size_bytes = 0
            batch.properties = properties
            batch.requests.append(request)
            size_bytes += more_bytes
        if batch.requests:
            yield batch


IDLE: Final = 0
CONNECTING: Final = 1
CONNECTED: Final = 2
CLOSED: Final = 3


@dataclass(eq=False)
class PendingRequest:
    """A SUBSCRIBE or UNSUBSCRIBE without reply."""

    filters: list[str]
    subscriptions: list[pk.SubscriptionRequest] | None
    """The subscriptions of a SUBSCRIBE; None: this is an UNSUBSCRIBE."""
    properties: Properties
    is_resubscription: bool
    """True: the core repeats the subscriptions, so no caller waits for the reply."""


class RequestSender:
    """The packets that a connection and its session have to send. ClientProtocol is the other
    half."""

    def __init__(self, options: Options, resubscribe: bool) -> None:
        self.options = options
        self.version = options.level
        self.state = IDLE
        self.limits = ServerLimits()
        self.subscriptions = Subscriptions() if resubscribe else None
        self._ids = PacketIds(options.packet_ids_max)
        self.outgoing = OutgoingMessages(
            self._ids, options.inflight_max, options.queue_messages_max
        )
        self._aliases: dict[int, bytes] = {}
        self._requests: dict[int, PendingRequest] = {}
        self._keep_alive = KeepAlive(
            options.ping_timeout_s, options.response_timeout_s, options.ping_interval_s
        )
        self._last_handle = 0
        self._out: list[bytes] = []
        self._effects: list[Effect] = []

    def data_to_send(self) -> bytes:
        """All bytes to write to the transport, in order."""
        if not self._out:
            return b""
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        return data

    def effects(self) -> list[Effect]:
        """Removes and returns the effects so far."""
        effects = self._effects
        self._effects = []
        return effects

    # Messages and requests

    def publish(
        self,
        topic: str,
        payload: bytes,
        qos: int,
        retain: bool,
        now: float,
        properties: Properties | None = None,
        topic_alias: int = 0,
    ) -> int:
        """Sends or queues a message; returns its handle, for its Acknowledged effect if QoS > 0.

        `topic_alias` asks for that alias: the topic is sent only the first time. Raises
        `InvalidTopic`, `ValueError`, `PublishRefused`, `NotConnected` (QoS 0) or `QueueFull`.
        """
        raw = topic.encode()
        decode_topic(raw)  # [MQTT-3.3.2-2]
        encoded = b""
        if properties and self.version == LEVEL_5:
            encoded = encode_block(properties)
        if not 0 <= qos <= 2:
            raise ValueError(f"QoS {qos}: 0, 1 or 2")
        if self.state == CONNECTED:
            self.limits.check_publish(qos, retain, len(raw) + len(payload) + len(encoded))
            self.limits.check_alias(topic_alias)
        self._last_handle += 1
        publish = OutgoingPublish(
            self._last_handle, raw, payload, qos, retain, encoded, topic_alias
        )
        if qos == 0:
            self._check_connected()
            self._send_publish(publish, now)
        else:
            self.outgoing.add(publish)
            self._pump(now)
        return publish.handle

    def subscribe(
        self,
        requests: list[pk.SubscriptionRequest],
        now: float,
        properties: Properties | None = None,
    ) -> int:
        """Sends a SUBSCRIBE; returns the packet id that its Subscribed effect will have."""
        if self.subscriptions is not None:
            self.subscriptions.check_room(requests)
        filters = [one.filter for one in requests]
        return self._request(PendingRequest(filters, requests, properties or {}, False), now)

    def unsubscribe(
        self, filters: list[str], now: float, properties: Properties | None = None
    ) -> int:
        """Sends an UNSUBSCRIBE; returns the packet id that its Subscribed effect will have."""
        return self._request(PendingRequest(filters, None, properties or {}, False), now)

    # Sending

    def _send(self, data: bytes, now: float) -> None:
        if self.options.trace:
            self._effects.append(Traced(True, packet_of(data, self.version)))
        self._out.append(data)
        self._keep_alive.sent(now)

    def _pump(self, now: float) -> None:
        """Sends within the window."""
        if self.state != CONNECTED:
            return
        is_owed = self._is_reply_due()
        publish = self.outgoing.next_ready()
        if publish is not None and not is_owed:
            self._keep_alive.note_request(now)
        while publish is not None:
            self._send_publish(publish, now)
            publish = self.outgoing.next_ready()

    def _send_publish(self, publish: OutgoingPublish, now: float) -> None:
        topic = publish.topic
        properties = publish.properties
        alias = publish.topic_alias
        # [MQTT-3.3.2-9]: a message queued before the limit was known goes without its alias.
        if 0 < alias <= self.limits.topic_alias_max and self.version == LEVEL_5:
            properties += bytes((pr.TOPIC_ALIAS, alias >> 8, alias & 0xFF))
            if self._aliases.get(alias) == topic:
                topic = b""
            else:
                self._aliases[alias] = topic
        self._send(
            encode_publish(
                topic,
                publish.payload,
                publish.qos,
                publish.retain,
                publish.dup,
                publish.packet_id,
                properties,
                self.version,
            ),
            now,
        )

    def _request(self, request: PendingRequest, now: float) -> int:
        self._check_connected()
        packet_id = self._ids.allocate()
        packet: pk.Packet
        if request.subscriptions is not None:
            packet = pk.Subscribe(packet_id, request.subscriptions, request.properties)
        else:
            packet = pk.Unsubscribe(packet_id, request.filters, request.properties)
        try:
            data = encode(packet, self.version)
        except Exception:
            self._ids.release(packet_id)
            raise
        if not self._is_reply_due():
            self._keep_alive.note_request(now)
        self._requests[packet_id] = request
        self._send(data, now)
        return packet_id

    def _resubscribe(self, now: float) -> None:
        if self.subscriptions is None:
            return
        for batch in self.subscriptions.batches(self.limits.packet_bytes_max):
            filters = [one.filter for one in batch.requests]
            self._request(PendingRequest(filters, batch.requests, batch.properties, True), now)

    def _check_connected(self) -> None:
        if self.state != CONNECTED:
            raise NotConnected("there is no connection")

    def _is_reply_due(self) -> bool:
        """Whether the server owes a reply to a packet other than a ping."""
        return bool(self.outgoing.inflight) or bool(self._requests)
