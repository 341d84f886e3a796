"""Settings of `holdfast federation sidecar`.

The tables are [federation], as in a broker's configuration, [edge] for the broker beside it, and
[admin]. `holdfast.config.sources` reads them.
"""

import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from holdfast.addresses import ADDRESS, is_loopback, split_address
from holdfast.client.servers import Server, parse_server
from holdfast.config.federation import Federation, federation_problems
from holdfast.config.first_line import first_line
from holdfast.config.problem import ConfigError, Problem, shown
from holdfast.config.sources import Overrides, load_settings
from holdfast.protocol.topics.names import InvalidFilter, check_filter
from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.policy import UNLIMITED, LinkPolicy
from holdfast_federation.sidecar.edge_mqtt.interest_sources import BEACONS_PER_TTL, SourceSettings
from holdfast_federation.sidecar.edge_mqtt.settings import EdgeSettings


def member_config(settings: Federation) -> FederationConfig:
    """Derives the member's configuration. Its timeouts scale with `hello_s`."""
    asks = FederationConfig.probe_after_s / FederationConfig.hello_s
    sooner = FederationConfig.busy_probe_after_s / FederationConfig.hello_s
    return FederationConfig(
        hello_s=settings.hello_s,
        probe_after_s=asks * settings.hello_s,
        busy_probe_after_s=sooner * settings.hello_s,
        degree_min=settings.degree,
        redundancy=settings.redundancy,
        queue_messages_max=settings.queue_messages,
        queue_bytes_max=settings.queue_bytes,
        custody_bytes_max=settings.custody_bytes,
        queue_age_max_s=settings.queue_age_s,
        forget_s=settings.forget_s,
    )


def link_policy(settings: Federation) -> LinkPolicy:
    """Derives the limits that apply to each neighbour."""
    return LinkPolicy(
        payload_bytes_max=settings.payload_bytes,
        messages_per_s=settings.messages_per_s or UNLIMITED,
        bytes_per_s=settings.bytes_per_s or UNLIMITED,
    )


LEVELS: Final = {"5": 5, "3.1.1": 4}
_URL_SCHEMES: Final = {"mqtt": "tcp", "mqtts": "ssl", "ws": "ws", "wss": "wss"}

Filters = list[Annotated[str, Meta(min_length=1)]]


