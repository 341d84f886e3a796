"""How long a pair of nodes on one data directory is without service when its holder ends, and
what is lost.

    python -m bench.failover [--quick] [--json PATH] [--library NAME] [--rounds FAULT=COUNT]

A publisher sends QoS 1 messages all the time. Downtime is the longest time without a confirmation
from the fault to the end of its round. A durable subscriber receives everything meanwhile: no
confirmed message may be missing, none may overtake another, and with the Publish Queue the log
must not hold one twice. Then the test of packet loss: 50 messages, one a second, kill -9 after
the 24th. In full about 12 minutes.
"""

import argparse
import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench import brokers, packet_loss, process
from bench.failover_clients import LIBRARIES
from bench.failover_run import ClientFailed, Plan, Round, Traffic, play, schedule
from bench.failover_sending import TOPIC, sequence_of
from bench.ledger import Findings, StoredFindings, median_and_worst
from bench.options import add_faults, new_parser, write_json
from bench.pair import Fault, Pair

COUNTS: Final = {Fault.HANDOVER: 5, Fault.TERMINATE: 5, Fault.KILL: 20, Fault.STOP: 20}
QUICK_COUNTS: Final = dict.fromkeys(Fault, 1)
QUICK_LIBRARIES: Final = ("holdfast", "queue")
TARGETS_S: Final[dict[str, tuple[float | None, float]]] = {
    "holdfast": (0.6, 1.0),
    "queue": (0.6, 1.0),
    "paho": (None, 1.5),
}
"""Median and worst downtime, over all faults."""
COLUMNS: Final = "{:<10} {:<10} {:>6} {:>10} {:>10} {:>16}  {:<22} {}"
DUMP_TIMEOUT_S: Final = 300.0


@dataclass
class Campaign:
    """All rounds of one client library."""

    library: str
    rounds: list[Round]
    findings: Findings
    stored: StoredFindings

    def violations(self) -> list[str]:
        """paho sends new messages before those it repeats, when they are published between
        CONNECT and CONNACK; so of its messages only the order in the log is asked for."""
        exactly_once = self.library == "queue"
        found = self.findings.violations(
            exactly_once=exactly_once, sent_in_order=self.library != "paho"
        )
        if self.stored.unstored:
            found.append(f"{self.stored.unstored:,} confirmed and not in the log")
        if self.stored.out_of_order:
            found.append(f"{self.stored.out_of_order:,} delivered in another order than the log's")
        if exactly_once and self.stored.stored_twice:
            found.append(f"{self.stored.stored_twice:,} stored twice")
        return found

    def downtimes_s(self, fault: Fault | None = None) -> list[float | None]:
        return [each.downtime_s for each in self.rounds if fault in (None, each.fault)]

    def is_met(self) -> bool:
        median_s, worst_s = median_and_worst(self.downtimes_s())
        median_target_s, worst_target_s = TARGETS_S[self.library]
        return worst_s < worst_target_s and (median_target_s is None or median_s < median_target_s)


def run_campaign(
    library: str, counts: dict[Fault, int], parent: Path, python: str, paho_delay_s: float
) -> Campaign:
    """Raises ClientFailed, BrokerFailed."""
    rng = random.Random(library)
    plan = Plan(library, paho_delay_s=paho_delay_s)
    with Pair(parent, python=python) as pair:
        with Traffic(plan, pair.servers, pair.directory) as traffic:
            rounds = [play(pair, traffic, fault, rng) for fault in schedule(counts, rng)]
            findings = traffic.finish()
            # The directory of a node that runs may lack the last second. The standby ends first.
            for node in sorted(pair.nodes, key=lambda node: node.role() == "holder"):
                node.stop()
            stored = traffic.compare_with(sequences_in(pair.data, python))
        return Campaign(library, rounds, findings, stored)


