"""Announces filters before anything reads a fed partition with them.

A subscription begins at `delivered`, which is the mark of a partition that is fed. So each leader
must have the filter before that. Counter-example: a client subscribes to `a`, its start is the mark
10, and the leader has the filter when it has sent the mark 12. Record 11 on `a` is lost.

Invariant: when a hold is over, each feed of a connected leader was requested after the filters had
left, or its leader has acknowledged them and everything from before is applied here. A hold is
counted as a subscription until its subscriptions are, so the filters stay announced.

A leader that does not acknowledge within WAIT_S is left: its feed is requested again from the mark,
behind the filters. Nothing is lost by that, and nothing waits for it. So is one that has not
acknowledged the filters of a SUBACK that leaves. Counter-example: a SUBSCRIBE waits for the log and
has no hold, because this node stores all partitions. The first of them is fed before the record is
committed, and the client relies on its SUBACK.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from holdfast.node.feeds.receiver import FeedReceiver
from holdfast.node.node_state import NodeState
from holdfast.node.routing.qos0_routing import Qos0Routing
from holdfast.protocol.topics.names import InvalidFilter, check_filter

WAIT_S: Final = 0.5
"""The time in seconds after which a feed is left whose leader has not acknowledged filters."""


class FilterHold:
    """Filters that are announced for a subscription to come."""

    def __init__(
        self,
        filters: list[str],
        number: int,
        since: float,
        then: Callable[[], None],
        is_needed: Callable[[], bool],
    ) -> None:
        self.filters = filters
        self.number = number
        self.since = since
        self.then = then
        self.is_needed = is_needed
        self.is_over = False


class FilterHolds:
    """The holds of this node, oldest first."""

    def __init__(self, state: NodeState, interest: Qos0Routing, receiver: FeedReceiver) -> None:
        self._state = state
        self._interest = interest
        self._receiver = receiver
        self._waiting: deque[FilterHold] = deque()
        # Those that are over, and whose subscriptions may still be to come.
        self._over: list[FilterHold] = []

    def hold(
        self, filters: Iterable[str], then: Callable[[], None], is_needed: Callable[[], bool]
    ) -> FilterHold:
        """Announces filters. `then` is called when the hold is over, unless it is over at once.
        `is_needed`: is the subscription still to come? Invalid filters are left out."""
        valid = [each for each in filters if _is_valid(each)]
        for filter in valid:
            self._interest.subscribed(filter)
        hold = FilterHold(valid, self._interest.number, self._state.now, then, is_needed)
        if self._waiting or self._laggards(hold.number):
            self._waiting.append(hold)
        else:
            hold.is_over = True
            self._over.append(hold)
        return hold

    def _laggards(self, number: int) -> list[str]:
        late = {each for each in self._receiver.links if self._interest.acknowledged(each) < number}
        return sorted(late & self._receiver.feeders(number)) if late else []

    def leave_laggards(self, number: int) -> None:
        """Leaves the feeds whose leaders have not acknowledged the filters up to a number."""
        for node in self._laggards(number):
            self._receiver.leave(node)

    def advance(self) -> None:
        """Ends the holds that all leaders have acknowledged, or that have waited for WAIT_S."""
        waiting = self._waiting
        while waiting:
            hold = waiting[0]
            if self._state.now < hold.since + WAIT_S and self._laggards(hold.number):
                return
            self.leave_laggards(hold.number)
            waiting.popleft()
            hold.is_over = True
            self._over.append(hold)
            hold.then()

    def tidy(self) -> None:
        """Releases the filters whose subscriptions are there, or will not come."""
        over, self._over = self._over, []
        for hold in over:
            if hold.is_needed():
                self._over.append(hold)
            else:
                for filter in hold.filters:
                    self._interest.unsubscribed(filter)

    def timer(self) -> float | None:
        return self._waiting[0].since + WAIT_S if self._waiting else None


def _is_valid(filter: str) -> bool:
    try:
        check_filter(filter)
    except InvalidFilter:
        return False
    return True
