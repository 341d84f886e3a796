"""Limits the rate at which a node's replays read the log: `limits.replay_bytes_per_s`."""

from typing import Final

from holdfast.log.record import Record
from holdfast.node.admission.token_bucket import TokenBucket
from holdfast.node.node_state import NodeState
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import REPLAY

BURST_S: Final = 0.1
"""The time in seconds whose bytes may be read at once."""


class ReplayPace:
    """The allowance of all replays of a node, and the sessions that wait for it.

    They read in turns, so none is faster than another that has as much to read. A read is charged
    when its size is known. Its debt passes before the next one.
    """

    def __init__(self, bytes_per_s: int, now: float) -> None:
        self.bucket = TokenBucket(bytes_per_s, bytes_per_s * BURST_S, now)
        # A session waits once.
        self.waiting: dict[Session, None] = {}
        # The session whose turn it is.
        self.next: Session | None = None
        self.is_armed = False

    def arm(self, state: NodeState) -> None:
        """Gives the next session its turn as soon as the bucket allows."""
        if self.waiting and not self.is_armed:
            self.is_armed = True
            state.arm(state.now + self.bucket.wait_s(), REPLAY, None)


def may_read_on(state: NodeState, session: Session) -> bool:
    """Whether a session that replays may read now. If not, it is called when it may."""
    bytes_per_s = state.config.replay_bytes_per_s
    if not bytes_per_s:
        return True
    pace = state.replay_pace
    if pace is None or pace.bucket.per_s != bytes_per_s:
        waiting = {} if pace is None else pace.waiting
        pace = ReplayPace(bytes_per_s, state.now)
        pace.waiting = waiting
        state.replay_pace = pace
    if pace.next is session or (not pace.waiting and not pace.bucket.is_empty(state.now)):
        pace.next = None
        return True
    pace.waiting[session] = None
    pace.arm(state)
    return False


def charge_read(state: NodeState, records: list[Record]) -> None:
    """Charges what a replay has read."""
    pace = state.replay_pace
    if pace is not None:
        pace.bucket.refill(state.now)
        pace.bucket.take(
            sum(len(each.topic) + len(each.payload) + len(each.properties) for each in records)
        )


def next_reader(state: NodeState) -> Session | None:
    """The session that may read now, as the timer REPLAY is due."""
    pace = state.replay_pace
    if pace is None:
        return None
    pace.is_armed = False
    if not pace.waiting:
        return None
    if not state.config.replay_bytes_per_s or not pace.bucket.is_empty(state.now):
        pace.next = next(iter(pace.waiting))
        del pace.waiting[pace.next]
    session = pace.next
    pace.arm(state)
    return session
