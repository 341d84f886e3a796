"""Settings that all members of a federation share, and the published names."""

from typing import Final

from holdfast.config.durations import duration_ns
from holdfast.config.federation import Federation
from holdfast.federation.core.config import FederationConfig
from holdfast.federation.core.policy import UNLIMITED, LinkPolicy

JOIN_PATH: Final = "/api/v1/join"
"""The manager's path for joining. Some configurations include it in the URL."""


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
