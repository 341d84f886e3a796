"""Settings that a node needs, as plain values."""

from dataclasses import dataclass, field

from holdfast.node.admission.limits import AdmissionLimits


@dataclass
class NodeConfig:
    """The limits and switches of one node.

    Limits are inclusive. A `*_max` of 0 means "not offered" where MQTT has such a notion.
    """

    node_id: str = "n1"
    partitions: int = 16
    memory_durability: bool = False
    """True: a record counts as committed once it is in memory (durability = "memory")."""
    qos_max: int = 2
    retain_available: bool = True
    wildcard_available: bool = True
    shared_available: bool = True
    replay_available: bool = True
    """True: a subscription may begin in the past."""
    replay_bytes_per_s: int = 0
    replay_pin_bytes: int = 0
    queues_max: int = 1000
    delay_s_max: int = 4_294_967
    delayed_messages_max: int = 10_000
    delayed_messages_per_client: int = 1000
    delayed_bytes_max: int = 67_108_864
    packet_bytes_max: int = 2_097_152
    keep_alive_s_max: int = 65535
    session_expiry_s_max: int = 0xFFFFFFFF
    receive_maximum: int = 1024
    inflight_max: int = 256
    topic_alias_max: int = 64
    outgoing_topic_alias_max: int = 65535
    outbox_messages: int = 1000
    outbox_bytes: int = 4_194_304
    retained_max: int = 5_000_000
    retained_bytes_max: int = 1_073_741_824
    subscriptions_per_session: int = 100_000
    filter_bytes_per_session: int = 16_777_216
    filter_bytes_max: int = 1_073_741_824
    connections: int = 1_000_000
    sessions_max: int = 1_000_000
    connect_bytes: int = 524_288
    """The most bytes that one connection may send before its CONNECT is answered."""
    pending_connect_bytes: int = 33_554_432
    """The most bytes buffered for all connections together whose CONNECT is not answered."""
    pending_connects_per_address: int = 10_000
    client_id_bytes: int = 512
    connect_timeout_s: float = 20.0
    allow_anonymous: bool = True
    has_listener_rights: bool = False
    """True: some listeners have a mount, or rights of their own."""
    sys_interval_s: float = 10.0
    progress_interval_s: float = 0.05
    pending_bytes_max: int = 67_108_864
    """The most bytes appended and not yet written. Above it the node does not read from clients
    that add to them."""
    producers_max: int = 100_000
    """The most positions in the producer table: a producer has one in each partition that it
    publishes to."""
    producer_expiry_s: int = 604_800
    authenticates_users: bool = False
    """True: user names (or certificates) are verified, so a producer id can be bound to one."""
    qos0_logged: list[str] = field(default_factory=list)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
