"""A node with a full disk stores nothing more once nobody waits for it."""

from holdfast.log.journal.journal import Journal
from holdfast.node.context import ClusterContext
from holdfast.node.disk_full import DiskSpace
from holdfast.node.metadata.model import ClusterMetadata, PartitionInfo


class Followed:
    """Replication and transfer, as Space uses them."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.missing: set[int] = set()
        self.unsaved: dict[int, int] = {}

    def suspend(self, partition: int) -> None:
        self.held.add(partition)

    def resume(self, partition: int, now: float) -> None:
        self.held.discard(partition)


def metadata_of(*in_sync: tuple[str, ...]) -> ClusterMetadata:
    partitions = tuple(PartitionInfo(("n1", "n2"), (), each[0], 1, each) for each in in_sync)
    return ClusterMetadata("c", 2, 1, {}, partitions, 1, ("n1", "n2"))


def bench() -> tuple[ClusterContext, Followed, DiskSpace]:
    context = ClusterContext("n1", Journal(2, replicated=True))
    followed = Followed()
    return context, followed, DiskSpace(context, followed, followed)  # type: ignore[arg-type]


def test_it_stores_for_as_long_as_somebody_waits_for_it() -> None:
    context, followed, space = bench()
    space.set_full(True, 1.0)
    space.advance()
    assert not followed.held
    context.metadata = metadata_of(("n2",), ("n2", "n1"))
    space.advance()
    assert not followed.held
    context.metadata = metadata_of(("n2",), ("n2",))
    space.advance()
    assert followed.held == {0, 1}
    space.set_full(False, 2.0)
    assert not followed.held
    space.advance()
    assert not followed.held


def test_what_is_held_for_another_reason_stays_so() -> None:
    context, followed, space = bench()
    context.metadata = metadata_of(("n2",), ("n2",))
    space.set_full(True, 1.0)
    space.advance()
    followed.missing.add(1)
    space.set_full(False, 2.0)
    assert followed.held == {1}
