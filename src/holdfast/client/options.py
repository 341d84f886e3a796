"""Options of a client's connections."""

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
    """The settings of a client that are the same for all its connections."""

    level: int = LEVEL_5
    """The protocol level: 3 is MQTT 3.1, 4 is 3.1.1, 5 is 5.0."""
    client_id: str = ""
    """The client id. Empty: the server assigns one (not with MQTT 3.1; with 3.1.1 only for a clean
    session)."""
    clean_start: bool = True
    session_expiry_s: int = 0
    """The seconds for which the server keeps the session without a connection (MQTT 5); 0xFFFFFFFF
    for ever."""
    keep_alive_s: int = 60
    """The keep alive in seconds; 0: neither side checks."""
    username: str | None = None
    password: bytes | None = None
    will: Will | None = None
    receive_maximum: int = 65535
    """The most QoS 1 and 2 messages that the server may send without acknowledgement (announced
    with MQTT 5)."""
    inflight_max: int = 65535
    """The most QoS 1 and 2 messages that the client sends without acknowledgement. The server's
    limit applies too."""
    queue_messages_max: int = 10_000
    """The most messages waiting beyond `inflight_max`; more raise QueueFull."""
    packet_bytes_max: int = 268_435_460
    """The most bytes of a packet that the client accepts. It is announced (MQTT 5) if it is below
    the protocol's limit."""
    topic_alias_max: int = 0
    """The highest topic alias that the server may use (MQTT 5)."""
    connect_timeout_s: float = 30.0
    """The seconds from `connect` to CONNACK."""
    ping_timeout_s: float = 20.0
    """The seconds from PINGREQ to PINGRESP, at most the keep alive."""
    response_timeout_s: float | None = 20.0
    """The seconds of silence after which a server that owes a reply counts as down.

    A reply is owed to PUBLISH with QoS 1 or 2, SUBSCRIBE, UNSUBSCRIBE and PINGREQ. After half of
    the time the client sends a PINGREQ, so that a server that is only slow is kept. None: only the
    keep alive detects it.
    """
    ping_interval_s: float = 0.0
    """The seconds without input after which the client sends PINGREQ, beside the keep alive. It is
    the time in which a client that only listens detects a silent server. 0: no such pings."""
    is_bridge: bool = False
    """True in MQTT 3: set the highest bit of the protocol level, as another broker's bridge.
    Brokers with that extension do not send back the client's messages, and keep the retain flag;
    others refuse the connection."""
    packet_ids_max: int = 65535
    """The highest packet id. Below 65535, the client releases the QoS 2 publishes that an earlier
    program with the same limit left in the server's session. Otherwise the server would take a new
    message with such an id for a repetition."""
    manual_acknowledge: bool = False
    """True: `acknowledge` acknowledges QoS 1 and 2 messages, not their receipt."""
    on_unreadable: Callable[[str], None] | None = None
    """The callback for messages whose topic or properties are unreadable.

    MQTT requires a client to end the connection over such a message, and a server with a session
    then sends it again for ever. With the callback, the client acknowledges the message, skips it
    and reports the error.
    """
    authentication: Callable[[], Authentication] | None = None
    """The maker of one enhanced authentication exchange per connection (MQTT 5)."""
    trace: bool = False
    """True: a Traced effect for every packet, in order with the other effects."""
    properties: Properties = field(default_factory=dict)
    """More CONNECT properties (MQTT 5); they override the fields above."""
