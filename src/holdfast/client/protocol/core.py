"""The MQTT client core: bytes and calls in, bytes and effects out. No socket, no clock.

A driver opens a transport and calls `connect`. It passes received bytes to `handle_data`, calls
`handle_timer` when `timer` is due and `handle_closed` when the transport is closed. After each call
it sends `data_to_send` and carries out `effects`. `now` is monotonic seconds.

The session (unacknowledged messages both ways) survives the connection: call `connect` again over a
new transport. Exactly one Closed effect ends each connection. Calls that need a connection raise
NotConnected, except `publish` with QoS 1 or 2, which waits for the next one.

Messages from the server: QoS 2 exactly once, acknowledgements in order, topic aliases.

The set of QoS 2 packet ids outlives a connection: it is the client's half of the session.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.client.authentication import Authentication
from holdfast.client.errors import (
    AuthenticationFailed,
    ClientError,
    ConnectionLost,
    ConnectionRefused,
    ProtocolError,
    PublishRefused,
    SubscribeRefused,
    TimedOut,
    reason_text,
)
from holdfast.client.options import LEVEL_5, Options
from holdfast.client.protocol.effects import (
    Acknowledged,
    Closed,
    Connected,
    Message,
    Reauthenticated,
    Received,
    Subscribed,
    Traced,
)
from holdfast.client.protocol.negotiation import (
    HTTP_BEGIN,
    SPEAKS_HTTP,
    ServerLimits,
    authentication_data,
    check_options,
    check_reason_codes,
    connect_packet,
    reason_string,
    server_reference,
    session_lasts,
)
from holdfast.client.protocol.outgoing import PACKET_ID_MAX, OutgoingPublish
from holdfast.client.protocol.sender import CLOSED, CONNECTED, CONNECTING, RequestSender
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import PINGREQ_BYTES, encode, encode_ack
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.framing import FrameReader
from holdfast.protocol.mqtt.packets import PUBLISH, Publish
from holdfast.protocol.mqtt.properties import Properties, decode_block
from holdfast.protocol.topics.names import InvalidTopic, decode_topic

NEW: Final = 0
REPEATED: Final = 1
"""The verdict for a message delivered and acknowledged before: acknowledge again, do not
deliver."""
PENDING: Final = 2
"""The verdict for a message delivered and not acknowledged by the application yet: do neither."""


class IncomingMessages:
    """The receiving half of the client's session.

    Invariant: acknowledgements leave in the order of arrival, and a QoS 2 message is delivered once
    while its packet id is in use.
    """

    def __init__(self, receive_maximum: int, topic_alias_max: int) -> None:
        self.receive_maximum = receive_maximum
        self.topic_alias_max = topic_alias_max
        self._aliases: dict[int, bytes] = {}
        self._acknowledged_ids: set[int] = set()
        # The ids of earlier connections among them.
        self._former_ids: set[int] = set()
        # Delivered without PUBACK or PUBREC, in the order of arrival: id, QoS, acknowledged.
        self._unacknowledged: deque[list[int]] = deque()
        self._pending: dict[int, list[int]] = {}

    def start(self) -> None:
        """Begins a connection. Aliases and unacknowledged deliveries belong to the old one
        [MQTT-3.3.2-7]; the server repeats the latter."""
        self._aliases.clear()
        self._unacknowledged.clear()
        self._pending.clear()
        self._former_ids = set(self._acknowledged_ids)

    def forget_session(self) -> None:
        """Forgets the packet ids, because the server has no session. [MQTT-3.2.2-5]"""
        self._acknowledged_ids.clear()
        self._former_ids.clear()

    def resolve(self, topic: bytes, alias: int) -> bytes:
        """The topic of a PUBLISH with or without alias. An invalid alias raises `ProtocolError`."""
        if alias == 0:
            if not topic:
                raise ProtocolError("empty topic without an alias", reasons.PROTOCOL_ERROR)
            return topic
        # [MQTT-3.1.2-26]
        if alias > self.topic_alias_max:
            raise ProtocolError(
                f"topic alias {alias}, we allow {self.topic_alias_max}",
                reasons.TOPIC_ALIAS_INVALID,
            )
        if topic:
            self._aliases[alias] = topic
            return topic
        known = self._aliases.get(alias)
        if known is None:
            raise ProtocolError(f"topic alias {alias} was never set", reasons.PROTOCOL_ERROR)
        return known

    def arrive(self, packet_id: int, qos: int, dup: bool) -> int:
        """Records a QoS 1 or 2 PUBLISH and returns NEW, REPEATED or PENDING. Raises `ProtocolError`
        if the server exceeds the client's Receive Maximum [MQTT-3.3.4-9]."""
        if not dup and packet_id in self._former_ids:
            # A repetition would have DUP [MQTT-3.3.1-1], so this is a new message: the server found
            # an older state of the session again, as of its last save.
            self.release(packet_id)
        if qos == 2 and packet_id in self._acknowledged_ids:
            return REPEATED  # [MQTT-4.3.3-10]
        if packet_id in self._pending:
            return PENDING
        if len(self._unacknowledged) + len(self._acknowledged_ids) >= self.receive_maximum:
            raise ProtocolError(
                f"more than {self.receive_maximum} unacknowledged messages",
                reasons.RECEIVE_MAXIMUM_EXCEEDED,
            )
        entry = [packet_id, qos, 0]
        self._unacknowledged.append(entry)
        self._pending[packet_id] = entry
        return NEW

    def acknowledge(self, packet_id: int) -> list[tuple[int, int]]:
        """Records the application's acknowledgement; returns each (id, QoS) to acknowledge now.

        Acknowledgements leave in the order of arrival [MQTT-4.6.0-2] [MQTT-4.6.0-3], so one that
        comes early waits for the messages before it. Unknown ids (of an earlier connection) are
        ignored.
        """
        entry = self._pending.get(packet_id)
        if entry is None:
            return []
        entry[2] = 1
        answers: list[tuple[int, int]] = []
        queue = self._unacknowledged
        while queue and queue[0][2]:
            done_id, qos, _ = queue.popleft()
            del self._pending[done_id]
            if qos == 2:
                self._acknowledged_ids.add(done_id)
            answers.append((done_id, qos))
        return answers

    def release(self, packet_id: int) -> bool:
        """Handles PUBREL. Returns whether the id was known. [MQTT-4.3.3-12]"""
        if packet_id not in self._acknowledged_ids:
            return False
        self._acknowledged_ids.discard(packet_id)
        self._former_ids.discard(packet_id)
        return True


