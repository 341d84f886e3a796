"""Node as its driver sees it: bytes, results and times in; bytes and effects out.

The driver sets the clock (`tick`) before each call. After a batch of calls it carries out
`state.effects`, the connections in `state.dirty`, and the journal's next write group. No function
here blocks or raises because of what a client sends.
"""

from typing import Final

from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node.admission.ban_enforcement import begin_admission
from holdfast.node.admission.checks import is_address_banned
from holdfast.node.admission.control import Proof
from holdfast.node.admission.throttle import (
    charge_bytes,
    handle_throttle,
    release_meter,
    throttled_until,
)
from holdfast.node.config import NodeConfig
from holdfast.node.connections import connect as connecting
from holdfast.node.connections.client_notes import note_no_room, note_unopened
from holdfast.node.connections.close import (
    handle_connection_lost,
    handle_disconnect,
    handle_violation,
)
from holdfast.node.connections.connect import handle_identity_end
from holdfast.node.connections.exchange import handle_auth
from holdfast.node.connections.keep_alive import check_deadline, clear_deadline, set_deadline
from holdfast.node.connections.pending_connects import CONNECT_FIRST_BYTE, PendingHandshake
from holdfast.node.delivery import log_replay, read_results
from holdfast.node.delivery.acknowledgements import (
    handle_puback,
    handle_pubcomp,
    handle_pubrec,
    proceed,
)
from holdfast.node.delivery.log_replay import continue_reading
from holdfast.node.delivery.replay_start import start_prefix
from holdfast.node.delivery.subscribe import handle_subscribe
from holdfast.node.delivery.subscriptions import DeferredReview
from holdfast.node.delivery.unsubscribe import handle_unsubscribe
from holdfast.node.effects import AskRights, Cut, FetchInflight, ReadLog, ResumeInput
from holdfast.node.node_state import NodeState, Work
from holdfast.node.publish.inbound import handle_publish, handle_pubrel
from holdfast.node.relocation.client_relocation import ClientRelocation
from holdfast.node.session.connection import CLOSED, EXCHANGING, NEW, OPEN, Connection, Deadline
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.session import Group, Session
from holdfast.node.state.recorded_state import (
    CANCELLED,
    IDENTITY_ENDS,
    KEEP_ALIVE,
    PROGRESS,
    RELOCATION,
    REPLAY,
    RIGHTS_CHANGED,
    SYS,
    THROTTLE,
    TOPIC_RIGHTS,
    WITHHELD,
    WORK,
    Timer,
)
from holdfast.node.state.state_records import log_progress
from holdfast.node.sys_topics import SysTopics
from holdfast.node.topic_rights.questions import forget_decisions, handle_topic_expiry, is_waiting
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.decode import decode, decode_ack
from holdfast.protocol.mqtt.encode import PINGRESP_BYTES
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.framing import FrameReader, SpareReader
from holdfast.protocol.mqtt.packets import (
    AUTH,
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBSCRIBE,
    TYPE_NAMES,
    UNSUBSCRIBE,
    Auth,
    Connect,
    Disconnect,
    Packet,
    Subscribe,
    Unsubscribe,
)
from holdfast.protocol.topics.names import mounted_filter
from holdfast.security.acl import ClientRules
from holdfast.security.identity.identity import Answer

TIMERS_PER_TURN: Final = 200
"""The most timers fired in one turn: 100,000 sessions may expire in the same second."""
PACKETS_PER_TURN: Final = 1000
"""The most packets of a connection per turn: a read may bring 130,000 PINGREQs."""
# A filter of a SUBSCRIBE or UNSUBSCRIBE counts as one packet; this is its least size in bytes.
FILTER_BYTES_MIN: Final = 8
RECEIVERS_PER_PACKET: Final = 8
"""The number of receivers of messages that count as one packet."""


