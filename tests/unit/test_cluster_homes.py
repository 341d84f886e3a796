"""A home leader that may not decide yet, because it does not know what the one before decided."""

from typing import Any

from holdfast.cluster.barriers import Barriers
from holdfast.cluster.fabric import Fabric
from holdfast.cluster.homes import Homes
from holdfast.cluster.images import Images
from holdfast.cluster.metadata_reads import NOTHING, MetadataReads
from holdfast.log.journal import Journal
from holdfast.log.record import CONTROL, Record
from holdfast.node.config import NodeConfig
from holdfast.node.state import NodeState
from holdfast.replication.kinds import SESSION_OPENED


class Bench:
    """n1 begins to lead partition 0, of which one record is not committed."""

    def __init__(self) -> None:
        journal = Journal(1, replicated=True)
        journal.append(Record(0, CONTROL))
        config = NodeConfig(partitions=1)
        self.state = NodeState(config, journal)
        self.fabric = Fabric("n1", journal)
        self.fabric.connected.add("n2")
        self.fabric.leading[0] = 2
        reads = MetadataReads(lambda now: NOTHING)
        barriers = Barriers(self.state, self.fabric, reads)
        images = Images(NodeState(config, journal))
        self.homes = Homes(self.state, self.fabric, images, barriers)
        self.homes.start_leading(0)

    def ask(self, request: int, client_id: str) -> None:
        fields: dict[str, Any] = {
            "request": request,
            "client": client_id,
            "clean": True,
            "expiry_s": 0,
            "username": None,
        }
        self.homes.open("n2", fields)

    def early(self) -> int:
        return sum(len(kept) for kept in self.homes._early.values())

    def commit(self) -> None:
        self.state.delivered[0] = 1
        self.homes.committed(0)

    def opened(self) -> int:
        return sum(kind == SESSION_OPENED for _, kind, _ in self.fabric.outgoing)


def test_what_is_asked_again_takes_no_more_room() -> None:
    """A node asks several times a second, for as long as too few replicas are there."""
    bench = Bench()
    for _ in range(1000):
        bench.ask(1, "a")
        bench.ask(2, "b")
        bench.homes.closed("n2", "c", 5)
        bench.homes.owned("n2", [0], {"d": 1}, [])
    assert bench.early() == 4
    assert bench.opened() == 0
    bench.commit()
    assert bench.opened() == 2
    assert bench.early() == 0
