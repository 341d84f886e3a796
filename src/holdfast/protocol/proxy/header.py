"""Parses the header of the PROXY protocol, version 1 (text) or 2 (binary)."""

from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final

SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
"""The first bytes of version 2."""
FIXED_BYTES: Final = 16
"""The bytes of version 2 before the addresses: signature, command, family, length."""
TEXT: Final = b"PROXY "
"""The first bytes of version 1."""
TEXT_BYTES_MAX: Final = 107
"""The most bytes of a header of version 1, its CR LF included. [PROXY 2.1]"""
BINARY_BYTES_MAX: Final = 4096
"""The most bytes behind the fixed part of version 2. They may contain further values, which are
skipped."""

_LOCAL: Final = 0x20
_PROXY: Final = 0x21
_ADDRESS_BYTES: Final = {0x00: 0, 0x11: 12, 0x21: 36, 0x31: 216}
"""The length of the addresses by family and transport: unspecified, and streams over IPv4, IPv6 and
Unix sockets."""


class ProxyError(ValueError):
    """A header that is none. The text has the reason."""


class ProxyHeader:
    """Reads one header from the beginning of a connection.

    The caller offers the bytes that have arrived and not been taken yet. `take` returns the number
    of those that belong to the header, so what follows stays for the next protocol. A header of
    version 1 has no length, so the reader of the socket must look at bytes before it takes them.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.client = ""
        """The client's host:port, without brackets. "" if the proxy passes none on: for a check of
        its own, or for a client without an IP address."""
        self._data = b""

    @property
    def has_begun(self) -> bool:
        """Whether a part of it has been taken."""
        return bool(self._data)

    @property
    def wanted_bytes(self) -> int:
        """The most bytes that the header may still have, as far as is known."""
        have = len(self._data)
        if have < FIXED_BYTES:
            # Either version is longer than that, or ends with the line.
            return FIXED_BYTES - have
        return self._end() - have

    def take(self, offered: bytes) -> int:
        """Takes the offered bytes that belong to the header. Raises `ProxyError` when they cannot
        be the beginning of one."""
        used = 0
        while not self.is_complete and used < len(offered):
            piece = offered[used : used + self.wanted_bytes]
            if self._is_text(piece):
                line = piece.find(b"\n")
                piece = piece if line < 0 else piece[: line + 1]
            self._data += piece
            used += len(piece)
            self._check()
        return used

    def _is_text(self, piece: bytes) -> bool:
        """True if the header is of version 1, by its first byte."""
        return (self._data or piece)[:1] == TEXT[:1]

    def _end(self) -> int:
        """The length of the whole header, or its maximum. At least the fixed part is there."""
        if self._is_text(b""):
            return TEXT_BYTES_MAX
        return FIXED_BYTES + int.from_bytes(self._data[14:16], "big")

    def _check(self) -> None:
        """Checks what has arrived. A wrong byte is refused as soon as it is there, so a client that
        sends something else does not wait for the rest of a header."""
        data = self._data
        if self._is_text(b""):
            if data[: len(TEXT)] != TEXT[: len(data)]:
                raise ProxyError("the connection begins with no header of the PROXY protocol")
            if data.endswith(b"\n"):
                self._read_text(data)
            elif len(data) >= TEXT_BYTES_MAX:
                raise ProxyError(f"a header of version 1 has at most {TEXT_BYTES_MAX} bytes")
            return
        if data[: len(SIGNATURE)] != SIGNATURE[: len(data)]:
            raise ProxyError("the connection begins with no header of the PROXY protocol")
        if len(data) < FIXED_BYTES:
            return
        length = self._end() - FIXED_BYTES
        if length > BINARY_BYTES_MAX:
            raise ProxyError(
                f"a header of {length} bytes behind the fixed part, the maximum is"
                f" {BINARY_BYTES_MAX}"
            )
        if data[12] not in (_LOCAL, _PROXY):
            raise ProxyError(f"version and command 0x{data[12]:02x}, known: 0x20 and 0x21")
        if data[12] == _PROXY:
            wanted = _ADDRESS_BYTES.get(data[13])
            if wanted is None:
                raise ProxyError(f"family and transport 0x{data[13]:02x} are those of no stream")
            if length < wanted:
                raise ProxyError(f"addresses of {length} bytes, {wanted} are needed")
        if len(data) == FIXED_BYTES + length:
            self._read_binary(data)

    def _read_text(self, data: bytes) -> None:
        """Reads a complete header of version 1."""
        if not data.endswith(b"\r\n"):
            raise ProxyError("a header of version 1 ends with CR LF")
        try:
            words = data[:-2].decode("ascii").split(" ")
        except UnicodeDecodeError:
            raise ProxyError("a header of version 1 is ASCII") from None
        kinds: dict[str, type[IPv4Address] | type[IPv6Address]]
        kinds = {"TCP4": IPv4Address, "TCP6": IPv6Address}
        if words[1] == "UNKNOWN":
            self.is_complete = True
            return
        if words[1] not in kinds:
            raise ProxyError(f"the protocol is TCP4, TCP6 or UNKNOWN, found {words[1]!r}")
        if len(words) != 6:
            raise ProxyError(f"a header of version 1 has 6 words, found {len(words)}")
        if "%" in words[2]:
            raise ProxyError(f"an address in a header has no zone, found {words[2]!r}")
        try:
            address = kinds[words[1]](words[2])
            kinds[words[1]](words[3])
        except AddressValueError as error:
            raise ProxyError(str(error)) from None
        port = _port(words[4])
        _port(words[5])
        self._finish(address, port)

    def _read_binary(self, data: bytes) -> None:
        """Reads a complete header of version 2. Values behind the addresses are skipped."""
        family = data[13]
        if data[12] == _PROXY and family == 0x11:
            self._finish(IPv4Address(data[16:20]), int.from_bytes(data[24:26], "big"))
        elif data[12] == _PROXY and family == 0x21:
            self._finish(IPv6Address(data[16:32]), int.from_bytes(data[48:50], "big"))
        else:
            self.is_complete = True

    def _finish(self, address: IPv4Address | IPv6Address, port: int) -> None:
        # A proxy on an IPv6 socket sees clients of IPv4 under mapped addresses.
        self.client = f"{getattr(address, 'ipv4_mapped', None) or address}:{port}"
        self.is_complete = True


def _port(text: str) -> int:
    """The port in a header of version 1. Signs, blanks and leading zeros are refused, because other
    readers of the header might take them for another port."""
    is_number = text.isascii() and text.isdecimal() and (text == "0" or not text.startswith("0"))
    if not is_number or int(text[:6]) > 65535 or len(text) > 5:
        raise ProxyError(f"a port is a number up to 65535, found {text!r}")
    return int(text)
