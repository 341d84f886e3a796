"""Whole numbers that somebody else has written."""

from typing import Final

DIGITS_MAX: Final = 19
"""The most digits that are read: enough for 63 bits."""


def whole_number(text: str, most: int, least: int = 0) -> int | None:
    """The number in `text` from `least` to `most`, at most 63 bits, or None. Python's `int` would
    also take other scripts' digits, and seconds for a very long number."""
    if not text.isascii() or not text.isdecimal() or len(text) > DIGITS_MAX:
        return None
    number = int(text)
    return number if least <= number <= most else None
