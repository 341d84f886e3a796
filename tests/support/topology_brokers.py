"""Brokers of members that answer as a test says, without a network."""

import asyncio
from collections.abc import Awaitable, Callable


class FakeBrokers:
    def __init__(self) -> None:
        self.round_trips: dict[str, float | None] = {}
        """By address; 1 ms if it is not here."""
        self.on_probe: Callable[[str], Awaitable[None]] | None = None
        """What happens meanwhile."""
        self.dialled: list[str] = []
        self.logged_in: set[str] = set()
        """Where the manager's name and password would be."""

    def _dial(self, ip: str, logs_in: bool) -> None:
        self.dialled.append(ip)
        if logs_in:
            self.logged_in.add(ip)

    async def round_trip_ms(self, ip: str, logs_in: bool) -> float | None:
        self._dial(ip, logs_in)
        await asyncio.sleep(0)
        if self.on_probe is not None:
            await self.on_probe(ip)
        return self.round_trips.get(ip, 1.0)
