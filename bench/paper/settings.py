"""Reads the settings of a federator of the published protocol from its environment."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct, field

from bench.paper.config import BadConfig, PaperConfig
from holdfast.client.servers import parse_server
from holdfast.config.durations import duration_ns
from holdfast.config.first_line import first_line, first_word
from holdfast.config.problem import ConfigError, Problem
from holdfast.config.sources import Overrides, load_settings

JOIN_PATH: Final = "/api/v1/join"
"""The manager's path for joining. Some configurations include it in the URL."""


def manager_url(text: str) -> str:
    """The manager's URL, which may be published without a scheme and with the path of a join."""
    url = text.removesuffix("/").removesuffix(JOIN_PATH)
    return url if "://" in url else f"http://{url}"


def listener_url(text: str) -> str:
    """The URL of a broker, which may be published without a scheme."""
    return text if "://" in text else f"tcp://{text}"


def duration_s(text: str) -> float:
    """The seconds of a published duration, as `10s`. Raises `ValueError`."""
    return duration_ns(text) / 1e9


_MANAGER_FILES: Final = ("manager_token_file", "manager_ca", "manager_certificate", "manager_key")
PUBLISHED: Final[Mapping[str, tuple[str, Callable[[str], object]]]] = {
    "TOPOLOGY_MANAGER_URL": ("manager", manager_url),
    "ADVERTISED_LISTENER": ("advertised", listener_url),
    "MOSQUITTO_PORT": ("broker", lambda port: f"tcp://127.0.0.1:{port}"),
    "CORE_ANN_INTERVAL": ("core_ann_interval_s", duration_s),
    "BEACON_INTERVAL": ("beacon_interval_s", duration_s),
    "FED_REDUNDANCY": ("redundancy", int),
    # The published environment lacks these. They have the names of other members.
    **{f"HOLDFAST_FEDERATION__{key.upper()}": (key, str) for key in _MANAGER_FILES},
}


class PaperSettings(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The settings of a federator of the published protocol."""

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
    neighbours: dict[int, str] = field(default_factory=dict)
    """The addresses of the neighbours' brokers by id, only without a manager."""
    core_ann_interval_s: float | None = None
    """The interval in seconds.

    None, here and in the next two: the manager's value, or the default of `PaperConfig`.
    """
    beacon_interval_s: float | None = None
    redundancy: Annotated[int, Meta(ge=1, le=16)] | None = None
    qos: Annotated[int, Meta(ge=0, le=2)] = 2
    username: str | None = None
    """The user name at all brokers."""
    password_file: str = ""
    epoch: int | None = None
    """A number higher than at every earlier start.

    None: milliseconds since 1970. A clock that was set back then makes the first messages count as
    old ones.
    """

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str], overrides: Overrides | None = None
    ) -> "PaperSettings":
        """Reads the environment. `overrides`, by field name, take precedence.

        Raises `ConfigError` when a value is not allowed.
        """
        given: dict[str, object] = {}
        for name, (key, read) in PUBLISHED.items():
            if text := environ.get(name):
                try:
                    given[key] = read(text)
                except ValueError as error:
                    raise ConfigError(f"environment {name}: {error}") from None
        return load_settings(cls, _problems, overrides={**given, **(overrides or {})})

    def config(
        self, core_ann_interval_s: float, beacon_interval_s: float, redundancy: int
    ) -> PaperConfig:
        """Combines the manager's values with the settings, which take precedence.

        Raises `ConfigError` when the result is not allowed.
        """
        interval_s = self.core_ann_interval_s or core_ann_interval_s
        try:
            return PaperConfig(
                redundancy=self.redundancy or redundancy,
                core_ann_interval_s=interval_s,
                beacon_interval_s=self.beacon_interval_s or beacon_interval_s,
                qos=self.qos,
                reply_delay_s=min(PaperConfig.reply_delay_s, interval_s / 20),
            )
        except BadConfig as error:
            raise ConfigError(str(error)) from None

    def password(self) -> bytes | None:
        """Reads the password, or returns None without one. Raises `ConfigError`."""
        return first_line(self.password_file) if self.password_file else None

    def manager_token(self) -> str:
        """Reads the manager's token, "" without one. Raises `ConfigError`."""
        return first_word(self.manager_token_file) if self.manager_token_file else ""


def _problems(settings: PaperSettings) -> Iterator[Problem]:
    for key in ("broker", "advertised"):
        try:
            if text := getattr(settings, key):
                parse_server(text)
        except ValueError as error:
            yield key, f": {error}"
    if settings.manager and not settings.manager.startswith(("http://", "https://")):
        yield "manager", f" = {settings.manager!r}: write http://host:8080"
    elif settings.manager and not settings.advertised:
        yield (
            "advertised",
            " (ADVERTISED_LISTENER) is missing: the URL by which other federators reach this"
            " broker, as tcp://host:1883",
        )
    elif not settings.manager and settings.id is None:
        yield (
            "manager",
            " (TOPOLOGY_MANAGER_URL) is missing: its URL, as http://host:8080; or give id and"
            " neighbours",
        )
    if bool(settings.manager_certificate) != bool(settings.manager_key):
        yield "manager_key", ": manager_certificate and manager_key go together: one is missing"
    if settings.manager_certificate and not settings.manager.startswith("https://"):
        yield "manager_certificate", ": is for a manager with https://"
    if settings.password_file and settings.username is None:
        yield "password_file", ": goes with username, which is missing"
