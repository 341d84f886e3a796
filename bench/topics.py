"""How subscribing, matching and retained look-up cost grows from 1,000 to 1,000,000 entries.

    python -m bench.topics [--json PATH] [--sizes 1000,10000]

Every size runs in a process of its own, so the memory figure (growth of the resident set, topic
strings included) is that of the structure alone. About 40 s, most of it the million.
"""

import argparse
import gc
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.options import new_parser, write_json
from holdfast.protocol.topics.retained import RetainedTrie
from holdfast.protocol.topics.trie import SubscriptionTrie

SIZES = [1_000, 10_000, 100_000, 1_000_000]
SAMPLES = 20_000
ROUNDS = 5
PAGE = 100

Figures = dict[str, float]


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def microseconds(call: Callable[[str], object], arguments: list[str]) -> float:
    """The best of some rounds over all arguments, per call."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for argument in arguments:
            call(argument)
        best = min(best, time.perf_counter() - start)
    return round(best / len(arguments) * 1e6, 3)


def topic_of(index: int) -> str:
    return f"site{index % 97:02}/device{index:07}/temperature"


def sample(count: int) -> list[int]:
    generator = random.Random(count)
    return [generator.randrange(count) for _ in range(min(SAMPLES, 4 * count))]


def subscriptions(count: int, filter_of: Callable[[int], str]) -> Figures:
    """One filter per device, one subscriber each; every topic matches exactly one."""
    order = list(range(count))
    random.Random(1).shuffle(order)
    before = resident_bytes()
    trie = SubscriptionTrie()
    start = time.perf_counter()
    for index in order:
        trie.add(filter_of(index), "key", order)
    added = time.perf_counter() - start
    grown = resident_bytes() - before
    drawn = sample(count)
    topics = [topic_of(index) for index in drawn]
    assert all(len(trie.match(topic)) == 1 for topic in topics)
    match_us = microseconds(trie.match, topics)
    filters = [filter_of(index) for index in order[:SAMPLES]]
    start = time.perf_counter()
    for filter in filters:
        trie.remove(filter, "key")
    removed = time.perf_counter() - start
    return {
        "subscribe_us": round(added / count * 1e6, 3),
        "unsubscribe_us": round(removed / len(filters) * 1e6, 3),
        "match_us": match_us,
        "bytes_each": round(grown / count, 1),
    }


def exact(count: int) -> Figures:
    return subscriptions(count, topic_of)


def below(count: int) -> Figures:
    return subscriptions(count, lambda index: topic_of(index).rpartition("/")[0] + "/#")


def plus(count: int) -> Figures:
    return subscriptions(count, lambda index: f"+/device{index:07}/+")


def retained(count: int) -> Figures:
    order = list(range(count))
    random.Random(1).shuffle(order)
    before = resident_bytes()
    trie = RetainedTrie()
    start = time.perf_counter()
    for index in order:
        trie.set(topic_of(index), order)
    added = time.perf_counter() - start
    grown = resident_bytes() - before
    topics = [topic_of(index) for index in sample(count)]
    page: list[float] = []
    scan = trie.scan("#")
    while not scan.done and len(page) < 200:
        start = time.perf_counter()
        found = scan.next(PAGE)
        if found:
            page.append(time.perf_counter() - start)
    devices = [topic.rpartition("/")[0] for topic in topics[:2000]]
    removed = [topic_of(index) for index in order[:SAMPLES]]
    figures = {
        "set_us": round(added / count * 1e6, 3),
        "get_us": microseconds(trie.get, topics),
        "scan_device_us": microseconds(lambda device: trie.scan(device + "/#").next(1), devices),
        "scan_plus_us": microseconds(lambda device: trie.scan(device + "/+").next(PAGE), devices),
        "scan_any_site_us": microseconds(
            lambda device: trie.scan("+" + device[device.index("/") :] + "/#").next(PAGE),
            devices[:200],
        ),
        f"page_of_{PAGE}_us": round(statistics.median(page) * 1e6, 1),
        f"page_of_{PAGE}_worst_us": round(max(page) * 1e6, 1),
        "bytes_each": round(grown / count, 1),
    }
    start = time.perf_counter()
    for topic in removed:
        trie.remove(topic)
    figures["remove_us"] = round((time.perf_counter() - start) / len(removed) * 1e6, 3)
    return figures


CASES: dict[str, tuple[str, Callable[[int], Figures]]] = {
    "exact": ("one exact filter a device", exact),
    "below": ("one filter a device: site/device/#", below),
    "plus": ("one filter a device: +/device/+", plus),
    "retained": ("one retained topic a device", retained),
}


def run_apart(case: str, count: int) -> Figures:
    command = [sys.executable, "-m", "bench.topics", "--case", case, "--sizes", str(count)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: Figures = json.loads(output)
    return figures


def print_curve(title: str, curve: dict[int, Figures]) -> None:
    print(f"\n{title}")
    print(f"  {'':22}" + "".join(f"{count:>12,}" for count in curve))
    for name in next(iter(curve.values())):
        print(f"  {name:22}" + "".join(f"{figures[name]:>12}" for figures in curve.values()))


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.topics", __doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sizes = [int(size) for size in args.sizes.split(",")]
    if args.case:
        print(json.dumps(CASES[args.case][1](sizes[0])))
        return 0
    result: dict[str, dict[int, Figures]] = {}
    for case, (title, _) in CASES.items():
        result[case] = {count: run_apart(case, count) for count in sizes}
        print_curve(title, result[case])
    write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
