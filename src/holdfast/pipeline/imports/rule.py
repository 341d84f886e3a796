"""Makes messages from rows of a file: their topic, payload and time."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from holdfast.pipeline.decoders.times import parse_time
from holdfast.pipeline.imports.errors import BadRow, ImportFailed
from holdfast.pipeline.imports.rows import Row, iso, plain
from holdfast.pipeline.tables.rules import TIME_FIELDS
from holdfast.protocol.topics.names import InvalidTopic, decode_topic

NOW: Final = "now"
"""The value of --time for rows that happen when they are imported."""
TIME: Final = TIME_FIELDS[0]
"""The field of a payload in which an import writes the time of a row."""
VALUE: Final = "value"
"""The field of a payload that was only a number, beside its time."""
_FIELD: Final = re.compile(r"\{([^{}]+)\}")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class ImportRule:
    """The rule by which rows become messages. Raises ImportFailed for one that cannot work."""

    topic: str
    """The topic; `{name}` stands for the field of the row."""
    payload: str | None = None
    """The field that is the payload. None: a JSON object of the fields not in the topic."""
    time: str | None = None
    """The field with the time, which the payload gets as `ts`. NOW: none. None: it has one."""

    def __post_init__(self) -> None:
        sample = _FIELD.sub("x", self.topic)
        try:
            decode_topic(sample.encode())
        except (InvalidTopic, UnicodeEncodeError) as error:
            raise ImportFailed(f"--topic {self.topic}: {error}") from None
        if "{" in sample or "}" in sample:
            raise ImportFailed(f"--topic {self.topic}: a field is written as {{name}}")

    def message(self, row: Row) -> tuple[str, bytes]:
        """Returns the topic and payload of a row. Raises BadRow."""
        return self._topic(row), self._payload(row)

    def _fields(self) -> Iterator[str]:
        yield from _FIELD.findall(self.topic)

    def _topic(self, row: Row) -> str:
        is_all = _FIELD.fullmatch(self.topic) is not None

        def level(match: re.Match[str]) -> str:
            """Returns the levels of the topic that one field gives."""
            value = _value(row, match[1])
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise BadRow(f"{match[1]} is {_shown(value)}, which is no part of a topic")
            text = str(value)
            if "/" in text and not is_all:
                raise BadRow(f"{match[1]} is {_shown(value)}, which would be several levels")
            return text

        topic = _FIELD.sub(level, self.topic)
        try:
            decode_topic(topic.encode())
        except (InvalidTopic, UnicodeEncodeError) as error:
            raise BadRow(f"topic {_shown(topic)}: {error}") from None
        return topic

    def _payload(self, row: Row) -> bytes:
        if self.payload is None:
            left = {*self._fields(), self.time}
            fields = {name: plain(each) for name, each in row.items() if name not in left}
            return self._with_time(row, {n: each for n, each in fields.items() if each is not None})
        value = _value(row, self.payload)
        try:
            raw = value.encode() if isinstance(value, str) else value
        except UnicodeEncodeError:
            raise BadRow(f"the payload {self.payload} is no Unicode") from None
        raw = raw if isinstance(raw, bytes) else None
        if raw is not None and self.time == NOW:
            return raw
        if raw is not None:
            try:
                value = msgspec.json.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                value = None
            if isinstance(value, dict) and self.time is None and not TIMES.isdisjoint(value):
                return raw  # as it came
        if isinstance(value, int | float):
            value = {VALUE: value}
        if not isinstance(value, dict):
            raise BadRow(
                f"the payload {self.payload} is no JSON object and no number, so it cannot have "
                "the time of the row; --time now imports it without"
            )
        return self._with_time(row, plain(value))

    def _with_time(self, row: Row, fields: dict[str, Any]) -> bytes:
        if self.time is not None and self.time != NOW:
            value = _value(row, self.time)
            time_us = None if isinstance(value, bool) else parse_time(plain(value))
            if time_us is None:
                raise BadRow(f"{self.time} is {_shown(value)}, which is no time")
            try:
                at = _EPOCH + timedelta(microseconds=time_us)
            except OverflowError:
                raise BadRow(f"{self.time} is {_shown(value)}, beyond the year 9999") from None
            if TIME in fields:
                raise BadRow(f"it has a field {TIME} beside the time {self.time}")
            fields = {TIME: iso(at), **fields}
        elif self.time is None and TIMES.isdisjoint(fields):
            raise BadRow(
                f"it has no time ({', '.join(TIME_FIELDS)}): name its field with --time, or give "
                "--time now"
            )
        try:
            return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            raise BadRow("a field is NaN, infinity or no Unicode, which JSON has not") from None


TIMES: Final = frozenset(TIME_FIELDS)


def _value(row: Row, name: str) -> Any:
    if name not in row:
        raise BadRow(f"it has no field {name}; it has {', '.join(row)[:200]}")
    return row[name]


def _shown(value: Any) -> str:
    return repr(value)[:80]
