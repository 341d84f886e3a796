"""Commits a node's records by the journal's sequence while it is the whole cluster.

Every other node waits for tickets, because its records come back from a leader. A node that leads
every partition and is alone in every in-sync set commits what its disk has. So its records stay in
memory from admission to the fold, in append order, and none is parsed again. No frame is built, and
nothing is kept per partition.

Invariants
- A record is folded, and its promise resolved, after its commit and in append order.
- `end` leaves the node as if `RecordForwarder` had appended every record: a ticket in the log, an
  entry in its queue, and the promises in order per connection. So another node may join at any
  moment. Counter-example: a record has no entry, and its partition moves to a node that lacks it.
  The record is cut off, and the client never receives its PUBACK.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.node_state import CallbackPromise, NodeState, Promise
from holdfast.node.publish.admission import REFUSED, STORE, Admission, is_recognised
from holdfast.node.publish.apply import Applier
from holdfast.node.publish.completion import PrecedingPromise, PublishPromise
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.protocol.mqtt.reasons import NO_MATCHING_SUBSCRIBERS

NO_PARTITION: Final = -1


class _Step:
    """A promise without a record of its own, which waits for the steps before it, or a record with
    a promise that already has another one."""

    def __init__(self, partition: int, record: Record | None, promise: Promise) -> None:
        """`partition`: of the record, or of the records that the promise waits for."""
        self.partition = partition
        self.record = record
        self.promise = promise


class LocalCommit:
    """The records that this node has appended and not folded while it is alone
    (`ClusterContext.is_alone`)."""

    def __init__(
        self,
        state: NodeState,
        admission: Admission,
        forwarding: RecordForwarder,
        applier: Applier,
    ) -> None:
        self._state = state
        self._journal = state.journal
        self._admission = admission
        self._forwarding = forwarding
        self._promises = forwarding.promises
        self._applier = applier
        # A Promise stands for its `appended` record, a Record has no promise, and the rest are
        # `_Step`s. Unless `release` runs, the first one has a record that is not committed.
        self._steps: list[object] = []

    def waiting(self) -> int:
        """The number of records and promises that wait."""
        return len(self._steps)

    def append(self, record: Record) -> None:
        """Appends a record without a promise."""
        if self._append(record) == STORE:
            self._add(record)

    def publish(self, record: Record, promise: Promise) -> None:
        """Appends a record. The promise waits for it, and for its other conditions."""
        promise.waiting += 1
        outcome = self._append(record)
        if outcome != STORE:
            self._answer(record, promise, outcome)
        elif promise.appended is None:
            promise.appended = record
            self._add(promise)
        else:
            self._add(_Step(record.partition, record, promise))

    def _append(self, record: Record) -> int:
        """Appends a record if admission stores it. Returns the verdict."""
        record.ticket = self._forwarding.next_ticket()
        if self._needs_admission(record) or self._state.disk_full:
            return self._admission.append_own(record)
        self._journal.append(record)
        return STORE

    def _needs_admission(self, record: Record) -> bool:
        """Whether admission may decide about the record, or by it about later ones.

        It need not for the packet ids of QoS 2 messages, unless the log was put back. Their session
        is here, and has all of them: what was appended for it before is folded when it is resumed,
        because records are folded in append order.
        """
        flags = record.flags & log_record.STATE_FLAGS
        is_message = record.kind == log_record.MESSAGE and flags == log_record.FLAG_PACKET_ID
        if is_message or record.kind == log_record.RELEASE:
            return self._state.was_put_back
        return is_recognised(record)

    def _add(self, step: object) -> None:
        """Adds an appended record, and the one that admission has appended behind it, if any."""
        self._steps.append(step)
        removed = self._admission.removed
        if removed is not None:
            self._admission.removed = None
            self._steps.append(removed)

    def _answer(self, record: Record, promise: Promise, outcome: int) -> None:
        """Queues the reply to a record that is not appended. A repetition waits for the records
        before it in its partition."""
        partition = record.partition
        if outcome == REFUSED:
            self._promises.refuse(promise, self._admission.refusal)
            partition = NO_PARTITION
        self._await(partition, promise)

    def promise(self, promise: Promise) -> None:
        """Queues a promise without a record."""
        promise.waiting += 1
        self._await(NO_PARTITION, promise)

    def after_newest(self, partition: int, do: Callable[[], None]) -> None:
        """Calls `do` once every record appended so far is folded."""
        promise = CallbackPromise(lambda _: do())
        promise.waiting += 1
        self._await(partition, promise)

    def _await(self, partition: int, promise: Promise) -> None:
        """Lets a promise without a record wait for the steps before it."""
        if self._steps:
            self._steps.append(_Step(partition, None, promise))
        else:
            self._resolve(promise)

    def _resolve(self, promise: Promise) -> None:
        """Meets the condition that a promise had for its place in the order."""
        promise.waiting -= 1
        self._promises.add(promise)
        if isinstance(promise, PrecedingPromise):
            promise.end_precedence(self._state)

    def release(self) -> None:
        """Folds what is committed, and resolves its promises."""
        steps, applier = self._steps, self._applier
        marks = self._journal.high_watermark
        done = 0
        # A step may append others.
        while done < len(steps):
            step = steps[done]
            record: Record | None
            promise: Promise | None
            if isinstance(step, Promise):
                record, promise = step.appended, step
            elif isinstance(step, Record):
                record, promise = step, None
            else:
                assert isinstance(step, _Step)
                record, promise = step.record, step.promise
            if record is not None:
                if record.offset >= marks[record.partition]:
                    break
                route = promise.precedes if isinstance(promise, PublishPromise) else None
                # Also a session that is away is a receiver.
                if not applier.fold(record) and route and not applier.filters.match(route.topic):
                    assert promise is not None
                    promise.reason = NO_MATCHING_SUBSCRIBERS
                if self._needs_admission(record):
                    self._admission.committed(record.partition, record.offset + 1)
            if promise is not None:
                if promise is step:
                    promise.appended = None
                self._resolve(promise)
            done += 1
        del steps[:done]

    def end(self) -> None:
        """Hands everything that waits to the forwarding."""
        steps, self._steps = self._steps, []
        found: list[tuple[Record | None, Promise | None, int]] = []
        for step in steps:
            if isinstance(step, Promise):
                found.append((step.appended, step, NO_PARTITION))
                step.appended = None
            elif isinstance(step, Record):
                found.append((step, None, NO_PARTITION))
            else:
                assert isinstance(step, _Step)
                found.append((step.record, step.promise, step.partition))
        self._admission.note_again([record for record, _, _ in found if record is not None])
        for record, promise, partition in found:
            if record is not None and record.ticket:
                # Admission's own records have no ticket. They are folded when the log has them.
                self._forwarding.adopt(record, promise)
            if promise is None:
                continue
            if record is None and partition == NO_PARTITION:
                self._resolve(promise)
                continue
            self._promises.add(promise)
            if record is None:
                self._forwarding.after_newest(partition, partial(self._settle, promise))

    def _settle(self, promise: Promise) -> None:
        self._promises.settle(promise)
        if isinstance(promise, PrecedingPromise):
            promise.end_precedence(self._state)
