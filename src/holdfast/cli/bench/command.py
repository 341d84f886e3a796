"""`holdfast bench`: a load at a fixed rate for any MQTT broker, and its latencies.

Exit codes: 0 every message arrived; 1 messages are missing, or the load could not be made; 2 wrong
usage; 3 the generator itself was the bottleneck, so the figures are not the broker's.
"""

import argparse
import asyncio
import json
import secrets
import ssl
import sys
from pathlib import Path
from typing import Final

from holdfast.cli.bench.load import STAMP, Latencies, Load, LoadError, LoadPlan, Outcomes
from holdfast.cli.text import table

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_BOTTLENECK: Final = 3
CLIENTS_MAX: Final = 10_000
BUSY_MAX: Final = 0.85
"""The share of a core above which the generator is the bottleneck."""
LATE_US_MAX: Final = 10_000
"""The p99 of the generator's own delay, in microseconds, above which it is the bottleneck."""
QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "bench",
        help="load any MQTT broker at a fixed rate, and measure latencies",
        description="Publish at a fixed rate to any MQTT broker and measure latencies. Each message"
        " is due at a fixed time, and its latency counts from that time, so a broker that stalls"
        " cannot hide it.",
        epilog="exit codes: 0 every message arrived; 1 messages are missing; 2 wrong usage; 3 the"
        " generator itself was the bottleneck",
    )
    parser.add_argument(
        "server",
        nargs="?",
        default="127.0.0.1:1883",
        metavar="SERVER",
        help="HOST[:PORT], or a URL: mqtt, mqtts, ws, wss (default 127.0.0.1:1883)",
    )
    parser.add_argument("-n", "--publishers", type=int, default=10, metavar="N", help="(10)")
    parser.add_argument("-s", "--subscribers", type=int, default=10, metavar="N", help="(10)")
    parser.add_argument(
        "--all", action="store_true", help="each subscriber receives all messages, not its share"
    )
    parser.add_argument("-q", "--qos", type=int, choices=(0, 1, 2), default=1, help="(1)")
    parser.add_argument(
        "-r", "--rate", type=float, default=1000.0, metavar="R", help="messages a second (1000)"
    )
    parser.add_argument("--size", type=int, default=100, metavar="BYTES", help="of payload (100)")
    parser.add_argument("-d", "--duration", type=float, default=10.0, metavar="S", help="(10)")
    parser.add_argument(
        "--warm-up", type=float, default=2.0, metavar="S", help="seconds before it measures (2)"
    )
    parser.add_argument("--level", type=int, choices=(3, 4, 5), default=5, help="protocol (5)")
    parser.add_argument("-u", "--username", metavar="NAME")
    parser.add_argument("--password-file", type=Path, metavar="FILE", help="its first line")
    parser.add_argument("--ca-file", metavar="FILE", help="CA certificates, for TLS")
    parser.add_argument("--topic", default="", metavar="PREFIX", help="of topics and client ids")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from holdfast.io.event_loop.descriptors import raise_limit
    from holdfast.io.event_loop.loop import new_event_loop

    problem = _problem(args)
    if problem:
        print(f"holdfast: {problem}", file=sys.stderr)
        return EXIT_USAGE
    plan = LoadPlan(
        args.publishers,
        args.subscribers,
        args.qos,
        args.rate,
        args.size,
        args.duration,
        args.warm_up,
        args.all,
        args.topic or f"bench-{secrets.token_hex(4)}",
    )
    raise_limit()
    try:
        # On Ctrl-C the runner cancels the load, whose clients then disconnect.
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            outcomes = runner.run(_new_load(plan, args).run())
    except (LoadError, OSError, ValueError) as error:
        print(f"holdfast: bench: {args.server}: {error}", file=sys.stderr)
        return EXIT_FAILED
    causes = bottlenecks(plan, outcomes)
    if args.json:
        print(json.dumps(_figures(plan, outcomes, causes)))
    else:
        print("\n".join(_report(plan, outcomes, causes)))
    if causes:
        return EXIT_BOTTLENECK
    return EXIT_FAILED if _missing(plan, outcomes) or outcomes.refused or outcomes.waiting else 0


def _problem(args: argparse.Namespace) -> str:
    """The first mistake in the options; empty if there is none."""
    if not 1 <= args.publishers <= CLIENTS_MAX or not 0 <= args.subscribers <= CLIENTS_MAX:
        return f"--publishers is 1 to {CLIENTS_MAX}, --subscribers 0 to {CLIENTS_MAX}"
    if not 0 < args.rate <= 1e6:
        return "--rate is above 0, up to 1000000"
    if not STAMP.size <= args.size <= 1 << 24:
        return f"--size is {STAMP.size} to {1 << 24}"
    if not 0.1 <= args.duration <= 86_400 or not 0 <= args.warm_up <= 3600:
        return "--duration is 0.1 to 86400, --warm-up 0 to 3600"
    if any(sign in args.topic for sign in "+#\0"):
        return "--topic is without +, # and a null character"
    return ""


