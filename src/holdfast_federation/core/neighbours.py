"""Chooses members to dial.

A member dials the neighbours that the manager wants. With fewer than `degree_min` links up it also
dials members two links away, without waiting for the manager.

Departures of members: the time at which messages queued for a leaving member are dropped.

A signature or the member's own link proves that the member itself announced its departure. A claim
by others may be forged. It counts only after `leave_s`, and only if the member was reachable when
the claim arrived. Smallest counter-example: B is cut off for an hour, and C announces that B has
left. Without the second rule all others drop their messages for B. A reachable B receives the
claim, starts again with a newer epoch and so refutes it.
"""

from dataclasses import dataclass

from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import Dial
from holdfast_federation.core.routing.link_health import LinkTable
from holdfast_federation.core.routing.link_state import LinkStateDatabase
from holdfast_federation.core.routing.routes import Routes


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


@dataclass(slots=True)
class _Attempts:
    count: int
    next_at: float
    wait_s: float


class Repair:
    """The links that a member dials, and the surplus ones that it closes.

    It closes a link of its own choice only after all links of the manager were up for
    `repair_close_s`. Closing it sooner could isolate the member if a new link fails at once.
    """

    def __init__(
        self,
        context: MemberContext,
        database: LinkStateDatabase,
        links: LinkTable,
    ) -> None:
        self._own = context.node
        self._config = context.config
        self._database = database
        self._links = links
        self._effects = context.effects
        # The neighbours that the manager wants; None: it has not announced any.
        self._desired: dict[bytes, str] | None = None
        # Members with which this one had links at another address. They may not know this one, so
        # it dials them until it is linked with each.
        self.former: set[bytes] = set()
        self._attempts: dict[bytes, _Attempts] = {}
        self._repaired: set[bytes] = set()
        # Links to be closed; taken by the member.
        self.superfluous: list[bytes] = []
        # Whether a link was ever up. A member without one waits for the manager: dialling at a
        # start would make links that the manager does not want.
        self._had_links = False
        self._complete_since: float | None = None
        self._run_at = float("inf")

    def set_desired(self, desired: dict[bytes, str], now: float) -> None:
        before = self._desired or {}
        self._desired = {node: address for node, address in desired.items() if node != self._own}
        # A link that is no longer wanted closes like a repair, after its successors are up.
        self._repaired |= {node for node in before if node in self._links}
        self._repaired -= self._desired.keys()
        self._complete_since = None
        self.run(now)

    def linked(self, peer: bytes, now: float) -> None:
        self._had_links = True
        self._attempts.pop(peer, None)
        self.run(now)

    def link_down(self, peer: bytes, now: float) -> None:
        self._complete_since = None
        self._repaired.discard(peer)
        self.run(now)

    def timer(self) -> float:
        return self._run_at

    def run(self, now: float) -> None:
        """Dials the members that are due, and sets the time of the next run."""
        missing = [node for node in self._desired or {} if node not in self._links]
        for node in missing:
            assert self._desired is not None
            self._dial(node, self._address_of(node, self._desired[node]), now)
        entries = self._database.entries
        self.former = {node for node in self.former if self._is_former(node)}
        for node in sorted(self.former):
            self._dial(node, entries[node].address, now)
        lacking = self._config.degree_min - len(self._links.peers())
        if lacking > 0 and self._had_links:
            for node in self._candidates()[:lacking]:
                self._repaired.add(node)
                self._dial(node, entries[node].address, now)
        self._close_repairs(bool(missing), now)
        is_wanting = bool(missing or self.former) or (lacking > 0 and self._had_links)
        self._run_at = now + self._config.dial_every_s if is_wanting else float("inf")
        if self._complete_since is not None:
            self._run_at = min(self._run_at, self._complete_since + self._config.repair_close_s)

    def _is_former(self, node: bytes) -> bool:
        """Whether the member still announces its link with this one, and has none."""
        entry = self._database.entries.get(node)
        is_waiting = entry is not None and entry.address != "" and self._own in entry.links
        return is_waiting and node not in self._links

    def _address_of(self, node: bytes, desired: str) -> str:
        """The address to dial next: the desired one and the announced one in turn. A member that is
        a cluster announces that of the node which runs it now."""
        entry = self._database.entries.get(node)
        attempts = self._attempts.get(node)
        is_announced = attempts is not None and attempts.count % 2 == 1
        return entry.address if is_announced and entry is not None and entry.address else desired

    def _dial(self, node: bytes, address: str, now: float) -> None:
        attempts = self._attempts.get(node)
        if attempts is None:
            attempts = _Attempts(0, now, self._config.dial_every_s)
            self._attempts[node] = attempts
        if attempts.next_at > now:
            return
        attempts.count += 1
        attempts.next_at = now + attempts.wait_s
        attempts.wait_s = min(2 * attempts.wait_s, self._config.dial_every_max_s)
        self._effects.append(Dial(node, address))

    def _candidates(self) -> list[bytes]:
        """Ranks the members to dial: fewest attempts first, then two links away, then few links."""
        entries = self._database.entries
        own = entries[self._own]
        # A member that we have just lost still announces its link with us.
        near = set(own.links) | {
            node for node, entry in entries.items() if self._own in entry.links
        }
        second = {peer for node in near if node in entries for peer in entries[node].links}
        others = [
            node
            for node, entry in entries.items()
            if node != self._own
            and node not in self._links
            # A missing one is dialled anyway, and no repair: that would close it again.
            and node not in (self._desired or ())
            and entry.address
            and not entry.is_leaving
        ]

        def rank(node: bytes) -> tuple[int, bool, int, bytes]:
            attempts = self._attempts.get(node)
            tried = attempts.count if attempts is not None else 0
            return (tried, node not in second, len(entries[node].links), node)

        return sorted(others, key=rank)

    def _close_repairs(self, is_missing: bool, now: float) -> None:
        """Closes this member's own links once the manager's were all up for `repair_close_s`."""
        repaired = [peer for peer in self._repaired if peer in self._links]
        if self._desired is None or is_missing or not repaired:
            self._complete_since = None
            return
        if len(self._desired) < self._config.degree_min:
            self._complete_since = None
            return
        if self._complete_since is None:
            self._complete_since = now
        if now >= self._complete_since + self._config.repair_close_s:
            self._complete_since = None
            self._repaired.clear()
            self.superfluous.extend(sorted(repaired))
