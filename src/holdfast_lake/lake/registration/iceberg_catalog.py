"""Tables in an Iceberg catalog (SQL, REST, and others of pyiceberg), over the files of the lake.

No row is copied: the catalog's table lists the same Parquet files. An update compares the files
that the catalog has with those of the newest commit, and makes one snapshot of the difference. So
it may be repeated, skip commits, and go on after any failure. Two updates at the same time cannot
both succeed, because a commit names the snapshot that it follows; the second one compares again.

Spark parses its types of columns in Java, which a registration does not start. So they are parsed
here.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq

from holdfast.client.log.lake.commits import Commit, CommitLog, File
from holdfast.client.log.lake.files import LakeError, readable
from holdfast.client.log.lake.objects import LakePath
from holdfast_lake.lake.catalog import Catalog
from holdfast_lake.lake.schema import (
    NAMES,
    RECORDS_COLUMNS,
    RECORDS_DESCRIPTION,
    stored_columns,
)
from holdfast_lake.lake.stores.store import is_applied
from holdfast_lake.lake.table import RECORDS, Column

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog as PyIcebergCatalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table, Transaction


PREFIX: Final = "holdfast."
"""The begin of all properties that a registration sets."""
VERSION: Final = f"{PREFIX}version"
LINEAGE: Final = f"{PREFIX}lineage"
_UNITS: Final = {"_s": "s", "_ms": "ms", "_us": "us"}
"""The units that the names of columns end with."""
_ORIGIN: Final = ("servers", "path")
"""The options of a source that name a log. Others may be secrets."""


@dataclass(frozen=True)
class ListedTable:
    """One table as of a commit."""

    name: str
    description: str
    columns: tuple[Column, ...]
    partition_by: tuple[str, ...]
    commit: Commit
    files: Sequence[File]
    properties: Mapping[str, str]
    """The properties of the table, each named PREFIX and more."""

    @property
    def lineage(self) -> str:
        """The identity of the table. A rebuilt table has another one."""
        return self.commit.lineage

    @property
    def version(self) -> int:
        """The number of the commit."""
        return self.commit.version


def unit_of(column: Column) -> str:
    """Returns the unit of a column: the declared one, or that of its name; empty if none."""
    found = [unit for ending, unit in _UNITS.items() if column.name.endswith(ending)]
    return column.unit or (found[-1] if found else "")


def comment_of(column: Column) -> str:
    """Returns the description of a column with its unit."""
    unit = unit_of(column)
    return f"{column.description} [{unit}]" if unit else column.description


def newest_commit(lake: LakePath, name: str) -> tuple[CommitLog, Commit | None]:
    """Returns the newest commit of a table whose files are all in their places."""
    log = CommitLog(lake, name)
    last = log.last()
    if last is None or is_applied(lake, last):
        return log, last
    return log, log.read(last.version - 1) if last.version > 1 else None


def listed(
    lake: LakePath, catalog: Catalog, source: Mapping[str, str], name: str
) -> ListedTable | None:
    """Returns a table as of its newest commit. None if it has never been written."""
    log, commit = newest_commit(lake, name)
    if commit is None:
        return None
    if name == RECORDS:
        description, layer, made_from = RECORDS_DESCRIPTION, "bronze", "the log"
        declared: tuple[Column, ...] = RECORDS_COLUMNS
        keys: tuple[str, ...] = ()
    else:
        table = catalog.table(name)
        description, layer, made_from = table.description, table.layer, table.source
        keys = table.keys
        declared = stored_columns(table)
    stored = dict(commit.columns)
    columns = tuple(each for each in declared if each.name in stored)
    origin = {f"{PREFIX}log": source[key] for key in _ORIGIN if key in source}
    properties = {
        "comment": description,
        f"{PREFIX}layer": layer,
        f"{PREFIX}made-from": made_from,
        f"{PREFIX}keys": ",".join(keys),
        f"{PREFIX}lake": str(lake),
        LINEAGE: commit.lineage,
        VERSION: str(commit.version),
        **origin,
        **{f"{PREFIX}unit.{each.name}": unit_of(each) for each in columns if unit_of(each)},
    }
    files = log.live(commit.version)
    return ListedTable(
        name, description, columns, tuple(commit.partition_by), commit, files, properties
    )


_TOKEN: Final = re.compile(r"\s*(`(?:[^`]|``)*`|\w+|[<>(),:])")
_OTHER_NAMES: Final = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "timestamp_ltz": "timestamp",
    "dec": "decimal",
    "numeric": "decimal",
}
NESTING_MAX: Final = 64
"""The most types within one another."""


def schema_of(columns: Sequence[tuple[str, str]]) -> Any:
    """Returns Iceberg's schema of columns, all of them optional. Raises LakeError for a type that
    cannot be read, or that Iceberg lacks."""
    ids = count(1)
    fields = [_field(next(ids), name, _TypeText(name, kind, ids).parse()) for name, kind in columns]
    return {"type": "struct", "schema-id": 0, "fields": fields}


def _field(number: int, name: str, kind: Any) -> Any:
    return {"id": number, "name": name, "required": False, "type": kind}


class _TypeText:
    """The text of one type, read from left to right."""

    def __init__(self, column: str, text: str, ids: Iterator[int]) -> None:
        self.column = column
        self.text = text
        self._ids = ids
        self._tokens = _TOKEN.findall(text)
        if _TOKEN.sub("", text).strip():
            raise self._error()
        self._at = 0

    def parse(self) -> Any:
        """Returns the type. Raises LakeError."""
        found = self._type(0)
        if self._at != len(self._tokens):
            raise self._error()
        return found

    def _error(self) -> LakeError:
        return LakeError(
            f"column {self.column} has the type {self.text}, which Iceberg tables cannot have; "
            f"they can have {', '.join(NAMES)}, decimal, and structs, arrays and maps of these"
        )

    def _next(self) -> str:
        if self._at == len(self._tokens):
            raise self._error()
        self._at += 1
        token: str = self._tokens[self._at - 1]
        return token

    def _expect(self, wanted: str) -> None:
        if self._next() != wanted:
            raise self._error()

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _type(self, depth: int) -> Any:
        if depth > NESTING_MAX:
            raise self._error()
        word = self._next().lower()
        name = _OTHER_NAMES.get(word, word)
        if name == "struct":
            return self._struct(depth)
        if name == "array":
            self._expect("<")
            number, element = next(self._ids), self._type(depth + 1)
            self._expect(">")
            return {
                "type": "list",
                "element-id": number,
                "element-required": False,
                "element": element,
            }
        if name == "map":
            return self._map(depth)
        if name == "decimal":
            return self._decimal()
        if name not in NAMES:
            raise self._error()
        return NAMES[name]

    def _struct(self, depth: int) -> Any:
        self._expect("<")
        fields: list[Any] = []
        while self._peek() != ">":
            if fields:
                self._expect(",")
            name = self._next()
            if name.startswith("`"):
                name = name[1:-1].replace("``", "`")
            if self._peek() == ":":
                self._next()
            number = next(self._ids)
            fields.append(_field(number, name, self._type(depth + 1)))
        self._next()
        return {"type": "struct", "fields": fields}

    def _map(self, depth: int) -> Any:
        self._expect("<")
        key_id, key = next(self._ids), self._type(depth + 1)
        self._expect(",")
        value_id, value = next(self._ids), self._type(depth + 1)
        self._expect(">")
        return {
            "type": "map",
            "key-id": key_id,
            "key": key,
            "value-id": value_id,
            "value-required": False,
            "value": value,
        }

    def _decimal(self) -> str:
        if self._peek() != "(":
            return "decimal(10, 0)"
        self._next()
        precision, scale = self._next(), "0"
        if self._peek() == ",":
            self._next()
            scale = self._next()
        self._expect(")")
        if not (precision.isdigit() and scale.isdigit()):
            raise self._error()
        return f"decimal({int(precision)}, {int(scale)})"


ATTEMPTS: Final = 5
"""The most attempts of an update whose table another program changes at the same time."""
METADATA: Final = "_iceberg"
"""The directory in the lake for the metadata of tables in a catalog without a warehouse."""
NAME_MAPPING: Final = "schema.name-mapping.default"
PROPERTIES: Final = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
    "commit.retry.num-retries": "0",
}
"""The properties of a new table. pyiceberg must not repeat a commit: it would add the same files to
a snapshot that another update has made in between, which has them already."""


class IcebergCatalog:
    """A connection to an Iceberg catalog, for the tables of one lake in one namespace."""

    def __init__(
        self, lake: LakePath, name: str, namespace: str, properties: Mapping[str, str]
    ) -> None:
        """Connects. Raises LakeError.

        pyiceberg looks up what `properties` do not have in its own configuration: ~/.pyiceberg.yaml
        and the variables PYICEBERG_CATALOG__<NAME>__<PROPERTY>.
        """
        self.lake = lake
        self.name = name
        self.namespace = namespace
        try:
            from pyiceberg.catalog import load_catalog
        except ImportError as error:
            raise LakeError(
                f"an Iceberg catalog needs the package pyiceberg ({error}): "
                "pip install 'holdfast[iceberg]'"
            ) from None
        given = {**store_properties(lake), **properties}
        self._catalog: PyIcebergCatalog = self._try(lambda: load_catalog(name, **given))

    def _try(self, work: Callable[[], Any]) -> Any:
        """Calls the catalog. Raises LakeError for whatever it raises."""
        try:
            return work()
        except LakeError:
            raise
        except Exception as error:
            text = str(error).strip().splitlines()
            what = text[0] if text else "no text"
            if what.startswith("URI missing"):
                what = "it is not known. Give --property uri=..., or put it into ~/.pyiceberg.yaml"
                raise LakeError(f"catalog {self.name}: {what}") from error
            raise LakeError(f"catalog {self.name}: {type(error).__name__}: {what}") from error

    def update(self, table: ListedTable) -> bool:
        """Brings the catalog's table to the commit of a listed one. False if it had that already.

        Raises LakeError.
        """
        return bool(self._try(lambda: self._update(table)))

    def remove(self, name: str) -> bool:
        """Removes a table from the catalog, and no file. False if it is not there.

        Raises LakeError, also for a table that is not of this lake.
        """
        return bool(self._try(lambda: self._remove(name)))

    def _remove(self, name: str) -> bool:
        if is_there := self._has_own(name):
            self._catalog.drop_table((self.namespace, name))
        return is_there

    def has_own(self, name: str) -> bool:
        """Returns whether the lake has a table of this name there. Raises LakeError, also for a
        table that is not of this lake."""
        return bool(self._try(lambda: self._has_own(name)))

    def _has_own(self, name: str) -> bool:
        if is_there := self._catalog.table_exists((self.namespace, name)):
            self._check_own(self._catalog.load_table((self.namespace, name)))
        return bool(is_there)

    def _check_own(self, table: "Table") -> None:
        owner = table.properties.get(f"{PREFIX}lake")
        if owner != str(self.lake):
            whose = f"of the lake {owner}" if owner else "made by another program"
            raise LakeError(
                f"table {'.'.join(table.name())} of the catalog {self.name} is {whose}, not of "
                f"{self.lake}: choose another --namespace"
            )

    def _update(self, listed: ListedTable) -> bool:
        from pyiceberg.exceptions import CommitFailedException

        for attempt in range(1, ATTEMPTS + 1):
            table = self._open(listed)
            self._check_own(table)
            has = table.properties
            if has.get(LINEAGE) == listed.lineage and int(has[VERSION]) >= listed.version:
                return False
            try:
                with table.transaction() as transaction:
                    self._change(transaction, listed)
                return True
            except CommitFailedException:
                if attempt == ATTEMPTS:
                    raise
        return False

    def _open(self, listed: ListedTable) -> "Table":
        """Returns the catalog's table, and makes it if needed. A made one is of version 0."""
        from pyiceberg.exceptions import TableAlreadyExistsError
        from pyiceberg.partitioning import PartitionField, PartitionSpec
        from pyiceberg.transforms import IdentityTransform

        identifier = (self.namespace, listed.name)
        if self._catalog.table_exists(identifier):
            return self._catalog.load_table(identifier)
        self._catalog.create_namespace_if_not_exists(self.namespace)
        schema = _schema(listed)
        fields = [
            PartitionField(
                schema.find_field(name).field_id, 1000 + index, IdentityTransform(), name
            )
            for index, name in enumerate(listed.partition_by)
        ]
        location = None
        if not self._catalog.properties.get("warehouse") and not self._is_rest():
            place = self.lake / METADATA / self.name / self.namespace / listed.name
            location = _uri(place)
        properties = {**PROPERTIES, **listed.properties, VERSION: "0"}
        try:
            return self._catalog.create_table(
                identifier, schema, location, PartitionSpec(*fields), properties=properties
            )
        except TableAlreadyExistsError:  # another update has just made it
            return self._catalog.load_table(identifier)

    def _is_rest(self) -> bool:
        """Returns whether the catalog chooses the places of metadata itself."""
        return type(self._catalog).__name__ == "RestCatalog"

    def _change(self, transaction: "Transaction", listed: ListedTable) -> None:
        """Puts the difference of columns, files and properties into a transaction."""
        table = transaction._table
        there = {task.file.file_path: task.file for task in table.scan().plan_files()}
        _add_columns(transaction, listed)
        metadata = transaction.table_metadata
        schema = metadata.schema()
        wanted = {_uri(self.lake / file.path): file for file in listed.files}
        has = table.properties
        upto = int(has[VERSION]) if has.get(LINEAGE) == listed.lineage else 0
        gone = [data for path, data in there.items() if not _is_same(data, wanted.get(path), upto)]
        new = [(path, f) for path, f in wanted.items() if not _is_same(there.get(path), f, upto)]
        transaction.set_properties(
            {**listed.properties, NAME_MAPPING: schema.name_mapping.model_dump_json()}
        )
        stale = [name for name in has if name.startswith(PREFIX) and name not in listed.properties]
        if stale:
            transaction.remove_properties(*stale)
        if not gone and not new:
            return
        told = {VERSION: str(listed.version), LINEAGE: listed.lineage}
        snapshot = transaction.update_snapshot(snapshot_properties=told)
        with snapshot.overwrite() if gone else snapshot.merge_append() as update:
            for data in gone:
                update.delete_data_file(data)
            for path, file in new:
                footer = pq.read_metadata(readable(self.lake / file.path))
                update.append_data_file(_data_file(footer, metadata, listed, path, file))


