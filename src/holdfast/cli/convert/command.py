"""`holdfast convert`: from one broker to a cluster."""

import argparse
import sys
from pathlib import Path

from holdfast.cli.backup.manifest import BackupError
from holdfast.cli.convert.conversion import convert
from holdfast.cli.text import count_text
from holdfast.config.schema import Cluster
from holdfast.io.conversion.conversion import ClusterPlan, Conversion
from holdfast.io.conversion.source import ConversionError
from holdfast.log.files.data_directory import DataDirectoryError
from holdfast.numbers import whole_number

REPLICAS_MAX = 7
TO_CLUSTER = "cluster"
TO_SINGLE = "single"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "convert",
        help="make a cluster's first node of a broker",
        description="Make the data directory of the first node of a new cluster from that of a"
        " stopped broker. Messages keep their offsets; sessions, groups, retained messages and all"
        " else that is stored are the same. The old directory is only read.",
    )
    default = Cluster()
    parser.add_argument("directory", type=Path, metavar="DIR", help="data directory")
    parser.add_argument("target", type=Path, metavar="NEW", help="new or empty directory")
    parser.add_argument(
        "--to", required=True, choices=(TO_CLUSTER, TO_SINGLE), help="what NEW is for"
    )
    parser.add_argument("--node-id", default="", metavar="ID", help="new name (default: as before)")
    for name, number in (
        ("replication-factor", default.replication_factor),
        ("min-insync", default.min_insync),
    ):
        parser.add_argument(
            f"--{name}",
            type=_replicas,
            metavar="N",
            help=f"cluster.{name.replace('-', '_')} of the new cluster (default {number})",
        )
    parser.set_defaults(run=run)


def _replicas(text: str) -> int:
    number = whole_number(text, REPLICAS_MAX, 1)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 to {REPLICAS_MAX}")
    return number


def run(args: argparse.Namespace) -> int:
    """Convert. Returns 1 if that is impossible."""
    try:
        made = convert(args.directory, args.target, _plan(args), args.node_id)
    except (BackupError, ConversionError, DataDirectoryError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # A write to a full disk does not name the file.
        name = args.target if error.filename is None else error.filename
        print(f"holdfast: {name}: {error.strerror}", file=sys.stderr)
        return 1
    for line in report(made, args.directory, args.target):
        print(line)
    return 0


def _plan(args: argparse.Namespace) -> ClusterPlan:
    """The cluster to be founded. Raises `ConversionError`."""
    default = Cluster()
    factor, least = args.replication_factor, args.min_insync
    if args.to == TO_SINGLE:
        raise ConversionError(
            "--to single is not needed any more: drain and remove the other nodes of the cluster,"
            " then start the last one without [cluster]"
        )
    factor = factor or default.replication_factor
    least = least or min(default.min_insync, factor)
    if least > factor:
        raise ConversionError(f"--min-insync {least} is above --replication-factor {factor}")
    return ClusterPlan(factor, least)


def report(made: Conversion, source: Path, target: Path) -> list[str]:
    """The report of a conversion: the result, the changes, and the next step of the operator."""
    manifest, carried = made.manifest, made.carried
    partitions = manifest.partitions
    lines = [
        f"{target}: {count_text(made.records, 'record')} in {count_text(partitions, 'partition')},"
        " each at the offset it had",
        f"{count_text(made.added, 'record')} added behind them:"
        f" {count_text(len(carried.sessions), 'session')},"
        f" {count_text(len(carried.groups), 'shared group')},"
        f" {count_text(len(carried.queues), 'queue')}",
    ]
    return [
        *lines,
        f"this is node {manifest.node_id}, the first of cluster {manifest.cluster_id}",
        f"set cluster.partitions = {partitions} on every node, the number of this log",
        f"start it: holdfast serve --data {target} --node-id {manifest.node_id} --peer-bind"
        " HOST:PORT --join OTHERS, and the other nodes with empty directories",
        f"never serve {source} again: both would go on from the same messages",
    ]
