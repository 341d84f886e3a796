"""State of a broker that both kinds of nodes can have: sessions, groups, and entries.

It is what recovery makes of a directory whose node has ended, in a form that says the same of a
single broker and of a cluster.

Invariant of a group: a record is finished, or it is at or above the group's position and not in
`finished`. A QoS 1 record that a member has not acknowledged is given back to the group, because
the two kinds of nodes differ in who keeps it. A QoS 2 record stays with its member, which alone may
receive it again.

A session whose time is over has ended, although no node was there to record it. Its group has the
QoS 1 records again, and has finished the QoS 2 ones, as when a node ends a session. [MQTT-4.8.2-4]
[MQTT-4.8.2-5] Counter-example: a member with an expiry of 30 s had ten messages of a queue, and the
broker has been down for a minute. No other member would get the messages.
"""

import threading
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.log.batch import Batch
from holdfast.log.journal.recovery import OpenedJournal
from holdfast.log.reading.cursor import LogReader
from holdfast.node.session.session import NEVER_EXPIRES, SENT, Group, Inflight, Session
from holdfast.node.session.state import in_sending_order
from holdfast.node.state.offset_ranges import FinishedOffsets
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.recovery import Recovery
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import (
    QueueRecord,
    ReplayEntry,
    SubscriptionRow,
    WillEntry,
    replay_entries,
    subscription_row,
    will_entry,
)
from holdfast.node.state.snapshot_entries import (
    first_starts,
    message_entries,
)
from holdfast.protocol.topics.names import InvalidTopic, decode_topic, matches

READ_BYTES: Final = 8 << 20
Place = tuple[int, int]
"""Partition and offset."""
InflightRow = tuple[int, int, int, int, int, int, bool]
"""Packet id, state, QoS, tag of the group, partition, offset, and whether it is retained."""


class CarriedSession(Struct):
    """A session that outlives its connection, or whose will is to be published."""

    client: str
    epoch: int
    expiry_s: int
    """The seconds until it ends; 0: it has ended, and only its will is left."""
    username: str | None
    proved: bool
    was_open: bool
    """It had a connection at the end, or its last messages may not be in its cursor."""
    will: WillEntry | None
    subscriptions: list[tuple[SubscriptionRow, list[int] | None]]
    replays: dict[str, ReplayEntry]
    positions: list[int]
    inflight: dict[int, Inflight]
    done: list[Place]
    inbound: dict[int, int]
    """The partitions of its own QoS 2 messages that are not released, by packet id."""

    def lasting(self) -> tuple[object, ...]:
        """The parts that a conversion must not change. Times go on meanwhile."""
        rows: list[InflightRow] = [
            (packet_id, each.state, each.qos, each.group_tag, each.partition, each.offset,
             each.is_retained)
            for packet_id, each in self.inflight.items()
        ]  # fmt: skip
        subscriptions = sorted(self.subscriptions, key=lambda row: row[0][0])
        will = None if self.will is None else (self.will.topic, self.will.payload, self.will.qos)
        return (
            *(self.client, self.username, self.proved, will, subscriptions, self.replays),
            *(self.positions, rows, self.done, self.inbound, self.expiry_s > 0),
        )


class CarriedGroup(Struct):
    """A shared group that outlives its connections."""

    key: str
    positions: list[int]
    """Per partition the first record that is not finished."""
    finished: set[Place] = field(default_factory=set)
    """The finished ones at or above the positions."""
    kept: set[Place] = field(default_factory=set)
    """The QoS 2 records that members have."""


class CarriedState(Struct):
    """The whole state."""

    sessions: list[CarriedSession]
    queues: list[QueueRecord]
    groups: list[CarriedGroup]
    entries: list[tuple[int, bytes]]
    """Retained and delayed messages, producers and bans, as entries of a snapshot."""

    def lasting(self) -> tuple[object, ...]:
        """The parts that a conversion must not change."""
        return (
            [each.lasting() for each in sorted(self.sessions, key=lambda each: each.client)],
            sorted(self.queues, key=lambda each: each.client),
            sorted((each.key, each.positions, each.finished, each.kept) for each in self.groups),
            sorted(self.entries),
        )


