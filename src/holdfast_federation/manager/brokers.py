"""Connects the manager to members' brokers over MQTT, to measure round trips."""

import asyncio
import time
from secrets import token_hex
from typing import Final, Protocol

from holdfast.client import Client, ClientError, ConnectionRefused, Options
from holdfast.client.options import LEVEL_5, LEVEL_311
from holdfast.client.servers import parse_server
from holdfast.protocol.mqtt import reasons

PROBE_TOPIC: Final = "federator/topology_bm-0"
PADDING: Final = b"#@#" + bytes(64)
_OTHER_LEVEL_REASONS: Final = {
    reasons.UNSUPPORTED_PROTOCOL_VERSION, reasons.PROTOCOL_ERROR, reasons.MALFORMED_PACKET,
}  # fmt: skip


class Brokers(Protocol):
    async def round_trip_ms(self, ip: str, logs_in: bool) -> float | None:
        """Measures the round trip through a broker; None if it fails. `logs_in`: with the manager's
        name and password."""


def broker_url(text: str) -> str:
    """Returns a broker's URL in the form that members receive, the same for the same broker.

    Raises ValueError when the text is no address.
    """
    server = parse_server(text)
    scheme = {"mqtt": "tcp", "mqtts": "ssl"}.get(server.scheme, server.scheme)
    return f"{scheme}://{server.address.lower()}{server.path}"


class MqttBrokers:
    def __init__(
        self, timeout_s: float, username: str | None = None, password: bytes | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._username = username
        self._password = password

    async def round_trip_ms(self, ip: str, logs_in: bool) -> float | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._with_client(ip, logs_in)
        except (ClientError, TimeoutError, ValueError):
            return None

    async def _with_client(self, ip: str, logs_in: bool) -> float:
        """Measures with MQTT 5, or with 3.1.1 if the broker does not support 5."""
        try:
            return await self._at_level(ip, LEVEL_5, logs_in)
        except ConnectionRefused as error:
            if error.reason not in _OTHER_LEVEL_REASONS:
                raise
        return await self._at_level(ip, LEVEL_311, logs_in)

    async def _at_level(self, ip: str, level: int, logs_in: bool) -> float:
        options = Options(
            level=level,
            client_id=f"holdfast-topology-{token_hex(8)}",
            connect_timeout_s=self._timeout_s,
            username=self._username if logs_in else None,
            password=self._password if logs_in else None,
        )
        client = Client(servers=[ip], options=options)
        try:
            await client.connect()
            result = await _round_trip_ms(client)
            await client.disconnect()
            return result
        finally:
            client.abort()


async def _round_trip_ms(client: Client) -> float:
    """Measures one round trip. Others may measure at the same broker at the same time, so only the
    message with this probe's random mark counts."""
    await client.subscribe((PROBE_TOPIC, 1))
    start = time.monotonic_ns()
    mark = b"%d%s%s" % (time.time_ns(), PADDING, token_hex(8).encode())
    await client.publish(PROBE_TOPIC, mark, qos=1)
    async for message in client.messages():
        if message.payload == mark:
            break
    return (time.monotonic_ns() - start) / 1e6
