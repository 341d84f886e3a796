#!/usr/bin/env python3
"""The recorded formats under tests/data/formats: shows what differs, and writes what is missing.

    tools/formats.py            what differs from the record; exit code 1 if something does
    tools/formats.py --write    record new formats, new numbers of formats, and new messages
    tools/formats.py --release  write tests/data/formats/VERSION/: data directories of this version

A line that is recorded is never changed. A format that changed needs a new number. Delete the line
of an example by hand only if no release has written it.
"""

import argparse
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import holdfast  # noqa: E402
from tests.support.format_samples import FOLDER, NUMBERS, recorded  # noqa: E402
from tests.support.wire_samples import all_samples  # noqa: E402


def differences() -> list[str]:
    """What the record lacks, or has otherwise than this program writes it."""
    found = []
    for sample in all_samples():
        number = NUMBERS[sample.format]
        try:
            known = recorded(sample.format, number)
        except FileNotFoundError:
            known = {}
        where = f"{sample.format}-{number}.txt {sample.name}"
        if sample.name not in known:
            found.append(f"{where}: not recorded (tools/formats.py --write)")
        elif sample.is_exact and known[sample.name] != sample.data:
            found.append(
                f"{where}: written in another way than recorded. What has been written is a"
                f" promise: keep the bytes, or give the format a new number"
            )
    return found


def write() -> None:
    """Append what is not recorded."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for sample in all_samples():
        file = FOLDER / f"{sample.format}-{NUMBERS[sample.format]}.txt"
        known = recorded(sample.format, NUMBERS[sample.format]) if file.exists() else {}
        if sample.name not in known:
            with file.open("a") as lines:
                lines.write(f"{sample.line}\n")


def release(version: str) -> None:
    """Write a data directory of each kind of node, as a crash leaves it.

    A restart in between writes a snapshot, so the directories have a snapshot and a log after it.
    """
    from tests.support.kept_data import begin, finish
    from tests.support.kept_nodes import KINDS

    for kind, run in KINDS.items():
        archive = FOLDER / version / f"{kind}.tar.gz"
        if archive.exists():
            raise SystemExit(f"{archive} exists: a released directory is never written again")
        with tempfile.TemporaryDirectory(prefix="holdfast-formats-") as place:
            data = Path(place) / "data"
            with run(Path(place) / "first", data) as node:
                begin(node.port)
                node.stop()
            with run(Path(place) / "second", data) as node:
                finish(node.port)
            archive.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(archive, "w:gz") as kept:
                kept.add(data, ".")
        print(archive, archive.stat().st_size)
    release_lake(FOLDER / version / "lake.tar.gz")


def release_lake(archive: Path) -> None:
    """Write a lake with two versions of each table, made by Spark, and its log."""
    from holdfast_lake import spark_session
    from tests.support.lake_site import Site

    spark = spark_session("formats", "local[1]", **{"spark.log.level": "ERROR"})
    with tempfile.TemporaryDirectory(prefix="holdfast-formats-") as place:
        site = Site(spark, Path(place), "parquet")
        for _ in range(2):
            site.publish(40)
            site.run()
        with tarfile.open(archive, "w:gz") as kept:
            for name in ("data", "lake"):
                kept.add(Path(place) / name, name)
    spark.stop()
    print(archive, archive.stat().st_size)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--release", action="store_true")
    arguments = parser.parse_args()
    if arguments.release:
        release(holdfast.__version__)
    if arguments.write:
        write()
    found = differences()
    print("\n".join(found) or "all formats are as recorded")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
