"""Puts records that were read for readers behind the log into their outbox."""

from holdfast.log.record import FLAG_AUDIENCE, FLAG_QOS_MASK, FLAG_RETAIN, Record
from holdfast.node.delivery.live_lane import is_backed_up, is_full, pump_lane
from holdfast.node.delivery.log_replay import (
    READ_RECORDS_MAX,
    continue_reading,
    message_of,
    resend_passed,
)
from holdfast.node.delivery.outbox import pump
from holdfast.node.delivery.transmission import can_send
from holdfast.node.effects import ReadLog
from holdfast.node.node_state import NodeState, Work
from holdfast.node.rights import may_read, may_replay
from holdfast.node.routing.routing import subscription_to, subscriptions_of
from holdfast.node.session.connection import Connection
from holdfast.node.session.cursor import Delivery, LiveLane, Redelivery
from holdfast.node.session.session import (
    Group,
    Session,
    Subscription,
)
from holdfast.node.state.state_records import note_progress
from holdfast.protocol.mqtt.fields import VARINT_MAX, varint
from holdfast.protocol.mqtt.publish import topic_field


def handle_read(
    state: NodeState,
    effect: ReadLog,
    records: list[Record],
    positions: list[int],
    done: bool,
    lost: int,
) -> None:
    """Queues the result of a ReadLog effect. `lost`: records that retention or damage took."""
    reader = effect.cursor
    assert reader is not None, "the read of another node"
    if effect.lane is not None:
        if isinstance(reader, Session) and reader.connection is effect.connection:
            _handle_lane_read(state, reader, effect.lane, records, positions, done)
        return
    if not reader.reading or effect.number != reader.read_number:
        return
    state.stats.log_records_read += len(records)
    if lost:
        state.stats.dropped_lost += lost
        state.note("warning", "records_lost", {"reader": reader_name(reader), "count": lost})
    if isinstance(reader, Session):
        if reader.connection is not effect.connection:
            return
        if lost:
            reader.own_rare().lost += lost
        if reader.has_starts and state.config.replay_bytes_per_s:
            state.replay_pace.charge_read(records)
        work = QueueRead(reader, effect.connection, records, positions, done)
        # Enough for all records of a read if few filters match.
        state.steps_left -= work.step(state, 2 * READ_RECORDS_MAX)
        if work.has_more:
            state.start_work(work)
        return
    state.cluster.groups.handle_read(reader, records, positions, done)


def _handle_lane_read(
    state: NodeState,
    session: Session,
    lane: LiveLane,
    records: list[Record],
    positions: list[int],
    done: bool,
) -> None:
    """Queues the records of a lane that catches up. The replay will pass those that are sent. Lost
    records are left to it, because it reads the same part of the log."""
    if session.lane is not lane or not lane.reading:
        return
    state.stats.log_records_read += len(records)
    known = _known_places(session)
    for record in records:
        topic = record.topic.decode()
        if not lane.takes(topic):
            continue
        place = (record.partition, record.offset)
        if place in known:
            redelivery = _redelivery(session, record)
            if redelivery is not None:
                lane.push(redelivery)
            continue
        subscription = subscription_to(
            subscriptions_of(state, session, topic), record, session.done
        )
        if subscription is None or not may_read(session, record.topic):
            continue
        if subscription.no_local and record.client_id == session.key:
            continue
        message = message_of(record)
        if message.audience is not None and not message.audience.is_plain:
            continue
        if is_full(session, lane):
            lane.close()
            break
        qos = min(message.qos, subscription.qos)
        retain = message.retain and subscription.retain_as_published
        lane.push(Delivery(message, qos, retain, subscription.additions))
    if lane.is_open:
        lane.finish_read(positions, done)
    pump(state, session)
    continue_reading(state, session)


def reader_name(reader: Session | Group) -> str:
    """The client id or group key, for log lines."""
    return reader.client_id if isinstance(reader, Session) else reader.key


