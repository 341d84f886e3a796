"""Reads and replaces `access.json`, the file of the admin port's users and tokens.

The file is JSON and its format is a promise::

    {"format": 1,
     "users": {NAME: {"role": ROLE, "password": argon2id hash, "created_s": seconds since 1970}},
     "tokens": {ID: {"role": ROLE, "sha256": hash of the secret, "created_s": ..., "expires_s": ...,
                     "note": text, "created_by": text}}}

`expires_s` 0 means never. At a node of a cluster `agreed` has the version of what its nodes agree
on, and the names that were changed in this file since (`AgreedMark`). The file contains no password
and no token. It has mode 0600. Every change replaces it as a whole (write, fsync, rename) under a
lock, so the broker and the command line may both change it. Counter-example without the lock: both
read the file, and the second one writes back the token that the first one has removed.
"""

import fcntl
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from holdfast.security.access.scopes import ROLES, Scope
from holdfast.security.files import replace_file

T = TypeVar("T")

FILE: Final = "access.json"
LOCK: Final = "access.lock"
USE_FILE: Final = "access-use.json"
"""The times of last use, which a crash may lose: {"format": 1, "used_s": {KEY: seconds}}."""
FORMAT: Final = 1
FILE_BYTES_MAX: Final = 16 << 20
USERS_MAX: Final = 1000
TOKENS_MAX: Final = 10_000
NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")


class AccessError(Exception):
    """The users and tokens cannot be read or changed. The text names the file or the value, and
    what is allowed, and contains no secret."""


class StoredUser(msgspec.Struct, frozen=True):
    """A user of the admin port."""

    role: str
    password: str
    """The argon2id hash."""
    created_s: int


class StoredToken(msgspec.Struct, frozen=True):
    """A token of a program. Its id is not secret."""

    role: str
    sha256: str
    created_s: int
    expires_s: int = 0
    note: str = ""
    created_by: str = ""

    def has_expired(self, now_s: float) -> bool:
        """Whether the token is no longer valid."""
        return 0 < self.expires_s <= now_s


class AgreedMark(msgspec.Struct, frozen=True):
    """The version that a cluster has agreed on, and later changes of the file."""

    cluster: str
    version: int
    users: list[str] = []
    """The names that were added, changed or removed in this file since."""
    tokens: list[str] = []


class AccessData(msgspec.Struct, frozen=True):
    """All users and tokens. A change makes a new value."""

    format: int = FORMAT
    users: dict[str, StoredUser] = {}
    tokens: dict[str, StoredToken] = {}
    agreed: AgreedMark | None = None
    """None: no cluster has agreed on the file."""

    @property
    def is_set_up(self) -> bool:
        """Whether there are users or tokens, so that requests need credentials."""
        return bool(self.users or self.tokens)


class LastUses(msgspec.Struct, frozen=True):
    """The times of last use, in seconds since 1970. A key is `user NAME` or `token ID`."""

    format: int = FORMAT
    used_s: dict[str, int] = {}


