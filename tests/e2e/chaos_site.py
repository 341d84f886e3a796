"""Where the chaos happens: nodes on hosts of their own, an operator whose view is never cut off,
and clients on a host that can be.

The thread of the test lives on the operator's host; a watcher asks every node for its status.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from holdfast.log.partition import partition_of
from holdfast_lab.targets.namespaces import Host, Network
from tests.e2e.brokers import PROCESSES, Holdfast
from tests.e2e.chaos_parties import Server
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses
from tests.support.faulty_disk import IMAGE_BYTES, FaultyDisk, faulty_disk
from tests.support.faulty_disk import missing as no_disk

WATCH_S: Final = 0.1
CLIENTS: Final = "clients"
OPERATOR: Final = "operator"
SMALL_DISK_BYTES: Final = 512 << 20
"""Twice the log of 50 rounds: a node with a damaged log keeps it while it fetches everything."""
NEED_DISKS: Final = frozenset(
    {"full disk", "disk hangs", "power loss", "power loss of all", "forgetful quorum"}
)
"""The faults of disks of their own."""
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "log": {"reserve_bytes": 8 << 20, "segment_bytes": 4 << 20, "snapshot_bytes": 4 << 20},
    "security": {"allow_anonymous": True},
}
SMALL_SEGMENTS: Final = SETTINGS | {
    "log": {"reserve_bytes": 8 << 20, "segment_bytes": 1 << 18, "snapshot_bytes": 1 << 18},
}
"""For faults of files: there are several of each kind after some seconds of load."""


class Lonely(ClusterNode):
    """A node without a cluster, at an address of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.processes = PROCESSES

    def command(self) -> list[str]:
        admin = f"{self.host}:{self.admin_port}"
        command = Holdfast.command(self)
        return [*self.prefix, *command, "--bind", self.host, "--admin", admin]

    def ready(self) -> bool:
        return self.readiness() == 200


class Site:
    """A thread of its own looks at the nodes: it may block on one that is silent. `disks`: one of
    its own under each node's data, the last one small; empty where none can be mounted."""

    def __init__(self, network: Network, nodes: dict[str, ClusterNode]) -> None:
        self.network = network
        self.nodes = nodes
        self.disks: dict[str, FaultyDisk] = {}
        self._whole_at = 0.0
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher")

    def look(self) -> bool:
        """Whether everything runs and is in sync."""
        raise NotImplementedError

    def leaders(self) -> dict[int, str]:
        """The leader of each partition, as of a moment ago; "" for none."""
        raise NotImplementedError

    def metadata_leader(self) -> str:
        raise NotImplementedError

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            began = time.monotonic()
            if self.look():
                self._whole_at = began

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._watcher.start()
        try:
            yield
        finally:
            self._over.set()
            self._watcher.join()

    def operate(self, action: str, **parameters: str) -> str:
        """Lets a node that answers begin a change of the cluster, as `holdfast cluster` does.
        Returns why it is refused, or an empty text."""
        path = f"/cluster/{action}?{urlencode(parameters)}"
        refused = "no node answers"
        for node in self.nodes.values():
            if not node.runs:
                continue
            try:
                status, refused = node.admin(path, "POST")
            except OSError:
                continue
            if status == 200:
                return ""
        return refused

    def unplayable(self) -> set[str]:
        """The faults that this machine and these settings have no means for."""
        found = set() if self.disks else NEED_DISKS
        return found if PROCESSES > 1 else found | {"kill -9 processes", "SIGSTOP process"}

    def whole_since(self, moment: float) -> bool:
        """Whether it was found whole in a look that began after that moment."""
        return self._whole_at > moment

    def servers(self) -> list[Server]:
        make_socket = self.network.hosts[CLIENTS].make_socket
        return [
            Server(node.node_id, node.host, node.port, make_socket) for node in self.nodes.values()
        ]

    @property
    def clients_prefix(self) -> list[str]:
        """Of a command that is to run on the clients' host."""
        return _prefix(self.network.hosts[CLIENTS])

    def tracebacks(self) -> dict[str, str]:
        texts = {name: node.log_text() for name, node in self.nodes.items()}
        return {name: text[-6000:] for name, text in texts.items() if "Traceback" in text}