def carry(recovery: Recovery, opened: OpenedJournal) -> CarriedState:
    """The state that `recovery` has after the last record of the log, at the time of its clock."""
    state = recovery.state
    given_back: dict[str, set[Place]] = {}
    ended: set[Session] = set()
    sessions = []
    queues = []
    for client_id, session in state.sessions.items():
        keeper = state.queues.get(client_id)
        if keeper is not None:
            start = session.subscriptions[client_id].start
            start = list(start or [0] * state.config.partitions)
            owner = keeper.username or ""
            queues.append(QueueRecord(client_id, start, "", owner, keeper.is_past))
            continue
        found = _session(recovery, session, given_back)
        if found is None or not found.expiry_s:
            ended.add(session)
        if found is not None:
            sessions.append(found)
    groups = _Groups(recovery, opened, given_back, ended)
    return CarriedState(sessions, queues, list(groups.carry()), list(message_entries(state)))


def _session(
    recovery: Recovery, session: Session, given_back: dict[str, set[Place]]
) -> CarriedSession | None:
    """The session; None if it has ended without a will. `given_back`: receives the records that go
    back."""
    state = recovery.state
    is_open = session in recovery.open or session.owner != ""
    gone_us = 0 if is_open else max(0, state.wall_us - session.rare.disconnected_us)
    expiry_s = session.expiry_s
    if expiry_s != NEVER_EXPIRES:
        expiry_s = max(0, expiry_s - gone_us // 1_000_000)
    will = None if session.will is None else will_entry(session.will)
    if will is not None:
        will.delay_s = max(0, will.delay_s - gone_us // 1_000_000)
    inflight = _kept_inflight(session, given_back)
    carried = CarriedSession(
        session.client_id,
        max(1, session.epoch),
        expiry_s,
        session.username,
        session.is_owned,
        is_open or _may_be_sent(recovery, session.client_id),
        will,
        subscriptions=[],
        replays={},
        positions=list(state.journal.start_offsets),
        inflight={},
        done=[],
        inbound={},
    )
    if not expiry_s:
        return None if will is None else carried
    positions = first_starts(state, session) if session.positions is None else session.positions
    replays = replay_entries(session)
    rows = [
        (subscription_row(each), None if each.is_begun(positions) else each.start)
        for each in session.subscriptions.values()
    ]
    return replace(
        carried,
        subscriptions=rows,
        replays=replays if isinstance(replays, dict) else {},
        positions=list(map(min, positions, state.journal.next_offset)),
        inflight=inflight,
        done=sorted(session.done or ()),
        inbound=_inbound(recovery, session),
    )


def _may_be_sent(recovery: Recovery, client_id: str) -> bool:
    session = recovery.state.sessions.get(client_id)
    return isinstance(recovery, ReplicatedState) and session is not None and session.rare.lacks_sent


def _inbound(recovery: Recovery, session: Session) -> dict[int, int]:
    if isinstance(recovery, ReplicatedState):
        return recovery.inbound_ids(session.client_id)
    return dict(session.inbound or {})


def _kept_inflight(session: Session, given_back: dict[str, set[Place]]) -> dict[int, Inflight]:
    """The session's inflight records, without the QoS 1 records of its groups."""
    groups = list(session.groups or ())
    kept: dict[int, Inflight] = {}
    for packet_id, entry in in_sending_order(session.inflight).items():
        keys = [group.key for group in groups if entry.group_tag == group.tag]
        if entry.qos == 1 and keys:
            # With two groups of one tag it may be the record of either.
            for key in keys:
                given_back.setdefault(key, set()).add((entry.partition, entry.offset))
        else:
            kept[packet_id] = entry
    return kept


class _Groups:
    """The groups of a recovery."""

    def __init__(
        self,
        recovery: Recovery,
        opened: OpenedJournal,
        given_back: dict[str, set[Place]],
        ended: set[Session],
    ) -> None:
        self._recovery = recovery
        self._ended = ended
        # By tag of a group, the sessions with its QoS 2 records: also those that have left it.
        self._holders: dict[int, set[Session]] = {}
        for session in recovery.state.sessions.values():
            for entry in session.inflight.values():
                if entry.group_tag and entry.qos == 2:
                    self._holders.setdefault(entry.group_tag, set()).add(session)
        self._state: RecordedState = recovery.state
        self._given_back = given_back
        self._reader = LogReader(opened.journal, opened.store, threading.Lock())

    def carry(self) -> Iterator[CarriedGroup]:
        for group in self._state.groups.values():
            if any(each.expiry_s > 0 and each not in self._ended for each in group.members):
                yield self._carry(group)

    def _carry(self, group: Group) -> CarriedGroup:
        before = self._positions(group)
        holders = self._holders.get(group.tag, set())
        kept, sent = _with_holders(group, holders - self._ended)
        of_ended, _ = _with_holders(group, holders & self._ended)
        confirmed = kept - sent
        waiting = sent | (self._given_back.get(group.key, set()) - confirmed)
        if isinstance(self._recovery, ReplicatedState):
            finished = self._recovery.groups.done.get(group.key, FinishedOffsets())
            done = {(each, offset) for each, of in finished.items() for offset in of.offsets()}
            # The log says what is finished, whatever a member still has.
            waiting = {place for place in waiting if place[1] >= before[place[0]]} - done
        else:
            # Members have had the assigned records, and finished those that they have no longer.
            done = self._recovery.group_assigned.get(group.key, set()) - kept
        low = list(before)
        for partition, offset in waiting:
            low[partition] = min(low[partition], offset)
        # No other member may have what a client has confirmed, or had when its session ended.
        received = confirmed | (of_ended - waiting)
        done = {place for place in done | received if place[1] >= low[place[0]]}
        for partition, end in enumerate(before):
            for offset in self._matching(group, partition, low[partition], end):
                if (partition, offset) not in waiting:
                    done.add((partition, offset))
        return CarriedGroup(group.key, low, done, kept)

    def _positions(self, group: Group) -> list[int]:
        """The group's positions in the log. Without any it begins where its members subscribed."""
        ends = self._state.journal.next_offset
        positions = self._recovery.group_positions.get(group.key)
        if positions is None:
            positions = list(ends)
            for member in group.members.values():
                if member.start is not None:
                    positions = list(map(min, positions, member.start))
        return list(map(min, positions, ends))

    def _matching(self, group: Group, partition: int, low: int, end: int) -> Iterator[int]:
        """The offsets of the group's messages between two offsets."""
        known: dict[bytes, bool] = {b"": False}
        while low < end:
            found = self._reader.read_batches(partition, low, end, READ_BYTES)
            if not found:
                return
            for data in found:
                batch = Batch(data, check=False)
                for index, topic in enumerate(batch.topics()[0]):
                    if topic not in known:
                        known[topic] = _matches(group.filter, topic)
                    offset = batch.base_offset + index
                    if known[topic] and low <= offset < end:
                        yield offset
            low = Batch(found[-1], check=False).end_offset


def _with_holders(group: Group, holders: Iterable[Session]) -> tuple[set[Place], set[Place]]:
    """The QoS 2 records that the sessions have, and those of them that no client has confirmed."""
    kept: set[Place] = set()
    sent: set[Place] = set()
    for session in holders:
        for entry in session.inflight.values():
            if entry.qos == 2 and entry.group_tag == group.tag:
                kept.add((entry.partition, entry.offset))
                if entry.state == SENT:
                    sent.add((entry.partition, entry.offset))
    return kept, sent


def _matches(filter: str, topic: bytes) -> bool:
    try:
        return matches(filter, decode_topic(topic))
    except InvalidTopic:
        return False