class Node:
    """One node of a broker. Its driver makes one call at a time, and owns disk, sockets, clock."""

    def __init__(self, config: NodeConfig, journal: Journal) -> None:
        self.state = NodeState(config, journal)
        self.sys_topics = SysTopics(self.state)
        self.relocation = ClientRelocation(self.state)
        self._readers = SpareReader()

    def tick(self, now: float, wall_us: int) -> None:
        """Sets the clocks, monotonic (seconds) and wall (microseconds), and begins a turn."""
        self.state.now = now
        self.state.wall_us = wall_us
        self.state.steps_left = self.state.steps_per_turn

    def start(self) -> None:
        """Starts the timers. Called once, after recovery, with the clock set."""
        state = self.state
        state.started_us = state.wall_us
        if state.config.sys_interval_s > 0:
            state.arm(state.now, SYS, None)
        begin_admission(state)

    def has_room(self, remote: str, listener: str, sockets_max: int) -> bool:
        """Makes room for a connection if necessary. False: the driver closes its socket."""
        return has_room(self.state, remote, listener, sockets_max)

    def handle_connected(self, remote: str, listener: ListenerRules) -> Connection:
        """Registers a new connection and starts the timeout of its CONNECT."""
        state = self.state
        config = state.config
        # A CONNECT needs no more; ConnackPromise raises the limit.
        packet_bytes_max = listener.packet_bytes_max or config.packet_bytes_max
        packet_bytes_max = min(config.connect_bytes, packet_bytes_max)
        connection = Connection(packet_bytes_max, remote, listener)
        connection.last_received = state.now
        state.connections += 1
        state.pending_connects.enter(connection)
        set_deadline(state, connection, state.now + config.connect_timeout_s)
        return connection

    def refuse_connection(
        self, event: str, remote: str, listener: str, connections_max: int
    ) -> None:
        """Counts and logs a connection without room. The driver closes its socket."""
        refuse_connection(self.state, event, remote, listener, connections_max)

    def handle_upgrade(self, connection: Connection, size_bytes: int) -> None:
        """Counts the bytes of the HTTP request that a WebSocket buffers before it is open."""
        limit_pending(self.state, connection, size_bytes)

    def handle_data(self, connection: Connection, data: bytes) -> None:
        state = self.state
        state.stats.bytes_received += len(data)
        if connection.closing:
            return
        reader = connection.reader
        if reader is None:
            reader = self._readers.lend(connection.input_packet_bytes_max)
            connection.reader = reader
        reader.feed(data)
        self._consume(connection, reader)

    def _consume(self, connection: Connection, reader: FrameReader) -> None:
        """Processes the input as far as possible now."""
        try:
            if connection.state == OPEN:
                self._process(connection, reader)
            else:
                self._process_pending(connection, reader)
            if reader.is_empty():
                connection.reader = None
                self._readers.reclaim(reader)
        except ProtocolViolation as error:
            handle_violation(self.state, connection, error)

    def _process_pending(self, connection: Connection, reader: FrameReader) -> None:
        """Processes input before CONNECT is answered. A first packet that is no CONNECT ends the
        connection at its first byte, without waiting for the rest."""
        first = reader.first_byte()
        if connection.state == NEW and first >= 0 and first != CONNECT_FIRST_BYTE:
            raise ProtocolViolation(
                reasons.PROTOCOL_ERROR, f"the first packet begins with 0x{first:02x}, not CONNECT"
            )
        self._process(connection, reader)
        if connection.closing:
            self.state.pending_connects.leave(connection)
        elif connection.state != OPEN:
            limit_pending(self.state, connection, reader.waiting_bytes())

    def handle_resumed(self, connection: Connection) -> None:
        """Reads from the connection again. Bytes that have arrived already are processed first."""
        is_throttled = throttled_until(connection) > self.state.now
        is_asking = connection.proof is not None and is_waiting(connection)
        if is_throttled or connection.is_subscribing or is_asking:
            return
        connection.input_paused = False
        reader = connection.reader
        if not connection.closing and reader is not None:
            self._consume(connection, reader)

    def handle_disconnected(self, connection: Connection) -> None:
        """Handles a closed socket, whichever side closed it. Called exactly once per connection."""
        self.state.connections -= 1
        self.state.pending_connects.leave(connection)
        clear_deadline(self.state, connection)
        proof = connection.proof
        if isinstance(proof, Proof):
            self.state.cancel(proof.timer)
            forget_decisions(self.state, connection)
        release_meter(self.state, connection)
        if connection.state != CLOSED:
            handle_connection_lost(self.state, connection)

    def handle_writable(self, connection: Connection) -> None:
        """Continues when the socket takes data again after congestion."""
        if connection.has_waiting_replies:
            connection.has_waiting_replies = False
            self.state.effects.append(ResumeInput(connection))
        session = connection.session
        if connection.state == OPEN and session is not None:
            proceed(self.state, session)

    def _process(self, connection: Connection, reader: FrameReader) -> None:
        state = self.state
        stats = state.stats
        if connection.state == NEW and state.is_congested():
            # CONNECT may append records of a session and a will.
            state.pause_input(connection)
            return
        appended = state.appended
        left = PACKETS_PER_TURN
        state.spent = 0
        received = stats.packets_received
        while not connection.input_paused and not connection.closing and reader.next():
            stats.packets_received += 1
            packet_type = reader.first >> 4
            if connection.congested and connection.out_bytes > state.config.outbox_bytes:
                # Bounds the replies to a client that does not read them.
                connection.has_waiting_replies = True
                connection.input_paused = True
            if connection.state != OPEN:
                self._process_closed(connection, reader, packet_type)
                continue
            session = connection.session
            assert session is not None
            if packet_type == PUBLISH:
                handle_publish(state, connection, session)
            elif packet_type == PUBACK:
                # The common form: packet id only, reason 0.
                if reader.end - reader.start == 2 and reader.first == 0x40:
                    buffer = reader.buffer
                    start = reader.start
                    handle_puback(state, session, buffer[start] << 8 | buffer[start + 1])
                else:
                    self._acknowledge(connection, session, reader, packet_type)
            elif PUBREC <= packet_type <= PUBCOMP:
                self._acknowledge(connection, session, reader, packet_type)
            else:
                self._control(connection, session, reader, packet_type)
                left -= (reader.end - reader.begin) // FILTER_BYTES_MIN
                if connection.meter is not None:
                    charge_bytes(state, connection, reader.end - reader.begin)
            if state.appended != appended:
                appended = state.appended
                if state.is_congested():
                    state.pause_input(connection)
            left -= 1
            if state.spent >= RECEIVERS_PER_PACKET:
                left -= state.spent // RECEIVERS_PER_PACKET
                state.spent = 0
            if left <= 0 and not connection.input_paused and not connection.closing:
                connection.input_paused = True
                state.start_work(Input(connection))
        if stats.packets_received != received:
            connection.last_received = state.now

    def _acknowledge(
        self, connection: Connection, session: Session, reader: FrameReader, packet_type: int
    ) -> None:
        state = self.state
        ack = decode_ack(reader.buffer, reader.first, reader.start, reader.end, connection.version)
        if packet_type == PUBACK:
            handle_puback(state, session, ack.packet_id)
        elif packet_type == PUBREC:
            handle_pubrec(state, connection, session, ack.packet_id, ack.reason)
        elif packet_type == PUBREL:
            handle_pubrel(state, connection, session, ack.packet_id)
        else:
            handle_pubcomp(state, session, ack.packet_id)

    def _control(
        self, connection: Connection, session: Session, reader: FrameReader, packet_type: int
    ) -> None:
        state = self.state
        if packet_type == CONNECT:
            # [MQTT-3.1.0-2]
            raise ProtocolViolation(reasons.PROTOCOL_ERROR, "a second CONNECT")
        packet = decode(
            reader.buffer, reader.first, reader.start, reader.end, connection.version, True
        )
        if connection.mount:
            mount_filters(packet, connection.mount.decode())
        if packet_type == PINGREQ:
            # [MQTT-3.12.4-1]
            connection.send(PINGRESP_BYTES, state.dirty)
        elif packet_type == SUBSCRIBE:
            assert isinstance(packet, Subscribe)
            handle_subscribe(state, connection, session, packet)
        elif packet_type == UNSUBSCRIBE:
            assert isinstance(packet, Unsubscribe)
            handle_unsubscribe(state, connection, session, packet)
        elif packet_type == DISCONNECT:
            assert isinstance(packet, Disconnect)
            handle_disconnect(state, connection, session, packet)
        elif packet_type == AUTH:
            assert isinstance(packet, Auth)
            handle_auth(state, connection, packet)
        else:
            raise ProtocolViolation(
                reasons.PROTOCOL_ERROR, f"{TYPE_NAMES.get(packet_type, '?')} from a client"
            )

    def _process_closed(
        self, connection: Connection, reader: FrameReader, packet_type: int
    ) -> None:
        """Processes a packet before the session is open: CONNECT [MQTT-3.1.0-1], then, during
        enhanced authentication, only AUTH and DISCONNECT."""
        state = self.state
        if connection.state == NEW and packet_type == CONNECT:
            size_bytes = reader.end - reader.begin
            packet = decode(reader.buffer, reader.first, reader.start, reader.end, 5, True)
            assert isinstance(packet, Connect)
            state.pending_connects.receive_connect(connection, size_bytes)
            connecting.handle_connect(state, connection, packet)
            return
        if connection.state == EXCHANGING and packet_type in (AUTH, DISCONNECT):
            packet = decode(reader.buffer, reader.first, reader.start, reader.end, 5, True)
            if isinstance(packet, Auth):
                handle_auth(state, connection, packet)
                return
            handle_connection_lost(state, connection)
            return
        raise ProtocolViolation(
            reasons.PROTOCOL_ERROR,
            f"{TYPE_NAMES.get(packet_type, 'a reserved packet type')} before CONNECT is answered",
        )

    def handle_password_checked(self, connection: Connection, valid: bool) -> None:
        connecting.handle_password_checked(self.state, connection, valid)

    def handle_answer(self, connection: Connection, answer: Answer) -> None:
        """Handles the reply of the sources of identity."""
        connecting.handle_answer(self.state, connection, answer)

    def handle_rights(self, effect: AskRights, rules: ClientRules | None) -> None:
        connecting.handle_rights(self.state, effect.connection, effect.extra, rules)

    def handle_left(self, connection: Connection) -> None:
        """Handles the peer's close of a connection whose input is paused."""
        if connection.state != CLOSED:
            handle_connection_lost(self.state, connection)

    def handle_read(
        self, effect: ReadLog, records: list[Record], positions: list[int], done: bool, lost: int
    ) -> None:
        try:
            read_results.handle_read(self.state, effect, records, positions, done, lost)
        except AssertionError as error:
            self._stop_reader(effect.cursor, error)

    def handle_fetched(self, effect: FetchInflight, found: list[tuple[int, Record | None]]) -> None:
        try:
            log_replay.handle_fetched(self.state, effect, found)
            if isinstance(effect.reader, Session):
                proceed(self.state, effect.reader)
        except AssertionError as error:
            self._stop_reader(effect.reader, error)

    def _stop_reader(self, reader: Session | Group | None, error: AssertionError) -> None:
        if not isinstance(reader, Session):
            raise error
        self.state.stop_session(reader, error)

    def timer(self) -> float | None:
        """The time at which handle_timers is due, or None."""
        timers = self.state.timers
        return timers[0].when if timers else None

    def handle_timers(self) -> None:
        """Fires the due timers, at most TIMERS_PER_TURN; `timer` reports the rest.

        A timer armed meanwhile never fires in the same pass, even if it is due at once. A job that
        arms its next slice would otherwise finish before the event loop gets a turn.
        """
        state = self.state
        for timer in state.pop_timers(state.now, TIMERS_PER_TURN):
            # An earlier timer of this pass may have cancelled this one.
            if timer.kind != CANCELLED:
                fire(state, timer, self.sys_topics)

    def shut_down(self, others: str = "") -> None:
        """Disconnects all clients and accepts no new ones; durable sessions stay. [MQTT-3.14.4-3]
        `others`: the addresses of other nodes, see `holdfast.addresses`."""
        self.state.closing = True
        self.relocation.send_all(others, "shutting down")
        self.relocation.finish()

    def redirect(self, others: str, text: str, per_s: float = 0.0) -> None:
        """Sends all clients, also those that connect later, to other nodes; "" ends that. `text`
        is the reason that clients are given. `per_s`: the clients that leave in a second; 0: all
        leave at once."""
        self.state.redirect = others
        if not others:
            self.relocation.stop()
        elif per_s:
            self.relocation.drain(others, text, per_s)
        else:
            self.relocation.send_all(others, text)


