"""A backfill: tables make the rows of some days again, by the rules of today.

Each named table is replaced by one commit, which does not change its position in its source. The
tables made from it follow by commits of their own, in this run or in the next one: a table knows
that its source was replaced (`commits.unseen_replacement`). So a crash between two commits leaves
no table that stays behind.

Rules that differ from those of the lake hold from then on. Before the first commit the lake notes
the command as unfinished, and no run goes on before it has been repeated.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.client.log.lake.commits import Commit, CommitLog, File
from holdfast.client.log.lake.errors import LakeError
from holdfast_lake.lake.backfill.parts import Days, TablePart, days_of
from holdfast_lake.lake.bronze import Bronze
from holdfast_lake.lake.engine import Engine, locked, recover
from holdfast_lake.lake.gold import step_gold
from holdfast_lake.lake.lake import Lake
from holdfast_lake.lake.runner import RunListener, Runner, RunReport, check_source
from holdfast_lake.lake.silver import replace_rows
from holdfast_lake.lake.stores.store import STATES
from holdfast_lake.lake.table import RECORDS

ALL_DAYS = ""
"""The key of the rows of a table without days."""


@dataclass
class BackfillReport:
    """The result of a backfill."""

    days: Days
    run: RunReport
    rows: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """Per table and day the rows before and after. Days without a difference are among them."""


class Backfill:
    """A backfill of some tables of a lake, and of all tables made from them."""

    def __init__(
        self, lake: Lake, names: Sequence[str], days: Days, context: int | None = None
    ) -> None:
        """Prepares a backfill. Raises LakeError and TableError.

        Without names, it makes everything but `records` again. `context` is the number of days
        before the first one that are read for numbers and repetitions. None: all.
        """
        if not lake.settings:
            raise LakeError(f"there is no lake in {lake.path}: run the pipeline first")
        self.lake = lake
        self.days = days
        self.context = context
        self.roots = self._roots(names)
        found = {each for name in self.roots for each in lake.catalog.derived_from(name)}
        self.names = [name for name in lake.catalog.names()
                      if name in found and self._log(name).last() is not None]  # fmt: skip
        unfinished = lake.settings.unfinished
        if unfinished and unfinished != self._command():
            raise LakeError(
                f"another backfill was interrupted: run `{unfinished}` to its end first"
            )
        redeclared = lake.redeclared()
        self.is_redeclared = bool(redeclared or unfinished)
        lake.check_tables(self.names)
        check_source(self.roots, lake.source())
        if RECORDS not in self.roots:
            self._check_days()
        elif redeclared:
            # The tables made from records follow by days and keep their state, which would still be
            # that of the old rules.
            raise LakeError(
                f"--tables declares {', '.join(redeclared)} otherwise than the lake, and "
                f"{RECORDS} are the same by all declarations: run this backfill without --tables "
                f"first, and then name {redeclared[0]} instead"
            )

    def run(self, listener: RunListener | None = None) -> BackfillReport:
        """Replaces the rows of the roots, and brings the tables made from them up to date.

        Raises LakeError, TableError, RaceError and the errors of Spark.
        """
        lake = self.lake
        listener = listener or RunListener()
        before = self._rows()
        engine = lake.writing_engine()
        engine.store.is_remade = self._is_remade
        report = RunReport()
        with locked(lake.path, self.names):
            for name in self.names:
                recover(engine, name)
            lake.remember(lake.source(), self._command() if self.is_redeclared else "")
            for name in self.roots:
                commit = self._replace(engine, name)
                report.add(commit)
                listener.committed(commit, None)
            lake.remember(lake.source(), "")
        following = [name for name in self.names if name not in self.roots]
        updates = lake.catalog_updates()
        runner = Runner(engine, lake.catalog, following, None, listener, catalogs=updates)
        runner.report = report
        runner.run_once()
        after = self._rows()
        told = {name: self._difference(before[name], after[name]) for name in self.names}
        return BackfillReport(self.days, report, told)

    def _roots(self, names: Sequence[str]) -> list[str]:
        """Returns the named tables without those that follow another one of them."""
        catalog = self.lake.catalog
        stored = [name for name in catalog.names() if self._log(name).last() is not None]
        if not names:
            names = [name for name in stored if name != RECORDS]
        for name in names:
            if name != RECORDS:
                catalog.table(name)
            if name not in stored:
                raise LakeError(f"table {name} has not been written yet: run it first")
        following = {each for name in names for each in catalog.derived_from(name) if each != name}
        return [name for name in catalog.names() if name in names and name not in following]

    def _check_days(self) -> None:
        """Checks that the lake has the days, and that other rules hold from them on."""
        log = self._log(RECORDS)
        last = log.last()
        there = days_of(log.live(last.version)) if last is not None else []
        if not any(self._is_chosen(day) for day in there):
            has = f"it has {there[0]} to {there[-1]}" if there else "it is empty"
            raise LakeError(f"{RECORDS} has no rows of {self.days}: {has}")
        if self.is_redeclared and self.days.last is not None and there[-1] > str(self.days.last):
            raise LakeError(
                "--tables declares tables otherwise than the lake, so new rows will be by these "
                f"rules, and those from {self.days.first} to {self.days.last} too, but not those "
                f"until {there[-1]}: leave --to out"
            )

    def _is_chosen(self, day: str) -> bool:
        return str(self.days.first) <= day and (
            self.days.last is None or day <= str(self.days.last)
        )

    def _replace(self, engine: Engine, name: str) -> Commit:
        if name == RECORDS:
            bronze = Bronze(engine, self.lake.source())
            try:
                return bronze.replace(self.days)
            finally:
                bronze.close()
        table = self.lake.catalog.table(name)
        if table.layer == "silver":
            part = TablePart(self.days, self.context)
            return replace_rows(engine, table, part, keeps_state=not self.is_redeclared)
        commit = step_gold(engine, table, self.days)
        assert commit is not None  # its days are made again
        return commit

    def _is_remade(self, file: File) -> bool:
        """Returns whether the rows of a file are made again. A table without days is made as a
        whole, but its state may stay."""
        has_days = "date" in file.partition
        return self.days.has(file) if has_days else not file.path.startswith(f"{STATES}/")

    def _command(self) -> str:
        to = f" --to {self.days.last}" if self.days.last is not None else ""
        names = " ".join(self.roots)
        return f"holdfast pipeline backfill {names} --from {self.days.first}{to}"

    def _log(self, name: str) -> CommitLog:
        return CommitLog(self.lake.path, name)

    def _rows(self) -> dict[str, Counter[str]]:
        """Returns the rows of each table per day."""
        found = {}
        for name in self.names:
            log = self._log(name)
            last = log.last()
            counts: Counter[str] = Counter()
            for file in log.live(last.version) if last is not None else ():
                counts[file.partition.get("date") or ALL_DAYS] += file.rows
            found[name] = counts
        return found

    def _difference(self, before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
        """Returns the rows of the days that were made again, and of others that have changed."""
        days = sorted({*before, *after})
        return {
            day: (before[day], after[day])
            for day in days
            if before[day] != after[day] or day == ALL_DAYS or self._is_chosen(day)
        }
