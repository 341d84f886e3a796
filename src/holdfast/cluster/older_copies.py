"""When a node whose disk is an older copy (`replication.disk_position`) may begin anew, as another
Raft member.

Its votes and entries are gone then, so the others must be a majority without it. That this node has
heard of a majority lately proves nothing: those may be gone, too. Smallest counter-example: B and C
of three lose power and are put back from copies. A has heard them both a moment ago, and tells each
that the other one is a majority with A. Both begin anew, and the members that A needs are no more.

So a node that is refused *stands apart* first, and says so: it has no link to anybody until it is
started again, and confirms nothing. A change of the metadata that is proposed after it has said so,
and comes back, was confirmed by a majority without it. Of those that may begin anew, look at the
one that stood apart last: the majority that confirmed its change stands apart nowhere. So there is
always a majority of members that are not told to begin anew, whoever told the others.
"""

from holdfast.cluster.reads.read_index import MetadataReads


class OlderCopies:
    def __init__(self, reads: MetadataReads) -> None:
        self._reads = reads
        self._asked: dict[str, tuple[str, int]] = {}
        """By node the process that stands apart, and the read that began after it said so."""

    def may_begin_anew(self, node: str, process: str, stands_apart: bool) -> bool:
        """It comes again and again, each time it is asked."""
        if not stands_apart:
            return False
        asked = self._asked.get(node)
        if asked is None or asked[0] != process:
            asked = self._asked[node] = (process, self._reads.begin())
        return self._reads.has_passed(asked[1])

    def forget(self, nodes: frozenset[str]) -> None:
        """All but these."""
        for node in self._asked.keys() - nodes:
            del self._asked[node]
