"""Spark's types of columns in Iceberg's JSON form, read without Spark.

Spark parses its types in Java, which a registration does not start.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final

from holdfast.pipeline.lake.files.files import LakeError
from holdfast.pipeline.lake.stores.iceberg_schema import NAMES

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
