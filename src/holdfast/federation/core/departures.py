"""Members that have left: when what is queued for them is given up.

Its signature, or its own link, shows that a member itself says that it leaves. What only others say
may be made up, so it counts after `leave_s`, and only of a member that was within reach when it was
said. Smallest counter-example: B is cut off for an hour, and C announces that B has left. Without
the second rule all others drop what they keep for B; while it is within reach, B hears of it, and
starts again with a newer epoch, which takes it back.
"""

from holdfast.federation.core.config import FederationConfig
from holdfast.federation.core.routing.link_state import LinkStateDatabase
from holdfast.federation.core.routing.routes import Routes


class Departures:
    def __init__(
        self, own: bytes, config: FederationConfig, database: LinkStateDatabase, routes: Routes
    ) -> None:
        self._own = own
        self._config = config
        self._entries = database.entries
        self._routes = routes
        self._reached: set[bytes] = set()
        # When members got out of reach.
        self._lost_at: dict[bytes, float] = {}
        # Members that are said to leave, and when that is believed.
        self.due: dict[bytes, float] = {}

    def graph_changed(self, now: float) -> None:
        reached = self._routes.reached()
        for node in self._reached - reached:
            self._lost_at[node] = now
        self._lost_at = {
            node: at for node, at in self._lost_at.items() if now - at < self._config.leave_s
        }
        self._reached = reached

    def announced(self, node: bytes, is_certain: bool, now: float) -> None:
        """Anything new of the member. The graph was not looked at since."""
        if not self._entries[node].is_leaving:
            self.due.pop(node, None)
        elif is_certain:
            self.due[node] = now
        elif node in self._reached or now - self._lost_at.get(node, -1e9) < self._config.leave_s:
            self.due.setdefault(node, now + self._config.leave_s)

    def take(self, now: float) -> list[bytes]:
        """Those that have left."""
        left = [node for node, at in self.due.items() if at <= now]
        for node in left:
            del self.due[node]
        return left
