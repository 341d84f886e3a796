"""Positions in the log, and the forms in which a program may give one."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from holdfast.client.log.errors import LogOptionError
from holdfast.client.log.reading import offsets

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
_AGO: Final = re.compile(r"-(\d{1,9})([smhd])")
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Position:
    """A position in the log: per partition the first offset that is not read yet.

    A partition that is missing begins where the start of the read says. `str` gives the form to
    store, and `Position.parse` reads it.
    """

    offsets: Mapping[int, int] = field(default_factory=dict)
    generation: int | None = None
    """The generation of the log that the offsets are of. A log that was restored has another one.
    None: that of the log that is read, so a restore since then is not noticed."""

    def __str__(self) -> str:
        return json.dumps(offsets.to_json(self.offsets, self.generation))

    @classmethod
    def parse(cls, text: str) -> "Position":
        """The position of a text such as `{"0": 12, "1": 7}`. Raises LogOptionError."""
        try:
            found = offsets.parse_position("the position", text)
        except offsets.OffsetError as error:
            raise LogOptionError(str(error)) from None
        if isinstance(found, str):
            raise LogOptionError(f"the position is {text!r}; allowed: JSON offsets by partition")
        return cls(found, offsets.parse_generation("the position", text) or 0)


Place = str | datetime | timedelta | Position
"""A place in the log: "earliest", "latest", a time (a datetime, or ISO 8601), a time before now (a
timedelta, or "-15m"), or a Position."""
ResolvedPlace = str | int | Position
"""EARLIEST, LATEST, microseconds since 1970, or a Position."""


def resolve_place(name: str, place: Place) -> ResolvedPlace:
    """Checks a place. Raises LogOptionError, which calls it `name`."""
    if isinstance(place, Position):
        return place
    if isinstance(place, timedelta):
        return _now_us() - abs(place) // timedelta(microseconds=1)
    if isinstance(place, datetime):
        return _microseconds(place)
    word = place.strip().lower()
    if word in (EARLIEST, LATEST):
        return word
    ago = _AGO.fullmatch(word)
    if ago is not None:
        return _now_us() - int(ago[1]) * _UNITS_S[ago[2]] * 1_000_000
    try:
        return _microseconds(datetime.fromisoformat(place.strip()))
    except ValueError:
        raise LogOptionError(
            f'{name} is {place!r}; allowed: "earliest", "latest", ISO 8601 such as '
            '2026-03-01T12:00:00Z, "-15m" (units s, m, h, d), a datetime, a timedelta or a Position'
        ) from None


def _now_us() -> int:
    return time.time_ns() // 1000


def _microseconds(moment: datetime) -> int:
    """Microseconds since 1970. A time without a zone is UTC."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1)
