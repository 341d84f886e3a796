"""Reads of records that this node does not store, at nodes that do, and in a lake.

A read of the log (`ReadLog`, `FetchInflight`, `FindStarts`) that needs such a partition is a *job*
here. One node at a time works on a job: this node for its own partitions, else an in-sync replica
with most of the missing ones. The job continues at other nodes until its budget is used or nothing
is left. Its result is the one that a complete local log would have given, so the reader cannot see
the difference.

A read below the start of the log is a job, too, if the node has a lake (`lake_source`). The lake is
then one more server, of all partitions up to where the log begins.

Jobs that wait for the same node and are at nearly the same positions share one FETCH. A restart of
a node with 100,000 sessions asks for the same records 100,000 times.

Invariants
- A position of a result passes a record only if the record was read, or matches no filter, or each
  in-sync replica has reported that it is lost. A replica that was not reached may have it, so the
  reader waits. There is no time-out that counts records as lost.
- The jobs of a node that wait for answers are at most FETCHES_PER_NODE, and their answers are
  bounded in bytes. All others are a reference to their reader's request.
- The lake is asked only for records below the start of the log: here, or for a partition that is
  not stored here on each in-sync replica. So it needs not have more than retention has removed.
- A read that retention has overtaken is not an answer, but is done again with the lake. The same
  holds for a search for starts.
  Counter-example: a read begins at the start of the log, and the segment goes before it is opened.
- A job that no connected replica can serve waits in `_parked` and is tried again. It is answered
  without progress when other partitions have new records, so that its reader continues there.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from operator import lt
from typing import Any, Final

from holdfast.log.reading.cursor import ReadResult
from holdfast.node.context import ClusterContext
from holdfast.node.delivery.subscribe import handle_starts
from holdfast.node.effects import AnyRead, FetchInflight, FindStarts, ReadLog
from holdfast.node.features import FEEDS
from holdfast.node.frame_kinds import FETCH, BadFrame
from holdfast.node.node import Node
from holdfast.node.node_state import NodeState
from holdfast.node.reads.fetch_frames import (
    BELOW_START,
    FetchedFrame,
    FetchFrame,
    ReadRange,
    decode_fetched,
    encode_fetch,
)
from holdfast.node.reads.fetch_server import FETCHES_MAX
from holdfast.node.reads.lake_source import LAKE, LakeAccess
from holdfast.node.reads.read_jobs import (
    Fetch,
    ReadJob,
    all_needs,
    ask_for_range,
    distribute,
    filter_count,
    found_start,
    left_of,
    past_start,
    position_of,
    reader_of,
    searched_partitions,
)

FETCHES_PER_NODE: Final = FETCHES_MAX // 2
"""The most FETCHes to one node that are not answered."""
SHARED_MAX: Final = 64
"""The most jobs that share a FETCH."""
SHARED_SCAN: Final = 128
"""The most waiting jobs that are compared with the first one."""
SHARED_FILTERS: Final = 5000
"""The number of filters from which a FETCH takes no further job."""
ANSWER_S: Final = 10.0
"""The time in seconds after which a FETCH is sent to another node."""
UNABLE_S: Final = 0.25
"""The time in seconds for which a replica that refused a partition is not asked for it again."""
RETRY_S: Final = 0.1
"""The interval in seconds at which parked jobs are tried again."""
RETRY_MAX: Final = 500
"""The most parked jobs that are tried again at a time."""
ANSWERS_KEPT_MAX: Final = 256
"""The number of jobs with an answer for their reader above which no FETCH is sent."""


class RemoteReads:
    """The jobs of this node."""

    def __init__(
        self, node: Node, context: ClusterContext, is_stored: Callable[[int], bool]
    ) -> None:
        self._node = node
        self._state: NodeState = node.state
        self._context = context
        self.is_stored = is_stored
        """Whether this node reads a partition for its own readers."""
        self._has_log = is_stored
        self.lake = LakeAccess()
        self._number = 0
        self._fetches: dict[int, Fetch] = {}
        # The unanswered fetches of each node.
        self._in_flight: dict[str, int] = {}
        # Jobs by the node that has them next.
        self._queues: dict[str, deque[ReadJob]] = {}
        self._parked: deque[ReadJob] = deque()
        self._retry_at = 0.0
        # The parked jobs that are to be tried again, and the partitions of those that failed.
        self._woken = 0
        self._failing: set[int] = set()
        # The number of choices of a node.
        self._turn = 0
        # Jobs whose result goes to their reader.
        self._answered: deque[ReadJob] = deque()
        # (node, partition): the time until which the node is not asked for it.
        self._unable: dict[tuple[str, int], float] = {}
        # Partition -> node -> where its log begins, where a reader was below it.
        self._begins: dict[int, dict[str, int]] = {}
        self.unreachable: dict[int, float] = {}
        """The partitions that readers wait for, and since when."""
        self.shared = 0
        """The jobs that another one's FETCH served as well."""

    def seed_ids_at(self, number: int) -> None:
        """Numbers the fetches from `number` + 1, so that answers to an earlier process of this node
        match none."""
        self._number = number

    # The driver

    def take(self, effect: AnyRead) -> bool:
        """Takes over a read that needs records which are not stored here. False: it needs none,
        so the driver reads. One for another node, or for a part of a job, ends without a result."""
        is_own = effect.done is None
        is_here = all(map(self.is_stored if is_own else self._has_log, all_needs(effect)))
        if is_here and not (is_own and self._needs_lake(effect)):
            return False
        if effect.done is not None:
            effect.done(None)
        else:
            self._assign(ReadJob(effect))
        return True

    def has_whole_log(self) -> bool:
        """Whether this node reads all of the log itself."""
        return self.lake.ask is None and self._stores_all()

    def handle(self, node: str, payload: bytes) -> None:
        """Takes a piece of an answer. Raises `BadFrame` when it is malformed."""
        head, records = decode_fetched(payload)
        if node == LAKE:
            if self.lake.error:
                self._state.note("info", "lake_is_back", {})
            self.lake.succeeded()
        fetch = self._fetches.get(head.number)
        # A reply that comes after another node was asked is ignored.
        if fetch is None or fetch.node != node:
            return
        if head.piece != fetch.piece:
            raise BadFrame(f"piece {head.piece} of an answer, {fetch.piece} is the next one")
        fetch.piece += 1
        fetch.records += records
        if not head.more:
            self._end(head.number)
            for job in fetch.jobs if node == LAKE else ():
                self.lake.end_wait(reader_of(job.effect))
            try:
                self._take_answer(fetch, head)
            except BadFrame:
                self._assign_all(fetch.jobs)
                raise

    def disconnected(self, node: str) -> None:
        """Gives the jobs of a node whose link is lost to others."""
        for number, fetch in list(self._fetches.items()):
            if fetch.node == node:
                self._end(number)
                self._assign_all(fetch.jobs)
        for begins in self._begins.values():
            begins.pop(node, None)
        self._assign_all(self._queues.pop(node, ()))

    def nodes_changed(self) -> None:
        """Tries the parked jobs again, because another node may have their records. Where logs
        begin is asked again: a replica may have come back with a copy of earlier records."""
        self._retry_at = 0.0
        self._begins.clear()

    def is_busy(self) -> bool:
        """Whether `advance` has anything to do, apart from late answers of nodes."""
        return bool(self._queues or self._answered or self._parked)

    def advance(self, now: float) -> None:
        """Hands results to their readers, and sends due fetches, at the end of a turn."""
        self._answer_some()
        for number, fetch in list(self._fetches.items()):
            if fetch.node == LAKE:
                # Its driver ends a process that does not answer, and reports it.
                continue
            if now < fetch.sent_at + ANSWER_S:
                # The others were sent later.
                break
            self._end(number)
            self._mark_unable(fetch.node, fetch.partitions)
            self._assign_all(fetch.jobs)
        self._retry_parked(now)
        for node in list(self._queues):
            self._send_from(node)

    def timer(self) -> float | None:
        """Returns the time at which to call `advance` next, or None."""
        if self._answered or self._woken:
            return self._state.now
        due = self._retry_at if self._parked else None
        for fetch in self._fetches.values():
            if fetch.node == LAKE:
                continue
            late_at = fetch.sent_at + ANSWER_S
            return late_at if due is None else min(due, late_at)
        return due

    def check(self) -> None:
        """Raises `AssertionError` unless the fetches are within their bounds."""
        counts: dict[str, int] = {}
        for fetch in self._fetches.values():
            counts[fetch.node] = counts.get(fetch.node, 0) + 1
        assert counts == self._in_flight, "the fetches of each node"
        assert all(count <= FETCHES_PER_NODE for count in counts.values()), "too many fetches"

    # The lake

    def lake_failed(self, text: str, *, is_final: bool = False) -> None:
        """Takes a failure of the lake. Its requests are asked again, and their readers wait.
        `is_final`: it is the lake of another log, so its readers go on without it."""
        if self.lake.failed(text, self._state.now, is_final=is_final):
            name = "lake_refused" if is_final else "lake_away"
            self._state.note("error" if is_final else "warning", name, {"text": text})
        self.disconnected(LAKE)

    def lake_greeting(self) -> FetchFrame | None:
        """Returns a FETCH of nothing, by which the lake is checked, or None without metadata."""
        log, generation = self._log_id(), self._context.generation
        return FetchFrame(number=0, generation=generation, ranges=[], log=log) if log else None

    def _log_id(self) -> str:
        metadata = self._context.metadata
        return "" if metadata is None else metadata.cluster_id

    def _needs_lake(self, effect: AnyRead) -> bool:
        """Whether records of a stored partition that the read needs may be in the lake alone."""
        if self.lake.ask is None:
            return False
        starts = self._state.journal.start_offsets
        if isinstance(effect, ReadLog):
            return any(
                at < min(limit, start)
                for at, limit, start in zip(effect.positions, effect.limits, starts, strict=True)
            )
        if isinstance(effect, FetchInflight):
            return any(offset < starts[partition] for _, partition, offset in effect.wanted)
        return any(starts[partition] for partition in searched_partitions(effect))

    def _begin_of(self, partition: int) -> int:
        """The offset below which only a lake has the records of a partition."""
        if self.is_stored(partition):
            return self._state.journal.start_offsets[partition]
        return self._oldest(partition)

    def _is_past(self, job: ReadJob, partition: int, offset: int) -> bool:
        """Whether the job reads this offset of a partition in the lake."""
        if self.lake.ask is None or job.is_without_lake:
            return False
        if isinstance(job.effect, FindStarts):
            return not job.unsearched
        return offset < self._begin_of(partition)

    def _plan_past(self, job: ReadJob) -> None:
        """Finds the partitions that a search for starts has to search in the lake, once it has
        searched the log."""
        effect = job.effect
        if not isinstance(effect, FindStarts) or job.unsearched or job.unsearched_past is not None:
            return
        job.unsearched_past = set()
        segments = self._state.journal.segments
        oldest_us = segments[0].head.first_timestamp_us if self._stores_all() and segments else 0
        if self.lake.ask is not None and job.needs_past(oldest_us):
            job.unsearched_past = {
                partition
                for partition in searched_partitions(effect)
                if not self.is_stored(partition) or self._begin_of(partition)
            }

    def _stores_all(self) -> bool:
        return all(map(self.is_stored, range(len(self._state.delivered))))

    # Nodes for a job

    def _assign_all(self, jobs: Iterable[ReadJob]) -> None:
        for job in jobs:
            self._assign(job)

    def _assign(self, job: ReadJob) -> None:
        """Gives the job to the node that serves it next, or its result to its reader."""
        if job.is_stale():
            self.lake.end_wait(reader_of(job.effect))
            return
        self._plan_past(job)
        needs = [] if job.is_full() else self._pass_lost(job)
        if any(
            self._is_past(job, each, position_of(job, each)) for each in needs
        ) and self.lake.gives_up(reader_of(job.effect), self._state.now):
            job.is_without_lake = True
            job.unsearched_past = set()
            needs = self._pass_lost(job)
        if not needs:
            self._answered.append(job)
            return
        by_node: dict[str, list[int]] = {}
        for partition in needs:
            for node in self._servers(job, partition):
                by_node.setdefault(node, []).append(partition)
        # A reader of the lake gets what is found: the rest of its budget may be far.
        if not by_node or (LAKE in by_node and job.records):
            (self._answered if job.has_progress() else self._parked).append(job)
            return
        own = self._context.node_id
        if own in by_node and LAKE not in by_node:
            job.node, job.partitions = own, by_node[own]
            self._read_here(job)
            return
        # The oldest records come first.
        job.node = LAKE if LAKE in by_node else self._choose(by_node)
        job.partitions = by_node[job.node]
        self._queues.setdefault(job.node, deque()).append(job)

    def _choose(self, by_node: dict[str, list[int]]) -> str:
        """Returns the node with the most partitions, a follower before a leader, and each of
        several equal ones in its turn."""
        self._turn += 1
        names = sorted(by_node)
        first = self._turn % len(names)
        leader = self._context.leader
        return min(
            names[first:] + names[:first],
            key=lambda name: (-len(by_node[name]), sum(leader(p) == name for p in by_node[name])),
        )

    def _servers(self, job: ReadJob, partition: int) -> list[str]:
        """The connected nodes that may have what the job needs of a partition."""
        context = self._context
        now = self._state.now
        position = position_of(job, partition)
        if self._is_past(job, partition, position):
            return [LAKE] if self.lake.may_ask(now) else []
        if self.is_stored(partition):
            return [context.node_id]
        begins = self._begins.get(partition, {})
        all_lossy = all(node in job.lossy for node in self._in_sync(partition))
        return [
            node
            for node in self._in_sync(partition)
            if node in context.connected
            and context.understands(node, FEEDS)
            and self._unable.get((node, partition), 0.0) <= now
            and (begins.get(node, 0) <= position or isinstance(job.effect, FindStarts))
            and (all_lossy or node not in job.lossy)
        ]

    def _in_sync(self, partition: int) -> tuple[str, ...]:
        metadata = self._context.metadata
        return () if metadata is None else metadata.partitions[partition].in_sync

    def _pass_lost(self, job: ReadJob) -> list[int]:
        """Passes the records that no in-sync replica has any more. Returns the partitions that are
        still to be read.

        The start of every in-sync replica must be known. Counter-example with those that are
        connected: the others' logs were shortened by a full disk, and the one with the records
        comes back in a second.
        """
        effect = job.effect
        if isinstance(effect, FetchInflight):
            left = iter(left_of(job) if self._begins else ())
            for packet_id, partition, offset in left:
                if offset >= self._oldest(partition) or self._is_past(job, partition, offset):
                    break
                job.found.append((packet_id, None))
        elif isinstance(effect, ReadLog):
            for partition in self._begins:
                end = min(self._oldest(partition), effect.limits[partition])
                at = job.positions[partition]
                if end > at and not self._is_past(job, partition, at):
                    job.lost += end - job.positions[partition]
                    job.positions[partition] = end
        return job.needs()

    def _oldest(self, partition: int) -> int:
        """The lowest offset that an in-sync replica has, or 0 while one of them is not known to
        begin above it."""
        begins = self._begins.get(partition, {})
        return min((begins.get(node, 0) for node in self._in_sync(partition)), default=0)

    def _retry_parked(self, now: float) -> None:
        """Tries the parked jobs again, some of them in each turn. Many are tried less often."""
        if not self._woken and now >= self._retry_at and (self._parked or self.unreachable):
            self._woken = len(self._parked)
            self._retry_at = now + RETRY_S * (1 + self._woken // RETRY_MAX)
            self._failing.clear()
            self.lake.forget_old(now)
        elif not self._woken:
            return
        steps = min(RETRY_MAX, self._woken)
        self._woken -= steps
        for _ in range(steps):
            job = self._parked.popleft()
            parked = len(self._parked)
            self._retry(job)
            if len(self._parked) > parked:
                self._failing.update(
                    each
                    for each in job.needs()
                    if not self._is_past(job, each, position_of(job, each))
                )
        if not self._woken:
            self._note_unreachable()

    def _retry(self, job: ReadJob) -> None:
        """Tries a parked job again. If it is parked again, and other partitions have new records,
        its reader continues with these."""
        parked = len(self._parked)
        self._assign(job)
        effect = job.effect
        if len(self._parked) > parked and isinstance(effect, ReadLog):
            ends = self._state.delivered
            limits = effect.limits
            if any(ends[p] > limit and self._servers(job, p) for p, limit in enumerate(limits)):
                self._answered.append(self._parked.pop())

    def _note_unreachable(self) -> None:
        """Reports the partitions that readers wait for, when that begins and when it ends."""
        for partition in self._failing - self.unreachable.keys():
            self.unreachable[partition] = self._state.now
            text = "no replica can be read, so its readers wait"
            self._state.note("warning", "reads_wait", {"partition": partition, "text": text})
        for partition in self.unreachable.keys() - self._failing:
            del self.unreachable[partition]
            self._state.note("info", "reads_continue", {"partition": partition})

    def _mark_unable(self, node: str, partitions: Iterable[int]) -> None:
        now = self._state.now
        if len(self._unable) > 2 * len(self._state.delivered):
            self._unable = {key: until for key, until in self._unable.items() if until > now}
        for partition in partitions:
            self._unable[(node, partition)] = now + UNABLE_S

    # Reads at this node

    def _read_here(self, job: ReadJob) -> None:
        """Reads the partitions of a job that are stored here."""
        effect = job.effect
        here = set(job.partitions)
        part: AnyRead
        if isinstance(effect, ReadLog):
            limits = list(job.positions)
            for partition in here:
                limits[partition] = effect.limits[partition]
            part = ReadLog(
                None,
                None,
                list(job.positions),
                limits,
                effect.interests,
                effect.records_max - len(job.records),
                effect.bytes_max - job.size_bytes,
            )
        elif isinstance(effect, FetchInflight):
            wanted = list(
                takewhile(
                    lambda each: (
                        self.is_stored(each[1]) and not self._is_past(job, each[1], each[2])
                    ),
                    left_of(job),
                )
            )
            part = FetchInflight(None, None, wanted, effect.bytes_max - job.size_bytes)
        else:
            limits = [end if p in here else 0 for p, end in enumerate(effect.limits)]
            part = FindStarts(None, None, effect.wanted, limits)
            job.begins = list(self._state.journal.start_offsets)
        part.done = partial(self._was_read_here, job, list(all_needs(part)))
        self._state.effects.append(part)

    def _was_read_here(self, job: ReadJob, here: list[int], result: Any) -> None:
        """Continues a job, elsewhere if this node has forgotten a partition of `here`. A node with
        a damaged disk serves no client, so nothing waits."""
        if result is None:
            if all(map(self._has_log, here)):
                return
        elif isinstance(result, ReadResult):
            is_past = any(self._is_past(job, p, job.positions[p]) for p in job.partitions)
            if not (result.lost and is_past):
                for record in result.records:
                    job.take(record)
                job.positions = result.positions
                job.lost += result.lost
        elif isinstance(job.effect, FetchInflight):
            for (number, found), (_, partition, offset) in zip(result, left_of(job), strict=False):
                if found is None and self._is_past(job, partition, offset):
                    break
                job.add_found(number, found)
        elif self.lake.ask is None or job.begins == self._state.journal.start_offsets:
            # The lake is searched below where the log began. Counter-example: the log has two of
            # the last three records, retention removes one of them, and the lake has it twice.
            job.add_starts(job.partitions, result)
        self._assign(job)

    # Reads at other nodes

    def _send_from(self, node: str) -> None:
        """Sends the node as many FETCHes as it may have."""
        queue = self._queues[node]
        while (
            queue
            and self._in_flight.get(node, 0) < FETCHES_PER_NODE
            and len(self._answered) < ANSWERS_KEPT_MAX
        ):
            job = queue.popleft()
            if not job.is_stale():
                self._send(node, job, queue)
        if not queue:
            del self._queues[node]

    def _send(self, node: str, job: ReadJob, queue: deque[ReadJob]) -> None:
        fetch = Fetch(node, [job], job.partitions, self._state.now)
        self._number += 1
        frame = FetchFrame(number=self._number, generation=self._context.generation, ranges=[])
        effect = job.effect
        if isinstance(effect, ReadLog):
            self._join(fetch, job, queue)
            ask_for_range(frame, fetch)
            if node == LAKE:
                for each in frame.ranges:
                    each.end = min(each.end, self._begin_of(each.partition))
        elif isinstance(effect, FetchInflight):
            able = {p: node in self._servers(job, p) for p in {each[1] for each in left_of(job)}}
            left = takewhile(
                lambda each: (
                    able[each[1]] and self._is_past(job, each[1], each[2]) == (node == LAKE)
                ),
                left_of(job),
            )
            frame.wanted = [(partition, offset) for _, partition, offset in left]
            frame.bytes_max = effect.bytes_max - job.size_bytes
        else:
            frame.ranges = [ReadRange(p, 0, effect.limits[p]) for p in job.partitions]
            for query, start in zip(effect.wanted, job.starts, strict=True):
                offsets = [query.offsets[p] for p in job.partitions] if query.offsets else []
                frame.queries.append((query.filter, query.since_us, query.last, offsets))
                if node == LAKE:
                    frame.left.append({topic.decode(): n for topic, n in start.left.items()})
            if node == LAKE:
                for each in frame.ranges:
                    if job.begins and self.is_stored(each.partition):
                        each.end = min(each.end, job.begins[each.partition])
        self._fetches[self._number] = fetch
        self._in_flight[node] = self._in_flight.get(node, 0) + 1
        self._state.stats.log_fetches += 1
        self.shared += len(fetch.jobs) - 1
        if node != LAKE:
            self._context.send(node, FETCH, encode_fetch(frame))
        elif self.lake.ask is not None:
            frame.log = self._log_id()
            self.lake.ask(encode_fetch(frame))

    def _join(self, fetch: Fetch, first: ReadJob, queue: deque[ReadJob]) -> None:
        """Moves the jobs of the queue to the fetch that are at nearly the same positions."""
        filters = filter_count(first)
        passed: list[ReadJob] = []
        for _ in range(min(SHARED_SCAN, len(queue))):
            if len(fetch.jobs) >= SHARED_MAX or filters >= SHARED_FILTERS:
                break
            job = queue.popleft()
            if job.shares_with(first) and not job.is_stale():
                fetch.jobs.append(job)
                filters += filter_count(job)
            else:
                passed.append(job)
        queue.extendleft(reversed(passed))

    def _end(self, number: int) -> None:
        """Removes a fetch."""
        fetch = self._fetches.pop(number)
        self._in_flight[fetch.node] -= 1
        if not self._in_flight[fetch.node]:
            del self._in_flight[fetch.node]

    def _take_answer(self, fetch: Fetch, head: FetchedFrame) -> None:
        refused: set[int] = set()
        for partition, reason, begin in head.refused:
            refused.add(partition)
            if reason == BELOW_START:
                self._begins.setdefault(partition, {})[fetch.node] = begin
            else:
                self._mark_unable(fetch.node, (partition,))
        effect = fetch.jobs[0].effect
        if isinstance(effect, ReadLog):
            self._take_records(fetch, head, refused)
        elif isinstance(effect, FetchInflight):
            self._take_found(fetch, head)
        else:
            self._take_starts(fetch, head, refused)
        self._assign_all(fetch.jobs)

    def _take_records(self, fetch: Fetch, head: FetchedFrame, refused: set[int]) -> None:
        partitions = fetch.partitions
        if len(head.positions) != len(partitions):
            raise BadFrame(f"{len(head.positions)} positions of {len(partitions)} partitions")
        if any(map(lt, head.positions, fetch.starts)):
            raise BadFrame("a read that ends below where it began")
        if head.positions == fetch.starts:
            if fetch.node == LAKE:
                raise BadFrame("a read of the lake without progress")
            self._mark_unable(fetch.node, set(partitions) - refused)
            return
        jobs = [job for job in fetch.jobs if not job.is_stale()]
        if head.lost:
            if len(jobs) > 1:
                # It is not known whose records they are.
                for job in jobs:
                    job.is_shareable = False
                return
            nodes = {node for p in partitions for node in self._in_sync(p)}
            if fetch.node == LAKE:
                nodes = {LAKE}
            for job in jobs:
                job.lossy.add(fetch.node)
                if not nodes <= job.lossy:
                    return
                job.lossy.clear()
                job.lost += head.lost
        distribute(jobs, fetch.records, dict(zip(partitions, head.positions, strict=True)))

    def _take_found(self, fetch: Fetch, head: FetchedFrame) -> None:
        job = fetch.jobs[0]
        records = {(each.partition, each.offset): each for each in fetch.records}
        for number, partition, offset in left_of(job)[: head.looked_at]:
            record = records.get((partition, offset))
            if record is None:
                job.lossy.add(fetch.node)
                if fetch.node != LAKE and not job.lossy.issuperset(self._in_sync(partition)):
                    return
            job.lossy.clear()
            job.add_found(number, record)

    def _take_starts(self, fetch: Fetch, head: FetchedFrame, refused: set[int]) -> None:
        job = fetch.jobs[0]
        effect = job.effect
        if not head.starts and refused.issuperset(fetch.partitions):
            return
        assert isinstance(effect, FindStarts)
        if len(head.starts) != len(effect.wanted) or any(
            not each.error and len(each.offsets) != len(fetch.partitions) for each in head.starts
        ):
            raise BadFrame("starts that were not asked for")
        if fetch.node == LAKE:
            job.add_past_starts(
                [past_start(each, fetch.partitions, effect.limits) for each in head.starts]
            )
            return
        found = [found_start(each, fetch.partitions, effect.limits) for each in head.starts]
        job.add_starts([p for p in fetch.partitions if p not in refused], found)

    # Results

    def _answer_some(self) -> None:
        """Hands over the results, some of them in each turn and at least one."""
        state = self._state
        while self._answered:
            left = state.steps_left
            job = self._answered.popleft()
            self._answer(job)
            if state.steps_left == left:
                state.steps_left -= 1 + len(job.records)
            if state.steps_left <= 0:
                return

    def _answer(self, job: ReadJob) -> None:
        effect = job.effect
        if isinstance(effect, ReadLog):
            is_done = not job.needs()
            self._node.handle_read(effect, job.records, job.positions, is_done, job.lost)
        elif isinstance(effect, FetchInflight):
            self._node.handle_fetched(effect, job.found)
        else:
            handle_starts(self._state, effect, job.starts)
