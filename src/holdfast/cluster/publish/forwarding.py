"""Records on their way to the leaders of their partitions.

A record gets a ticket, a number of this node, that stays with it in the log. It is done when it
comes back committed, through the replication that every node takes part in: no answer is needed,
and none can be lost. What a leader did not take or already had is told by FORWARD_RESULT.

Invariants
- A record is `pending` until it is seen committed, or refused.
- Per partition, records leave in the order they were appended, to one leader under one epoch.
- A leader's answer counts only while the record is with that leader under that epoch. Counter-
  example: n4 is deposed and has not heard of it, n5 leads and gets the record again. n4 refuses it,
  the client uses the packet id for another message, and n5 commits the first one: it takes the
  second for a repetition and acknowledges it without storing it.
- When that leader, its epoch or the link to it is lost, nothing leaves until this node's log has
  everything that the next leader has (`aligned`): what is in there is not sent again, the rest
  is, in order. So a failover neither loses a record nor stores it twice.
"""

import struct
from collections.abc import Callable
from typing import Final

from holdfast.broker.recovery.state_records import SESSION_OPENED
from holdfast.broker.state import Held, NodeState
from holdfast.cluster.context import ClusterContext
from holdfast.cluster.frame_kinds import FORWARD, BadFrame
from holdfast.cluster.publish.promises import Promise, enqueue, settled
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.topics.names import SHARE_PREFIX
from holdfast.storage import record as log_record
from holdfast.storage.record import Batch, BatchBuilder, CorruptBatch, Record

PENDING_BYTES_MAX: Final = 64 << 20
"""Of records that wait to be committed; publishers are not read above it."""
WAIT_S: Final = 5.0
"""How long a message waits for a leader before it is refused."""
TICKET_MAX: Final = (1 << 32) - 1
FORWARD_BYTES_MAX: Final = 8 << 20
"""A FORWARD frame is closed before a record that would take it past this size; a single larger
record makes one of its own. Counter-example: a frame closed behind the record holds 8 MiB and the
largest record, more than peers take in one frame, and is built anew after every failure."""

REFUSED_MAX: Final = 1000
"""Clients per partition that had a message refused, before those are sorted out that have nothing
on its way any more."""

_HEAD: Final = struct.Struct("<II")
"""Of each batch of FORWARD: epoch, attempt."""
_RESULT: Final = struct.Struct("<IBH")


_GROUP: Final = SHARE_PREFIX.encode()
"""So begin the keys of shared groups."""

RECOGNISED: Final = log_record.FLAG_PACKET_ID | log_record.FLAG_PRODUCER | log_record.FLAG_WILL
"""Messages that are not stored twice, whoever sends them again."""


class ForwardResult:
    """What a leader says of a record that was forwarded to it. `epoch`: under which it led the
    partition; 0: a node of an older version does not name it."""

    def __init__(self, partition: int, epoch: int, ticket: int, reason: int, text: str) -> None:
        self.partition = partition
        self.epoch = epoch
        self.ticket = ticket
        self.reason = reason
        self.text = text


class PendingRecord:
    def __init__(self, record: Record, number: int, since: float) -> None:
        self.record = record
        self.partition = record.partition
        self.ticket = record.ticket
        # Grows with every record; tickets begin anew.
        self.number = number
        self.since = since
        # No less than it takes in a frame, with a batch of its own.
        self.size_bytes = (
            200
            + len(record.topic)
            + len(record.client_id)
            + len(record.producer)
            + len(record.properties)
            + len(record.payload)
            + len(record.audience)
        )
        # A leader may have it: whether it does is known once this node is aligned.
        self.in_doubt = False
        self.promise: Promise | None = None
        self.afterwards: list[Callable[[], None]] | None = None
        # Committed or refused; `reason` and `text` as in Promise.
        self.done = False
        self.reason = 0
        self.text = ""

    def is_promised(self) -> bool:
        """Does anybody wait for it? Nobody does for a QoS 0 message or a will."""
        record = self.record
        if record.kind == log_record.MESSAGE:
            return bool(record.flags & log_record.FLAG_QOS_MASK) and not is_will(record)
        return record.kind != log_record.RETAINED

    def is_refusable(self) -> bool:
        """Is it a message whose client may send it again?"""
        return self.record.kind == log_record.MESSAGE and not is_will(self.record)


