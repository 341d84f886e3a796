"""Holdfast as a target: one broker, a pair on one directory, a cluster of three."""

import contextlib
import json
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from holdfast.log.partition import partition_of
from holdfast_lab.targets.target import (
    PROGRAM,
    STOP_S,
    Change,
    Fault,
    Program,
    Target,
    TargetError,
    admin,
    first_line,
    free_port,
    listens,
    wait_until,
)

SIGNALS: Final = {
    Fault.PLANNED: signal.SIGTERM,
    Fault.KILL: signal.SIGKILL,
    Fault.PAUSE: signal.SIGSTOP,
}
NODES: Final = 3
LEASE_CHANGES: Final = {"lease_claimed": "detected", "lease_held": "elected"}
"""Meaning of a node's log lines about the lease for a failover."""


class HoldfastNode(Program):
    """One `holdfast serve`."""

    def __init__(
        self, name: str, directory: Path, data: Path, *options: str,
        program: Sequence[str] = PROGRAM,
    ) -> None:  # fmt: skip
        port = free_port()
        self.admin_port = free_port()
        self.data = data
        command = [*program, "serve", "--node-id", name, "--data", str(data)]
        command += ["--bind", "127.0.0.1", "-p", str(port)]
        command += ["--admin", f"127.0.0.1:{self.admin_port}", *options]
        super().__init__(name, command, directory, port)

    @property
    def server(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self.port}"

    def role(self) -> str:
        """The role of a node of a pair: "holder" when it serves, "standby" when it follows."""
        state = admin(self.admin_port, "/readyz") if self.is_running() else {}
        match state.get("role"):
            case "holder" if state.get("ready"):
                return "holder"
            case "standby" if state.get("loaded"):
                return "standby"
        return ""


class _Holdfast(Target):
    """Base of the three forms: nodes, one of which is hurt at a time."""

    faults = (Fault.PLANNED, Fault.KILL, Fault.PAUSE)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nodes: list[HoldfastNode] = []
        self._hurt: HoldfastNode | None = None
        self._is_paused = False

    @property
    def servers(self) -> list[str]:
        """Returns the addresses for clients."""
        return [node.server for node in self.nodes]

    def pids(self) -> list[int]:
        """Returns the processes that are measured."""
        return [node.pid for node in self.nodes if node.is_running()]

    def version(self) -> str:
        """Returns the program and its version."""
        return first_line([*PROGRAM, "--version"])

    def stop(self) -> None:
        """Stops it and removes its files."""
        for node in self.nodes:
            node.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def inject(self, fault: Fault, topic: str) -> str:
        """Injects a fault into the node that serves the topic. Returns its name."""
        self._hurt = node = self._serving(topic)
        self._is_paused = fault is Fault.PAUSE
        self._end(node, fault)
        return node.name

    def _serving(self, topic: str) -> HoldfastNode:
        return self.nodes[0]

    def _end(self, node: HoldfastNode, fault: Fault) -> None:
        node.signal(SIGNALS[fault])

    def heal(self) -> None:
        """Makes it complete again."""
        node, self._hurt = self._hurt, None
        if node is None:
            return
        node.signal(signal.SIGCONT)
        self._let_end(node)
        if not node.is_running():
            node.start()
        self._wait_complete()

    def _let_end(self, node: HoldfastNode) -> None:
        """Waits for the end of a node that is about to end."""

    def _wait_complete(self) -> None:
        raise NotImplementedError


class SingleTarget(_Holdfast):
    """One broker with fdatasync before every acknowledgement."""

    name = "holdfast"
    title = "Holdfast, one broker"
    promise = "on disk, after fdatasync"

    def start(self) -> None:
        """Starts it and waits until it serves. Raises `TargetError`."""
        self.nodes = [HoldfastNode("one", self.directory, self.directory / "data")]
        self.nodes[0].start()
        self._wait_complete()

    def _end(self, node: HoldfastNode, fault: Fault) -> None:
        super()._end(node, fault)
        if fault is not Fault.PAUSE:
            node.wait(10.0)

    def _wait_complete(self) -> None:
        wait_until(lambda: listens(self.nodes[0].port), self.nodes, "the broker listens")