def _uri(path: LakePath) -> str:
    """Returns a name of the lake as Iceberg's metadata has it."""
    return f"file://{path}" if isinstance(path, Path) else str(path)


def store_properties(lake: LakePath) -> dict[str, str]:
    """Returns what pyiceberg must know of the object store of a lake. Like the lake, it takes the
    credentials from the environment."""
    names = {
        "s3.endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "s3.region": ("AWS_REGION",),
    }
    found = {
        name: os.environ[each]
        for name, variables in names.items()
        for each in reversed(variables)
        if each in os.environ
    }
    return {} if isinstance(lake, Path) else found


def _is_same(data: "DataFile | None", file: File | None, upto: int) -> bool:
    """Returns whether an entry of the catalog, which is at version `upto`, is of this file.

    A gold file of a parquet lake is replaced by a later one at the same path. It may have the same
    size, but other bounds.
    """
    return (
        data is not None
        and file is not None
        and file.version <= upto
        and data.file_size_in_bytes == file.bytes
        and data.record_count == file.rows
    )


def _schema(listed: ListedTable) -> "Schema":
    from pyiceberg.schema import Schema

    columns = [(column.name, column.type) for column in listed.columns]
    schema = Schema.model_validate(schema_of(columns))
    docs = {column.name: comment_of(column) for column in listed.columns}
    fields = [field.model_copy(update={"doc": docs[field.name]}) for field in schema.fields]
    return Schema(*fields, schema_id=schema.schema_id)


