"""What a decoder makes of one message, and the bounds that hold for all of them."""

import math
from typing import Final

PAYLOAD_BYTES_MAX: Final = 16 << 20
"""Longer payloads are quarantined undecoded."""
READINGS_MAX: Final = 10_000
"""Readings in one message."""
DEPTH_MAX: Final = 64
"""Levels of nesting."""
NAME_LENGTH_MAX: Final = 1024
"""Characters in the name of a metric."""
ERRORS_MAX: Final = 8
"""Errors told of one message; more are counted."""
INTEGER_MIN: Final = -(1 << 63)
INTEGER_MAX: Final = (1 << 64) - 1
EXACT_MAX: Final = 1 << 53
"""Up to here a double holds every integer."""

Value = float | str | bool | None


class DecodeError(ValueError):
    """A payload that cannot be decoded. The text says what is wrong and where."""


class Decoded:
    """The readings of one message, as columns of equal length, and what is true of all of them.

    Times are microseconds since 1970 UTC. `errors` tells what was left out: a message may have
    good readings and bad ones.
    """

    __slots__ = ("device", "errors", "exact", "historical", "id", "more_errors", "names", "sent_us",
                 "sequence", "time_us", "times", "values")  # fmt: skip

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[Value] = []
        self.exact: dict[int, str] | None = None
        """The digits of integers that a double cannot hold, by position."""
        self.times: list[int | None] | None = None
        """The readings' own times, where they have some."""
        self.historical: list[bool] | None = None
        """Sparkplug: which readings are from the past."""
        self.time_us: int | None = None
        self.sent_us: int | None = None
        self.sequence: int | None = None
        self.id: str | None = None
        self.device: str | None = None
        """Where the payload names it."""
        self.errors: list[str] | None = None
        """The first ERRORS_MAX."""
        self.more_errors = 0

    def add(self, name: str, value: Value | int) -> None:
        """One reading; a value that the columns cannot hold becomes an error. Raises DecodeError
        where the message is too much."""
        if len(self.names) >= READINGS_MAX:
            raise DecodeError(f"more than {READINGS_MAX} values in one message")
        if len(name) > NAME_LENGTH_MAX:
            raise DecodeError(
                f"a metric's name of {len(name)} characters, the maximum is {NAME_LENGTH_MAX}: "
                f"{name[:40]!r}..."
            )
        kind = type(value)
        if kind is float:
            if not math.isfinite(value):  # type: ignore[arg-type]
                self.refuse(f"{name or 'the value'} is {value}, which is no number")
                return
            value = value + 0.0  # type: ignore[operator] # -0.0 becomes 0.0: they compare as equal
        elif kind is int:
            if not INTEGER_MIN <= value <= INTEGER_MAX:  # type: ignore[operator]
                self.refuse(f"{name or 'the value'} is beyond 64 bits")
                return
            if not -EXACT_MAX <= value <= EXACT_MAX:  # type: ignore[operator]
                if self.exact is None:
                    self.exact = {}
                self.exact[len(self.names)] = str(value)
            value = float(value)  # type: ignore[arg-type]
        self.names.append(name)
        self.values.append(value)

    def add_only(self, name: str, value: int) -> None:
        """The one reading of a message that has no other."""
        self.add(name, value)
        self.times = self.historical = None

    def refuse(self, reason: str) -> None:
        if self.errors is None:
            self.errors = []
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(reason)
        else:
            self.more_errors += 1

    def reason(self) -> str | None:
        """The errors as one text, None without any."""
        if not self.errors:
            return None
        text = "; ".join(self.errors)
        return f"{text}; and {self.more_errors} more" if self.more_errors else text


def utf8(payload: bytes) -> str:
    """Raises DecodeError with the position of the first byte that is not UTF-8."""
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise DecodeError(
            f"not UTF-8: {error.reason} at byte {error.start}{_known_format(payload)}"
        ) from None


def _known_format(payload: bytes) -> str:
    """A hint for payloads that begin like a compressed file."""
    for magic, name in (
        (b"\x1f\x8b", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PK\x03\x04", "zip"),
    ):
        if payload.startswith(magic):
            return f" (it looks like {name}; compressed payloads are not decoded)"
    return ""
