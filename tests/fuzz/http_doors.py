"""The admin port and the topology manager: HTTP that is none, and wrong requests to every route."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.e2e.brokers import Broker, Holdfast
from tests.e2e.cluster_processes import ClusterProcesses
from tests.fuzz.doors import ONE_NODE, exchange
from tests.fuzz.mutation import NUMBERS, damage, noise
from tests.support.manager_process import ManagerProcess

ADMIN_PATHS: Final = (
    "/healthz", "/readyz", "/metrics", "/cluster", "/cluster/init", "/cluster/rebalance",
    "/cluster/drain", "/cluster/undrain", "/cluster/remove", "/cluster/unsafe-recover",
    "/api/v1/log", "/api/v1/log/0", "/api/v1/log/read", "/api/v1/log/times", "/api/v1/federation",
    "/api/v1/login", "/api/v1/audit", "/api/v1/users/x", "/api/v1/tokens/x", "/api/v1/openapi.json",
)  # fmt: skip
ADMIN_NAMES: Final = (
    "node",
    "offset",
    "bytes",
    "topic",
    "start",
    "end",
    "time",
    "limit",
    "accept_loss",
)
BODIES: Final[tuple[Any, ...]] = (
    {"ranges": [[0, 0, 10]], "bytes": 1000},
    {"ranges": [[0, 0, 1 << 62]], "bytes": 1 << 40, "filters": ["#"], "prefixes": ["a"]},
    {"ip": "tcp://127.0.0.1:1", "name": "x"},
    {"ranges": []}, [], {}, None, "x", 1, [[[[[]]]]],
)  # fmt: skip
DANGEROUS: Final = ("/cluster/remove", "/cluster/unsafe-recover", "/cluster/drain")
"""What a good request of an operator does is no finding."""


def value(rng: random.Random) -> str:
    return rng.choice(
        (
            str(rng.choice(NUMBERS)),
            "-" + str(rng.choice(NUMBERS)),
            "9" * rng.choice((20, 5000)),
            "n9", "", "%00", "%ff", "+", "#", "1e308", "nan", "0x10", "a/b", "%2e%2e/",
            "x" * rng.choice((100, 9000)),
        )
    )  # fmt: skip


def mutated_json(rng: random.Random, found: Any) -> Any:
    """With a value somewhere in it that is another one."""
    if rng.random() < 0.3:
        return rng.choice((*NUMBERS, -1, 1.5, "", "x", None, True, [], {}, [0] * 1000, "é" * 500))
    if isinstance(found, dict) and found:
        name = rng.choice(sorted(found))
        return {**found, name: mutated_json(rng, found[name])}
    if isinstance(found, list) and found:
        at = rng.randrange(len(found))
        return [*found[:at], mutated_json(rng, found[at]), *found[at + 1 :]]
    return found


def request(rng: random.Random, paths: tuple[str, ...], port: int) -> bytes:
    path = rng.choice(paths)
    if rng.random() < 0.3:
        path += rng.choice(("/", "/" + value(rng), "//", "?", "/%2e%2e"))
    if rng.random() < 0.7 and path not in DANGEROUS:
        names = rng.choices(ADMIN_NAMES, k=rng.choice((1, 1, 2, 5)))
        path += "?" + "&".join(f"{name}={value(rng)}" for name in names)
    method = rng.choice(("GET", "GET", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "X"))
    body = b""
    if rng.random() < 0.7:
        body = json.dumps(mutated_json(rng, rng.choice(BODIES))).encode()
    if rng.random() < 0.1:
        body = noise(rng)
    length = len(body) if rng.random() < 0.95 else rng.choice(NUMBERS)
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {rng.choice((f'127.0.0.1:{port}',) * 8 + ('evil.example', ''))}",
        "Connection: close",
        f"Content-Length: {length}",
    ]
    if rng.random() < 0.1:
        lines.append(f"Authorization: {rng.choice(('Bearer ' + value(rng), 'Basic xx', ''))}")
    if rng.random() < 0.05:
        lines.append("Origin: http://evil.example")
    return "\r\n".join([*lines, "", ""]).encode() + body


def answered(data: bytes) -> str:
    """The class of the status. Raises AssertionError: the server failed."""
    status = data[9:12].decode(errors="replace") if data.startswith(b"HTTP/1.1 ") else "none"
    assert status not in ("500", "501", "502"), f"answer {data[:500]!r}"
    return status


class AdminDoor:
    """Of a node of a cluster, so that every route has something behind it."""

    name = "admin"
    paths = ADMIN_PATHS
    expected: Sequence[str] = ()

    def __init__(self) -> None:
        self.processes: list[Broker] = []
        self.canary_port = 0

    def start(self, directory: Path) -> None:
        self.cluster = ClusterProcesses(directory, 1, {"cluster": dict(ONE_NODE)})
        node = self.cluster.nodes["n1"]
        self.processes = [node]
        self.cluster.start()
        self.canary_port, self.port = node.port, node.admin_port

    def case(self, rng: random.Random) -> str:
        data = request(rng, self.paths, self.port)
        if rng.random() < 0.3:
            data = damage(rng, data, [data, b"Transfer-Encoding: chunked\r\n", b"\r\n\r\n"])
        if rng.random() < 0.05:
            data = noise(rng)
        return answered(exchange(self.port, [data]))

    def end(self) -> None:
        self.cluster.end()


class ManagerDoor(AdminDoor):
    name = "manager"
    paths = (
        "/healthz", "/metrics", "/openapi.json", "/api/v1/join", "/api/v1/nodes", "/api/v1/nodes/1",
        "/api/v1/topology", "/api/v1/reports/1", "/api/v1/nodes/1/report", "/api/v1/rules",
        "/api/v1/rebalance", "/api/v1/watch", "/api/v1/tokens", "/api/v1/audit", "/api/v1/health",
    )  # fmt: skip

    def start(self, directory: Path) -> None:
        (directory / "broker").mkdir()
        (directory / "manager").mkdir()
        self.broker = Holdfast(directory / "broker")
        self.manager = ManagerProcess(directory / "manager")
        self.processes = [self.manager, self.broker]
        self.broker.start()
        self.manager.start()
        self.manager.join(self.broker)
        self.canary_port, self.port = self.broker.port, self.manager.port

    def end(self) -> None:
        self.manager.kill()
        self.broker.kill()
