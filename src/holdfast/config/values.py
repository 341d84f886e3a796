"""Checks values against the types and ranges of a schema.

A schema is the msgspec Struct of a program's settings. Every problem becomes one line with the key,
the value and the allowed values.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from math import isfinite
from re import search

from msgspec import inspect

from holdfast.config.problem import Problem, shown


def allowed(kind: inspect.Type) -> str:
    """The allowed values of a type: the end of "must be ..."."""
    match kind:
        case inspect.Metadata(extra_json_schema={"description": str(text)}):
            return text
        case inspect.IntType(ge=low, le=high):
            if high is None or high >= 1 << 62:
                return f"a whole number, {low} or more"
            return f"a whole number from {low} to {high}"
        case inspect.FloatType(gt=above, ge=low, le=high):
            return f"a number {f'above {above}' if low is None else f'from {low}'} up to {high}"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType(min_length=shortest):
            return "text that is not empty" if shortest else "text"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(sorted(shown(value) for value in values))
        case inspect.ListType(item_type=inspect.StructType()):
            return "an array of tables, written as [[...]]"
        case inspect.ListType(item_type=item):
            return f"a list, each of it {allowed(item)}"
        case inspect.UnionType(types=types):
            return allowed(types[0])
    return "a table"


def find_type(kind: inspect.Type, path: list[str]) -> inspect.Type | None:
    """The type of the value at a path ("listeners", "0", "port") of a schema, or None if there is
    no such key."""
    for part in path:
        kind = _table(kind)
        if isinstance(kind, inspect.StructType):
            fields = {field.name: field.type for field in kind.fields}
            if part not in fields:
                return None
            kind = fields[part]
        elif isinstance(kind, inspect.ListType) and part.isdecimal():
            kind = kind.item_type
        else:
            return None
    return kind


def problems(value: object, schema: inspect.Type) -> Iterator[Problem]:
    """The values in a tree that its schema does not allow."""
    yield from _problems(value, schema, "", schema)


def _problems(
    value: object, kind: inspect.Type, key: str, schema: inspect.Type
) -> Iterator[Problem]:
    kind = _table(kind)
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        types = {field.name: field.type for field in kind.fields}
        for name, item in value.items():
            inner = f"{key}.{name}" if key else str(name)
            if name in types:
                yield from _problems(item, types[name], inner, schema)
            else:
                # The value is left out, because it may be a secret under a misspelt name.
                yield inner, f": there is no such key; {_nearest(inner, kind, schema)}"
    elif isinstance(kind, inspect.ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _problems(item, kind.item_type, f"{key}[{index}]", schema)
    elif not _fits(value, kind):
        yield key, f" = {shown(value)}: must be {allowed(kind)}"


def _table(kind: inspect.Type) -> inspect.Type:
    """The table type of a table that may be missing."""
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            if isinstance(one, inspect.StructType):
                return one
    return kind


def _fits(value: object, kind: inspect.Type) -> bool:
    match kind:
        case inspect.Metadata(type=inner):
            return _fits(value, inner)
        case inspect.UnionType(types=types):
            return any(_fits(value, one) for one in types)
        case inspect.LiteralType(values=values):
            return isinstance(value, str) and value in values
        case inspect.StrType(min_length=shortest, pattern=pattern):
            return (
                isinstance(value, str)
                and len(value) >= (shortest or 0)
                and "\x00" not in value
                and (pattern is None or search(pattern, value) is not None)
            )
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType(ge=low, le=high):
            return type(value) is int and _in_range(value, None, low, high)
        case inspect.FloatType(gt=above, ge=low, le=high):
            return type(value) in (int, float) and _in_range(value, above, low, high)  # type: ignore[arg-type]
    return False


def _in_range(value: float, above: float | None, low: float | None, high: float | None) -> bool:
    return (
        isfinite(value)
        and (above is None or value > above)
        and (low is None or value >= low)
        and (high is None or value <= high)
    )


def _nearest(key: str, kind: inspect.StructType, schema: inspect.Type) -> str:
    section, dot, name = key.rpartition(".")
    known = [field.name for field in kind.fields]
    close = get_close_matches(name, known, 1, 0.6)
    if close:
        return f"did you mean {section}{dot}{close[0]}?"
    elsewhere = [key for key in all_keys(schema) if key.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"known here: {', '.join(known)}"


def all_keys(schema: inspect.Type, prefix: str = "") -> Iterator[str]:
    """The keys of a schema that can be set, dotted, sections before their contents."""
    kind = _table(schema.item_type if isinstance(schema, inspect.ListType) else schema)
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield prefix + field.name
            yield from all_keys(field.type, f"{prefix}{field.name}.")
