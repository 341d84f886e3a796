"""One network connection in protocol terms: handshake state, the limits that both sides announced,
topic aliases, and the bytes that wait to be written.

The node fills `out`; the driver writes it once per loop iteration and empties it. `out_bytes`
bounds it: above the limit QoS 0 messages are dropped for this receiver, and QoS > 0 ones stay in
the log.
"""

from typing import TYPE_CHECKING, Any, Final

from holdfast.node.session.listener_rules import ListenerRules
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import Connect

if TYPE_CHECKING:
    from mypy_extensions import i32, u8

    from holdfast.node.session.session import Session

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
        """Stores an alias. False: there is no room."""
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
        """Gives the topic the next alias."""
        alias = len(self.by_topic) + 1
        self.by_topic[topic] = alias
        self.topic_bytes += len(topic)
        return alias

    def remove_last(self, topic: bytes) -> None:
        """Takes back the alias of `topic`, which was added last."""
        del self.by_topic[topic]
        self.topic_bytes -= len(topic)


class AddressSource:
    """The part of a client's transport that its connection uses."""

    def has_remote(self) -> bool:
        """Whether `find_remote` finds the address until the connection is closed."""
        return False

    def find_remote(self) -> str:
        """The client's address."""
        raise NotImplementedError


class Deadline:
    """A second at whose begin some connections are checked. All share its timer, because a timer
    of its own would cost each idle connection 70 bytes more."""

    def __init__(self, second: int) -> None:
        self.second = second
        self.timer: object | None = None
        # In any order. A connection has its index, so each is removed at once.
        self.connections: list[Connection] = []

    def add(self, connection: "Connection") -> None:
        """Adds a connection that has no deadline."""
        connection.deadline = self
        connection.deadline_index = len(self.connections)
        self.connections.append(connection)

    def remove(self, connection: "Connection") -> None:
        """Removes one of the connections."""
        last = self.connections.pop()
        if last is not connection:
            self.connections[connection.deadline_index] = last
            last.deadline_index = connection.deadline_index
        connection.deadline = None


class Evidence:
    """The proofs of a client other than a password."""

    def __init__(self) -> None:
        self.certificate_name = ""
        self.authentication: Any = None
        self.proof: object | None = None