def _is_group_progress(record: Record) -> bool:
    """Of a shared group, by its coordinator, under the epoch of the group's home. That of a deposed
    coordinator does not go to the next leader, which coordinates the group now and has begun
    without it. Counter-example: it comes after the next coordinator has begun, which then logs a
    lower position. The nodes announce again what they have finished."""
    return record.kind == log_record.CURSOR and record.client_id.startswith(_GROUP)


def is_will(record: Record) -> bool:
    return record.flags & log_record.FLAG_WILL != 0


class Appender:
    """The leader's side, for records of this very node; see admission.Admission."""

    def append(self, pending: PendingRecord) -> None:
        raise NotImplementedError


class RecordForwarder:
    def __init__(self, state: NodeState, fabric: ClusterContext, appender: Appender) -> None:
        self._state = state
        self._fabric = fabric
        self._appender = appender
        self._ticket = 0
        self._number = 0
        self.pending: dict[int, PendingRecord] = {}
        self.pending_bytes = 0
        # Per partition, in order.
        self._queues: list[dict[int, PendingRecord]] = [
            {} for _ in range(fabric.journal.partitions)
        ]
        # Per partition: to whom records leave, and under which epoch; "": they wait.
        self._targets: list[str] = [""] * fabric.journal.partitions
        self._epochs: list[int] = [0] * fabric.journal.partitions
        # Per partition, how often its leaders have refused something for a reason of their own.
        # They refuse all that is sent with the number of an earlier refusal: what a client sent
        # behind a refused message must not be stored before that.
        self._attempts: list[int] = [0] * fabric.journal.partitions
        # Likewise, per partition and client id: messages up to this number do not leave again.
        self._refused: list[dict[bytes, int]] = [{} for _ in range(fabric.journal.partitions)]
        # Appended since the last promise: that one is about them.
        self._recent: list[PendingRecord] = []
        # What leaves at the end of the turn: leader, attempt, and records of one partition each;
        # and per partition the last of them, if more can be added to it.
        self._outbound: list[tuple[str, int, BatchBuilder]] = []
        self._open: list[BatchBuilder | None] = [None] * fabric.journal.partitions
        self._outbound_bytes = 0
        self.forwarded = 0
        self.sent_again = 0
        # Answers of leaders that the record is not with any more.
        self.outdated = 0

    def waits_s(self, now: float) -> float:
        """How long the oldest record that somebody waits for has been pending; 0.0: none is."""
        for pending in self.pending.values():
            if pending.is_promised():
                return max(0.0, now - pending.since)
        return 0.0

    def begin_at(self, ticket: int) -> None:
        """Tickets start after this one. A random place: another process of this node, or another
        node for the same client, may have used low ones shortly before."""
        self._ticket = ticket

    def append(self, record: Record) -> None:
        ticket = self._ticket + 1
        if ticket > TICKET_MAX:
            ticket = 1
        self._ticket = ticket
        self._number += 1
        record.ticket = ticket
        partition = record.partition
        pending = PendingRecord(record, self._number, self._state.now)
        self.pending[ticket] = pending
        self.pending_bytes += pending.size_bytes
        self._queues[partition][ticket] = pending
        if pending.is_promised():
            self._recent.append(pending)
        if self._targets[partition]:
            self._dispatch(pending)

    def hold(self, held: Held, others: int = 0) -> Promise:
        """Of everything appended since the last call. `others`: what else it waits for, each to be
        `settled`."""
        promise = Promise(held)
        promise.waiting = others
        for pending in self._recent:
            # It may have been refused at once.
            if pending.done:
                promise.refuse(pending.reason, pending.text)
            else:
                pending.promise = promise
                promise.waiting += 1
        self._recent = []
        enqueue(self._state, promise)
        return promise

    def forget_recent(self) -> None:
        """What was appended without a promise is no part of the next one."""
        if self._recent:
            self._recent = []

    def _dispatch(self, pending: PendingRecord) -> None:
        partition = pending.partition
        target = self._targets[partition]
        pending.in_doubt = True
        if target == self._fabric.node_id:
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
        """End of a turn: one frame for each leader."""
        self.forget_recent()
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
                parts.append(_HEAD.pack(self._epochs[partition], attempt))
                parts.append(builder.build(0))
        for target, parts in frames.items():
            self._fabric.send(target, FORWARD, b"".join(parts))

    def settle(self, ticket: int, partition: int, client_id: bytes) -> None:
        """A record with this ticket is committed; whether it is ours shows here."""
        pending = self.pending.get(ticket)
        if pending is None or pending.partition != partition:
            return
        if pending.record.client_id == client_id:
            self._done(pending)

    def answered(self, node: str, answer: ForwardResult) -> None:
        """By the leader of a partition, or by a node that was the leader."""
        pending = self.pending.get(answer.ticket)
        if pending is None:
            return
        partition = pending.partition
        is_of_leader = node == self._targets[partition]
        if answer.epoch:
            is_of_leader = is_of_leader and answer.partition == partition
            is_of_leader = is_of_leader and answer.epoch == self._epochs[partition]
        if is_of_leader:
            self.refuse(answer.ticket, answer.reason, answer.text)
        else:
            self.outdated += 1

    def refuse(self, ticket: int, reason: int, text: str) -> None:
        """Below 0x80: the leader has it already. Else it is not stored, now or later."""
        pending = self.pending.get(ticket)
        if pending is None:
            return
        if reason == reasons.QUOTA_EXCEEDED:
            self._attempts[pending.partition] += 1
            self._open[pending.partition] = None
            self._note_refused(pending)
        pending.reason = reason
        pending.text = text
        if pending.promise is not None:
            pending.promise.refuse(reason, text)
        if pending.afterwards is not None:
            self._pass_down(pending, pending.afterwards)
            pending.afterwards = None
        self._done(pending)

    def _pass_down(self, pending: PendingRecord, afterwards: list[Callable[[], None]]) -> None:
        """Those before it are not applied by its refusal. Counter-example: a message is refused,
        and the cursor record before it, which names the QoS 2 record that a session has, is still
        on its way. The group would take that record back and give it to another session."""
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
        """Was an earlier message of the client refused, which may send that again?"""
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
        pending.done = True
        if pending.afterwards is not None:
            for do in pending.afterwards:
                do()
        if pending.promise is not None:
            settled(self._state, pending.promise)

    def stop(self, partition: int) -> None:
        """The leader of the partition, or the link to it, is lost: nothing leaves until the next
        one is known and this node is aligned with it."""
        self._targets[partition] = ""

    def target(self, partition: int) -> str:
        return self._targets[partition]

    def aligned(self, partition: int, leader: str, epoch: int, known: set[int]) -> None:
        """This node's log has everything that `leader` had when it answered. `known`: tickets in
        it that are not committed yet. The rest leaves now."""
        self._targets[partition] = leader
        self._epochs[partition] = epoch
        self._open[partition] = None
        self._outbound = [each for each in self._outbound if each[2].partition != partition]
        for pending in list(self._queues[partition].values()):
            if pending.ticket in known:
                continue
            record = pending.record
            if _is_group_progress(record) and record.sequence < epoch:
                # No client waits for it: whoever appended after it in the same turn is not refused.
                self.refuse(pending.ticket, reasons.SUCCESS, "")
                continue
            if record.kind == log_record.SESSION and record.payload.startswith(SESSION_OPENED):
                # Decided when this node led the home, by what it knew then.
                self.refuse(pending.ticket, reasons.UNSPECIFIED_ERROR, "no leader any more")
                continue
            if self._follows_refused(pending):
                text = "an earlier message was refused: send that first"
                self.refuse(pending.ticket, reasons.QUOTA_EXCEEDED, text)
                continue
            if pending.in_doubt:
                self.sent_again += 1
            self._dispatch(pending)

    def after_newest(self, partition: int, do: Callable[[], None]) -> None:
        """Once every record that was appended to the partition so far is applied, or refused."""
        queue = self._queues[partition]
        if queue:
            newest = queue[next(reversed(queue))]
            if newest.afterwards is None:
                newest.afterwards = []
            newest.afterwards.append(do)
        else:
            do()

    def waiting_partitions(self) -> list[int]:
        """Those with records that have no leader to go to."""
        return [
            partition
            for partition, target in enumerate(self._targets)
            if not target and self._queues[partition]
        ]

    def give_up_doubtful(self, partition: int) -> None:
        """This node will never see the records that would tell whether these are stored. Others
        are told apart by their leader when they come a second time."""
        for pending in list(self._queues[partition].values()):
            record = pending.record
            is_plain = record.kind == log_record.MESSAGE and not record.flags & RECOGNISED
            if pending.in_doubt and is_plain:
                self.refuse(pending.ticket, reasons.SERVER_BUSY, "this node was away for too long")

    def refuse_overdue(self, now: float) -> None:
        """Messages that no leader can have and that have waited too long, and what their clients
        have sent behind them. Records of state wait on, and so do wills and what may be stored
        already."""
        for partition in self.waiting_partitions():
            refused: set[bytes] = set()
            for pending in list(self._queues[partition].values()):
                if pending.in_doubt or not pending.is_refusable():
                    continue
                client_id = pending.record.client_id
                if pending.since <= now - WAIT_S or client_id in refused:
                    refused.add(client_id)
                    text = "no leader for the topic's partition"
                    self.refuse(pending.ticket, reasons.QUOTA_EXCEEDED, text)


