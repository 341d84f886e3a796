"""The audit: who changed what over the admin port or by commands of dynamic security, as records
in the log.

Each change is one CONTROL record. Clients can neither publish nor receive such records, and readers
of messages pass over them. The record is replicated and kept as long as the log around it. The
payload is JSON, and its format is a promise: `{"audit": 1, ...}` with the fields of `AuditEntry`.

The file `audit-index` in the data directory has the position of each record of this node, one line
each: `TIME_US PARTITION OFFSET CALLER`. It saves the search through the log. Its lines are hints:
a line without a record at its position is passed over. OFFSET is -1 in a cluster, where another
node may append the record; it is then found by its time. CALLER is a checksum of `who`; a line of
0.1 has none.

Invariants
- What nobody has proved a name for makes no record. A stranger could otherwise write until the
  index has only his.
- A caller removes its own entries from a full index before those of callers with fewer. A program
  with a token could otherwise do the same.
"""

import asyncio
import logging
import os
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import msgspec

from holdfast.api.endpoints import ApiRefusal, Call
from holdfast.api.nodes.whole_log import Ask, WholeLog, ask_nobody
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.failures import watched
from holdfast.log.batch import Batch
from holdfast.log.record import CONTROL, Record
from holdfast.node.connections.connect import API_PREFIX
from holdfast.node.connections.pending_connects import address_of
from holdfast.node.node_state import CallbackPromise
from holdfast.node.publish.control import COMMAND_TOPIC
from holdfast.security.dynamic.commands import SecurityChange

logger = logging.getLogger("holdfast")

FORMAT: Final = 1
INDEX: Final = "audit-index"
ENTRIES_MAX: Final = 100_000
"""The most lines of the index. The callers with the most lines then lose their oldest, until half
of all are left."""
VALUE_BYTES_MAX: Final = 16_384
"""The most bytes of `before` and of `after`. A longer value is left out, with its length."""
WAIT_S: Final = 5.0
"""The most seconds that the reply to a change waits for its record."""
TOGETHER_MAX: Final = 50
"""The most records of commands that are appended in one turn."""
EARLY_MAX: Final = 16
"""The most changes that wait until this node has a log, for example that of `cluster init`."""
Position = tuple[int, int, int, int]
"""Time, partition, offset or -1, and caller of a record; caller 0: of a version without it."""
SEARCH_BYTES: Final = 4 << 20
"""The most bytes that are searched for a record of which only the time is known."""


class AuditEntry(msgspec.Struct, omit_defaults=True):
    """One change."""

    time_us: int
    who: str
    """`user NAME`, `token ID`, `local` for a process of the machine without access set up, or
    `mqtt USER (CLIENT ID)` for a command of a client over MQTT."""
    remote: str
    """The IP address."""
    node: str
    method: str
    """The HTTP method, or `COMMAND` for a command of a client."""
    path: str
    parameters: str = ""
    """The parameters of the request: `name=value` of each one and of fields of the body, or the
    names in a command. A record of 0.1 has the query string."""
    before: Any = None
    after: Any = None
    status: int = 200
    error: str = ""
    """The reason of a refusal; empty: the change was carried out."""
    dry: bool = False
    """Whether the request only asked what a change would do."""
    action: str = ""
    """The change in words, as the OpenAPI document has it."""
    audit: int = FORMAT


class AuditQuestion(msgspec.Struct):
    """The newest entries of one node below a key. An entry's key is its time and node, and no two
    entries have the same."""

    before: tuple[int, str] | None
    limit: int


class AuditAnswer(msgspec.Struct):
    """The entries of one node, the newest first."""

    entries: list[AuditEntry]
    has_more: bool


