"""Parses a client's server URLs, and the references that servers send."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.addresses import join_address
from holdfast.numbers import whole_number

PORTS: Final = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
"""The schemes and their default ports."""
SECURE_SCHEMES: Final = ("mqtts", "wss")
WEBSOCKET_SCHEMES: Final = ("ws", "wss")
WEBSOCKET_PATH: Final = "/mqtt"

HOST_CHARACTERS_MAX: Final = 253
_ALIASES: Final = {"tcp": "mqtt", "ssl": "mqtts", "tls": "mqtts"}
"""The names of the schemes in other clients."""
_EXAMPLE: Final = "write host:1883, mqtt://host, mqtts://host, ws://host/mqtt or wss://host/mqtt"


@dataclass(frozen=True)
class Server:
    """The address of one server. `host` is a name or an address (IPv6 without brackets); `path` is
    for WebSocket, otherwise ""."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def is_secure(self) -> bool:
        """Whether the server is reached by TLS."""
        return self.scheme in SECURE_SCHEMES

    @property
    def is_websocket(self) -> bool:
        """Whether the server is reached by WebSocket."""
        return self.scheme in WEBSOCKET_SCHEMES

    @property
    def address(self) -> str:
        """The server as host:port, for texts."""
        return join_address(self.host, self.port)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}{self.path}"


def parse_server(text: str, default_scheme: str = "mqtt") -> Server:
    """The server of a URL, or of host, host:port or [IPv6]:port with the default scheme. Other
    texts raise `ValueError`."""
    scheme, separator, rest = text.strip().partition("://")
    if not separator:
        scheme, rest = default_scheme, scheme
    scheme = scheme.lower()
    scheme = _ALIASES.get(scheme, scheme)
    if scheme not in PORTS:
        raise ValueError(f"server {text!r}: unknown scheme {scheme!r}; {_EXAMPLE}")
    authority, _, path = rest.partition("/")
    if "@" in authority:
        # The text is left out of the message, because it may contain a password.
        raise ValueError("a server takes no user name or password: set them in the options")
    host, port = _split_authority(authority, text)
    if scheme not in WEBSOCKET_SCHEMES:
        if path:
            raise ValueError(f"server {text!r}: a path is for ws and wss only")
        return Server(scheme, host, port or PORTS[scheme])
    if not all("!" <= one <= "~" and one != "#" for one in path):
        raise ValueError(
            f"server {text!r}: the path must be of printable ASCII without blanks and #; "
            "write others as %20 or the like"
        )
    return Server(scheme, host, port or PORTS[scheme], f"/{path}" if path else WEBSOCKET_PATH)


def _split_authority(authority: str, text: str) -> tuple[str, int]:
    """Host and port, with 0 for no port."""
    if authority.startswith("["):
        host, bracket, rest = authority[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise ValueError(f"server {text!r}: an IPv6 address is written [::1]:1883")
        port = rest[1:]
        has_port = bool(rest)
    else:
        host, colon, port = authority.partition(":")
        has_port = bool(colon)
        if ":" in port:
            raise ValueError(f"server {text!r}: an IPv6 address is written [::1]:1883")
    check_host(host, text)
    if not has_port:
        return host, 0
    number = whole_number(port, 65535, 1)
    if number is None:
        raise ValueError(f"server {text!r}: the port {port!r} is no number from 1 to 65535")
    return host, number


def check_host(host: str, text: str) -> None:
    """Raises `ValueError`, with `text`, unless the host can be looked up."""
    if not host:
        raise ValueError(f"server {text!r}: the host is missing; {_EXAMPLE}")
    name = host[:-1] if host.endswith(".") else host
    if len(host) > HOST_CHARACTERS_MAX or any(not 0 < len(one) < 64 for one in name.split(".")):
        raise ValueError(f"server {text!r}: {host!r} is no host name")
    if any(one.isspace() or not one.isprintable() or one in "/?#\\" for one in host):
        raise ValueError(f"server {text!r}: {host!r} is no host name")


def parse_references(text: str, origin: Server) -> list[Server]:
    """The servers in a Server Reference of `origin`: one or more, separated by spaces (MQTT 5,
    section 4.13).

    Without a scheme they have that of `origin`. Unreadable ones are left out. So are servers
    without TLS if `origin` has it: a reference must not make the client send a password in clear.
    """
    found: list[Server] = []
    for word in text.split():
        try:
            server = parse_server(word, origin.scheme)
        except ValueError:
            continue
        if server.is_websocket and "://" not in word and "/" not in word:
            server = Server(server.scheme, server.host, server.port, origin.path)
        if (server.is_secure or not origin.is_secure) and server not in found:
            found.append(server)
    return found


def servers_of(
    host: str | None, port: int | None, servers: Sequence[str | Server], secure: bool
) -> list[Server]:
    """The servers from a client's arguments: a host (its port by default the one for `secure` or
    not) or a list. Invalid arguments raise `ValueError`."""
    scheme = "mqtts" if secure else "mqtt"
    if isinstance(servers, str):
        raise ValueError("servers is a list of servers, not one text")
    if (host is None) == (not servers):
        raise ValueError("name the server: either a host or a list of servers")
    if host is not None:
        if port is not None and not 1 <= port <= 65535:
            raise ValueError(f"port {port}: 1 to 65535")
        check_host(host, host)
        return [Server(scheme, host, port if port is not None else PORTS[scheme])]
    if port is not None:
        raise ValueError("with a list of servers, each has its own port")
    parsed = [one if isinstance(one, Server) else parse_server(one, scheme) for one in servers]
    return list(dict.fromkeys(parsed))
