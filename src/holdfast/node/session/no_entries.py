"""Empty table that all sessions share, until each replaces it with its first entry."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class NoEntries(dict[K, V]):
    """A table that stays empty. An idle client has neither subscriptions nor messages, and each
    table of its own would cost it 64 bytes.

    All clients share this table, so writing to it raises `TypeError`.
    """

    def __setitem__(self, key: K, value: V) -> None:
        raise TypeError(f"{key!r} for the table of all sessions without entries")
