"""What was ever committed and led in a simulated cluster, and whether it still is so."""

from tests.sim.schedule import Wrong
from tests.support.sim_replica_node import SimNode


class Ledger:
    def __init__(self, partitions: int) -> None:
        # Per partition what anybody has said to be committed, by offset.
        self._committed: list[dict[int, int]] = [{} for _ in range(partitions)]
        self.ends = [0] * partitions
        # (partition, epoch): which node, in which life.
        self.leaders: dict[tuple[int, int], tuple[str, int]] = {}

    def commit(self, node: SimNode, partition: int, offset: int) -> bool:
        """A node's watermark has moved. True if nobody's was there before."""
        known = self._committed[partition]
        there = node.log.numbers(partition)
        for at in range(node.log.start_offsets[partition], offset):
            if at not in there:
                raise Wrong(f"{node.name}: offset {at} of partition {partition} is missing")
            if known.setdefault(at, there[at]) != there[at]:
                raise Wrong(
                    f"{node.name}: partition {partition} has {there[at]} at {at}, "
                    f"committed was {known[at]}"
                )
        if offset <= self.ends[partition]:
            return False
        self.ends[partition] = offset
        return True

    def check_durable(self, node: SimNode, partition: int) -> None:
        """A node of the in-sync set, alive or not, has on its disk all that was committed."""
        if not node.is_registered:
            return
        end = self.ends[partition]
        known = self._committed[partition]
        there: dict[int, int] = {}
        last = node.disk.start_offsets[partition]
        for entry in node.disk.contents(partition, node.disk.synced):
            there.update(enumerate(entry.numbers, entry.base))
            last = entry.end
        wrong = [at for at in there if at < end and there[at] != known[at]]
        if last < end or wrong:
            raise Wrong(
                f"{node.name} is in sync in partition {partition}, ends at {last} and differs at "
                f"{wrong}; committed to {end}"
            )

    def lead(self, node: SimNode, partition: int, epoch: int) -> None:
        who = (node.name, node.life)
        before = self.leaders.setdefault((partition, epoch), who)
        if before != who:
            raise Wrong(f"partition {partition}: epoch {epoch} is led by {who}, was by {before}")
