"""The settings of a lake, in its file lake.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.pipeline.lake.files.declarations import Declaration
from holdfast.pipeline.lake.files.files import LakeError

SETTINGS: Final = "lake.json"
LAKE_FORMAT: Final = 1
STORES: Final = ("parquet", "delta", "iceberg")


def read_settings(lake: Path) -> dict[str, Any]:
    """Read the settings of a lake. They are empty for one that is not made yet. Raises
    LakeError."""
    path = lake / SETTINGS
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        if lake.exists() and any(lake.iterdir()):
            raise LakeError(
                f"{lake} is no lake: it has files, but no {SETTINGS}. Choose an empty directory"
            ) from None
        return {}
    except NotADirectoryError:
        raise LakeError(f"{lake} is no directory") from None
    except ValueError as error:
        raise LakeError(f"{path} is damaged: {error}") from None
    if not isinstance(settings, dict) or settings.get("format") != LAKE_FORMAT:
        raise LakeError(f"{path} is of another version of the pipeline: use that one")
    return settings


def kept_declarations(settings: Mapping[str, Any]) -> list[Declaration]:
    """Return the declarations that a lake keeps. Raises LakeError."""
    try:
        return msgspec.convert(settings.get("tables", []), list[Declaration])
    except msgspec.ValidationError as error:
        raise LakeError(f"{SETTINGS} is damaged: tables: {error}") from None


def store_name(lake: Path, settings: Mapping[str, Any], wanted: str | None) -> str:
    """Return the store of a lake: its own, else the wanted one. Raises LakeError if they differ."""
    if wanted is not None and wanted not in STORES:
        raise LakeError(f"there is no store {wanted!r}; there are {', '.join(STORES)}")
    there = settings.get("store")
    if there is not None and wanted is not None and there != wanted:
        raise LakeError(f"{lake} is kept as {there}, not {wanted}: choose another directory")
    return str(there or wanted or "parquet")
