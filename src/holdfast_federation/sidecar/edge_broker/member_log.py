"""Stores the state of a broker's member in the broker's own log.

Each change is one or more FEDERATION records of one partition (`node.state.member_values`), so it
is on every in-sync replica once it is committed, and the next federator finds it at any node.

Invariants:

- `apply` and `begin` return after the records are committed and applied, and only if the start of
  this federator is still the newest. A deposed federator therefore confirms nothing.
- A start has a number above all that were used before, also after the log was put back: see
  `_next_start`.
- The files of an older version count as long as the log has no complete identity. So a crash in the
  middle of their adoption begins it again.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from holdfast.io.event_loop.broker import Broker
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.node import federation_session as federating
from holdfast.node.features import MEMBER_VALUES
from holdfast.node.state.member_values import IDENTITY, MemberValues
from holdfast_federation.core.frames import Data, decode
from holdfast_federation.core.identity import (
    EPOCH_RANDOM_STEP,
    RESTORED_STARTS,
    STEADY_S,
    BadIdentity,
    Identity,
)
from holdfast_federation.core.messages.streams import FORMER_MAX, FormerPositions, Position
from holdfast_federation.sidecar.edge_broker.origin_offset import (
    LogStart,
    decode_starts,
    next_starts,
)
from holdfast_federation.sidecar.store.file import (
    STORE,
    MemberStoreChange,
    MemberStoreError,
    MemberStoreFull,
    StoredMember,
    StoreFile,
)
from holdfast_federation.sidecar.store.identity import (
    IDENTITY as IDENTITY_FILE,
)
from holdfast_federation.sidecar.store.identity import LOCK, IdentityFile
from holdfast_federation.sidecar.store.member_files import (
    MANAGER,
    read_assignment,
    write_assignment,
)

logger = logging.getLogger("holdfast")

CUSTODY: Final = b"custody:"
POSITION: Final = b"position:"
FORMER: Final = b"former:"
RETAINED: Final = b"retained:"
MEMORY: Final = b"memory"
STARTS: Final = b"starts"
ASSIGNMENT: Final = b"manager"
"""The keys of the values, or their beginnings."""
AGE_STARTS_MAX: Final = 1 << 22
"""The most starts that the age of a restored log adds."""
_ID: Final = struct.Struct(">QQ")
_STORED_AT: Final = struct.Struct(">d")
_PLACE: Final = struct.Struct(">Q")
_BYTES: Final = struct.Struct(">I")

Values = list[tuple[bytes, bytes]]


class StoredIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of IDENTITY. The number of the start is the record's."""

    node: str
    at: float
    """The time of the start, in seconds since 1970."""
    log: str
    """The name of the log in the places of its messages, for life."""
    generation: int = 0
    """The generation of the log in this start."""
    disputed: int = 0
    """The last start that another run of this member may have used."""
    run: str = ""
    """A random name of the start. Two nodes that begin one with the same number differ in it."""
    is_adopting: bool = False
    """Whether files of an older version are being taken over, and still count."""