class LonelySite(Site):
    def leaders(self) -> dict[int, str]:
        return dict.fromkeys(range(64), next(iter(self.nodes)))

    def metadata_leader(self) -> str:
        return next(iter(self.nodes))

    def look(self) -> bool:
        return all(node.runs and node.readiness() == 200 for node in self.nodes.values())


class ClusterSite(Site):
    def __init__(self, network: Network, cluster: ClusterProcesses) -> None:
        super().__init__(network, cluster.nodes)
        self._cluster = cluster
        self._status: dict[str, Any] = {}

    def look(self) -> bool:
        self._status = self._cluster.status() or self._status
        return len(self._cluster.running) == len(self.nodes) and self._cluster.is_healthy()

    def leaders(self) -> dict[int, str]:
        partitions = self._status.get("partitions") or []
        return {each["partition"]: each["leader"] for each in partitions}

    def metadata_leader(self) -> str:
        return str(self._status.get("metadata_leader", ""))


def busiest(leaders: dict[int, str], topics: Sequence[str]) -> str:
    """The node that leads the partitions of most of these topics; "" when nobody leads any."""
    if not leaders:
        return ""
    counts = Counter(leaders[partition_of(topic.encode(), len(leaders))] for topic in topics)
    counts.pop("", None)
    return counts.most_common(1)[0][0] if counts else ""


def _add_disks(stack: ExitStack, site: Site, directory: Path) -> None:
    if no_disk():
        return
    storing = {name: node for name, node in site.nodes.items() if node.has_data}
    *_, last = storing
    for name, node in storing.items():
        size_bytes = SMALL_DISK_BYTES if name == last else IMAGE_BYTES
        disk = stack.enter_context(faulty_disk(directory / f"disk-{name}", size_bytes))
        node.data = disk.directory / "data"
        site.disks[name] = disk


def _hosts(stack: ExitStack, names: Sequence[str]) -> Network:
    network = stack.enter_context(Network([*names, CLIENTS, OPERATOR]))
    stack.enter_context(network.hosts[OPERATOR].entered())
    return network


def _prefix(host: Host) -> list[str]:
    return host.command([])


@contextmanager
def lonely_site(directory: Path) -> Iterator[LonelySite]:
    """One node."""
    with ExitStack() as stack:
        network = _hosts(stack, ["n1"])
        host = network.hosts["n1"]
        node = Lonely(
            directory / "n1",
            "n1",
            directory / "unused",
            SMALL_SEGMENTS,
            host=host.address,
            prefix=_prefix(host),
        )
        site = LonelySite(network, {"n1": node})
        _add_disks(stack, site, directory)
        stack.callback(node.kill)
        node.start()
        with site.watched():
            yield site


@contextmanager
def cluster_site(
    directory: Path,
    count: int,
    settings: dict[str, dict[str, Any]] = SETTINGS,
    *,
    gateways: int = 0,
    is_watched: bool = True,
    has_disks: bool = False,
) -> Iterator[ClusterSite]:
    """`gateways`: so many nodes without data, besides. `is_watched`: False: nobody asks the nodes
    for their status, nor knows whether they are whole. `has_disks`: each data node has a disk of
    its own that can fail, where such a one can be made."""
    with ExitStack() as stack:
        names = [f"n{number}" for number in range(1, count + gateways + 1)]
        network = _hosts(stack, names)
        cluster = ClusterProcesses(
            directory,
            len(names),
            settings,
            gateways=names[count:],
            hosts=[network.hosts[name].address for name in names],
            prefixes=[_prefix(network.hosts[name]) for name in names],
        )
        site = ClusterSite(network, cluster)
        if has_disks:
            _add_disks(stack, site, directory)
        stack.callback(cluster.end)
        for disk in site.disks.values():
            # Before that: nobody can be killed while it waits for its disk.
            stack.callback(disk.go_on)
        try:
            cluster.start()
            with site.watched() if is_watched else nullcontext():
                yield site
        except BaseException as error:
            error.add_note(cluster.logs())
            raise
