"""An admin port with a cluster behind it that does what the test says."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from holdfast.api.admin import AdminServer, audit_of
from holdfast.api.cluster_operations import ClusterError, ClusterFigures, Make, PlacementFigures
from holdfast.config.schema import Config
from holdfast.io.disk.maintenance import Maintenance
from holdfast.io.disk.shared_directory import SharedDirectory
from holdfast.io.event_loop.broker import Broker
from holdfast.node.metadata import operations
from holdfast.security.http.server import listen
from holdfast_federation.sidecar.in_broker import BrokerFederation

WAIT_S = 20.0


class FakeAgreement:
    """Nodes that have not agreed on users, so that each has those of its own file."""

    was_told_to_join = False
    on_change: Callable[[], None] | None = None

    def cluster_id(self) -> str:
        return ""

    def is_entered(self) -> bool:
        return False

    def current(self) -> None:
        return None


class FakeCluster:
    """Three nodes that are fine, with `partitions` of which each node leads its share. Tests change
    `nodes`, `partitions` and `fields`. Changes are noted in `asked`; `refusal` refuses them."""

    def __init__(self, node: str = "n1", partitions: int = 6) -> None:
        names = ["n1", "n2", "n3"]
        self.access = FakeAgreement()
        self.nodes: list[dict[str, Any]] = [
            {
                "node": name,
                "state": "up",
                "role": "data",
                "voter": True,
                "connected": True,
                "peer_address": f"10.0.0.{number}:21883",
                "client_address": f"10.0.0.{number}:1883",
                "admin_address": "",
                "leaders": partitions // 3,
                "replicas": partitions,
                "in_sync": partitions,
            }
            for number, name in enumerate(names, 1)
        ]
        self.partitions: list[dict[str, Any]] = [
            {
                "partition": number,
                "leader": names[number % 3],
                "epoch": 1,
                "replicas": names[number % 3 :] + names[: number % 3],
                "in_sync": list(names),
                "adding": [],
                "high_watermark": 100 * number,
                "version": 1,
            }
            for number in range(partitions)
        ]
        self.fields: dict[str, Any] = {
            "cluster_id": "c-1",
            "node": node,
            "initialised": True,
            "metadata_leader": "n1",
            "has_majority": True,
            "version": 7,
            "replication_factor": 3,
            "min_insync": 2,
            "replication": {
                "automatic": False,
                "replication_factor": 3,
                "min_insync": 2,
                "waits_for": "",
            },
            "under_replicated": 0,
            "leaderless": 0,
            "moving": 0,
            "sessions_here": 5,
        }
        self.values = ClusterFigures(node, initialised=True, has_majority=True)
        self.placement: PlacementFigures | None = None
        self.questions = SimpleNamespace(answer=None)
        self.asked: list[str] = []
        self.refusal = ""
        self.changing = threading.Lock()
        """Held by a test that changes several things which one status must show together."""
        self.after: Callable[[str], None] = lambda asked: None
        """What a change leads to."""

    def status(self) -> dict[str, object]:
        with self.changing:
            return self.fields | {"nodes": self.nodes, "partitions": self.partitions}

    def other_nodes(self) -> dict[str, str]:
        return {}

    def placement_figures(self) -> PlacementFigures | None:
        return self.placement

    def figures(self) -> ClusterFigures:
        return self.values

    def _change(self, asked: str) -> None:
        if self.refusal:
            raise ClusterError(self.refusal)
        self.asked.append(asked)
        self.after(asked)

    async def init(self) -> dict[str, object]:
        self._change("init")
        return self.status()

    async def change(self, make: Make) -> None:
        assert isinstance(make, partial)
        name = "resize" if make.func is operations.resize else ""
        words = map(str, (name, *make.args, *make.keywords.values()))
        self._change(" ".join(filter(None, words)))

    async def remove(self, node: str) -> None:
        self._change(f"remove {node}")

    async def unsafe_recover(self, node: str) -> None:
        self._change(f"unsafe-recover {node}")


class FakeServer:
    """What an admin port wants of its process: one that serves no clients."""

    def __init__(self, cluster: Any) -> None:
        self.broker: Broker | None = None
        self.sharing: SharedDirectory | None = None
        self.cluster = cluster
        self.federation: BrokerFederation | None = None
        self.maintenance: Maintenance | None = None
        self.config = Config()
        self.is_stopping = False
        self.siblings: list[str] = []
        self.restarts = 0
        self.explain = None
        self.audit = audit_of(self)


@contextmanager
def admin_port(cluster: Any, port: int = 0) -> Iterator[int]:
    """The port, served by a thread of its own while the block runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def carry_out(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)

    async def start() -> AdminServer:
        server = AdminServer(FakeServer(cluster), listen("127.0.0.1", port))
        server.start()
        return server

    async def stop(server: AdminServer) -> None:
        await server.stop()

    try:
        server: AdminServer = carry_out(start())
        try:
            yield server.port
        finally:
            carry_out(stop(server))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