def sequences_in(data: Path, python: str) -> list[int]:
    """Of the messages that the log holds, in its order. They are of one topic, so of one
    partition, whose records `log dump` shows oldest first."""
    command = [python, "-m", "holdfast.cli.main", "log", "dump", str(data), "--json"]
    command += ["--topic", TOPIC, "--kind", "message", "--full"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise brokers.BrokerFailed(f"log dump: {done.stderr.strip()}")
    records = (json.loads(line) for line in done.stdout.splitlines())
    return [sequence_of(record["payload"].encode()) for record in records]


def print_campaign(campaign: Campaign) -> None:
    for fault in Fault:
        if campaign.downtimes_s(fault):
            print(_line(campaign, fault))
    print(_line(campaign, None))
    findings = campaign.findings
    print(
        f"{'':<10} {findings.sent:,} sent, {findings.confirmed:,} confirmed, {findings.lost:,} "
        f"lost, {findings.reordered:,} reordered, {findings.redelivered:,} delivered again with "
        f"DUP, {findings.duplicates:,} without, {campaign.stored.stored_twice:,} stored twice"
    )
    for violation in campaign.violations():
        print(f"{'':<10} BROKEN PROMISE: {violation}")
    sys.stdout.flush()


def _line(campaign: Campaign, fault: Fault | None) -> str:
    chosen = [each for each in campaign.rounds if fault in (None, each.fault)]
    median_s, worst_s = median_and_worst([each.downtime_s for each in chosen])
    ready_median_s, _ = median_and_worst([each.ready_s for each in chosen])
    target = result = ""
    if fault is None:
        median_target_s, worst_target_s = TARGETS_S[campaign.library]
        targets = [] if median_target_s is None else [f"median < {median_target_s:g}"]
        target = ", ".join([*targets, f"worst < {worst_target_s:g}"])
        result = "pass" if campaign.is_met() else "MISS"
    return COLUMNS.format(
        campaign.library,
        fault or "all",
        len(chosen),
        f"{median_s:.3f}",
        f"{worst_s:.3f}",
        f"{ready_median_s:.3f}",
        target,
        result,
    ).rstrip()


def as_json(campaign: Campaign) -> dict[str, object]:
    return {
        **asdict(campaign),
        "violations": campaign.violations(),
        "target_s": TARGETS_S[campaign.library],
        "met": campaign.is_met(),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser("bench.failover", __doc__, "--quick", "--directory", "--python")
    parser.add_argument("--library", action="append", choices=LIBRARIES, help="may be repeated")
    add_faults(parser, "--rounds", Fault)
    parser.add_argument("--skip-loss", action="store_true", help="without the test of packet loss")
    parser.add_argument(
        "--paho-delay-s",
        type=float,
        default=0.05,
        help="what paho's reconnect_delay_set is given (default 0.05)",
    )
    arguments = parser.parse_args(argv)
    arguments.counts = dict(arguments.rounds or (QUICK_COUNTS if arguments.quick else COUNTS))
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    libraries = arguments.library or (QUICK_LIBRARIES if arguments.quick else tuple(LIBRARIES))
    print(process.describe_disk(arguments.directory) + "\n")
    print(
        COLUMNS.format(
            "client", "fault", "rounds", "median s", "worst s", "other ready s", "target s", ""
        )
    )
    campaigns: list[Campaign] = []
    losses: list[packet_loss.Loss] = []
    failure = None
    try:
        for library in libraries:
            campaigns.append(
                run_campaign(
                    library,
                    arguments.counts,
                    arguments.directory,
                    arguments.python,
                    arguments.paho_delay_s,
                )
            )
            print_campaign(campaigns[-1])
        if not arguments.skip_loss:
            losses = packet_loss.run(
                libraries, arguments.quick, arguments.directory, arguments.python
            )
    except (ClientFailed, brokers.BrokerFailed) as error:
        failure = error
        print(f"FAILED: {error}")
    figures = {
        "campaigns": [as_json(each) for each in campaigns],
        "packet_loss": [asdict(each) for each in losses],
    }
    write_json(arguments.json, figures)
    broken = any(each.violations() for each in campaigns)
    broken = broken or any(loss.is_broken_promise() for loss in losses)
    return 1 if broken or failure else 0


if __name__ == "__main__":
    sys.exit(main())
