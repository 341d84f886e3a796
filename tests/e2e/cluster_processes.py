"""A cluster as processes under test: started, killed, paused and started again, node by node."""

import http.client
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.log.partition import partition_of
from holdfast.security.access.access_file import FILE, AccessFile
from holdfast.security.access.changes import add_token
from tests.e2e.brokers import Holdfast
from tests.support.ports import free_port
from tests.support.waiting import WAIT_S, until

REQUEST_S = 5.0
NO_USERS = 403
SECRET = "a secret of the tests, long enough\n"


def _is_stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return True


class ClusterNode(Holdfast):
    """Answers at `host` for clients, peers and its admin port. Another one than loopback is for
    nodes in network namespaces, and `prefix` for what starts a process there."""

    def __init__(
        self,
        directory: Path,
        node_id: str,
        secret_file: Path,
        settings: dict[str, dict[str, Any]] | None = None,
        *,
        is_witness: bool = False,
        is_gateway: bool = False,
        zone: str = "",
        host: str = "127.0.0.1",
        prefix: Iterable[str] = (),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory, settings)
        self.processes = 1
        self.node_id = node_id
        self.host = host
        self.prefix = list(prefix)
        self.peer_port = free_port()
        self.secret_file = secret_file
        self.is_witness = is_witness
        self.is_gateway = is_gateway
        self.zone = zone
        self.has_data = not is_witness and not is_gateway
        self.is_paused = False
        self.join: list[str] = []
        self.token = ""
        """Of the admin port, which asks other hosts than its own for one."""

    def launch(self) -> None:
        if self.host != "127.0.0.1" and not (self.data / FILE).exists():
            make = add_token("admin", int(time.time()))
            self.token = AccessFile(self.data).change(make)[1]
        super().launch()

    @property
    def peer_address(self) -> str:
        return f"{self.host}:{self.peer_port}"

    def command(self) -> list[str]:
        command = [
            *[*self.prefix, *super().command(), "--node-id", self.node_id],
            *["--bind", self.host, "--admin", f"{self.host}:{self.admin_port}"],
            *["--peer-bind", self.peer_address, "--cluster-secret-file", str(self.secret_file)],
        ]
        if self.join:
            command += ["--join", ",".join(self.join)]
        command += ["--role", "gateway"] * self.is_gateway
        command += ["--zone", self.zone] if self.zone else []
        return command + ["--witness"] * self.is_witness

    def ready(self) -> bool:
        """That it answers: whether it serves is the cluster's doing."""
        return bool(self.cluster())

    def readiness(self) -> int:
        """Status of /readyz; 0: nobody answers."""
        try:
            return self.admin("/readyz")[0]
        except OSError:
            return 0

    def cluster(self) -> dict[str, Any]:
        """What it says about the cluster; empty while it does not answer."""
        try:
            status, body = self.admin("/cluster")
        except OSError:
            return {}
        found: dict[str, Any] = json.loads(body)
        if status == NO_USERS:
            # It begins anew, and the others have not told it the users yet.
            return {}
        assert status == 200, found
        return found

    def admin(self, path: str, method: str = "GET") -> tuple[int, str]:
        """Status and body. Raises OSError."""
        request = urllib.request.Request(
            f"http://{self.host}:{self.admin_port}{path}", method=method
        )
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except http.client.HTTPException as error:
            raise ConnectionError(f"killed while it answered: {error!r}") from error

    @property
    def runs(self) -> bool:
        return self.process is not None and not self.is_paused

    def pause(self) -> None:
        """SIGSTOP: its sockets stay open and answer nothing."""
        self.signal_all(signal.SIGSTOP)
        assert self.process is not None
        pids = (self.process.pid, *self.children())
        tasks = [each for pid in pids for each in Path(f"/proc/{pid}/task").iterdir()]
        # Only then nothing of it runs any more.
        until(lambda: all(map(_is_stopped, tasks)), "all threads stopped")
        self.is_paused = True

    def resume(self) -> None:
        self.signal_all(signal.SIGCONT)
        self.is_paused = False

    def kill(self) -> None:
        super().kill()
        self.is_paused = False


