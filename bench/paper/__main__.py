"""A federator of the published protocol as a process, until a signal ends it.

    python -m bench.paper --id 0 --broker tcp://127.0.0.1:1883 \
        --neighbour 1=tcp://127.0.0.1:1884 \
        --core-ann-interval-s 2 --beacon-interval-s 2 --redundancy 3

Without options its settings are the published environment.
"""

import argparse
import asyncio
import logging
import os
import sys

from bench.paper.federator import run
from bench.paper.settings import PaperSettings
from holdfast.config.problem import ConfigError


def _neighbour(text: str) -> tuple[int, str]:
    id, separator, url = text.partition("=")
    if not separator or not id.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: write ID=tcp://host:port")
    return int(id), url


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.paper")
    parser.add_argument("--id", type=int, required=True)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--neighbour", type=_neighbour, action="append", default=[])
    parser.add_argument("--core-ann-interval-s", type=float, required=True)
    parser.add_argument("--beacon-interval-s", type=float, required=True)
    parser.add_argument("--redundancy", type=int, required=True)
    return parser.parse_args(argv)


def settings_of(arguments: argparse.Namespace) -> PaperSettings:
    return PaperSettings(
        broker=arguments.broker,
        id=arguments.id,
        neighbours=dict(arguments.neighbour),
        core_ann_interval_s=arguments.core_ann_interval_s,
        beacon_interval_s=arguments.beacon_interval_s,
        redundancy=arguments.redundancy,
    )


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        if len(sys.argv) > 1:
            settings = settings_of(parse())
        else:
            settings = PaperSettings.from_environment(os.environ)
        asyncio.run(run(settings))
    except ConfigError as error:
        for line in error.problems:
            print(f"bench.paper: {line}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
