"""One network connection in protocol terms: handshake state, the limits that both sides announced,
topic aliases, and the bytes that wait to be written.

The node fills `out`; the driver writes it once per loop iteration and empties it. `out_bytes`
bounds it: above the limit QoS 0 messages are dropped for this receiver, and QoS > 0 ones stay in
the log.
"""

from typing import TYPE_CHECKING, Any, Final

from holdfast.broker.session.listener_rules import ListenerRules
from holdfast.protocol.mqtt.framing import FrameReader
from holdfast.protocol.mqtt.packets import Connect

if TYPE_CHECKING:
    from holdfast.broker.session.session import Session

NEW: Final = 0
"""The state before CONNECT: no other packet is accepted. [MQTT-3.1.0-1]"""
AUTHENTICATING: Final = 1
"""The state while the credentials of CONNECT are checked. Input waits."""
EXCHANGING: Final = 2
"""The state of enhanced authentication: AUTH packets go back and forth before CONNACK."""
OPENING: Final = 3
"""The state in which the session is made durable; CONNACK follows. Input waits."""
OPEN: Final = 4
CLOSED: Final = 5


ALIAS_TOPIC_BYTES_MAX: Final = 65_536
"""The most bytes of topics with an alias towards one client. Other topics are sent in full."""


ALIASES_IN_BYTES_MAX: Final = 1 << 20
"""The most bytes of topics that a client may give an alias on one connection. Beyond it the
connection is closed (0x97)."""


class AliasesIn:
    """The topic aliases that a client has set on its connection."""

    def __init__(self) -> None:
        self.topics: dict[int, bytes] = {}
        self.topic_bytes = 0

    def set(self, alias: int, topic: bytes) -> bool:
        """Store an alias. False: there is no room."""
        topic_bytes = self.topic_bytes + len(topic) - len(self.topics.get(alias, b""))
        if topic_bytes > ALIASES_IN_BYTES_MAX:
            return False
        self.topics[alias] = topic
        self.topic_bytes = topic_bytes
        return True


class AliasesOut:
    """The topic aliases that the broker has set for a client, numbered 1, 2, 3."""

    def __init__(self) -> None:
        self.by_topic: dict[bytes, int] = {}
        self.topic_bytes = 0

    def has_room(self, topic: bytes, count_max: int) -> bool:
        """Whether the topic may get an alias, with at most `count_max` of them."""
        return (
            len(self.by_topic) < count_max
            and self.topic_bytes + len(topic) <= ALIAS_TOPIC_BYTES_MAX
        )

    def add(self, topic: bytes) -> int:
        """Give the topic the next alias."""
        alias = len(self.by_topic) + 1
        self.by_topic[topic] = alias
        self.topic_bytes += len(topic)
        return alias

    def remove_last(self, topic: bytes) -> None:
        """Take back the alias of `topic`, which was added last."""
        del self.by_topic[topic]
        self.topic_bytes -= len(topic)


class Connection:
    """One connection of a client, from its first byte to its close."""

    def __init__(self, packet_bytes_max: int, remote: str, listener: ListenerRules) -> None:
        # The input that is not processed yet. None: there is none, as with an idle client.
        self.reader: FrameReader | None = None
        self.input_packet_bytes_max = packet_bytes_max
        self.remote = remote
        self.listener = listener
        self.mount = listener.mount
        # The driver's object that owns the socket; the node never looks inside.
        self.transport: object | None = None
        self.is_remote = False  # Another process reads the socket, in its own time.
        self.state = NEW
        self.version = 4
        self.session: Session | None = None
        self.client_id = ""
        # Another broker's bridge (MQTT 3): it gets RETAIN as published and not its own messages.
        self.is_bridge = False
        # The broker's own, without a socket: see broker.federation_session.
        self.is_internal = False
        # The user name that the client has proved.
        self.username: str | None = None
        # The name in the TLS client certificate, or "".
        self.certificate_name = ""
        self.out: list[bytes] | None = None
        self.out_bytes = 0
        self.dirty = False
        # The socket takes no more data for now: the driver leaves `out` alone.
        self.congested = False
        # Input waits until the client has read its replies.
        self.has_waiting_replies = False
        # The driver closes the socket once `out` is written.
        self.closing = False
        # The node accepts no input now; the driver stops reading the socket.
        self.input_paused = False
        # The node's timer for CONNECT, then for the keep alive.
        self.timer: object | None = None
        self.keep_alive_s = 0.0
        self.last_received = 0.0
        self.packet_bytes_max = 268_435_460
        self.receive_maximum = 65535
        # QoS > 0 publishes received and not yet acknowledged. [MQTT-3.3.4-7]
        self.unacknowledged = 0
        self.aliases_in: AliasesIn | None = None
        self.aliases_out: AliasesOut | None = None
        self.alias_out_max = 0
        self.problem_information = True
        # The CONNECT packet, until its session opens.
        self.connect: Connect | None = None
        # The Authenticator (security.enhanced_authentication) of the last exchange.
        self.authentication: Any = None
        # broker.rights.Rights; None: everything is allowed.
        self.rights: object | None = None
        # Of broker.admission. None: no rate or quota applies; no source of identity was asked.
        self.meter: object | None = None
        self.proof: object | None = None
        self.clean_disconnect = False
        # Refusals that wait behind earlier promises. A message that arrives before its client has
        # received the refusal of an earlier one is refused too, or the order would change.
        self.refusals_due = 0
        # broker.publish.producer_dedup.Sequencer, from the first producer sequence on.
        self.sequencer: object | None = None
        # The client numbers its QoS 2 messages, too.
        self.numbers_qos2 = False

    def topic_of(self, topic: bytes) -> bytes:
        """The topic of a message as the client sees it. The client must have the right to read
        it."""
        mount = self.mount
        return topic[len(mount) :] if mount else topic

    def limit_packets(self, packet_bytes_max: int) -> None:
        """Accept packets of up to so many bytes from now on."""
        self.input_packet_bytes_max = packet_bytes_max
        if self.reader is not None:
            self.reader.packet_bytes_max = packet_bytes_max

    def send(self, data: bytes, dirty: "list[Connection]") -> None:
        """Queue bytes for the driver's next write."""
        out = self.out
        if out is None:
            self.out = [data]
        else:
            out.append(data)
        self.out_bytes += len(data)
        if not self.dirty:
            self.dirty = True
            dirty.append(self)

    def close(self, dirty: "list[Connection]") -> None:
        """Ask the driver to close the socket after the queued bytes are written."""
        self.closing = True
        if not self.dirty:
            self.dirty = True
            dirty.append(self)
