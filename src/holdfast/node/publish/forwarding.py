"""Forwards records to the leaders of their partitions.

A record gets a ticket, a number of this node, which stays with it in the log. It is done when it is
applied here as committed: every data node replicates every partition. A positive reply is therefore
not needed, and none can be lost. FORWARD_RESULT reports only records that the leader refused or
already had.

Invariants
- A record is `pending` until it is applied as committed, or refused.
- The records of a partition leave in append order, to one leader in one epoch.
- A leader's result counts only while the record is with that leader in that epoch. Counter-example:
  n4 is deposed and does not know it, n5 leads and receives the record again. n4 refuses it, and the
  client uses the packet id for another message. n5 commits the first message, counts the second as
  a repetition, and acknowledges it without storing it.
- After a change of that leader, its epoch or the link, no record leaves at first. This node's log
  must have everything that the next leader has (`aligned`). The records found there are not sent
  again; the rest is, in order. So a failover neither loses a record nor stores it twice.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.addresses import server_reference
from holdfast.log import record as log_record
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.record import Record
from holdfast.node.connections.close import close_connection
from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import FORWARD
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.publish.completion import PrecedingPromise
from holdfast.node.publish.delayed_table import is_due
from holdfast.node.publish.forward_frames import FORWARD_HEAD, ForwardResult
from holdfast.node.publish.pending_records import (
    RECOGNISED,
    Appender,
    PendingRecord,
    is_group_progress,
)
from holdfast.node.publish.promises import PromiseQueues
from holdfast.node.refusal import EARLIER_REFUSED, Rejection
from holdfast.node.state.session_records import LEADER_DECIDED
from holdfast.protocol.mqtt import reasons

PENDING_BYTES_MAX: Final = 64 << 20
"""The size in bytes of uncommitted records above which publishers are not read."""
WAIT_S: Final = 5.0
"""The longest time in seconds that a message waits for a leader before it is refused."""
COMMIT_WAIT_S: Final = 10.0
"""The longest time in seconds that a client waits for a record before it is disconnected: this node
lags in the record's partition. For a change of its subscriptions also if there is no leader."""
LEADS_NO_MORE: Final = Rejection("no leader any more", reasons.UNSPECIFIED_ERROR)
AWAY_TOO_LONG: Final = Rejection("this node was away for too long", reasons.SERVER_BUSY)
NO_LEADER: Final = Rejection("no leader for the topic's partition")
TICKET_MAX: Final = (1 << 32) - 1
"""The highest ticket: records have 32 bits for it."""
FORWARD_BYTES_MAX: Final = 8 << 20
"""The size in bytes of a FORWARD frame: a record that would exceed it begins the next frame. A
single larger record has a frame of its own.

Counter-example: a frame closed after such a record is as large as 8 MiB and the largest record
together. That is more than peers accept in one frame, and it is built again after every failure.
"""

REFUSED_MAX: Final = 1000
"""The number of clients with a refused message, per partition, at which those without a pending
record are removed."""


