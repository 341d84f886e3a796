"""SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677), both sides, without I/O and without
channel binding.

Three messages authenticate the client: client-first, server-first, client-final. The fourth,
server-final, proves to the client that the server has the credentials too.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import Final

from holdfast.security.scram_file import (
    HASHES,
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    METHOD,
    ScramCredentials,
    ScramError,
    saslprep,
)

MESSAGE_BYTES_MAX: Final = 4096


def nonce() -> str:
    """A random nonce of 18 bytes in base64."""
    return base64.b64encode(secrets.token_bytes(18)).decode()


class ScramServer:
    """The server's side of one exchange. `lookup` also returns credentials for unknown users (as
    ScramFile.lookup does)."""

    def __init__(
        self, lookup: Callable[[str], ScramCredentials], nonce_source: Callable[[], str] = nonce
    ) -> None:
        self._lookup = lookup
        self._nonce_source = nonce_source
        # The user name that the client claims. It is proved once finish() has returned.
        self.username = ""
        self._credentials: ScramCredentials | None = None
        self._header = ""
        self._nonce = ""
        self._first = ""

    def start(self, client_first: bytes) -> bytes:
        """The server-first message for a client-first. An invalid one raises `ScramError`."""
        text = _decode(client_first)
        header, authzid, bare = _split_header(text)
        fields = bare.split(",")
        # "m=" announces an extension that must be understood; there is none.
        if len(fields) < 2 or not fields[0].startswith("n=") or not fields[1].startswith("r="):
            raise ScramError("a client-first message is 'n,,n=user,r=nonce'")
        self.username = saslprep(_decode_name(fields[0][2:]))
        if authzid and saslprep(_decode_name(authzid)) != self.username:
            raise ScramError("acting for another user is not supported")
        client_nonce = fields[1][2:]
        if not self.username or not _is_nonce(client_nonce):
            raise ScramError("the user name or the nonce is empty or malformed")
        credentials = self._lookup(self.username)
        self._credentials = credentials
        self._header = header
        self._nonce = client_nonce + self._nonce_source()
        salt = base64.b64encode(credentials.salt).decode()
        first = f"r={self._nonce},s={salt},i={credentials.iterations}"
        self._first = f"{bare},{first}"
        return first.encode()

    def finish(self, client_final: bytes) -> bytes:
        """The server-final message for a client-final. Raises `ScramError` if the client has not
        proved itself."""
        credentials = self._credentials
        if credentials is None:
            raise ScramError("no exchange is under way")
        # A nonce is for one proof only.
        self._credentials = None
        text = _decode(client_final)
        without_proof, separator, proof_text = text.rpartition(",p=")
        fields = without_proof.split(",")
        if not separator or len(fields) < 2 or not fields[0].startswith("c="):
            raise ScramError("a client-final message is 'c=binding,r=nonce,p=proof'")
        if _decode_base64(fields[0][2:]) != self._header.encode():
            raise ScramError("the channel binding is not the one of the client-first message")
        if not hmac.compare_digest(fields[1].encode(), f"r={self._nonce}".encode()):
            raise ScramError("the nonce is not the one of this exchange")
        proof = _decode_base64(proof_text)
        message = f"{self._first},{without_proof}".encode()
        name = HASHES[credentials.method]
        signature = hmac.digest(credentials.stored_key, message, name)
        if len(proof) != len(signature):
            raise ScramError(f"a proof has {len(signature)} bytes")
        client_key = _xor(proof, signature)
        if not hmac.compare_digest(hashlib.new(name, client_key).digest(), credentials.stored_key):
            raise ScramError("wrong user name or password")
        verifier = hmac.digest(credentials.server_key, message, name)
        return b"v=" + base64.b64encode(verifier)


class ScramClient:
    """The client's side of one exchange: first(), final(server_first), then
    verify(server_final)."""

    def __init__(
        self,
        username: str,
        password: str,
        nonce_source: Callable[[], str] = nonce,
        method: str = METHOD,
    ) -> None:
        """A name or password that SASLprep refuses raises `ScramError`, and so does another
        method."""
        if method not in HASHES:
            raise ScramError(f"{method!r} is none of {', '.join(HASHES)}")
        self._hash = HASHES[method]
        self._username = saslprep(username)
        self._password = saslprep(password)
        self._nonce = nonce_source()
        self._verifier = b""

    def first(self) -> bytes:
        """The client-first message."""
        return b"n,," + self._bare().encode()

    def final(self, server_first: bytes) -> bytes:
        """The client-final message, for a PBKDF2 of the server's iterations. Raises
        `ScramError`."""
        text = _decode(server_first)
        fields = text.split(",")
        if len(fields) < 3 or [field[:2] for field in fields[:3]] != ["r=", "s=", "i="]:
            raise ScramError(f"not a server-first message: {text[:80]!r}")
        server_nonce = fields[0][2:]
        # It must be longer than the client's, or the server adds nothing and a replay would pass.
        if not server_nonce.startswith(self._nonce) or len(server_nonce) == len(self._nonce):
            raise ScramError("the server did not extend the nonce")
        number = fields[2][2:]
        if not (number.isascii() and number.isdigit()):
            raise ScramError(f"iterations are a number, the server sent {number[:20]!r}")
        iterations = int(number)
        if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
            raise ScramError(
                f"the server asks for {iterations} iterations, "
                f"allowed are {ITERATIONS_MIN} to {ITERATIONS_MAX}"
            )
        salt = _decode_base64(fields[1][2:])
        salted = hashlib.pbkdf2_hmac(self._hash, self._password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", self._hash)
        without_proof = f"c=biws,r={server_nonce}"
        message = f"{self._bare()},{text},{without_proof}".encode()
        stored_key = hashlib.new(self._hash, client_key).digest()
        signature = hmac.digest(stored_key, message, self._hash)
        server_key = hmac.digest(salted, b"Server Key", self._hash)
        self._verifier = hmac.digest(server_key, message, self._hash)
        proof = base64.b64encode(_xor(client_key, signature)).decode()
        return f"{without_proof},p={proof}".encode()

    def verify(self, server_final: bytes) -> None:
        """Raises `ScramError` unless the server has proved that it has the credentials."""
        text = _decode(server_final)
        if text.startswith("e="):
            raise ScramError(f"the server refused: {text[2:82]}")
        sent = _decode_base64(text[2:].partition(",")[0]) if text.startswith("v=") else b""
        if not self._verifier or not hmac.compare_digest(sent, self._verifier):
            raise ScramError("the server did not prove that it knows the credentials")

    def _bare(self) -> str:
        name = self._username.replace("=", "=3D").replace(",", "=2C")
        return f"n={name},r={self._nonce}"


def _decode(message: bytes) -> str:
    if len(message) > MESSAGE_BYTES_MAX:
        raise ScramError(f"a message of {len(message)} bytes, the maximum is {MESSAGE_BYTES_MAX}")
    try:
        text = message.decode()
    except UnicodeDecodeError:
        raise ScramError("a message that is not UTF-8") from None
    if "\0" in text:
        raise ScramError("a message that contains U+0000")
    return text


def _split_header(text: str) -> tuple[str, str, str]:
    """(header, name to act for, rest) of a client-first message."""
    fields = text.split(",", 2)
    if len(fields) < 3:
        raise ScramError("a client-first message is 'n,,n=user,r=nonce'")
    flag, authzid, bare = fields
    if flag.startswith("p="):
        raise ScramError("channel binding is not offered")
    if flag not in ("n", "y") or (authzid and not authzid.startswith("a=")):
        raise ScramError("a client-first message is 'n,,n=user,r=nonce'")
    return f"{flag},{authzid},", authzid[2:], bare


def _decode_name(text: str) -> str:
    parts = text.split("=")
    name = parts[0]
    for part in parts[1:]:
        if part.startswith("2C"):
            name += "," + part[2:]
        elif part.startswith("3D"):
            name += "=" + part[2:]
        else:
            raise ScramError("in a user name '=' is written '=3D' and ',' is written '=2C'")
    return name


def _is_nonce(text: str) -> bool:
    return bool(text) and all("!" <= char <= "~" and char != "," for char in text)


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ScramError("a field that is not base64") from None


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
