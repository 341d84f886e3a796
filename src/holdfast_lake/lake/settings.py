"""Settings of a lake, in its file lake.json, and the declarations of its tables.

    LAKE/_tables/my_tables.py     a copy of a file given with --tables
    LAKE/lake.json                "tables": the names and fingerprints of the files and packages

Rows made by one set of rules and rows made by another do not fit together: the same device has two
names. So a run uses the kept declarations, and a run with others is refused.
"""

import ast
import atexit
import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from types import CodeType, FunctionType
from typing import Final

import msgspec
from msgspec import Struct

from holdfast.client.log.lake.errors import CredentialsError
from holdfast.client.log.lake.files import LakeError, write_atomically, write_new
from holdfast.client.log.lake.objects import LakePath, ObjectPath
from holdfast_lake.lake.table import Table

KEPT: Final = "_tables"
_PLAIN: Final = (str, bytes, int, float, bool, frozenset, type(None))
NO_ROWS: Final = ("description", "unit", "expectations", "is_scaled")
"""Fields of a declaration that make no rows, or that the lake sets."""
DIFFERENCES_SHOWN: Final = 6
"""The most changes that an error shows."""
CHANGE_CHARACTERS: Final = 100
"""The most characters of a line or value that an error shows."""
ANOTHER_FUNCTION: Final = "another function"


class Declaration(Struct, frozen=True):
    """A file or package whose tables a lake has."""

    name: str
    """The name of the file, or of the package."""
    fingerprint: str
    """The hash of the code without comments and layout."""

    @property
    def is_file(self) -> bool:
        """True for a file, of which the lake has a copy."""
        return self.name.endswith(".py")


def declaration_of(source: str | Path) -> Declaration:
    """Returns the declaration of a file or a package."""
    path = Path(source)
    if path.is_file():
        name = path.name if path.suffix == ".py" else f"{path.name}.py"
        return Declaration(name, _hash([path.read_bytes()]))
    found = find_spec(str(source))
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    if not files and found is not None and found.origin is not None:
        files = [Path(found.origin)]
    return Declaration(str(source), _hash(path.read_bytes() for path in files))


def _hash(texts: Iterable[bytes]) -> str:
    hashed = sha256()
    for text in texts:
        try:
            hashed.update(ast.dump(ast.parse(text)).encode())
        except (SyntaxError, ValueError):  # the catalogue reports it
            hashed.update(text)
    return hashed.hexdigest()[:16]


def kept_sources(lake: LakePath, kept: Sequence[Declaration]) -> list[str]:
    """Returns the copies of the kept files, and the kept packages. Raises LakeError.

    Those of a lake in an object store are copied to a temporary directory first.
    """
    return [str(_local(lake / KEPT / each.name)) if each.is_file else each.name for each in kept]


def _local(path: LakePath) -> Path:
    """Returns the path of a kept file on this machine. Raises LakeError if it is missing."""
    try:
        if isinstance(path, ObjectPath):
            copy = _copies() / sha256(str(path.parent).encode()).hexdigest()[:16] / path.name
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
            return copy
        if path.is_file():
            return path
    except FileNotFoundError:
        pass
    raise LakeError(f"{path} is missing: copy the file with the tables there again")


@cache
def _copies() -> Path:
    """Returns the directory of this process for copies, which is removed at its end."""
    place = mkdtemp(prefix="holdfast-tables-")
    atexit.register(rmtree, place, ignore_errors=True)
    return Path(place)


def keep(lake: LakePath, sources: Sequence[str | Path], given: Sequence[Declaration]) -> None:
    """Copies the given files into the lake. Raises LakeError if two have the same name."""
    names = [each.name for each in given]
    if len(set(names)) != len(names):
        raise LakeError(f"two files of --tables have the same name: {', '.join(names)}")
    for source, each in zip(sources, given, strict=True):
        place = lake / KEPT / each.name
        if not each.is_file:
            continue
        if isinstance(place, ObjectPath) or Path(source).resolve() != place.resolve():
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, Path(source).read_bytes())