def decode_forward(payload: bytes) -> list[tuple[int, int, Batch]]:
    """(epoch, attempt, batch) each. Raises BadFrame."""
    found: list[tuple[int, int, Batch]] = []
    at = 0
    try:
        while at < len(payload):
            epoch, attempt = _HEAD.unpack_from(payload, at)
            batch = Batch(payload, at + _HEAD.size)
            found.append((epoch, attempt, batch))
            at += _HEAD.size + batch.length
    except (struct.error, CorruptBatch) as error:
        raise BadFrame(f"forwarded records: {error}") from None
    return found


def encode_result(answers: list[ForwardResult]) -> bytes:
    """Entries of (ticket, reason, text). One with ticket 0, which no record has, precedes the
    answers of a partition and has the partition and the epoch as its text. Nodes of an older
    version find no record with that ticket and pass it over."""
    parts: list[bytes] = []
    partition = -1
    epoch = 0
    for answer in answers:
        if answer.partition != partition or answer.epoch != epoch:
            partition = answer.partition
            epoch = answer.epoch
            parts.append(_result(0, 0, f"{partition} {epoch}"))
        parts.append(_result(answer.ticket, answer.reason, answer.text))
    return b"".join(parts)


def _result(ticket: int, reason: int, text: str) -> bytes:
    data = text.encode()
    return _RESULT.pack(ticket, reason, len(data)) + data


def decode_result(payload: bytes) -> list[ForwardResult]:
    """Raises BadFrame."""
    found: list[ForwardResult] = []
    partition = 0
    epoch = 0
    at = 0
    try:
        while at < len(payload):
            ticket, reason, length = _RESULT.unpack_from(payload, at)
            at += _RESULT.size
            text = payload[at : at + length].decode()
            at += length
            if ticket:
                found.append(ForwardResult(partition, epoch, ticket, reason, text))
            else:
                first, second = text.split(" ")
                partition, epoch = int(first), int(second)
    except (struct.error, ValueError) as error:
        raise BadFrame(f"results of forwarding: {error}") from None
    return found
