"""Everything that can be configured, with type, range and default.

A section of the TOML file is one Struct here. Units are the last part of a key. The docstring of
a key says what the name cannot; examples/holdfast.toml shows the same keys to an operator.
Ranges live in the annotations, so that `holdfast.config.check` can name them in an error.
"""

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct, field

from holdfast.config.addresses import ADDRESS, is_loopback
from holdfast.config.federation import Federation

PACKET_BYTES_LIMIT: Final = 268_435_460 - 131_072
"""The largest MQTT packet there is (header byte, four length bytes, 268,435,455 bytes of body),
less 128 KiB. A message grows on its way to a receiver: by a topic that its publisher gave as an
alias (at most 65,535 bytes), by a length of properties, an alias and subscription identifiers."""

WEBSOCKET_PATH: Final = "/mqtt"

ADDRESS_OR_NONE: Final = rf"^$|{ADDRESS}"

Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
"""0 lets the system choose a free one."""
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]
CountAboveZero: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 62)]
Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]
Uint16: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]


class Node(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    id: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="1 to 64 of A-Z a-z 0-9 _ . -"),
    ] = "n1"
    """Name of this node in logs, metrics and the data directory. Fixed once data exists."""
    data: Annotated[str, Meta(min_length=1)] = "holdfast-data"
    """Data directory; created when missing."""
    standby: bool = False
    """Share the data directory with other nodes: serve only while holding its lease."""
    advertise: Annotated[str, Meta(pattern=r"^$|^.+:[0-9]{1,5}$", description="host:port")] = ""
    """Where clients reach this node, told to those of a node that hands over; empty: the first
    listener's address."""


