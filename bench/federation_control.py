"""What members say to one another when nothing happens, by the number of topics subscribed."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.connection import Connection
from bench.federation_members import (
    HELLO_S,
    BuiltIn,
    Members,
    MembersFailed,
    wait_until,
)
from holdfast_lab.targets.graph import Layout

TOPICS: Final = (1, 1_000, 10_000)
QUICK_TOPICS: Final = (1, 1_000)
KNOWN_TIMEOUT_S: Final = 120.0
QUIET_S: Final = 4.0
"""Without news of interest, until nothing is under way: above the members' batching."""
BATCH: Final = 500
"""Filters in a SUBSCRIBE."""
COLUMNS: Final = "{:>8} {:>10} {:>10} {:>12} {:>12}  {}"


@dataclass(frozen=True)
class Control:
    topics: int
    known_s: float
    """From the first SUBSCRIBE until all members knew all filters."""
    frames_per_s: float
    """Of all members together."""
    window_s: float
    least_per_s: float
    """One frame in each direction of each link in HELLO_S: what a quiet federation costs."""

    def limit_per_s(self) -> float:
        """A direction may be seen with one frame more than its share of the window."""
        return self.least_per_s * (1 + HELLO_S / self.window_s)

    def is_met(self) -> bool:
        return self.frames_per_s <= self.limit_per_s()


class Subscribers:
    """A client at each member, with more and more filters: all different, shared out evenly."""

    def __init__(self, members: Members) -> None:
        self.clients = [
            Connection(members.port(member), f"bench-control-{member}")
            for member in range(members.layout.members)
        ]
        self.counts = [0] * len(self.clients)

    def subscribe(self, topics: int) -> None:
        """Until there are so many in all."""
        for member, client in enumerate(self.clients):
            numbers = range(member, topics, len(self.clients))[self.counts[member] :]
            filters = [f"control/{number}/value" for number in numbers]
            for first in range(0, len(filters), BATCH):
                client.subscribe_all(filters[first : first + BATCH], 1)
            self.counts[member] += len(filters)

    def close(self) -> None:
        for client in self.clients:
            client.close()


def measure(members: Members, subscribers: Subscribers, topics: int, window_s: float) -> Control:
    """Raises MembersFailed, ConnectionLost."""
    start_s = time.monotonic()
    subscribers.subscribe(topics)
    wait_until(
        lambda: _all_known(members, subscribers.counts), "all filters known", KNOWN_TIMEOUT_S
    )
    known_s = time.monotonic() - start_s
    _await_quiet(members)
    before = members.traffic()
    time.sleep(window_s)
    after = members.traffic()
    if before is None or after is None:
        raise MembersFailed("a member does not tell what it has sent")
    passed_s = after.at_s - before.at_s
    return Control(
        topics,
        known_s,
        (after.control - before.control) / passed_s,
        passed_s,
        2 * len(members.layout.edges) / HELLO_S,
    )


def _all_known(members: Members, counts: list[int]) -> bool:
    found = [members.status(member) for member in range(len(counts))]
    return all(
        each
        and each["interest"]["local"] == count
        and each["interest"]["remote"] == sum(counts) - count
        for each, count in zip(found, counts, strict=True)
    )


def _await_quiet(members: Members) -> None:
    """Until the members' databases have been the same for QUIET_S."""
    last: list[object] = []
    since_s = time.monotonic()

    def is_quiet() -> bool:
        nonlocal last, since_s
        digests = [members.status(number).get("digest") for number in range(members.layout.members)]
        if digests != last or len(set(digests)) != 1:
            last, since_s = digests, time.monotonic()
        return time.monotonic() - since_s >= QUIET_S

    wait_until(is_quiet, "the members' databases stay the same", KNOWN_TIMEOUT_S)


def compare(
    layout: Layout, directory: Path, topics: tuple[int, ...], window_s: float
) -> list[Control]:
    """`topics` ascend. Prints as it goes. Raises MembersFailed, ConnectionLost."""
    print(COLUMNS.format("topics", "known s", "frames/s", "target", "window s", ""))
    found = []
    with BuiltIn(layout, directory) as members:
        subscribers = Subscribers(members)
        try:
            for count in topics:
                found.append(measure(members, subscribers, count, window_s))
                print(_line(found[-1]), flush=True)
        finally:
            subscribers.close()
    print(
        f"Frames of control of all {layout.members} members. Target: {found[0].least_per_s:.0f} a"
        " second, whatever the topics,\nand what the ends of the window may add. Known: from"
        " SUBSCRIBE until all members knew."
    )
    return found


def _line(control: Control) -> str:
    return COLUMNS.format(
        f"{control.topics:,}",
        f"{control.known_s:.1f}",
        f"{control.frames_per_s:.2f}",
        f"<= {control.limit_per_s():.2f}",
        f"{control.window_s:.1f}",
        "pass" if control.is_met() else "MISS",
    )


def as_json(found: list[Control]) -> list[dict[str, object]]:
    return [{**asdict(each), "met": each.is_met()} for each in found]
