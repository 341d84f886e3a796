"""Decides when a node with a rolled-back disk may rejoin as a new Raft peer.

The votes and entries of the old Raft peer are lost then, so the others must be a majority without
it (`partitions.disk_position`). It proves nothing that this node was recently in contact with a
majority, because those nodes may be refused too. Smallest counter-example: B and C of three lose
power and are restored from copies. A was in contact with both a moment ago, and replies to each
that the other is a majority with A. Both restart as new peers, and the peers that A needs no longer
exist.

So a refused node *stands apart* first, and reports it. It has no link to any node until it is
started again, and confirms nothing. A metadata proposal that begins after this report and is
committed was confirmed by a majority without it. Take the node that stood apart last, of those that
may restart. The majority that confirmed its proposal stands apart nowhere. So there is always a
majority of peers that do not receive the permission, whichever node gave it to the others.
"""

from holdfast.node.reads.read_index import MetadataReads


class OlderCopies:
    """The refused nodes that stand apart, each with the metadata read that proves a majority
    without it."""

    def __init__(self, reads: MetadataReads) -> None:
        self._reads = reads
        self._asked: dict[str, tuple[str, int]] = {}
        """Per node the process that stands apart, and the read that began after its report."""

    def may_restart(self, node: str, process: str, stands_apart: bool) -> bool:
        """True if the process may restart as a new Raft peer. The node repeats its request until
        then."""
        if not stands_apart:
            return False
        asked = self._asked.get(node)
        if asked is None or asked[0] != process:
            asked = self._asked[node] = (process, self._reads.begin())
        return self._reads.has_passed(asked[1])

    def forget(self, nodes: frozenset[str]) -> None:
        """Removes all nodes except these."""
        for node in self._asked.keys() - nodes:
            del self._asked[node]
