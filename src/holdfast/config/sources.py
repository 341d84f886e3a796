"""Loads a program's settings from file, environment and command line; the later one wins.

- File: TOML, the tables of the program's schema. `include` lists further files, see `_Reader`.
- Environment: `HOLDFAST_TABLE__KEY=value`; two underscores stand for the dot, list entries are
  numbered (`HOLDFAST_LISTENERS__0__PORT=1884`). Text is taken as it is, commas separate the texts
  of a list, everything else is written as in TOML.
- Command line: dotted keys with typed values (`{"listeners.0.port": 1884}`).

Relative paths in values count from the working directory.
"""

import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from errno import EFBIG
from glob import glob
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Struct, field, inspect

from holdfast.config.problem import ConfigError, Problem, shown
from holdfast.config.values import find_type, problems

PREFIX: Final = "HOLDFAST_"
_MOSQUITTO: Final = re.compile(r"^(listener|port|include_dir|password_file|allow_anonymous) ", re.M)
"""A line of Mosquitto's configuration, where a key and its value have no = between them."""
FILE_BYTES_MAX: Final = 16 << 20
"""The most bytes of one file of a configuration."""
FILES_MAX: Final = 100
"""The most files of one configuration."""

Settings = TypeVar("Settings", bound=Struct)
Tree: TypeAlias = dict[str, object]
"""The tables of a file, as TOML names them."""
Overrides: TypeAlias = Mapping[str, object]
"""The values of the command line by dotted key."""


class Sources(Struct):
    """The values that the sources give, by table, and the source of each key."""

    kind: inspect.Type
    """The schema."""
    tree: Tree
    file: str
    origins: dict[str, str] = field(default_factory=dict)

    def origin(self, key: str) -> str:
        """The source of a value in the tree: that of the key, of a key in it, or of the nearest
        table around it."""
        for known, origin in self.origins.items():
            if known.startswith((f"{key}.", f"{key}[")):
                return origin
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self.file


def load_settings(
    schema: type[Settings],
    find_problems: Callable[[Settings], Iterable[Problem]],
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Overrides | None = None,
    *,
    tables: Collection[str] | None = None,
    complete: Callable[[Settings], Settings] = lambda settings: settings,
) -> Settings:
    """The checked settings with every default filled in. Raises `ConfigError`.

    `tables`: the tables that the environment may set; None: all. Variables of other tables belong
    to other programs. `complete` derives the settings that depend on others, before
    `find_problems` checks that they go together.
    """
    sources = read_sources(schema, path, environ, overrides, tables=tables)

    def check(found: Iterable[Problem]) -> None:
        wrong = [f"{sources.origin(key)}: {key}{text}" for key, text in found]
        if wrong:
            raise ConfigError(*wrong)

    check(problems(sources.tree, sources.kind))
    settings = complete(msgspec.convert(sources.tree, schema))
    check(find_problems(settings))
    return settings


def read_sources(
    schema: type[Struct],
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Overrides | None = None,
    *,
    tables: Collection[str] | None = None,
) -> Sources:
    """The values of all sources, not checked yet. Raises `ConfigError` if a source cannot be read.
    The arguments are those of `load_settings`."""
    environ = environ or {}
    kind = inspect.type_info(schema)
    sources = Sources(kind, {}, str(path) if path is not None else "configuration")
    tree, origins = sources.tree, sources.origins
    if path is not None:
        _Reader(tree, origins).read(path)
    for name, text in sorted(environ.items()):
        parts = name.removeprefix(PREFIX).lower().split("__")
        if name.startswith(PREFIX) and len(parts) > 1 and (tables is None or parts[0] in tables):
            value = read_text(find_type(kind, parts), text)
            _put(tree, parts, value, f"environment {name}", origins)
    for dotted, value in (overrides or {}).items():
        _put(tree, dotted.split("."), value, "command line", origins)
    return sources


