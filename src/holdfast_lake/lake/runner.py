"""Runs of tables: once, until they have everything that exists now, or continuously.

In a continuous run bronze has its own thread, so that slow tables do not delay it. A table that
fails stops itself and the tables made from it, and no others.

RunProgress shows people a run. On a terminal one line is rewritten every second. In a log there is
a line per minute.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TextIO

from holdfast.client.admin_connection import NoAnswer
from holdfast.client.log.lake.commits import Commit, CommitLog, Skipped, newly_skipped
from holdfast.client.log.lake.files import LakeError, note_failure, noted_failures
from holdfast.client.log.lake.objects import LakePath
from holdfast.client.log.reading import offsets
from holdfast.client.log.reading.offsets import DataLossError, OffsetError, Offsets
from holdfast_lake.lake.bronze import ENCODINGS, Bronze, check_same_log, continued
from holdfast_lake.lake.catalog import Catalog
from holdfast_lake.lake.compaction import Compaction
from holdfast_lake.lake.engine import Engine, locked, recover
from holdfast_lake.lake.folding import fold_encodings
from holdfast_lake.lake.gold import step_gold
from holdfast_lake.lake.readers import BusyError, reading
from holdfast_lake.lake.registration.registration import CatalogUpdates
from holdfast_lake.lake.silver import step_silver
from holdfast_lake.lake.table import RECORDS, StreamFold, Table, TableError
from holdfast_lake.source.options import OptionError, parse
from holdfast_lake.source.source import LogAccess


def encodings_of(catalog: Catalog, name: str) -> Mapping[str, str]:
    """Returns the encodings of a table's files, see WriteSpec."""
    if name == RECORDS:
        return ENCODINGS
    table = catalog.table(name)
    return fold_encodings(table) if isinstance(table.build, StreamFold) else {}


IDLE_S: Final = 0.05
"""The least pause in seconds after a source had nothing new, however short the trigger."""
TABLES_AT_ONCE: Final = 2
"""The tables of a run that are made at the same time. The driver plans one while Spark computes the
other."""
RETRY_S: Final = 1.0
RETRY_MAX_S: Final = 30.0
"""The longest pause in seconds between attempts of a failing table in a continuous run. The first
is RETRY_S, and each doubles."""
CATALOGS_S: Final = 5.0
"""The seconds between two looks at the catalogs in a continuous run."""

FATAL: Final = (LakeError, TableError, DataLossError, OffsetError, OptionError)
"""Errors that another attempt does not fix."""


@dataclass
class RunReport:
    """The result of a run, per table."""

    commits: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    quarantined: dict[str, int] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """The commits' counts besides rows, such as repetitions."""
    skipped: int = 0
    """The number of offsets of the log that bronze skipped, as far as its commits list the ranges
    (commits.Skipped)."""
    errors: dict[str, BaseException] = field(default_factory=dict)
    """The error that stopped each failed table."""

    @property
    def ok(self) -> bool:
        """True if no table failed."""
        return not self.errors

    def add(self, commit: Commit) -> None:
        """Counts a commit."""
        for counts, more in (
            (self.commits, 1),
            (self.rows, commit.rows),
            (self.quarantined, commit.quarantined),
        ):
            counts[commit.table] = counts.get(commit.table, 0) + more
        own = self.counts.setdefault(commit.table, {})
        for name, number in commit.counts.items():
            own[name] = own.get(name, 0) + number
        self.skipped += sum(each.end - each.first for each in newly_skipped(commit))


class RunListener:
    """The receiver of a run's events. Several threads call its methods."""

    def making(self, table: str, number: int, of: int) -> None:
        """A run begins with its table `number`, from 1, of `of` tables."""

    def committed(self, commit: Commit, lag: int | None) -> None:
        """A commit was made. For bronze, `lag` is the number of offsets between the table and the
        end of the log."""

    def failed(self, table: str, error: BaseException, retry_s: float | None) -> None:
        """A step failed. It is repeated after `retry_s`; None means never."""


def check_source(chosen: Sequence[str], source: Mapping[str, str] | None) -> None:
    """Checks that a run which reads records has a source. Raises LakeError."""
    if RECORDS in chosen and not source:
        raise LakeError(
            "where do the records come from? Give --from host:adminport of the servers, or a data "
            "directory"
        )


def check_log(source: Mapping[str, str], lake: LakePath, *, waits: bool) -> None:
    """Looks for the log before Spark is started, and whether the lake can go on with it. Raises the
    error that a run would meet.

    With `waits`, servers that do not reply are no error.
    """
    access = LogAccess(parse(source))
    try:
        bounds = access.log.bounds()
        last = CommitLog(lake, RECORDS).last()
        if last is not None:
            check_same_log(access, lake, last.log)
            begin = continued(access, lake, last, bounds)
            strict = access.options.fail_on_data_loss
            end = offsets.available(begin, bounds, fail_on_data_loss=strict)
            if strict:
                access.ranges(begin, end, bounds)
    except NoAnswer:
        if not waits:
            raise
    finally:
        access.close()


