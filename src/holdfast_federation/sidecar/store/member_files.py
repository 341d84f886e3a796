"""Stores one member's state in files of its own, beside a broker that is not Holdfast's."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol, TypeVar

from holdfast.security.files import replace_file
from holdfast_federation.core.identity import Identity
from holdfast_federation.sidecar.store.file import (
    STORE,
    MemberStoreChange,
    StoredMember,
    StoreFile,
)
from holdfast_federation.sidecar.store.identity import IdentityFile

logger = logging.getLogger("holdfast")

MANAGER: Final = "manager.json"
"""The file with what the topology manager has assigned."""
Result = TypeVar("Result")


class ChangeStore(Protocol):
    """A place where the state of a member survives a crash."""

    async def load(self) -> StoredMember:
        """Opens it and returns its content. Raises `MemberStoreError` and `MemberStoreFull`."""

    async def apply(self, change: MemberStoreChange) -> None:
        """Stores a change durably. Raises `MemberStoreError` and `MemberStoreFull`."""

    async def close(self) -> None: ...


class MemberStorage(ChangeStore, Protocol):
    """The complete durable state of one member, for one start."""

    @property
    def disputed(self) -> int:
        """The last epoch that another run of this member may have used, known after `begin`."""

    @property
    def may_move(self) -> bool:
        """Whether starts of this member may be at several addresses."""

    async def begin(self, id: str) -> Identity:
        """Begins a start and returns its identity, stored durably. `id`: 32 hexadecimal digits that
        it must have, or empty. Raises `BadIdentity`, `MemberStoreError` and `OSError`."""

    async def dispute(self, epoch: int) -> None:
        """Stores that another run has used epochs up to this one, so that the next start has a
        higher one and takes custody over. Raises as `begin`."""

    async def read_assignment(self) -> bytes:
        """Returns what the topology manager has assigned, b"" if nothing. Raises `OSError`."""

    async def write_assignment(self, data: bytes) -> None:
        """Stores it; b"": nothing is assigned any more. Raises `OSError` and `MemberStoreError`."""


class StoreFileThread:
    """A `StoreFile` beside the event loop, in a thread of its own."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file
        self._executor = ThreadPoolExecutor(1, "federation-store")

    async def load(self) -> StoredMember:
        try:
            return await self._call(self._file.open)
        except BaseException:
            self._executor.shutdown(wait=False)
            raise

    async def apply(self, change: MemberStoreChange) -> None:
        await self._call(lambda: self._file.apply(change))

    async def close(self) -> None:
        await self._call(self._file.close)
        self._executor.shutdown(wait=False)

    async def _call(self, operation: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, operation)


class MemberFiles:
    """The `MemberStorage` in a directory, which this process locks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._identity = IdentityFile(directory)
        self._store: StoreFileThread | None = None
        self._node = b""
        self.disputed = 0
        self.may_move = False

    async def begin(self, id: str) -> Identity:
        identity = await asyncio.to_thread(self._identity.begin, id)
        self._node = identity.node
        return identity

    async def load(self) -> StoredMember:
        store = StoreFileThread(StoreFile(self._directory / STORE, self._node))
        found = await store.load()
        self._store = store
        self.disputed = await asyncio.to_thread(self._identity.disputed)
        return found

    async def apply(self, change: MemberStoreChange) -> None:
        assert self._store is not None, "not loaded"
        await self._store.apply(change)

    async def dispute(self, epoch: int) -> None:
        await asyncio.to_thread(self._identity.dispute, epoch)

    async def read_assignment(self) -> bytes:
        return await asyncio.to_thread(read_assignment, self._directory)

    async def write_assignment(self, data: bytes) -> None:
        await asyncio.to_thread(write_assignment, self._directory, data)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()
            self._store = None
        await asyncio.to_thread(self._identity.release)


def read_assignment(directory: Path) -> bytes:
    """Returns the content of MANAGER, b"" if there is none. Blocks."""
    try:
        return (directory / MANAGER).read_bytes()
    except FileNotFoundError:
        return b""


def write_assignment(directory: Path, data: bytes) -> None:
    """Replaces MANAGER durably; b"": removes it. A token of the manager is in it. Blocks."""
    path = directory / MANAGER
    if not data:
        path.unlink(missing_ok=True)
        return
    directory.mkdir(exist_ok=True)
    replace_file(path, [data])