def _add_columns(transaction: "Transaction", listed: ListedTable) -> None:
    """Adds columns that the catalog's table lacks, and updates the comments."""
    there = {field.name: field for field in transaction.table_metadata.schema().fields}
    wanted = _schema(listed)
    changes = [field for field in wanted.fields if field.name not in there]
    comments = [f for f in wanted.fields if f.name in there and there[f.name].doc != f.doc]
    if not changes and not comments:
        return
    with transaction.update_schema() as update:
        for field in changes:
            update.add_column(field.name, field.field_type, doc=field.doc)
        for field in comments:
            update.update_column(field.name, doc=field.doc)


def _data_file(
    footer: Any, metadata: Any, listed: ListedTable, path: str, file: File
) -> "DataFile":
    """Returns the catalog's entry of a file, with counts and bounds from its footer."""
    from pyiceberg.conversions import partition_to_py
    from pyiceberg.io.pyarrow import (
        compute_statistics_plan,
        data_file_statistics_from_parquet_metadata,
        parquet_path_to_id_mapping,
    )
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.typedef import Record
    from pyiceberg.types import PrimitiveType

    schema = metadata.schema()
    statistics = data_file_statistics_from_parquet_metadata(
        parquet_metadata=footer,
        stats_columns=compute_statistics_plan(schema, metadata.properties),
        parquet_column_mapping=parquet_path_to_id_mapping(schema),
    )
    values: list[Any] = []
    for name in listed.partition_by:
        kind, text = schema.find_type(name), file.partition[name]
        assert isinstance(kind, PrimitiveType)
        values.append(None if text is None else _partition_value(kind, text, partition_to_py))
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(*values),
        file_size_in_bytes=file.bytes,
        sort_order_id=None,
        spec_id=metadata.default_spec_id,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )


def _partition_value(kind: Any, text: str, parse: Callable[[Any, str], Any]) -> Any:
    from pyiceberg.types import DateType
    from pyiceberg.utils.datetime import date_str_to_days

    return date_str_to_days(text) if isinstance(kind, DateType) else parse(kind, text)
