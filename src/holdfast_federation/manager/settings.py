"""Loads a manager's settings from the environment and the command line.

A variable is HOLDFAST_TOPOLOGY__ and the name of a field in capitals. `holdfast.config.sources`
reads them.

A join names an address. A join token proves the caller, not the address. So an address counts
as a member's broker when the operator vouches for it: he joins the member himself, or names the
address in `brokers`. Only there does the manager say its name and password. Of anybody else it
takes the caller's own address alone, so no stranger makes it connect to third machines, and only
while it has no password to give away.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct, field, inspect
from msgspec.structs import replace

from holdfast.addresses import is_loopback
from holdfast.config.durations import duration_ns
from holdfast.config.first_line import first_word
from holdfast.config.problem import ConfigError, Problem
from holdfast.config.sources import load_settings, read_text
from holdfast.config.values import find_type
from holdfast_federation.manager.state.store import file_of


@dataclass(frozen=True)
class BrokerPattern:
    """A pattern of addresses: a host, `*.domain`, an address or a network, each with or without a
    port."""

    host: str
    network: IPv4Network | IPv6Network | None
    port: int | None

    def matches(self, host: str, port: int | None) -> bool:
        if self.port is not None and port != self.port:
            return False
        if self.network is not None:
            # A name may lead anywhere tomorrow: networks are for addresses.
            try:
                return ip_address(host) in self.network
            except ValueError:
                return False
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return host == self.host


def broker_pattern(text: str) -> BrokerPattern:
    """Parses a pattern. Raises ValueError when the text is none."""
    host, port = _split(text.strip().lower())
    if not host or (port is not None and not 1 <= port <= 65535):
        raise ValueError(f"{text!r}: write host, host:port, *.domain, 10.1.0.0/16 or [fd00::]/8")
    if "*" in host.removeprefix("*."):
        raise ValueError(f"{text!r}: * stands for the first part of a name alone, as *.example.org")
    try:
        return BrokerPattern(host, ip_network(host), port)
    except ValueError:
        if "/" in host:
            raise ValueError(f"{text!r} is no network: write 10.1.0.0/16") from None
        return BrokerPattern(host, None, port)


def _split(text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        bits, _, port = rest.partition(":")
        return host + bits, int(port) if port else None
    host, colon, port = text.partition(":")
    if colon and ":" not in port:
        return host, int(port)
    return text, None


def is_named(ip: str, patterns: Sequence[str]) -> bool:
    """Returns whether a pattern of the operator matches. `ip`: the broker's URL as members receive
    it."""
    parts = urlsplit(ip)
    host = (parts.hostname or "").lower()
    return any(broker_pattern(each).matches(host, parts.port) for each in patterns)


PREFIX: Final = "HOLDFAST_TOPOLOGY__"
TOKEN_CHARACTERS_MIN: Final = 16


class ManagerSettings(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The validated settings of a manager."""

    bind: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    """0 lets the system choose a free one."""
    db_url: str = "sqlite:///holdfast-topology.db"
    token: str = ""
    """The operator's; empty: nobody is asked for one."""
    token_file: str = ""
    allow_anonymous: bool = False
    """Without a token, serve other machines, too."""
    certificate: str = ""
    """PEM file of this server's chain; `key` goes with it."""
    key: str = ""
    client_ca: str = ""
    """PEM file of who signs those of operators and members; empty: none is asked for."""
    access: Literal["", "token", "certificate", "either", "both"] = ""
    """Credentials of callers: token, certificate, either or both. Empty, with `client_ca`: both if
    there is a token, else a certificate; without it, a token if there is one."""
    operators: list[str] = field(default_factory=list)
    """Names of the operators' certificates. With both: empty lets the token alone decide."""
    core_ann_interval: str = "10s"
    beacon_interval: str = "10s"
    redundancy: Annotated[int, Meta(ge=1, le=16)] = 2
    degree_max: Annotated[int, Meta(ge=2, le=64)] = 5
    broker_username: str = ""
    """Name at the members' brokers; empty: without a name."""
    broker_password_file: str = ""
    brokers: list[str] = field(default_factory=list)
    """Hosts, addresses and networks where members' brokers are, with or without a port. Others are
    taken from the operator, and without a broker_username at the caller's own address."""
    probe_interval_s: Annotated[float, Meta(ge=0.05, le=3600)] = 5.0
    probe_timeout_s: Annotated[float, Meta(ge=0.05, le=3600)] = 3.0

    @property
    def core_ann_interval_ns(self) -> int:
        return duration_ns(self.core_ann_interval)

    @property
    def beacon_interval_ns(self) -> int:
        return duration_ns(self.beacon_interval)

    def broker_password(self) -> bytes | None:
        """Reads the password, or returns None without one. Raises `ConfigError`."""
        if not self.broker_password_file:
            return None
        return _first_line(self.broker_password_file).encode()


