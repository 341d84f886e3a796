"""The rates and quotas of messages: each PUBLISH is charged, and its client waits or is refused.

Invariants
- Without a configured limit a message costs one look at `Connection.meter`.
- A message that was stored before is never refused here: a QoS 2 repetition would be published
  again by its client. So the refusal comes where a new message is about to be stored.
- One that exceeds a limit costs the others nothing: its input waits, or its message is refused.
"""

from typing import Final

from holdfast.broker.admission.limits import (
    DISCONNECT,
    REFUSE,
    AdmissionLimits,
)
from holdfast.broker.admission.meters import OVER_QUOTA, WITHIN, Meter, names_of
from holdfast.broker.connections.pending_connects import address_of
from holdfast.broker.effects import ResumeInput
from holdfast.broker.recorded_state import THROTTLE
from holdfast.broker.session.connection import CLOSED, Connection
from holdfast.broker.session.session import Session
from holdfast.broker.state import NodeState, Work
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.errors import ProtocolViolation

PAUSE_S_MAX: Final = 60.0
"""The most seconds between two looks at a client that waits, so that a closed one is forgotten."""


def give_meter(state: NodeState, connection: Connection) -> None:
    """Let the connection take from the allowances of its names, from now on."""
    admission = state.admission
    release_meter(state, connection)
    if admission.counts_messages and not connection.is_internal:
        address = address_of(connection.remote)
        names = names_of(
            connection.client_id, connection.username, address, connection.listener.name
        )
        connection.meter = admission.meters.meter(names, state.now)


def release_meter(state: NodeState, connection: Connection) -> None:
    """Forget the connection's meter, if it has one."""
    meter = connection.meter
    if meter is not None:
        assert isinstance(meter, Meter)
        state.admission.meters.release(meter, state.now)
        connection.meter = None


def charge_publish(state: NodeState, connection: Connection, size_bytes: int, qos: int) -> bool:
    """Charge a PUBLISH of `size_bytes`. False: the message, of QoS 0, is dropped.

    A QoS 1 or 2 message above a limit sets `Meter.refusal`, for the place where it would be stored.
    Raises `ProtocolViolation` if the configuration says that the client is disconnected.
    """
    meter = connection.meter
    assert isinstance(meter, Meter)
    meter.refusal = ""
    over = meter.state(state.now)
    if over == OVER_QUOTA:
        state.stats.refused_quota += 1
        meter.refusal = "the user's quota of bytes is used up"
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
            meter.refusal = "more messages or bytes a second than allowed: send it again later"
            return True
    if not meter.charge(1, size_bytes):
        return True
    action = state.admission.limits.over
    if action != DISCONNECT and (action != REFUSE or qos == 0 or connection.version < 5):
        _pause(state, connection, meter)
    return True


def charge_bytes(state: NodeState, connection: Connection, size_bytes: int) -> None:
    """Charge the bytes of a packet that is no message, and let its client wait above a rate."""
    meter = connection.meter
    assert isinstance(meter, Meter)
    if meter.bytes:
        meter.state(state.now)
        for bucket in meter.bytes:
            bucket.take(size_bytes)
        _pause(state, connection, meter)


def refusal_of(connection: Connection) -> str:
    """The reason why the present message is refused, or ""."""
    meter = connection.meter
    if meter is None:
        return ""
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
    """Read from a client again whose wait is over."""
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
            if state.sessions.get(session.client_id) is not session:
                continue
            if users is not None and session.username:
                users.enter(session.username, session.client_id)
            if session.connection is not None:
                give_meter(state, session.connection)
        self.next = end
        self.has_more = end < len(self.sessions)
        if not self.has_more:
            self.sessions = []
        return end - start


def replace_limits(state: NodeState, limits: AdmissionLimits) -> None:
    """Use other limits: at once for those that connect, and as a job for the present sessions."""
    if limits != state.admission.limits:
        state.admission.replace(limits)
        state.start_work(AdmissionChange(list(state.sessions.values())))


def count_sessions(state: NodeState) -> None:
    """Count the sessions that were recovered from the log, as a job."""
    if state.admission.users is not None:
        state.start_work(AdmissionChange(list(state.sessions.values())))
