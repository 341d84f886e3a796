"""The kinds of nodes of which data directories are kept: a broker, a pair, a cluster of one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from tests.e2e.brokers import Holdfast
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until
from tests.e2e.pair import pair
from tests.fuzz.doors import ONE_NODE

SETTINGS: Final = {"log": {"segment_bytes": 1 << 16, "partitions": 4}}
START_S: Final = 60.0


@contextmanager
def node(directory: Path, data: Path) -> Iterator[Holdfast]:
    """A broker that serves the directory. It ends as by kill -9."""
    directory.mkdir(exist_ok=True)
    broker = Holdfast(directory, SETTINGS, data)
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


@contextmanager
def shared(directory: Path, data: Path) -> Iterator[Holdfast]:
    """A node of a pair on the directory."""
    with pair(directory, SETTINGS, data, names="a") as nodes:
        yield nodes[0]


@contextmanager
def cluster(directory: Path, data: Path) -> Iterator[Holdfast]:
    """A cluster of one node."""
    made = ClusterProcesses(directory, 1, {"cluster": dict(ONE_NODE)})
    member: ClusterNode = made.nodes["n1"]
    member.data = data
    try:
        if data.exists():
            member.launch()
            until(lambda: member.readiness() == 200, "it serves", START_S)
        else:
            made.start()
        yield member
    finally:
        made.end()


Kind = Callable[[Path, Path], AbstractContextManager[Holdfast]]
KINDS: Final[dict[str, Kind]] = {"node": node, "pair": shared, "cluster": cluster}
