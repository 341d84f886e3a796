"""The Publish Queue against QoS 2: 1,000 messages of 26 bytes, five times, on each broker.

    python -m bench.pubqueue [--quick] [--json PATH] [--only VARIANT] [--broker NAME]

The test of the paper on the Publish Queue, which found its queue about twice as fast as QoS 2. The
time is the publisher's, from handing over the first message until the last one is confirmed. A
subscriber with the publisher's QoS receives meanwhile and must get every message, once, in
order. The variants take turns; a ratio is of two runs of the same round. About three minutes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench import brokers, process
from bench.options import new_parser, write_json
from bench.pubqueue_receiver import Receiver, judge
from bench.pubqueue_variants import BASELINE, VARIANTS, Variant

MESSAGES: Final = 1000
ROUNDS: Final = 5
QUICK_ROUNDS: Final = 1
PUBLISHER_TIMEOUT_S: Final = 120.0
ROOT: Final = Path(__file__).parent.parent
PAYLOAD_BYTES: Final = 26
END: Final = 9999
"""As the publisher process has it: the number after which nothing comes."""
WARM_UP: Final = 0
JUDGED: Final = "holdfast"
"""The broker whose ratios have targets: the others show what the library alone brings."""
BROKERS: Final = {
    JUDGED: "Holdfast, fdatasync before every acknowledgement",
    "holdfast-memory": 'Holdfast, durability "memory"',
    "mosquitto": "Mosquitto, no persistence",
}
COLUMNS: Final = "  {:<28} {:>10} {:>10} {:>18}  {:<8} {}"


class RunFailed(Exception):
    """A run gave no figure, or messages did not arrive as they must; the text says which."""


@dataclass(frozen=True)
class Run:
    broker: str
    variant: str
    round: int
    time_s: float
    cpu_s: float
    """Of the publisher's process."""


@dataclass(frozen=True)
class Plan:
    rounds: int
    messages: int
    subscriber_qos: int
    directory: Path
    """Where the data and the queue's file go meanwhile."""
    python: str


@contextmanager
def started(name: str, parent: Path, python: str) -> Iterator[brokers.Broker]:
    if name == "mosquitto":
        broker = brokers.start_mosquitto(parent, nodelay=True)
    else:
        durability = "memory" if name.endswith("memory") else "fsync"
        broker = brokers.start_holdfast(parent, durability, python)
    try:
        yield broker
    finally:
        broker.stop()


def run_once(broker: str, variant: Variant, port: int, round_: int, plan: Plan) -> Run:
    """Raises RunFailed."""
    topic = f"bench/queue/{variant.name}/{round_:02}"
    qos = min(variant.qos, plan.subscriber_qos)
    receiver = Receiver(port, topic, qos, PAYLOAD_BYTES, END)
    with tempfile.TemporaryDirectory(dir=plan.directory) as directory:
        command = [sys.executable, "-m", "bench.pubqueue_clients", variant.name, str(port)]
        done = subprocess.run(
            [*command, topic, str(plan.messages), directory],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PUBLISHER_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        receiver.abandon()
        words = done.stderr.strip().splitlines()
        raise RunFailed(f"{broker}, {variant.name}: {words[-1] if words else 'no message'}")
    fault = judge([number for number in receiver.join() if number != WARM_UP], plan.messages)
    if fault:
        raise RunFailed(f"{broker}, {variant.name}: the subscriber's messages: {fault}")
    figures = json.loads(done.stdout)
    return Run(broker, variant.name, round_, figures["time_s"], figures["cpu_s"])


def ratios(runs: list[Run], broker: str, variant: str) -> list[float]:
    """How many times as fast as the baseline, round by round."""
    times_s = {
        name: {run.round: run.time_s for run in runs if (run.broker, run.variant) == (broker, name)}
        for name in (BASELINE, variant)
    }
    return [
        times_s[BASELINE][round_] / time_s
        for round_, time_s in times_s[variant].items()
        if round_ in times_s[BASELINE]
    ]


def line(runs: list[Run], broker: str, variant: Variant) -> str:
    chosen = [run for run in runs if (run.broker, run.variant) == (broker, variant.name)]
    time_s = statistics.median(run.time_s for run in chosen)
    cpu_s = statistics.median(run.cpu_s for run in chosen)
    against = ratios(runs, broker, variant.name)
    ratio = target = result = ""
    if against:
        median = statistics.median(against)
        ratio = f"{median:.2f} ({min(against):.2f}..{max(against):.2f})"
        if variant.target and broker == JUDGED:
            target = f">= {variant.target:g}"
            result = "pass" if median >= variant.target else "MISS"
    return COLUMNS.format(
        variant.what, f"{time_s * 1e3:.1f}", f"{cpu_s * 1e3:.1f}", ratio, target, result
    ).rstrip()


def run_broker(name: str, chosen: list[Variant], plan: Plan) -> list[Run]:
    """Prints a line for each variant. Raises RunFailed, BrokerFailed."""
    runs = []
    print(f"\n{BROKERS[name]}")
    print(COLUMNS.format("", "ms", "CPU ms", "times QoS 2", "target", ""), flush=True)
    with started(name, plan.directory, plan.python) as broker:
        for round_ in range(plan.rounds):
            for variant in chosen:
                runs.append(run_once(name, variant, broker.port, round_, plan))
    for variant in chosen:
        print(line(runs, name, variant), flush=True)
    return runs


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser("bench.pubqueue", __doc__, "--quick", "--directory", "--python")
    parser.add_argument("--rounds", type=int, help=f"of each variant (default {ROUNDS})")
    parser.add_argument("--messages", type=int, default=MESSAGES, help="at most 9,998")
    parser.add_argument(
        "--subscriber-qos",
        type=int,
        choices=[1, 2],
        default=2,
        help="at most (default 2: the publisher's)",
    )
    parser.add_argument("--broker", action="append", choices=BROKERS, help="may be repeated")
    parser.add_argument(
        "--only",
        action="append",
        choices=[variant.name for variant in VARIANTS],
        help="may be repeated; ratios need the first one",
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.messages < END:
        parser.error(f"--messages {arguments.messages}: allowed is 1 to {END - 1}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    chosen = [each for each in VARIANTS if not arguments.only or each.name in arguments.only]
    names = arguments.broker or list(BROKERS)
    if "mosquitto" in names and brokers.mosquitto_path() is None:
        print("mosquitto is not installed (on Debian: apt install mosquitto): left out")
        names.remove("mosquitto")
    plan = Plan(
        arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS),
        arguments.messages,
        arguments.subscriber_qos,
        arguments.directory,
        arguments.python,
    )
    print(
        f"{plan.messages:,} messages of {PAYLOAD_BYTES} bytes, {plan.rounds} rounds; "
        f"{process.describe_disk(arguments.directory)}"
    )
    runs: list[Run] = []
    failure = None
    try:
        for name in names:
            runs += run_broker(name, chosen, plan)
    except (RunFailed, brokers.BrokerFailed, subprocess.TimeoutExpired) as error:
        failure = error
        print(f"FAILED: {error}")
    write_json(arguments.json, [asdict(run) for run in runs])
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
