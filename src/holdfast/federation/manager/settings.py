"""How a manager is configured, by the environment: the published names, and ours.

Published: CORE_ANN_INTERVAL, BEACON_INTERVAL (Go durations), FED_REDUNDANCY, TOP_MAX_REDUNDANCY;
and DB_URL in place of MONGO_URL. Ours are HOLDFAST_TOPOLOGY__ and the name of a field in capitals;
they win over the published ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from ipaddress import ip_address
from typing import Final, TypeAlias

from holdfast.config.first_line import UnreadableFile, first_word
from holdfast.federation.manager.broker_addresses import broker_pattern
from holdfast.federation.manager.durations import duration_ns
from holdfast.federation.manager.state.databases import SQLITE, check_url

PREFIX: Final = "HOLDFAST_TOPOLOGY__"
PUBLISHED: Final = {
    "CORE_ANN_INTERVAL": "core_ann_interval",
    "BEACON_INTERVAL": "beacon_interval",
    "FED_REDUNDANCY": "redundancy",
    "TOP_MAX_REDUNDANCY": "degree_max",
    "DB_URL": "db_url",
}
STRATEGIES: Final = ("default", "paper")
ACCESSES: Final = ("token", "certificate", "either", "both")
TOKEN_CHARACTERS_MIN: Final = 16


Value: TypeAlias = str | int | float | bool | frozenset[str] | tuple[str, ...]


class ManagerSettingsError(Exception):
    """Wrong configuration; the text says what is wrong and what to do."""


@dataclass(frozen=True)
class ManagerSettings:
    bind: str = "127.0.0.1"
    port: int = 8080
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
    access: str = ""
    """What a caller needs: token, certificate, either or both. Empty, with `client_ca`: both if
    there is a token, else a certificate; without it, a token if there is one."""
    operators: frozenset[str] = frozenset()
    """Names of the operators' certificates. With both: empty lets the token alone decide."""
    core_ann_interval: str = "10s"
    beacon_interval: str = "10s"
    redundancy: int = 2
    degree_max: int = 5
    strategy: str = "default"
    broker_username: str = ""
    """How the manager logs in to the members' brokers; empty: without a name."""
    broker_password_file: str = ""
    brokers: tuple[str, ...] = ()
    """Hosts, addresses and networks where members' brokers are, with or without a port. Others are
    taken from the operator, and without a broker_username at the caller's own address."""
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 3.0

    @property
    def core_ann_interval_ns(self) -> int:
        return duration_ns(self.core_ann_interval)

    @property
    def beacon_interval_ns(self) -> int:
        return duration_ns(self.beacon_interval)

    def broker_password(self) -> bytes | None:
        """Raises SettingsError."""
        if not self.broker_password_file:
            return None
        return _first_line(self.broker_password_file).encode()


def load(environ: Mapping[str, str], overrides: Mapping[str, str] | None = None) -> ManagerSettings:
    """`overrides` (of the command line) win; they are named by the fields. Raises SettingsError."""
    texts: dict[str, tuple[str, str]] = {}
    for name, field in PUBLISHED.items():
        if name in environ:
            texts[field] = (environ[name], name)
    known = {field.name for field in fields(ManagerSettings)}
    for name, text in environ.items():
        if name.startswith(PREFIX):
            field = name.removeprefix(PREFIX).lower()
            if field not in known:
                raise ManagerSettingsError(f"{name}: there is no such setting; {_names(known)}")
            texts[field] = (text, name)
    texts |= {field: (text, f"--{field}") for field, text in (overrides or {}).items()}
    if environ.get("MONGO_URL") and "db_url" not in texts:
        raise ManagerSettingsError(
            "MONGO_URL: this manager does not use MongoDB, it keeps its state in SQLite or"
            f" PostgreSQL; unset it, and set DB_URL={SQLITE}/path/to/topology.db (members join"
            " again by themselves)"
        )
    return _checked(texts)


def _names(known: set[str]) -> str:
    return "there are " + ", ".join(PREFIX + name.upper() for name in sorted(known))


