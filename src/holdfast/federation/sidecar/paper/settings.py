"""The settings of a federator of the published protocol, from the published environment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.client.servers import parse_server
from holdfast.config.first_line import UnreadableFile, first_line, first_word
from holdfast.federation.manager.durations import duration_ns
from holdfast.federation.paper.config import BadConfig, PaperConfig
from holdfast.federation.sidecar.settings import SettingsError

Text = TypeVar("Text", str, bytes)

JOIN_PATH = "/api/v1/join"
"""The manager's path for joining. Some configurations include it in the URL."""
MANAGER_FILES_PREFIX = "HOLDFAST_FEDERATION__"
"""The prefix of variables that the published environment lacks, as for other members."""
_MANAGER_FILES = ("manager_token_file", "manager_ca", "manager_certificate", "manager_key")


@dataclass(frozen=True)
class PaperSettings:
    """The validated settings of a federator of the published protocol."""

    broker: str = "tcp://127.0.0.1:1883"
    """The URL of the member's own broker, which must speak MQTT 5."""
    advertised: str = ""
    """The URL at which other federators reach the broker. Required with a manager."""
    manager: str = ""
    """The URL of the manager. Empty: `id` and `neighbours` are used instead."""
    manager_token_file: str = ""
    """The file whose first line is sent as a bearer token."""
    manager_ca: str = ""
    """The PEM file of the authority, for https."""
    manager_certificate: str = ""
    """The PEM file to present to the manager; it needs `manager_key`."""
    manager_key: str = ""
    id: int | None = None
    neighbours: Mapping[int, str] = field(default_factory=dict)
    """The addresses of the neighbours' brokers by id, only without a manager."""
    core_ann_interval_s: float | None = None
    """The interval in seconds.

    None, here and in the next two: the manager's value, or the default of `PaperConfig`.
    """
    beacon_interval_s: float | None = None
    redundancy: int | None = None
    qos: int = 2
    username: str | None = None
    """The user name at all brokers."""
    password_file: str = ""
    epoch: int | None = None
    """A number higher than at every earlier start.

    None: milliseconds since 1970. A clock that was set back then makes the first messages count as
    old ones.
    """

    def __post_init__(self) -> None:
        """Check the settings. Raises `SettingsError` if they are incomplete or contradictory."""
        for name in ("broker", "advertised"):
            _check_url(name, getattr(self, name))
        for address in self.neighbours.values():
            _check_url("neighbours", address)
        if self.manager:
            if not self.manager.startswith(("http://", "https://")):
                raise SettingsError(f"manager = {self.manager!r}: write http://host:8080")
            if not self.advertised:
                raise SettingsError(
                    "advertised (ADVERTISED_LISTENER) is missing: the URL by which other"
                    " federators reach this broker, as tcp://host:1883"
                )
        elif self.id is None:
            raise SettingsError(
                "manager (TOPOLOGY_MANAGER_URL) is missing: its URL, as http://host:8080; or give"
                " id and neighbours"
            )
        if bool(self.manager_certificate) != bool(self.manager_key):
            raise SettingsError("manager_certificate and manager_key go together: one is missing")
        if self.manager_certificate and not self.manager.startswith("https://"):
            raise SettingsError("manager_certificate: is for a manager with https://")
        if self.password_file and self.username is None:
            raise SettingsError("password_file: goes with username, which is missing")
        self.config(10.0, 10.0, 2)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str], overrides: Mapping[str, object] | None = None
    ) -> "PaperSettings":
        """Read the environment. `overrides`, by field name, take precedence.

        Raises `SettingsError` when a value is not allowed.
        """
        values: dict[str, object] = {}
        if url := environ.get("TOPOLOGY_MANAGER_URL"):
            url = url.removesuffix("/").removesuffix(JOIN_PATH)
            values["manager"] = url if "://" in url else f"http://{url}"
        if listener := environ.get("ADVERTISED_LISTENER"):
            values["advertised"] = listener if "://" in listener else f"tcp://{listener}"
        if port := environ.get("MOSQUITTO_PORT"):
            values["broker"] = f"tcp://127.0.0.1:{port}"
        for name, key in (
            ("CORE_ANN_INTERVAL", "core_ann_interval_s"),
            ("BEACON_INTERVAL", "beacon_interval_s"),
        ):
            if text := environ.get(name):
                values[key] = _seconds(name, text)
        if text := environ.get("FED_REDUNDANCY"):
            if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 16:
                raise SettingsError(f"FED_REDUNDANCY: {text!r}: give a whole number from 1 to 16")
            values["redundancy"] = int(text)
        for field_name in _MANAGER_FILES:
            if text := environ.get(MANAGER_FILES_PREFIX + field_name.upper()):
                values[field_name] = text
        values |= overrides or {}
        return cls(**values)  # type: ignore[arg-type]

    def config(
        self, core_ann_interval_s: float, beacon_interval_s: float, redundancy: int
    ) -> PaperConfig:
        """Combine the manager's values with the settings, which take precedence.

        Raises `SettingsError` when the result is not allowed.
        """
        interval_s = self.core_ann_interval_s or core_ann_interval_s
        try:
            return PaperConfig(
                redundancy=self.redundancy or redundancy,
                core_ann_interval_s=interval_s,
                beacon_interval_s=self.beacon_interval_s or beacon_interval_s,
                qos=self.qos,
                answer_delay_s=min(PaperConfig.answer_delay_s, interval_s / 20),
            )
        except BadConfig as error:
            raise SettingsError(str(error)) from None

    def password(self) -> bytes | None:
        """Read the password, or return None without one. Raises `SettingsError`."""
        return _read(first_line, self.password_file) if self.password_file else None

    def manager_token(self) -> str:
        """Read the manager's token, "" without one. Raises `SettingsError`."""
        return _read(first_word, self.manager_token_file) if self.manager_token_file else ""


def _check_url(name: str, text: str) -> None:
    try:
        if text:
            parse_server(text)
    except ValueError as error:
        raise SettingsError(f"{name}: {error}") from None


def _seconds(name: str, text: str) -> float:
    try:
        return duration_ns(text) / 1e9
    except ValueError as error:
        raise SettingsError(f"{name}: {error}") from None


def _read(kind: Callable[[str], Text], file: str) -> Text:
    try:
        return kind(file)
    except UnreadableFile as error:
        raise SettingsError(str(error)) from None