class ManagerTables(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The one table of a manager's settings."""

    topology: ManagerSettings = field(default_factory=ManagerSettings)


def load(environ: Mapping[str, str], overrides: Mapping[str, str] | None = None) -> ManagerSettings:
    """Reads and checks the settings. Raises `ConfigError`.

    `overrides` are the texts of the command line, by the names of the fields.
    """
    kind = inspect.type_info(ManagerSettings)
    given = {
        f"topology.{name}": read_text(find_type(kind, [name]), text)
        for name, text in (overrides or {}).items()
    }
    return load_settings(
        ManagerTables,
        _problems,
        environ=environ,
        overrides=given,
        tables=ManagerTables.__struct_fields__,
        complete=_complete,
    ).topology


def _complete(tables: ManagerTables) -> ManagerTables:
    """Reads the operator's token, and chooses the access that goes with the settings."""
    settings = tables.topology
    token = _first_line(settings.token_file) if settings.token_file else settings.token
    access = settings.access
    if not access:
        access = "token" if not settings.client_ca else "both" if token else "certificate"
    return ManagerTables(topology=replace(settings, token=token, access=access))


def _first_line(file: str) -> str:
    text = first_word(file)
    if not text:
        raise ConfigError(f"{file}: its first line is empty")
    return text


def _problems(tables: ManagerTables) -> Iterator[Problem]:
    settings = tables.topology
    for key, text in [*_value_problems(settings), *_access_problems(settings)]:
        yield f"topology.{key}", f": {text}"


def _value_problems(settings: ManagerSettings) -> Iterator[Problem]:
    for key in ("core_ann_interval", "beacon_interval"):
        try:
            duration_ns(getattr(settings, key))
        except ValueError as error:
            yield key, str(error)
    for name in settings.brokers:
        try:
            broker_pattern(name)
        except ValueError as error:
            yield "brokers", str(error)
    try:
        file_of(settings.db_url)
    except ValueError as error:
        yield "db_url", str(error)
    if settings.broker_password_file and not settings.broker_username:
        yield "broker_password_file", "goes with broker_username, which is missing"
    else:
        settings.broker_password()


def _access_problems(settings: ManagerSettings) -> Iterator[Problem]:
    if bool(settings.certificate) != bool(settings.key):
        yield "certificate", "certificate and key go together: one of them is missing"
    if settings.token and len(settings.token) < TOKEN_CHARACTERS_MIN:
        yield "token", f"has fewer than {TOKEN_CHARACTERS_MIN} characters: take a random one"
    if not settings.client_ca:
        if settings.access != "token" or settings.operators:
            key = "operators" if settings.access == "token" else "access"
            yield key, f"takes {PREFIX}CLIENT_CA: the PEM file of who signs the certificates"
    elif not settings.certificate:
        yield "client_ca", f"takes HTTPS: set {PREFIX}CERTIFICATE and {PREFIX}KEY, too"
    else:
        yield from _certificate_access_problems(settings)
    is_open = settings.access == "token" and not settings.token
    if is_open and not settings.allow_anonymous and not is_loopback(settings.bind):
        yield (
            "bind",
            f"anybody who reaches {settings.bind} could change the federation: set"
            f" {PREFIX}TOKEN_FILE or {PREFIX}CLIENT_CA, or {PREFIX}ALLOW_ANONYMOUS=true if that is"
            " what you want",
        )


def _certificate_access_problems(settings: ManagerSettings) -> Iterator[Problem]:
    access, token = settings.access, settings.token
    match access:
        case "token":
            yield "access", f"{access} asks for no certificates: leave client_ca out"
        case "certificate" if token:
            yield "access", f"{access} asks for no token: take either or both"
        case "certificate" if not settings.operators:
            yield (
                "operators",
                "there would be no operator: name the operators' certificates in"
                f" {PREFIX}OPERATORS, separated by commas",
            )
        case "either" | "both" if not token:
            yield "access", f"{access} takes a token: set {PREFIX}TOKEN_FILE"
