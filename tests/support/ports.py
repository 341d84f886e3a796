"""TCP ports for what a test starts, stops and starts again."""

import itertools
import os
import random
import socket
from collections.abc import Iterator

FIRST = 10_000
LAST = 32_000
"""Below what systems take for outgoing connections (32,768 and up on Linux): else one of those
may hold a broker's port in the moment between its end and its next start."""
WORKERS = 8


def _candidates() -> Iterator[int]:
    """The share of this test worker, from a random place on: so what runs at the same time does
    not meet."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS
    share = (LAST - FIRST) // WORKERS
    start = random.Random(os.getpid()).randrange(share)
    return (FIRST + worker * share + at % share for at in itertools.count(start))


_ports = _candidates()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has, and that this process gives to nobody else for long."""
    for port in itertools.islice(_ports, LAST - FIRST):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port")


def free_ports(count: int) -> int:
    """The first of `count` ports in a row, each like that of `free_port`."""
    found = [free_port()]
    while len(found) < count:
        following = free_port()
        found = [*found, following] if following == found[-1] + 1 else [following]
    return found[0]
