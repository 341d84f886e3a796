"""Registers a lake's tables in catalogs, and updates them after commits."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from holdfast.client.log.lake.commits import CommitLog
from holdfast.client.log.lake.files import LakeError
from holdfast.client.log.lake.objects import LakePath
from holdfast_lake.lake.catalog import Catalog
from holdfast_lake.lake.registration.iceberg_catalog import IcebergCatalog, listed
from holdfast_lake.lake.settings import (
    SETTINGS,
    LakeSettings,
    Registration,
    read_settings,
    write_settings,
)

_SECRET: Final = re.compile(r"secret|token|password|credential|access-key", re.IGNORECASE)
NAMESPACE: Final = "holdfast"
"""The namespace of the tables in a catalog, unless the user gives another one."""


def register(lake: LakePath, catalog: Catalog, wanted: Registration) -> Iterator[tuple[str, int]]:
    """Registers tables in an Iceberg catalog, beside those that are there, and lets the lake
    remember it.

    Yields each table with its version in the catalog. Raises LakeError and TableError.
    """
    check_properties(wanted)
    for name in wanted.tables:
        if name not in catalog.names():
            catalog.table(name)
    settings = _settings(lake)
    stored = _stored(settings, wanted)
    if stored is not None:
        both = [*stored.tables, *(name for name in wanted.tables if name not in stored.tables)]
        wanted = msgspec.structs.replace(
            wanted,
            properties={**stored.properties, **wanted.properties},
            tables=both if stored.tables and wanted.tables else [],
        )
    connection = connect(lake, wanted)
    # A namespace that is refused is not remembered: each later run would fail because of it.
    for name in wanted.tables or catalog.names():
        connection.has_own(name)
    _remember(lake, settings, wanted, [wanted])
    yield from _update_all(lake, catalog, settings.source, wanted, connection)


def unregister(
    lake: LakePath, catalog: Catalog, wanted: Registration
) -> Iterator[tuple[str, bool]]:
    """Removes tables of a lake from an Iceberg catalog: some, or all, which forgets the catalog.

    Yields each table and whether it was there. No file is removed. Raises LakeError.
    """
    settings = _settings(lake)
    stored = _stored(settings, wanted) or wanted
    given = {**stored.properties, **wanted.properties}
    connection = connect(lake, msgspec.structs.replace(stored, properties=given))
    registered = stored.tables or catalog.names()
    removed = wanted.tables or registered
    rest = [name for name in registered if name not in removed]
    # The lake forgets a table first. Otherwise a run in between would register it again.
    left = msgspec.structs.replace(stored, tables=rest)
    _remember(lake, settings, wanted, [left] if rest else [])
    for name in removed:
        yield name, connection.remove(name)


def _stored(settings: LakeSettings, wanted: Registration) -> Registration | None:
    found = [each for each in settings.catalogs if _is_same(each, wanted)]
    return found[0] if found else None


def _remember(
    lake: LakePath, settings: LakeSettings, wanted: Registration, now: Sequence[Registration]
) -> None:
    """Stores what the lake has of the catalog and namespace of a registration."""
    others = [each for each in settings.catalogs if not _is_same(each, wanted)]
    changed = msgspec.structs.replace(settings, catalogs=[*others, *now])
    if changed != settings:
        write_settings(lake, changed, is_new=False)


def _settings(lake: LakePath) -> LakeSettings:
    settings = read_settings(lake)
    if settings is None:
        raise LakeError(f"there is no lake in {lake} (no {SETTINGS}): run the pipeline first")
    return settings


def _is_same(one: Registration, other: Registration) -> bool:
    return (one.name, one.namespace) == (other.name, other.namespace)


def connect(lake: LakePath, registration: Registration) -> IcebergCatalog:
    """Connects to the catalog of a registration. Raises LakeError."""
    return IcebergCatalog(lake, registration.name, registration.namespace, registration.properties)


def check_properties(registration: Registration) -> None:
    """Checks that the properties of a registration are no secrets. Raises LakeError.

    The lake keeps them in a file that others may read.
    """
    for name, value in registration.properties.items():
        if _SECRET.search(name) or urlsplit(value).password is not None:
            variable = re.sub(r"[.-]", lambda m: "__" if m[0] == "." else "_", name).upper()
            raise LakeError(
                f"--property {name} has a secret, which a lake does not keep. Put it into "
                f"~/.pyiceberg.yaml, or into the variable PYICEBERG_CATALOG__"
                f"{registration.name.upper()}__{variable}"
            )


def _update_all(
    lake: LakePath,
    catalog: Catalog,
    source: Mapping[str, str],
    registration: Registration,
    connection: IcebergCatalog,
) -> Iterator[tuple[str, int]]:
    for name in registration.tables or catalog.names():
        table = listed(lake, catalog, source, name)
        if table is not None:
            connection.update(table)
            yield name, table.version


class CatalogUpdates:
    """The updates of the catalogs of a lake, by its runs. It remembers what each catalog has."""

    def __init__(self, lake: LakePath, catalog: Catalog) -> None:
        self.lake = lake
        self.catalog = catalog
        self._has: dict[tuple[str, str], Sequence[tuple[str, int]]] = {}

    def update(self) -> dict[str, BaseException]:
        """Brings all catalogs to the newest commits, and returns the errors by catalog.

        A catalog that fails does not stop the run: the next update makes up for it.
        """
        settings = read_settings(self.lake)
        errors: dict[str, BaseException] = {}
        for each in settings.catalogs if settings is not None else []:
            key = (each.name, each.namespace)
            now = self._versions(each.tables or self.catalog.names())
            if self._has.get(key) == now:
                continue
            assert settings is not None
            try:
                connection = connect(self.lake, each)
                for _ in _update_all(self.lake, self.catalog, settings.source, each, connection):
                    pass
                self._has[key] = now
            except Exception as error:  # noqa: BLE001 - a catalog must not stop tables
                errors[f"catalog {each.name}"] = error
        return errors

    def _versions(self, names: Sequence[str]) -> list[tuple[str, int]]:
        last = [(name, CommitLog(self.lake, name).last()) for name in names]
        return [(name, commit.version) for name, commit in last if commit is not None]
