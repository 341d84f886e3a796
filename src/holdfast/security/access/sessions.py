"""Sessions of browsers. They are in memory, so a restart of the broker ends them all."""

import secrets
from hashlib import sha256
from typing import Final

from msgspec import Struct

SESSION_S: Final = 12 * 3600.0
"""The seconds after which a session ends."""
IDLE_S: Final = 2 * 3600.0
"""The seconds without a request after which a session ends."""
SESSIONS_MAX: Final = 1024
SESSIONS_PER_OWNER_MAX: Final = 16
"""The most sessions of one user or token. A further login ends the oldest one."""
COOKIE: Final = "holdfast_session"


class BrowserSession(Struct):
    """The session of one login."""

    owner: str
    """`user NAME` or `token ID`."""
    secret_hash: str
    """The hash of the password or token that was right. With another one the session ends."""
    began_s: float
    used_s: float


class BrowserSessions:
    """All sessions, by the hash of the secret in the cookie. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._sessions: dict[str, BrowserSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, owner: str, secret_hash: str, now_s: float) -> str:
        """Begins a session. Returns the secret for the cookie."""
        self._sweep(now_s)
        own = [key for key, session in self._sessions.items() if session.owner == owner]
        if len(own) >= SESSIONS_PER_OWNER_MAX:
            del self._sessions[own[0]]
        if len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        secret = secrets.token_urlsafe(32)
        self._sessions[_key(secret)] = BrowserSession(owner, secret_hash, now_s, now_s)
        return secret

    def find(self, secret: str, now_s: float, *, is_use: bool = True) -> BrowserSession | None:
        """The session of a cookie, or None. The session counts as used, if `is_use`."""
        session = self._sessions.get(_key(secret))
        if session is None:
            return None
        if _has_ended(session, now_s):
            self.end(secret)
            return None
        if is_use:
            session.used_s = now_s
        return session

    def end(self, secret: str) -> None:
        """Ends a session. The cookie is worthless afterwards, wherever a copy of it is."""
        self._sessions.pop(_key(secret), None)

    def _sweep(self, now_s: float) -> None:
        for key in [key for key, each in self._sessions.items() if _has_ended(each, now_s)]:
            del self._sessions[key]


def _has_ended(session: BrowserSession, now_s: float) -> bool:
    return now_s - session.began_s >= SESSION_S or now_s - session.used_s >= IDLE_S


def _key(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