def differences(
    lake: LakePath,
    kept: Sequence[Declaration],
    sources: Sequence[str | Path],
    tables: Iterable[tuple[Table, Table]],
) -> list[str]:
    """Returns what differs between the kept declarations and given ones of some tables: the fields,
    and lines of the files if a function does."""
    given = {declaration_of(source).name: source for source in sources}
    if len(kept) == len(given) == 1:  # a file with another name takes the place of the kept one
        given = {kept[0].name: sources[0]}
    found = [f"{each.name} is not given" for each in kept if each.name not in given]
    if not found:
        fields_of = (_changes(before, after, before.name) for before, after in tables)
        found = [text.replace(" build rules ", " ") for texts in fields_of for text in texts]
        if not found or any(text.endswith(ANOTHER_FUNCTION) for text in found):
            for each in kept:
                if each.is_file:
                    found += _changed_lines(_local(lake / KEPT / each.name), Path(given[each.name]))
    more = len(found) - DIFFERENCES_SHOWN
    return found[:DIFFERENCES_SHOWN] + ([f"and {more} more"] if more > 0 else [])


def _changes(before: object, after: object, name: str) -> Iterator[str]:
    """Yields the fields in which two declarations differ, with both values."""
    if meaning(before) == meaning(after):
        return
    if is_dataclass(before) and is_dataclass(after) and not isinstance(before, type):
        for part in fields(before):
            if part.name not in NO_ROWS:
                one, other = (getattr(each, part.name, None) for each in (before, after))
                yield from _changes(one, other, f"{name} {part.name}")
    elif isinstance(before, tuple) and isinstance(after, tuple):
        old, new = ({_key(each): each for each in some} for some in (before, after))
        yield from (f"{name} {key} is gone" for key in old if key not in new)
        yield from (f"{name} {key} is new" for key in new if key not in old)
        both = [key for key in old if key in new]
        for key in both:
            yield from _changes(old[key], new[key], f"{name} {key}")
        if both != [key for key in new if key in old]:
            yield f"{name}: another order"
    elif isinstance(before, FunctionType) and isinstance(after, FunctionType):
        yield f"{name}: {ANOTHER_FUNCTION}"
    else:
        yield f"{name}: {_short(repr(before))} -> {_short(repr(after))}"


def _key(part: object) -> str:
    """Returns the name of a rule, a column or a value."""
    return str(getattr(part, "filter", None) or getattr(part, "name", None) or _short(repr(part)))


def _short(text: str) -> str:
    is_long = len(text) > CHANGE_CHARACTERS
    return f"{text[:CHANGE_CHARACTERS]}..." if is_long else text


def changed_tables(
    before: Mapping[str, Table], after: Mapping[str, Table], stored: Collection[str]
) -> list[str]:
    """Returns the stored tables that two catalogues declare differently, in order."""
    return [
        name
        for name in stored
        if (name in before or name in after)
        and (
            name not in before or name not in after or meaning(before[name]) != meaning(after[name])
        )
    ]


def meaning(value: object, seen: tuple[object, ...] = ()) -> object:
    """Returns something that is equal for two declarations that make the same rows.

    A function is its code and constants, with those of the functions and plain values of its own
    file that it uses. Comments, names of files and line numbers do not count.
    """
    if value in seen:
        return "again"
    if isinstance(value, FunctionType):
        own = [value.__globals__.get(name) for name in _names_in(value.__code__)]
        used = [each for each in own if isinstance(each, _PLAIN) or _is_beside(each, value)]
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        inner = (*used, *cells, value.__defaults__ or ())
        return _code(value.__code__), [meaning(each, (*seen, value)) for each in inner]
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, tuple | list):
        return [meaning(each, seen) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, [
            meaning(getattr(value, field.name), seen)
            for field in fields(value)
            if field.name not in NO_ROWS
        ]
    return value if isinstance(value, _PLAIN) else repr(type(value))


def _is_beside(one: object, other: FunctionType) -> bool:
    return isinstance(one, FunctionType) and one.__module__ == other.__module__


def _names_in(code: CodeType) -> list[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [*code.co_names, *(name for each in inner for name in _names_in(each))]


def _code(code: CodeType) -> object:
    constants = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants


def _changed_lines(before: Path, after: Path) -> list[str]:
    one, other = (path.read_text(errors="replace").splitlines() for path in (before, after))
    return [
        _short(line)
        for line in difflib.unified_diff(one, other, n=0, lineterm="")
        if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip()
    ]


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
    defaults: str = ""
    """The mark of the default rules that made all readings (rules.default_mark). Empty: those of a
    version without marks."""
    is_scaled: bool = False
    """True if all readings were made by a version that multiplies numbers by the scales beside
    them. Other lakes go on without."""


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
    """Returns the options of the data source for a text with servers. Raises LakeError for
    another text."""
    if not isinstance(source, str):
        return dict(source)
    if _SERVERS.fullmatch(source.strip()):
        return {"servers": source.strip()}
    raise LakeError(
        f"the source is {source!r}: give host:adminport of the servers, or https://host:adminport"
    )