class Connection:
    """One connection of a client, from its first byte to its close.

    A broker has one for each idle client, so the order of its attributes saves memory: the small
    ones are side by side. `i32` and `u8` are an int of 4 bytes and one of 1 byte in the compiled
    form. They are for values that a protocol or a limit bounds.
    """

    def __init__(self, packet_bytes_max: int, remote: str, listener: ListenerRules) -> None:
        # The input that is not processed yet. None: there is none, as with an idle client.
        self.reader: FrameReader | None = None
        self._remote: str | None = remote  # None: the socket has it, see `forget_remote`.
        self.listener = listener
        self.mount = listener.mount
        # The driver's object that owns the socket, an AddressSource; the node never looks inside.
        self.transport: object | None = None
        self.session: Session | None = None
        self.client_id = ""
        self.username: str | None = None  # The name that the client has proved.
        self.out: list[bytes] | None = None
        self.out_bytes = 0
        # The time at which its CONNECT, then its keep alive, is checked; None: at none.
        self.deadline: Deadline | None = None
        self.last_received = 0.0
        self.aliases_in: AliasesIn | None = None
        self.aliases_out: AliasesOut | None = None
        # The CONNECT packet, until its session opens.
        self.connect: Connect | None = None
        self._evidence: Evidence | None = None
        # broker.rights.Rights; None: everything is allowed.
        self.rights: object | None = None
        # Of broker.admission. None: no rate or quota applies.
        self.meter: object | None = None
        # broker.publish.producer_dedup.Sequencer, from the first producer sequence on.
        self.sequencer: object | None = None
        # The index in `deadline.connections`.
        self.deadline_index: i32 = 0
        self.input_packet_bytes_max: i32 = packet_bytes_max
        self.packet_bytes_max: i32 = PACKET_BYTES_MAX
        self.receive_maximum: i32 = 65535
        # QoS > 0 publishes received and not yet acknowledged; never negative. [MQTT-3.3.4-7]
        self.unacknowledged: i32 = 0
        self.alias_out_max: i32 = 0
        self.keep_alive_s: i32 = 0
        # Refusals that wait behind earlier promises. A message that arrives before its client has
        # received the refusal of an earlier one is refused too, or the order would change.
        self.refusals_due: i32 = 0

        self.state: u8 = NEW
        self.version: u8 = 4
        # Another broker's bridge (MQTT 3): it gets RETAIN as published and not its own messages.
        self.is_bridge = False
        # The broker's own, without a socket: see broker.federation_session.
        self.is_internal = False
        self.dirty = False
        # The socket takes no more data for now: the driver leaves `out` alone.
        self.congested = False
        # Input waits until the client has read its replies; until its SUBSCRIBE continues.
        self.has_waiting_replies = False
        self.is_subscribing = False
        # The driver closes the socket once `out` is written.
        self.closing = False
        # The node accepts no input now; the driver stops reading the socket.
        self.input_paused = False
        self.problem_information = True
        # The client numbers its QoS 2 messages, too.
        self.numbers_qos2 = False

    @property
    def certificate_name(self) -> str:
        """The name in the TLS client certificate, or ""."""
        return "" if self._evidence is None else self._evidence.certificate_name

    @certificate_name.setter
    def certificate_name(self, value: str) -> None:
        self._shown().certificate_name = value

    @property
    def authentication(self) -> Any:
        """The Authenticator (security.enhanced_authentication) of the last exchange."""
        return None if self._evidence is None else self._evidence.authentication

    @authentication.setter
    def authentication(self, value: Any) -> None:
        self._shown().authentication = value

    @property
    def proof(self) -> object | None:
        """The Proof of broker.admission. None: no source of identity was asked."""
        return None if self._evidence is None else self._evidence.proof

    @proof.setter
    def proof(self, value: object | None) -> None:
        self._shown().proof = value

    def _shown(self) -> Evidence:
        evidence = self._evidence
        if evidence is None:
            evidence = self._evidence = Evidence()
        return evidence

    @property
    def remote(self) -> str:
        """The client's address: host:port, or what its listener has in place of one."""
        remote = self._remote
        if remote is not None:
            return remote
        transport = self.transport
        return transport.find_remote() if isinstance(transport, AddressSource) else "?"

    def forget_remote(self) -> None:
        """Leaves the address to the socket if that has it, too: its text takes 64 bytes."""
        transport = self.transport
        if isinstance(transport, AddressSource) and transport.has_remote():
            self._remote = None

    def recall_remote(self) -> None:
        """Takes the address from the socket, which ends. Lines of the log and audit may follow."""
        self._remote = self.remote

    def topic_of(self, topic: bytes) -> bytes:
        """The topic of a message as the client sees it. The client must have the right to read
        it."""
        mount = self.mount
        return topic[len(mount) :] if mount else topic

    def pause_behind_subscribe(self) -> None:
        """Lets the next packets wait until the present SUBSCRIBE continues."""
        self.input_paused = True
        self.is_subscribing = True

    def limit_packets(self, packet_bytes_max: int) -> None:
        """Accepts packets of up to so many bytes from now on."""
        self.input_packet_bytes_max = packet_bytes_max
        if self.reader is not None:
            self.reader.packet_bytes_max = packet_bytes_max

    def send(self, data: bytes, dirty: "list[Connection]") -> None:
        """Queues bytes for the driver's next write."""
        out = self.out
        if out is None:
            self.out = [data]
        else:
            out.append(data)
        self.out_bytes += len(data)
        if not self.dirty:
            self.dirty = True
            dirty.append(self)

    def note_acknowledged(self) -> None:
        """Counts a publish of the client as acknowledged."""
        assert self.unacknowledged > 0, "a publish is acknowledged twice"
        self.unacknowledged -= 1

    def close(self, dirty: "list[Connection]") -> None:
        """Asks the driver to close the socket after the queued bytes are written."""
        self.closing = True
        if not self.dirty:
            self.dirty = True
            dirty.append(self)