def _new_load(plan: LoadPlan, args: argparse.Namespace) -> Load:
    """The load of these options. Raises OSError or ValueError if a file or the server's name cannot
    be used."""
    from collections.abc import Callable

    from holdfast.client import Client, Message, Options

    password: bytes | None = None
    if args.password_file is not None:
        password = args.password_file.read_bytes().partition(b"\n")[0].rstrip(b"\r")
    context = ssl.create_default_context(cafile=args.ca_file) if args.ca_file else None

    def connect(name: str, receive: Callable[[Message], None]) -> Client:
        options = Options(
            level=args.level, client_id=name, username=args.username, password=password
        )
        return Client(servers=[args.server], options=options, tls=context, on_message=receive)

    return Load(plan, connect)


def _missing(plan: LoadPlan, outcomes: Outcomes) -> int:
    """The messages that were sent and did not arrive, or were not acknowledged."""
    sent = outcomes.sent - outcomes.refused
    return max(sent * plan.copies - outcomes.delivered, sent - outcomes.acknowledged, 0)


def bottlenecks(plan: LoadPlan, outcomes: Outcomes) -> list[str]:
    """The reasons why the generator, and not the broker, set the figures."""
    found = []
    if outcomes.busy > BUSY_MAX:
        found.append(f"the generator used {outcomes.busy:.0%} of a core")
    late_us = outcomes.lateness.quantile_us(0.99)
    # A publisher that the broker does not read from is late as well, and not at fault.
    if late_us is not None and late_us > LATE_US_MAX and not outcomes.waiting:
        found.append(f"the generator sent 1 % of the messages {late_us / 1000:.1f} ms late")
    return found


def _figures(plan: LoadPlan, outcomes: Outcomes, causes: list[str]) -> dict[str, object]:
    """Returns the result for programs, with latencies in milliseconds."""
    return {
        "rate": plan.rate,
        "qos": plan.qos,
        "publishers": plan.publishers,
        "subscribers": plan.subscribers,
        "size_bytes": plan.size_bytes,
        "duration_s": plan.duration_s,
        "sent": outcomes.sent,
        "acknowledged": outcomes.acknowledged,
        "delivered": outcomes.delivered,
        "refused": outcomes.refused,
        "not_sent": outcomes.waiting,
        "missing": _missing(plan, outcomes),
        "astray": outcomes.astray,
        "acknowledgement_ms": _quantiles(outcomes.acknowledgement),
        "delivery_ms": _quantiles(outcomes.delivery),
        "generator_late_ms": _quantiles(outcomes.lateness),
        "generator_busy": round(outcomes.busy, 3),
        "bottlenecks": causes,
    }


def _quantiles(latencies: Latencies) -> dict[str, float]:
    if not latencies.count:
        return {}
    found = {name: latencies.quantile_us(share) or 0 for name, share in QUANTILES.items()}
    return {name: us / 1000 for name, us in {**found, "max": latencies.max_us}.items()}


def _report(plan: LoadPlan, outcomes: Outcomes, causes: list[str]) -> list[str]:
    """Returns the lines for people."""
    lines = [
        f"{plan.rate:,.0f} messages/s of {plan.size_bytes} bytes, QoS {plan.qos},"
        f" {plan.publishers} publishers, {plan.subscribers} subscribers, {plan.duration_s:g} s",
        f"sent {outcomes.sent:,}, acknowledged {outcomes.acknowledged:,},"
        f" delivered {outcomes.delivered:,}, missing {_missing(plan, outcomes):,},"
        f" repeated or out of order {outcomes.astray:,}",
    ]
    rows = []
    for name, latencies in (
        ("acknowledgement", outcomes.acknowledgement),
        ("delivery", outcomes.delivery),
        ("the generator's own delay", outcomes.lateness),
    ):
        if latencies.count:
            found = _quantiles(latencies)
            rows.append({"ms": name} | {key: f"{value:.2f}" for key, value in found.items()})
    lines += table(rows, [*QUANTILES, "max"])
    if outcomes.refused:
        lines.append(f"refused {outcomes.refused:,}: {outcomes.first_refusal}")
    if outcomes.waiting:
        lines.append(
            f"not sent {outcomes.waiting:,}: the broker had not read the messages before them"
        )
    if causes:
        lines.append(
            f"NOT THE BROKER'S FIGURES: {'; '.join(causes)}. Lower --rate, or share it among"
            " several generators."
        )
    else:
        lines.append(f"the generator used {outcomes.busy:.0%} of a core")
    return lines
