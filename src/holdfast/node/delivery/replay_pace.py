"""Limits the rate at which a node's replays read the log: `limits.replay_bytes_per_s`."""

from typing import Final

from holdfast.log.record import Record
from holdfast.node.admission.token_bucket import TokenBucket
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import REPLAY, RecordedState

BURST_S: Final = 0.1
"""The time in seconds whose bytes may be read at once."""


class ReplayPace:
    """The allowance of all replays of a node, and the sessions that wait for it.

    They read in turns, so none is faster than another that has as much to read. A read is charged
    when its size is known. Its debt passes before the next one.
    """

    def __init__(self, state: RecordedState) -> None:
        self._state = state
        # None: the rate was never limited.
        self._bucket: TokenBucket | None = None
        # A session waits once.
        self.waiting: dict[Session, None] = {}
        # The session whose turn it is.
        self._next: Session | None = None
        self._is_armed = False

    def may_read_on(self, session: Session) -> bool:
        """Whether a session that replays may read now. If not, it is called when it may."""
        state = self._state
        bytes_per_s = state.config.replay_bytes_per_s
        if not bytes_per_s:
            return True
        bucket = self._bucket
        if bucket is None or bucket.per_s != bytes_per_s:
            bucket = TokenBucket(bytes_per_s, bytes_per_s * BURST_S, state.now)
            self._bucket = bucket
            self._next = None
            self._is_armed = False
        if self._next is session or (not self.waiting and not bucket.is_empty(state.now)):
            self._next = None
            return True
        self.waiting[session] = None
        self._arm(bucket)
        return False

    def charge_read(self, records: list[Record]) -> None:
        """Charges what a replay has read."""
        bucket = self._bucket
        if bucket is not None:
            bucket.refill(self._state.now)
            bucket.take(
                sum(len(each.topic) + len(each.payload) + len(each.properties) for each in records)
            )

    def next_reader(self) -> Session | None:
        """The session that may read now, as the timer REPLAY is due."""
        state = self._state
        bucket = self._bucket
        self._is_armed = False
        if bucket is None or not self.waiting:
            return None
        if not state.config.replay_bytes_per_s or not bucket.is_empty(state.now):
            self._next = next(iter(self.waiting))
            del self.waiting[self._next]
        session = self._next
        self._arm(bucket)
        return session

    def _arm(self, bucket: TokenBucket) -> None:
        """Gives the next session its turn as soon as the bucket allows."""
        if self.waiting and not self._is_armed:
            self._is_armed = True
            state = self._state
            state.arm(state.now + bucket.wait_s(), REPLAY, None)
