"""All settings, with type, range and default.

A section of the TOML file is one Struct here. Units are the last part of a key. The docstring of a
key adds what its name does not contain; examples/holdfast.toml shows the same keys to an operator.
Ranges are in the annotations, so that `holdfast.config.check` can name them in an error.
"""

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct, field

from holdfast.addresses import ADDRESS, UNIX, join_address
from holdfast.config.federation import Federation
from holdfast.config.identity import HookSettings, HttpCheck, Jwt
from holdfast.config.listener import PACKET_BYTES_LIMIT, Count, Listener, Port, Rate

ADDRESS_OR_NONE: Final = rf"^$|{ADDRESS}"
NODE_NAME: Final = r"^[A-Za-z0-9_.-]{1,64}$"

CountAboveZero: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 62)]
Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]
Uint16: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]


class Node(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The identity and data of one node."""

    id: Annotated[
        str,
        Meta(pattern=NODE_NAME, description="1 to 64 of A-Z a-z 0-9 _ . -"),
    ] = "n1"
    """The name of this node in logs, metrics and the data directory. Fixed once data exists."""
    data: Annotated[str, Meta(min_length=1)] = "holdfast-data"
    """The data directory; created when missing."""
    standby: bool = False
    """True: share the data directory with other nodes, and serve only while holding its lease."""
    advertise: Annotated[str, Meta(pattern=r"^$|^.+:[0-9]{1,5}$", description="host:port")] = ""
    """The address at which clients reach this node, announced to those of a node that hands over;
    empty: the first listener's address."""


class Processes(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The processes of one data directory."""

    processes: Annotated[int, Meta(ge=1, le=64)] | Literal["auto"] = 1
    """The number of processes, each of which is a node; "auto": as many as the machine has
    cores."""
    lame_duck_s: Annotated[float, Meta(ge=0, le=600)] = 0.0
    """The seconds after SIGTERM for which the listeners stay open and `/readyz` replies 503, so
    that load balancers send new clients to other nodes."""


class Lease(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The lease of a shared data directory, with the same values for all its nodes."""

    timeout_s: Annotated[float, Meta(ge=0.2, le=60)] = 0.5
    """The silence of the holder in seconds after which a standby takes over. At least 2 over
    NFS."""
    heartbeat_s: Annotated[float, Meta(ge=0.02, le=10)] = 0.1
    """The seconds between two heartbeats, at most a quarter of `timeout_s`."""
    kill_stale_holder: bool = True
    """True: kill a holder that hangs, if it runs on the same machine. Its clients then notice at
    once."""


class Cluster(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The settings that make this node one of several that replicate one log. They are the same for
    all of them, except the addresses, `certificate`, `key`, `role`, `zone` and `capacity`."""

    peer_bind: str = ""
    """The address on which this node accepts the other nodes; empty: no cluster."""
    peer_port: Annotated[int, Meta(ge=1, le=65535)] = 21883
    peer_advertise: Annotated[str, Meta(pattern=ADDRESS_OR_NONE, description="host:port")] = ""
    """The address at which the other nodes reach this one; empty: `peer_bind` and `peer_port`."""
    join: list[Annotated[str, Meta(pattern=ADDRESS, description="host:port")]] = field(
        default_factory=list
    )
    """The nodes that are asked for the cluster at the start; this one may be among them."""
    wait_for_init: bool = True
    """True: a node without a cluster waits for `holdfast cluster init` on one of its peers. False:
    the nodes of `join` make the cluster when all of them are connected and none belongs to one. A
    node without `join` makes a cluster of its own, which others may join."""
    witness: bool = False
    """True: as `role = "witness"`."""
    role: Literal["data", "witness", "gateway"] = "data"
    """data: the node stores messages and serves clients. witness: it votes in Raft only, as the
    third node of a site that has two. gateway: it serves clients only."""
    zone: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9_.-]{0,64}$", description="at most 64 of A-Z a-z 0-9 _ . -"),
    ] = ""
    """The zone of the node: what fails together, for example a room or an availability zone. The
    replicas of a partition are in different zones, as far as there are enough. Empty: the node is a
    zone of its own."""
    capacity: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """The part of the data and of the leaderships that the node has, in proportion to others. With
    200 it has twice as much as a node with 100."""
    secret_file: str = ""
    """The file of a secret that all nodes share; each proves to the other that it has it."""
    certificate: str = ""
    """The PEM file with this node's chain, for TLS between the nodes. `key` and `ca` go with it."""
    key: str = ""
    ca: str = ""
    """The PEM file of signers. A peer must present a certificate that one of these has signed, with
    its node id as common name or DNS name."""
    replication_factor: Annotated[int, Meta(ge=1, le=7)] = 3
    """The nodes that store a partition and count for its commits. Read at the creation only."""
    min_insync: Annotated[int, Meta(ge=1, le=7)] = 2
    """The replicas in sync below which QoS 1 and 2 are refused. Read at the creation only."""
    partitions: Annotated[int, Meta(ge=1, le=4096)] = 64
    """The number of partitions, in place of `log.partitions`. Read at the creation only."""
    heartbeat_s: Annotated[float, Meta(ge=0.01, le=10)] = 0.1
    suspect_s: Annotated[float, Meta(ge=0.05, le=60)] = 0.5
    """The silence in seconds after which a node counts as down if another node finds so, too."""
    silent_s: Annotated[float, Meta(ge=0.1, le=120)] = 1.0
    """The seconds for which a replica may be behind and silent before the others continue without
    it."""
    disk_stall_s: Annotated[float, Meta(ge=0.1, le=600)] = 3.0
    """The most seconds of one write to the disk. After that the node counts as down until it is
    done."""
    start_alone_after_s: Annotated[float, Meta(ge=2, le=604_800)] = 60.0
    """The seconds after its start before a node decides alone without nodes that were up before."""
    replace_after_s: Annotated[float, Meta(ge=1, le=604_800)] = 10.0
    """The seconds for which a node is down before its replicas are made on other nodes."""
    catch_up_bytes_per_s: Bytes = 67_108_864
    """The most bytes per second that a leader sends to all new replicas together; 0: no limit."""
    stop_wait_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    """The most seconds after SIGTERM for which a node serves on while a replica elsewhere is about
    to be in sync, without which publishes would be refused. A second SIGTERM ends the wait."""
    drain_clients_per_s: Rate = 200.0
    """The clients that a node sends to other nodes in a second while it is drained. A node that
    stops does so within 10 s. 0: all at once."""
    rebalance_connections_per_s: Rate = 0.0
    """The clients above its even share that a node sends to other nodes in a second, without a
    command, while all nodes are up; 0: none."""

    def node_role(self) -> str:
        """The role of this node in the cluster."""
        return "witness" if self.witness else self.role

    def peer_address(self) -> str:
        """The address at which the other nodes reach this one, host:port; "": none do."""
        if self.peer_advertise or not self.peer_bind:
            return self.peer_advertise
        if self.peer_bind.startswith(UNIX):
            return UNIX + self.peer_bind.rpartition("/")[2]
        return join_address(self.peer_bind, self.peer_port)


class Admin(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The admin port."""

    enabled: bool = True
    bind: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Port = 18083
    hosts: list[str] = field(default_factory=list)
    """The names by which the admin port may be addressed, besides IP addresses, localhost, this
    machine's name and the advertised ones; "*": any. The check refuses a web page whose own name
    changes to this machine's address."""
    proxies: list[str] = field(default_factory=list)
    """The addresses and networks of HTTP proxies in front. The address and the scheme of a request
    from one are those of its headers X-Forwarded-For and X-Forwarded-Proto."""
    access_file: str = ""
    """A file of users and tokens, in the format of `access.json` in the data directory, that counts
    beside those of the data directory and of the cluster. The broker never writes it."""
    advertise: Annotated[str, Meta(pattern=ADDRESS_OR_NONE, description="host:port")] = ""
    """The address at which other machines reach the admin port; empty: `bind` and `port`, and for a
    `bind` that stands for all addresses the host of `cluster.peer_advertise`."""
    open: list[Literal["health", "metrics"]] = field(default_factory=lambda: ["health"])
    """The routes that anybody who reaches the port may read without credentials."""
    console: bool = True
    """Whether the port serves the console, at `/console/`."""
    certificate: str = ""
    """The PEM file with the port's chain; with it the port serves HTTPS only. `key` goes with
    it."""
    key: str = ""


class Retention(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The rules by which old segments are deleted, complete and oldest first; 0 switches a rule
    off."""

    age_s: Count = 604_800
    bytes: Bytes = 0
    per_topic_last: Count = 0
    """The number of last messages of each topic that need to be kept."""
    session_bytes: Bytes = 1 << 30
    """The most bytes of journal that a durable session that is behind may pin."""
    keep_until_lake: Bytes = 0
    """The most bytes of journal that a registered lake that is behind may pin; 0: retention waits
    for no lake, and none registers."""


class Log(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The log of one node."""

    durability: Literal["fsync", "memory"] = "fsync"
    """The promise of an acknowledgement: on disk, or in memory and on disk a little later."""
    partitions: Annotated[int, Meta(ge=1, le=4096)] = 16
    """The number of partitions. Fixed when the data directory is created."""
    segment_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 31)] = 67_108_864
    snapshot_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 268_435_456
    """The growth of the journal in bytes after which a snapshot is written, so that a start replays
    no more."""
    reserve_bytes: Bytes = 0
    """The free bytes of the disk below which QoS 1 and 2 publishes are refused; 0: chosen from the
    disk."""
    memory_flush_ms: Annotated[int, Meta(ge=0, le=60_000)] | None = None
    """Setting of version 0.1, accepted without effect: records are written at once."""
    commit_gather_ms: Annotated[int, Meta(ge=0, le=100)] | None = None
    """The most time for which records wait for others to share a sync with, while publishers do not
    wait for acknowledgements; 0: none. Unset: 1, and 0 where the cluster has other nodes."""
    qos0: list[str] = field(default_factory=list)
    """The topic filters whose QoS 0 messages are logged too."""
    lake: str = ""
    """The lake of this log that has what retention has removed: a directory, or a URL such as
    s3://BUCKET/NAME. Empty: none is read."""
    read_bytes_per_s: Bytes = 0
    """The most bytes of log a second that all readers of the admin port are sent together; 0: no
    limit."""
    retention: Retention = field(default_factory=Retention)


class Security(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The files of users and rights."""

    allow_anonymous: bool | None = None
    """True: clients without credentials may connect. Unset: only if every listener is on loopback
    and no credentials are configured. `holdfast.config.load.load` resolves it, so a loaded
    configuration has a bool."""
    password_file: str = ""
    acl_file: str = ""
    scram_file: str = ""
    """The credentials for enhanced authentication with SCRAM-SHA-256 or SCRAM-SHA-512."""
    dynamic_security_file: str = ""
    """The users, groups and roles that clients change at run time over
    `$CONTROL/dynamic-security/v1`, in Mosquitto's format. The broker replaces the file with each
    change. In a cluster the file counts until the first change."""
    jwt: Jwt = field(default_factory=Jwt)
    http: HttpCheck = field(default_factory=HttpCheck)


class Limits(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The limits of what clients may use."""

    packet_bytes: Annotated[int, Meta(ge=128, le=PACKET_BYTES_LIMIT)] = 2_097_152
    """The most bytes of a packet. A larger one ends its connection with 0x95 (Packet too large)."""
    keep_alive_s_max: Uint16 = 65535
    session_expiry_s_max: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)] = 0xFFFFFFFF
    """The most seconds of session expiry; 4294967295: sessions may last for ever."""
    receive_maximum: Uint16 = 1024
    """The most QoS 1 and 2 publishes of a client that the broker has not acknowledged."""
    inflight_max: Uint16 = 256
    """The most QoS 1 and 2 deliveries that one client has not acknowledged."""
    topic_alias_max: Annotated[int, Meta(ge=0, le=65535)] = 64
    """The most topic aliases that a client may set."""
    outgoing_topic_alias_max: Annotated[int, Meta(ge=0, le=65535)] = 65535
    """The most topic aliases that the broker sets for a client, which may allow fewer. 0: none, for
    clients that announce aliases and do not understand them."""
    outbox_messages: CountAboveZero = 1000
    """The most messages in an outbox. Above this or `outbox_bytes` a slow client is served from the
    log."""
    outbox_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)] = 4_194_304
    retained_max: Count = 5_000_000
    retained_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 50)] = 1 << 30
    """The most bytes of memory of the retained store. A user, or a client without a user, may have
    as many bytes, and as many of the topics of `retained_max`, as are left for all others. Above
    that a message is refused. One of QoS 0, MQTT 3 or a numbered producer is delivered and not
    retained, and the topic's earlier one is removed."""
    subscriptions_per_session: CountAboveZero = 100_000
    filter_bytes_per_session: Annotated[int, Meta(ge=65535, le=1 << 40)] = 16_777_216
    """The most bytes of the filters of all its subscriptions together."""
    filter_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 50)] = 1 << 30
    """The most bytes of memory for the filters of all sessions of a node. A user, or an address
    with clients that are anonymous, may have as many as are left for all others."""
    connections: Count = 0
    """The most clients at once; 0: as many as the process may have file descriptors for, less a
    reserve."""
    connect_bytes: Annotated[int, Meta(ge=1024, le=PACKET_BYTES_LIMIT)] = 524_288
    """The most bytes of a CONNECT, and of any packet until CONNECT is answered."""
    pending_connect_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 33_554_432
    """The most bytes from all connections together whose CONNECT is not answered yet. Above it the
    oldest of those with an incomplete CONNECT are closed."""
    pending_connects_per_address: Count = 10_000
    """The most connections of one address whose CONNECT is not answered yet; 0: no limit."""
    client_id_bytes: Annotated[int, Meta(ge=23, le=65535)] = 512
    """The most bytes of the client id of a new session. Sessions with longer ones, which are there
    already, can be resumed."""
    sessions: CountAboveZero = 1_000_000
    """The most sessions, connected or not. The CONNECT of one more is refused with 0x97 (Quota
    exceeded)."""
    connect_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 20.0
    """The seconds from the TCP connection to a complete CONNECT."""
    producers_max: CountAboveZero = 100_000
    """The most producers whose last sequence is remembered; one counts once per partition it writes
    to. Above it the user, or client, with the most loses one."""
    producer_expiry_s: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)] = 604_800
    """The seconds for which a producer that stores nothing is remembered."""
    pending_bytes_max: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 67_108_864
    """The most bytes appended to the log and not yet written, with the memory of what waits for
    them. Above it the broker does not read from clients that add to it, and new connections
    wait."""
    qos_max: Annotated[int, Meta(ge=0, le=2)] = 2
    retain_available: bool = True
    wildcard_available: bool = True
    shared_available: bool = True
    replay_available: bool = True
    replay_bytes_per_s: Bytes = 0
    """The bytes a second that all replays of a node read from the log. 0: no limit."""
    replay_pin_bytes: Bytes = 0
    """The most bytes of the log from the start of a replay to its end. A replay from further back
    is refused with 0x97. 0: no limit."""
    queues: Annotated[int, Meta(ge=0, le=100_000)] = 1000
    """The most queues (`$queue/FILTER`) of the broker. A SUBSCRIBE that would begin one more is
    refused with 0x97. 0: none."""
    delay_s: Annotated[int, Meta(ge=1, le=4_294_967)] = 4_294_967
    """The longest delay of a message to `$delayed/SECONDS/TOPIC`."""
    delayed_messages: Annotated[int, Meta(ge=0, le=10_000_000)] = 10_000
    """The most delayed messages that wait. Further ones are refused with 0x97."""
    delayed_messages_per_client: Annotated[int, Meta(ge=0, le=10_000_000)] = 1000
    """The most delayed messages of one client."""
    delayed_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 67_108_864
    """The memory for delayed messages, in bytes."""


Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=31_536_000)]