class AuditLog:
    """The audit of one node."""

    def __init__(
        self,
        find_broker: Callable[[], Broker | None],
        find_partition: Callable[[], int],
        directory: Path,
    ) -> None:
        """`find_partition`: a partition that this node leads, so that a record needs no other
        node; any one if it leads none."""
        self._find_broker = find_broker
        self.ask: Ask = ask_nobody
        """Asks another node. AccessRoutes sets it."""
        self._find_partition = find_partition
        self._path = directory / INDEX
        self._lock = asyncio.Lock()
        # The oldest first; None: not read yet.
        self._positions: list[Position] | None = None
        self._last_us = 0
        self._tasks: set[asyncio.Task[None]] = set()
        # Changes of the time without a log, the oldest first.
        self._early: list[AuditEntry] = []

    async def append(self, call: Call, status: int, error: str) -> None:
        """Records a change. A record that cannot be stored has an error in the process's log, and
        the change stays."""
        broker = self._find_broker()
        entry = AuditEntry(
            0,
            call.caller.name,
            call.caller.remote,
            "" if broker is None else broker.node.state.config.node_id,
            call.endpoint.method,
            call.request.url.path,
            call.given(),
            _bounded(call.before),
            _bounded(call.after),
            status,
            error,
            call.is_dry,
            call.endpoint.summary,
        )
        logger.info(
            "audit who=%r remote=%r method=%s path=%r parameters=%r result=%s status=%d error=%r",
            entry.who, entry.remote, entry.method, entry.path, entry.parameters, _result(entry),
            status, error,
        )  # fmt: skip
        if broker is not None:
            await self._record(broker, [entry])
        elif len(self._early) < EARLY_MAX:
            self._early.append(entry)
        else:
            logger.warning("audit_not_recorded path=%r error='no log here'", entry.path)

    def serve(self, broker: Broker) -> None:
        """Records also the commands of the broker's clients, and what waited for it."""
        broker.record_changes = self.record_changes
        early, self._early = self._early, []
        for entry in early:
            entry.node = broker.node.state.config.node_id
        self._start(self._record(broker, early))

    def record_changes(self, changes: list[SecurityChange], done: Callable[[], None]) -> None:
        """Records clients' commands, and calls `done`: after `WAIT_S` also without a commit."""
        self._start(self._record_changes(changes, done))

    def _start(self, recording: Coroutine[None, None, None]) -> None:
        task = watched(recording)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _record_changes(
        self, changes: list[SecurityChange], done: Callable[[], None]
    ) -> None:
        broker = self._find_broker()
        if broker is not None:
            node = broker.node.state.config.node_id
            entries = [_command_entry(each, node) for each in changes]
            for start in range(0, len(entries), TOGETHER_MAX):
                await self._record(broker, entries[start : start + TOGETHER_MAX])
        done()

    async def _record(self, broker: Broker, entries: list[AuditEntry]) -> None:
        """Appends records, and waits for their commit."""
        stored = await asyncio.gather(*(self._store(broker, each) for each in entries))
        positions: list[Position] = []
        for entry, (record, failure) in zip(entries, stored, strict=True):
            if failure:
                logger.error("audit_not_recorded path=%r error=%r", entry.path, failure)
            else:
                caller = crc32(entry.who.encode("utf-8", "surrogatepass"))
                positions.append((record.timestamp_us, record.partition, record.offset, caller))
        if positions:
            try:
                async with self._lock:
                    await asyncio.to_thread(self._note, positions)
            except OSError as error:
                # The records are in the log, and until a restart the list has them.
                logger.error("audit_index_not_written path=%r error=%r", self._path, str(error))

    async def _store(self, broker: Broker, entry: AuditEntry) -> tuple[Record, str]:
        """Appends the record and waits for its commit. Returns the reason of a failure, or ""."""
        done: asyncio.Future[str] = broker.loop.create_future()
        broker.touch()
        state = broker.node.state
        # The time is the key of an entry, and several may be made in one turn.
        self._last_us = entry.time_us = max(state.wall_us, self._last_us + 1)
        payload = msgspec.json.encode(entry)
        record = Record(
            self._find_partition(), CONTROL, timestamp_us=entry.time_us, payload=payload
        )

        def resolve(failure: str) -> None:
            if not done.done():
                done.set_result(failure)

        state.publish(record, CallbackPromise(resolve))
        try:
            async with asyncio.timeout(WAIT_S):
                return record, await done
        except TimeoutError:
            return record, f"not committed within {WAIT_S:g} s"

    async def page(self, question: AuditQuestion) -> AuditAnswer:
        """The newest entries of this node below a key. Raises `ApiRefusal` (503) without a log."""
        broker = self._find_broker()
        if broker is None:
            raise ApiRefusal(503, "this node stands by: ask the holder of the lease")
        async with self._lock:
            positions = await asyncio.to_thread(self._read)
        end = len(positions)
        if question.before is not None:
            time_us, node = question.before
            own = broker.node.state.config.node_id
            end = bisect_left(positions, (time_us + (own < node), -1, -1, -1))
        start = max(0, end - question.limit)
        found: list[AuditEntry] = []
        log = WholeLog(broker, self.ask)
        chosen = positions[start:end]
        count = len(log.ends)
        await log.open({partition for _, partition, _, _ in chosen if partition < count})
        for position in reversed(chosen):
            entry = await log.in_thread(partial(_fetch, log, position))
            if entry is not None:
                found.append(entry)
        return AuditAnswer(found, start > 0)

    def _read(self) -> list[Position]:
        """The positions. Runs in a thread, under the lock."""
        if self._positions is None:
            self._positions = []
            try:
                text = self._path.read_text(encoding="ascii", errors="replace")
            except FileNotFoundError:
                text = ""
            for line in text.splitlines():
                try:
                    time_us, partition, offset, *more = map(int, line.split())
                except ValueError:
                    continue  # A line that a crash has cut.
                self._positions.append((time_us, partition, offset, more[0] if more else 0))
            self._positions.sort()
        return self._positions

    def _note(self, added: list[Position]) -> None:
        """Adds positions. Runs in a thread, under the lock."""
        positions = self._read()
        for position in added:
            # The records of two requests may be committed in another order than they were appended.
            insort(positions, position)
        if len(positions) > ENTRIES_MAX:
            positions[:] = fair_half(positions, ENTRIES_MAX // 2)
            lines, flags = positions, os.O_TRUNC
        else:
            lines, flags = added, os.O_APPEND
        text = "".join(" ".join(map(str, each)) + "\n" for each in lines)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
        try:
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _result(entry: AuditEntry) -> str:
    if entry.status >= 400:
        return "refused"
    return "tried" if entry.dry else "done"


def _command_entry(change: SecurityChange, node: str) -> AuditEntry:
    outcome = change.outcome
    who = f"mqtt {change.username} ({change.client_id})"
    if change.client_id.startswith(API_PREFIX):
        who = change.client_id.partition(" ")[2]
    return AuditEntry(
        0,
        who,
        address_of(change.remote),
        node,
        "COMMAND",
        f"{COMMAND_TOPIC}/{outcome.name}",
        outcome.target,
        _bounded(outcome.before),
        _bounded(outcome.after),
        400 if outcome.error else 200,
        outcome.error,
    )


def fair_half(positions: list[Position], most: int) -> list[Position]:
    """The newest positions of each caller, at most `most` of all: who has fewer than an equal share
    keeps all."""
    counts = sorted(Counter(caller for _, _, _, caller in positions).values())
    left = most
    share = 0
    for number, count in enumerate(counts):
        share = left // (len(counts) - number)
        if count > share:
            break
        left -= count
    kept: Counter[int] = Counter()
    found = []
    for position in reversed(positions):
        kept[position[3]] += 1
        if kept[position[3]] <= share:
            found.append(position)
    return found[::-1]


def _bounded(value: object) -> object:
    if value is None:
        return None
    encoded = msgspec.json.encode(value)
    if len(encoded) > VALUE_BYTES_MAX:
        return {"left_out_bytes": len(encoded)}
    return msgspec.json.decode(encoded)


def _fetch(log: WholeLog, position: Position) -> AuditEntry | None:
    """The entry at a position, or None if retention has removed it. Runs in a thread."""
    time_us, partition, offset, _ = position
    if partition >= len(log.ends):
        return None
    entry = None if offset < 0 else _search(log, partition, offset, time_us, 1)
    if entry is None:
        offset = log.offset_for_time(partition, time_us)
        entry = _search(log, partition, offset, time_us, SEARCH_BYTES)
    return entry


def _search(
    log: WholeLog, partition: int, start: int, time_us: int, bytes_max: int
) -> AuditEntry | None:
    """The entry of this time from an offset on, among the committed records."""
    end = log.ends[partition]
    if not log.first_offset(partition) <= start < end:
        return None
    for data in log.read_batches(partition, start, end, bytes_max):
        batch = Batch(data)
        for index, (kind, _, _) in enumerate(batch.heads()):
            if kind == CONTROL:
                entry = _entry(batch.record(index))
                if entry is not None and entry.time_us == time_us:
                    return entry
    return None


def _entry(record: Record) -> AuditEntry | None:
    if not record.payload:
        return None
    try:
        return msgspec.json.decode(record.payload, type=AuditEntry)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
