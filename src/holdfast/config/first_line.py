"""A secret in a file: its first line, since editors and `echo` end one."""

from pathlib import Path


class UnreadableFile(ValueError):
    """The text names the file and what is wrong with it."""


def first_line(file: str) -> bytes:
    """Without its end. Raises UnreadableFile."""
    try:
        return Path(file).read_bytes().partition(b"\n")[0].rstrip(b"\r")
    except OSError as error:
        raise UnreadableFile(f"{file}: cannot be read: {error.strerror}") from None


def first_word(file: str) -> str:
    """The same in UTF-8, without white space around it. Raises UnreadableFile."""
    try:
        return first_line(file).decode().strip()
    except UnicodeDecodeError:
        raise UnreadableFile(f"{file}: cannot be read: its first line is not UTF-8") from None
