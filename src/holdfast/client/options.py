"""How a client connects."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from holdfast.client.authentication import Authentication
from holdfast.protocol.mqtt.packets import Will
from holdfast.protocol.mqtt.properties import Properties

LEVEL_31: Final = 3
LEVEL_311: Final = 4
LEVEL_5: Final = 5


@dataclass
class Options:
    level: int = LEVEL_5
    """Protocol level: 3 is MQTT 3.1, 4 is 3.1.1, 5 is 5.0."""
    client_id: str = ""
    """Empty: the server assigns one (not with MQTT 3.1; with 3.1.1 only for a clean session)."""
    clean_start: bool = True
    session_expiry_s: int = 0
    """MQTT 5: how long the server keeps the session without us; 0xFFFFFFFF for ever."""
    keep_alive_s: int = 60
    """0: neither side checks."""
    username: str | None = None
    password: bytes | None = None
    will: Will | None = None
    receive_maximum: int = 65535
    """QoS 1 and 2 messages the server may send without our acknowledgement (told with MQTT 5)."""
    inflight_max: int = 65535
    """QoS 1 and 2 messages we send without an acknowledgement; the server's limit counts too."""
    queue_messages_max: int = 10_000
    """Messages waiting beyond `inflight_max`; more raise QueueFull."""
    packet_bytes_max: int = 268_435_460
    """The largest packet we accept; told to the server (MQTT 5) when below the protocol's limit."""
    topic_alias_max: int = 0
    """Topic aliases the server may use towards us (MQTT 5)."""
    connect_timeout_s: float = 30.0
    """From `connect` to CONNACK."""
    ping_timeout_s: float = 20.0
    """From PINGREQ to PINGRESP; at most the keep alive is waited."""
    response_timeout_s: float | None = 20.0
    """A server that owes an answer (to PUBLISH with QoS 1 or 2, SUBSCRIBE, UNSUBSCRIBE, PINGREQ)
    and has sent nothing at all for so long is gone. Half-way it is sent a PINGREQ, so that one
    that is only slow with the answer is kept. None: only the keep alive finds it."""
    ping_interval_s: float = 0.0
    """PINGREQ when nothing was received for so long, beside the keep alive: how fast a client that
    only listens finds its server silent. 0: no such pings."""
    is_bridge: bool = False
    """MQTT 3: the highest bit of the protocol level, as another broker's bridge. Brokers that know
    it do not send back what we publish, and keep the retain flag; others refuse the connection."""
    packet_ids_max: int = 65535
    """Packet ids are taken from 1 to this. Below 65535, what a program of before with the same
    bound has left of its QoS 2 publishes in the server's session is released as the session is
    found; else an id of theirs would make a message of ours count as a repetition."""
    manual_acknowledge: bool = False
    """True: QoS 1 and 2 messages are acknowledged by `acknowledge`, not on receipt."""
    on_unreadable: Callable[[str], None] | None = None
    """MQTT wants a client to end the connection over a message that is against the rules; a server
    with a session then sends it again, for ever. With this, a message whose topic or properties
    cannot be read is acknowledged and passed over, and this is told what is wrong."""
    authentication: Callable[[], Authentication] | None = None
    """Makes one enhanced authentication exchange per connection (MQTT 5)."""
    trace: bool = False
    """True: a Traced effect for every packet, in order with the other effects."""
    properties: Properties = field(default_factory=dict)
    """More CONNECT properties (MQTT 5); they win over what the fields above say."""