class _Reader:
    """Reads a file, then those that its top-level `include` lists, in that order.

    An entry of `include` is a file, or a pattern whose matches are read in the order of their
    names. It counts from the directory of the file that has it. A later file wins, and adds its
    array tables ([[listeners]]) to those before.
    """

    def __init__(self, tree: Tree, origins: dict[str, str]) -> None:
        self._tree = tree
        self._origins = origins
        # Each file with the one that includes it, which is None for the first.
        self._included_by: dict[Path, Path | None] = {}

    def read(self, path: Path, by: Path | None = None) -> None:
        """Reads a file and the files that it includes. Raises `ConfigError` that names the file."""
        own = path.resolve()
        if own in self._included_by:
            former = self._included_by[own]
            first = "it is the first file" if former is None else f"{former} includes it too"
            raise ConfigError(f"{by}: include: {path} is included twice: {first}")
        if len(self._included_by) == FILES_MAX:
            raise ConfigError(f"{by}: include: more than {FILES_MAX} files")
        self._included_by[own] = by
        found = _read(path)
        names = found.pop("include", [])
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise ConfigError(f"{path}: include = {shown(names)}: must be a list, each of it text")
        if by is None:
            self._tree.update(found)
        else:
            self._merge(self._tree, found, "", str(path))
        for name in names:
            for each in _matches(path.parent, name):
                self.read(each, path)

    def _merge(self, tree: Tree, other: Tree, prefix: str, origin: str) -> None:
        for name, value in other.items():
            key = f"{prefix}{name}"
            present = tree.get(name)
            if isinstance(value, dict) and isinstance(present, dict):
                self._merge(present, value, f"{key}.", origin)
            elif _has_tables(value) and _has_tables(present):
                for each in cast("list[Tree]", value):
                    self._origins[f"{key}[{len(cast('list[Tree]', present))}]"] = origin
                    cast("list[Tree]", present).append(each)
            else:
                for known in list(self._origins):
                    if known.startswith((f"{key}.", f"{key}[")):
                        del self._origins[known]
                tree[name] = value
                self._origins[key] = origin


def _has_tables(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], dict)


def _matches(directory: Path, name: str) -> list[Path]:
    """The files of an entry of `include`. A pattern may match none."""
    path = directory / name
    if not any(each in name for each in "*?["):
        return [path]
    return [Path(each) for each in sorted(glob(str(path), recursive=True))]


def read_file(path: Path) -> str:
    """The text of a configuration file. Raises `OSError`, also for one above FILE_BYTES_MAX: a
    device such as /dev/zero has no end."""
    with open(path, "rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise OSError(EFBIG, f"more than {FILE_BYTES_MAX} bytes", str(path))
    # Editors on Windows begin a file with a byte order mark, which TOML does not have.
    return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def _read(path: Path) -> Tree:
    text = ""
    try:
        text = read_file(path)
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: byte {error.start} is wrong") from None
    except tomllib.TOMLDecodeError as error:
        hint = ""
        if _MOSQUITTO.search(text):
            hint = "; is it a mosquitto.conf? `holdfast config import` translates it"
        raise ConfigError(f"{path}: not valid TOML: {error}{hint}") from None


def read_text(kind: inspect.Type | None, text: str) -> object:
    """The value that a text stands for, by the type of its key. A text that does not fit stays
    text, so that the check of types reports it with the allowed values."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    match kind:
        case inspect.StrType() | inspect.LiteralType():
            return text
        case inspect.BoolType():
            return {"true": True, "false": False}.get(text.lower(), text)
        case inspect.ListType(item_type=item) if not (
            isinstance(item, inspect.StructType) or text.lstrip().startswith("[")
        ):
            return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(tree: Tree, parts: list[str], value: object, origin: str, origins: dict[str, str]) -> None:
    """Puts one value into the tree, creating the tables on the way. If the file has another type in
    place of a table, that stays: the check of types reports it."""
    key = parts[0]
    node: object = tree.setdefault(parts[0], _empty(parts[1:])) if len(parts) > 1 else tree
    for position, part in enumerate(parts[1:], 1):
        last = position == len(parts) - 1
        if isinstance(node, list) and part.isdecimal():
            index = int(part)
            key += f"[{index}]"
            if index > len(node):
                raise ConfigError(
                    f"{origin}: {key} cannot be set: {parts[0]} has {len(node)} entries"
                )
            if index == len(node):
                node.append(value if last else _empty(parts[position + 1 :]))
            elif last:
                node[index] = value
            node = node[index]
        elif isinstance(node, dict):
            key += f".{part}"
            if last:
                node[part] = value
            else:
                node = node.setdefault(part, _empty(parts[position + 1 :]))
        else:
            return
    if len(parts) == 1:
        tree[key] = value
    origins[key] = origin


def _empty(rest: list[str]) -> object:
    return [] if rest and rest[0].isdecimal() else {}
