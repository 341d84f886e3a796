"""Settings of the edge: how a federator connects to its broker."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.client.identity import IDENTITY_PROPERTY
from holdfast.client.options import LEVEL_5, Options
from holdfast.client.reconnect import Reconnect
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.properties import Properties
from holdfast_federation.sidecar.edge_mqtt.interest_sources import SourceSettings

RECEIVE_MAXIMUM_MAX: Final = 65_535
REQUESTS_MAX: Final = 256
"""The packet ids reserved for requests, in addition to those of messages."""


@dataclass(frozen=True)
class EdgeSettings:
    """The connection, the filters and the limits of one edge."""

    servers: tuple[str, ...]
    """The URLs of the broker, several if it is a cluster."""
    directory: Path
    """The directory of the edge's state: its subscriptions at the broker, and the interest."""
    level: int = LEVEL_5
    """The protocol level: 5, or 4 for MQTT 3.1.1."""
    client_id: str = ""
    """The client id of the session. Empty: made at the first start.

    A changed id leaves the old session at the broker until it expires.
    """
    username: str | None = None
    password: bytes | None = None
    tls: ssl.SSLContext | None = None
    session_expiry_s: int = 7 * 86_400
    """The time in seconds that the broker keeps messages for an absent federator (MQTT 5)."""
    window_messages: int = 10_000
    """The most unacknowledged messages from the broker (MQTT 5: Receive Maximum).

    The window is wide, because Mosquitto 2.0 sends out of order after it was full.
    """
    inflight_messages: int = 1_000
    """The most unacknowledged messages to the broker, which may limit them further."""
    export_filters: tuple[str, ...] = ("#",)
    import_filters: tuple[str, ...] = ("#",)
    interest: tuple[str, ...] = ()
    """Filters that count as subscribed at this broker, always."""
    sources: SourceSettings = field(default_factory=SourceSettings)
    keep_alive_s: int = 30
    reconnect: Reconnect = field(default_factory=Reconnect)
    wait_s: float = 10.0
    """The time in seconds for a reply of the broker, and for a fence to come back."""

    def options(
        self,
        client_id: str,
        is_session: bool,
        is_bridge: bool,
        on_unreadable: Callable[[str], None],
    ) -> Options:
        """Makes the options of one client.

        `is_session`: the connection that carries messages; the others start clean each time.
        `on_unreadable`: called for a message that violates MQTT or exceeds the limits.
        """
        properties: Properties = {}
        if self.level == LEVEL_5:
            # Receive Maximum is not enforced on arrival: Mosquitto 2.0 exceeds it when it repeats
            # messages. Without it Mosquitto sends 20, queues 1,000, and drops retained messages
            # beyond that.
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
