"""What every door has: processes behind it, and cases."""

import random
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from tests.e2e.brokers import Broker

CLOSE_S: Final = 15.0
"""A process that neither answers nor closes by then hangs."""


ONE_NODE: Final[dict[str, Any]] = {"partitions": 4, "replication_factor": 1, "min_insync": 1}
"""Settings of a cluster that one node can be."""


class Door(Protocol):
    """One port of one process. `processes` are looked at after the cases; `canary_port` is the MQTT
    port of the one that is fuzzed, 0 where it has none."""

    name: str
    processes: list[Broker]
    canary_port: int
    expected: Sequence[str]
    """Texts of log lines that are no fault, whatever their level."""

    def start(self, directory: Path) -> None: ...

    def case(self, rng: random.Random) -> str:
        """One case; what came of it, for the statistics. Raises AssertionError."""

    def end(self) -> None: ...


def exchange(port: int, pieces: list[bytes], *, half_close: bool = True) -> bytes:
    """Send, and read until the other side closes. Raises AssertionError if it does not."""
    received = bytearray()
    try:
        with socket.create_connection(("127.0.0.1", port), CLOSE_S) as connection:
            for piece in pieces:
                connection.sendall(piece)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 16):
                received += data
                if len(received) > 64 << 20:
                    break
    except TimeoutError:
        raise AssertionError("neither an answer nor an end") from None
    except ConnectionRefusedError:
        raise AssertionError("nobody listens any more") from None
    except OSError:
        # Closed while something was on its way.
        pass
    return bytes(received)


@contextmanager
def started(door: Door, directory: Path) -> Iterator[Door]:
    directory.mkdir(parents=True, exist_ok=True)
    try:
        door.start(directory)
        yield door
    finally:
        door.end()


def count(outcomes: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in outcomes.most_common())
