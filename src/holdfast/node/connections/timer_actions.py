"""Acts on each kind of timer when it is due.

A cancelled timer has no subject and does nothing. The actions check the state of their subject,
because an action before may have closed it.
"""

from typing import Final

from holdfast.node.admission.throttle import handle_throttle
from holdfast.node.connections.connect import handle_identity_end
from holdfast.node.connections.keep_alive import check_deadline
from holdfast.node.delivery.acknowledgements import proceed
from holdfast.node.delivery.log_replay import continue_reading
from holdfast.node.delivery.subscriptions import DeferredReview
from holdfast.node.node_state import NodeState
from holdfast.node.relocation.client_relocation import ClientRelocation
from holdfast.node.session.connection import OPEN, Connection, Deadline
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import (
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
from holdfast.node.topic_rights.questions import handle_topic_expiry

PROGRESS_STEPS_PER_TURN: Final = 500
"""The most steps of logging cursors in one turn. The cursors of all sessions at once would hold up
the event loop."""


def fire(state: NodeState, timer: Timer, sys_topics: SysTopics) -> None:
    """Carries out the action of a timer that is due."""
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
