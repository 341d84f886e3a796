"""The commit of a node's own records while it is the whole cluster: by the journal's sequence.

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

from holdfast.broker.promise import PROMISE_BYTES, Promise
from holdfast.broker.publish.completion import PrecedingPromise, PublishPromise
from holdfast.broker.state import NodeState
from holdfast.cluster.publish.admission import REFUSED, STORE, Admission
from holdfast.cluster.publish.apply import Applier
from holdfast.cluster.publish.forwarding import RecordForwarder
from holdfast.protocol.mqtt.reasons import NO_MATCHING_SUBSCRIBERS
from holdfast.storage import record as log_record
from holdfast.storage.record import Record

NO_PARTITION: Final = -1


class _Step:
    """A record, a promise or a call in append order. A record waits for its commit, the others for
    the steps before them."""

    def __init__(self, partition: int, record: Record | None, promise: Promise | None) -> None:
        """`partition`: of the record, or of the records that the promise or the call waits for."""
        self.partition = partition
        self.record = record
        self.promise = promise
        self.call: Callable[[], None] | None = None


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
        # A message with its PUBACK or PUBREC is a PublishPromise, everything else a `_Step`. Unless
        # `release` runs, the first one has a record that is not committed.
        self._steps: list[object] = []

    def is_waiting(self) -> bool:
        """Whether a record or a promise waits."""
        return bool(self._steps)

    def size_bytes(self) -> int:
        """The memory of what waits, approximately."""
        return len(self._steps) * PROMISE_BYTES

    def append(self, record: Record) -> None:
        """Append a record without a promise."""
        record.ticket = self._forwarding.next_ticket()
        if self._admission.append_own(record) == STORE:
            self._steps.append(_Step(record.partition, record, None))
            self._add_removal()

    def publish(self, record: Record, promise: Promise) -> None:
        """Append a record. The promise waits for it, and for its other conditions."""
        record.ticket = self._forwarding.next_ticket()
        promise.waiting += 1
        outcome = STORE
        is_plain = not record.is_state() and not self._state.disk_full
        if is_plain:
            # No plain message is a repetition.
            self._journal.append(record)
        else:
            outcome = self._admission.append_own(record)
        if outcome != STORE:
            self._answer(record, promise, outcome)
        elif isinstance(promise, PublishPromise) and promise.record is record:
            self._steps.append(promise)
        else:
            self._steps.append(_Step(record.partition, record, promise))
        if not is_plain:
            self._add_removal()

    def _add_removal(self) -> None:
        """Add the record that admission has appended behind the last one, if any."""
        removed = self._admission.removed
        if removed is not None:
            self._steps.append(_Step(removed.partition, removed, None))

    def _answer(self, record: Record, promise: Promise, outcome: int) -> None:
        """Queue the reply to a record that is not appended. A repetition waits for the records
        before it in its partition."""
        partition = record.partition
        if outcome == REFUSED:
            self._promises.refuse(promise, self._admission.reason, self._admission.text)
            partition = NO_PARTITION
        if self._steps:
            self._steps.append(_Step(partition, None, promise))
        else:
            self._resolve(promise)

    def _resolve(self, promise: Promise) -> None:
        """Meet the condition that was counted for the record of a promise."""
        promise.waiting -= 1
        self._promises.add(promise)
        if isinstance(promise, PrecedingPromise):
            promise.end_precedence(self._state)

    def promise(self, promise: Promise) -> None:
        """Queue a promise without a record."""
        if self._steps:
            promise.waiting += 1
            self._steps.append(_Step(NO_PARTITION, None, promise))
        else:
            self._promises.add(promise)

    def after_newest(self, partition: int, do: Callable[[], None]) -> None:
        """Call `do` once every record appended so far is folded."""
        if not self._steps:
            do()
            return
        step = _Step(partition, None, None)
        step.call = do
        self._steps.append(step)

    def release(self) -> None:
        """Fold what is committed, and resolve its promises."""
        steps, applier = self._steps, self._applier
        marks = self._journal.high_watermark
        done = 0
        # A step may append others.
        while done < len(steps):
            step = steps[done]
            if isinstance(step, PublishPromise):
                record = step.record
                if record.offset >= marks[record.partition]:
                    break
                route = step.precedes
                # Also a session that is away is a receiver.
                if not applier.fold(record) and route and not applier.filters.match(route.topic):
                    step.reason = NO_MATCHING_SUBSCRIBERS
                if record.flags & log_record.STATE_FLAGS:
                    self._admission.committed(record.partition, record.offset + 1)
                step.waiting -= 1
                self._promises.add(step)
                step.end_precedence(self._state)
            else:
                assert isinstance(step, _Step)
                if not self._is_released(step, marks):
                    break
            done += 1
        del steps[:done]

    def _is_released(self, step: _Step, marks: list[int]) -> bool:
        record = step.record
        if record is not None:
            if record.offset >= marks[record.partition]:
                return False
            self._applier.fold(record)
            self._admission.committed(record.partition, record.offset + 1)
        if step.promise is not None:
            self._resolve(step.promise)
        if step.call is not None:
            step.call()
        return True

    def end(self) -> None:
        """Hand everything that waits to the forwarding."""
        steps, self._steps = self._steps, []
        for step in steps:
            if isinstance(step, PublishPromise):
                self._hand_over(step.record, step)
                continue
            assert isinstance(step, _Step)
            promise = step.promise
            if step.record is not None:
                self._hand_over(step.record, promise)
            elif promise is not None and step.partition != NO_PARTITION:
                self._promises.add(promise)
                self._forwarding.after_newest(step.partition, partial(self._settle, promise))
            elif promise is not None:
                self._resolve(promise)
            if step.call is not None:
                self._forwarding.after_newest(step.partition, step.call)

    def _settle(self, promise: Promise) -> None:
        self._promises.settle(promise)
        if isinstance(promise, PrecedingPromise):
            promise.end_precedence(self._state)

    def _hand_over(self, record: Record, promise: Promise | None) -> None:
        if record.ticket:
            # Admission's own records have no ticket. They are folded when the log has them.
            self._forwarding.adopt(record, promise)
        if promise is not None:
            self._promises.add(promise)
