"""The edge inside a broker's process: a session of the broker represents the federation.

Messages for the federation come out of this session (`holdfast.node.federation_session`). The
edge acknowledges them when they are in custody; until then the session's cursor retains them.
Messages from the federation are published under a producer, so the broker stores each once.
Interest is the subscription table, including that of disconnected sessions.

Invariants:

- Nothing runs inside a turn of the broker. Its packets and the federation's changes are queued and
  processed in the next iteration of the loop, in order.
- New filters are subscribed to before the filters that covered them are removed. In the opposite
  order, a message published in between would be missed.
- No message goes out or in before the broker knows the shared groups of its log. Counter-example: a
  message for one of them comes right after a start. The group is in no audience, and never gets it.
- A record for only some of the clients names its audience (`holdfast.node.session.audience`). A
  shared group without a grant therefore skips it, however late it reads the log.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.io.event_loop.broker import Broker
from holdfast.io.sockets.loopback_transport import InProcessTransport
from holdfast.node import federation_session as federating
from holdfast.node.delivery.acknowledgements import handle_puback, handle_pubcomp, handle_pubrec
from holdfast.node.session.connection import CLOSED, OPEN, Connection
from holdfast.node.session.message import Message as BrokerMessage
from holdfast.node.session.session import FEDERATION, Inflight
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.decode import decode, decode_ack
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import CONNACK, PUBLISH, PUBREL, SUBACK, Suback
from holdfast.protocol.mqtt.publish import Publish, decode_publish
from holdfast.protocol.topics.names import matches
from holdfast.protocol.topics.retained import RetainedScan
from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.routing.interest import generalised, may_leave
from holdfast_federation.sidecar.edge import EdgeHost, ReadingDone, RetainedFound
from holdfast_federation.sidecar.edge_broker.interest import BrokerInterest, importable
from holdfast_federation.sidecar.edge_broker.messages import (
    Arrival,
    arrival_of,
    audience_of,
    outgoing,
    refusal,
    retained_here,
    retaining_of,
)
from holdfast_federation.sidecar.edge_broker.origin_offset import LogPlace
from holdfast_federation.sidecar.edge_mqtt.subscriptions import within
from holdfast_federation.sidecar.store.store import UNHURRIED_MAX

logger = logging.getLogger("holdfast")

PAGE: Final = 200
"""The most messages read in one turn of the loop."""
MESSAGES_MAX: Final = 100_000
BYTES_MAX: Final = 64 << 20
"""The limits of one scan. Messages beyond either limit are left out, and that is logged."""

Convert = Callable[[BrokerMessage], Message | None]


class BrokerRetainedScan:
    """One scan of a broker's retained store under several filters."""

    def __init__(self, broker: Broker, convert: Convert) -> None:
        """`convert`: returns None for a message to leave out."""
        self._broker = broker
        self._convert = convert
        self._found: dict[str, Message] = {}
        self._bytes = 0

    def start(self, filters: list[str], done: ReadingDone) -> None:
        """Begins the scan; `done` is called in a later turn of the loop."""
        scans = [self._broker.node.state.retained.scan(filter) for filter in filters]
        self._broker.loop.call_soon(self._continue, scans, done)

    def _continue(self, scans: list[RetainedScan[BrokerMessage]], done: ReadingDone) -> None:
        is_cut = self._is_full() and bool(scans)
        if is_cut:
            logger.warning("federation_retained_left_out messages=%d", len(self._found))
        if is_cut or not scans:
            done(RetainedFound(list(self._found.values()), not is_cut))
            return
        for topic, message in scans[0].next(PAGE):
            found = None if topic in self._found else self._convert(message)
            if found is not None:
                self._found[topic] = found
                self._bytes += len(found.payload) + len(found.properties) + len(topic)
        if scans[0].done:
            scans = scans[1:]
        self._broker.loop.call_soon(self._continue, scans, done)

    def _is_full(self) -> bool:
        return len(self._found) >= MESSAGES_MAX or self._bytes >= BYTES_MAX


