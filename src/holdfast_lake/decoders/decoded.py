"""Result of a decoder for one message, and the bounds that all decoders share."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

PAYLOAD_BYTES_MAX: Final = 16 << 20
"""The most bytes of a payload. Longer ones are quarantined undecoded."""
READINGS_MAX: Final = 10_000
"""The most readings in one message."""
DEPTH_MAX: Final = 64
"""The most levels of nesting."""
NAME_LENGTH_MAX: Final = 1024
"""The most characters in the name of a metric."""
ERRORS_MAX: Final = 8
"""The most errors listed for one message. More are counted."""
INTEGER_MIN: Final = -(1 << 63)
INTEGER_MAX: Final = (1 << 64) - 1
"""The range of integers: signed and unsigned numbers of 64 bits."""
EXACT_MAX: Final = 1 << 53
"""The integer up to which a double is exact."""

BAD, UNCERTAIN, GOOD = 0, 64, 192
"""The qualities of OPC, which Sparkplug has, too."""

Value = float | str | bool | None


CODES: Final = {
    "format": "the payload is not of the format that its rule or its look says",
    "encoding": "a text is not UTF-8",
    "value": "a value is no number, or none that a column can express",
    "time": "a time cannot be read",
    "sequence": "a sequence number is none",
    "device": "the device is not known",
    "name": "a metric has no name or type: the birth that says it is missing",
    "bad": "the device itself says that the value is bad",
    "key": "two values have one key or name; the last counts",
    "limit": "a bound is exceeded",
    "package": "a Python package that the decoder needs is missing",
    "expectation": "a row fails an expectation of the table",
}
"""The kinds of rows in the quarantine, by their code."""


class DecodeError(ValueError):
    """A payload cannot be decoded. The text says what is wrong and where, the code which kind."""

    def __init__(self, text: str, code: str = "format") -> None:
        super().__init__(text)
        assert code in CODES
        self.code = code


RESERVED: Final = frozenset({"$online", "$sequence", "$empty", "$repeated", "$quarantined"})
"""The metrics that the pipeline itself makes. A payload cannot make one: a device that sends
`{"$online": false}` would be down in `outages`."""


def own_name(name: str) -> str:
    """Returns the metric of a name in a payload: a reserved name gets another `$`."""
    return f"${name}" if name in RESERVED else name


class Decoded:
    """The readings of one message, as columns of equal length, with the values that all of them
    share.

    Times are microseconds since 1970 UTC. `errors` lists what was left out: a message may have good
    readings and bad ones.
    """

    __slots__ = ("code", "device", "errors", "exact", "historical", "id", "more_errors", "names",
                 "qualities", "sent_us", "sequence", "time_us", "times", "units",
                 "values")  # fmt: skip

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[Value] = []
        self.exact: dict[int, str] | None = None
        """The texts, by position, of values that have another form as well: the digits of integers
        that a double cannot express, and words such as `off`."""
        self.times: list[int | None] | None = None
        """The readings' own times. None if there are none."""
        self.historical: list[bool] | None = None
        """True for each reading from the past (Sparkplug)."""
        self.qualities: dict[int, int] | None = None
        """The quality, by position, of readings whose device reports one."""
        self.units: dict[int, str] | None = None
        """The unit, by position, of numbers whose unit is known."""
        self.time_us: int | None = None
        self.sent_us: int | None = None
        self.sequence: int | None = None
        self.id: str | None = None
        self.device: str | None = None
        """The device, if the payload names it."""
        self.errors: list[str] | None = None
        """The first ERRORS_MAX errors."""
        self.more_errors = 0
        self.code = "value"
        """The code of the first error."""

    def add(self, name: str, value: Value | int) -> None:
        """Adds one reading. A value that the columns cannot express becomes an error.

        Raises DecodeError if the message exceeds a bound.
        """
        if len(self.names) >= READINGS_MAX:
            raise DecodeError(f"more than {READINGS_MAX} values in one message", "limit")
        if len(name) > NAME_LENGTH_MAX:
            raise DecodeError(
                f"a metric's name of {len(name)} characters, the maximum is {NAME_LENGTH_MAX}: "
                f"{name[:40]!r}...",
                "limit",
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

    def set_number(self, at: int, value: float | int | None) -> None:
        """Replaces a text by its number, and keeps the digits that a double cannot express. Another
        text stays."""
        if value is None or not math.isfinite(value):
            return
        if type(value) is int and not INTEGER_MIN <= value <= INTEGER_MAX:
            return
        if type(value) is int and not -EXACT_MAX <= value <= EXACT_MAX:
            self.exact = (self.exact or {}) | {at: str(value)}
        self.values[at] = float(value) + 0.0

    def set_unit(self, at: int, unit: str | None) -> None:
        """Sets the unit of a reading if it is a number that has none yet."""
        if unit is not None and type(self.values[at]) is float:
            self.units = self.units or {}
            self.units.setdefault(at, unit)

    def keep(self, positions: Sequence[int]) -> None:
        """Leaves out the readings at all other positions."""
        self.names = [self.names[at] for at in positions]
        self.values = [self.values[at] for at in positions]
        if self.times is not None:
            self.times = [self.times[at] for at in positions]
        if self.exact is not None:
            self.exact = {new: self.exact[at] for new, at in enumerate(positions)
                          if at in self.exact}  # fmt: skip
        if self.qualities is not None:
            self.qualities = {new: self.qualities[at] for new, at in enumerate(positions)
                              if at in self.qualities}  # fmt: skip
        if self.units is not None:
            self.units = {new: self.units[at] for new, at in enumerate(positions)
                          if at in self.units}  # fmt: skip

    def keep_one_of_each(self, first: int = 0) -> None:
        """Leaves out a reading, from the position `first` on, if a later one has its name.

        Counter-example: {"a.b": 1, "a": {"b": 2}} has two values of a.b.
        """
        last = {name: at for at, name in enumerate(self.names) if at >= first}
        if len(last) < len(self.names) - first:
            for name, count in Counter(self.names[first:]).items():
                if count > 1:
                    self.refuse_repeated(repr(name), count)
            self.keep([*range(first), *last.values()])

    def refuse_repeated(self, name: str, count: int) -> None:
        """Notes a name that several values have."""
        self.refuse(f"{name[:40]} is there {count} times: the last counts", "key")

    def rate(self, positions: Iterable[int], quality: int) -> None:
        """Sets the quality of some readings."""
        self.qualities = (self.qualities or {}) | dict.fromkeys(positions, quality)

    def add_only(self, name: str, value: int) -> None:
        """Adds the one reading of a message that has no other."""
        self.add(name, value)
        self.times = self.historical = None

    def add_text_of(self, text: str) -> None:
        """Keeps the text of the last reading beside its value."""
        if self.exact is None:
            self.exact = {}
        self.exact[len(self.names) - 1] = text

    def refuse(self, reason: str, code: str = "value") -> None:
        """Notes an error, with one of CODES."""
        if self.errors is None:
            self.errors = []
            self.code = code
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(reason)
        else:
            self.more_errors += 1

    def reason(self) -> str | None:
        """Returns the errors as one text, or None without any."""
        if not self.errors:
            return None
        text = "; ".join(self.errors)
        return f"{text}; and {self.more_errors} more" if self.more_errors else text


def utf8(payload: bytes) -> str:
    """Decodes a payload as UTF-8.

    Raises DecodeError with the position of the first invalid byte.
    """
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise DecodeError(
            f"not UTF-8: {error.reason} at byte {error.start}{_known_format(payload)}",
            "encoding",
        ) from None


def _known_format(payload: bytes) -> str:
    """Returns a hint for a payload that begins like a compressed file."""
    for magic, name in (
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PK\x03\x04", "zip"),
    ):
        if payload.startswith(magic):
            return f" (it looks like {name}; compressed payloads are not decoded)"
    return ""
