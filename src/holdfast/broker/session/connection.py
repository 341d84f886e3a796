"""One network connection, seen from the protocol: handshake state, limits both sides announced,
topic aliases, and the bytes that wait to be written.

The node fills `out`; the driver writes it once per loop iteration and empties it. `out_bytes`
bounds it: above the limit QoS 0 messages are dropped for this receiver and QoS > 0 ones stay in
the log.
"""

from typing import Any, Final

from holdfast.protocol.mqtt.framing import FrameReader

NEW: Final = 0
"""Nothing but CONNECT is accepted. [MQTT-3.1.0-1]"""
AUTHENTICATING: Final = 1
"""CONNECT was received; credentials are being checked. Input waits."""
EXCHANGING: Final = 2
"""Enhanced authentication: AUTH packets go back and forth before CONNACK."""
OPENING: Final = 3
"""The session is being made durable; CONNACK follows. Input waits."""
OPEN: Final = 4
CLOSED: Final = 5


ALIAS_TOPIC_BYTES_MAX: Final = 65_536
"""Topics of one connection that have an alias towards the client; others are sent whole."""


ALIASES_IN_BYTES_MAX: Final = 1 << 20
"""Topics of one connection that its client has given an alias; beyond it the connection is closed
(0x97)."""


class AliasesIn:
    """Topic aliases that a client has set."""

    def __init__(self) -> None:
        self.topics: dict[int, bytes] = {}
        self.topic_bytes = 0

    def set(self, alias: int, topic: bytes) -> bool:
        """False: there is no room."""
        topic_bytes = self.topic_bytes + len(topic) - len(self.topics.get(alias, b""))
        if topic_bytes > ALIASES_IN_BYTES_MAX:
            return False
        self.topics[alias] = topic
        self.topic_bytes = topic_bytes
        return True


class AliasesOut:
    """Topic aliases that a client was given, in the order 1, 2, 3."""

    def __init__(self) -> None:
        self.by_topic: dict[bytes, int] = {}
        self.topic_bytes = 0

    def has_room(self, topic: bytes, count_max: int) -> bool:
        return (
            len(self.by_topic) < count_max
            and self.topic_bytes + len(topic) <= ALIAS_TOPIC_BYTES_MAX
        )

    def add(self, topic: bytes) -> int:
        alias = len(self.by_topic) + 1
        self.by_topic[topic] = alias
        self.topic_bytes += len(topic)
        return alias

    def remove_last(self, topic: bytes) -> None:
        """`topic` was added last."""
        del self.by_topic[topic]
        self.topic_bytes -= len(topic)


class Connection:
    def __init__(self, packet_bytes_max: int, remote: str, listener: str) -> None:
        self.reader = FrameReader(packet_bytes_max)
        self.remote = remote
        self.listener = listener
        # The driver's object that owns the socket; the node never looks inside.
        self.transport: object | None = None
        self.state = NEW
        self.version = 4
        self.session: object | None = None
        self.client_id = ""
        # Another broker's bridge (MQTT 3): it gets RETAIN as published and not its own messages.
        self.is_bridge = False
        # The broker's own, without a socket: see node.federating.
        self.is_internal = False
        # That the client has proved.
        self.username: str | None = None
        # What a TLS client certificate says, "" without one.
        self.certificate_name = ""

        self.out: list[bytes] = []
        self.out_bytes = 0
        self.dirty = False
        # The socket does not take more for now: the driver leaves `out` alone.
        self.congested = False
        # Input waits until the client has read its answers.
        self.answers_wait = False
        # The driver closes the socket once `out` is written.
        self.closing = False
        # The node wants no input now; the driver stops reading the socket.
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
        # CONNECT, until the session is being opened.
        self.connect: object | None = None
        # security.enhanced.Authenticator, of an exchange under way or done.
        self.authentication: Any = None
        # node.rights.Rights; None: everything is allowed.
        self.rights: object | None = None
        self.clean_disconnect = False
        # In a cluster: what was promised and is not kept yet, in order (cluster.promises).
        self.promises: Any = None
        # Refusals of messages among them: what the client sends before it is told is refused too.
        self.refusals_due = 0
        # node.sequencing.Sequencer, from the first message with a producer sequence on.
        self.sequencer: object | None = None
        # The client numbers its QoS 2 messages, too.
        self.numbers_qos2 = False

    def send(self, data: bytes, dirty: "list[Connection]") -> None:
        """Queue bytes for the driver's next write."""
        self.out.append(data)
        self.out_bytes += len(data)
        if not self.dirty:
            self.dirty = True
            dirty.append(self)

    def close(self, dirty: "list[Connection]") -> None:
        """Let the driver close the socket once what is queued is written."""
        self.closing = True
        if not self.dirty:
            self.dirty = True
            dirty.append(self)
