"""For whom of a broker's clients a message is, where it is not for all who subscribed.

A message that comes over a federation is for plain subscribers here, or not, and for some of the
shared groups here: of the others, clients of another member get it. Its record says so, so that
those who read it later keep to it: sessions that were away, groups that are behind, a broker that
has started again.
"""

from collections.abc import Iterable
from typing import Final

_PLAIN: Final = 0x01
_SEPARATOR: Final = "\0"
"""Which no filter has."""


class Audience:
    """`groups`: keys, `$share/group/filter`; none of the others gets the message, one that begins
    later neither."""

    def __init__(self, is_plain: bool, groups: Iterable[str]) -> None:
        self.is_plain = is_plain
        self.groups = frozenset(groups)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Audience):
            return NotImplemented
        return self.is_plain == other.is_plain and self.groups == other.groups

    def __hash__(self) -> int:
        return hash((self.is_plain, self.groups))


def encode_audience(audience: Audience) -> bytes:
    """As records have it: a byte of flags, and the groups."""
    first = bytes((_PLAIN if audience.is_plain else 0,))
    return first + _SEPARATOR.join(sorted(audience.groups)).encode()


def decode_audience(data: bytes) -> Audience:
    """Raises ValueError."""
    if not data:
        raise ValueError("an audience of no bytes")
    groups = data[1:].decode()
    return Audience(data[0] & _PLAIN != 0, groups.split(_SEPARATOR) if groups else ())
