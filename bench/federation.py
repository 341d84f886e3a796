"""What a federation costs, how quick it is, and how long it is cut when it is hurt: the published
experiments and more.

    python -m bench.federation [--quick] [--only latency] [--json PATH]
    python -m bench.federation --only latency --variant bridges --variant builtin --rounds 10

latency: the paper's run on a LAN: 12 members, one publisher, subscribers at one and three links'
distance; the published protocol, our federation built into the broker and beside Mosquittos, and a
tree of Mosquitto bridges, in turn. control: what members say to one another by the number of topics
subscribed. faults: links and members that die under load. In full about 35 minutes. The published
run in the cloud is `holdfast lab run repair`.

Exit code 1: a promise was broken (something acknowledged was lost, repeated at QoS 2, or came out
of order) or a part failed. A missed target is told and does not count.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench import federation_control, federation_faults, federation_latency
from bench import process as process_accounts
from bench.connection import ConnectionLost
from bench.failover_run import ClientFailed
from bench.federation_faults import Fault
from bench.federation_members import VARIANTS, MembersFailed, missing
from bench.options import add_faults, new_parser, write_json
from holdfast_lab.targets.graph import LAN, Layout, layout_of

QUALITIES: Final = (0, 1, 2)
MESSAGES: Final = 1_000
QUICK_MESSAGES: Final = 200
ROUNDS: Final = 5
QUICK_VARIANTS: Final = ("bridges", "builtin", "sidecar", "paper")
COUNTS: Final = dict.fromkeys(Fault, 10)
QUICK_COUNTS: Final = dict.fromkeys(Fault, 1)
WINDOW_S: Final = 40.0
QUICK_WINDOW_S: Final = 10.0
SEED: Final = 1

Result = tuple[object, bool]
"""Figures for --json, and whether every promise was kept."""


def run_latency(arguments: argparse.Namespace, directory: Path) -> Result:
    variants = []
    for name in arguments.variant or (QUICK_VARIANTS if arguments.quick else tuple(VARIANTS)):
        if reason := missing(name):
            print(f"{name} is left out: {reason}")
        else:
            variants.append(name)
    plan = federation_latency.Plan(
        arguments.layout,
        variants,
        arguments.qos or ((1,) if arguments.quick else QUALITIES),
        arguments.messages or (QUICK_MESSAGES if arguments.quick else MESSAGES),
        arguments.rounds or (1 if arguments.quick else ROUNDS),
        directory,
    )
    found = federation_latency.compare(plan)
    federation_latency.print_found(found)
    return found.as_json(), not found.violations()


def run_control(arguments: argparse.Namespace, directory: Path) -> Result:
    topics = federation_control.QUICK_TOPICS if arguments.quick else federation_control.TOPICS
    window_s = QUICK_WINDOW_S if arguments.quick else WINDOW_S
    found = federation_control.compare(arguments.layout, directory, topics, window_s)
    return federation_control.as_json(found), True


def run_faults(arguments: argparse.Namespace, directory: Path) -> Result:
    campaign = federation_faults.run(arguments.layout, directory, arguments.counts, SEED)
    federation_faults.print_campaign(campaign, federation_faults.TARGETS_S)
    return campaign.as_json(), not campaign.violations()


PARTS: Final[dict[str, Callable[[argparse.Namespace, Path], Result]]] = {
    "latency": run_latency,
    "control": run_control,
    "faults": run_faults,
}


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number above 0")
    return int(text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser("bench.federation", __doc__, "--quick", "--directory")
    parser.add_argument("--only", action="append", choices=PARTS, help="may be repeated")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="of latency")
    parser.add_argument("--qos", action="append", type=int, choices=QUALITIES, help="of latency")
    parser.add_argument("--messages", type=_positive, metavar="N", help="of each load of latency")
    parser.add_argument("--rounds", type=_positive, metavar="N", help="of latency")
    add_faults(parser, "--faults", Fault)
    parser.add_argument(
        "--graph", metavar="LINKS", help="instead of the paper's 12 members, as '0-1 1-2'"
    )
    parser.add_argument("--publisher", type=int, metavar="N", help="with --graph: at this member")
    parser.add_argument(
        "--subscriber", type=int, action="append", metavar="N", help="with --graph; the last is far"
    )
    arguments = parser.parse_args(argv)
    arguments.counts = dict(arguments.faults or (QUICK_COUNTS if arguments.quick else COUNTS))
    try:
        arguments.layout = _layout(arguments)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _layout(arguments: argparse.Namespace) -> Layout:
    """Raises ValueError."""
    own = (arguments.graph, arguments.publisher, arguments.subscriber)
    if not any(each is not None for each in own):
        return LAN
    if any(each is None for each in own):
        raise ValueError("--graph, --publisher and --subscriber go together")
    return layout_of(arguments.graph, arguments.publisher, arguments.subscriber)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    print(
        f"{process_accounts.cpu_model()}, {len(process_accounts.usable_cores())} cores, Linux "
        f"{platform.release()}, Python {platform.python_version()}\n"
        f"{process_accounts.describe_disk(arguments.directory)}"
    )
    figures: dict[str, object] = {}
    is_well = True
    for name in arguments.only or PARTS:
        print(f"\n{name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="federation-", dir=arguments.directory) as place:
            try:
                figures[name], is_kept = PARTS[name](arguments, Path(place))
            except (
                AssertionError,
                ClientFailed,
                ConnectionLost,
                MembersFailed,
                OSError,
                RuntimeError,
            ) as error:
                print(f"FAILED: {error}")
                is_kept = False
        is_well = is_well and is_kept
        sys.stdout.flush()
    write_json(arguments.json, figures)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
