"""How fast a Python program reads the log with `holdfast.client.log`, and its CPU for a row.

    python -m bench.log_client [--json PATH] [--records 500000] [--rounds 3]

The log is that of bench.spark, read over the admin port of a node. Best of some rounds; the CPU is
that of the reading process alone.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.options import new_parser, write_json
from bench.spark import BATCH_RECORDS, served, write_log
from holdfast.client.log import LogClient

RECORDS: Final = 500_000


def measure(read: Callable[[], int], records: int, rounds: int) -> dict[str, float]:
    """Rows a second and microseconds of CPU for a row."""
    best_s = best_cpu_s = float("inf")
    for _ in range(rounds):
        began, cpu = time.perf_counter(), time.process_time()
        count = read()
        if count != records:
            raise SystemExit(f"{count} rows of {records}")
        best_s = min(best_s, time.perf_counter() - began)
        best_cpu_s = min(best_cpu_s, time.process_time() - cpu)
    return {"rows_per_s": round(records / best_s), "cpu_us": round(best_cpu_s / records * 1e6, 2)}


def run(folder: Path, records: int, rounds: int) -> dict[str, dict[str, float]]:
    """The figures by form."""
    write_log(folder, records, BATCH_RECORDS)
    with served(folder) as source:
        log = LogClient(source)
        forms: dict[str, Callable[[], int]] = {
            "messages": lambda: sum(map(len, log.read().batches())),
            "arrow": lambda: sum(each.num_rows for each in log.read().arrow()),
        }
        return {form: measure(read, records, rounds) for form, read in forms.items()}


def main(argv: list[str] | None = None) -> int:
    """Print the figures."""
    parser = new_parser("bench.log_client", "Measures the log client.")
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        figures = run(Path(folder) / "log", arguments.records, arguments.rounds)
    for name, each in figures.items():
        print(f"{name:20} {each['rows_per_s']:>12,} rows/s  {each['cpu_us']:6.2f} µs CPU/row")
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
