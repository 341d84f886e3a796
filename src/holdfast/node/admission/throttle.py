"""Charges each PUBLISH, CONNECT, SUBSCRIBE and UNSUBSCRIBE to a client's rates and quotas, and lets
the client wait or refuses it.

Invariants
- Without a configured limit a message costs one look at `Connection.meter`.
- A message that was stored before is never refused here: a QoS 2 repetition would be published
  again by its client. So the refusal comes where a new message is about to be stored.
- Each record that a client causes is paid for: by its message, or for a session by
  `recording_refusal` and `charge_open`. Counter-example without the second: a user without one
  right opens and closes a durable session in a loop, and fills the disk and its reserve.
- One that exceeds a limit costs the others nothing: its input waits, or its message is refused.
"""

from typing import Final

from holdfast.node.admission.limits import (
    DISCONNECT,
    REFUSE,
    AdmissionLimits,
)
from holdfast.node.admission.meters import OVER_QUOTA, WITHIN, Meter, names_of
from holdfast.node.connections.pending_connects import address_of
from holdfast.node.effects import ResumeInput
from holdfast.node.node_state import NodeState, Work
from holdfast.node.refusal import QUOTA_USED_UP, TOO_FAST, Rejection
from holdfast.node.session.connection import CLOSED, Connection
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import THROTTLE
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.errors import ProtocolViolation

PAUSE_S_MAX: Final = 60.0
"""The most seconds between two looks at a client that waits, so that a closed one is forgotten."""


DEBT_S_MAX: Final = 1.0
"""The seconds that a client's rates may need to recover when it opens a durable session or leaves a
will. With more it is refused: a client that connects again and again is never read, so it would
never wait."""
OPEN_RECORD_BYTES: Final = 200
"""The bytes in the log of the open and the close of a session, beside its id, which is in each
record twice."""


def give_meter(state: NodeState, connection: Connection) -> None:
    """Lets the connection take from the allowances of its names, from now on."""
    admission = state.admission
    release_meter(state, connection)
    if admission.counts_messages and not connection.is_internal:
        address = address_of(connection.remote)
        names = names_of(
            connection.client_id, connection.username, address, connection.listener.name
        )
        connection.meter = admission.meters.meter(names, state.now)


def release_meter(state: NodeState, connection: Connection) -> None:
    """Forgets the connection's meter, if it has one."""
    meter = connection.meter
    if meter is not None:
        assert isinstance(meter, Meter)
        state.admission.meters.release(meter, state.now)
        connection.meter = None


def charge_publish(state: NodeState, connection: Connection, size_bytes: int, qos: int) -> bool:
    """Charges a PUBLISH of `size_bytes`. False: the message, of QoS 0, is dropped.

    A QoS 1 or 2 message above a limit sets `Meter.refusal`, for the place where it would be stored.
    Raises `ProtocolViolation` if the configuration says that the client is disconnected.
    """
    meter = connection.meter
    assert isinstance(meter, Meter)
    meter.refusal = None
    over = meter.state(state.now)
    if over == OVER_QUOTA:
        state.stats.refused_quota += 1
        meter.refusal = QUOTA_USED_UP
        return qos > 0
    if over != WITHIN:
        action = state.admission.limits.over
        if action == DISCONNECT:
            state.stats.refused_rate += 1
            raise ProtocolViolation(
                reasons.MESSAGE_RATE_TOO_HIGH, "more messages or bytes a second than allowed"
            )
        # MQTT 3 and QoS 0 have no reply that refuses a message: their client waits.
        if action == REFUSE and qos > 0 and connection.version >= 5:
            state.stats.refused_rate += 1
            meter.refusal = TOO_FAST
            return True
    if not meter.charge(1, size_bytes):
        return True
    action = state.admission.limits.over
    if action != DISCONNECT and (action != REFUSE or qos == 0 or connection.version < 5):
        _pause(state, connection, meter)
    return True


def charge_bytes(state: NodeState, connection: Connection, size_bytes: int) -> None:
    """Charges the bytes of a packet that is no message, and lets its client wait above a rate."""
    meter = connection.meter
    assert isinstance(meter, Meter)
    meter.state(state.now)
    meter.charge(0, size_bytes)
    if meter.bytes:
        _pause(state, connection, meter)


