"""`python -m tests.fuzz --seconds 60`: fuzz every door, one after the other."""

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.e2e.brokers import Broker, Holdfast
from tests.fuzz.canary import Canary
from tests.fuzz.doors import Door, count, started
from tests.fuzz.http_doors import AdminDoor, ManagerDoor
from tests.fuzz.mqtt_doors import MqttDoor, WebSocketDoor
from tests.fuzz.peer_doors import FederationDoor, PeersDoor
from tests.fuzz.proxy_door import ProxyDoor
from tests.fuzz.tls_door import TlsDoor
from tests.fuzz.topic_door import TopicDoor

DOORS: Final[dict[str, type[Door]]] = {
    door.name: door
    for door in (
        MqttDoor,
        WebSocketDoor,
        TlsDoor,
        ProxyDoor,
        AdminDoor,
        PeersDoor,
        FederationDoor,
        ManagerDoor,
        TopicDoor,
    )
}
GROWTH_BYTES: Final = 300 << 20
"""A process may grow by so much while it is fuzzed: more is memory that strangers keep."""
FORBIDDEN: Final = ("Traceback", "CRITICAL", "client_failed")


def fuzz(door: Door, seconds: float, seed: int, directory: Path) -> bool:
    """Prints what came of it; False: something that must not happen."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    with started(door, directory):
        before = {process: process.rss_bytes() for process in door.processes}
        deadline = time.monotonic() + seconds
        process = door.processes[0].process
        assert process is not None
        with Canary(door.canary_port, process.pid) as canary:
            while time.monotonic() < deadline and not problems and not canary.failure:
                try:
                    outcomes[door.case(rng)] += 1
                except Exception as error:  # noqa: BLE001 - whatever it is, it must not happen
                    if not isinstance(error, AssertionError):
                        traceback.print_exc()
                    problems.append(f"case {outcomes.total()}: {error}")
        problems += [
            text for process in door.processes for text in wrong_with(process, door.expected)
        ]
        grown = max(growth(process, before[process]) for process in door.processes)
        if grown > GROWTH_BYTES:
            problems.append(f"memory grew by {grown >> 20} MiB")
        if canary.failure:
            problems.append(f"the canary: {canary.failure}")
    print(
        f"{door.name}: seed {seed}, {outcomes.total()} cases in {seconds:g} s ({count(outcomes)});"
        f" canary {len(canary.delays_s)} messages, median {canary.median_s() * 1000:.1f} ms, worst"
        f" {canary.worst_s() * 1000:.0f} ms, without its waits for a processor"
        f" {canary.worst_own_s() * 1000:.0f} ms; memory +{grown >> 20} MiB",
        flush=True,
    )
    for problem in problems:
        print(f"{door.name}: WRONG: {problem}", flush=True)
    return not problems


def growth(process: Broker, before_bytes: int) -> int:
    """0 of one that has ended."""
    has_ended = process.process is None or process.process.poll() is not None
    return 0 if has_ended else process.rss_bytes() - before_bytes


def wrong_with(process: Broker, expected: Sequence[str]) -> list[str]:
    """What must not be, of a process that was fuzzed."""
    assert process.process is not None
    code = process.process.poll()
    lines = process.log_text().splitlines(keepends=True)
    log = "".join(line for line in lines if not any(text in line for text in expected))
    if code is not None:
        return [f"the process has ended with {code}:\n{log[-3000:]}"]
    problems = [
        f"{word} in the log:\n{log[max(0, log.index(word) - 500) :][:3000]}"
        for word in FORBIDDEN
        if word in log
    ]
    if isinstance(process, Holdfast):
        try:
            internal_errors = process.metric("internal_errors_total")
        except OSError as error:
            return [
                *problems,
                f"the process is about to end: {error}:\n{process.log_text()[-3000:]}",
            ]
        if internal_errors:
            problems.append(f"holdfast_internal_errors_total is {internal_errors:g}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each door")
    parser.add_argument("--doors", default=",".join(DOORS), help="default: all")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    options = parser.parse_args()
    names = options.doors.split(",")
    unknown = [name for name in names if name not in DOORS]
    if unknown:
        parser.error(f"no door {', '.join(unknown)}: there are {', '.join(DOORS)}")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as directory:
        well = [
            fuzz(DOORS[name](), options.seconds, seed, Path(directory) / name) for name in names
        ]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
