"""Checks credentials: users and tokens as they are now, sessions and logins."""

import hmac
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct

from holdfast.security.access.access_file import (
    AccessData,
    AccessError,
    AccessFile,
    LastUses,
    is_readable_by_others,
)
from holdfast.security.access.changes import hash_admin_password, hash_secret, split_token
from holdfast.security.access.scopes import ROLES, Scope
from holdfast.security.access.sessions import BrowserSession, BrowserSessions
from holdfast.security.access.throttle import LoginThrottle
from holdfast.security.passwords import PasswordHash

T = TypeVar("T")
logger = logging.getLogger("holdfast")

BEARER: Final = "bearer "
USES_S: Final = 60.0
"""The seconds between two writes of the times of last use."""
UNKNOWN_READ_S: Final = 0.2
"""The least seconds between two looks at the file for tokens that are not known."""


class Unauthenticated(Exception):
    """The credentials are missing or not valid. The text says what to do."""


class CredentialOwner(Struct, frozen=True):
    """The owner of valid credentials."""

    name: str
    """`user NAME` or `token ID`."""
    scope: Scope


class AdminCredentials:
    """The users, tokens and sessions of one admin port.

    `identify` reads memory only, and any thread may call it. `refresh`, `change` and `verify` read
    files or hash passwords, so they belong into threads.
    """

    def __init__(self, directory: Path, given: AccessData | None = None) -> None:
        """Reads the file. Raises `AccessError`. `given`: see `use_given`."""
        self.file = AccessFile(directory)
        self.is_written = True
        """Whether the file has what is in force."""
        self.given = given or AccessData()
        self.sessions = BrowserSessions()
        self.throttle = LoginThrottle()
        self._lock = threading.Lock()
        self._stamp = self.file.stamp()
        self.own = self.file.read()
        """The users and tokens of the file."""
        self._data = self._all()
        self._uses = dict(self.file.read_uses().used_s)
        self._written_uses = dict(self._uses)
        self._wrote_uses_s = time.monotonic()
        self._looked_s = 0.0
        self._stand_in = ""
        if is_readable_by_others(self.file.path):
            logger.warning("access_file_readable path=%r text='chmod 600 it'", str(self.file.path))

    @property
    def data(self) -> AccessData:
        """The users and tokens in force."""
        return self._data

    @property
    def is_set_up(self) -> bool:
        """Whether requests need credentials."""
        return self._data.is_set_up

    def use_given(self, given: AccessData) -> None:
        """Uses the users and tokens of a file of the configuration, beside those of the data
        directory. A name in both is that of the configuration. It may wait for a file."""
        with self._lock:
            self.given = given
            self._data = self._all()

    def _all(self) -> AccessData:
        own, given = self.own, self.given
        return AccessData(users=own.users | given.users, tokens=own.tokens | given.tokens)

    def take(self, make: Callable[[AccessData], AccessData]) -> None:
        """Changes the file, and puts the change in force also if the file cannot be written:
        otherwise a full disk would keep a removed token valid."""
        with self._lock:
            try:
                self.own = self.file.update(make)
                self.is_written = True
            except AccessError as error:
                if self.is_written:
                    logger.error("access_file_not_written error=%r", str(error))
                self.own = make(self.own)
                self.is_written = False
            self._stamp = self.file.stamp()
            self._data = self._all()

    def last_use_s(self, name: str) -> int:
        """The seconds since 1970 of the last use of `user NAME` or `token ID`; 0: never."""
        return self._uses.get(name, 0)

    def identify(self, authorization: str, cookie: str, *, is_use: bool = True) -> CredentialOwner:
        """The owner of the `Authorization` header or, without one, of the session cookie. Raises
        `Unauthenticated`. `is_use`: whether this is a request, from which idle sessions count."""
        if authorization:
            return self._by_token(authorization)
        if not cookie:
            raise Unauthenticated("send a token (Authorization: Bearer TOKEN), or log in")
        session = self.sessions.find(cookie, time.monotonic(), is_use=is_use)
        role = "" if session is None else self._role_of(session)
        if session is None or not role:
            self.sessions.end(cookie)
            raise Unauthenticated("the session has ended: log in again")
        return self._used(CredentialOwner(session.owner, ROLES[role]))

    def _role_of(self, session: BrowserSession) -> str:
        """The present role of a session's owner, or "" if the session is no longer valid."""
        kind, _, name = session.owner.partition(" ")
        if kind == "user":
            user = self._data.users.get(name)
            return "" if user is None or user.password != session.secret_hash else user.role
        token = self._data.tokens.get(name)
        if token is None or token.sha256 != session.secret_hash or token.has_expired(time.time()):
            return ""
        return token.role

    def _by_token(self, authorization: str) -> CredentialOwner:
        if not authorization.lower().startswith(BEARER):
            raise Unauthenticated("send a token: Authorization: Bearer TOKEN")
        parts = split_token(authorization[len(BEARER) :].strip())
        token = None if parts is None else self._data.tokens.get(parts[0])
        if parts is None or token is None:
            raise Unauthenticated("this token is not known: it was mistyped or removed")
        if not hmac.compare_digest(hash_secret(parts[1]), token.sha256):
            raise Unauthenticated("this token is not known: it was mistyped or removed")
        if token.has_expired(time.time()):
            raise Unauthenticated("this token has expired: make a new one")
        return self._used(CredentialOwner(f"token {parts[0]}", ROLES[token.role]))

    def _used(self, identity: CredentialOwner) -> CredentialOwner:
        self._uses[identity.name] = int(time.time())
        return identity

    def refresh(self) -> None:
        """Reads the file again if it has changed. A file that cannot be read, or that has gone,
        leaves the users and tokens in force: else its removal would open the port."""
        with self._lock:
            stamp = self.file.stamp()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            if stamp is None:
                logger.error("access_file_gone path=%r text='the users stay'", str(self.file.path))
                return
            try:
                self.own = self.file.read()
            except AccessError as error:
                logger.error("access_file_refused error=%r text='the users stay'", str(error))
                return
            self._data = data = self._all()
            logger.info("access_read users=%d tokens=%d", len(data.users), len(data.tokens))

    def may_look(self) -> bool:
        """Whether unknown credentials are a reason to read the file again now."""
        now_s = time.monotonic()
        if now_s - self._looked_s < UNKNOWN_READ_S:
            return False
        self._looked_s = now_s
        return True

    def change(self, make: Callable[[AccessData], tuple[AccessData, T]]) -> T:
        """Changes the file, and puts the change in force. Raises `AccessError`."""
        result = self.file.change(make)
        self.refresh()
        return result

    def verify(self, name: str, password: str) -> str:
        """The hash of a right password, or "". Costs about 30 ms of CPU. An unknown user costs the
        same, so the time does not show which users exist."""
        user = self._data.users.get(name)
        if user is None and not self._stand_in:
            self._stand_in = hash_admin_password("a password of nobody")
        hashed = self._stand_in if user is None else user.password
        given = password.encode("utf-8", "surrogatepass")
        is_right = PasswordHash("argon2id", 0, b"", hashed.encode()).verify(given)
        return hashed if user is not None and is_right else ""

    def begin_session(self, user: str, password_hash: str) -> str:
        """Begins a session after `verify`. Returns the secret for the cookie."""
        self._used(CredentialOwner(f"user {user}", Scope.OPEN))
        return self.sessions.begin(f"user {user}", password_hash, time.monotonic())

    def begin_token_session(self, token: str) -> tuple[CredentialOwner, str]:
        """Begins a session that ends with its token. Returns the owner, and the secret for the
        cookie. Raises `Unauthenticated`."""
        owner = self._by_token(BEARER + token)
        stored = self._data.tokens[owner.name.partition(" ")[2]]
        return owner, self.sessions.begin(owner.name, stored.sha256, time.monotonic())

    def session_of(self, cookie: str) -> BrowserSession | None:
        """The session of a cookie, or None."""
        return self.sessions.find(cookie, time.monotonic()) if cookie else None

    def save_uses(self, *, at_once: bool = False) -> None:
        """Writes the times of last use, if some have changed and it is time to."""
        now_s = time.monotonic()
        if not at_once and now_s - self._wrote_uses_s < USES_S:
            return
        self._wrote_uses_s = now_s
        data = self._data
        names = {f"user {name}" for name in data.users} | {f"token {id}" for id in data.tokens}
        uses = {name: used for name, used in list(self._uses.items()) if name in names}
        if uses == self._written_uses:
            return
        self.file.write_uses(LastUses(used_s=uses))
        self._uses, self._written_uses = uses, dict(uses)
