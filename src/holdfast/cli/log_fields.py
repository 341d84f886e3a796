"""Finds the values of a log line, from its format and its arguments.

Every line of the broker is an event with values: `event name=%r other=%d text='fixed'`. The test
`test_every_line_is_an_event_with_values` enforces that form. Lines of libraries have other forms.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from math import isfinite
from typing import Final, NamedTuple

EVENT: Final = re.compile(r"[a-z][a-z0-9_]*")
PAIR: Final = re.compile(r" ([a-z0-9_]+)=('[^']*'|\S+)")
CONVERSION: Final = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
FORMATS_MAX: Final = 1000
"""The most formats whose parts are remembered."""
RESERVED: Final = ("time", "level", "event", "node_id", "message", "exception")
"""The members of a JSON line that are not values of the event. Such a value is named `of_...`."""
LIST_CHARACTERS_MAX: Final = 1024
"""The most characters of a list or table of values. A longer one is cut, as text."""


class Part(NamedTuple):
    """One value of a format."""

    name: str
    template: str
    """The text of the value, with its conversions."""
    first: int
    """The index of the first argument."""
    arguments: int
    """The number of arguments."""


class LineFormat(NamedTuple):
    """The event of a format, and its values. An empty event: the format has another form."""

    event: str
    parts: tuple[Part, ...]


@lru_cache(FORMATS_MAX)
def parse_format(text: str) -> LineFormat:
    """Divides a format into its event and its values."""
    event, blank, rest = text.partition(" ")
    if EVENT.fullmatch(event) is None:
        return LineFormat("", ())
    parts, at, first = [], 0, 0
    rest = blank + rest
    while at < len(rest):
        found = PAIR.match(rest, at)
        if found is None:
            return LineFormat("", ())
        name, template = found.groups()
        count = sum(each != "%%" for each in CONVERSION.findall(template))
        parts.append(Part(name, template, first, count))
        first += count
        at = found.end()
    return LineFormat(event, tuple(parts))


def fields_of(line: LineFormat, args: tuple[object, ...]) -> Iterator[tuple[str, object]]:
    """Yields the values of a line with their names: an argument as it is, all else as text."""
    for part in line.parts:
        values = args[part.first : part.first + part.arguments]
        name = f"of_{part.name}" if part.name in RESERVED else part.name
        if part.arguments == 1 and CONVERSION.fullmatch(part.template):
            yield name, _plain(values[0])
        else:
            template = part.template
            if len(template) > 1 and template[0] == template[-1] == "'":
                template = template[1:-1]
            yield name, template % values


def _plain(value: object) -> object:
    """Returns what JSON can express; anything else as text."""
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, dict):
        value = {str(key): _plain(each) for key, each in value.items()}
    elif isinstance(value, list | tuple | set | frozenset):
        value = [_plain(each) for each in value]
    else:
        value = str(value)
    text = str(value)
    return value if len(text) <= LIST_CHARACTERS_MAX else f"{text[:LIST_CHARACTERS_MAX]}..."
