"""The layers around a payload: compressed with gzip or zlib, or written as base64."""

import base64
import binascii
import zlib
from collections.abc import Callable, Mapping
from typing import Final

from holdfast.pipeline.decoders.decoded import PAYLOAD_BYTES_MAX, DecodeError

GZIP_BEGIN: Final = b"\x1f\x8b"
_ANY_HEADER: Final = 32 + zlib.MAX_WBITS
"""The option of zlib by which it accepts the header of gzip and its own."""


def inflated(payload: bytes, what: str = "the payload") -> bytes:
    """Decompress gzip or zlib. Raises DecodeError, also if the result is too long."""
    inflater = zlib.decompressobj(_ANY_HEADER)
    try:
        found = inflater.decompress(payload, PAYLOAD_BYTES_MAX)
    except zlib.error as error:
        raise DecodeError(f"{what} cannot be decompressed: {error}") from None
    if not inflater.eof:
        if len(found) >= PAYLOAD_BYTES_MAX:
            raise DecodeError(
                f"{what} has more than {PAYLOAD_BYTES_MAX} bytes when decompressed", "limit"
            )
        raise DecodeError(f"{what} is truncated: compressed, without its end")
    return found


def from_base64(payload: bytes) -> bytes:
    """Decodes base64, also with the two letters of URLs. Raises DecodeError."""
    try:
        return base64.b64decode(payload.strip().translate(_URL_LETTERS), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DecodeError(f"no base64: {error}") from None


_URL_LETTERS: Final = bytes.maketrans(b"-_", b"+/")
LAYERS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "gzip": inflated, "zlib": inflated, "base64": from_base64,
}  # fmt: skip
"""The layers that a rule can name before the decoder: `decode="base64+json"`."""