class Runner:
    """One run. `stop` may be called from any thread and from a signal handler."""

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        chosen: Sequence[str],
        source: Mapping[str, str] | None,
        listener: RunListener | None = None,
        compact_at: int | None = None,
        catalogs: CatalogUpdates | None = None,
        *,
        accepted: Callable[[], None] | None = None,
    ) -> None:
        """Prepares a run.

        `source` are options of the data source, required if `records` is chosen. A run compacts a
        bronze or silver table when it has `compact_at` more small files than the last compaction
        left. None: never. `accepted` is called after the first step that the source has passed.
        """
        check_source(chosen, source)
        self.engine = engine
        self.catalog = catalog
        self.chosen = list(chosen)
        self.source = source or {}
        self.listener = listener or RunListener()
        self.report = RunReport()
        self.compact_at = compact_at
        self.catalogs = catalogs
        """The catalogs in which tables are registered, brought up to date after commits."""
        self.has_locks = False
        """True if the caller has locked the chosen tables."""
        self._accepted = accepted
        self._small_files: dict[str, int] = {}
        """The number of small files per table that the last compaction left."""
        self._uncertain: set[str] = set()
        """Tables whose last step failed. Its commit may be recorded and not applied."""
        self._noted = set(noted_failures(engine.lake))
        """Tables whose error is in the lake. An object store is not asked after each step."""
        self._stopping = threading.Event()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Ends the run after the current steps."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """True after `stop`."""
        return self._stopping.is_set()

    def _locked(self) -> AbstractContextManager[None]:
        return nullcontext() if self.has_locks else locked(self.engine.lake, self.chosen)

    def run_once(self) -> RunReport:
        """Processes everything that exists at the start. Raises LakeError if another run has the
        tables."""
        with self._locked():
            self._recover()
            if RECORDS in self.chosen:
                self._attempt(RECORDS, self._run_bronze_once)
            self._make_tables([name for name in self.chosen if name != RECORDS])
        self._update_catalogs(None)
        return self.report

    def _make_tables(self, names: Sequence[str]) -> None:
        """Makes tables in order, TABLES_AT_ONCE at a time, each after its source."""
        waiting = list(names)
        going: dict[Future[None], str] = {}
        with ThreadPoolExecutor(TABLES_AT_ONCE, "tables") as pool:
            while waiting or going:
                not_made = {*waiting, *going.values()}
                for name in list(waiting):
                    if self.catalog.table(name).source not in not_made:
                        waiting.remove(name)
                        # Each thread reads the commits itself: a log is not thread-safe.
                        engine = replace(self.engine, logs={})
                        work = partial(self._until_done, name, engine)
                        going[pool.submit(self._attempt, name, work)] = name
                done, _ = wait(going, return_when=FIRST_COMPLETED)
                for future in done:
                    del going[future]
                    future.result()

    def continuously(self, trigger_s: float) -> RunReport:
        """Runs until `stop`, or until every table has failed permanently.

        Steps of a table begin `trigger_s` apart, or when the step before has ended if that is
        later.
        """
        with self._locked():
            self._recover()
            threads = []
            if RECORDS in self.chosen:
                threads.append(threading.Thread(target=self._bronze_loop, args=(trigger_s,)))
            tables = [name for name in self.chosen if name != RECORDS]
            if tables:
                threads.append(threading.Thread(target=self._tables_loop, args=(tables, trigger_s)))
            updates = threading.Thread(target=self._catalogs_loop)
            for thread in (*threads, updates):
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                is_second = self.stopping
                self.stop()
                for thread in (*threads, updates):
                    thread.join()
                if is_second:
                    raise
            self.stop()
            updates.join()
        self._update_catalogs(None)
        return self.report

    def _catalogs_loop(self) -> None:
        """Updates the catalogs until the run stops."""
        while not self._stopping.wait(CATALOGS_S):
            self._update_catalogs(CATALOGS_S)

    def _update_catalogs(self, retry_s: float | None) -> None:
        if self.catalogs is None:
            return
        for name, error in self.catalogs.update().items():
            if retry_s is None:
                self.report.errors[name] = error
            self.listener.failed(name, error, retry_s)

    def _recover(self) -> None:
        for name in self.chosen:
            recover(self.engine, name)

    def _run_bronze_once(self) -> None:
        bronze = Bronze(self.engine, self.source)
        try:
            target = bronze.target()
            while not self.stopping and self._bronze_step(bronze, target):
                pass
        finally:
            bronze.close()

    def _bronze_step(self, bronze: Bronze, target: Offsets | None) -> bool:
        self._ensure_applied(bronze.engine, RECORDS)
        commit = bronze.step(target)
        if self._accepted is not None:
            self._accepted()
            self._accepted = None
        if commit is not None:
            self._committed(commit, bronze.lag())
            self._compact(bronze.engine, RECORDS)
        return commit is not None

    def _until_done(self, name: str, engine: Engine) -> None:
        table = self.catalog.table(name)
        while not self.stopping and self._table_step(engine, table):
            pass

    def _ensure_applied(self, engine: Engine, name: str) -> None:
        if name in self._uncertain:
            recover(engine, name)
            self._uncertain.discard(name)

    def _table_step(self, engine: Engine, table: Table) -> bool:
        self._ensure_applied(engine, table.name)
        step = step_silver if table.layer == "silver" else step_gold
        with reading(engine.lake, table.source):
            commit = step(engine, table)
        if commit is not None:
            self._committed(commit, None)
            if table.layer == "silver":
                self._compact(engine, table.name)
        return commit is not None

    def _compact(self, engine: Engine, name: str) -> None:
        if self.compact_at is None:
            return
        encodings = encodings_of(self.catalog, name)
        log = engine.log(name)
        compaction = Compaction(engine.lake, engine.store, log, encodings, engine.reached)
        if compaction.small_files() < self._small_files.get(name, 0) + self.compact_at:
            return
        with suppress(BusyError):  # a later commit tries again
            for commit in compaction.run():
                self._committed(commit, None)
        self._small_files[name] = compaction.small_files()

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        failed = [each for each in self.report.errors if name in self.catalog.derived_from(each)]
        if failed or self.stopping:
            return  # its source is not complete: a later run makes it, and nothing is lost
        self.listener.making(name, self.chosen.index(name) + 1, len(self.chosen))
        try:
            work()
            if not self.stopping:
                self._note(name, "")
        except Exception as error:  # noqa: BLE001 - Spark's, the user's: reported by table
            self._failed(name, error, None)

    def _bronze_loop(self, trigger_s: float) -> None:
        """Makes steps of bronze until the run stops, with a new connection after an error."""
        engine = replace(self.engine, logs={})  # the other thread reads the same commits
        _fair_share(engine, RECORDS)
        bronze: Bronze | None = None
        retry_s = RETRY_S
        more = False
        while not self.stopping:
            began = time.monotonic()
            try:
                if bronze is None:
                    bronze = Bronze(engine, self.source)
                more = self._bronze_step(bronze, None) and bronze.lag() > 0
                self._note(RECORDS, "")
                retry_s = RETRY_S
            except FATAL as error:
                self._failed(RECORDS, error, None)
                self.stop()  # nothing new would come
            except Exception as error:  # noqa: BLE001 - a server that is down, an executor lost
                self._failed(RECORDS, error, retry_s)
                if bronze is not None:
                    bronze.close()
                    bronze = None
                self._stopping.wait(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)
                continue
            if not more:
                self._wait(began, trigger_s)
        if bronze is not None:
            bronze.close()

    def _tables_loop(self, names: Sequence[str], trigger_s: float) -> None:
        """Makes steps of the other tables in turn until the run stops."""
        _fair_share(self.engine, "tables")
        retries = dict.fromkeys(names, (0.0, RETRY_S))
        while not self.stopping:
            began = time.monotonic()
            going = [name for name in names if name not in self.report.errors]
            if not going:
                return
            for name in going:
                not_before, retry_s = retries[name]
                if self.stopping or time.monotonic() < not_before:
                    continue
                retries[name] = self._try_table(name, retry_s)
            self._wait(began, trigger_s)

    def _wait(self, began: float, trigger_s: float) -> None:
        self._stopping.wait(max(IDLE_S, began + trigger_s - time.monotonic()))

    def _try_table(self, name: str, retry_s: float) -> tuple[float, float]:
        """Makes one step, and returns the earliest time of the next one and the pause after its
        next failure."""
        try:
            self._table_step(self.engine, self.catalog.table(name))
            self._note(name, "")
        except FATAL as error:
            self._failed(name, error, None)
        except Exception as error:  # noqa: BLE001 - tried again
            self._failed(name, error, retry_s)
            return time.monotonic() + retry_s, min(2 * retry_s, RETRY_MAX_S)
        return 0.0, RETRY_S

    def _committed(self, commit: Commit, lag: int | None) -> None:
        with self._lock:
            self.report.add(commit)
        self.listener.committed(commit, lag)

    def _failed(self, name: str, error: BaseException, retry_s: float | None) -> None:
        self._uncertain.add(name)
        if self.stopping and not isinstance(error, FATAL):
            return  # Ctrl-C also stops Spark's processes: the step had no effect
        if retry_s is None:
            with self._lock:
                self.report.errors[name] = error
        self.listener.failed(name, error, retry_s)
        self._note(name, error_text(error))

    def _note(self, name: str, error: str) -> None:
        """Notes the error of a table's last step. Without one, a note of an earlier step goes."""
        if error or name in self._noted:
            note_failure(self.engine.lake, name, error)
            (self._noted.add if error else self._noted.discard)(name)


def _fair_share(engine: Engine, pool: str) -> None:
    """Puts this thread's Spark jobs into a pool, so that they do not wait for those of the other
    thread.

    It has an effect if the session's scheduler is FAIR.
    """
    engine.spark.sparkContext.setLocalProperty("spark.scheduler.pool", pool)


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
