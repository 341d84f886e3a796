"""Durations on the command line, as 90d or 12h."""

import argparse
from collections.abc import Callable
from typing import Final

from holdfast.config.durations import duration_ns

DAY_S: Final = 86_400


def duration_s(most_s: int) -> Callable[[str], int]:
    """A parser of durations of at most `most_s` seconds, for argparse."""

    def parsed(text: str) -> int:
        days, found, rest = text.partition("d")
        try:
            is_days = bool(found) and not rest
            value_s = int(days) * DAY_S if is_days else duration_ns(text) // 1_000_000_000
        except ValueError:
            value_s = 0
        if not 0 < value_s <= most_s:
            allowed = f"give a time as 90d or 12h, at most {most_s // DAY_S}d"
            raise argparse.ArgumentTypeError(f"{text!r}: {allowed}")
        return value_s

    return parsed
