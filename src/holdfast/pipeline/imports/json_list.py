"""Yields the items of a JSON list, one by one: of the text only a part is in memory."""

import json
import re
from collections.abc import Iterator
from io import TextIOWrapper
from typing import Final

READ_CHARACTERS: Final = 1 << 18
"""The characters that are read at a time."""
CUT_MAX: Final = 16
"""The characters before the end of a text among which the parser fails because the text goes on.
An unterminated string is the exception: it fails at its begin."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_PARSER: Final = json.JSONDecoder(parse_int=str, parse_float=str, strict=False)
"""A parser that finds the end of an item. Its values are not used: the reader of lines decodes the
item again, so that a list and lines have the same bad rows."""


class BadList(ValueError):
    """A text that is no JSON list. The text says where it is wrong."""


class JsonList:
    """A JSON list that is read as a stream."""

    def __init__(self, file: TextIOWrapper, characters_max: int) -> None:
        """`characters_max`: the longest item."""
        self._file = file
        self._characters_max = characters_max
        self._text = ""
        self._at = 0

    def items(self) -> Iterator[str]:
        """Yields the JSON text of each item. Raises BadList."""
        number = 0
        self._skip("[", number)
        is_empty = self._next() == "]"
        while not is_empty:
            number += 1
            yield self._item(number)
            if self._next() == "]":
                break
            self._skip(",", number)
        self._skip("]", number)
        if self._next():
            raise BadList("text follows the list")

    def _item(self, number: int) -> str:
        self._next()
        while True:
            end, error = self._end()
            if (len(self._text) if end is None else end) - self._at > self._characters_max:
                raise BadList(f"{number}: an item of more than {self._characters_max} characters")
            # A number may go on behind the end of the text.
            if end is not None and end < len(self._text):
                break
            is_cut = error is None or error.msg.startswith("Unterminated string")
            is_cut = is_cut or (error is not None and error.pos > len(self._text) - CUT_MAX)
            if not is_cut or not self._more():
                raise BadList(f"{number}: {error.msg if error else 'it has no end'}")
        begin, self._at = self._at, end
        return self._text[begin:end]

    def _end(self) -> tuple[int | None, json.JSONDecodeError | None]:
        try:
            return _PARSER.raw_decode(self._text, self._at)[1], None
        except json.JSONDecodeError as error:
            return None, error
        except RecursionError:
            raise BadList("an item has too many levels") from None

    def _skip(self, character: str, number: int) -> None:
        found = self._next()
        if found != character:
            raise BadList(f"{found or 'the end'} in place of {character} after item {number}")
        self._at += 1

    def _next(self) -> str:
        """Returns the next character that is no space. Empty: the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match is not None else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Reads as much again as is in memory, so that a long item is parsed few times."""
        rest = self._text[self._at :]
        part = self._file.read(max(READ_CHARACTERS, len(rest)))
        self._text, self._at = rest + part, 0
        return bool(part)
