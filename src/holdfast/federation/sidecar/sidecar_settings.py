"""The settings of `holdfast federation sidecar`: file, then environment, then command line.

A later source overrides an earlier one.

- File: TOML with the tables [federation], as in a broker's configuration, [edge] for the broker
  beside it, and [admin].
- Environment: the published names, then HOLDFAST_FEDERATION__KEY, HOLDFAST_EDGE__KEY and
  HOLDFAST_ADMIN__KEY. Commas separate the entries of a list.
- Command line: the same keys.
"""

import ssl
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, field, inspect

from holdfast.client.servers import SECURE_SCHEMES, Server, parse_server
from holdfast.config.addresses import ADDRESS, is_any, is_loopback
from holdfast.config.check import problems
from holdfast.config.first_line import UnreadableFile, first_line
from holdfast.config.problem import shown
from holdfast.federation.manager.durations import duration_ns
from holdfast.federation.sidecar.edge_mqtt.interest_sources import BEACONS_PER_TTL, SourceSettings
from holdfast.federation.sidecar.edge_mqtt.settings import EdgeSettings
from holdfast.federation.sidecar.settings import Settings, SettingsError
from holdfast.protocol.topics.names import InvalidFilter, check_filter

PREFIX: Final = "HOLDFAST_"
LEVELS: Final = {"5": 5, "3.1.1": 4}
JOIN_PATH: Final = "/api/v1/join"
_URL_SCHEMES: Final = {"mqtt": "tcp", "mqtts": "ssl", "ws": "ws", "wss": "wss"}

Table = TypeVar("Table", bound=Struct)
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


@dataclass(frozen=True)
class SidecarSettings:
    """The validated settings of a sidecar: the member, its edge, and the admin address."""

    federation: Settings
    edge: EdgeSettings
    admin: str


_TABLES: Final[dict[str, type[Struct]]] = {
    "federation": Settings,
    "edge": EdgeTable,
    "admin": AdminTable,
}


def load(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object]
) -> SidecarSettings:
    """Read and check the settings from all three sources.

    `overrides` have the names `table.key`. Raises `SettingsError` when the result cannot be used.
    """
    tree = _read(path) if path is not None else {}
    _published(environ, tree)
    for name, text in sorted(environ.items()):
        table, separator, key = name.removeprefix(PREFIX).lower().partition("__")
        if name.startswith(PREFIX) and separator and table in _TABLES:
            _table(tree, table)[key] = _from_text(table, key, text, name)
    for dotted, value in overrides.items():
        table, _, key = dotted.partition(".")
        _table(tree, table)[key] = value
    return _checked(tree, environ)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None
    unknown = sorted(name for name in tree if name not in _TABLES)
    if unknown:
        raise SettingsError(f"{path}: there is no table {unknown[0]!r}; use {', '.join(_TABLES)}")
    return tree


