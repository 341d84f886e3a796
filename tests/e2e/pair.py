"""Nodes that share a data directory, as processes under test."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.brokers import Holdfast

WAIT_S = 30.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.02)


class Node(Holdfast):
    """One of several on `data`. It is ready when it serves, or stands by with everything loaded."""

    def __init__(
        self,
        directory: Path,
        node_id: str,
        data: Path,
        settings: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        tables = {name: dict(table) for name, table in (settings or {}).items()}
        tables["node"] = {"id": node_id, "standby": True, **tables.get("node", {})}
        super().__init__(directory, tables, data)
        self.node_id = node_id

    def ready(self) -> bool:
        state = self.state()
        return bool(state.get("ready") or (state.get("role") == "standby" and state.get("loaded")))

    def state(self) -> dict[str, Any]:
        """What /readyz says; empty while nothing answers."""
        try:
            status, body = self.admin("/readyz")
        except OSError:
            return {}
        found: dict[str, Any] = json.loads(body)
        assert (status == 200) == found["ready"]
        return found

    def serves(self) -> bool:
        return bool(self.state().get("ready"))

    def stands_by(self) -> bool:
        return self.ready() and not self.serves()

    def newest_epoch_folder(self) -> Path:
        return max((self.data / "epochs").iterdir())


@contextmanager
def pair(
    directory: Path,
    settings: dict[str, dict[str, Any]] | None = None,
    data: Path | None = None,
    names: str = "ab",
) -> Iterator[list[Node]]:
    """Started one after the other: the first holds the lease, the others stand by."""
    data = data or directory / "data"
    nodes = [Node(directory / name, name, data, settings) for name in names]
    try:
        for node in nodes:
            node.start()
            if node is nodes[0]:
                wait_until(node.serves, f"{node.node_id} serves")
        yield nodes
    except AssertionError as error:
        # Why they did not do what was awaited stands in their logs.
        for node in nodes:
            error.add_note(f"log of {node.node_id}:\n{node.log_text()[-4000:]}")
        raise
    finally:
        for node in nodes:
            node.kill()
    for node in nodes:
        assert "Traceback" not in node.log_text(), node.log_text()[-6000:]
