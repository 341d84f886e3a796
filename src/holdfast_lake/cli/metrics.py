"""Serves the state of a lake as metrics for Prometheus, as a text or over HTTP."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast_lake.lake.status import LakeStatus, TableStatus

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_MAX_S: Final = 10.0
"""The most seconds for which a client of the metrics may be silent."""

_Value = float | int | None
_TABLE_METRICS: Final[tuple[tuple[str, str, str, "Callable[[TableStatus], _Value]"], ...]] = (
    ("rows", "gauge", "Rows of the table.", lambda t: t.rows),
    ("quarantined_total", "counter", "Rows of the source in the quarantine.",
     lambda t: t.quarantined),
    ("lag_records", "gauge", "Offsets of the log, or rows of the source, that the table lacks.",
     lambda t: t.lag),
    ("lag_seconds", "gauge", "Seconds for which the oldest of them has been there.",
     lambda t: t.lag_s),
    ("step_seconds", "gauge", "Duration of the last step.", lambda t: t.last_took_s),
    ("failed", "gauge", "1 if the last step has failed.", lambda t: int(bool(t.error))),
    ("commits_total", "counter", "Commits of the table.", lambda t: t.version),
    ("last_commit_timestamp_seconds", "gauge", "Time of the last commit.",
     lambda t: None if t.last_commit_us is None else t.last_commit_us / 1e6),
)  # fmt: skip


def metrics_text(status: "LakeStatus") -> str:
    """Returns the metrics of a lake in Prometheus' text format. A value that is not known is left
    out."""
    lines: list[str] = []

    def add(
        name: str, kind: str, text: str, values: Sequence[tuple[dict[str, str], _Value]]
    ) -> None:
        name = f"holdfast_pipeline_{name}"
        lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
        for labels, value in values:
            if value is not None:
                pairs = ",".join(f'{key}="{each}"' for key, each in labels.items())
                lines.append(f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}")

    for name, kind, text, value_of in _TABLE_METRICS:
        add(name, kind, text, [({"table": t.name}, value_of(t)) for t in status.tables])
    counts = [
        ({"table": table.name, "what": what}, number)
        for table in status.tables
        for what, number in table.counts.items()
    ]
    add("counted_total", "counter", "Repetitions, and rows that fail an expectation.", counts)
    add("skipped_offsets_total", "counter", "Offsets of the log that are in no table.",
        [({}, status.skipped_total)])  # fmt: skip
    add(
        "source_up",
        "gauge",
        "1 if the end of the log is known.",
        [({}, int(status.ends is not None))],
    )
    return "\n".join(lines) + "\n"


@contextmanager
def serving(address: tuple[str, int], status: "Callable[[], LakeStatus]") -> Iterator[int]:
    """Serves `/metrics` at an address while the context lasts, and gives the port.

    Raises OSError if the address cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_MAX_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "there is only /metrics")
                return
            body = metrics_text(status()).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Does not log requests."""

    server = ThreadingHTTPServer(address, Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