def charge_open(state: NodeState, connection: Connection, will_bytes: int) -> None:
    """Charges the records of an open session. Its will is charged now, because nobody is refused
    when it is published. `will_bytes` of 0: there is none."""
    meter = connection.meter
    if meter is not None:
        assert isinstance(meter, Meter)
        size_bytes = OPEN_RECORD_BYTES + 4 * len(connection.client_id)
        meter.state(state.now)
        # A will is in the record of the open, and in the log again when it is published.
        meter.charge(1 if will_bytes else 0, size_bytes + 2 * will_bytes)


def recording_refusal(
    state: NodeState, connection: Connection, *, is_known: bool
) -> Rejection | None:
    """The reason why a client may not add to its session in the log now. `is_known`: it adds
    nothing to what is there, as a resumed session. Closes and UNSUBSCRIBE are never refused,
    because they need an open or a subscription before."""
    if connection.is_internal:
        return None
    if state.disk_full and not (is_known and not state.is_reserve_low):
        state.stats.refused_disk_full += 1
        return Rejection("the disk is full")
    meter = connection.meter
    if meter is not None:
        assert isinstance(meter, Meter)
        if meter.state(state.now) == OVER_QUOTA:
            state.stats.refused_quota += 1
            return QUOTA_USED_UP
    return None


def is_in_debt(state: NodeState, connection: Connection) -> bool:
    """Whether the client's rates need more than `DEBT_S_MAX` to recover."""
    meter = connection.meter
    if meter is None:
        return False
    assert isinstance(meter, Meter)
    meter.state(state.now)
    return meter.wait_s() > DEBT_S_MAX


def refusal_of(connection: Connection) -> Rejection | None:
    """The reason why the present message is refused."""
    meter = connection.meter
    if meter is None:
        return None
    assert isinstance(meter, Meter)
    return meter.refusal


def _pause(state: NodeState, connection: Connection, meter: Meter) -> None:
    wait_s = meter.wait_s()
    if wait_s > 0.0:
        if not meter.is_throttled:
            meter.is_throttled = True
            state.stats.inputs_throttled += 1
            state.arm(state.now + min(wait_s, PAUSE_S_MAX), THROTTLE, connection)
        meter.throttled_until = state.now + wait_s
        connection.input_paused = True


def throttled_until(connection: Connection) -> float:
    """The time until which the client's input waits because of a rate; 0.0: it does not."""
    meter = connection.meter
    if meter is None:
        return 0.0
    assert isinstance(meter, Meter)
    return meter.throttled_until


def handle_throttle(state: NodeState, connection: Connection) -> None:
    """Reads from a client again whose wait is over."""
    if connection.state == CLOSED:
        return
    left_s = throttled_until(connection) - state.now
    if left_s > 0.0:
        state.arm(state.now + min(left_s, PAUSE_S_MAX), THROTTLE, connection)
        return
    meter = connection.meter
    if meter is not None:
        assert isinstance(meter, Meter)
        meter.is_throttled = False
    # It could not show that it lives.
    connection.last_received = state.now
    state.effects.append(ResumeInput(connection))


class AdmissionChange(Work):
    """The job that gives all sessions the present limits. A step is one session."""

    def __init__(self, sessions: list[Session]) -> None:
        super().__init__()
        self.sessions = sessions
        self.next = 0

    def step(self, state: NodeState, steps: int) -> int:
        start = self.next
        end = min(len(self.sessions), start + steps)
        users = state.admission.users
        for index in range(start, end):
            session = self.sessions[index]
            client_id = session.client_id
            known = (
                state.sessions.get(client_id),
                state.recorded.sessions.get(client_id),
            )
            if session not in known:
                continue
            if users is not None and client_id not in state.recorded.queues:
                users.assign(client_id, session.username)
            if session.connection is not None:
                give_meter(state, session.connection)
        self.next = end
        self.has_more = end < len(self.sessions)
        if not self.has_more:
            self.sessions = []
        return end - start


def replace_limits(state: NodeState, limits: AdmissionLimits) -> None:
    """Uses other limits: at once for those that connect, and as a job for the present sessions."""
    if limits != state.admission.limits:
        state.admission.replace(limits)
        _start_change(state)


def count_sessions(state: NodeState) -> None:
    """Counts the sessions that were recovered from the log, as a job."""
    if state.admission.users is not None:
        _start_change(state)


def _start_change(state: NodeState) -> None:
    sessions = [*state.recorded.sessions.values(), *state.sessions.values()]
    state.start_work(AdmissionChange(sessions))
