"""What an edge knows over restarts, in its file: its name, its subscriptions, what clients want."""

import asyncio
from collections.abc import Mapping

from holdfast.drivers.peer_complaints import Complaints
from holdfast.federator.edge_settings import EdgeSettings
from holdfast.federator.edge_state import EdgeState, StateFile
from holdfast.federator.interest_sources import InterestSources


class EdgeMemory:
    def __init__(self, settings: EdgeSettings, complain: Complaints) -> None:
        """Raises InvalidFilter."""
        self.sources = InterestSources(settings.sources, settings.interest, settings.import_filters)
        self._client_id = settings.client_id
        self._complain = complain
        self._file = StateFile(settings.directory)
        self._state = EdgeState("")
        self._saving = asyncio.Lock()
        self._is_unsaved = False

    async def load(self, now: float) -> None:
        """Raises BadState, OSError."""
        self._state = await asyncio.to_thread(self._file.load)
        own = (self.client_id, self.control_id, self.reader_id)
        self.sources.own_clients = frozenset(own)
        self.sources.restore(self._state.remembered_interest(), now)

    @property
    def token(self) -> str:
        return self._state.token

    @property
    def client_id(self) -> str:
        """At the broker, of the connection that carries messages."""
        return self._client_id or f"federator-{self.token}"

    @property
    def control_id(self) -> str:
        return f"{self.client_id}-c"

    @property
    def reader_id(self) -> str:
        return f"{self.client_id}-r"

    @property
    def subscribed(self) -> Mapping[str, int]:
        return self._state.subscribed

    def take_interest(self) -> tuple[list[str], list[str]]:
        """Filters that are wanted now and were not before, and the other way round."""
        added, removed = self.sources.take_changes()
        self._is_unsaved |= bool(added or removed)
        return added, removed

    async def save_subscriptions(self, held: Mapping[str, int]) -> None:
        """Returns when it is on disk, or cannot be: that is logged."""
        self._state.subscribed = dict(held)
        await self.save()

    async def save_interest(self) -> None:
        if self._is_unsaved:
            await self.save()

    async def save(self) -> None:
        async with self._saving:
            self._is_unsaved = False
            self._state.interest = self.sources.snapshot(asyncio.get_running_loop().time())
            try:
                await asyncio.to_thread(self._file.save, self._state)
            except OSError as error:
                self._complain.say("state", str(error), f"cannot write down its state: {error}")
