"""Problems of a configuration."""

from typing import Final, TypeAlias

VALUE_CHARACTERS_MAX: Final = 60
"""The most characters of a value in a message."""

Problem: TypeAlias = tuple[str, str]
"""The key, and the rest of the line: value and allowed values."""


class ConfigError(ValueError):
    """A configuration that cannot be used. `problems` has one line each; the text is the first
    one."""

    def __init__(self, *problems: str) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(problems[0] + more)
        self.problems = list(problems)


def shown(value: object) -> str:
    """A value as TOML writes it, cut to a readable length."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = f'"{value}"'.encode("unicode_escape").decode()
    else:
        text = str(value)
    return text if len(text) <= VALUE_CHARACTERS_MAX else text[: VALUE_CHARACTERS_MAX - 1] + "…"