def message_of(publish: Publish, topic: bytes) -> Message:
    """The message for the application. `topic` is the one after resolving an alias. An invalid
    message raises `ProtocolError`."""
    try:
        name = decode_topic(topic)
    except InvalidTopic as error:
        raise ProtocolError(str(error), reasons.TOPIC_NAME_INVALID) from None
    properties: Properties = {}
    block = publish.properties
    if block:
        properties = decode_block(block, 0, len(block), PUBLISH)
    if publish.subscription_ids:
        properties[pr.SUBSCRIPTION_IDENTIFIER] = publish.subscription_ids
    if publish.topic_alias:
        properties[pr.TOPIC_ALIAS] = publish.topic_alias
    return Message(
        name,
        publish.payload,
        publish.qos,
        publish.retain,
        publish.dup,
        publish.packet_id,
        properties,
    )


class ClientProtocol(RequestSender):
    """The protocol of one client: its session, and the connection that it has at the time."""

    def __init__(self, options: Options, resubscribe: bool = False) -> None:
        """`resubscribe`: repeat the subscriptions first at a server without the session."""
        check_options(options)
        super().__init__(options, resubscribe)
        self.client_id = options.client_id
        """The client id, as assigned by the server if it was empty [MQTT-3.1.3-7]."""
        self.incoming = IncomingMessages(options.receive_maximum, options.topic_alias_max)
        self._reader = FrameReader(options.packet_bytes_max)
        self._exchange: Authentication | None = None
        self._has_session = False
        self._clean_sent = True
        self._deadline: float | None = None
        self._handlers: dict[int, Callable[[pk.Packet, float], None]] = {
            pk.CONNACK: self._handle_connack,
            pk.PUBACK: self._handle_ack,
            pk.PUBREC: self._handle_ack,
            pk.PUBREL: self._handle_pubrel,
            pk.PUBCOMP: self._handle_ack,
            pk.SUBACK: self._handle_suback,
            pk.UNSUBACK: self._handle_suback,
            pk.PINGRESP: lambda packet, now: self._keep_alive.note_pingresp(),
            pk.DISCONNECT: self._handle_disconnect,
            pk.AUTH: self._handle_auth,
        }

    def timer(self) -> float | None:
        """The time at which `handle_timer` is due, or None."""
        if self.state == CONNECTING:
            return self._deadline
        return self._keep_alive.timer(self._is_reply_due()) if self.state == CONNECTED else None

    # Calls of the application

    def connect(self, now: float) -> None:
        """Sends CONNECT over a new transport."""
        options = self.options
        self.state = CONNECTING
        self._deadline = now + options.connect_timeout_s
        self._out.clear()
        self._aliases.clear()
        self._keep_alive.start(now)
        self._reader = FrameReader(options.packet_bytes_max)
        self.incoming.start()
        for packet_id in self._requests:
            self._ids.release(packet_id)
        self._requests.clear()
        # A client that comes back wants its earlier session, whatever it asked for first.
        known = self._has_session and session_lasts(options)
        self._clean_sent = options.clean_start and not known
        try:
            if options.authentication is not None:
                self._exchange = options.authentication()
            packet = connect_packet(options, self.client_id, self._clean_sent, self._exchange)
        except AuthenticationFailed as error:
            self._close(error)
            return
        self._send(encode(packet, self.version), now)

    def acknowledge(self, packet_id: int, now: float) -> None:
        """Acknowledges a received message, with `manual_acknowledge`."""
        for done_id, qos in self.incoming.acknowledge(packet_id):
            kind = pk.PUBACK if qos == 1 else pk.PUBREC
            self._send(encode_ack(kind, done_id, reasons.SUCCESS, self.version), now)

    def reauthenticate(self, now: float) -> None:
        """Starts the enhanced authentication again on the live connection [MQTT-4.12.1-1]."""
        self._check_connected()
        if self.options.authentication is None:
            raise ValueError("no authentication was set in the options")
        exchange = self.options.authentication()
        self._exchange = exchange
        self._send_auth(reasons.REAUTHENTICATE, exchange.start(), now)

    def disconnect(
        self,
        now: float,
        reason: int = reasons.SUCCESS,
        properties: Properties | None = None,
    ) -> None:
        """Sends DISCONNECT; the Closed effect follows at once. Does nothing unless connected."""
        if self.state == CONNECTED:
            self._send(encode(pk.Disconnect(reason, properties or {}), self.version), now)
        if self.state in (CONNECTING, CONNECTED):
            self._close(None)

    # Calls of the driver

    def handle_data(self, data: bytes, now: float) -> None:
        """Processes received bytes."""
        if self.state not in (CONNECTING, CONNECTED):
            return
        self._keep_alive.received(now)
        if self.state == CONNECTING and data.startswith(HTTP_BEGIN):
            self._fail(ProtocolError(f"the server {SPEAKS_HTTP}"), now)
            return
        reader = self._reader
        try:
            reader.feed(data)
            while reader.next():
                self._handle_frame(now)
                if self.state == CLOSED:
                    return
        except ProtocolViolation as violation:
            self._fail(ProtocolError(str(violation), violation.reason), now)
        except ProtocolError as error:
            self._fail(error, now)
        except AuthenticationFailed as error:
            self._fail(error, now)
        self._pump(now)

    def handle_reading(self, paused: bool, now: float) -> None:
        """Notes that the driver stopped or resumed reading: meanwhile it receives no PINGRESP."""
        self._keep_alive.set_paused(paused, now)

    def handle_progress(self, now: float) -> None:
        """Notes that the transport has sent waiting bytes, so the peer is alive."""
        self._keep_alive.progressed(now)

    def handle_closed(self, now: float, text: str = "connection closed by the server") -> None:
        """Handles a closed transport."""
        if self.state in (CONNECTING, CONNECTED):
            self._close(ConnectionLost(text))

    def handle_timer(self, now: float) -> None:
        """Sends a ping that is due, or ends a connection whose server is silent."""
        if self.state == CONNECTING:
            if self._deadline is not None and now >= self._deadline:
                waited = f"no CONNACK within {self.options.connect_timeout_s:g} s"
                self._close(TimedOut(f"{waited}: is it the address of an MQTT listener?"))
            return
        if self.state != CONNECTED:
            return
        is_owed = self._is_reply_due()
        if now >= self._keep_alive.times_out_at(is_owed):
            text = "the server does not answer" if is_owed else "the server does not answer pings"
            self._fail(ConnectionLost(text, reasons.KEEP_ALIVE_TIMEOUT), now)
            return
        if now >= self._keep_alive.ping_at(is_owed):
            self._keep_alive.pinged(now)  # [MQTT-3.1.2-20]
            self._send(PINGREQ_BYTES, now)

    # Frames

    def _handle_frame(self, now: float) -> None:
        reader = self._reader
        kind = reader.first >> 4
        if self.state == CONNECTING and kind not in (pk.CONNACK, pk.AUTH):
            name = pk.TYPE_NAMES.get(kind, str(kind))
            raise ProtocolError(f"{name} before CONNACK", reasons.PROTOCOL_ERROR)  # [MQTT-3.2.0-1]
        if kind == pk.PUBLISH and self.options.on_unreadable is not None:
            self._read_publish(self.options.on_unreadable, now)
            return
        packet = decode(reader.buffer, reader.first, reader.start, reader.end, self.version, False)
        if self.options.trace:
            self._effects.append(Traced(False, packet))
        if isinstance(packet, Publish):
            self._handle_publish(packet, now)
            return
        handler = self._handlers.get(kind)
        if handler is None:
            name = pk.TYPE_NAMES.get(kind, str(kind))
            raise ProtocolError(f"{name} from a server", reasons.PROTOCOL_ERROR)
        handler(packet, now)

    def _handle_connack(self, packet: pk.Packet, now: float) -> None:
        assert isinstance(packet, pk.Connack)
        if self.state != CONNECTING:
            raise ProtocolError("a second CONNACK", reasons.PROTOCOL_ERROR)  # [MQTT-3.2.0-2]
        if packet.reason != reasons.SUCCESS:
            text = f"connection refused: {reason_text(packet.reason)}"
            self._close(
                ConnectionRefused(
                    text,
                    packet.reason,
                    reason_string(packet.properties),
                    server_reference(packet.properties),
                )
            )
            return
        # [MQTT-3.2.2-4]: after a clean start the server cannot have a session.
        if packet.session_present and self._clean_sent:
            raise ProtocolError("a session after a clean start", reasons.PROTOCOL_ERROR)
        if self._exchange is not None:
            self._exchange.finish(authentication_data(packet.properties))
            self._exchange = None
        self.limits = ServerLimits.from_connack(packet.properties, self.options.keep_alive_s)
        self._keep_alive.interval_s = float(self.limits.keep_alive_s)
        assigned = packet.properties.get(pr.ASSIGNED_CLIENT_IDENTIFIER)
        if isinstance(assigned, str):
            self.client_id = assigned
        self.state = CONNECTED
        if packet.session_present and not self._has_session:
            self._release_former_ids(now)
        self._has_session = True
        if not packet.session_present:
            self.incoming.forget_session()
        self._effects.append(Connected(packet.session_present, packet.properties))
        released, done = self.outgoing.resume(packet.session_present, self.limits.receive_maximum)
        for publish in done:
            self._effects.append(Acknowledged(publish.handle, reasons.SUCCESS, {}))
        for publish in released:
            self._send(encode_ack(pk.PUBREL, publish.packet_id, reasons.SUCCESS, self.version), now)
        if not packet.session_present:
            self._resubscribe(now)
        self._refuse_unfit()

    def _release_former_ids(self, now: float) -> None:
        """Releases the ids that an earlier program left in the session. Until then the server would
        take a QoS 2 message of this client for that program's."""
        if self._ids.id_max < PACKET_ID_MAX:
            for packet_id in range(1, self._ids.id_max + 1):
                self._send(encode_ack(pk.PUBREL, packet_id, reasons.SUCCESS, self.version), now)

    def _refuse_unfit(self) -> None:
        """Refuses queued messages above the announced limits. Each would end the connection."""
        limits = self.limits

        def reason_against(publish: OutgoingPublish) -> int:
            size_bytes = len(publish.topic) + len(publish.payload) + len(publish.properties)
            try:
                limits.check_publish(publish.qos, publish.retain, size_bytes)
            except PublishRefused as error:
                return error.reason
            return 0

        if limits.are_tight():
            for publish, reason in self.outgoing.refuse(reason_against):
                self._effects.append(Acknowledged(publish.handle, reason, {}))

    def _read_publish(self, on_unreadable: Callable[[str], None], now: float) -> None:
        reader = self._reader
        try:
            packet = decode(
                reader.buffer, reader.first, reader.start, reader.end, self.version, False
            )
            assert isinstance(packet, Publish)
            if self.options.trace:
                self._effects.append(Traced(False, packet))
            self._handle_publish(packet, now)
        except (ProtocolViolation, ProtocolError) as error:
            if not self._pass_over(now):
                raise
            on_unreadable(str(error))

    def _pass_over(self, now: float) -> bool:
        """Acknowledges the current PUBLISH. False: its packet id is unreadable, too."""
        reader = self._reader
        buffer, at = reader.buffer, reader.start
        qos = reader.first >> 1 & 3
        if qos == 3 or at + 2 > reader.end:
            return False
        at += 2 + (buffer[at] << 8 | buffer[at + 1])
        if at + 2 * (qos > 0) > reader.end:
            return False
        if qos:
            packet_id = buffer[at] << 8 | buffer[at + 1]
            if not packet_id:
                return False
            if self._is_new(packet_id, qos, reader.first & 8 != 0, now):
                self.acknowledge(packet_id, now)
        return True

    def _is_new(self, packet_id: int, qos: int, dup: bool, now: float) -> bool:
        arrival = self.incoming.arrive(packet_id, qos, dup)
        if arrival == REPEATED:
            self._send(encode_ack(pk.PUBREC, packet_id, reasons.SUCCESS, self.version), now)
        return arrival == NEW

    def _handle_publish(self, publish: Publish, now: float) -> None:
        topic = self.incoming.resolve(publish.topic, publish.topic_alias)
        message = message_of(publish, topic)
        qos = publish.qos
        if qos:
            if not self._is_new(publish.packet_id, qos, publish.dup, now):
                return
            if not self.options.manual_acknowledge:
                self.acknowledge(publish.packet_id, now)
        self._effects.append(Received(message))

    def _handle_ack(self, packet: pk.Packet, now: float) -> None:
        """Handles PUBACK, PUBREC or PUBCOMP."""
        assert isinstance(packet, pk.Ack)
        outgoing = self.outgoing
        refused = packet.reason >= 0x80
        if packet.kind == pk.PUBREC:
            publish = outgoing.handle_pubrec(packet.packet_id, refused)
            if not refused:
                # An unknown id gets a reply too, so that the server can forget it.
                reason = (
                    reasons.SUCCESS if publish is not None else reasons.PACKET_IDENTIFIER_NOT_FOUND
                )
                self._send(encode_ack(pk.PUBREL, packet.packet_id, reason, self.version), now)
                return
        elif packet.kind == pk.PUBACK:
            publish = outgoing.handle_puback(packet.packet_id)
        else:
            publish = outgoing.handle_pubcomp(packet.packet_id)
        if publish is not None:
            reason = packet.reason
            if reason == reasons.PACKET_IDENTIFIER_NOT_FOUND:
                # A repeated PUBREL: the server had released the message before.
                reason = reasons.SUCCESS
            self._effects.append(Acknowledged(publish.handle, reason, packet.properties))

    def _handle_pubrel(self, packet: pk.Packet, now: float) -> None:
        assert isinstance(packet, pk.Ack)
        known = self.incoming.release(packet.packet_id)
        reason = reasons.SUCCESS if known else reasons.PACKET_IDENTIFIER_NOT_FOUND
        # [MQTT-4.3.3-11]
        self._send(encode_ack(pk.PUBCOMP, packet.packet_id, reason, self.version), now)

    def _handle_suback(self, packet: pk.Packet, now: float) -> None:
        assert isinstance(packet, pk.Suback | pk.Unsuback)
        request = self._requests.pop(packet.packet_id, None)
        if request is None:
            return
        self._ids.release(packet.packet_id)
        if isinstance(packet, pk.Suback) != (request.subscriptions is not None):
            raise ProtocolError("the answer to another kind of request", reasons.PROTOCOL_ERROR)
        codes = packet.reasons
        count = len(request.filters)
        if len(codes) != count and not (isinstance(packet, pk.Unsuback) and self.version < LEVEL_5):
            raise ProtocolError(
                f"{len(codes)} reason codes for {count} filters", reasons.PROTOCOL_ERROR
            )
        if self.subscriptions is not None:
            if request.subscriptions is not None:
                self.subscriptions.grant(request.subscriptions, request.properties, codes)
            else:
                self.subscriptions.remove(request.filters, codes)
        if not request.is_resubscription:
            self._effects.append(Subscribed(packet.packet_id, codes, packet.properties))
            return
        try:
            check_reason_codes(packet.properties, codes, request.filters, "subscribe again to")
        except SubscribeRefused as error:
            # Without it the client would receive nothing, and could not notice that.
            self._send(encode(pk.Disconnect(reasons.SUCCESS, {}), self.version), now)
            self._close(error)

    def _handle_disconnect(self, packet: pk.Packet, now: float) -> None:
        assert isinstance(packet, pk.Disconnect)
        text = f"the server disconnected: {reason_text(packet.reason)}"
        self._close(
            ConnectionLost(
                text,
                packet.reason,
                reason_string(packet.properties),
                server_reference(packet.properties),
            )
        )

    def _handle_auth(self, packet: pk.Packet, now: float) -> None:
        assert isinstance(packet, pk.Auth)
        exchange = self._exchange
        if exchange is None:
            raise ProtocolError("AUTH without an exchange of ours", reasons.PROTOCOL_ERROR)
        data = authentication_data(packet.properties)
        if packet.reason == reasons.CONTINUE_AUTHENTICATION:
            self._send_auth(reasons.CONTINUE_AUTHENTICATION, exchange.step(data), now)
        elif self.state == CONNECTED and packet.reason == reasons.SUCCESS:
            exchange.finish(data)
            self._exchange = None
            self._effects.append(Reauthenticated())
        else:
            raise ProtocolError(f"AUTH with reason {packet.reason}", reasons.PROTOCOL_ERROR)

    def _send_auth(self, reason: int, data: bytes | None, now: float) -> None:
        # [MQTT-4.12.0-3] [MQTT-4.12.0-5]
        assert self._exchange is not None
        properties: Properties = {pr.AUTHENTICATION_METHOD: self._exchange.method}
        if data is not None:
            properties[pr.AUTHENTICATION_DATA] = data
        self._send(encode(pk.Auth(reason, properties), self.version), now)

    # Ending

    def _fail(self, error: ClientError, now: float) -> None:
        """Ends the connection because of the server's error, with a reason code in MQTT 5."""
        if self.state == CONNECTED and self.version == LEVEL_5 and error.reason >= 0x80:
            self._send(encode(pk.Disconnect(error.reason, {}), self.version), now)
        self._close(error)

    def _close(self, error: ClientError | None) -> None:
        self.state = CLOSED
        self._deadline = None
        self._exchange = None
        self.outgoing.suspend()
        self._effects.append(Closed(error))