WANTED_MAX: Final = 10_000
"""The most filters subscribed to for the federation. More are merged into shorter ones."""
WAITING_MAX: Final = 10_000
"""The most messages from the federation that wait for the broker. Further messages of QoS 0 are
dropped. The windows of the origins bound those of QoS 1 and 2."""
AGAIN_S: Final = 0.1
"""The delay in seconds before the next attempt, for lack of room or of a reader's progress."""


class BrokerEdge:
    """The `RetainingEdge` of a Holdfast broker, with the filters of the settings."""

    def __init__(
        self, broker: Broker, export_filters: list[str], import_filters: list[str]
    ) -> None:
        self._broker = broker
        self._exports = export_filters
        self._imports = import_filters
        # The member's id and the name of its log at an offset, set by `identify`.
        self._node: Callable[[], bytes] | None = None
        self._log: Callable[[int, int], str] = lambda partition, offset: ""
        self._host: EdgeHost | None = None
        self._connection: Connection | None = None
        self._transport: InProcessTransport | None = None
        self._reader = FrameReader(PACKET_BYTES_MAX)
        self._is_up = False
        self._worker: asyncio.Handle | None = None
        self._retry: asyncio.TimerHandle | None = None
        state = broker.node.state
        self._interest = BrokerInterest(import_filters, lambda: list(state.delivered))
        # The filters newly asked for, or None; those to be subscribed to; those subscribed to.
        self._wanted: frozenset[str] | None = None
        self._target: set[str] = set()
        self._is_on_target = True
        self._subscribed: set[str] = set()
        # The end of each partition when the session was opened.
        self._start_offsets: list[int] = []
        # Messages from the federation to the broker, in order, and those that the broker has
        # refused later. Invariant: a refused one is published again before any other one.
        self._arrivals: deque[Arrival] = deque()
        self._refused: list[Arrival] = []
        self._finished: deque[Callable[[], None]] = deque()
        # Topics whose retained message a client here removed, with the time in wall microseconds.
        self._removals: dict[str, int] = {}
        # Messages by result.
        self.counts: Counter[str] = Counter()

    def identify(self, node: Callable[[], bytes], log: Callable[[int, int], str]) -> None:
        """Adds to each exported message its offset in a log (see `LogPlace`) of `node`. `log`
        returns the name of the log that gave a partition and offset to the message. Without it, a
        crash of this process may deliver messages twice at other members."""
        # Records in memory may be lost, and their offsets then given to other messages.
        if not self._broker.node.state.config.memory_durability:
            self._node, self._log = node, log

    # RetainingEdge

    async def start(self, host: EdgeHost) -> None:
        self._host = host
        broker = self._broker
        state = broker.node.state
        broker.touch()
        # The sessions that are here, and those that the log has. A durable one may be in both.
        for table in dict.fromkeys((state, state.recorded)):
            for session in table.sessions.values():
                if not session.is_internal:
                    self._interest.load(session.subscriptions)
            table.watch_interest = self._watch_interest
            table.watch_removal = self._watch_removal
        self._interest.load(broker.runtime.cluster_node.member.watch_filters(self._watch_interest))
        self._report_interest()
        self._transport = InProcessTransport(self._data_received, self._closed)
        self._connection = federating.connect(state, self._transport)

    def set_wanted_filters(self, filters: frozenset[str]) -> None:
        self._wanted = filters
        self._schedule()

    def deliver(self, delivery: DeliverLocally, done: Callable[[], None]) -> None:
        """Queues a message. A refused one is finished: its origin would else send it forever."""
        message = delivery.message
        reason = refusal(delivery.id, message, self._imports)
        if not reason and not message.qos and len(self._arrivals) >= WAITING_MAX:
            reason = "broker busy"
        if reason:
            self.counts[f"import refused: {reason}"] += 1
            self._finish(done)
            return
        self._arrivals.append(arrival_of(delivery, done))
        self._schedule()

    def retain(self, id: MessageId, message: Message, done: Callable[[], None]) -> None:
        reason = refusal(id, message, self._imports)
        if reason:
            self.counts[f"import refused: {reason}"] += 1
            self._finish(done)
            return
        self._arrivals.append(retaining_of(id, message, done))
        self._schedule()

    def read_retained(self, filters: frozenset[str], done: ReadingDone) -> None:
        allowed = within((one for one in filters if may_leave(one)), self._exports)
        BrokerRetainedScan(self._broker, self._retained_message).start(sorted(allowed), done)

    async def stop(self) -> None:
        broker = self._broker
        for table in (broker.node.state, broker.node.state.recorded):
            table.watch_interest = table.watch_removal = None
        broker.runtime.cluster_node.member.watch_filters(None)
        self._is_up = False
        self._host = None
        for handle in (self._worker, self._retry):
            if handle is not None:
                handle.cancel()
        self._worker = self._retry = None
        self._arrivals.clear()
        self._refused.clear()
        self._finished.clear()
        connection, self._connection = self._connection, None
        if connection is not None and connection.state != CLOSED:
            broker.touch()
            federating.disconnect(broker.node.state, connection)

    # Status

    @property
    def has_lost_session(self) -> bool:
        """Whether the broker has closed the session since `start`."""
        return self._host is not None and self._connection is None

    def status(self) -> dict[str, object]:
        connection = self._connection
        session = None if connection is None else connection.session
        return {
            "is_up": self._is_up,
            "interest_filters": len(self._interest),
            "export_filters": sorted(session.subscriptions) if session is not None else [],
            "waiting_for_broker": len(self._arrivals) + len(self._refused),
            "counts": dict(sorted(self.counts.items())),
        }

    # Callbacks within turns of the broker: these only queue work

    def _data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._schedule()

    def _closed(self) -> None:
        self._connection = None
        self._schedule()

    def _watch_interest(self, filter: str, has_begun: bool) -> None:
        if self._interest.note(filter, has_begun):
            self._schedule()

    def _watch_removal(self, message: BrokerMessage) -> None:
        topic = message.topic.decode()
        if not self._may_export(topic):
            return
        if len(self._removals) >= WAITING_MAX and topic not in self._removals:
            self.counts["removal not told"] += 1
            return
        self._removals[topic] = message.timestamp_us
        self._schedule()

    # Work between turns

    def _schedule(self) -> None:
        if self._worker is None and self._host is not None:
            self._worker = self._broker.loop.call_soon(self._run)

    def _run(self) -> None:
        self._worker = None
        if not self._broker.node.state.cluster.has_groups():
            self._schedule_run()
            return
        if self._is_up and self._connection is None:
            self._report_down()
        self._report_interest()
        self._read_packets()
        self._report_removals()
        self._publish_arrivals()
        self._change_subscriptions()
        while self._finished:
            self._finished.popleft()()

    def _report_down(self) -> None:
        """Reports that the broker has closed the session."""
        assert self._host is not None
        self._is_up = False
        self._arrivals.clear()
        self._refused.clear()
        logger.warning("federation_session_closed")
        self._host.edge_down("the broker has closed the federation's session")

    def _schedule_run(self) -> None:
        if self._retry is None:
            self._retry = self._broker.loop.call_later(AGAIN_S, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self._schedule()

    def _report_interest(self) -> None:
        assert self._host is not None
        added, removed = self._interest.take_changes()
        if added or removed:
            self._host.change_interest(added, removed)

    def _report_removals(self) -> None:
        """Reports removals even if no other member wants the topic. Such a removal is not exported,
        and a member that still retains the message would bring it back."""
        assert self._host is not None
        if self._removals:
            removals, self._removals = self._removals, {}
            self._host.retained_removed(removals)

    # From the broker

    def _read_packets(self) -> None:
        """Reads what the session was sent. Without a session, because another node has it now or
        the broker refuses it, nothing counts: its next owner is sent the same again."""
        reader, connection = self._reader, self._connection
        while connection is not None and connection.session is not None and reader.next():
            kind = reader.first >> 4
            if kind == PUBLISH:
                self._export(
                    decode_publish(reader.buffer, reader.first, reader.start, reader.end, 5, False)
                )
            elif kind == PUBREL:
                ack = decode_ack(reader.buffer, reader.first, reader.start, reader.end, 5)
                self._acknowledge(PUBREL, ack.packet_id)
            elif kind == CONNACK:
                self._opened()
            elif kind == SUBACK:
                self._check_suback()

    def _opened(self) -> None:
        assert self._host is not None
        connection = self._connection
        assert connection is not None
        assert connection.session is not None
        self._subscribed = set(connection.session.subscriptions)
        self._start_offsets = list(self._broker.node.state.delivered)
        self._is_up = True
        self._host.edge_up()

    def _check_suback(self) -> None:
        reader = self._reader
        packet = decode(reader.buffer, reader.first, reader.start, reader.end, 5, False)
        assert isinstance(packet, Suback)
        refused = [reason for reason in packet.reasons if reason >= 0x80]
        if refused:
            logger.error(
                "federation_subscriptions_refused count=%d reason=%s",
                len(refused),
                reasons.NAMES.get(refused[0], hex(refused[0])),
            )

    def _export(self, publish: Publish) -> None:
        assert self._host is not None
        topic = publish.topic.decode()
        done = partial(self._exported, publish.qos, publish.packet_id)
        if not self._may_export(topic):
            self.counts["export not allowed"] += 1
            done()
            return
        self.counts["exported"] += 1
        entry = self._entry_of(publish)
        message = outgoing(
            publish,
            self._origin_offset(entry),
            self._missed_by(publish.topic, entry),
            publish.retain and self._is_replaced(publish, topic, entry),
            self._window() >= 2 * UNHURRIED_MAX,
        )
        self._host.publish(message, done)

    def _may_export(self, topic: str) -> bool:
        return may_leave(topic) and any(matches(filter, topic) for filter in self._exports)

    def _entry_of(self, publish: Publish) -> Inflight | None:
        """Returns the message's entry in the session. QoS 0 has none."""
        if not publish.qos:
            return None
        connection = self._connection
        assert connection is not None
        assert connection.session is not None
        return connection.session.inflight[publish.packet_id]

    def _origin_offset(self, entry: Inflight | None) -> LogPlace | None:
        if entry is None or self._node is None:
            return None
        return self._place(self._node(), entry.partition, entry.offset)

    def _place(self, node: bytes, partition: int, offset: int) -> LogPlace:
        return LogPlace(node, self._log(partition, offset), partition, offset)

    def _window(self) -> int:
        """Returns how many messages the broker hands over before one must be acknowledged."""
        connection = self._connection
        assert connection is not None
        assert connection.session is not None
        return connection.session.inflight_max

    def _is_replaced(self, publish: Publish, topic: str, entry: Inflight | None) -> bool:
        """Returns whether the retained message of the topic came from the federation. The
        publication is then older than it, because a newer one would have replaced it. A removal
        from the federation leaves nothing to compare. The member remembers those that a
        publication since this start could have met. An older publication with a payload counts as
        replaced. If a client removed the message, that removal follows in the log and counts."""
        kept = self._broker.node.state.retained.get(topic)
        if isinstance(kept, BrokerMessage):
            return kept.publisher == FEDERATION.encode()
        is_older = entry is not None and entry.offset < self._start_offsets[entry.partition]
        return bool(publish.payload) and is_older

    def _missed_by(self, topic: bytes, entry: Inflight | None) -> tuple[str, ...]:
        """Returns the announced groups here that begin behind the message in the log."""
        if entry is None:
            return ()
        state = self._broker.node.state
        known = federating.group_starts(state, topic)
        groups = [
            group
            for group in self._interest.groups(topic.decode())
            if (
                entry.offset < known[group][entry.partition]
                if group in known
                else self._interest.is_younger(group, entry.partition, entry.offset)
            )
        ]
        return tuple(one for group in groups for one in importable(group, self._imports))

    def _retained_message(self, message: BrokerMessage) -> Message | None:
        """Converts a retained message. None: it must not leave this broker."""
        state = self._broker.node.state
        if message.is_expired(state.wall_us) or not self._may_export(message.topic.decode()):
            return None
        place = None
        is_logged = message.qos > 0 and message.partition >= 0
        if is_logged and self._node is not None and message.publisher != FEDERATION.encode():
            place = self._place(self._node(), message.partition, message.offset)
        return retained_here(message, place, state.wall_us)

    def _exported(self, qos: int, packet_id: int) -> None:
        if qos:
            self._acknowledge(PUBLISH, packet_id)

    def _acknowledge(self, kind: int, packet_id: int) -> None:
        """Acknowledges a PUBLISH of QoS 1 or 2, or a PUBREL, on behalf of the federation."""
        connection = self._connection
        if connection is None or connection.state != OPEN:
            return
        self._broker.touch()
        state = self._broker.node.state
        session = connection.session
        assert session is not None
        if kind == PUBREL:
            handle_pubcomp(state, session, packet_id)
            return
        entry = session.inflight.get(packet_id)
        if entry is not None and entry.qos == 2:
            handle_pubrec(state, connection, session, packet_id, reasons.SUCCESS)
        else:
            handle_puback(state, session, packet_id)

    # Filters of other members

    def _change_subscriptions(self) -> None:
        connection = self._connection
        if not self._is_up or connection is None or connection.state != OPEN:
            return
        if self._wanted is not None:
            self._target = self._target_of(self._wanted)
            self._is_on_target = False
            self._wanted = None
        if self._is_on_target:
            return
        added, removed = self._target - self._subscribed, self._subscribed - self._target
        state = self._broker.node.state
        self._broker.touch()
        if added:
            federating.subscribe(state, connection, sorted(added))
            self._subscribed |= added
        session = connection.session
        assert session is not None
        if removed and (not session.tailing or session.reading):
            # Unread records of the log may be covered by the old filters alone.
            self._schedule_run()
            return
        if removed:
            federating.unsubscribe(state, connection, sorted(removed))
            self._subscribed -= removed
        self._is_on_target = True

    def _target_of(self, wanted: frozenset[str]) -> set[str]:
        """Returns the exportable part of the filters, in at most WANTED_MAX filters."""
        filters = generalised((one for one in wanted if may_leave(one)), WANTED_MAX)
        return generalised(within(filters, self._exports), WANTED_MAX)

    # To the broker

    def _publish_arrivals(self) -> None:
        if not self._arrivals and not self._refused:
            return
        self._broker.touch()
        state = self._broker.node.state
        self._arrivals.extendleft(reversed(self._refused))
        self._refused.clear()
        while self._arrivals and not self._refused:
            arrival = self._arrivals[0]
            message, delivery = arrival.message, arrival.delivery
            message.timestamp_us = state.wall_us
            done = partial(self._published, arrival, self._connection)
            if delivery is None:
                is_taken = federating.retain(state, message, done)
            else:
                groups = self._interest.groups(delivery.message.topic)
                message.audience = audience_of(delivery, groups, self._imports)
                is_taken = federating.publish(
                    state, message, arrival.producer, arrival.epoch, arrival.sequence, done
                )
            if not is_taken:
                self._schedule_run()
                return
            self._arrivals.popleft()

    def _published(self, arrival: Arrival, session: Connection | None, is_stored: bool) -> None:
        if is_stored:
            self.counts["retained" if arrival.delivery is None else "imported"] += 1
            self._finish(arrival.done)
        elif session is self._connection:
            # Otherwise the edge has been down, and receives the message again.
            self._refused.append(arrival)
            self._schedule_run()

    def _finish(self, done: Callable[[], None]) -> None:
        self._finished.append(done)
        self._schedule()
