"""Credentials of SCRAM users, and the file that has them.

The server stores no password, and no value that could be sent in its place. A user that does not
exist gets a salt and iterations as if it did (see `ScramFile.lookup`). So the exchange fails at the
same message as with a wrong password and looks the same until then.
"""

import base64
import hashlib
import hmac
import secrets
import stringprep
from pathlib import Path
from typing import Final
from unicodedata import ucd_3_2_0

from msgspec import Struct

METHOD: Final = "SCRAM-SHA-256"
HASHES: Final = {METHOD: "sha256", "SCRAM-SHA-512": "sha512"}
"""The methods, each with its hash."""
DEFAULT_ITERATIONS: Final = 4096
ITERATIONS_MIN: Final = 4096
"""The least iterations that are accepted (RFC 7677, section 4). A client that accepted fewer would
help a false server to guess."""
ITERATIONS_MAX: Final = 1_000_000
"""The most iterations that are accepted, about half a second: a hostile server must not stall its
clients for longer."""
_SALT_BYTES: Final = 16
_SECRET_BYTES: Final = 32
_DECOY_PREFIX: Final = "# decoy:"


class ScramError(ValueError):
    """A failed exchange. The text contains no secret and may go to the log."""


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


class ScramCredentials(Struct, frozen=True):
    """The stored keys of one user (RFC 5802, section 3)."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes
    method: str = METHOD

    def format(self) -> str:
        """The text behind `user:` in a SCRAM file."""
        salt, stored, server = (
            base64.b64encode(raw).decode() for raw in (self.salt, self.stored_key, self.server_key)
        )
        return f"{self.method}${self.iterations}:{salt}${stored}:{server}"


def make_credentials(
    password: str,
    iterations: int = DEFAULT_ITERATIONS,
    salt: bytes = b"",
    method: str = METHOD,
) -> ScramCredentials:
    """Credentials for a password. An empty `salt` means a random one. Raises `ScramError`."""
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise ScramError(
            f"SCRAM iterations are {ITERATIONS_MIN} to {ITERATIONS_MAX}, found {iterations}"
        )
    salt = salt or secrets.token_bytes(_SALT_BYTES)
    name = HASHES[method]
    salted = hashlib.pbkdf2_hmac(name, saslprep(password).encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", name)
    server_key = hmac.digest(salted, b"Server Key", name)
    stored_key = hashlib.new(name, client_key).digest()
    return ScramCredentials(salt, iterations, stored_key, server_key, method)


def parse_credentials(text: str) -> ScramCredentials:
    """The credentials in the text. Another text raises `ScramError`."""
    try:
        method, parameters, keys = text.split("$")
        iterations, salt = parameters.split(":")
        stored_key, server_key = keys.split(":")
        if method not in HASHES or not ITERATIONS_MIN <= int(iterations) <= ITERATIONS_MAX:
            raise ValueError
        credentials = ScramCredentials(
            base64.b64decode(salt, validate=True),
            int(iterations),
            base64.b64decode(stored_key, validate=True),
            base64.b64decode(server_key, validate=True),
            method,
        )
        if not credentials.salt or {_key_bytes(method)} != {
            len(credentials.stored_key),
            len(credentials.server_key),
        }:
            raise ValueError
    except ValueError:
        raise ScramError(
            f"credentials are '{METHOD}$iterations:salt$storedkey:serverkey' in base64, with "
            f"{ITERATIONS_MIN} to {ITERATIONS_MAX} iterations and keys of {_key_bytes(METHOD)}"
            " bytes; or the same of SCRAM-SHA-512, with its keys"
        ) from None
    return credentials


def _key_bytes(method: str) -> int:
    return hashlib.new(HASHES[method]).digest_size


def new_decoy_line() -> str:
    """The first line of a new SCRAM file: the secret behind the salts of users that do not exist.

    It is in the file so that these salts stay the same, like those of users, when the program
    restarts or other users are added or removed.
    """
    return _DECOY_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


class ScramFile:
    """The users of a SCRAM file: `user:SCRAM-SHA-256$iterations:salt$storedkey:serverkey` lines and
    `#` comments. A user may have a line of each method. One comment may be `# decoy:secret`."""

    def __init__(self) -> None:
        self._users: dict[str, dict[str, ScramCredentials]] = {}
        """By method and name. Without any user there is SCRAM-SHA-256 with none."""
        self._templates: dict[str, list[ScramCredentials]] = {}
        self._secret = secrets.token_bytes(_SECRET_BYTES)

    def __len__(self) -> int:
        return sum(map(len, self._users.values()))

    def __contains__(self, username: str) -> bool:
        return any(username in users for users in self._users.values())

    @property
    def methods(self) -> list[str]:
        """The methods that some user has."""
        return list(self._templates)

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
                parsed = parse_credentials(credentials)
                users = file._users.setdefault(parsed.method, {})
                if username in users:
                    raise ScramError(f"user {username!r} is already in a line above")
                users[username] = parsed
            except ScramError as error:
                raise ScramError(f"{name}:{number}: {error}") from None
        file._templates = {method: list(users.values()) for method, users in file._users.items()}
        if not file._templates:
            file._templates[METHOD] = [make_credentials("")]
        return file

    def lookup(self, username: str, method: str = METHOD) -> ScramCredentials:
        """The user's credentials for one of `methods`. An unknown user has some that are the same
        each time, have the form of an existing user's, and fit no password."""
        known = self._users.get(method, {}).get(username)
        if known is not None:
            return known
        name = username.encode("utf-8", "surrogatepass")
        if method != METHOD:
            # No user has the same salt for two methods.
            name += b"\0" + method.encode()
        seed = hmac.digest(self._secret, name, "sha256")
        templates = self._templates[method]
        template = templates[int.from_bytes(seed, "big") % len(templates)]
        salt_bytes, key_bytes = len(template.salt), len(template.stored_key)
        drawn = hashlib.shake_256(seed).digest(salt_bytes + 2 * key_bytes)
        return ScramCredentials(
            drawn[:salt_bytes],
            template.iterations,
            drawn[salt_bytes : salt_bytes + key_bytes],
            drawn[salt_bytes + key_bytes :],
            method,
        )