class PairTarget(_Holdfast):
    """Two nodes on one data directory."""

    name = "pair"
    title = "Holdfast, a pair on one directory"
    promise = "on the shared disk, after fdatasync"
    survives_faults = True

    def __init__(
        self, directory: Path, *, program: Sequence[str] = PROGRAM, data: Path | None = None
    ) -> None:
        """`data` is a directory that stays; without it there is a new one."""
        super().__init__(directory)
        self.data = data or directory / "data"
        self.program = program

    def start(self) -> None:
        """Starts it and waits until it serves. Raises `TargetError`."""
        file = self.directory / "pair.toml"
        # The log of this form has milliseconds.
        file.write_text('[logging]\nformat = "json"\n')
        self.nodes = [
            HoldfastNode(
                name, self.directory, self.data, "--standby", "-c", str(file), program=self.program
            )
            for name in ("one", "two")
        ]
        self.nodes[0].start()
        wait_until(lambda: self.nodes[0].role() == "holder", self.nodes, "a node holds the lease")
        self.nodes[1].start()
        self._wait_complete()

    def stop(self) -> None:
        """Stops it and removes its files. The standby ends first, or else it would take over."""
        self.nodes.sort(key=lambda node: node.role() == "holder")
        super().stop()

    def _serving(self, topic: str) -> HoldfastNode:
        wait_until(
            lambda: any(node.role() == "holder" for node in self.nodes), self.nodes, "a holder"
        )
        return next(node for node in self.nodes if node.role() == "holder")

    def _end(self, node: HoldfastNode, fault: Fault) -> None:
        if fault is not Fault.PLANNED:
            super()._end(node, fault)
            return
        command = [*self.program, "cluster", "handover", "--data", str(node.data)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TargetError(f"cluster handover: {done.stderr.strip()}")

    def changes(self, since_s: float) -> list[Change]:
        """The changes of the lease, from the logs of the nodes."""
        found: list[Change] = []
        for node in self.nodes:
            for line in node.log_lines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    fields = json.loads(line)
                    what = LEASE_CHANGES[fields["event"]]
                    at_s = datetime.fromisoformat(fields["time"]).timestamp()
                    reason = str(fields["reason"])
                    if at_s >= since_s:
                        found.append(Change(at_s, what, f"node {node.name}: {reason}"))
        return found

    def _let_end(self, node: HoldfastNode) -> None:
        # The new holder ends a paused one, or that one finds that its lease is over.
        wait_until(
            lambda: not node.is_running() or node.role() == "standby", self.nodes, "one holder"
        )

    def _wait_complete(self) -> None:
        wait_until(
            lambda: sorted(node.role() for node in self.nodes) == ["holder", "standby"],
            self.nodes,
            "a holder and a standby",
        )


def _changes_of(step: Any) -> list[Change]:
    """The changes of one step of a cluster's timeline."""
    at_s = step["at_us"] / 1e6
    found = [
        Change(at_s, "detected", f"{each['node']} is {each['after']}")
        for each in step["nodes"]
        if each["before"] == "up"
    ]
    moved = [
        each for each in step["partitions"]
        if each["leader_before"] and each["leader_after"] not in ("", each["leader_before"])
    ]  # fmt: skip
    if moved:
        names = ", ".join(sorted({each["leader_after"] for each in moved}))
        found.append(Change(at_s, "elected", f"{names} leads {len(moved)} partitions"))
    return found


class ClusterTarget(_Holdfast):
    """Three nodes with a disk each, and three replicas of each partition."""

    name = "cluster"
    title = "Holdfast, a cluster of three"
    promise = "on every in-sync disk, two at least, after fdatasync"
    survives_faults = True

    def start(self) -> None:
        """Starts it and waits until it serves. Raises `TargetError`."""
        secret = self.directory / "secret"
        secret.write_text(f"{secrets.token_hex(32)}\n")
        secret.chmod(0o600)
        peers = [f"127.0.0.1:{free_port()}" for _ in range(NODES)]
        self.nodes = [
            HoldfastNode(
                f"n{number}",
                self.directory,
                self.directory / f"n{number}",
                *["--peer-bind", peer, "--cluster-secret-file", str(secret)],
                *["--join", ",".join(peers)],
            )
            for number, peer in enumerate(peers, 1)
        ]
        for node in self.nodes:
            node.start()
        wait_until(
            lambda: all(admin(node.admin_port, "/cluster") for node in self.nodes),
            self.nodes,
            "the nodes answer",
        )
        done = admin(self.nodes[0].admin_port, "/cluster/init", "POST")
        if "error" in done:
            raise TargetError(f"cluster init: {done['error']}")
        self._wait_complete()

    def _serving(self, topic: str) -> HoldfastNode:
        """The leader of the topic's partition."""
        partitions = self._state().get("partitions", [])
        if partitions:
            leader = partitions[partition_of(topic.encode(), len(partitions))]["leader"]
            for node in self.nodes:
                if node.name == leader:
                    return node
        raise TargetError(f"no leader of the partition of {topic}")

    def changes(self, since_s: float) -> list[Change]:
        """The changes of the metadata, from the timeline of a node that replies."""
        found: list[Change] = []
        for node in self.nodes:
            if steps := admin(
                node.admin_port, f"/api/v1/timeline?since_us={int(since_s * 1e6)}"
            ).get("steps"):
                for step in steps:
                    found += _changes_of(step)
                break
        return found

    def _state(self) -> Any:
        for node in self.nodes:
            state = admin(node.admin_port, "/cluster")
            if state:
                return state
        return {}

    def _let_end(self, node: HoldfastNode) -> None:
        # A node that was ended is waited for; a paused one runs on.
        if not self._is_paused:
            node.wait(STOP_S)

    def _wait_complete(self) -> None:
        wait_until(self._is_healthy, self.nodes, "all replicas in sync")

    def _is_healthy(self) -> bool:
        state = self._state()
        return (
            bool(state.get("initialised"))
            and all(each["state"] == "up" and each["connected"] for each in state["nodes"])
            and all(
                len(each["in_sync"]) == NODES and not each["adding"] for each in state["partitions"]
            )
        )
