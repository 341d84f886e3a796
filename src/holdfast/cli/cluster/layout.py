"""Directory of a local cluster.

It contains `cluster.json`, `cluster.secret`, and per node a data directory and a log file.
`cluster.json` names nodes and ports, so that the cluster can be started again.
"""

import json
import os
import random
import secrets
import socket
from pathlib import Path
from typing import Final

import msgspec

NODES: Final = 3
NODES_MAX: Final = 32
ADMIN_DISTANCE: Final = 100
PEER_DISTANCE: Final = 200
"""The distance from a node's port for clients to its peer port, with a base port."""
BASE_PORT_MAX: Final = 65535 - PEER_DISTANCE - NODES_MAX
FREE_PORTS: Final = range(10_000, 32_000)
"""The ports to choose from.

They are below the range that systems use for outgoing connections, so a restarted node finds its
ports free.
"""
PLAN: Final = "cluster.json"
SECRET: Final = "cluster.secret"


class LayoutError(Exception):
    """The directory cannot be used. The text says why and what to do."""


class LocalNode(msgspec.Struct, frozen=True):
    """One node and its ports for clients, administration and peers."""

    node: str
    port: int
    admin: int
    peer: int

    def ports(self) -> tuple[int, int, int]:
        return self.port, self.admin, self.peer


def plan(directory: Path, count: int | None, base_port: int | None) -> list[LocalNode]:
    """Returns the nodes of the directory, with new ones up to `count`, and saves them.

    Raises `LayoutError` if the arguments contradict the directory, `OSError` if it fails.
    """
    path = directory / PLAN
    nodes = _read(path)
    if nodes and base_port not in (None, nodes[0].port):
        raise LayoutError(f"{directory} has its ports already, see {path}: leave out --base-port")
    if count is not None and count < len(nodes):
        raise LayoutError(
            f"{directory} has a cluster of {len(nodes)} nodes: give --nodes {len(nodes)}, or"
            " another directory"
        )
    taken = {port for node in nodes for port in node.ports()}
    for index in range(len(nodes), count or len(nodes) or NODES):
        if base_port is None:
            ports = [_free_port(taken) for _ in range(3)]
        else:
            first = base_port + index
            ports = [first, first + ADMIN_DISTANCE, first + PEER_DISTANCE]
        nodes.append(LocalNode(f"n{index + 1}", *ports))
    _write(path, json.dumps(msgspec.to_builtins(nodes), indent=1) + "\n", 0o644)
    return nodes


def secret_file(directory: Path) -> Path:
    """Returns the secret's file, which is created if missing. Raises `OSError`."""
    path = directory / SECRET
    if not path.exists():
        _write(path, secrets.token_hex(32) + "\n", 0o600)
    return path


def is_free(port: int) -> bool:
    """Returns whether a port of 127.0.0.1 can be bound now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _read(path: Path) -> list[LocalNode]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[LocalNode])
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        raise LayoutError(f"{path}: {error}: mend it, or take another directory") from None


def _write(path: Path, text: str, mode: int) -> None:
    """Writes the file completely or not at all."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _free_port(taken: set[int]) -> int:
    """Returns a free port and adds it to `taken`. Raises `LayoutError` if there is none."""
    for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
        if port not in taken and is_free(port):
            taken.add(port)
            return port
    raise LayoutError("there are no free ports")
