"""The state of an edge that a restart keeps: its name at the broker, the subscriptions that the
broker may have of it, and the recent interest of clients."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from holdfast.federation.sidecar.edge_mqtt.interest_sources import InterestSources
from holdfast.federation.sidecar.edge_mqtt.settings import EdgeSettings
from holdfast.server.peers.complaints import Complaints
from holdfast.storage.files.filesystem import OsFileSystem, read_whole, write_whole

FILE: Final = "edge.json"


class BadState(Exception):
    """The file is not what an edge writes. The text says what to do."""


class EdgeState(msgspec.Struct):
    token: str
    """A random name, of this directory: 10 hexadecimal digits."""
    subscribed: dict[str, int] = msgspec.field(default_factory=dict)
    """Filters that the broker may have, with the subscription identifier of each."""
    interest: list[tuple[str, str, str, float]] = msgspec.field(default_factory=list)
    """As `InterestSources.snapshot`, of `written_at`."""
    written_at: float = 0.0
    """Unix time."""

    def remembered_interest(self) -> list[tuple[str, str, str, float]]:
        """With the seconds that are left of each now."""
        gone_s = max(0.0, time.time() - self.written_at)
        return [
            (source, owner, filter, left_s - gone_s)
            for source, owner, filter, left_s in self.interest
            if left_s > gone_s
        ]


class StateFile:
    """Blocking."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._files = OsFileSystem(directory)

    def load(self) -> EdgeState:
        """Raises BadState, OSError."""
        self._files.make_folder(".")
        try:
            return msgspec.json.decode(read_whole(self._files, FILE), type=EdgeState)
        except FileNotFoundError:
            state = EdgeState(secrets.token_hex(5))
            self.save(state)
            return state
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadState(
                f"{self._path}: {error}; delete it: the federator then has another name at its"
                " broker, and what waits there under the old one is lost"
            ) from None

    def save(self, state: EdgeState) -> None:
        """Durably. Raises OSError."""
        state.written_at = time.time()
        write_whole(self._files, FILE, [msgspec.json.encode(state)])


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