def _table(tree: dict[str, Any], name: str) -> dict[str, Any]:
    table = tree.setdefault(name, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{name}: must be a table, written as [{name}]")
    return table


def _published(environ: Mapping[str, str], tree: dict[str, Any]) -> None:
    """Copy the environment variables with published names into the tables."""
    federation, edge = _table(tree, "federation"), _table(tree, "edge")
    if url := environ.get("TOPOLOGY_MANAGER_URL"):
        url = url.removesuffix("/").removesuffix(JOIN_PATH)
        federation["manager"] = url if "://" in url else f"http://{url}"
    if listener := environ.get("ADVERTISED_LISTENER"):
        federation["broker"] = listener if "://" in listener else f"tcp://{listener}"
    if interval := environ.get("BEACON_INTERVAL"):
        edge["beacon_interval_s"] = _seconds("BEACON_INTERVAL", interval)
    if interval := environ.get("CORE_ANN_INTERVAL"):
        federation["hello_s"] = min(_seconds("CORE_ANN_INTERVAL", interval), 60.0)
    if degree := environ.get("TOP_MAX_REDUNDANCY"):
        federation["capacity"] = _whole("TOP_MAX_REDUNDANCY", degree, 2, 64)
    if paths := environ.get("FED_REDUNDANCY"):
        federation["redundancy"] = _whole("FED_REDUNDANCY", paths, 1, 3)


def _seconds(name: str, text: str) -> float:
    try:
        return duration_ns(text) / 1e9
    except ValueError as error:
        raise SettingsError(f"{name}: {error}") from None


def _whole(name: str, text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
        raise SettingsError(f"{name}: {text!r}: give a whole number from {least} to {most}")
    return int(text)


def _from_text(table: str, key: str, text: str, name: str) -> object:
    struct = inspect.type_info(_TABLES[table])
    assert isinstance(struct, inspect.StructType)
    kinds = {one.name: one.type for one in struct.fields}
    if key not in kinds:
        raise SettingsError(f"{name}: there is no such setting; there are {', '.join(kinds)}")
    kind = kinds[key]
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.StrType | inspect.LiteralType):
        return text
    if isinstance(kind, inspect.ListType):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # Kept as text, so that the check of types reports which values are allowed.
        return text


def _checked(tree: dict[str, Any], environ: Mapping[str, str]) -> SidecarSettings:
    edge = _converted(EdgeTable, "edge", _table(tree, "edge"))
    admin = _converted(AdminTable, "admin", _table(tree, "admin"))
    servers = _servers(edge)
    federation = _table(tree, "federation")
    if federation.get("manager") and not federation.get("broker"):
        federation["broker"] = _url_of(servers[0])
    _advertise(federation, environ)
    settings = Settings.from_table(federation)
    host, _, port = admin.address.rpartition(":")
    if admin.address and (not is_loopback(host) or int(port) > 65535):
        raise SettingsError(
            f"admin.address = {shown(admin.address)}: must be of this machine alone, as"
            " 127.0.0.1:7884: whoever reaches it may read everything there"
        )
    for filter in edge.interest:
        try:
            check_filter(filter)
        except InvalidFilter as error:
            raise SettingsError(f"edge.interest = {shown(filter)}: {error}") from None
    made = _edge_settings(edge, settings, servers)
    return SidecarSettings(settings, made, admin.address)


def _converted(struct: type[Table], name: str, table: dict[str, Any]) -> Table:
    wrong = [f"{name}.{key}{text}" for key, text in problems(table, inspect.type_info(struct))]
    if wrong:
        raise SettingsError(*wrong)
    return msgspec.convert(table, struct)


def _servers(edge: EdgeTable) -> list[Server]:
    if not edge.broker:
        raise SettingsError("edge.broker: name the broker, as mqtt://127.0.0.1:1883")
    try:
        return [parse_server(text) for text in edge.broker]
    except ValueError as error:
        raise SettingsError(f"edge.broker: {error}") from None


def _url_of(server: Server) -> str:
    return f"{_URL_SCHEMES[server.scheme]}://{server.address}"


def _advertise(federation: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Use the host of ADVERTISED_LISTENER as the member's, unless the settings name one."""
    listen = federation.get("listen")
    listener = environ.get("ADVERTISED_LISTENER")
    if federation.get("advertise") or not isinstance(listen, str) or not listener:
        return
    host, _, port = listen.rpartition(":")
    if host and is_any(host):
        url = listener if "://" in listener else f"tcp://{listener}"
        federation["advertise"] = f"{urlsplit(url).hostname}:{port}"


def _edge_settings(edge: EdgeTable, settings: Settings, servers: list[Server]) -> EdgeSettings:
    if edge.password_file and not edge.username:
        raise SettingsError("edge.password_file: goes with edge.username, which is missing")
    return EdgeSettings(
        servers=tuple(str(server) for server in servers),
        directory=Path(settings.data),
        level=LEVELS[edge.protocol],
        client_id=edge.client_id,
        username=edge.username or None,
        password=_password(edge.password_file),
        tls=_tls(edge, servers),
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


def _password(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return first_line(path)
    except UnreadableFile as error:
        raise SettingsError(str(error)) from None


def _tls(edge: EdgeTable, servers: list[Server]) -> ssl.SSLContext | None:
    if bool(edge.certificate) != bool(edge.key):
        raise SettingsError("edge.certificate and edge.key go together: one of them is missing")
    is_secure = any(server.scheme in SECURE_SCHEMES for server in servers)
    if not is_secure:
        if edge.ca or edge.certificate:
            raise SettingsError("edge.ca: is for TLS: write the broker's URL as mqtts://host")
        return None
    try:
        context = ssl.create_default_context(cafile=edge.ca or None)
        if edge.certificate:
            context.load_cert_chain(edge.certificate, edge.key)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"edge.ca, edge.certificate, edge.key: {error}") from None
    return context
