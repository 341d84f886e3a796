"""`holdfast pipeline schema`: the meaning of the tables and their columns."""

import argparse
import json
from typing import Any

from holdfast.cli.pipeline import options


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", metavar="TABLE", help="only these (default: all)")
    options.add_tables(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from holdfast.pipeline.lake.catalog import load_catalog
    from holdfast.pipeline.lake.describe import described

    tables = described(load_catalog(args.tables), args.name)
    if args.json:
        print(json.dumps(tables, indent=2))
    else:
        print("\n\n".join("\n".join(lines(table)) for table in tables))
    return 0


def lines(table: dict[str, Any]) -> list[str]:
    head = f"{table['name']} ({table['layer']}, from {table['source']})"
    result = [head, f"  {table['description']}"]
    if table["partition_by"]:
        result.append(f"  partitioned by {', '.join(table['partition_by'])}")
    if table["keys"]:
        result.append(f"  sorted by {', '.join(table['keys'])}")
    name = max(len(column["name"]) for column in table["columns"])
    kind = min(24, max(len(column["type"]) for column in table["columns"]))
    for column in table["columns"]:
        text = f"    {column['name']:{name}}  {column['type']:{kind}}  {column['description']}"
        result.append(text)
    return result
