"""Shows people a run's progress: rates, lag and time left, and a summary at the end.

On a terminal one line is rewritten every second. In a log there is a line per minute.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TextIO

from holdfast.pipeline.lake.files.commits import Commit, Skipped, newly_skipped
from holdfast.pipeline.lake.runner import RunListener, RunReport
from holdfast.pipeline.lake.table import RECORDS

TERMINAL_S: Final = 1.0
"""The seconds between two lines on a terminal."""
LOG_S: Final = 60.0
"""The seconds between two lines in a log."""
RATE_WINDOW_S: Final = 10.0
"""The seconds over which rates are computed."""
ERROR_LINES_MAX: Final = 3
"""The most lines of an error that are printed."""
SKIPPED_SHOWN: Final = 5
"""The most ranges of offsets in one line."""


class RunProgress(RunListener):
    """A listener that prints the progress of a run to `stream`."""

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        quiet: bool = False,
    ) -> None:
        self.quiet = quiet
        self.stream = stream if stream is not None else sys.stderr
        self.clock = clock
        self.terminal = self.stream.isatty()
        self.began = clock()
        self.errors: dict[str, str] = {}
        """The present error of each table that fails."""
        self._rows: dict[str, int] = {}
        self._recent: deque[tuple[float, str, int]] = deque()
        self._lag: int | None = None
        self._stage = ""
        self._printed = self.began
        self._width = 0
        self._lock = threading.Lock()

    def making(self, table: str, number: int, of: int) -> None:
        """Shows on a terminal which table is made."""
        if self.terminal and not self.quiet:
            with self._lock:
                self._stage = f"table {number} of {of}, {table}"
                self._print(self.line(self.clock()), over=True)

    def committed(self, commit: Commit, lag: int | None) -> None:
        """Counts the rows of a commit, and prints a line if one is due."""
        with self._lock:
            now = self.clock()
            name = commit.table
            self.errors.pop(name, None)
            self._rows[name] = self._rows.get(name, 0) + commit.rows
            self._recent.append((now, name, commit.rows))
            if name == RECORDS:
                self._lag = lag
            skipped = newly_skipped(commit)
            if skipped:
                self._print(skipped_text(skipped), over=False)
            pause_s = TERMINAL_S if self.terminal else LOG_S
            if now - self._printed >= pause_s and not self.quiet:
                self._printed = now
                self._print(self.line(now), over=self.terminal)

    def failed(self, table: str, error: BaseException, retry_s: float | None) -> None:
        """Prints the failure of a table."""
        then = "given up" if retry_s is None else f"tried again in {retry_s:.0f} s"
        with self._lock:
            self.errors[table] = error_text(error)
            what = table if table.startswith("catalog ") else f"table {table}"
            self._print(f"{what} failed ({then}): {error_text(error)}", over=False)

    def line(self, now: float) -> str:
        """Returns the progress line at a time."""
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()
        window_s = max(0.5, min(RATE_WINDOW_S, now - self.began))
        parts = [self._stage] if self._stage else []
        for name, rows in self._rows.items():
            rate = sum(n for _, each, n in self._recent if each == name) / window_s
            part = f"{name} {short(rows)} rows, {short(rate)}/s"
            if name == RECORDS and self._lag is not None:
                part += f", lag {short(self._lag)}"
                if self._lag and rate:
                    part += f" ({self._lag / rate:.0f} s left)"
            parts.append(part)
        return " | ".join(parts)

    def finished(self, report: RunReport) -> None:
        """Prints the summary: the rows of each table, and the duration."""
        if self.quiet:
            return
        with self._lock:
            self._print("", over=True)
            took_s = self.clock() - self.began
            for name, commits in report.commits.items():
                word = "commit" if commits == 1 else "commits"
                text = f"{name}: {report.rows[name]:,} rows in {commits:,} {word}"
                if report.quarantined[name]:
                    text += f", {report.quarantined[name]:,} quarantined"
                for what, count in report.counts.get(name, {}).items():
                    text += f", {count:,} {what}"
                if name == RECORDS and report.skipped:
                    text += f", {report.skipped:,} offsets skipped"
                self._print(text, over=False)
            self._print(f"{outcome(report)}, in {took_s:.1f} s", over=False)

    def _print(self, text: str, *, over: bool) -> None:
        """Prints a line. With `over`, the next line on a terminal overwrites it."""
        if not self.terminal:
            if text:
                print(text, file=self.stream, flush=True)
            return
        blank = f"\r{' ' * self._width}\r" if self._width else ""
        print(blank + text, end="" if over else "\n", file=self.stream, flush=True)
        self._width = len(text) if over else 0


def outcome(report: RunReport) -> str:
    """Returns what a run did, in words."""
    tables, failed = sum(rows > 0 for rows in report.rows.values()), len(report.errors)
    if not tables and not failed:
        return "nothing new"
    text = f"{tables} {'table has' if tables == 1 else 'tables have'} new rows"
    return f"{text}; {failed} failed: {', '.join(report.errors)}" if failed else text


def skipped_text(skipped: Sequence[Skipped]) -> str:
    """Describes in one line the offsets that bronze skipped."""
    count = sum(each.end - each.first for each in skipped)
    places = [
        f"{each.first} to {each.end} of partition {each.partition}"
        for each in skipped[:SKIPPED_SHOWN]
    ]
    more = len(skipped) - len(places)
    return (
        f"{RECORDS}: {count:,} offsets were not in the log any more and were skipped, by "
        f"failOnDataLoss=false: {', '.join(places)}" + (f" and {more} ranges more" if more else "")
    )


def short(number: float) -> str:
    """Shortens a number: 1234567 becomes 1.2M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def error_text(error: BaseException) -> str:
    """Returns the useful lines of an error, because Spark's errors contain the stacks of both
    sides."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return repr(error)
    told = [
        line for line in lines if not line.startswith(("at ", "File ", "Traceback", "JVM", "^"))
    ]
    # For a Python exception in a task, the useful line is the last of the Python traceback.
    own = [line for line in told if ("Error: " in line or "Exception: " in line)]
    return " ".join(own[-1:] or told[:ERROR_LINES_MAX] or lines[:1])[:2000]
