"""Each setting of a broker with its value, its source, and what the schema says about it."""

import ast
import inspect as python_inspect
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec
from msgspec import Struct, inspect

from holdfast.addresses import without_query
from holdfast.config.load import load
from holdfast.config.schema import Config
from holdfast.config.sources import PREFIX, Overrides, read_sources
from holdfast.config.values import all_keys, allowed, find_type

DEFAULT: Final = "default"
RESOLVED: Final = "resolved from other settings"


class Setting(Struct, frozen=True):
    """One setting. `key` has an index for each list: listeners[0].port."""

    key: str
    value: object
    origin: str
    is_default: bool


class Explanation(Struct, frozen=True):
    """A key of the schema. `settings` are its values: one per listener for a listener's key."""

    key: str
    settings: list[Setting]
    default: object
    allowed: str
    text: str
    variable: str


class NoSuchKey(ValueError):
    """A key that the schema does not have. The text names a similar one, if there is one."""


def settings_of(
    path: Path | None, environ: Mapping[str, str], overrides: Overrides
) -> list[Setting]:
    """All settings in the order of the schema. Raises `ConfigError`."""
    config = load(path, environ, overrides)
    defaults = {
        _without_index(key): value for key, value in _leaves("", msgspec.to_builtins(Config()))
    }
    sources = read_sources(Config, path, environ, overrides)
    found: list[Setting] = []
    for key, value in _leaves("", msgspec.to_builtins(config)):
        given, is_given = _find(sources.tree, key)
        default = defaults.get(_without_index(key))
        is_resolved = key == "security.allow_anonymous" or (
            key.endswith(".allowed_origins") and value != default
        )
        if not is_given:
            origin = RESOLVED if is_resolved else DEFAULT
        else:
            origin = sources.origin(key) if given == value else RESOLVED
        is_default = default == value or origin == DEFAULT
        # Shown to every viewer of the admin port.
        shown = without_query(value) if isinstance(value, str) else value
        found.append(Setting(key, shown, origin, is_default))
    return found


def explain(
    key: str, path: Path | None, environ: Mapping[str, str], overrides: Overrides
) -> Explanation:
    """One key. Raises `NoSuchKey` and `ConfigError`."""
    # listeners.1.port, as in the variables of the environment, is listeners[1].port.
    key = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", key)
    plain = _without_index(key)
    kind = inspect.type_info(Config)
    known = list(all_keys(kind))
    if plain not in known:
        close = get_close_matches(plain, known, 1, 0.6)
        hint = f"did you mean {close[0]}?" if close else "`holdfast config show` lists all keys"
        raise NoSuchKey(f"{key}: there is no such key; {hint}")
    parts = plain.split(".")
    if parts[0] == "listeners" and len(parts) > 1:
        index = re.search(r"\[(\d+)\]", key)
        parts.insert(1, index[1] if index else "0")
    found = find_type(kind, parts)
    assert found is not None
    settings = [
        each
        for each in settings_of(path, environ, overrides)
        if key in (each.key, _without_index(each.key))
        or each.key.startswith((f"{plain}.", f"{plain}["))
    ]
    text, default = _documented(plain)
    variable = PREFIX + "__".join(parts).upper()
    return Explanation(plain, settings, default, allowed(found), text, variable)


def _without_index(key: str) -> str:
    return ".".join(part.partition("[")[0] for part in key.split("."))


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), each)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, each in enumerate(value):
            yield from _leaves(f"{key}[{index}]", each)
    else:
        yield key, value


def _find(tree: object, key: str) -> tuple[object, bool]:
    """The value of a key in the sources, and whether there is one."""
    for part in key.replace("[", ".").replace("]", "").split("."):
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None, False
    return tree, True


def _documented(key: str) -> tuple[str, object]:
    """The schema's text about a key, and the default value."""
    owner: type[msgspec.Struct] = Config
    *tables, name = key.split(".")
    for table in tables:
        kind = {each.name: each.type for each in inspect.type_info(owner).fields}[table]  # type: ignore[attr-defined]
        while not isinstance(kind, inspect.StructType):
            kind = kind.item_type if isinstance(kind, inspect.ListType) else kind.types[0]
        owner = kind.cls
    fields = {each.name: each for each in msgspec.structs.fields(owner)}
    default = fields[name].default
    if default is msgspec.NODEFAULT:
        factory = fields[name].default_factory
        default = msgspec.to_builtins(factory()) if callable(factory) else None
    module = python_inspect.getmodule(owner)
    text = "" if module is None else _texts(module).get((owner.__name__, name), "")
    return text, default


def _texts(module: ModuleType) -> dict[tuple[str, str], str]:
    """The docstring below each field of the module's classes."""
    found: dict[tuple[str, str], str] = {}
    for owner in ast.parse(python_inspect.getsource(module)).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for before, after in zip(owner.body, owner.body[1:], strict=False):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                text = python_inspect.cleandoc(str(after.value.value))
                found[owner.name, before.target.id] = " ".join(text.split())
    return found
