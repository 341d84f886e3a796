"""One thing that is wrong with a configuration."""

from typing import Final, TypeAlias

VALUE_CHARACTERS_MAX: Final = 60
"""A longer value is cut in a message."""

Problem: TypeAlias = tuple[str, str]
"""Key, and the rest of the line: value and what is allowed."""


def shown(value: object) -> str:
    """A value as TOML writes it, cut to a readable length."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = f'"{value}"'.encode("unicode_escape").decode()
    else:
        text = str(value)
    return text if len(text) <= VALUE_CHARACTERS_MAX else text[: VALUE_CHARACTERS_MAX - 1] + "…"