class AccessFile:
    """The file in one data directory. Its methods block, so the broker calls them in threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / FILE
        # The lock of the file excludes other processes only.
        self._changing = threading.Lock()

    def read(self) -> AccessData:
        """The users and tokens; none if there is no file. Raises `AccessError`."""
        try:
            return _read(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return AccessData()
        except OSError as error:
            raise AccessError(f"{self.path}: {error.strerror}") from None

    def stamp(self) -> tuple[int, int, int] | None:
        """A value that differs after each change of the file; None if there is no file."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def change(self, make: Callable[[AccessData], tuple[AccessData, T]]) -> T:
        """Replaces the file by what `make` returns for its content, and marks what no cluster has
        agreed on yet. Raises `AccessError`."""
        result: list[T] = []

        def marked(before: AccessData) -> AccessData:
            made, found = make(before)
            result.append(found)
            return _marked(before, made)

        self.update(marked)
        return result[0]

    def update(self, make: Callable[[AccessData], AccessData]) -> AccessData:
        """Replaces the file by what `make` returns for its content, and returns it. Raises
        `AccessError`."""
        with self._changing, self._locked():
            made = make(self.read())
            self._replace(FILE, msgspec.json.format(msgspec.json.encode(made), indent=1))
        return made

    def read_uses(self) -> LastUses:
        """The times of last use. A damaged file counts as none, because only times are lost."""
        try:
            return msgspec.json.decode((self.directory / USE_FILE).read_bytes(), type=LastUses)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return LastUses()

    def write_uses(self, uses: LastUses) -> None:
        """Replaces the times of last use. Raises `AccessError`."""
        try:
            self._replace(USE_FILE, msgspec.json.encode(uses))
        except OSError as error:
            raise AccessError(f"{self.directory / USE_FILE}: {error.strerror}") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            descriptor = self._open_lock()
        except OSError as error:
            raise AccessError(f"{self.directory / LOCK}: {error.strerror}") from None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            yield
        except OSError as error:
            raise AccessError(f"{self.directory}: {error.strerror}") from None
        finally:
            os.close(descriptor)

    def _open_lock(self) -> int:
        """Opens the lock, made if it is missing. Raises `OSError`.

        The directory may belong to another user than the process. Counter-example with a link that
        is followed, or with a file that was there before: the owner of the directory lets the lock
        point to a file of root, and root gives that file to him.
        """
        path, flags = self.directory / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(FileNotFoundError):
            return os.open(path, flags)
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            # Another process has made it meanwhile.
            return os.open(path, flags)
        self._give_owner(descriptor)
        return descriptor

    def _replace(self, name: str, content: bytes) -> None:
        """Replaces a file. Raises `OSError`."""
        replace_file(self.directory / name, (content, b"\n"), self._give_owner)

    def _give_owner(self, descriptor: int) -> None:
        """Gives a file that this process has just made to the owner of the directory. The broker
        may run as another user than the command line, and has to read the file."""
        folder, file = self.directory.stat(), os.fstat(descriptor)
        if (folder.st_uid, folder.st_gid) != (file.st_uid, file.st_gid) and os.geteuid() == 0:
            os.fchown(descriptor, folder.st_uid, folder.st_gid)


def read_given(path: str) -> AccessData:
    """The users and tokens of `admin.access_file`, which has the same format; none without a path.
    Raises `AccessError`."""
    try:
        return _read(Path(path)) if path else AccessData()
    except OSError as error:
        raise AccessError(f"admin.access_file: {path}: {error.strerror}") from None


def _read(path: Path) -> AccessData:
    with path.open("rb") as file:
        text = file.read(FILE_BYTES_MAX + 1)
    if len(text) > FILE_BYTES_MAX:
        raise AccessError(f"{path} has more than {FILE_BYTES_MAX} bytes")
    return parse(text, str(path))


def parse(text: bytes, name: str) -> AccessData:
    """The content of a file. `name` is its name in errors. Raises `AccessError`."""
    try:
        # The format first: a later one may have other types.
        format = msgspec.json.decode(text, type=_Format).format
        if format != FORMAT:
            raise AccessError(f"{name}: format {format}, this program reads {FORMAT}")
        data = msgspec.json.decode(text, type=AccessData)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AccessError(f"{name}: {error}") from None
    for kind, stored in (("users", data.users), ("tokens", data.tokens)):
        for key, value in stored.items():
            if not NAME.fullmatch(key):
                raise AccessError(f"{name}: {kind}: {key[:80]!r}: 1 to 64 of A-Z a-z 0-9 . _ @ -")
            if value.role not in ROLES:
                raise AccessError(f"{name}: {kind}.{key}.role: one of {', '.join(ROLES)}")
    for key, user in data.users.items():
        if not user.password.startswith("$argon2id$"):
            raise AccessError(f"{name}: users.{key}.password: an argon2id hash")
    for key, token in data.tokens.items():
        if not re.fullmatch(r"[0-9a-f]{64}", token.sha256):
            raise AccessError(f"{name}: tokens.{key}.sha256: 64 hexadecimal digits")
    return data


def _marked(before: AccessData, made: AccessData) -> AccessData:
    mark = before.agreed
    if mark is None:
        return made
    users = {*mark.users, *_differing(before.users, made.users)}
    tokens = {*mark.tokens, *_differing(before.tokens, made.tokens)}
    mark = AgreedMark(mark.cluster, mark.version, sorted(users), sorted(tokens))
    return AccessData(users=made.users, tokens=made.tokens, agreed=mark)


def _differing(before: dict[str, T], made: dict[str, T]) -> list[str]:
    return [key for key in before.keys() | made.keys() if before.get(key) != made.get(key)]


def is_readable_by_others(path: Path) -> bool:
    """Whether other users of the machine may read the file."""
    try:
        return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False


def scope_of(role: str) -> Scope:
    """The scope of a role. Raises `AccessError` for an unknown one."""
    if role not in ROLES:
        raise AccessError(f"role {role[:80]!r}: one of {', '.join(ROLES)}")
    return ROLES[role]


class _Format(msgspec.Struct):
    format: int