class EdgeTable(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The table [edge]: the broker beside the federator."""

    broker: list[str] = field(default_factory=lambda: ["mqtt://127.0.0.1:1883"])
    """The broker's URL, or several if it is a cluster."""
    protocol: Literal["5", "3.1.1"] = "5"
    client_id: str = ""
    """The client id. Empty: made at the first start."""
    username: str = ""
    password_file: str = ""
    """The file whose first line is the password."""
    ca: str = ""
    """The PEM file of the authority that signed the broker's certificate. Empty: the system's."""
    certificate: str = ""
    """The PEM file to present to the broker; it needs `key`."""
    key: str = ""
    interest: Filters = field(default_factory=list)
    """Filters that count as subscribed at this broker, always."""
    sources: list[Literal["beacon", "interest", "log"]] = field(
        default_factory=lambda: ["beacon", "interest", "log"]
    )
    """Further sources of the filters that this broker's clients subscribe to."""
    beacon_interval_s: Annotated[float, Meta(ge=0.05, le=86_400)] = 10.0
    """The interval in seconds of beacons. A beacon is valid for three intervals."""
    log_ttl_s: Annotated[float, Meta(ge=1, le=604_800)] = 86_400.0
    """The time in seconds that a subscription in the broker's log is valid unless the log ends it.
    """
    session_expiry_s: Annotated[int, Meta(ge=60, le=0xFFFFFFFF)] = 7 * 86_400
    window_messages: Annotated[int, Meta(ge=1, le=65_535)] = 10_000
    inflight_messages: Annotated[int, Meta(ge=1, le=10_000)] = 1_000


class AdminTable(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The table [admin]: status and metrics over HTTP, read only."""

    address: Annotated[
        str, Meta(pattern=rf"^$|{ADDRESS}", description="host:port, or empty for none")
    ] = "127.0.0.1:7884"


class SidecarTables(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The tables of a sidecar's settings."""

    federation: Federation = field(default_factory=Federation)
    edge: EdgeTable = field(default_factory=EdgeTable)
    admin: AdminTable = field(default_factory=AdminTable)


@dataclass(frozen=True)
class SidecarSettings:
    """The validated settings of a sidecar: the member, its edge, and the admin address."""

    federation: Federation
    edge: EdgeSettings
    admin: str
    edge_tls: "EdgeTls | None"


class EdgeTls:
    """The files of [edge] for TLS, and the context of all connections to the broker."""

    def __init__(self, edge: EdgeTable) -> None:
        """Raises `ConfigError`."""
        self._edge = edge
        paths = {"edge.ca": edge.ca, "edge.certificate": edge.certificate, "edge.key": edge.key}
        try:
            self._content = {name: Path(path).read_bytes() for name, path in paths.items() if path}
            self.context = ssl.create_default_context(cafile=edge.ca or None)
            self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"edge.ca, edge.certificate, edge.key: {error}") from None

    def renew(self) -> list[str]:
        """Uses the files as they are now for new connections, and returns the settings of those
        that differ. Raises `ConfigError`, and then nothing has changed."""
        # Another context tries them first: one that fails at the key has lost its certificate.
        before, self._content = self._content, EdgeTls(self._edge)._content
        if self._edge.ca:
            self.context.load_verify_locations(self._edge.ca)
        self._load()
        return [name for name in before if before[name] != self._content[name]]

    def _load(self) -> None:
        if self._edge.certificate:
            self.context.load_cert_chain(self._edge.certificate, self._edge.key)


def load(path: Path | None, environ: Mapping[str, str], overrides: Overrides) -> SidecarSettings:
    """Reads and checks the settings from all three sources.

    `overrides` have the names `table.key`. Raises `ConfigError` when the result cannot be used.
    """
    tables = load_settings(
        SidecarTables,
        _problems,
        path,
        environ,
        overrides,
        tables=SidecarTables.__struct_fields__,
        complete=_complete,
    )
    is_secure = any(parse_server(text).is_secure for text in tables.edge.broker)
    tls = EdgeTls(tables.edge) if is_secure else None
    edge = _edge_settings(tables.edge, tables.federation, tls)
    return SidecarSettings(tables.federation, edge, tables.admin.address, tls)


def _complete(tables: SidecarTables) -> SidecarTables:
    """Derives the broker's URL for the manager from the edge."""
    federation, changes = tables.federation, dict[str, str]()
    if federation.manager and not federation.broker:
        with suppress(ValueError, IndexError):
            changes["broker"] = _url_of(parse_server(tables.edge.broker[0]))
    return replace(tables, federation=replace(federation, **changes))


def _problems(tables: SidecarTables) -> Iterator[Problem]:
    edge, admin = tables.edge, tables.admin.address
    if not edge.broker:
        yield "edge.broker", ": name the broker, as mqtt://127.0.0.1:1883"
    servers = []
    for text in edge.broker:
        try:
            servers.append(parse_server(text))
        except ValueError as error:
            yield "edge.broker", f": {error}"
    for filter in edge.interest:
        try:
            check_filter(filter)
        except InvalidFilter as error:
            yield "edge.interest", f" = {shown(filter)}: {error}"
    if edge.password_file and not edge.username:
        yield "edge.password_file", ": goes with edge.username, which is missing"
    if bool(edge.certificate) != bool(edge.key):
        yield "edge.key", ": edge.certificate and edge.key go together: one of them is missing"
    if (edge.ca or edge.certificate) and not any(server.is_secure for server in servers):
        yield "edge.ca", ": is for TLS: write the broker's URL as mqtts://host"
    if admin and not (is_loopback(admin.rpartition(":")[0]) and split_address(admin)[1] <= 65535):
        yield (
            "admin.address",
            f" = {shown(admin)}: must be of this machine alone, as 127.0.0.1:7884: whoever reaches"
            " it may read everything there",
        )
    yield from federation_problems(tables.federation)


def _url_of(server: Server) -> str:
    return f"{_URL_SCHEMES[server.scheme]}://{server.address}"


def _edge_settings(edge: EdgeTable, settings: Federation, tls: EdgeTls | None) -> EdgeSettings:
    servers = [parse_server(text) for text in edge.broker]
    return EdgeSettings(
        servers=tuple(str(server) for server in servers),
        directory=Path(settings.data),
        level=LEVELS[edge.protocol],
        client_id=edge.client_id,
        username=edge.username or None,
        password=first_line(edge.password_file) if edge.password_file else None,
        tls=None if tls is None else tls.context,
        session_expiry_s=edge.session_expiry_s,
        window_messages=edge.window_messages,
        inflight_messages=edge.inflight_messages,
        export_filters=tuple(settings.export_filters),
        import_filters=tuple(settings.import_filters),
        interest=tuple(edge.interest),
        sources=SourceSettings(
            BEACONS_PER_TTL * edge.beacon_interval_s,
            edge.log_ttl_s,
            "beacon" in edge.sources,
            "interest" in edge.sources,
            "log" in edge.sources,
        ),
    )
