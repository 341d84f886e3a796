"""A node that was held up, or stopped for a while, does not know whose its sessions are by now.

The others may have taken it for dead and given them away. What it has received in the meantime
tells, but not all at once: until it has seen everything that was decided and committed before it
went on, it hands no message at QoS 1 or 2 to its clients (`NodeState.is_unsure`).
"""

from collections.abc import Callable

from holdfast.cluster.barriers import Barriers
from holdfast.node.acknowledging import proceed
from holdfast.node.state import NodeState
from holdfast.replication.commands import CHANGES_NOTHING
from holdfast.replication.proposals import Outcome, Refused

NOTHING = -1


class Doubt:
    def __init__(
        self,
        state: NodeState,
        barriers: Barriers,
        propose_nothing: Callable[[float], int],
        held_up_s: float,
        now: float,
    ) -> None:
        """`propose_nothing`: a change of the metadata that changes nothing; returns its request.
        `held_up_s`: others take a node for dead that was silent for so long."""
        self._state = state
        self._propose_nothing = propose_nothing
        self._barriers = barriers
        self._held_up_s = held_up_s
        self._ticked_at = now
        # When this comes back, what was decided before it is known here; above all, who leads the
        # partitions that the barrier is about.
        self._request = NOTHING
        self._barrier = NOTHING
        self.count = 0

    def tick(self, now: float) -> None:
        """The clock is set, before anything that came meanwhile is looked at."""
        if now > self._ticked_at + self._held_up_s and self._state.sessions:
            self.count += 1
            self._state.is_unsure = True
            # Of an earlier time like this: they may not tell of what came after that.
            self._request = NOTHING
            self._barrier = NOTHING
        self._ticked_at = now

    def proposal_done(self, request: int, outcome: Outcome) -> bool:
        """False if it was not for this."""
        if request != self._request:
            return False
        self._request = NOTHING
        if isinstance(outcome, Refused) and outcome.text == CHANGES_NOTHING:
            self._barrier = self._barriers.begin()
        return True

    def ask(self, now: float) -> None:
        """Now and then: there may be no leader of the metadata to answer."""
        if self._state.is_unsure and self._request == NOTHING and self._barrier == NOTHING:
            self._request = self._propose_nothing(now)

    def advance(self) -> None:
        """End of a turn."""
        if self._barrier == NOTHING or not self._barriers.has_passed(self._barrier):
            return
        self._barrier = NOTHING
        state = self._state
        state.is_unsure = False
        for session in list(state.sessions.values()):
            if session.connection is not None:
                proceed(state, session)
