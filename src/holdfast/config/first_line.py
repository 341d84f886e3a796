"""A secret in a file: its first line, because editors and `echo` add a line end."""

from pathlib import Path

from holdfast.config.problem import ConfigError


def first_line(file: str) -> bytes:
    """The first line without its end. Raises `ConfigError`."""
    try:
        return Path(file).read_bytes().partition(b"\n")[0].rstrip(b"\r")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None


def first_word(file: str) -> str:
    """The first line as UTF-8, without white space around it. Raises `ConfigError`."""
    try:
        return first_line(file).decode().strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: cannot be read: its first line is not UTF-8") from None
