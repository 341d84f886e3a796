"""Audience of a message: the clients of a broker that receive it, if not all subscribers do.

A message from a federation may be for plain subscribers here, and for some of the shared groups
here. Clients of another member serve the other groups. The record contains the audience, so later
readers respect it too: sessions that were away, groups that are behind, a broker that has
restarted.
"""

from collections.abc import Iterable
from typing import Final

_PLAIN: Final = 0x01
_USER: Final = 0x03
"""The first byte of a field that names a user. Its message is for all subscribers."""
_SEPARATOR: Final = "\0"
"""The character between groups; MQTT allows it in no filter."""


class Audience:
    """The subscribers that receive a message: plain ones or not, and these shared groups.

    `groups` are keys, `$share/group/filter`. No other group receives the message, not even one that
    begins later.
    """

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
    """The bytes of an audience in a record: a byte of flags, then the groups."""
    first = bytes((_PLAIN if audience.is_plain else 0,))
    return first + _SEPARATOR.join(sorted(audience.groups)).encode()


def decode_audience(data: bytes) -> Audience:
    """The audience that a record contains. Raises `ValueError` if the bytes are not one."""
    if not data:
        raise ValueError("an audience of no bytes")
    groups = data[1:].decode()
    return Audience(data[0] & _PLAIN != 0, groups.split(_SEPARATOR) if groups else ())


def encode_user(user: bytes) -> bytes:
    """The bytes, in place of an audience, that name the user who retains a message for all."""
    return bytes((_USER,)) + user


def user_in(data: bytes) -> bytes:
    """The user in bytes that `encode_user` has made; b"": it is an audience."""
    return data[1:] if data and data[0] == _USER else b""
