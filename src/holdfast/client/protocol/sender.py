"""Sends a client's messages within their window, and its requests."""

from dataclasses import dataclass
from typing import Final

from holdfast.client.errors import NotConnected
from holdfast.client.options import LEVEL_5, Options
from holdfast.client.protocol.effects import Effect, Traced
from holdfast.client.protocol.keepalive import KeepAlive
from holdfast.client.protocol.negotiation import ServerLimits, packet_of
from holdfast.client.protocol.outgoing import OutgoingMessages, OutgoingPublish, PacketIds
from holdfast.client.protocol.subscriptions import Subscriptions
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.properties import Properties, encode_block
from holdfast.protocol.mqtt.publish import encode_publish
from holdfast.protocol.topics.names import decode_topic

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