def _checked(texts: Mapping[str, tuple[str, str]]) -> ManagerSettings:
    values: dict[str, Value] = {}
    for field, (text, origin) in texts.items():
        try:
            values[field] = _value(field, text)
        except ValueError as error:
            raise ManagerSettingsError(f"{origin}: {error}") from None
    settings = ManagerSettings(**values)  # type: ignore[arg-type]
    if bool(settings.certificate) != bool(settings.key):
        raise ManagerSettingsError("certificate and key go together: one of them is missing")
    if settings.token_file:
        settings = _with_token_of_file(settings, values)
    if settings.broker_password_file and not settings.broker_username:
        raise ManagerSettingsError(
            "broker_password_file goes with broker_username, which is missing"
        )
    settings.broker_password()
    if settings.token and len(settings.token) < TOKEN_CHARACTERS_MIN:
        raise ManagerSettingsError(
            f"the token has fewer than {TOKEN_CHARACTERS_MIN} characters: take a random one"
        )
    settings = _with_access(settings)
    is_open = settings.access == "token" and not settings.token
    if is_open and not settings.allow_anonymous and not _is_loopback(settings.bind):
        raise ManagerSettingsError(
            f"anybody who reaches {settings.bind} could change the federation: set"
            f" {PREFIX}TOKEN_FILE or {PREFIX}CLIENT_CA, or {PREFIX}ALLOW_ANONYMOUS=true if that is"
            " what you want"
        )
    return settings


def _with_access(settings: ManagerSettings) -> ManagerSettings:
    """Says what is needed, and that what it takes is there. Raises SettingsError."""
    if not settings.client_ca:
        if settings.access not in ("", "token") or settings.operators:
            raise ManagerSettingsError(
                f"access by certificates takes {PREFIX}CLIENT_CA: the PEM file of who signs them"
            )
        return replace(settings, access="token")
    if not settings.certificate:
        raise ManagerSettingsError(
            f"client_ca takes HTTPS: set {PREFIX}CERTIFICATE and {PREFIX}KEY, too"
        )
    access = settings.access or ("both" if settings.token else "certificate")
    match access:
        case "token":
            raise ManagerSettingsError("access=token asks for no certificates: leave client_ca out")
        case "certificate" if settings.token:
            raise ManagerSettingsError("access=certificate asks for no token: take either or both")
        case "certificate" if not settings.operators:
            raise ManagerSettingsError(
                f"nobody would be the operator: name the operators' certificates in"
                f" {PREFIX}OPERATORS, separated by commas"
            )
        case "either" | "both" if not settings.token:
            raise ManagerSettingsError(f"access={access} takes a token: set {PREFIX}TOKEN_FILE")
    return replace(settings, access=access)


def _with_token_of_file(settings: ManagerSettings, values: dict[str, Value]) -> ManagerSettings:
    token = _first_line(settings.token_file)
    return ManagerSettings(**{**values, "token": token})  # type: ignore[arg-type]


def _first_line(file: str) -> str:
    """Raises SettingsError."""
    try:
        text = first_word(file)
    except UnreadableFile as error:
        raise ManagerSettingsError(str(error)) from None
    if not text:
        raise ManagerSettingsError(f"{file}: its first line is empty")
    return text


def _value(field: str, text: str) -> Value:
    """Raises ValueError."""
    match field:
        case "port":
            return _whole(text, 0, 65535)
        case "redundancy":
            return _whole(text, 1, 16)
        case "degree_max":
            return _whole(text, 2, 64)
        case "probe_interval_s" | "probe_timeout_s":
            return _seconds(text)
        case "allow_anonymous":
            if text.lower() not in ("true", "false"):
                raise ValueError(f"{text!r} is neither true nor false")
            return text.lower() == "true"
        case "core_ann_interval" | "beacon_interval":
            duration_ns(text)
        case "strategy" if text not in STRATEGIES:
            raise ValueError(f"{text!r}: choose {' or '.join(STRATEGIES)}")
        case "access" if text not in ACCESSES:
            raise ValueError(f"{text!r}: choose {', '.join(ACCESSES[:-1])} or {ACCESSES[-1]}")
        case "operators":
            return frozenset(name.strip() for name in text.split(",") if name.strip())
        case "brokers":
            names = tuple(name.strip() for name in text.split(",") if name.strip())
            for name in names:
                broker_pattern(name)
            return names
        case "db_url":
            check_url(text)
    return text


def _whole(text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
        raise ValueError(f"{text!r}: give a whole number from {least} to {most}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 3600:
        raise ValueError(f"{text!r}: give seconds, from 0.05 to 3600")
    return value


def _is_loopback(bind: str) -> bool:
    try:
        return ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        return bind == "localhost"
