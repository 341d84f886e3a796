"""`holdfast pipeline register` and `history`: the tables as other programs and people know them."""

import argparse
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from holdfast_lake.cli import options
from holdfast_lake.cli.commands import existing_lake, spark_of

if TYPE_CHECKING:
    from holdfast_lake.lake.lake import Lake

DEFAULT_NAMESPACE: Final = "holdfast"
HIVE: Final = "spark.sql.catalogImplementation"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="TABLE", help="tables (default: all)")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--iceberg",
        metavar="CATALOG",
        help="an Iceberg catalog by its name in ~/.pyiceberg.yaml; later runs keep it up to date",
    )
    where.add_argument(
        "--hive", action="store_true", help="the Hive metastore of Spark (see --conf)"
    )
    parser.add_argument(
        "--property",
        type=options.pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="--iceberg: property of the catalog, such as uri=sqlite:////data/catalog.db; may be "
        "given again",
    )
    parser.add_argument(
        "--namespace",
        default=DEFAULT_NAMESPACE,
        metavar="NAME",
        help=f"namespace or database of the tables (default {DEFAULT_NAMESPACE})",
    )
    parser.add_argument(
        "--remove", action="store_true", help="remove the tables from the catalog; files stay"
    )


def register(args: argparse.Namespace) -> int:
    """Lists tables in a catalog, or removes them from it."""
    lake = existing_lake(args)
    return _register_in_hive(lake, args) if args.hive else _register_in_iceberg(lake, args)


def _register_in_iceberg(lake: "Lake", args: argparse.Namespace) -> int:
    from holdfast_lake.lake.registration import registration as catalogs
    from holdfast_lake.lake.settings import Registration

    wanted = Registration(args.iceberg, args.namespace, dict(args.property), list(args.names))
    where = f"{args.namespace} of the catalog {args.iceberg}"
    if args.remove:
        removed = list(catalogs.unregister(lake.path, lake.catalog, wanted))
        _print_removed([name for name, was_there in removed if was_there], where)
        return 0
    tables = list(catalogs.register(lake.path, lake.catalog, wanted))
    _print_registered(tables, where)
    print("Each run now brings the catalog up to date.")
    return 0


def _register_in_hive(lake: "Lake", args: argparse.Namespace) -> int:
    from holdfast.client.log.lake.objects import directory_of
    from holdfast_lake.lake.registration.spark_catalog import unregister_in_spark

    args.conf = [(HIVE, "hive"), *args.conf]
    where = f"the database {args.namespace} of the Hive metastore"
    with spark_of(lake, args):
        if args.remove:
            names = args.names or lake.catalog.names()
            removed = list(
                unregister_in_spark(lake.spark, directory_of(lake.path), args.namespace, names)
            )
            _print_removed([name for name, was_there in removed if was_there], where)
        else:
            _print_registered(lake.register(args.namespace, args.names), where)
    return 0


def _print_registered(tables: list[tuple[str, int]], where: str) -> None:
    for name, version in tables:
        print(f"{name}: version {version}")
    word = "table is" if len(tables) == 1 else "tables are"
    print(f"{len(tables)} {word} in {where}." if tables else "no table has been written yet")


def _print_removed(names: list[str], where: str) -> None:
    print(f"removed from {where}: {', '.join(names) or 'nothing, no table was there'}")


def show_history(args: argparse.Namespace) -> int:
    """Prints when tables were made, got columns and were built again."""
    from holdfast.client.log.lake.commits import history
    from holdfast_lake.lake.table import RECORDS

    lake = existing_lake(args)
    for name in args.name:
        if name != RECORDS:
            lake.catalog.table(name)
    names = args.name or lake.catalog.names()
    changes = [change for name in names for change in history(lake.path, name)]
    changes.sort(key=lambda change: change.at_us)
    if args.json:
        import msgspec

        found: list[dict[str, Any]] = msgspec.to_builtins(changes)
        print(json.dumps(found, indent=2))
        return 0
    for each in changes:
        at = datetime.fromtimestamp(each.at_us / 1e6, UTC)
        what = f"{each.kind}{f': {each.change}' if each.change else ''}"
        if each.kind == "made":
            what = f"made with {len(each.columns)} columns"
        print(f"{at:%Y-%m-%d %H:%M:%S} UTC  {each.table} version {each.version}  {what}")
    return 0