class ClusterProcesses:
    """`with ClusterProcesses(directory) as cluster:` is a healthy cluster of n1, n2, ...; leaving
    it ends its processes and finds no traceback in their logs.

    `settings` are the tables of every node's configuration. The last `witnesses` nodes are without
    data, and so are the nodes of the names `gateways`. `zones` has one letter for each. `hosts` and
    `prefixes`: see ClusterNode.
    """

    node_class = ClusterNode

    def __init__(
        self,
        directory: Path,
        count: int = 3,
        settings: dict[str, dict[str, Any]] | None = None,
        *,
        witnesses: int = 0,
        gateways: Collection[str] = (),
        zones: str = "",
        hosts: list[str] | None = None,
        prefixes: list[list[str]] | None = None,
    ) -> None:
        self.directory = directory
        self.settings = settings or {}
        directory.mkdir(parents=True, exist_ok=True)
        self.secret_file = directory / "cluster.secret"
        self.secret_file.write_text(SECRET)
        self.secret_file.chmod(0o600)
        self.nodes: dict[str, ClusterNode] = {}
        for index in range(count):
            self._make_node(
                is_witness=index >= count - witnesses,
                is_gateway=f"n{index + 1}" in gateways,
                zone=zones[index : index + 1],
                host=hosts[index] if hosts else "127.0.0.1",
                prefix=prefixes[index] if prefixes else (),
            )
        for node in self.nodes.values():
            node.join = [each.peer_address for each in self.nodes.values()]

    def _make_node(self, **options: Any) -> ClusterNode:
        name = f"n{len(self.nodes) + 1}"
        directory = self.directory / name
        node = self.node_class(directory, name, self.secret_file, self.settings, **options)
        self.nodes[name] = node
        return node

    def start(self) -> None:
        """Start all, make the cluster, wait until it is healthy."""
        for node in self.nodes.values():
            node.launch()
        for node in self.nodes.values():
            node.await_ready()
        first = next(iter(self.nodes.values()))
        status, body = first.admin("/cluster/init", "POST")
        assert status == 200, body
        self.wait_healthy()

    def add_node(self, **options: Any) -> ClusterNode:
        """One more, that joins; returns when it answers."""
        known = [each.peer_address for each in self.nodes.values()]
        node = self._make_node(**options)
        node.join = known
        node.start()
        return node

    def __enter__(self) -> "ClusterProcesses":
        try:
            self.start()
        except BaseException as error:
            self.end()
            error.add_note(self.logs())
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()
        if error is not None:
            error.add_note(self.logs())
        else:
            for node in self.nodes.values():
                assert "Traceback" not in node.log_text(), node.log_text()[-6000:]

    def end(self) -> None:
        """SIGKILL whatever runs."""
        for node in self.nodes.values():
            node.kill()

    def logs(self) -> str:
        return "\n".join(
            f"log of {node.node_id}:\n{node.log_text()[-4000:]}" for node in self.nodes.values()
        )

    def kill9(self, *names: str) -> None:
        """All named at the same moment, as near as can be."""
        for name in names:
            process = self.nodes[name].process
            assert process is not None
            process.kill()
        for name in names:
            self.nodes[name].kill()

    def pause(self, name: str) -> None:
        self.nodes[name].pause()

    def resume(self, name: str) -> None:
        self.nodes[name].resume()

    def stop(self, name: str) -> int:
        """SIGTERM; the exit code."""
        return self.nodes[name].stop()

    def restart(self, *names: str) -> None:
        """Start nodes that were killed or stopped; returns when they answer."""
        for name in names:
            self.nodes[name].launch()
        for name in names:
            self.nodes[name].await_ready()

    @property
    def running(self) -> list[ClusterNode]:
        """Neither dead nor paused."""
        return [node for node in self.nodes.values() if node.runs]

    @property
    def ports(self) -> dict[str, int]:
        return {name: node.port for name, node in self.nodes.items() if not node.is_witness}

    @property
    def addresses(self) -> list[str]:
        """host:port for the server list of a client."""
        return [f"{node.host}:{node.port}" for node in self.nodes.values() if not node.is_witness]

    def status(self, name: str = "") -> dict[str, Any]:
        """As a node sees it; without a name, one that reaches a majority if there is such a one.
        Empty: nobody answers."""
        found: dict[str, Any] = {}
        for node in [self.nodes[name]] if name else self.running:
            found = node.cluster() or found
            if found.get("has_majority"):
                break
        return found

    def leader_of(self, partition: int) -> str:
        """Empty: nobody leads it."""
        partitions = self.status().get("partitions") or []
        leader: str = partitions[partition]["leader"] if partitions else ""
        return leader

    def partition_of(self, topic: str) -> int:
        return partition_of(topic.encode(), len(self.status()["partitions"]))

    def generations(self) -> set[object]:
        """The generations of the log that the nodes report, or the status where one does not."""
        found: set[object] = set()
        for node in self.running:
            if node.is_witness:
                continue
            status, body = node.admin("/api/v1/log")
            found.add(json.loads(body)["generation"] if status == 200 else status)
        return found

    def await_generation(self, other_than: object = 0) -> int:
        """Wait until the nodes report one generation, another one than this, and return it."""
        until(
            lambda: len(self.generations()) == 1 and not self.generations() & {other_than, 503},
            f"another generation than {other_than}",
        )
        [generation] = self.generations()
        assert isinstance(generation, int)
        return generation

    def metadata_leader(self) -> str:
        leader: str = self.status().get("metadata_leader", "")
        return leader

    def is_healthy(self, without: Collection[str] = ()) -> bool:
        """All nodes but `without` are up and ready, and agree that every partition has one of them
        as its leader and as many in sync as there can be."""
        nodes = [node for name, node in self.nodes.items() if name not in without]
        names = {node.node_id for node in nodes if node.has_data}
        for view in (node.cluster() for node in nodes):
            if not view:
                return False
            wanted = min(view["replication_factor"], len(names))
            states = {each["node"]: each["state"] for each in view["nodes"]}
            if not view["has_majority"] or not view["partitions"]:
                return False
            if any(states.get(node.node_id) != "up" for node in nodes):
                return False
            for each in view["partitions"]:
                if each["leader"] not in names or len(names & set(each["in_sync"])) < wanted:
                    return False
        return all(node.readiness() == 200 for node in nodes)

    def wait_healthy(self, without: Collection[str] = (), timeout_s: float = WAIT_S) -> None:
        missing = f" without {', '.join(sorted(without))}" if without else ""
        try:
            until(lambda: self.is_healthy(without), f"healthy{missing}", timeout_s)
        except AssertionError as error:
            error.add_note(f"status: {json.dumps(self.status())[:4000]}")
            raise
