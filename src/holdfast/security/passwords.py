"""Password files in Mosquitto's format: `user:hash` lines, `#` comments.

Hashes::

    $6$salt$hash               sha512         one round, what Mosquitto 1.6 and before wrote
    $7$iterations$salt$hash    sha512-pbkdf2  what Mosquitto 2.0 reads and writes
    $argon2id$v=19$...         argon2id       what Mosquitto 2.1 writes

A wrong password costs its hash, and so does an unknown user. That one is checked against another
user's line, chosen by a keyed hash of the name, so neither the time nor its spread shows which
users exist. A password that was right once is remembered as a keyed digest. So a client that
reconnects every second does not cost a hash every time.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Final

from holdfast.numbers import whole_number

SCHEMES: Final = ("sha512", "sha512-pbkdf2", "argon2id")
DEFAULT_SCHEME: Final = "sha512-pbkdf2"
DEFAULT_ITERATIONS: Final = 10_000
"""The iterations of new hashes: about 7 ms of CPU per connection (Mosquitto 2.0 writes 101
iterations, 0.2 ms). Raise it for passwords that people choose. With it ten thousand devices with
random passwords reconnect in about a minute."""
ITERATIONS_MAX: Final = 10_000_000
"""The most iterations that are accepted."""
USERNAME_BYTES_MAX: Final = 65535
_SALT_BYTES: Final = 12
_HASH_BYTES: Final = 64
# No digest is this, and comparing with it takes as long as with one.
_NEVER: Final = bytes(32)


class PasswordError(ValueError):
    """A password file or hash that cannot be used. The text has the position and the allowed
    form."""


class PasswordHash:
    """One parsed hash."""

    def __init__(self, scheme: str, iterations: int, salt: bytes, digest: bytes) -> None:
        self.scheme = scheme
        self.iterations = iterations
        self.salt = salt
        # For argon2id: the whole text, which contains its own parameters.
        self.digest = digest

    def verify(self, password: bytes) -> bool:
        """Whether the password has this hash."""
        if self.scheme == "argon2id":
            return _verify_argon2id(self.digest, password)
        return hmac.compare_digest(
            _digest(self.scheme, self.iterations, self.salt, password), self.digest
        )


def hash_password(
    password: str | bytes,
    scheme: str = DEFAULT_SCHEME,
    iterations: int = DEFAULT_ITERATIONS,
    salt: bytes = b"",
) -> str:
    """The text behind `user:`. `iterations` is for sha512-pbkdf2; an empty `salt` means a random
    one. Raises `PasswordError`."""
    if isinstance(password, str):
        # An argument of the command line that is not UTF-8 keeps its bytes.
        password = password.encode("utf-8", "surrogateescape")
    if scheme not in SCHEMES:
        raise PasswordError(f"unknown hash {scheme!r}, there are {', '.join(SCHEMES)}")
    if scheme == "argon2id":
        return _hash_argon2id(password)
    if not 1 <= iterations <= ITERATIONS_MAX:
        raise PasswordError(f"iterations are 1 to {ITERATIONS_MAX}, found {iterations}")
    salt = salt or secrets.token_bytes(_SALT_BYTES)
    digest = base64.b64encode(_digest(scheme, iterations, salt, password)).decode()
    text = base64.b64encode(salt).decode()
    if scheme == "sha512":
        return f"$6${text}${digest}"
    return f"$7${iterations}${text}${digest}"


def is_hash(text: str) -> bool:
    """Whether the text looks like a hash, and not like a plain password."""
    return text.startswith(("$6$", "$7$", "$argon2id$"))


def parse_hash(text: str) -> PasswordHash:
    """The hash in the text. Another text raises `PasswordError`."""
    fields = text.split("$")
    if text.startswith("$argon2id$"):
        _check_argon2id(text)
        return PasswordHash("argon2id", 0, b"", text.encode())
    if text.startswith("$6$") and len(fields) == 4:
        return PasswordHash("sha512", 1, *_salt_and_digest(fields[2], fields[3]))
    if text.startswith("$7$") and len(fields) == 5:
        iterations = whole_number(fields[2], ITERATIONS_MAX, 1)
        if iterations is None:
            raise PasswordError(f"iterations are 1 to {ITERATIONS_MAX}, found {fields[2]!r}")
        return PasswordHash("sha512-pbkdf2", iterations, *_salt_and_digest(fields[3], fields[4]))
    raise PasswordError(
        "a hash is '$6$salt$hash', '$7$iterations$salt$hash' or '$argon2id$...' "
        "('holdfast passwd -U FILE' hashes plain passwords)"
    )


def _salt_and_digest(salt: str, digest: str) -> tuple[bytes, bytes]:
    try:
        raw_salt = base64.b64decode(salt, validate=True)
        raw_digest = base64.b64decode(digest, validate=True)
    except (binascii.Error, ValueError):
        raise PasswordError("salt or hash is not base64") from None
    if not raw_salt or len(raw_digest) != _HASH_BYTES:
        raise PasswordError(
            f"a salt of {len(raw_salt)} and a hash of {len(raw_digest)} bytes, "
            f"expected at least 1 and exactly {_HASH_BYTES}"
        )
    return raw_salt, raw_digest


def _digest(scheme: str, iterations: int, salt: bytes, password: bytes) -> bytes:
    if scheme == "sha512":
        return hashlib.sha512(password + salt).digest()
    return hashlib.pbkdf2_hmac("sha512", password, salt, iterations)


def _hash_argon2id(password: bytes) -> str:
    try:
        from argon2 import PasswordHasher
    except ImportError:
        raise PasswordError(_NO_ARGON2) from None
    return PasswordHasher().hash(password)


def _check_argon2id(text: str) -> None:
    try:
        from argon2 import exceptions, extract_parameters
    except ImportError:
        raise PasswordError(_NO_ARGON2) from None
    try:
        extract_parameters(text)
    except exceptions.InvalidHashError:
        raise PasswordError("not a valid argon2id hash") from None


def _verify_argon2id(digest: bytes, password: bytes) -> bool:
    from argon2 import exceptions, low_level

    try:
        return low_level.verify_secret(digest, password, low_level.Type.ID)
    except exceptions.VerificationError:
        return False


_NO_ARGON2: Final = "argon2id needs the package argon2-cffi, which is not installed"


class PasswordFile:
    """The users of one file. verify() is safe to call from several threads."""

    def __init__(self) -> None:
        self._users: dict[str, PasswordHash] = {}
        # Stand-ins for unknown users: all hashes of the file, or one made for an empty file.
        self._hashes: list[PasswordHash] = []
        self._secret = secrets.token_bytes(32)
        # Keyed digest of the last right password of each user; at most one per user.
        self._verified: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, username: str) -> bool:
        return username in self._users

    @classmethod
    def load(cls, path: Path | str) -> "PasswordFile":
        """The users of a file. Raises `PasswordError` for an unreadable or invalid one."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PasswordError(f"{path}: not UTF-8 at byte {error.start}") from None
        except OSError as error:
            raise PasswordError(
                f"{path}: cannot read the password file: {error.strerror}"
            ) from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> "PasswordFile":
        """The users in a text. `name` is the name of the text in errors. Raises `PasswordError`."""
        file = cls()
        lines: dict[str, int] = {}
        for number, line in enumerate(text.split("\n"), 1):
            line = line.rstrip()
            if not line or line.startswith("#"):
                continue
            where = f"{name}:{number}: "
            username, colon, hashed = line.partition(":")
            if not username or not colon:
                raise PasswordError(
                    where + "a line is 'user:hash' or a comment that begins with '#'"
                )
            if username in lines:
                raise PasswordError(
                    f"{where}user {username!r} is already in line {lines[username]}"
                )
            lines[username] = number
            try:
                file._users[username] = parse_hash(hashed)
            except PasswordError as error:
                raise PasswordError(where + str(error)) from None
        file._hashes = list(file._users.values()) or [parse_hash(hash_password(b""))]
        return file

    def with_users(
        self, users: dict[str, PasswordHash], hidden: Collection[str], before: "PasswordFile | None"
    ) -> "PasswordFile":
        """A file with these users besides its own, in place of those with the same names, and
        without the `hidden` ones. Right passwords that `before` remembers count if the user's hash
        is the same."""
        made = PasswordFile()
        made._users = self._users | users
        for username in hidden:
            made._users.pop(username, None)
        made._hashes = list(made._users.values()) or self._hashes
        if before is not None:
            made._secret = before._secret
            made._verified = {
                username: key
                for username, key in before._verified.items()
                if made.has_same_hash(username, before)
            }
        return made

    def has_same_hash(self, username: str, other: "PasswordFile") -> bool:
        """Whether both files have the same password for a user."""
        mine, its = self._users.get(username), other._users.get(username)
        if mine is None or its is None:
            return False
        return mine is its or (mine.salt, mine.digest) == (its.salt, its.digest)

    def is_remembered(self, username: str, password: bytes) -> bool:
        """Whether the password was right before, in microseconds. False means unknown.

        The time leaks nothing. Only a client with the right password can make it True, and keyed
        digests are compared in constant time, for unknown users too.
        """
        key = self._key(username, password)
        return hmac.compare_digest(self._verified.get(username, _NEVER), key)

    def _key(self, username: str, password: bytes) -> bytes:
        name = username.encode("utf-8", "surrogatepass")
        return hmac.digest(self._secret, name + password, "sha256")

    def verify(self, username: str, password: bytes) -> bool:
        """Whether the password is right. Costs milliseconds of CPU without the interpreter lock, so
        call it off the event loop."""
        name = username.encode("utf-8", "surrogatepass")
        key = self._key(username, password)
        known = self._users.get(username)
        if hmac.compare_digest(self._verified.get(username, _NEVER), key):
            return True
        if known is None:
            pick = int.from_bytes(hmac.digest(self._secret, name, "sha256")[:8], "big")
            self._hashes[pick % len(self._hashes)].verify(password)
            return False
        if not known.verify(password):
            return False
        self._verified[username] = key
        return True
