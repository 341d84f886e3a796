"""SCRAM-SHA-256 (RFC 5802, RFC 7677), both sides, without I/O and without channel binding.

Three messages authenticate the client: client-first, server-first, client-final. The fourth,
server-final, proves to the client that the server has the credentials too. The server stores no
password, and no value that could be sent in its place.

A user that does not exist gets a salt and iterations as if it did (see ScramFile.lookup). So the
exchange fails at the same message as with a wrong password and looks the same until then.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
import stringprep
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unicodedata import ucd_3_2_0

METHOD: Final = "SCRAM-SHA-256"
DEFAULT_ITERATIONS: Final = 4096
ITERATIONS_MIN: Final = 4096
"""The least iterations that are accepted (RFC 7677, section 4). A client that accepted fewer would
help a false server to guess."""
ITERATIONS_MAX: Final = 1_000_000
"""The most iterations that are accepted, about half a second: a hostile server must not stall its
clients for longer."""
MESSAGE_BYTES_MAX: Final = 4096
_SALT_BYTES: Final = 16
_KEY_BYTES: Final = 32
_DECOY_PREFIX: Final = "# decoy:"


class ScramError(ValueError):
    """A failed exchange. The text contains no secret and may go to the log."""


def nonce() -> str:
    """A random nonce of 18 bytes in base64."""
    return base64.b64encode(secrets.token_bytes(18)).decode()


def saslprep(text: str) -> str:
    """The text in the SASLprep profile (RFC 4013) for stored strings. A prohibited one raises
    `ScramError`."""
    mapped = "".join(
        " " if stringprep.in_table_c12(char) else char
        for char in text
        if not stringprep.in_table_b1(char)
    )
    prepared = ucd_3_2_0.normalize("NFKC", mapped)
    for char in prepared:
        for is_prohibited in _PROHIBITED:
            if is_prohibited(char):
                raise ScramError(f"a name or password may not contain U+{ord(char):04X}")
    # RFC 3454, section 6: right-to-left text is right-to-left from end to end.
    if any(stringprep.in_table_d1(char) for char in prepared):
        ends = stringprep.in_table_d1(prepared[0]) and stringprep.in_table_d1(prepared[-1])
        if not ends or any(stringprep.in_table_d2(char) for char in prepared):
            raise ScramError("a name or password mixes right-to-left with left-to-right text")
    return prepared


_PROHIBITED: Final = (
    stringprep.in_table_a1,
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


@dataclass(frozen=True)
class ScramCredentials:
    """The stored keys of one user (RFC 5802, section 3)."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    def format(self) -> str:
        """The text behind `user:` in a SCRAM file."""
        salt, stored, server = (
            base64.b64encode(raw).decode() for raw in (self.salt, self.stored_key, self.server_key)
        )
        return f"{METHOD}${self.iterations}:{salt}${stored}:{server}"


