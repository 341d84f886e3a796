"""A federator of the published protocol as a process, for the comparison; until a signal ends it.

    python -m bench.federation_paper --id 0 --broker tcp://127.0.0.1:1883 \
        --neighbour 1=tcp://127.0.0.1:1884
"""

import argparse
import asyncio
import logging

from holdfast.federation.sidecar.paper.federator import PaperFederator
from holdfast.federation.sidecar.paper.settings import PaperSettings


def _neighbour(text: str) -> tuple[int, str]:
    id, separator, url = text.partition("=")
    if not separator or not id.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: write ID=tcp://host:port")
    return int(id), url


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.federation_paper")
    parser.add_argument("--id", type=int, required=True)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--neighbour", type=_neighbour, action="append", default=[])
    parser.add_argument("--core-ann-interval-s", type=float, required=True)
    parser.add_argument("--beacon-interval-s", type=float, required=True)
    parser.add_argument("--redundancy", type=int, required=True)
    return parser.parse_args(argv)


async def run(arguments: argparse.Namespace) -> None:
    federator = PaperFederator(
        PaperSettings(
            broker=arguments.broker,
            id=arguments.id,
            neighbours=dict(arguments.neighbour),
            core_ann_interval_s=arguments.core_ann_interval_s,
            beacon_interval_s=arguments.beacon_interval_s,
            redundancy=arguments.redundancy,
        )
    )
    await federator.start()
    await federator.wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(run(parse()))