class QueueRead(Work):
    """The job that queues the records of a read for a session. A step is a record, or a
    subscription checked for it. `Cursor.reading` stays set until the last record."""

    def __init__(
        self,
        session: Session,
        connection: Connection | None,
        records: list[Record],
        positions: list[int],
        done: bool,
    ) -> None:
        super().__init__()
        self.session = session
        self.connection = connection
        self.records = records
        self.positions = positions
        self.done = done
        self.number = session.read_number
        self.next = 0
        self.deliveries: list[Delivery] = []
        # The records in front of all `deliveries`, and their frames: see `_frame`.
        self.framed: list[Record] = []
        self.frames: list[bytes] = []
        self.takes_frames = (
            connection is not None
            and not connection.mount
            and connection.aliases_out is None
            and not session.outbox
        )
        self.version = 3 if connection is None else connection.version
        self.topics: dict[bytes, TopicPlan] = {}
        # Records sent before a crash whose packet id was logged before the position moved.
        self.known = _known_places(session)

    def step(self, state: NodeState, steps: int) -> int:
        session = self.session
        self.has_more = False
        if session.connection is not self.connection or session.read_number != self.number:
            return 0
        if not session.reading:
            return 0
        # Between two steps rights and subscriptions may change. The outbox asks for rights again.
        self.topics.clear()
        self._unframe()
        done = 0
        while self.next < len(self.records):
            if done >= steps:
                self.has_more = True
                return done
            done += self._queue(state, self.records[self.next])
            self.next += 1
        self._send_frames(state)
        for delivery in self.deliveries:
            _queue(session, delivery)
        session.finish_read(self.positions, self.done)
        resend_passed(state, session)
        if session.is_durable():
            note_progress(state, session)
        pump(state, session)
        if not session.tailing:
            continue_reading(state, session)
        return done

    def _plan(self, state: NodeState, topic: bytes) -> "TopicPlan":
        plan = self.topics.get(topic)
        if plan is None:
            session = self.session
            text = topic.decode()
            plan = TopicPlan(
                subscriptions_of(state, session, text),
                may_read(session, topic),
                may_replay(session, text),
            )
            self.topics[topic] = plan
        return plan

    def _queue(self, state: NodeState, record: Record) -> int:
        session = self.session
        if self.known and (record.partition, record.offset) in self.known:
            redelivery = _redelivery(session, record)
            if redelivery is not None:
                self.deliveries.append(redelivery)
            return 1
        plan = self._plan(state, record.topic)
        if not plan.may_read:
            state.stats.reads_denied += 1
            return 1
        matching = plan.matching
        steps = 1 + len(matching)
        subscription = subscription_to(matching, record, session.done)
        if subscription is None:
            return steps
        if subscription.no_local and record.client_id == session.key:
            return steps
        replay = subscription.replay
        is_past = replay is not None and record.offset < replay.seam[record.partition]
        if is_past and not plan.may_replay:
            # A rule may deny some of the topics that the filter matches.
            state.stats.reads_denied += 1
            return steps
        is_first = self.takes_frames and not self.deliveries
        if is_first and self._frame(record, subscription, plan):
            return steps
        message = message_of(record)
        if message.audience is not None and not message.audience.is_plain:
            return steps
        additions = subscription.additions
        if additions is not None and additions.tells_place and (is_past or session.rare.lost):
            additions = additions.of_past(is_past, session.rare.lost)
            if session.rare.lost:
                session.rare.lost = 0
        self.deliveries.append(
            Delivery(
                message,
                min(message.qos, subscription.qos),
                message.retain and subscription.retain_as_published,
                additions,
            )
        )
        return steps

    def _frame(self, record: Record, subscription: Subscription, plan: "TopicPlan") -> bool:
        """Makes the packet of a record that goes out at QoS 0 and as it is, without the objects of
        a delivery. False: it needs these.

        Frames are made only until the first delivery of a read, and sent before it. So the order
        stays that of the log. Counter-example of frames for all records of QoS 0: a message of QoS
        1 waits for the window, and a later one of its topic, of QoS 0, is sent before it.
        """
        flags = record.flags
        if flags & FLAG_AUDIENCE or (subscription.qos and flags & FLAG_QOS_MASK):
            return False
        if record.properties or subscription.additions is not None:
            return False
        head = plan.head
        if not head:
            head = topic_field(record.topic)
            if self.version >= 5:
                head += b"\0"
            plan.head = head
        payload = record.payload
        size_bytes = len(head) + len(payload)
        if size_bytes > VARINT_MAX:
            return False
        first = b"\x30"
        if flags & FLAG_RETAIN and subscription.retain_as_published:
            first = b"\x31"
        self.frames.append(b"".join((first, varint(size_bytes), head, payload)))
        self.framed.append(record)
        return True

    def _send_frames(self, state: NodeState) -> None:
        """Sends the frames in one piece, at most one read of bytes beyond the limit of the output.
        If they have to wait they become deliveries."""
        frames = self.frames
        if not frames:
            return
        session = self.session
        lane = session.lane
        qos0 = session.waiting_qos0
        if (
            not session.outbox
            and not session.promised_sends
            and (qos0 is None or not qos0.precedes(self.positions))
            and (lane is None or (pump_lane(state, session, lane) and not is_backed_up(session)))
            and can_send(state, session)
        ):
            connection = self.connection
            assert connection is not None
            bytes_max = connection.packet_bytes_max
            if max(map(len, frames)) > bytes_max:
                count = len(frames)
                frames = [frame for frame in frames if len(frame) <= bytes_max]
                state.stats.dropped_too_large += count - len(frames)
            state.stats.publish_sent += len(frames)
            connection.send(b"".join(frames), state.dirty)
            return
        self._unframe()

    def _unframe(self) -> None:
        """Makes deliveries of the frames, because they have to wait."""
        if not self.frames:
            return
        waiting: list[Delivery] = []
        for frame, record in zip(self.frames, self.framed, strict=True):
            # [MQTT-3.3.1-12] The lowest bit of a PUBLISH is RETAIN.
            waiting.append(Delivery(message_of(record), 0, frame[0] & 1 == 1, None))
        self.frames = []
        self.framed = []
        self.deliveries = waiting + self.deliveries