class ScopeRates(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The rates of each client, user, address or listener. 0: no limit."""

    messages_per_s: Rate = 0.0
    """The most PUBLISH packets a second."""
    bytes_per_s: Rate = 0.0
    """The most bytes a second of PUBLISH, SUBSCRIBE and UNSUBSCRIBE packets."""
    connects_per_s: Rate = 0.0
    """The most CONNECT packets a second. One more is refused with 0x9F (Connection rate
    exceeded)."""


class Rates(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The rates of clients, users, addresses and listeners. All connections of one name share its
    allowance."""

    client: ScopeRates = field(default_factory=ScopeRates)
    user: ScopeRates = field(default_factory=ScopeRates)
    address: ScopeRates = field(default_factory=ScopeRates)
    listener: ScopeRates = field(default_factory=ScopeRates)
    over: Literal["refuse", "wait", "disconnect"] = "refuse"
    """The effect of a message above a rate. refuse: an MQTT 5 message of QoS 1 or 2 is refused with
    0x97 (Quota exceeded); other clients wait. wait: the broker stops reading from the client for as
    long as the rate says. disconnect: the connection ends with 0x96 (Message rate too high)."""
    burst_s: Seconds = 1.0
    """The seconds of a rate that may come at once after silence."""


class Quotas(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The quotas of each user. 0: no limit. Clients without a proved user name have none."""

    sessions_per_user: Count = 0
    """The most sessions of one user at this node. The CONNECT of one more is refused with 0x97."""
    bytes_per_user: Bytes = 0
    """The most bytes that a user publishes in `period_s`. Above it messages are refused with 0x97;
    of MQTT 3, QoS 0 is dropped, and QoS 1 or 2 ends the connection."""
    period_s: Seconds = 86_400.0
    """The seconds in which a used quota is complete again; it grows evenly."""


class Lockout(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The lock-out after failed authentications."""

    failures: Count = 0
    """The failures within `window_s` after which a name is locked out; 0: never."""
    window_s: Seconds = 60.0
    duration_s: Seconds = 300.0
    """The seconds for which CONNECT is refused with 0x8A (Banned)."""
    scopes: list[Literal["address", "user", "client"]] = field(default_factory=lambda: ["address"])
    """The names that are locked out. With "user" or "client", a stranger can lock others out."""


class Sys(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The $SYS topics."""

    interval_s: Annotated[float, Meta(ge=0, le=86_400)] = 10.0
    """The seconds between two updates of the $SYS topics; 0: none are published."""


class Logging(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The log lines of the process."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Traces(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Traces of publishes with OpenTelemetry. It needs the extra `otel`."""

    enabled: bool = False
    """Whether messages get a `traceparent` user property, and some of them a span."""
    ratio: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """The share of messages without a `traceparent` that get a span. One that has it decides by its
    own flag."""
    endpoint: Annotated[str, Meta(pattern=r"^$|^https?://\S+$", description="an http(s) URL")] = ""
    """The URL of an OTLP/HTTP collector for traces. Empty: OpenTelemetry's variables decide, and
    without them http://localhost:4318/v1/traces."""


class Config(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """All settings of a broker, one field per section of the file."""

    node: Node = field(default_factory=Node)
    server: Processes = field(default_factory=Processes)
    listeners: list[Listener] = field(default_factory=lambda: [Listener()])
    admin: Admin = field(default_factory=Admin)
    lease: Lease = field(default_factory=Lease)
    cluster: Cluster = field(default_factory=Cluster)
    federation: Federation | None = None
    """The membership in a federation; None: the broker is in none."""
    log: Log = field(default_factory=Log)
    security: Security = field(default_factory=Security)
    limits: Limits = field(default_factory=Limits)
    hooks: HookSettings = field(default_factory=HookSettings)
    rates: Rates = field(default_factory=Rates)
    quotas: Quotas = field(default_factory=Quotas)
    lockout: Lockout = field(default_factory=Lockout)
    sys: Sys = field(default_factory=Sys)
    logging: Logging = field(default_factory=Logging)
    tracing: Traces = field(default_factory=Traces)
