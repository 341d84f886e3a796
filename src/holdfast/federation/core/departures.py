"""Departures of members: the time at which messages queued for a leaving member are dropped.

A signature or the member's own link proves that the member itself announced its departure. A claim
by others may be forged. It counts only after `leave_s`, and only if the member was reachable when
the claim arrived. Smallest counter-example: B is cut off for an hour, and C announces that B has
left. Without the second rule all others drop their messages for B. A reachable B receives the
claim, starts again with a newer epoch and so refutes it.
"""

from holdfast.federation.core.context import MemberContext
from holdfast.federation.core.routing.link_state import LinkStateDatabase
from holdfast.federation.core.routing.routes import Routes


class Departures:
    """The members that are announced to leave, each with the time at which that is believed."""

    def __init__(self, context: MemberContext, database: LinkStateDatabase, routes: Routes) -> None:
        self._own = context.node
        self._config = context.config
        self._entries = database.entries
        self._routes = routes
        self._reached: set[bytes] = set()
        # The times at which members became unreachable.
        self._unreachable_since: dict[bytes, float] = {}
        # Members whose departure was announced, and the time at which it is believed.
        self.due: dict[bytes, float] = {}

    def graph_changed(self, now: float) -> None:
        """Records which members became unreachable with this graph."""
        reached = self._routes.reached()
        for node in self._reached - reached:
            self._unreachable_since[node] = now
        self._unreachable_since = {
            node: at
            for node, at in self._unreachable_since.items()
            if now - at < self._config.leave_s
        }
        self._reached = reached

    def announced(self, node: bytes, is_certain: bool, now: float) -> None:
        """Handles news of a member, before `graph_changed` is called for the same frame. The news
        itself may remove the member's links, so reachability is that of the graph before."""
        if not self._entries[node].is_leaving:
            self.due.pop(node, None)
        elif is_certain:
            self.due[node] = now
        elif (
            node in self._reached
            or now - self._unreachable_since.get(node, -1e9) < self._config.leave_s
        ):
            self.due.setdefault(node, now + self._config.leave_s)

    def pop(self, now: float) -> list[bytes]:
        """Returns the members that have left, each once."""
        left = [node for node, at in self.due.items() if at <= now]
        for node in left:
            del self.due[node]
        return left