class Lease(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Of a shared data directory; the same for all its nodes."""

    timeout_s: Annotated[float, Meta(ge=0.2, le=60)] = 0.5
    """Silence of the holder after which a standby takes over. At least 2 over NFS."""
    heartbeat_s: Annotated[float, Meta(ge=0.02, le=10)] = 0.1
    """At most a quarter of `timeout_s`."""
    kill_stale_holder: bool = True
    """Kill a holder that hangs, if it runs on the same machine: its clients then notice at once."""


class Cluster(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What makes this node one of several that replicate one log. The same for all of them but
    for the addresses, `certificate`, `key` and `witness`."""

    peer_bind: str = ""
    """Address on which the other nodes are received; empty: no cluster."""
    peer_port: Annotated[int, Meta(ge=1, le=65535)] = 21883
    peer_advertise: Annotated[str, Meta(pattern=ADDRESS_OR_NONE, description="host:port")] = ""
    """Where the other nodes reach this one; empty: `peer_bind` and `peer_port`."""
    join: list[Annotated[str, Meta(pattern=ADDRESS, description="host:port")]] = field(
        default_factory=list
    )
    """Nodes that are asked for the cluster at the start; this one may be among them."""
    wait_for_init: bool = True
    """A node that belongs to no cluster waits for `holdfast cluster init` on one of its peers.
    False: it makes a cluster of its own, which others may join."""
    witness: bool = False
    """Votes on who leads and stores no messages: the third node of a site that has two."""
    secret_file: str = ""
    """A secret that all nodes share; each proves to the other that it knows it."""
    certificate: str = ""
    """PEM file with this node's chain, for TLS between the nodes. `key` and `ca` go with it."""
    key: str = ""
    ca: str = ""
    """PEM file; a peer must present a certificate that is signed by one of these and has the
    peer's node id as common name or DNS name."""
    replication_factor: Annotated[int, Meta(ge=1, le=7)] = 3
    """Nodes that store a partition and count for its acknowledgements. Taken at the creation."""
    min_insync: Annotated[int, Meta(ge=1, le=7)] = 2
    """With fewer replicas in sync, QoS 1 and 2 publishes are refused. Taken at the creation."""
    partitions: Annotated[int, Meta(ge=1, le=4096)] = 64
    """In place of `log.partitions`. Taken at the creation."""
    heartbeat_s: Annotated[float, Meta(ge=0.01, le=10)] = 0.1
    suspect_s: Annotated[float, Meta(ge=0.05, le=60)] = 0.5
    """Silence after which a node is taken for dead if another node finds so, too."""
    silent_s: Annotated[float, Meta(ge=0.1, le=120)] = 1.0
    """How long a replica may be behind and say nothing before the others go on without it."""
    disk_stall_s: Annotated[float, Meta(ge=0.1, le=600)] = 3.0
    """How long one write to the disk may take before the node counts as down until it is done."""
    replace_after_s: Annotated[float, Meta(ge=1, le=604_800)] = 10.0
    """How long a node is dead before its replicas are made anew on other nodes."""
    catch_up_bytes_per_s: Bytes = 67_108_864
    """What a leader sends at most to all replicas that are being made anew; 0: no limit."""

    def peer_address(self) -> str:
        """Where the other nodes reach this one, host:port."""
        if self.peer_advertise:
            return self.peer_advertise
        bind = self.peer_bind.strip("[]")
        return f"[{bind}]:{self.peer_port}" if ":" in bind else f"{bind}:{self.peer_port}"


class Listener(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    bind: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Port = 1883
    transport: Literal["tcp", "websocket"] = "tcp"
    path: Annotated[
        str,
        Meta(
            pattern=r'^/[!"$->@-~]*$',
            description="a path that begins with a slash: printable ASCII but ? and #",
        ),
    ] = WEBSOCKET_PATH
    """Of a WebSocket listener's URL."""
    allowed_origins: list[str] = field(default_factory=list)
    """Origins of the web pages that may open a WebSocket; empty: all. Clients that are no browsers
    need not name one."""
    certificate: str = ""
    """PEM file with the server's chain; with it the listener speaks TLS."""
    key: str = ""
    client_ca: str = ""
    """PEM file; client certificates signed by these are accepted."""
    require_certificate: bool = False
    max_connections: Count = 0
    """0: no limit but `limits.connections`."""

    def is_loopback(self) -> bool:
        return is_loopback(self.bind)


class Admin(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    enabled: bool = True
    bind: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Port = 18083
    hosts: list[str] = field(default_factory=list)
    """Names by which the admin port may be addressed, besides IP addresses, localhost, this
    machine's name and the advertised ones; "*": any. A web page whose own name comes to mean this
    machine is refused by it."""


class Retention(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Whole segments go, oldest first; 0 switches a rule off."""

    age_s: Count = 604_800
    bytes: Bytes = 0
    per_topic_last: Count = 0
    """Of each topic only the last so many messages need to be kept."""
    session_bytes: Bytes = 1 << 30
    """How many bytes of journal a durable session that is behind may hold back from retention."""


class Log(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    durability: Literal["fsync", "memory"] = "fsync"
    """What an acknowledgement promises: on disk, or in memory and on disk a little later."""
    partitions: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Fixed when the data directory is created."""
    segment_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 31)] = 67_108_864
    snapshot_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 268_435_456
    """Journal growth after which the derived state is saved, so that a start replays no more."""
    reserve_bytes: Bytes = 0
    """Free disk space below which QoS 1 and 2 publishes are refused; 0: chosen from the disk."""
    memory_flush_ms: Annotated[int, Meta(ge=0, le=60_000)] = 5
    """With durability "memory": how long records gather before they are written."""
    qos0: list[str] = field(default_factory=list)
    """Topic filters whose QoS 0 messages are logged too."""
    retention: Retention = field(default_factory=Retention)


class Security(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    allow_anonymous: bool | None = None
    """Unset means: only if every listener is on loopback and no credentials are configured.
    `holdfast.config.load.load` resolves it, so a loaded configuration holds a bool."""
    password_file: str = ""
    acl_file: str = ""
    scram_file: str = ""
    """Credentials for enhanced authentication with SCRAM-SHA-256."""


class Limits(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    packet_bytes: Annotated[int, Meta(ge=128, le=PACKET_BYTES_LIMIT)] = 2_097_152
    """A larger packet ends its connection with 0x95 (Packet too large)."""
    keep_alive_s_max: Uint16 = 65535
    session_expiry_s_max: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)] = 0xFFFFFFFF
    """4294967295: sessions may last for ever."""
    receive_maximum: Uint16 = 1024
    """QoS 1 and 2 publishes a client may have unacknowledged towards us."""
    inflight_max: Uint16 = 256
    """QoS 1 and 2 deliveries we have unacknowledged towards one client."""
    topic_alias_max: Annotated[int, Meta(ge=0, le=65535)] = 64
    outbox_messages: CountAboveZero = 1000
    """Above this or `outbox_bytes` a slow client is fed from the log instead of from memory."""
    outbox_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)] = 4_194_304
    retained_max: Count = 5_000_000
    retained_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 50)] = 1 << 30
    """Memory of the retained store. Above it, or `retained_max`, a message is delivered and not
    retained; what its topic had is removed."""
    subscriptions_per_session: CountAboveZero = 100_000
    filter_bytes_per_session: Annotated[int, Meta(ge=65535, le=1 << 40)] = 16_777_216
    """Of the filters of all its subscriptions together."""
    connections: Count = 0
    """Clients at once; 0: as many as the process may have file descriptors for, but a reserve."""
    connect_bytes: Annotated[int, Meta(ge=1024, le=PACKET_BYTES_LIMIT)] = 524_288
    """Largest CONNECT, and largest packet until CONNECT is answered."""
    pending_connect_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 33_554_432
    """What all connections together may have sent whose CONNECT is not answered yet. Above it the
    oldest of those with an incomplete CONNECT are closed."""
    pending_connects_per_address: Count = 10_000
    """Connections of one address whose CONNECT is not answered yet; 0: no limit."""
    sessions: CountAboveZero = 1_000_000
    """Sessions, connected or not; the CONNECT of one more is refused with 0x97 (Quota exceeded)."""
    connect_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 20.0
    """From the TCP connection to a complete CONNECT."""
    producers_max: CountAboveZero = 100_000
    """Producers whose last sequence is remembered; one counts once per partition it writes to.
    Above it the user, or client, with the most loses one."""
    producer_expiry_s: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)] = 604_800
    """How long a producer that stores nothing is remembered."""
    pending_bytes_max: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 67_108_864
    """Appended to the log and not yet written, with the memory of what waits for it; above it
    clients that add to it are not read, and new connections wait."""
    qos_max: Annotated[int, Meta(ge=0, le=2)] = 2
    retain_available: bool = True
    wildcard_available: bool = True
    shared_available: bool = True


class Sys(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    interval_s: Annotated[float, Meta(ge=0, le=86_400)] = 10.0
    """Between two updates of the $SYS topics; 0: none are published."""


class Logging(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Config(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    node: Node = field(default_factory=Node)
    listeners: list[Listener] = field(default_factory=lambda: [Listener()])
    admin: Admin = field(default_factory=Admin)
    lease: Lease = field(default_factory=Lease)
    cluster: Cluster = field(default_factory=Cluster)
    federation: Federation | None = None
    """None: the broker belongs to none."""
    log: Log = field(default_factory=Log)
    security: Security = field(default_factory=Security)
    limits: Limits = field(default_factory=Limits)
    sys: Sys = field(default_factory=Sys)
    logging: Logging = field(default_factory=Logging)
