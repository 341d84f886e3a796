"""How a federator talks to the broker beside it."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.client.identity import IDENTITY_PROPERTY
from holdfast.client.options import LEVEL_5, Options
from holdfast.client.reconnect import Reconnect
from holdfast.federation.sidecar.edge_mqtt.interest_sources import SourceSettings
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.properties import Properties

RECEIVE_MAXIMUM_MAX: Final = 65_535
REQUESTS_MAX: Final = 256
"""Packet ids beside those of messages."""


@dataclass(frozen=True)
class EdgeSettings:
    servers: tuple[str, ...]
    """URLs of the broker; several if it is a cluster."""
    directory: Path
    """For what the edge remembers: which subscriptions the broker has, and the interest."""
    level: int = LEVEL_5
    """5, or 4 for MQTT 3.1.1."""
    client_id: str = ""
    """Of the session at the broker; empty: made at the first start. Another one leaves the
    session of before behind, until it expires."""
    username: str | None = None
    password: bytes | None = None
    tls: ssl.SSLContext | None = None
    session_expiry_s: int = 7 * 86_400
    """How long the broker keeps what is to leave while the federator is away (MQTT 5)."""
    window_messages: int = 10_000
    """Not acknowledged to the broker (MQTT 5: Receive Maximum). Mosquitto 2.0 sends out of order
    when this window has been full, so it is wide."""
    inflight_messages: int = 1_000
    """On their way to the broker without an acknowledgement; its own limit counts, too."""
    export_filters: tuple[str, ...] = ("#",)
    import_filters: tuple[str, ...] = ("#",)
    interest: tuple[str, ...] = ()
    """Filters that this broker's clients want, always."""
    sources: SourceSettings = field(default_factory=SourceSettings)
    keep_alive_s: int = 30
    reconnect: Reconnect = field(default_factory=Reconnect)
    wait_s: float = 10.0
    """For an answer of the broker, and for a message of our own to come back."""

    def options(
        self,
        client_id: str,
        is_session: bool,
        is_bridge: bool,
        on_unreadable: Callable[[str], None],
    ) -> Options:
        """`is_session`: of the connection that carries the messages; the others begin anew each
        time. `on_unreadable`: the broker has passed on a message that is against the rules of
        MQTT, or beyond our bounds."""
        properties: Properties = {}
        if self.level == LEVEL_5:
            # Asked for, not insisted on: Mosquitto 2.0 sends more when it sends again. Without it
            # Mosquitto sends 20, queues 1,000, and drops what is retained beyond that.
            window = self.window_messages if is_session else RECEIVE_MAXIMUM_MAX
            properties[pr.RECEIVE_MAXIMUM] = window
        if is_session and self.level == LEVEL_5:
            properties[pr.USER_PROPERTY] = [(IDENTITY_PROPERTY, "?"), (IDENTITY_PROPERTY, "?2")]
        return Options(
            level=self.level,
            client_id=client_id,
            clean_start=not is_session,
            session_expiry_s=self.session_expiry_s if is_session else 0,
            keep_alive_s=self.keep_alive_s,
            username=self.username,
            password=self.password,
            inflight_max=self.inflight_messages,
            packet_ids_max=self.inflight_messages + REQUESTS_MAX if is_session else 65535,
            queue_messages_max=self.inflight_messages,
            is_bridge=is_bridge,
            manual_acknowledge=is_session,
            on_unreadable=on_unreadable,
            properties=properties,
        )