class MemberLog:
    """The `MemberStorage` of a broker's member. It is made for one start."""

    def __init__(
        self,
        broker: Broker,
        directory: Path,
        created: str,
        generation: Callable[[], int | None],
        is_alone: bool,
    ) -> None:
        """`directory`: where an older version kept the member. `created`: the name of the log, if
        it has none. `generation`: of the log; None: not agreed yet. `is_alone`: whether no other
        node may run the member. The ends of this node's log then distinguish the start, as
        `log_starts` says."""
        self._broker = broker
        self._directory = directory
        self._created = created
        self._generation = generation
        self._is_alone = is_alone
        self._start = 0
        self._identity = StoredIdentity("", 0.0, "")
        # The value of IDENTITY of this start.
        self._encoded = b""
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_abandoned = False
        self.starts: list[LogStart] = []
        self.may_move = not is_alone

    @property
    def disputed(self) -> int:
        return self._identity.disputed

    @property
    def name(self) -> str:
        """The name of the log."""
        return self._identity.log

    @property
    def generation(self) -> int:
        """The generation of the log in this start."""
        return self._identity.generation

    async def begin(self, id: str) -> Identity:
        """Begins a start. Raises `BadIdentity`, `MemberStoreError` and `OSError`."""
        older = self._broker.node.state.cluster.older_nodes(MEMBER_VALUES)
        if older:
            raise MemberStoreError(older)
        generation = self._generation()
        if generation is None:
            raise MemberStoreError("the nodes have not agreed on the generation of the log yet")
        before = self._stored_identity()
        if before is None or before.is_adopting:
            if (self._directory / IDENTITY_FILE).exists():
                before = await self._adopt(id, generation)
            else:
                before = None
        if before is None:
            node = bytes.fromhex(id) if id else os.urandom(16)
            before = StoredIdentity(node.hex(), time.time(), self._created, generation)
        elif id and before.node != id:
            raise BadIdentity(
                f"the log has the member {before.node}, the configuration {id}: take federation.id"
                " out, or give this member a broker of its own"
            )
        identity = msgspec.structs.replace(before, at=time.time(), generation=generation)
        await self._begin(self._next_start(before, generation), identity)
        if self._is_alone:
            ends = self._broker.node.state.journal.next_offset
            self.starts = next_starts(self._stored_starts(), self._start, ends)
            await self._store([(STARTS, msgspec.json.encode(self.starts))])
        else:
            self.starts = self._stored_starts()
        return Identity(bytes.fromhex(before.node), self._start)

    def _next_start(self, before: StoredIdentity, generation: int) -> int:
        """The number of this start.

        After a while a step is random, because the log may have been put back without a word. After
        a restore it goes beyond all starts that were made since the backup. The age of the backup
        makes it another one for each restore of it.
        """
        newest = self._values().start
        if not newest:
            return 1
        age_s = time.time() - before.at
        step = 1 if 0 <= age_s < STEADY_S else 1 + secrets.randbelow(EPOCH_RANDOM_STEP)
        if generation != before.generation:
            step += RESTORED_STARTS + min(max(int(age_s), 0), AGE_STARTS_MAX)
        return newest + step

    async def _begin(self, start: int, identity: StoredIdentity) -> None:
        identity = msgspec.structs.replace(identity, run=secrets.token_hex(8))
        self._start, self._identity = start, identity
        self._encoded = msgspec.json.encode(identity)
        await self._store([(IDENTITY, self._encoded)])

    async def load(self) -> StoredMember:
        """Returns what the log has. Raises `MemberStoreError` for what this version cannot read."""
        try:
            return stored_member(self._values().values, time.time())
        except (struct.error, ValueError) as error:
            raise MemberStoreError(f"the member's records in the log: {error}") from error

    async def apply(self, change: MemberStoreChange) -> None:
        """Stores a change. Raises `MemberStoreError`, and `MemberStoreFull` without room."""
        if self._broker.node.state.disk_full and (
            change.added or change.retained or change.memory is not None
        ):
            raise MemberStoreFull("the broker's disk is full")
        values = values_of(change, time.time())
        for origin in {origin for origin, _ in change.former}:
            known = [key for key in self._values().values if key.startswith(FORMER + origin)]
            added = [key for key, _ in values if key.startswith(FORMER + origin)]
            values += [(key, b"") for key in sorted({*known, *added})[:-FORMER_MAX]]
        await self._store(values)

    async def dispute(self, epoch: int) -> None:
        """Stores that starts up to this one may have been used by another run of this member, so
        that the next one has a higher number."""
        newest = max(epoch, self._start)
        identity = msgspec.structs.replace(self._identity, disputed=newest)
        # Also where it is the newest start already: its identity is replaced by a later one.
        await self._begin(newest + (newest == self._start), identity)

    async def read_assignment(self) -> bytes:
        """Returns the assignment, with the token that the manager has given to this node."""
        agreed = self._values().values.get(ASSIGNMENT, b"")
        own = await asyncio.to_thread(read_assignment, self._directory)
        return own if not agreed else _joined(agreed, own)

    async def write_assignment(self, data: bytes) -> None:
        """Stores the token in a file of this node, and the rest in the log, which more people may
        read."""
        await asyncio.to_thread(write_assignment, self._directory, data)
        await self._store([(ASSIGNMENT, _without_token(data))])

    def abandon(self) -> None:
        """Waits for no record any more: this node cannot commit, or may not."""
        self._is_abandoned = True
        for future in self._waiting:
            if not future.done():
                future.set_exception(MemberStoreError("another node runs the member"))

    async def close(self) -> None:
        """Nothing is open."""

    # The log

    def _values(self) -> MemberValues:
        return self._broker.node.state.recorded.member

    def _stored_identity(self) -> StoredIdentity | None:
        data = self._values().values.get(IDENTITY)
        try:
            return None if data is None else msgspec.json.decode(data, type=StoredIdentity)
        except msgspec.DecodeError as error:
            raise MemberStoreError(f"the member's identity in the log: {error}") from error

    def _stored_starts(self) -> list[LogStart]:
        try:
            return decode_starts(self._values().values.get(STARTS, b"[]"))
        except ValueError as error:
            raise MemberStoreError(f"the member's records in the log: {error}") from error

    async def _store(self, values: Values) -> None:
        """Appends values, and waits until they are committed and in force."""
        if self._is_abandoned:
            raise MemberStoreError("another node runs the member")
        if not values:
            return
        future: asyncio.Future[None] = self._broker.loop.create_future()

        def done(is_stored: bool) -> None:
            if future.done():
                return
            if is_stored and self._values().values.get(IDENTITY) == self._encoded:
                future.set_result(None)
            else:
                future.set_exception(MemberStoreError("another node has begun to run the member"))

        self._waiting.add(future)
        try:
            self._broker.touch()
            federating.store_values(self._broker.node.state, self._start, values, done)
            await future
        finally:
            self._waiting.discard(future)

    # The files of an older version

    async def _adopt(self, id: str, generation: int) -> StoredIdentity:
        """Takes over the member of the files, which are removed once the log has all of it."""
        directory = self._directory
        file = IdentityFile(directory)
        identity = await asyncio.to_thread(file.begin, id)
        try:
            stored = StoreFile(directory / STORE, identity.node)
            kept = await asyncio.to_thread(stored.open)
            await asyncio.to_thread(stored.close)
            disputed = await asyncio.to_thread(file.disputed)
            files = OsFileSystem(directory)
            names = await asyncio.to_thread(files.list, "")
            found = StoredIdentity(
                identity.node.hex(),
                time.time(),
                self._created,
                generation,
                disputed,
                is_adopting=True,
            )
            start = max(identity.epoch, self._values().start + 1)
            await self._begin(start, found)
            left = [key for key in self._values().values if key != IDENTITY]
            values: Values = [(key, b"") for key in left]
            values += values_of_stored(kept, time.time())
            if STARTS_FILE in names:
                path = directory / STARTS_FILE
                starts = await asyncio.to_thread(path.read_bytes)
                try:
                    decode_starts(starts)
                except ValueError as error:
                    text = f"{path}: {error}: remove it if it is damaged"
                    raise MemberStoreError(text) from error
                values.append((STARTS, starts))
            await self._store(values)
            complete = msgspec.structs.replace(found, is_adopting=False)
            await self._begin(start + 1, complete)
        finally:
            await asyncio.to_thread(file.release)
        await asyncio.to_thread(_remove, directory)
        logger.info("federation_adopted custody=%d text='the log has it'", len(kept.custody))
        return complete


