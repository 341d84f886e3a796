"""The choice of the node that receives the next record of a shared group."""

from typing import Final

LOAD_BYTES_MAX: Final = 8 << 20
"""The size in bytes of unfinished records at one node, over all groups. The last assigned record
may exceed it."""


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
