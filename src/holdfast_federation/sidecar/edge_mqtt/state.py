"""Stores an edge's state on disk: its client id, its subscriptions and the recent interest."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from holdfast.io.peers.complaints import Complaints
from holdfast.log.files.filesystem import OsFileSystem, read_file, replace_file
from holdfast_federation.sidecar.edge_mqtt.interest_sources import InterestSources
from holdfast_federation.sidecar.edge_mqtt.settings import EdgeSettings

FILE: Final = "edge.json"


class BadState(Exception):
    """The file is not in the form that an edge writes. The text says what to do."""


class EdgeState(msgspec.Struct):
    """The content of the state file."""

    token: str
    """A random name of this directory: 10 hexadecimal digits."""
    subscribed: dict[str, int] = msgspec.field(default_factory=dict)
    """The filters that the broker may have, with the subscription identifier of each."""
    interest: list[tuple[str, str, str, float]] = msgspec.field(default_factory=list)
    """The result of `InterestSources.snapshot` at `written_at`.

    A start restores it with the validity that was left at the write. The time since then does not
    count, because renewals are not written and none is received while the process is down.
    """
    written_at: float = 0.0
    """The Unix time in seconds of the last write."""


class StateFile:
    """The state file of one directory. Calls block."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._files = OsFileSystem(directory)

    def load(self) -> EdgeState:
        """Reads the file, or creates it. Raises `BadState` or `OSError` if that fails."""
        self._files.make_folder(".")
        try:
            return msgspec.json.decode(read_file(self._files, FILE), type=EdgeState)
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
        """Writes the file durably. Raises `OSError` if that fails."""
        state.written_at = time.time()
        replace_file(self._files, FILE, [msgspec.json.encode(state)])


class EdgeMemory:
    """The state of a running edge, and its writes in a thread."""

    def __init__(self, settings: EdgeSettings, complain: Complaints) -> None:
        """Prepares an empty state. Raises `InvalidFilter` for a bad static filter."""
        self.sources = InterestSources(settings.sources, settings.interest, settings.import_filters)
        self._client_id = settings.client_id
        self._complain = complain
        self._file = StateFile(settings.directory)
        self._state = EdgeState("")
        self._saving = asyncio.Lock()

    async def load(self, now: float) -> None:
        """Reads the state and restores the interest. Raises `BadState` or `OSError`."""
        self._state = await asyncio.to_thread(self._file.load)
        own = (self.client_id, self.control_id, self.reader_id)
        self.sources.own_clients = frozenset(own)
        self.sources.restore(self._state.interest, now)

    @property
    def token(self) -> str:
        return self._state.token

    @property
    def client_id(self) -> str:
        """The client id of the connection that carries messages."""
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

    async def take_interest(self) -> tuple[list[str], list[str]]:
        """Returns filters that began to be wanted, and those that ended, since the last call. They
        are on disk, or the failure is logged."""
        added, removed = self.sources.take_changes()
        if added or removed or self.sources.is_longer:
            await self.save()
        return added, removed

    async def save_subscriptions(self, held: Mapping[str, int]) -> None:
        """Saves the subscriptions. Returns when they are on disk, or the failure is logged."""
        self._state.subscribed = dict(held)
        await self.save()

    async def save(self) -> None:
        """Saves the state. Writes do not overlap, so the newest one is written last."""
        async with self._saving:
            self._state.interest = self.sources.snapshot(asyncio.get_running_loop().time())
            try:
                await asyncio.to_thread(self._file.save, self._state)
            except OSError as error:
                self._complain.say("state", str(error), f"cannot write down its state: {error}")
