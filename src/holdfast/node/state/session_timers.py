"""Sets the timers of recovered sessions.

The interval of a session or will began when its connection was lost, by the clock of the log. What
is left of it goes on from now.
"""

from holdfast.node.session.session import NEVER_EXPIRES, Session
from holdfast.node.state.recorded_state import SESSION_EXPIRY, WILL_DUE, RecordedState


def rearm(state: RecordedState, session: Session, slack_us: int) -> bool:
    """Starts the timers of will and expiry of a session without a connection. False: it has
    expired. `slack_us`: the most microseconds by which the clock of its close may be behind this
    node's."""
    gone_us = state.wall_us - session.disconnected_us - slack_us
    gone_s = max(0, gone_us) / 1_000_000
    # A timer that was armed since the session was touched must not fire beside the new one.
    state.cancel(session.will_timer)
    state.cancel(session.expiry_timer)
    will = session.will
    if will is not None and session.expiry_s > 0:
        due_s = min(will.delay_s, session.expiry_s) - gone_s
        session.will_timer = state.arm(state.now + max(0.0, due_s), WILL_DUE, session)
    if session.expiry_s == NEVER_EXPIRES:
        return True
    left_s = session.expiry_s - gone_s
    if left_s <= 0:
        return False
    session.expiry_timer = state.arm(state.now + left_s, SESSION_EXPIRY, session)
    return True
