"""`holdfast pipeline package`: the files for spark-submit where holdfast is not installed."""

import argparse
from pathlib import Path
from typing import Final

DEFAULT_DIRECTORY: Final = Path("holdfast-spark")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=DEFAULT_DIRECTORY,
        metavar="DIR",
        help=f"where to (default ./{DEFAULT_DIRECTORY})",
    )


def run(args: argparse.Namespace) -> int:
    from holdfast.pipeline.package import NEEDED, write_package

    archive, script = write_package(args.output)
    print(
        f"wrote {archive} and {script}\n\n"
        f"The driver and the executors need Python 3.11 or newer with {', '.join(NEEDED)}.\n"
        "All of them must see the lake's directory under the same path. Run\n\n"
        f"  spark-submit --master spark://HOST:7077 --py-files {archive} {script} \\\n"
        "    run all --from HOST:ADMINPORT --lake DIR\n"
    )
    return 0