def has_room(state: NodeState, remote: str, listener: str, sockets_max: int) -> bool:
    """Makes room for a connection if necessary. False: the driver closes its socket."""
    pending = state.pending_connects
    if is_address_banned(state, remote):
        state.stats.refused_banned += 1
        return False
    if pending.is_crowded(remote):
        refuse_connection(state, "address_full", remote, listener, pending.per_address_max)
        return False
    if state.connections + state.handshakes >= sockets_max and not displace_oldest(state):
        refuse_connection(state, "connections_full", remote, listener, sockets_max)
        return False
    return True


def refuse_connection(
    state: NodeState, event: str, remote: str, listener: str, connections_max: int
) -> None:
    """Counts and logs a connection without room. The driver closes its socket without a packet,
    because MQTT has none before CONNECT."""
    state.stats.refuse_connection(event)
    note_no_room(state, event, remote, listener, connections_max)


def displace_oldest(state: NodeState) -> bool:
    """Closes the oldest handshake or connection that has proved nothing. False: there is none."""
    oldest = state.pending_connects.oldest()
    if isinstance(oldest, PendingHandshake):
        # Removed now: the handshake ends later, and the next newcomer must displace another one.
        state.pending_connects.end_handshake(oldest)
        state.stats.connections_displaced += 1
        oldest.cancel()
    elif oldest is not None:
        _displace(state, oldest)
    return oldest is not None


