"""Settings of a lake, in its file lake.json."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from holdfast.pipeline.lake.files.declarations import Declaration
from holdfast.pipeline.lake.files.errors import CredentialsError
from holdfast.pipeline.lake.files.files import LakeError, write_atomically, write_new
from holdfast.pipeline.lake.objects.paths import LakePath

SETTINGS: Final = "lake.json"
LAKE_FORMAT: Final = 1
STORES: Final = ("parquet", "delta", "iceberg")
_SERVERS: Final = re.compile(
    r"(https?://)?(\[[^\]]+\]|[^\s/,\[\]]+):\d{1,5}"
    r"(\s*,\s*(https?://)?(\[[^\]]+\]|[^\s/,\[\]]+):\d{1,5})*"
)


class Registration(msgspec.Struct, frozen=True, omit_defaults=True):
    """An Iceberg catalog that runs keep up to date. It has no secrets."""

    name: str
    """The name of the catalog, as in ~/.pyiceberg.yaml."""
    namespace: str
    properties: dict[str, str] = {}
    """Further properties of pyiceberg, such as `uri`."""
    tables: list[str] = []
    """The tables that are registered. Empty: all."""


class LakeSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file lake.json."""

    format: int
    store: str | None = None
    source: dict[str, str] = {}
    """The options of the last given source of the records."""
    tables: list[Declaration] | None = None
    """The kept declarations. None in a lake of an older version."""
    catalogs: list[Registration] = []
    """The catalogs in which tables are registered."""
    unfinished: str = ""
    """The command of a backfill by other declarations, which has begun and not ended."""


def read_settings(lake: LakePath) -> LakeSettings | None:
    """Reads the settings of a lake. None for one that is not made yet. Raises LakeError.

    A first run that was killed may leave names with a dot or an underscore, and no settings.
    """
    path = lake / SETTINGS
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if lake.is_dir() and any(each.name[:1] not in "._" for each in lake.iterdir()):
            raise LakeError(
                f"{lake} is no lake: it has files, but no {SETTINGS}. Choose an empty directory"
            ) from None
        _check_outside(lake)
        return None
    except NotADirectoryError:
        raise LakeError(f"{lake} is no directory") from None
    try:
        # Another version may have other fields.
        if msgspec.json.decode(text, type=_Version).format == LAKE_FORMAT:
            return msgspec.json.decode(text, type=LakeSettings)
    except msgspec.DecodeError as error:
        raise LakeError(f"{path} is damaged: {error}") from None
    raise LakeError(f"{path} is of another version of the pipeline: use that one")


def _check_outside(lake: LakePath) -> None:
    """Checks that a new lake is not inside another one. Raises LakeError."""
    above = lake.parent
    with suppress(CredentialsError):  # these may be for the lake's own names only
        while above.name:
            if (above / SETTINGS).exists():
                raise LakeError(f"{lake} is inside the lake {above}: choose a place outside of it")
            above = above.parent


class _Version(msgspec.Struct):
    format: int = 0


def write_settings(lake: LakePath, settings: LakeSettings, *, is_new: bool = False) -> None:
    """Writes the settings of a lake, and makes its directory if needed.

    Raises LakeError if a new lake has been made by another run in the meantime.
    """
    lake.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(settings), indent=2)
    if not is_new:
        write_atomically(lake / SETTINGS, text + b"\n")
        return
    try:
        write_new(lake / SETTINGS, text + b"\n")
    except FileExistsError:
        there = read_settings(lake)
        if there is None or msgspec.structs.astuple(there) != msgspec.structs.astuple(settings):
            raise LakeError(
                f"another run has just made the lake {lake} with other settings: run again"
            ) from None


def store_name(lake: LakePath, settings: LakeSettings | None, wanted: str | None) -> str:
    """Returns a lake's store: its own, else the wanted one. Raises LakeError if they differ."""
    if wanted is not None and wanted not in STORES:
        raise LakeError(f"there is no store {wanted!r}; there are {', '.join(STORES)}")
    there = settings.store if settings is not None else None
    if there is not None and wanted is not None and there != wanted:
        raise LakeError(f"{lake} is kept as {there}, not {wanted}: choose another directory")
    return there or wanted or "parquet"


def source_options(source: str | Mapping[str, str]) -> dict[str, str]:
    """Returns the options of the data source for a text: servers, or the path of a data
    directory. Raises LakeError for another URL than https://host:port."""
    if not isinstance(source, str):
        return dict(source)
    if _SERVERS.fullmatch(source.strip()):
        return {"servers": source.strip()}
    if "://" in source:
        raise LakeError(
            f"the source {source} is a URL: give host:adminport of the servers, or"
            " https://host:adminport, or the path of a data directory"
        )
    return {"path": str(Path(source).absolute())}
