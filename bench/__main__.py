"""`python -m bench`: the comparison with Mosquitto, the Publish Queue, then, in a short form, the
failover of a pair and of a cluster, the longest call of a cluster node, the curves of metadata,
topics and Spark, how long one packet holds the loop, and federations."""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import brokers, process, report
from bench.comparison import Outcome, Settings, compare
from bench.options import new_parser, write_json
from bench.scenarios import PAYLOAD_BYTES, SCENARIOS

PARTS: dict[str, tuple[str, ...]] = {
    "pubqueue": (),
    "failover": ("--quick",),
    "takeover": ("--quick",),
    "cluster": ("--quick",),
    "metadata": (),
    "longest_call": ("--quick",),
    "topics": (),
    "admin_lists": (),
    "console": (),
    "processes": ("--quick",),
    "worst_packet": ("--rounds", "2"),
    "spark": (),
    "log_client": (),
    "mqtt_replay": (),
    "pipeline": ("--quick",),
    "pipeline_day": ("--hours", "1"),
    "lake_history": ("--gigabytes", "1"),
    "federation": ("--quick",),
}
"""Other benchmarks with their options here: each is a module of this package that knows
--json PATH."""
OPEN_FILES = 20_000


def parse(argv: list[str] | None) -> argparse.Namespace:
    names = [scenario.name for scenario in SCENARIOS]
    text = "Measures Holdfast beside Mosquitto, in alternating rounds."
    parser = new_parser("bench", text, "--quick", "--directory", "--python")
    parser.epilog = f"names: {', '.join([*names, *PARTS])}; {', '.join(PARTS)} only with --only"
    parser.add_argument(
        "--only", metavar="NAME", action="append", choices=[*names, *PARTS], help="may be repeated"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each scenario (default 5)")
    parser.add_argument(
        "--candidate",
        choices=["holdfast", "mosquitto"],
        default="holdfast",
        help="mosquitto: compare it with itself, which shows the noise of the measurement",
    )
    parser.add_argument(
        "--nodelay",
        action="store_true",
        help="Mosquitto with TCP_NODELAY in every scenario, as Holdfast always has it",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 when a target is missed, too"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: allowed is 1 or more")
    if not arguments.directory.is_dir():
        parser.error(f"--directory {arguments.directory}: not a directory")
    return arguments


def describe(settings: Settings) -> dict[str, object]:
    names = {name for name in (settings.reference, settings.candidate) if name is not None}
    return {
        "processor": process.cpu_model(),
        "cores": len(process.usable_cores()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "brokers": {name: brokers.version(name, settings.python) for name in sorted(names)},
        "mosquitto_settings": brokers.mosquitto_settings(settings.nodelay),
        "payload_bytes": PAYLOAD_BYTES,
        "rounds": settings.rounds,
        "warm_up_s": settings.warm_up_s,
        "measure_s": settings.measure_s,
        "file_system": process.filesystem_of(settings.directory),
        "fdatasync_ms": process.fdatasync_ms(settings.directory),
    }


def print_description(machine: dict[str, object]) -> None:
    print(
        f"{machine['processor']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"Python {machine['python']}"
    )
    versions = machine["brokers"]
    assert isinstance(versions, dict)
    for name, version in versions.items():
        print(f"{name}: {version}")
    print(f"mosquitto: {machine['mosquitto_settings']}")
    print(
        f"{machine['payload_bytes']}-byte payloads, rounds of {machine['warm_up_s']} s warm-up "
        f"and {machine['measure_s']} s measured, {machine['rounds']} on each broker in turn"
    )
    print(
        f"data on {machine['file_system']}, where an append with fdatasync takes "
        f"{machine['fdatasync_ms']:.2f} ms\n"
    )


def run_scenarios(names: list[str], settings: Settings) -> list[Outcome]:
    print(report.heading(settings.reference, settings.candidate), flush=True)
    outcomes = []
    for scenario in SCENARIOS:
        if scenario.name in names:
            outcomes.append(compare(scenario, settings))
            print(report.line(outcomes[-1]), flush=True)
    print(f"\n{report.explanation()}", flush=True)
    for error in dict.fromkeys(outcome.error for outcome in outcomes if outcome.error):
        print(f"\n{error}", flush=True)
    return outcomes


def run_part(name: str) -> object:
    """Runs one of PARTS in its own process; returns the figures it wrote, None without any."""
    print(f"\n{name}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "figures.json"
        command = [sys.executable, "-m", f"bench.{name}", "--json", str(path), *PARTS[name]]
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, check=False)
        if done.returncode or not path.exists():
            print(f"{name}: no figures, ended with code {done.returncode}", flush=True)
            return None
        figures: object = json.loads(path.read_text())
        return figures


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    every = [scenario.name for scenario in SCENARIOS]
    only = arguments.only or (every if arguments.quick else [*every, *PARTS])
    reference = "mosquitto" if brokers.mosquitto_path() else None
    if reference is None:
        print("mosquitto is not installed (on Debian: apt install mosquitto): no comparison\n")
    settings = Settings(
        directory=arguments.directory,
        rounds=arguments.rounds or (1 if arguments.quick else 5),
        warm_up_s=0.3 if arguments.quick else 0.5,
        measure_s=1.0 if arguments.quick else 2.0,
        python=arguments.python,
        reference=reference,
        candidate=arguments.candidate,
        nodelay=arguments.nodelay,
    )
    process.raise_open_files_limit(OPEN_FILES)
    machine = describe(settings)
    outcomes: list[Outcome] = []
    if any(name not in PARTS for name in only):
        print_description(machine)
        outcomes = run_scenarios(only, settings)
    parts = {name: run_part(name) for name in PARTS if name in only}
    scenarios = [outcome.as_json() for outcome in outcomes]
    write_json(arguments.json, {"machine": machine, "scenarios": scenarios, **parts})
    wrong = any(outcome.error or outcome.missing() for outcome in outcomes)
    wrong = wrong or None in parts.values()
    missed = any(outcome.is_met() is False for outcome in outcomes)
    return 1 if wrong or (arguments.strict and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