class TopicPlan:
    """The conditions of a read for one of its topics: the session's subscriptions that match, and
    whether the client may have its messages, and those from before its SUBSCRIBE."""

    def __init__(self, matching: list[Subscription], may_read: bool, may_replay: bool) -> None:
        self.matching = matching
        self.may_read = may_read
        self.may_replay = may_replay
        # What a PUBLISH of the topic has between its length and its payload; b"": not made yet.
        self.head = b""


def _known_places(session: Session) -> set[tuple[int, int]]:
    """The records at or above the session's positions that it has already: those in flight, and
    those in its lane."""
    known = {
        (entry.partition, entry.offset)
        for entry in session.inflight.values()
        if not entry.is_retained and not entry.group_tag
    }
    if session.lane is not None:
        for delivery in session.lane.queue:
            known.add((delivery.message.partition, delivery.message.offset))
    return known


def _redelivery(session: Session, record: Record) -> Redelivery | None:
    """The delivery of a record that is inflight, if its message waits for the cursor."""
    ahead = session.rare.inflight_ahead
    if ahead is None or (record.partition, record.offset) not in ahead:
        return None
    message = message_of(record)
    return Redelivery(message, message.qos, message.retain, None)


def _queue(reader: Session | Group, delivery: Delivery) -> None:
    """Queues before the deliveries that were tailed during the read."""
    reading = reader.reading
    reader.reading = False
    reader.push(delivery)
    reader.reading = reading