def make_credentials(
    password: str, iterations: int = DEFAULT_ITERATIONS, salt: bytes = b""
) -> ScramCredentials:
    """Credentials for a password. An empty `salt` means a random one. Raises `ScramError`."""
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise ScramError(
            f"SCRAM iterations are {ITERATIONS_MIN} to {ITERATIONS_MAX}, found {iterations}"
        )
    salt = salt or secrets.token_bytes(_SALT_BYTES)
    salted = hashlib.pbkdf2_hmac("sha256", saslprep(password).encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    return ScramCredentials(
        salt,
        iterations,
        hashlib.sha256(client_key).digest(),
        hmac.digest(salted, b"Server Key", "sha256"),
    )


def parse_credentials(text: str) -> ScramCredentials:
    """The credentials in the text. Another text raises `ScramError`."""
    try:
        method, parameters, keys = text.split("$")
        iterations, salt = parameters.split(":")
        stored_key, server_key = keys.split(":")
        if method != METHOD or not ITERATIONS_MIN <= int(iterations) <= ITERATIONS_MAX:
            raise ValueError
        credentials = ScramCredentials(
            base64.b64decode(salt, validate=True),
            int(iterations),
            base64.b64decode(stored_key, validate=True),
            base64.b64decode(server_key, validate=True),
        )
        if not credentials.salt or {_KEY_BYTES} != {
            len(credentials.stored_key),
            len(credentials.server_key),
        }:
            raise ValueError
    except ValueError:
        raise ScramError(
            f"credentials are '{METHOD}$iterations:salt$storedkey:serverkey' in base64, with "
            f"{ITERATIONS_MIN} to {ITERATIONS_MAX} iterations and keys of {_KEY_BYTES} bytes"
        ) from None
    return credentials


def new_decoy_line() -> str:
    """The first line of a new SCRAM file: the secret behind the salts of users that do not exist.

    It is in the file so that these salts stay the same, like those of users, when the program
    restarts or other users are added or removed.
    """
    return _DECOY_PREFIX + base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()


class ScramFile:
    """The users of a SCRAM file: `user:SCRAM-SHA-256$iterations:salt$storedkey:serverkey` lines and
    `#` comments. One comment may be `# decoy:secret`."""

    def __init__(self) -> None:
        self._users: dict[str, ScramCredentials] = {}
        self._templates: list[ScramCredentials] = []
        self._secret = secrets.token_bytes(_KEY_BYTES)

    def __len__(self) -> int:
        return len(self._users)

    @classmethod
    def load(cls, path: Path | str) -> "ScramFile":
        """The users of a file. Raises `ScramError` with the file and the line."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ScramError(f"{path}: not UTF-8 at byte {error.start}") from None
        except OSError as error:
            raise ScramError(f"{path}: cannot read the SCRAM file: {error.strerror}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> "ScramFile":
        """The users in a text. `name` is the name of the text in errors. Raises `ScramError`."""
        file = cls()
        for number, line in enumerate(text.split("\n"), 1):
            line = line.rstrip()
            if line.startswith(_DECOY_PREFIX):
                file._secret = line.encode()
            if not line or line.startswith("#"):
                continue
            username, colon, credentials = line.partition(":")
            try:
                if not username or not colon:
                    raise ScramError("a line is 'user:credentials' or a comment")
                username = saslprep(username)
                if username in file._users:
                    raise ScramError(f"user {username!r} is already in a line above")
                file._users[username] = parse_credentials(credentials)
            except ScramError as error:
                raise ScramError(f"{name}:{number}: {error}") from None
        file._templates = list(file._users.values()) or [make_credentials("")]
        return file

    def lookup(self, username: str) -> ScramCredentials:
        """The user's credentials. An unknown user has some that are the same each time, have the
        form of an existing user's, and fit no password."""
        known = self._users.get(username)
        if known is not None:
            return known
        name = username.encode("utf-8", "surrogatepass")
        seed = hmac.digest(self._secret, name, "sha256")
        template = self._templates[int.from_bytes(seed, "big") % len(self._templates)]
        salt_bytes = len(template.salt)
        drawn = hashlib.shake_256(seed).digest(salt_bytes + 2 * _KEY_BYTES)
        return ScramCredentials(
            drawn[:salt_bytes],
            template.iterations,
            drawn[salt_bytes : salt_bytes + _KEY_BYTES],
            drawn[salt_bytes + _KEY_BYTES :],
        )


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
        signature = hmac.digest(credentials.stored_key, message, "sha256")
        if len(proof) != len(signature):
            raise ScramError("a proof has 32 bytes")
        client_key = _xor(proof, signature)
        if not hmac.compare_digest(hashlib.sha256(client_key).digest(), credentials.stored_key):
            raise ScramError("wrong user name or password")
        verifier = hmac.digest(credentials.server_key, message, "sha256")
        return b"v=" + base64.b64encode(verifier)


class ScramClient:
    """The client's side of one exchange: first(), final(server_first), then
    verify(server_final)."""

    def __init__(
        self, username: str, password: str, nonce_source: Callable[[], str] = nonce
    ) -> None:
        """A name or password that SASLprep refuses raises `ScramError`."""
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
        salted = hashlib.pbkdf2_hmac("sha256", self._password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        without_proof = f"c=biws,r={server_nonce}"
        message = f"{self._bare()},{text},{without_proof}".encode()
        signature = hmac.digest(hashlib.sha256(client_key).digest(), message, "sha256")
        server_key = hmac.digest(salted, b"Server Key", "sha256")
        self._verifier = hmac.digest(server_key, message, "sha256")
        proof = base64.b64encode(_xor(client_key, signature)).decode()
        return f"{without_proof},p={proof}".encode()

    def verify(self, server_final: bytes) -> None:
        """Raise `ScramError` unless the server has proved that it has the credentials."""
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
