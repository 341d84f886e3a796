"""The results of reads for readers that are behind: their records go into the outbox."""

from holdfast.broker.delivery.delivery import (
    pump_group,
)
from holdfast.broker.delivery.log_replay import READ_RECORDS_MAX, continue_reading, message_of
from holdfast.broker.delivery.outbox import pump
from holdfast.broker.delivery.replay_pace import charge_read
from holdfast.broker.effects import ReadLog
from holdfast.broker.recovery.state_records import note_progress
from holdfast.broker.rights import may_read, may_replay
from holdfast.broker.routing import subscription_to, subscriptions_of
from holdfast.broker.session.connection import Connection
from holdfast.broker.session.cursor import Delivery
from holdfast.broker.session.session import (
    Group,
    Session,
    Subscription,
)
from holdfast.broker.state import NodeState, Work
from holdfast.storage.record import Record


def handle_read(
    state: NodeState,
    effect: ReadLog,
    records: list[Record],
    positions: list[int],
    done: bool,
    lost: int,
) -> None:
    """Queue the result of a ReadLog effect. `lost`: records that retention or damage took."""
    reader = effect.cursor
    if not reader.reading or effect.number != reader.read_number:
        return
    state.stats.log_records_read += len(records)
    if lost:
        state.stats.dropped_lost += lost
        state.note("warning", "records_lost", {"reader": reader_name(reader), "count": lost})
    if isinstance(reader, Session):
        if reader.connection is not effect.connection:
            return
        reader.lost += lost
        if reader.has_starts and state.config.replay_bytes_per_s:
            charge_read(state, records)
        work = QueueRead(reader, effect.connection, records, positions, done)
        # Enough for all records of a read if few filters match.
        state.steps_left -= work.step(state, 2 * READ_RECORDS_MAX)
        if work.has_more:
            state.start_work(work)
        return
    if not state.cluster.is_single:
        state.cluster.groups.handle_read(reader, records, positions, done)
        return
    for record in records:
        message = message_of(record)
        audience = message.audience
        if reader.assigned is not None and (record.partition, record.offset) in reader.assigned:
            continue
        if message.qos > 0 and (audience is None or reader.key in audience.groups):
            _queue(reader, Delivery(message, message.qos, message.retain, None))
    reader.finish_read(positions, done)
    state.cluster.groups.moved(reader)
    pump_group(state, reader)
    if not reader.tailing:
        continue_reading(state, reader)


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
        # The matching subscriptions by topic, for this read only.
        self.matching: dict[bytes, list[Subscription]] = {}
        # By topic, whether the client may have it from the past.
        self.replayable: dict[bytes, bool] = {}
        # Records sent before a crash whose packet id was logged before the position moved.
        self.known = {
            (entry.partition, entry.offset)
            for entry in session.inflight.values()
            if not entry.is_retained and not entry.group_tag
        }
        if session.lane is not None:
            for delivery in session.lane.queue:
                self.known.add((delivery.message.partition, delivery.message.offset))

    def step(self, state: NodeState, steps: int) -> int:
        session = self.session
        self.has_more = False
        if session.connection is not self.connection or session.read_number != self.number:
            return 0
        if not session.reading:
            return 0
        done = 0
        while self.next < len(self.records):
            if done >= steps:
                self.has_more = True
                return done
            done += self._queue(state, self.records[self.next])
            self.next += 1
        for delivery in self.deliveries:
            _queue(session, delivery)
        session.finish_read(self.positions, self.done)
        if session.is_durable():
            note_progress(state, session)
        pump(state, session)
        if not session.tailing:
            continue_reading(state, session)
        return done

    def _may_replay(self, topic: bytes) -> bool:
        known = self.replayable.get(topic)
        if known is None:
            known = may_replay(self.session, topic.decode())
            self.replayable[topic] = known
        return known

    def _queue(self, state: NodeState, record: Record) -> int:
        session = self.session
        if not may_read(session, record.topic):
            state.stats.reads_denied += 1
            return 1
        if (record.partition, record.offset) in self.known:
            return 1
        matching = self.matching.get(record.topic)
        if matching is None:
            matching = subscriptions_of(state, session, record.topic.decode())
            self.matching[record.topic] = matching
        steps = 1 + len(matching)
        subscription = subscription_to(matching, record, session.done)
        if subscription is None:
            return steps
        if subscription.no_local and record.client_id == session.key:
            return steps
        replay = subscription.replay
        is_past = replay is not None and record.offset < replay.seam[record.partition]
        if is_past and not self._may_replay(record.topic):
            # A rule may deny some of the topics that the filter matches.
            state.stats.reads_denied += 1
            return steps
        message = message_of(record)
        if message.audience is not None and not message.audience.is_plain:
            return steps
        additions = subscription.additions
        if additions is not None and additions.tells_place and (is_past or session.lost):
            additions = additions.of_past(is_past, session.lost)
            session.lost = 0
        self.deliveries.append(
            Delivery(
                message,
                min(message.qos, subscription.qos),
                message.retain and subscription.retain_as_published,
                additions,
            )
        )
        return steps


def _queue(reader: Session | Group, delivery: Delivery) -> None:
    """Queue before the deliveries that were tailed during the read."""
    reading = reader.reading
    reader.reading = False
    reader.push(delivery)
    reader.reading = reading
