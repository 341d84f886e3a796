"""Changes users and tokens, for `AccessFile.change`. Each change makes new data from the old."""

import secrets
from collections.abc import Callable
from hashlib import sha256
from typing import Final, TypeAlias, TypeVar

from msgspec.structs import replace

from holdfast.security.access.access_file import (
    NAME,
    TOKENS_MAX,
    USERS_MAX,
    AccessData,
    AccessError,
    StoredToken,
    StoredUser,
    scope_of,
)
from holdfast.security.access.scopes import Scope

TOKEN_PREFIX: Final = "holdfast_"
"""The beginning of each token, by which scanners for leaked secrets find it."""
SECRET_BYTES: Final = 32
PASSWORD_BYTES_MIN: Final = 8
PASSWORD_BYTES_MAX: Final = 1024
NOTE_CHARACTERS_MAX: Final = 200
VALID_S_MAX: Final = 10 * 366 * 86_400

T = TypeVar("T")
Made = tuple[AccessData, None]
Change: TypeAlias = Callable[[AccessData], tuple[AccessData, T]]
"""Makes the new data, and a result."""


def hash_admin_password(password: str) -> str:
    """The argon2id hash, with 19 MiB of memory and two passes, about 30 ms. Raises `AccessError`
    for a password that is too short or too long."""
    from argon2 import PasswordHasher

    try:
        given = password.encode()
    except UnicodeEncodeError:
        # No login can send it, because JSON is UTF-8.
        raise AccessError("a password is UTF-8 text") from None
    if not PASSWORD_BYTES_MIN <= len(given) <= PASSWORD_BYTES_MAX:
        raise AccessError(f"a password has {PASSWORD_BYTES_MIN} to {PASSWORD_BYTES_MAX} bytes")
    hasher = PasswordHasher(time_cost=2, memory_cost=19_456, parallelism=1)
    return hasher.hash(given)


def add_user(name: str, role: str, hashed: str, now_s: int) -> Callable[[AccessData], Made]:
    """Adds a user. `hashed`: see `hash_admin_password`."""

    def make(data: AccessData) -> Made:
        if not NAME.fullmatch(name):
            raise AccessError(f"user {name[:80]!r}: 1 to 64 of A-Z a-z 0-9 . _ @ -")
        scope_of(role)
        if name in data.users:
            raise AccessError(f"there is a user {name!r} already")
        if len(data.users) >= USERS_MAX:
            raise AccessError(f"there are {USERS_MAX} users, more are not allowed")
        users = data.users | {name: StoredUser(role, hashed, now_s)}
        return replace(data, users=users), None

    return make


def change_user(name: str, role: str = "", hashed: str = "") -> Callable[[AccessData], Made]:
    """Changes the role or the password of a user; empty: no change."""

    def make(data: AccessData) -> Made:
        user = _user(data, name)
        if role:
            scope_of(role)
        changed = replace(user, role=role or user.role, password=hashed or user.password)
        return replace(data, users=data.users | {name: changed}), None

    return make


def remove_user(name: str) -> Callable[[AccessData], Made]:
    """Removes a user."""

    def make(data: AccessData) -> Made:
        _user(data, name)
        users = {key: value for key, value in data.users.items() if key != name}
        return replace(data, users=users), None

    return make


def add_token(
    role: str, now_s: int, valid_s: int = 0, note: str = "", created_by: str = ""
) -> Callable[[AccessData], tuple[AccessData, tuple[str, str]]]:
    """Adds a token, valid for `valid_s` seconds (0: for ever). The result is its id and its text,
    which nothing shows again."""

    def make(data: AccessData) -> tuple[AccessData, tuple[str, str]]:
        scope_of(role)
        if not 0 <= valid_s <= VALID_S_MAX:
            raise AccessError(f"a token is valid for 1 to {VALID_S_MAX} seconds, 0 means for ever")
        if len(note) > NOTE_CHARACTERS_MAX or not note.isprintable():
            raise AccessError(f"a note has at most {NOTE_CHARACTERS_MAX} printable characters")
        # An expired token makes room, and stays listed until then.
        kept = {
            key: value for key, value in data.tokens.items()
            if len(data.tokens) < TOKENS_MAX or not value.has_expired(now_s)
        }  # fmt: skip
        if len(kept) >= TOKENS_MAX:
            raise AccessError(f"there are {TOKENS_MAX} tokens, more are not allowed")
        id = secrets.token_hex(6)
        secret = secrets.token_urlsafe(SECRET_BYTES)
        kept[id] = StoredToken(
            role,
            hash_secret(secret),
            now_s,
            expires_s=now_s + valid_s if valid_s else 0,
            note=note,
            created_by=created_by,
        )
        return replace(data, tokens=kept), (id, f"{TOKEN_PREFIX}{id}_{secret}")

    return make


def remove_token(id: str) -> Callable[[AccessData], Made]:
    """Removes a token."""

    def make(data: AccessData) -> Made:
        if id not in data.tokens:
            raise AccessError(f"there is no token {id[:80]!r}")
        tokens = {key: value for key, value in data.tokens.items() if key != id}
        return replace(data, tokens=tokens), None

    return make


def kept_admin(make: Change[T], now_s: float, given: AccessData) -> Change[T]:
    """The same change, refused if no valid administrator would be left, those of the configuration
    included. The admin port cannot undo that; the command line on the machine can."""

    def checked(data: AccessData) -> tuple[AccessData, T]:
        made, result = make(data)
        users, tokens = made.users | given.users, made.tokens | given.tokens
        roles = [user.role for user in users.values()]
        roles += [token.role for token in tokens.values() if not token.has_expired(now_s)]
        if Scope.ADMIN.role not in roles:
            raise AccessError(
                "no user or valid token with the role admin would be left: add one first, or use"
                " `holdfast access` with --data on the machine of the node"
            )
        return made, result

    return checked


def hash_secret(secret: str) -> str:
    """The stored hash of a token's secret. One round is enough, because it has 256 random bits."""
    return sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def split_token(text: str) -> tuple[str, str] | None:
    """The id and the secret of a token, or None if the text is no token."""
    if not text.startswith(TOKEN_PREFIX):
        return None
    id, found, secret = text[len(TOKEN_PREFIX) :].partition("_")
    return (id, secret) if found and id and secret else None


def _user(data: AccessData, name: str) -> StoredUser:
    user = data.users.get(name)
    if user is None:
        raise AccessError(f"there is no user {name[:80]!r}")
    return user
