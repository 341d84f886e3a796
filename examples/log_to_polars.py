"""The last hour of some topics as a Polars frame, from a broker's log.

    pip install '.[arrow]' polars
    python examples/log_to_polars.py 127.0.0.1:18083 'plant/+/temperature'

It prints count, mean and maximum of each topic. Payloads that are no numbers are left out.
"""

import argparse
import sys

import polars as pl

from holdfast.client.log import AdminError, LogClient, LogGapError, LogOptionError


def last_hour(admin: str, topics: str) -> pl.DataFrame:
    """One row for each topic with numbers."""
    messages = LogClient(admin).read(topics, start="-1h").to_arrow("topic,payload,timestamp")
    number = pl.col("payload").cast(pl.String, strict=False).cast(pl.Float64, strict=False)
    return (
        pl.DataFrame(messages)
        .with_columns(number.alias("number"))
        .drop_nulls("number")
        .group_by("topic")
        .agg(
            pl.len().alias("count"),
            pl.col("number").mean().alias("mean"),
            pl.col("number").max().alias("max"),
        )
        .sort("topic")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the last hour of some topics.")
    parser.add_argument("admin", help="the broker's admin port: 127.0.0.1:18083")
    parser.add_argument("topics", help="an MQTT filter: 'plant/+/temperature'")
    given = parser.parse_args()
    try:
        print(last_hour(given.admin, given.topics))
    except KeyboardInterrupt:
        return 130
    except (AdminError, LogGapError, LogOptionError) as error:
        print(f"log_to_polars: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
