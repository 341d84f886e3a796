"""Chooses the node of one shared group that gets the next record, and tracks their records.

Several nodes may report one record, after two coordinators assigned it in turn. The first one holds
it, the others are its claimants.

Invariant: a record stays with the nodes that have it. A claimant holds it after the holder, and
what a claimant finishes is finished. Counter-example: n1 and n5 report record 7, and n5's session
keeps it. n1 returns it. Without the claim of n5 it is assigned again, and the session at n5 has it
twice.

A record is doubtful if a node that has lost it may have a session that has kept it, held by another
node or not.
"""

from typing import Final

from holdfast.node.groups.control_frames import Place

LOAD_BYTES_MAX: Final = 8 << 20
"""The size in bytes of unfinished records at one node, over all groups. The last assigned record
may exceed it. At this node a record counts until it is sent, because then its payload leaves the
memory."""


class NodeLoad:
    """The size of the assigned records at one node, over all groups of this coordinator."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.is_full = False


class NodeWeight:
    """The current capacity and weight of a node in one shared group."""

    def __init__(self, node: str, load: NodeLoad) -> None:
        self.node = node
        self.load = load
        self.members = 0
        self.limit = 0
        # The records that it holds: those of `RecordHolders.assigned`.
        self.count = 0
        # The credit of the weighted round robin. The node with the highest credit is next.
        self.credit = 0
        # False if the link is lost or the node must report again.
        self.is_connected = False


class NodeWeights:
    """The nodes with members of one shared group."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeWeight] = {}

    def of(self, node: str, load: NodeLoad) -> NodeWeight:
        stake = self.nodes.get(node)
        if stake is None:
            stake = NodeWeight(node, load)
            self.nodes[node] = stake
        return stake

    def member_count(self) -> int:
        return sum(stake.members for stake in self.nodes.values())

    def is_awaited(self, denied: set[str]) -> bool:
        """True if a node with members has not denied the record."""
        return any(stake.members and stake.node not in denied for stake in self.nodes.values())

    def next(self, denied: set[str] | None) -> NodeWeight | None:
        """Returns the node for the next record, by smooth weighted round robin over the numbers of
        members.

        Only nodes with capacity that have not denied the record take part.
        """
        best: NodeWeight | None = None
        total = 0
        for stake in self.nodes.values():
            if not stake.is_connected or stake.count >= stake.limit:
                continue
            if denied is not None and stake.node in denied:
                continue
            if stake.load.size_bytes > LOAD_BYTES_MAX:
                stake.load.is_full = True
                continue
            stake.credit += stake.members
            total += stake.members
            if best is None or stake.credit > best.credit:
                best = stake
        if best is not None:
            best.credit -= total
        return best


class RecordHolders:
    """The holder, the claimants and the doubts of each record that is not to be assigned."""

    def __init__(self, weights: NodeWeights) -> None:
        self._weights = weights
        # Place -> node, bytes.
        self.assigned: dict[Place, tuple[str, int]] = {}
        # Place -> claimants, in the order of their reports. Each such place is assigned.
        self.claims: dict[Place, dict[str, None]] = {}
        # Place -> node that has lost it -> barrier, after which the log shows whether a session
        # there has kept it.
        self.doubtful: dict[Place, dict[str, int]] = {}

    def at(self, node: str) -> list[Place]:
        """Returns the records that the node holds or claims."""
        held = [place for place, holder in self.assigned.items() if holder[0] == node]
        return held + [place for place, nodes in self.claims.items() if node in nodes]

    def has(self, node: str, place: Place) -> bool:
        """True if the node holds or claims the record."""
        return self.holds(node, place) or node in self.claims.get(place, ())

    def holds(self, node: str, place: Place) -> bool:
        return self.assigned.get(place, ("", 0))[0] == node

    def hold(self, node: NodeWeight, place: Place, size_bytes: int) -> None:
        """Makes the node the holder of a record without one."""
        assert place not in self.assigned, "a record is assigned twice"
        node.count += 1
        node.load.size_bytes += size_bytes
        self.assigned[place] = (node.node, size_bytes)

    def note_sent(self, node: str, place: Place, *, is_listed: bool) -> bool:
        """Notes that a record has left the memory of the node that holds it. Unless it stays
        `is_listed`, it leaves the table, too. Returns True if it did."""
        if not self.holds(node, place):
            return False
        self._weights.nodes[node].load.size_bytes -= self.assigned[place][1]
        self.assigned[place] = (node, 0)
        if is_listed or place in self.claims or place in self.doubtful:
            return False
        self._let_go(place)
        return True

    def claim(self, node: str, place: Place) -> None:
        """Makes the node a claimant of a record that another one holds."""
        self.claims.setdefault(place, {})[node] = None

    def is_unheld(self, place: Place) -> bool:
        """True if no node has the record, and none may have kept it."""
        return place not in self.assigned and place not in self.doubtful

    def take(self, node: str, place: Place) -> None:
        """Takes a record from a node that has it. The next claimant holds it then."""
        claims = self.claims.get(place, {})
        if not self.holds(node, place):
            del claims[node]
        else:
            self._let_go(place)
            if claims:
                heir = next(iter(claims))
                del claims[heir]
                self.hold(self._weights.nodes[heir], place, 0)
        if not claims:
            self.claims.pop(place, None)

    def take_in_doubt(self, node: str, place: Place, barrier: int) -> None:
        """Takes a record from a node whose session may have kept it, as `barrier` will show."""
        if self.has(node, place):
            self.doubtful.setdefault(place, {})[node] = barrier
            self.take(node, place)

    def end_doubt(self, node: str, place: Place) -> None:
        """Ends the doubt of a record and a node."""
        doubts = self.doubtful.get(place, {})
        doubts.pop(node, None)
        if not doubts:
            self.doubtful.pop(place, None)

    def forget(self, place: Place) -> None:
        """Forgets all nodes that have a record, because it is finished."""
        self.claims.pop(place, None)
        self.doubtful.pop(place, None)
        if place in self.assigned:
            self._let_go(place)

    def _let_go(self, place: Place) -> None:
        node, size_bytes = self.assigned.pop(place)
        stake = self._weights.nodes.get(node)
        if stake is not None:
            stake.count -= 1
            stake.load.size_bytes -= size_bytes
            assert min(stake.count, stake.load.size_bytes) >= 0, "fewer records than none"

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold."""
        counts = dict.fromkeys(self._weights.nodes, 0)
        for node, _ in self.assigned.values():
            counts[node] += 1
        for stake in self._weights.nodes.values():
            assert stake.count == counts[stake.node], "the records that a node has"
        for place, nodes in self.claims.items():
            assert nodes, "a claim of no node"
            assert place in self.assigned, "a claim of a record without a holder"
            assert self.assigned[place][0] not in nodes, "a holder claims its record"
        assert all(self.doubtful.values()), "a doubt about no node"