STARTS_FILE: Final = "log-starts"
"""The file in which an older version kept the starts."""


def _remove(directory: Path) -> None:
    """Removes the files of the member, the identity first: without it the others count no more. The
    token of the manager stays."""
    names = [IDENTITY_FILE, *sorted(path.name for path in directory.iterdir())]
    for name in names:
        if name not in (LOCK, MANAGER):
            (directory / name).unlink(missing_ok=True)
    (directory / LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _without_token(assignment: bytes) -> bytes:
    fields: dict[str, object] = msgspec.json.decode(assignment or b"{}")
    fields.pop("token", None)
    return msgspec.json.encode(fields) if fields else b""


def _joined(agreed: bytes, own: bytes) -> bytes:
    """The assignment in the log with the token of this node's file, if it is the same manager's."""
    fields = msgspec.json.decode(agreed, type=dict[str, object])
    try:
        here = msgspec.json.decode(own or b"{}", type=dict[str, object])
    except msgspec.DecodeError:
        here = {}
    if here.get("url") == fields.get("url") and "token" in here:
        fields["token"] = here["token"]
    return msgspec.json.encode(fields)


def values_of(change: MemberStoreChange, now: float) -> Values:
    """The values of a change, in the order in which they are stored."""
    values: Values = []
    # First, because the messages have their destinations by the interest in it. A crash may leave
    # some of the values.
    if change.memory is not None:
        values.append((MEMORY, b"".join(_BYTES.pack(len(one)) + one for one in change.memory)))
    values += [
        (CUSTODY + _ID.pack(id.epoch, id.sequence), _STORED_AT.pack(now) + data)
        for id, data in change.added.items()
    ]
    values += [(CUSTODY + _ID.pack(id.epoch, id.sequence), b"") for id in sorted(change.removed)]
    # A position of a former epoch comes first: without it the newer one would forget it.
    values += [
        (FORMER + origin + _PLACE.pack(epoch), _PLACE.pack(place))
        for (origin, epoch), place in change.former.items()
    ]
    values += [(POSITION + origin, _ID.pack(*at)) for origin, at in change.positions.items()]
    for topic, data in change.retained.items():
        name = topic.encode()
        key = RETAINED + hashlib.blake2b(name, digest_size=16).digest()
        values.append((key, b"" if data is None else _BYTES.pack(len(name)) + name + data))
    return values


def values_of_stored(stored: StoredMember, now: float) -> Values:
    """The values of a member that was stored in files."""
    values = values_of(
        MemberStoreChange(
            positions=stored.positions,
            retained=dict(stored.retained),
            memory=stored.memory,
            former=stored.former,
        ),
        now,
    )
    for data, age_s in stored.custody:
        frame = decode(data)
        if not isinstance(frame, Data):
            raise MemberStoreError(f"{STORE} has what is no message: delete it")
        key = CUSTODY + _ID.pack(frame.id.epoch, frame.id.sequence)
        values.append((key, _STORED_AT.pack(now - age_s) + data))
    return values


def stored_member(values: dict[bytes, bytes], now: float) -> StoredMember:
    """The member that the values define. Raises `struct.error` and `ValueError`."""
    custody: dict[bytes, tuple[bytes, float]] = {}
    positions: dict[bytes, Position] = {}
    former: FormerPositions = {}
    retained: dict[str, bytes] = {}
    for key, value in values.items():
        if key.startswith(CUSTODY):
            (stored_at,) = _STORED_AT.unpack_from(value)
            custody[key] = value[_STORED_AT.size :], max(0.0, now - stored_at)
        elif key.startswith(POSITION):
            epoch, place = _ID.unpack(value)
            positions[key.removeprefix(POSITION)] = epoch, place
        elif key.startswith(FORMER):
            origin, epoch = key[len(FORMER) : -_PLACE.size], key[-_PLACE.size :]
            former[origin, _PLACE.unpack(epoch)[0]] = _PLACE.unpack(value)[0]
        elif key.startswith(RETAINED):
            (size,) = _BYTES.unpack_from(value)
            end = _BYTES.size + size
            retained[value[_BYTES.size : end].decode()] = value[end:]
    memory: list[bytes] = []
    packed = values.get(MEMORY, b"")
    while packed:
        (size,) = _BYTES.unpack_from(packed)
        memory.append(packed[_BYTES.size : _BYTES.size + size])
        packed = packed[_BYTES.size + size :]
    return StoredMember(
        [custody[key] for key in sorted(custody)], positions, retained, memory, former
    )
