"""Pre-shared keys of TLS: a file in Mosquitto's format, and the context that asks for them.

A line of the file is `identity:key`, the key in hexadecimal digits. Python has the callback for
such keys since 3.13. It does not name the connection, so `PskObject` notes which one shakes hands:
a handshake makes its look-up within `do_handshake`.
"""

import ssl
from collections import OrderedDict
from pathlib import Path
from typing import Final

from holdfast.security.tls import TLS_VERSIONS, TlsError

IDENTITY_BYTES_MAX: Final = 128
KEY_BYTES_MAX: Final = 64
"""The longest identity and key that every library of TLS must support. [RFC 4279 section 5.3]"""
SESSIONS_MAX: Final = 32_768
"""The most sessions of TLS 1.2 whose identity is remembered. OpenSSL keeps 20,480 of a context."""
CIPHERS: Final = "kECDHEPSK:kPSK:!NULL:!3DES"


def has_psk() -> bool:
    """Whether this Python can serve clients with pre-shared keys."""
    return hasattr(ssl.SSLContext, "set_psk_server_callback") and getattr(ssl, "HAS_PSK", False)


def load_keys(path: Path) -> dict[str, bytes]:
    """The keys of a file by identity. Raises `TlsError`."""
    try:
        return parse_keys(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise TlsError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise TlsError(f"{path}: cannot read the PSK file: {error.strerror}") from None


def parse_keys(text: str, name: str) -> dict[str, bytes]:
    """The keys of a text by identity. Raises `TlsError` with the line, and never with a key."""
    found: dict[str, bytes] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip("\r \t")
        if not line or line.startswith("#"):
            continue
        where = f"{name}:{number}: "
        identity, colon, digits = line.partition(":")
        if not colon or not identity:
            raise TlsError(f"{where}a line is identity:key")
        size = len(identity.encode(errors="surrogatepass"))
        if size > IDENTITY_BYTES_MAX or "\0" in identity:
            raise TlsError(f"{where}an identity has at most {IDENTITY_BYTES_MAX} bytes, and no NUL")
        if identity in found:
            raise TlsError(f"{where}the identity {identity!r} is there twice")
        try:
            key = bytes.fromhex(digits) if digits.isalnum() else b""
        except ValueError:
            key = b""
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise TlsError(
                f"{where}the key has 1 to {KEY_BYTES_MAX} bytes, two hexadecimal digits each"
            )
        found[identity] = key
    return found


class KeyRing:
    """The keys of a context, with what their look-ups have found.

    It does not refer to its context: a context and its callback are no garbage of Python's, so each
    reload would leave one behind.
    """

    def __init__(self, keys: dict[str, bytes]) -> None:
        self._keys = keys
        self._identities: OrderedDict[bytes, str] = OrderedDict()
        # The connection in whose `do_handshake` the process is.
        self.shaking: PskObject | None = None

    def find_key(self, identity: str | None) -> bytes:
        """The key of an identity; empty ends the handshake. The last look-up of a handshake that
        succeeds is of the key that it has used."""
        key = self._keys.get(identity or "", b"")
        if key and identity and self.shaking is not None:
            self.shaking.found = identity
        return key

    def remember(self, session_id: bytes, identity: str) -> None:
        """Keeps the identity of a session that its client may resume."""
        self._identities[session_id] = identity
        if len(self._identities) > SESSIONS_MAX:
            self._identities.popitem(last=False)

    def identity_of(self, session_id: bytes) -> str:
        """The identity of a session that a client has resumed, or ""."""
        return self._identities.get(session_id, "")


class PskContext(ssl.SSLContext):
    """A context without a certificate: its clients and the broker prove to each other that they
    have the same key."""

    ring: KeyRing


class PskObject(ssl.SSLObject):
    """The TLS of one connection. `psk_identity`: the identity whose key the client has proved, once
    the handshake is complete; "": none, so the client must not be admitted."""

    found = ""

    def _ring(self) -> KeyRing:
        context = self.context
        assert isinstance(context, PskContext)
        return context.ring

    def do_handshake(self) -> None:
        ring = self._ring()
        ring.shaking = self
        try:
            super().do_handshake()
        finally:
            ring.shaking = None

    @property
    def psk_identity(self) -> str:
        session = self.session
        session_id = b"" if session is None else session.id
        if self.found:
            if session_id and self.version() == "TLSv1.2":
                self._ring().remember(session_id, self.found)
            return self.found
        # A client of TLS 1.2 resumes a session without a look-up of its key.
        return self._ring().identity_of(session_id)


def psk_context(
    keys: dict[str, bytes], hint: str = "", ciphers: str = "", *, minimum: str = "1.2"
) -> PskContext:
    """A context for TLS 1.2 and later with pre-shared keys. `hint`: the server's name for clients
    of TLS 1.2 that have several keys. Raises `TlsError`."""
    if not has_psk():
        raise TlsError(NEEDED)
    context = PskContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = PskObject
    context.ring = KeyRing(keys)
    context.minimum_version = TLS_VERSIONS[minimum]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE | ssl.OP_NO_TICKET
    # A client with a ticket would come back without a look-up of its key.
    context.num_tickets = 0
    try:
        context.set_ciphers(ciphers or CIPHERS)
    except ssl.SSLError:
        raise TlsError(f"tls_ciphers = {ciphers!r}: OpenSSL knows none of them") from None
    context.set_psk_server_callback(context.ring.find_key, hint or None)  # type: ignore[attr-defined]
    return context


NEEDED: Final = "pre-shared keys need Python 3.13 or later, with OpenSSL's PSK"