def limit_pending(state: NodeState, connection: Connection, size_bytes: int) -> None:
    """Closes the oldest connection with bytes of a CONNECT while the connections without an
    answered CONNECT buffer more than `pending_connect_bytes`."""
    pending = state.pending_connects
    pending.buffer(connection, size_bytes)
    while pending.bytes > pending.bytes_max and not connection.closing:
        oldest = pending.oldest_holder()
        _displace(state, connection if oldest is None else oldest)


def _displace(state: NodeState, connection: Connection) -> None:
    state.stats.connections_displaced += 1
    note_unopened(state, connection, "connection_displaced")
    state.pending_connects.leave(connection)
    handle_connection_lost(state, connection)
    state.effects.append(Cut(connection))


class Input(Work):
    """The continuation of a connection's input that was too much for one turn."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def step(self, state: NodeState, steps: int) -> int:
        self.has_more = False
        if not self.connection.closing:
            state.effects.append(ResumeInput(self.connection))
        return steps


def mount_filters(packet: Packet, mount: str) -> None:
    """Puts the prefix of the client's topics in front of the filters of a SUBSCRIBE or
    UNSUBSCRIBE."""
    if isinstance(packet, Subscribe):
        for request in packet.subscriptions:
            request.filter = _mounted(mount, request.filter)
    elif isinstance(packet, Unsubscribe):
        packet.filters = [_mounted(mount, filter) for filter in packet.filters]


def _mounted(mount: str, filter: str) -> str:
    """The filter below the mount; a start in the past stays in front."""
    start = start_prefix(filter)
    return start + mounted_filter(mount, filter[len(start) :])


PROGRESS_STEPS_PER_TURN: Final = 500
"""The most steps of logging cursors in one turn. The cursors of all sessions at once would hold up
the event loop."""


def fire(state: NodeState, timer: Timer, sys_topics: SysTopics) -> None:
    """Carries out the action of a timer that is due.

    A cancelled timer has no subject and does nothing. The actions check the state of their subject,
    because an action before may have closed it.
    """
    kind = timer.kind
    subject = timer.subject
    if kind == PROGRESS:
        log_progress(state, PROGRESS_STEPS_PER_TURN)
    elif kind == WORK:
        state.run_work()
    elif kind == REPLAY:
        session = state.replay_pace.next_reader()
        if session is not None:
            continue_reading(state, session)
    elif kind == RIGHTS_CHANGED:
        state.start_work(DeferredReview(state))
    elif kind == SYS:
        sys_topics.publish()
        state.arm(state.now + state.config.sys_interval_s, SYS, None)
    elif kind == KEEP_ALIVE:
        assert isinstance(subject, Deadline)
        check_deadline(state, subject)
    elif kind == RELOCATION:
        assert isinstance(subject, ClientRelocation)
        subject.step()
    elif isinstance(subject, Connection):
        _fire_for_connection(state, kind, subject)


def _fire_for_connection(state: NodeState, kind: int, connection: Connection) -> None:
    """Carries out the action of a connection's timer."""
    if kind == THROTTLE:
        handle_throttle(state, connection)
    elif kind == IDENTITY_ENDS:
        handle_identity_end(state, connection)
    elif kind == TOPIC_RIGHTS:
        handle_topic_expiry(state, connection)
    elif kind == WITHHELD and connection.state == OPEN:
        session = connection.session
        assert isinstance(session, Session)
        proceed(state, session)
