"""Writes the changes of a member's state to the place where it is durable.

Requests that arrive while a transaction is written form the next one (group commit).

A full disk suspends the store until there is room. Meanwhile it reports nothing as stored, requests
wait, and removals are written first. The callers bound the waiting requests: by the edge's window
of unconfirmed messages, and by the limits of the member's queues.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from holdfast.io.event_loop.failures import report
from holdfast_federation.core.frames import Data, decode, encode
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.streams import Position
from holdfast_federation.sidecar.store.file import (
    MemberStoreChange,
    MemberStoreError,
    MemberStoreFull,
    StoredMember,
)
from holdfast_federation.sidecar.store.member_files import ChangeStore

logger = logging.getLogger("holdfast")

ADDED_MAX: Final = 2048
"""The most messages of one transaction. A larger one than `ADDED_BYTES_MAX` has one message."""
ADDED_BYTES_MAX: Final = 16 << 20
LAZY_S: Final = 0.2
"""The time in seconds that a lazy request waits for a transaction that is made anyway."""
LAZY_MAX: Final = 4096
"""The number of waiting removals that starts a transaction at once."""
UNHURRIED_MAX: Final = 64
"""The number of waiting messages with `may_wait` that starts a transaction at once."""
FULL_RETRY_S: Final = 1.0
FULL_BYTES_MAX: Final = 64 << 20
"""The bytes of messages that may wait in memory while the disk is full.

Further messages stay with the broker, without acknowledgement, until there is room.
"""


class StoreOwner(Protocol):
    """The receiver of the store's reports. All calls come from the event loop."""

    def on_stored(self, ids: list[MessageId]) -> None:
        """Reports durable messages: those added, and delivered ones below a stored position."""

    def on_broken(self, error: MemberStoreError) -> None:
        """Reports that the file has failed and nothing is stored any more."""


class MemberStore:
    """Collects changes in memory and writes them in order, one transaction at a time."""

    def __init__(self, place: ChangeStore, owner: StoreOwner) -> None:
        """`place`: where the changes are stored. It is opened and closed here."""
        self.is_full = False
        self._owner = owner
        self._place = place
        self._next = MemberStoreChange()
        # The position in the last epoch of each origin.
        self._positions: dict[bytes, Position] = {}
        self._writing = MemberStoreChange()
        # Delivered messages below the positions of the next transaction. `_waiters` are the callers
        # that wait for retained versions and the memory.
        self._passed: list[MessageId] = []
        # Messages with `may_wait` that no transaction contains yet.
        self._unwritten: set[MessageId] = set()
        self._waiters: list[Callable[[], None]] = []
        self._has_work = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False

    async def open(self) -> StoredMember:
        """Reads what is stored and begins to write. Raises `MemberStoreError` or
        `MemberStoreFull`."""
        kept = await self._place.load()
        self._positions = dict(kept.positions)
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(report)
        return kept

    async def close(self) -> None:
        """Writes what was requested, if there is room, reports it, and closes the place."""
        if self._task is None:
            return
        self._is_closing = True
        self._has_work.set()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        if self._timer is not None:
            self._timer.cancel()
        await self._place.close()

    def add(self, id: MessageId, data: bytes, may_wait: bool = False) -> None:
        """Adds a message, or replaces the one with the same id.

        `may_wait`: the message is new and likely to be removed soon, so it need not be written at
        once. It must not be added again.
        """
        self._next.added[id] = data
        if may_wait:
            self._unwritten.add(id)
        self._schedule_write(not may_wait or len(self._unwritten) >= UNHURRIED_MAX)

    def remove(self, id: MessageId) -> None:
        """Removes a message lazily. A `may_wait` message without a transaction is never written.

        The owner receives no report of such a message.
        """
        self._next.added.pop(id, None)
        if id in self._unwritten:
            self._unwritten.remove(id)
            return
        self._next.removed.add(id)
        self._schedule_write(len(self._next.removed) >= LAZY_MAX)

    def pass_to(self, origin: bytes, position: Position, ids: list[MessageId]) -> None:
        """Stores the new position of the stream from `origin`; `ids` are the messages below it. It
        may be of a former epoch."""
        newest = self._positions.get(origin, position)
        if position[0] != newest[0]:
            epoch, place = min(position, newest)
            self._next.former[origin, epoch] = place
        if position >= newest:
            self._positions[origin] = self._next.positions[origin] = position
        self._passed += ids
        self._has_work.set()

    def retain(self, topic: str, data: bytes | None) -> None:
        """Stores the retained version of a topic. None removes it, lazily."""
        self._next.retained[topic] = data
        self._schedule_write(data is not None or len(self._next.retained) >= LAZY_MAX)

    def when_written(self, then: Callable[[], None]) -> None:
        """Calls `then` once all earlier calls of `retain` and `remember` are durable."""
        self._waiters.append(then)
        self._has_work.set()

    def remember(self, memory: list[bytes]) -> None:
        """Replaces the stored knowledge of other members, lazily."""
        self._next.memory = memory
        self._schedule_write(False)

    def has_room(self) -> bool:
        """Returns whether messages may be added. A full disk allows up to `FULL_BYTES_MAX`."""
        if not self.is_full:
            return True
        added = (*self._next.added.values(), *self._writing.added.values())
        return sum(map(len, added)) < FULL_BYTES_MAX

    def waiting(self) -> int:
        """The number of messages that are not stored yet."""
        return len(self._next.added) + len(self._writing.added)

    def _schedule_write(self, is_now: bool) -> None:
        if is_now:
            self._has_work.set()
        elif self._timer is None:
            self._arm(LAZY_S)

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._has_work.set()

    async def _run(self) -> None:
        while not self._is_closing:
            await self._has_work.wait()
            self._has_work.clear()
            try:
                while self._waiters or not self._next.is_empty():
                    await self._write_transaction()
            except MemberStoreFull as full:
                if not self.is_full:
                    logger.error("federation_disk_full error=%r", str(full))
                self.is_full = True
                self._arm(FULL_RETRY_S)
            except MemberStoreError as error:
                self._owner.on_broken(error)
                return

    async def _write_transaction(self) -> None:
        """Writes one transaction. After `MemberStoreError` or `MemberStoreFull` nothing is lost.

        The change then goes back to the front of the queue.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.is_full and self._next.frees():
            # Removals come first on a full disk, because only they make room.
            change, passed, waiters = self._next.without_data(), self._passed, []
        else:
            added_max = 1 if self.is_full else ADDED_MAX
            change, passed, waiters = self._next, self._passed, self._waiters
            self._next = change.split(added_max, ADDED_BYTES_MAX)
            self._waiters = []
        self._passed = []
        self._writing = change
        self._unwritten.difference_update(change.added)
        try:
            await self._place.apply(change)
        except (MemberStoreError, MemberStoreFull):
            # In front of later requests, so that an older value never replaces a newer one.
            self._next = change.followed_by(self._next)
            self._passed[:0] = passed
            self._waiters[:0] = waiters
            raise
        finally:
            self._writing = MemberStoreChange()
        if self.is_full and not self._next.added:
            self.is_full = False
            logger.info("federation_disk_has_space")
        ids = [*change.added, *passed]
        if ids:
            self._owner.on_stored(ids)
        for then in waiters:
            then()


def aged(data: bytes, age_s: float) -> bytes:
    """Reduces a stored message's expiry by its age. Raises `InvalidFrame` if it is malformed."""
    frame = decode(data)
    if not isinstance(frame, Data) or frame.expiry_s is None:
        return data
    return encode(msgspec.structs.replace(frame, expiry_s=max(0.0, frame.expiry_s - age_s)))
