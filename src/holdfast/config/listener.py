"""Settings of one listener."""

from typing import Annotated, Final, Literal, TypeAlias
from zlib import crc32

from msgspec import Meta, Struct, field

from holdfast.addresses import BEHIND_PROXY, is_loopback

PACKET_BYTES_LIMIT: Final = 268_435_460 - 131_072
"""The most bytes of `limits.packet_bytes`: those of the largest MQTT packet (header byte, four
length bytes, 268,435,455 bytes of body), less 128 KiB. A message grows on its way to a receiver: by
a topic that its publisher gave as an alias (at most 65,535 bytes), by a length of properties, an
alias and subscription identifiers."""

WEBSOCKET_PATH: Final = "/mqtt"
UNIX_PREFIX: Final = "unix:"
LOOPBACK_ORIGINS: Final = "loopback"
ANY_ORIGIN: Final = "*"
"""Entries of `allowed_origins` that stand for many origins."""

Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
"""A port; 0 lets the system choose a free one."""
Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1 << 62)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]


class Listener(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One address on which clients are accepted."""

    bind: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Port = 1883
    socket: str = ""
    """The path of a Unix socket in place of `bind` and `port`."""
    socket_mode: Annotated[
        str, Meta(pattern=r"^0?[0-7]{3}$", description="an octal mode such as 0660")
    ] = "0660"
    """The rights of the Unix socket's file: those who may write to it may connect."""
    proxies: list[str] = field(default_factory=list)
    """The addresses and networks of the proxies in front, "unix" for those of a Unix socket. With
    any, each connection begins with a header of the PROXY protocol, version 1 or 2."""
    transport: Literal["tcp", "websocket"] = "tcp"
    path: Annotated[
        str,
        Meta(
            pattern=r'^\*$|^/[!"$->@-~]*$',
            description="a path that begins with a slash, of printable ASCII but ? and #, or *",
        ),
    ] = WEBSOCKET_PATH
    """The path in a WebSocket listener's URL; "*": any."""
    allowed_origins: list[str] = field(default_factory=list)
    """The origins of the web pages that may open a WebSocket: `https://host`, `"loopback"` for the
    pages of this machine, `"*"` for all. Empty: all, or `"loopback"` where a browser of this
    machine reaches the listener without a password. Clients that are no browsers send none."""
    certificate: str = ""
    """The PEM file with the server's chain; with it the listener uses TLS."""
    key: str = ""
    client_ca: str = ""
    """The PEM file of the signers whose client certificates are accepted."""
    require_certificate: bool = False
    crl: str = ""
    """The PEM file of revocation lists, one for each CA that has signed a client's certificate."""
    psk_file: str = ""
    """The file with pre-shared keys of TLS, a line `identity:hexkey` for each client; in place of a
    certificate. Needs Python 3.13."""
    psk_hint: str = ""
    """The hint for clients of TLS 1.2 with several pre-shared keys."""
    tls_minimum: Literal["1.2", "1.3"] = "1.2"
    """The lowest version of TLS."""
    tls_ciphers: str = ""
    """OpenSSL's list of ciphers for TLS 1.2; empty: OpenSSL's default. Those of TLS 1.3 are
    fixed."""
    certificate_user: Literal["cn", "san", "none"] = "cn"
    """The user name that a client certificate proves: its common name, its first alternative name
    (DNS name, mail address or URI), or none. With none it only admits the client. The name of a
    pre-shared key is its identity, unless this is none."""
    allow_anonymous: bool | None = None
    """True: clients without credentials may connect here. Unset: as `security.allow_anonymous`."""
    authentication: list[Literal["password", "scram", "certificate", "token", "http", "hook"]] = (
        field(default_factory=list)
    )
    """The ways in which a client may prove its user name here; empty: each one that is configured.
    With `certificate` alone the certificate decides, whatever user name and password the client
    sends."""
    password_file: str = ""
    """The file with the only users who may prove their name by password here; empty: those of
    `security`."""
    acl_file: str = ""
    """The file with the rights of this listener's clients; empty: those of `security`."""
    mount: Annotated[
        str,
        Meta(
            pattern=r"^$|^[^$+#\s/\x00-\x1f][^+#\s\x00-\x1f]{0,254}/$",
            description="a prefix of topics that ends with a slash, of 256 characters or less,"
            " without $ or a slash at the beginning, and without +, # and blanks",
        ),
    ] = ""
    """The prefix of all topics of this listener's clients. They do not see it, and reach no other
    topics."""
    max_connections: Count = 0
    """The most connections of this listener; 0: only `limits.connections` applies."""
    packet_bytes: Annotated[int, Meta(ge=0, le=PACKET_BYTES_LIMIT)] = 0
    """The most bytes of a packet on this listener; 0: only `limits.packet_bytes` applies."""
    messages_per_s: Rate = 0.0
    """The most PUBLISH packets a second of all clients of this listener together; 0: that of
    `rates.listener`."""
    bytes_per_s: Rate = 0.0
    """The most bytes a second of their PUBLISH, SUBSCRIBE and UNSUBSCRIBE packets; 0: that of
    `rates.listener`."""
    connects_per_s: Rate = 0.0
    """The most CONNECT packets a second here; 0: that of `rates.listener`."""
    advertise: Annotated[str, Meta(pattern=r"^$|^.+:[0-9]{1,5}$", description="host:port")] = ""
    """The address at which clients reach this listener, announced to those of a node that hands
    over; empty: `node.advertise` for the first listener, otherwise `bind` and `port`. With
    `proxies` it is the address of the proxy, and empty announces none."""

    def is_open_to_pages(self) -> bool:
        """Whether any web page may open a WebSocket here."""
        is_any = not self.allowed_origins or ANY_ORIGIN in self.allowed_origins
        return self.transport == "websocket" and is_any

    def is_loopback(self) -> bool:
        """Whether the listener can be reached from this machine only."""
        return bool(self.socket) or is_loopback(self.bind)

    @property
    def name(self) -> str:
        """The address and port, or the path of the Unix socket."""
        return f"{UNIX_PREFIX}{self.socket}" if self.socket else f"{self.bind}:{self.port}"


def kind_of(listener: Listener) -> str:
    """The kind of a listener. A client that may use one may use another of the same kind."""
    if listener.socket:
        name = "unix"
    elif listener.transport == "websocket":
        name = "wss" if listener.certificate else "ws"
    else:
        name = "tls" if listener.certificate else "psk" if listener.psk_file else "tcp"
    if listener.proxies:
        # Clients of a proxy may not reach the network behind it.
        name += BEHIND_PROXY
    # Clients with another mount would see other topics.
    return f"{name}@{crc32(listener.mount.encode()):08x}" if listener.mount else name