class RecordForwarder:
    """The queues of this node's pending records, one per partition, and their present leaders.

    Invariant: the messages of one client are stored in the order in which it sent them, or refused.
    The attempt number enforces it. Counter-example: a leader refuses message 1 for lack of
    replicas, while message 2 is under way and arrives when the replicas are back. Without the
    number it would be stored before the repeated message 1.
    """

    def __init__(self, state: NodeState, context: ClusterContext, appender: Appender) -> None:
        self._state = state
        self._context = context
        self._appender = appender
        self.promises = PromiseQueues(state)
        self._ticket = 0
        self._number = 0
        # Invariant: the queues, joined, are `pending`, and `pending_bytes` is the sum of its sizes.
        self.pending: dict[int, PendingRecord] = {}
        self.pending_bytes = 0
        # The pending records per partition, in append order, by ticket.
        self._queues: list[dict[int, PendingRecord]] = [
            {} for _ in range(context.journal.partitions)
        ]
        # The records of sessions with promises, in append order, until `_close_overdue` sees them.
        self._changes: deque[PendingRecord] = deque()
        # Per partition: the leader that receives records, and its epoch. "": the records wait.
        self._targets: list[str] = [""] * context.journal.partitions
        self._epochs: list[int] = [0] * context.journal.partitions
        # Per partition, the number of refusals that its leaders had reasons of their own for. A
        # leader refuses everything sent with the number of an earlier refusal. A message that a
        # client sent after a refused one is therefore not stored before it.
        self._attempts: list[int] = [0] * context.journal.partitions
        # Per partition and client id, for the same reason: messages up to this number are not sent
        # again.
        self._refused: list[dict[bytes, int]] = [{} for _ in range(context.journal.partitions)]
        # The batches that leave at the end of the turn: leader, attempt and records of one
        # partition. `_open`: per partition the last batch, if more records can be added to it.
        self._outbound: list[tuple[str, int, BatchBuilder]] = []
        self._open: list[BatchBuilder | None] = [None] * context.journal.partitions
        self._outbound_bytes = 0
        self.forwarded = 0

    def waits_s(self, now: float) -> float:
        """Returns the age in seconds of the oldest pending record with a promise, or 0.0 without
        one."""
        for pending in self.pending.values():
            if pending.is_promised():
                return max(0.0, now - pending.since)
        return 0.0

    def begin_at(self, ticket: int) -> None:
        """Numbers the tickets from `ticket` + 1.

        The caller passes a random number. An earlier process of this node may have used low tickets
        shortly before, and so may another node for the same client.
        """
        self._ticket = ticket

    def append(self, record: Record) -> PendingRecord:
        """Queues a record, and sends it if its leader is known."""
        record.ticket = self.next_ticket()
        pending = self._enqueue(record)
        if self._targets[record.partition]:
            self._dispatch(pending)
        return pending

    def next_ticket(self) -> int:
        """Returns the ticket of the next record."""
        ticket = self._ticket + 1
        if ticket > TICKET_MAX:
            ticket = 1
        self._ticket = ticket
        return ticket

    def _enqueue(self, record: Record) -> PendingRecord:
        self._number += 1
        pending = PendingRecord(record, self._number, self._state.now)
        assert record.ticket not in self.pending, "a ticket is given twice"
        self.pending[record.ticket] = pending
        self.pending_bytes += pending.size_bytes
        self._queues[record.partition][record.ticket] = pending
        return pending

    def adopt(self, record: Record, promise: Promise | None) -> None:
        """Queues a record with a ticket that this node has appended as leader already. `promise`:
        waits for it."""
        pending = self._enqueue(record)
        pending.in_doubt = True
        pending.promise = promise

    def publish(self, record: Record, promise: Promise) -> None:
        """Appends a record. The promise waits for it, and for its other conditions."""
        pending = self.append(record)
        # This node may lead the partition and have refused the record already.
        if not pending.done:
            pending.promise = promise
            promise.waiting += 1
            if record.kind == log_record.SESSION:
                self._changes.append(pending)
        elif pending.refusal is not None:
            self.promises.refuse(promise, pending.refusal)
        self.promises.add(promise)
        if pending.done and isinstance(promise, PrecedingPromise):
            promise.end_precedence(self._state)

    def _dispatch(self, pending: PendingRecord) -> None:
        partition = pending.partition
        target = self._targets[partition]
        pending.in_doubt = True
        if target == self._context.node_id:
            self._appender.append(pending)
            return
        self.forwarded += 1
        self._outbound_bytes += pending.size_bytes
        if self._outbound_bytes > FORWARD_BYTES_MAX:
            self._send()
            self._outbound_bytes = pending.size_bytes
        builder = self._open[partition]
        if builder is None:
            builder = BatchBuilder(partition, 0)
            self._open[partition] = builder
            self._outbound.append((target, self._attempts[partition], builder))
        builder.add(pending.record)

    def flush(self) -> None:
        """Sends one frame to each leader, at the end of a turn."""
        self._send()

    def _send(self) -> None:
        outbound = self._outbound
        if not outbound:
            return
        self._outbound = []
        self._outbound_bytes = 0
        frames: dict[str, list[bytes]] = {}
        for target, attempt, builder in outbound:
            partition = builder.partition
            self._open[partition] = None
            if self._targets[partition] == target:
                parts = frames.setdefault(target, [])
                parts.append(FORWARD_HEAD.pack(self._epochs[partition], attempt))
                parts.append(builder.build(0))
        for target, parts in frames.items():
            self._context.send(target, FORWARD, b"".join(parts))

    def settle(self, ticket: int, partition: int, client_id: bytes) -> None:
        """Marks the record with this ticket as committed, if it belongs to this node.

        Tickets of several nodes can be equal, so the partition and the client id must match too.
        """
        pending = self.pending.get(ticket)
        if pending is None or pending.partition != partition:
            return
        if pending.record.client_id == client_id:
            self._done(pending)

    def answered(self, node: str, answer: ForwardResult) -> None:
        """Takes the result of a leader, and ignores it if the record is not with that leader any
        more."""
        pending = self.pending.get(answer.ticket)
        if pending is None:
            return
        partition = pending.partition
        is_of_leader = node == self._targets[partition]
        if answer.epoch:
            is_of_leader = is_of_leader and answer.partition == partition
            is_of_leader = is_of_leader and answer.epoch == self._epochs[partition]
        if is_of_leader:
            is_refused = answer.reason >= reasons.UNSPECIFIED_ERROR
            refusal = Rejection(answer.text, answer.reason) if is_refused else None
            self.refuse(answer.ticket, refusal)

    def refuse(self, ticket: int, refusal: Rejection | None) -> None:
        """Ends a record that is not stored, now or later. None: the leader has it already."""
        pending = self.pending.get(ticket)
        if pending is None:
            return
        if refusal is not None and refusal.reason == reasons.QUOTA_EXCEEDED:
            self._attempts[pending.partition] += 1
            self._open[pending.partition] = None
            self._note_refused(pending)
        pending.refusal = refusal
        if pending.promise is not None and refusal is not None:
            self.promises.refuse(pending.promise, refusal)
        if pending.afterwards is not None:
            self._pass_down(pending, pending.afterwards)
            pending.afterwards = None
        self._done(pending)

    def _pass_down(self, pending: PendingRecord, afterwards: list[Callable[[], None]]) -> None:
        """Gives the callbacks of a refused record to the record before it in the queue.

        The refusal does not apply the records before it. Counter-example: a message is refused, and
        the cursor record before it is still under way. That record names the QoS 2 record that a
        session has. The group would reclaim that QoS 2 record and give it to another session.
        """
        before: PendingRecord | None = None
        for each in self._queues[pending.partition].values():
            if each is pending:
                break
            before = each
        if before is None:
            for do in afterwards:
                do()
        elif before.afterwards is None:
            before.afterwards = afterwards
        else:
            before.afterwards.extend(afterwards)

    def _note_refused(self, pending: PendingRecord) -> None:
        refused = self._refused[pending.partition]
        if len(refused) >= REFUSED_MAX:
            oldest = next(iter(self._queues[pending.partition].values())).number
            for client_id in [each for each, number in refused.items() if number < oldest]:
                del refused[client_id]
        refused[pending.record.client_id] = self._number

    def _follows_refused(self, pending: PendingRecord) -> bool:
        """True if an earlier message of the client was refused, which the client may send again."""
        if not pending.is_refusable():
            return False
        refused = self._refused[pending.partition]
        return pending.number <= refused.get(pending.record.client_id, 0)

    def _done(self, pending: PendingRecord) -> None:
        queue = self._queues[pending.partition]
        del self.pending[pending.ticket]
        del queue[pending.ticket]
        if not queue:
            self._refused[pending.partition].clear()
        self.pending_bytes -= pending.size_bytes
        assert self.pending_bytes >= 0, "fewer bytes are pending than none"
        assert not pending.done, "a record is done twice"
        pending.done = True
        if pending.afterwards is not None:
            for do in pending.afterwards:
                do()
        promise = pending.promise
        if promise is not None:
            self.promises.settle(promise)
            if isinstance(promise, PrecedingPromise):
                promise.end_precedence(self._state)

    def in_doubt(self, partition: int) -> list[tuple[int, bytes]]:
        """Returns ticket and client id of the pending records that a leader may have."""
        queue = self._queues[partition]
        return [(each.ticket, each.record.client_id) for each in queue.values() if each.in_doubt]

    def has_doubt(self, partition: int) -> bool:
        """True if a leader may have one of the pending records."""
        return any(each.in_doubt for each in self._queues[partition].values())

    def stop(self, partition: int) -> None:
        """Stops sending to a partition because its leader, or the link to it, is lost.

        Sending resumes once the next leader is known and this node is aligned with it.
        """
        self._targets[partition] = ""

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        count = 0
        for partition, queue in enumerate(self._queues):
            number = 0
            for ticket, pending in queue.items():
                assert pending.partition == partition, "the queue of another partition"
                assert self.pending.get(ticket) is pending, "a record that is not pending waits"
                assert number < pending.number, "the append order"
                assert not pending.done, "a record that is done waits"
                number = pending.number
            count += len(queue)
        assert count == len(self.pending), "a pending record is in no queue"
        sizes = [pending.size_bytes for pending in self.pending.values()]
        assert sum(sizes) == self.pending_bytes, "the bytes of pending records"
        self.promises.check()

    def target(self, partition: int) -> str:
        return self._targets[partition]

    def aligned(
        self, partition: int, leader: str, epoch: int, known: set[tuple[int, bytes]]
    ) -> None:
        """Sends the pending records that `leader` does not have.

        This node's log has everything that the leader had when it replied. `known`: ticket and
        client id of the uncommitted records in that log. Tickets of several nodes can be equal.
        Counter-example without the client id: the record of another node is taken for this node's,
        which is not sent again and is never done.
        """
        assert epoch >= self._epochs[partition], "the epoch of the leader falls"
        self._targets[partition] = leader
        self._epochs[partition] = epoch
        self._open[partition] = None
        self._outbound = [each for each in self._outbound if each[2].partition != partition]
        for pending in list(self._queues[partition].values()):
            record = pending.record
            if (pending.ticket, record.client_id) in known:
                continue
            if is_group_progress(record) and record.sequence < epoch:
                # No client waits for it, and the messages appended after it are not refused.
                self.refuse(pending.ticket, None)
                continue
            if record.kind == log_record.SESSION and record.payload.startswith(LEADER_DECIDED):
                # This node decided it as leader of the home partition. The next leader may have
                # decided otherwise.
                self.refuse(pending.ticket, LEADS_NO_MORE)
                continue
            if self._follows_refused(pending):
                self.refuse(pending.ticket, EARLIER_REFUSED)
                continue
            self._dispatch(pending)

    def after_newest(self, partition: int, do: Callable[[], None]) -> None:
        """Calls `do` once every record appended to the partition so far is applied or refused."""
        queue = self._queues[partition]
        if queue:
            newest = queue[next(reversed(queue))]
            if newest.afterwards is None:
                newest.afterwards = []
            newest.afterwards.append(do)
        else:
            do()

    def refuse_unresolved(self, partition: int) -> None:
        """Ends plain messages that a leader may have, and later messages of the same clients.

        This node's log now begins after the records that would show whether they are stored. So the
        clients are disconnected and told nothing of them: a refused message is not stored.
        Messages with a packet id or sequence alone need no refusal: their leader recognises them
        when they are sent again. Counter-example without the later ones: the leader has neither,
        the client sends the refused message again, and its next one of QoS 2 is stored before.
        """
        refused: set[bytes] = set()
        for pending in list(self._queues[partition].values()):
            record = pending.record
            client_id = record.client_id
            is_plain = record.kind == log_record.MESSAGE and not record.flags & RECOGNISED
            follows = client_id in refused and pending.is_refusable()
            if ((pending.in_doubt and is_plain) or follows) and not is_due(record):
                refused.add(client_id)
                promise = pending.promise
                if promise is not None and promise.connection is not None:
                    reason, text = AWAY_TOO_LONG.reason, AWAY_TOO_LONG.text
                    close_connection(self._state, promise.connection, reason, text)
                self.refuse(pending.ticket, AWAY_TOO_LONG)

    def _close_overdue(self, now: float) -> None:
        """Disconnects clients that have waited too long for a record that may be stored, so it is
        not refused: a change of subscriptions, or any one that others commit without this node.

        The client connects again, and finds the session as the log has it.
        """
        overdue = now - COMMIT_WAIT_S
        changes = self._changes
        while changes and (changes[0].done or changes[0].since <= overdue):
            pending = changes.popleft()
            if not pending.done:
                self._close(pending, reasons.SERVER_BUSY, "")
        for partition, queue in enumerate(self._queues):
            oldest = next(iter(queue.values()), None)
            if oldest is not None and oldest.since <= overdue and self._context.has_majority(now):
                servers = self._context.servers(self._context.nodes_ahead(partition))
                for pending in list(queue.values()) if servers else ():
                    if pending.since <= overdue:
                        self._close(pending, reasons.USE_ANOTHER_SERVER, servers)

    def _close(self, pending: PendingRecord, reason: int, servers: str) -> None:
        """Disconnects the client that waits for the record, if one does."""
        connection = None if pending.promise is None else pending.promise.connection
        if connection is not None:
            text = f"its record of partition {pending.partition} is not committed at this node"
            found = server_reference(servers, connection.listener.kind)
            close_connection(self._state, connection, reason, text, found)

    def refuse_overdue(self, now: float) -> None:
        """Refuses messages that have waited too long for a leader, and later messages of the same
        clients.

        Records of state and wills continue to wait, and so do records that may be stored already.
        """
        self._close_overdue(now)
        for partition, target in enumerate(self._targets):
            refused: set[bytes] = set()
            for pending in () if target else list(self._queues[partition].values()):
                if pending.in_doubt or not pending.is_refusable():
                    continue
                client_id = pending.record.client_id
                if pending.since <= now - WAIT_S or client_id in refused:
                    refused.add(client_id)
                    self.refuse(pending.ticket, NO_LEADER)
