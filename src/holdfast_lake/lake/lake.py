"""A lake for programs and notebooks: a directory of tables.

    from holdfast_lake import Lake

    lake = Lake("lake")
    lake.run("all", source="127.0.0.1:18083")
    lake.table("readings").where("device = 'd1'").show()
    lake.status()

A Spark session is made when the first method needs one.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from holdfast.client.log.lake.commits import CommitLog
from holdfast.client.log.lake.files import LakeError
from holdfast.client.log.lake.objects import (
    LakePath,
    ObjectPath,
    check_object_store,
    directory_of,
    location,
)
from holdfast.client.log.lake.parquet import hive_files
from holdfast_lake.lake.catalog import Catalog, load_catalog, load_tables
from holdfast_lake.lake.compaction import Compaction
from holdfast_lake.lake.engine import Engine, do_nothing, finish, locked, usable
from holdfast_lake.lake.registration.registration import CatalogUpdates
from holdfast_lake.lake.runner import RunListener, Runner, RunReport, check_source, encodings_of
from holdfast_lake.lake.schema import (
    check_declared,
    names_of,
    quarantine_columns,
    stored_columns,
)
from holdfast_lake.lake.settings import (
    LAKE_FORMAT,
    SETTINGS,
    LakeSettings,
    changed_tables,
    declaration_of,
    differences,
    keep,
    kept_sources,
    read_settings,
    source_options,
    store_name,
    write_settings,
)
from holdfast_lake.lake.status import READINGS, LakeStatus, lake_status
from holdfast_lake.lake.stores.store import (
    WORK,
    ParquetStore,
    TableStore,
    check_lake_path,
)
from holdfast_lake.lake.table import QUARANTINE, RECORDS, Table
from holdfast_lake.tables.rules import default_mark


def open_store(name: str, lake: LakePath, session: Callable[[], SparkSession]) -> TableStore:
    """Returns the store of a lake. Raises LakeError if it cannot be used here."""
    if name == "delta":
        try:
            from holdfast_lake.lake.stores.delta import DeltaStore
        except ImportError as error:
            raise LakeError(
                f"the store delta needs the package deltalake ({error}): "
                "pip install 'holdfast[spark]'"
            ) from None
        return DeltaStore(lake)
    if name == "iceberg":
        if isinstance(lake, ObjectPath):
            raise LakeError(
                f"the store iceberg needs a directory, and {lake} is in an object store: "
                "choose delta or parquet"
            )
        from holdfast_lake.lake.stores.iceberg import IcebergStore

        return IcebergStore(lake, session)
    return ParquetStore(lake)


NOT_KEPT: Final = ("failondataloss",)
"""Options of the source that hold for one run. A user who skips lost records once does not mean to
skip them always."""
TIME_ZONE: Final = "spark.sql.session.timeZone"
UTC_NAMES: Final = ("UTC", "Etc/UTC", "GMT", "Z", "+00:00")


class Lake:
    """The tables below a directory, which is made at the first write, or in an object store."""

    def __init__(
        self,
        path: str | LakePath,
        *,
        spark: SparkSession | None = None,
        store: str | None = None,
        tables: Sequence[str | Path | Table] = (),
        master: str | None = None,
    ) -> None:
        """Opens a lake. Raises LakeError and TableError.

        `store` is one of STORES. A lake keeps the store it was made with (default parquet).
        `tables` are further tables, as Python files, packages or declarations. The lake keeps files
        and packages with the first run, so later runs need none. Without `spark`, a session is made
        when it is needed, on `master`.
        """
        self.path = location(path).absolute()
        check_lake_path(self.path)
        self.settings = read_settings(self.path)
        self.store_name = store_name(self.path, self.settings, store)
        self._given = [each for each in tables if isinstance(each, Table)]
        self._files = [each for each in tables if not isinstance(each, Table)]
        self._kept = (self.settings.tables if self.settings is not None else None) or []
        self._declared = load_catalog(
            self._files or kept_sources(self.path, self._kept), self._given
        )
        self.catalog = self._as_made()
        self._declarations = [declaration_of(each) for each in self._files] or self._kept
        self._master = master
        self._spark = spark

    @property
    def spark(self) -> SparkSession:
        """The session that reads and writes the tables; started by the first use."""
        if self._spark is None:
            from holdfast_lake.session import lake_session

            self._spark = lake_session(self._master)
        return self._spark

    @spark.setter
    def spark(self, session: SparkSession) -> None:
        """Uses a session of the caller."""
        self._spark = session

    def tables(self) -> list[str]:
        """Returns the names of the tables that have been written, and `quarantine` if there is
        any."""
        written = [name for name in self.catalog.names() if CommitLog(self.path, name).last()]
        return [*written, QUARANTINE] if (self.path / QUARANTINE).is_dir() else written

    def table(self, name: str) -> DataFrame:
        """Returns all rows of a table as of its newest commit.

        Raises LakeError if it was never written, TableError if there is no such table.
        """
        engine = self.engine()
        if name == QUARANTINE:
            return self._quarantine(engine)
        if name != RECORDS:
            self.catalog.table(name)
        commit = usable(engine, name)
        if commit is None:
            raise LakeError(f"table {name} of {self.path} has not been written yet: run it first")
        columns = commit.columns
        if name != RECORDS:
            # A column that was declared since the last run is present and null.
            declared = names_of(stored_columns(self.catalog.table(name)))
            columns = [*columns, *(each for each in declared if each[0] not in dict(columns))]
        return engine.frame(columns, engine.log(name).live(commit.version), name)

    def _quarantine(self, engine: Engine) -> DataFrame:
        columns = names_of(quarantine_columns())
        place = self.path / QUARANTINE
        if isinstance(place, ObjectPath):
            return engine.frame(columns, hive_files(place), QUARANTINE)
        # The metadata of Delta and Iceberg is beside these directories.
        directories = sorted(map(str, place.glob("table=*")))
        if not directories:
            return engine.frame(columns, [], QUARANTINE)
        from holdfast_lake.lake.schema import struct_type

        reader = self.spark.read.schema(struct_type(columns))
        return reader.option("basePath", str(self.path / QUARANTINE)).parquet(*directories)

    def run(
        self,
        what: str | Iterable[str] = "all",
        *,
        source: str | Mapping[str, str] | None = None,
        listener: RunListener | None = None,
    ) -> RunReport:
        """Brings tables up to date: a layer, `all`, or names.

        `source` is where the records come from: `host:adminport[,host:adminport]`, a data
        directory, or options of the data source. The lake remembers it, so it need be given only
        once. Raises LakeError and TableError. Failures of single tables are in the report.
        """
        return self.runner(what, source=source, listener=listener).run_once()

    def runner(
        self,
        what: str | Iterable[str] = "all",
        *,
        source: str | Mapping[str, str] | None = None,
        listener: RunListener | None = None,
        compact_at: int | None = None,
    ) -> Runner:
        """Returns a run that has not begun, for `continuously`. For `compact_at` see Runner."""
        words = [what] if isinstance(what, str) else list(what)
        chosen = self.catalog.chosen(words)
        options = source_options(source) if source is not None else self.source()
        check_source(chosen, options)
        self.check_tables()
        engine = self.writing_engine()
        # A source that the run refuses is forgotten: the lake goes on with the one it has.
        self.remember(self.source() or options)
        return Runner(
            engine, self.catalog, chosen, options, listener, compact_at, self.catalog_updates(),
            accepted=lambda: self.remember(options),
        )  # fmt: skip

    def source_with(self, given: str | None) -> dict[str, str]:
        """Returns the options of a source that may be given, with those that the lake remembers.

        Without its options, a lake of some topics would get all of them. Raises LakeError.
        """
        kept = self.source()
        if given is None:
            return kept
        return {n: v for n, v in kept.items() if n not in ("servers", "path")} | source_options(
            given
        )

    def catalog_updates(self) -> CatalogUpdates:
        """Returns the updates of catalogs that a run of this lake makes."""
        return CatalogUpdates(self.path, self.catalog)

    def rebuild(
        self, name: str | Sequence[str], *, listener: RunListener | None = None
    ) -> RunReport:
        """Removes tables and all tables made from them, and builds them again.

        The lake keeps the given declarations, if others were kept. Raises LakeError and TableError.
        """
        names = self.check_rebuild([name] if isinstance(name, str) else name)
        engine = self.writing_engine()
        with locked(self.path, names):
            # The tables made from others are removed first, so that a crash leaves no table without
            # its source.
            for each in reversed(names):
                engine.store.forget(each)
            self.remember(self.source())
        updates = self.catalog_updates()
        runner = Runner(engine, self.catalog, names, None, listener, catalogs=updates)
        return runner.run_once()

    def check_rebuild(self, names: Sequence[str]) -> list[str]:
        """Returns all tables that are built again with some. Raises LakeError and TableError."""
        if RECORDS in names:
            raise LakeError(
                f"{RECORDS} is not built again: the log may not have all of it any more. Choose "
                "another directory for a new lake"
            )
        for name in names:
            self.catalog.table(name)
        found = {each for name in names for each in self.catalog.derived_from(name)}
        self.check_tables(found)
        return [each for each in self.catalog.names() if each in found]

    def check_tables(self, rebuilt: Collection[str] = ()) -> None:
        """Checks that the given declarations are those that the lake keeps.

        Others are allowed for tables that are not stored, or that are `rebuilt`.
        Raises LakeError, which says what differs and what to do.
        """
        if self.settings is not None and self.settings.unfinished and not rebuilt:
            raise LakeError(
                f"a backfill of {self.path} was interrupted, so some days may be by the old rules: "
                f"run `{self.settings.unfinished}` to its end first"
            )
        mixed = self.redeclared(without=rebuilt)
        if mixed:
            was = ", ".join(each.name for each in self._kept) or "the built-in declarations"
            other = "--tables" if self._files else "the given Table"
            before, after = (
                load_catalog(kept_sources(self.path, self._kept)).tables,
                self.catalog.tables,
            )
            both = [
                (before[name], after[name]) for name in mixed if name in before and name in after
            ]
            told = differences(self.path, self._kept, self._files, both) if self._files else []
            raise LakeError(
                f"{', '.join(mixed)} of {self.path} was made by {was}, and {other} declares it "
                "otherwise, so new rows would not fit the old ones. Run without --tables to go on "
                "as before, or make the rows again: "
                f"`holdfast pipeline rebuild {' '.join(mixed)} --tables FILE`"
                f"{'. Changed: ' if told else ''}{' | '.join(told)}"
            )

    def redeclared(self, without: Collection[str] = ()) -> list[str]:
        """Returns the stored tables that the given declarations declare otherwise than the kept
        ones."""
        if self.settings is None or self.settings.tables is None:
            return []  # a lake of an older version
        sources = kept_sources(self.path, self._kept)
        # Declarations are not kept, so only those of a kept file can differ from it.
        own = {table.name for source in sources for table in load_tables(source)}
        names = self.catalog.names() if self._files else own & {t.name for t in self._given}
        stored = {name for name in names if self._has_read(name)}
        if not stored:
            return []
        before = load_catalog(sources).tables
        return changed_tables(before, self.catalog.tables, stored - set(without))

    def _has_read(self, name: str) -> bool:
        """Returns whether a stored table was made from any rows. Else it may change freely."""
        last = CommitLog(self.path, name).last()
        if last is None or name == RECORDS:
            return last is not None
        source = CommitLog(self.path, self.catalog.table(name).source).last()
        return source is None or source.rows_total > 0 or last.rows_total > 0

    def compact(
        self, what: str | Iterable[str] = "all", *, listener: RunListener | None = None
    ) -> dict[str, int]:
        """Merges the small files of bronze and silver tables: a layer, `all`, or names.

        Returns per table by how many files it has fewer. Raises LakeError and TableError.
        """
        chosen = self._to_compact([what] if isinstance(what, str) else list(what))
        heard = listener or RunListener()
        # Delta and Iceberg need Spark, for its types or its process. Plain files are merged without
        # Java.
        store = (
            self._store() if self.store_name == ParquetStore.name else self.writing_engine().store
        )
        saved = dict.fromkeys(chosen, 0)
        for name in chosen:
            with locked(self.path, [name]):
                log = CommitLog(self.path, name)
                finish(self.path, store, log)
                encodings = encodings_of(self.catalog, name)
                for commit in Compaction(self.path, store, log, encodings, do_nothing).run():
                    saved[name] += len(commit.removed) - len(commit.files)
                    heard.committed(commit, None)
        return saved

    def _to_compact(self, words: Sequence[str]) -> list[str]:
        if not self.settings:
            raise LakeError(f"there is no lake in {self.path} (no {SETTINGS}): run it first")
        gold = [word for word in words if word == "gold" or self.catalog.is_gold(word)]
        if gold:
            raise LakeError(
                f"{', '.join(gold)}: a gold table has one file for each grain already. Choose "
                "bronze, silver, or tables of these"
            )
        chosen = self.catalog.chosen(words)
        return [name for name in chosen if not self.catalog.is_gold(name)]

    def register(self, database: str, names: Sequence[str] = ()) -> list[tuple[str, int]]:
        """Registers tables of a parquet lake in the catalog of the Spark session: all, or some.

        Returns each with its version. Raises LakeError and TableError.
        """
        from holdfast_lake.lake.registration.spark_catalog import register_in_spark

        if self.store_name != ParquetStore.name:
            raise LakeError(
                f"the lake {self.path} is kept as {self.store_name}, of which Spark's own catalog "
                "cannot tell current files from old ones. Register it in an Iceberg catalog: "
                "`holdfast pipeline register --iceberg CATALOG`"
            )
        place, source = directory_of(self.path), self.source()
        return list(register_in_spark(self.spark, place, self.catalog, source, database, names))

    def status(self, *, ask_servers: bool = True, with_hints: bool = True) -> LakeStatus:
        """Returns the state of each table. With `ask_servers` it includes the end of the log, which
        takes a request."""
        return lake_status(
            self.path, self.catalog, self.source(), ask_servers=ask_servers, with_hints=with_hints
        )

    def backlog(self, what: Sequence[str], source: Mapping[str, str]) -> tuple[int | None, str]:
        """Returns how many offsets and rows the chosen tables lack, 0 if a run has nothing to do,
        and a hint about messages that are not stored.

        None if the number is not known. No Spark is started. Raises TableError.
        """
        chosen = self.catalog.chosen(what)
        status = lake_status(self.path, self.catalog, source)
        of_chosen = [table for table in status.tables if table.name in chosen]
        lags = [table.lag for table in of_chosen]
        if None in lags:
            return None, status.qos0_hint
        rows = sum(lag or 0 for lag in lags)
        position, ends = status.offsets, status.ends or {}
        if all(table.version for table in of_chosen) and not (
            status.restored
            or any(position.get(p, 0) > end for p, end in ends.items())
            or any(self._is_changed(name) for name in chosen)
        ):
            return rows, status.qos0_hint
        return max(rows, 1), status.qos0_hint

    def _is_changed(self, name: str) -> bool:
        """Returns whether a run changes a table that has no new rows: it finishes a step, or the
        declaration is another one."""
        work = self.path / WORK / name
        if work.is_dir() and any(work.iterdir()):
            return True
        last = CommitLog(self.path, name).last()
        try:
            return name != RECORDS and bool(check_declared(self.catalog.table(name), last))
        except LakeError:
            return True  # the run reports it

    def source(self) -> dict[str, str]:
        """Returns the last given source of the records, or an empty dict."""
        return dict(self.settings.source) if self.settings is not None else {}

    def engine(self) -> Engine:
        """Returns an engine that can read and write the tables."""
        return Engine(self.spark, self.path, self._store(), do_nothing)

    def writing_engine(self) -> Engine:
        """Returns an engine for a session whose time zone is UTC.

        Hours and days of tables are those of UTC. In another zone the partitions of a grain would
        be wrong. Raises LakeError.
        """
        zone = self.spark.conf.get(TIME_ZONE)
        if zone not in UTC_NAMES:
            raise LakeError(
                f"the Spark session has the time zone {zone}, the tables' hours are UTC's: "
                f'spark.conf.set("{TIME_ZONE}", "UTC")'
            )
        engine = self.engine()
        if isinstance(self.path, ObjectPath):
            check_object_store(self.path)
        engine.store.check()
        return engine

    def _store(self) -> TableStore:
        return open_store(self.store_name, self.path, lambda: self.spark)

    def _as_made(self) -> Catalog:
        """Returns the tables, which are made as the rows that the lake has."""
        is_scaled = self.settings is None or self.settings.is_scaled
        return self._declared if is_scaled else self._declared.unscaled()

    def remember(self, source: Mapping[str, str], unfinished: str | None = None) -> None:
        """Stores the source of the records, which the lake is made from, with its settings.

        `unfinished` is the command of a backfill that begins, or empty at its end.
        """
        kept = {name: value for name, value in source.items() if name.lower() not in NOT_KEPT}
        before = self.settings or LakeSettings(LAKE_FORMAT)
        if unfinished is None:
            unfinished = before.unfinished
        is_new = not self._has_read(READINGS)
        settings = LakeSettings(
            LAKE_FORMAT, self.store_name, kept, self._declarations, before.catalogs, unfinished,
            default_mark() if is_new else before.defaults, is_new or before.is_scaled,
        )  # fmt: skip
        if settings != self.settings:
            keep(self.path, self._files, self._declarations if self._files else [])
            write_settings(self.path, settings, is_new=self.settings is None)
            self.settings = settings
            self.catalog = self._as_made()
            self._kept = self._declarations
