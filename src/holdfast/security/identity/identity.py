"""Asks who a client is, with the replies of the sources that may know.

A source replies with a `ClientIdentity`, with a `LoginRefusal`, or with None for "not mine". The
first reply that is not None counts. A source that fails or times out refuses: no later source is
asked, because it might know less than the one that failed.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.security.acl import ClientRules

TOKEN: Final = "token"
HTTP: Final = "http"
HOOK: Final = "hook"
"""The methods of sources, as `listeners.authentication` names them."""

BAD_CREDENTIALS: Final = 0x86
NOT_AUTHORIZED: Final = 0x87
UNAVAILABLE: Final = 0x88
BUSY: Final = 0x89
"""The reason codes of refusals."""


@dataclass(frozen=True)
class LoginRequest:
    """A CONNECT as a source sees it. `username` is the name that the client claims."""

    client_id: str
    username: str | None
    password: bytes | None
    certificate_name: str
    address: str
    listener: str


@dataclass(frozen=True)
class ClientIdentity:
    """An accepted client."""

    username: str | None
    """The proved name; None: anonymous."""
    source: str
    """The source, for logs and explanations."""
    rules: ClientRules | None = None
    """The rights that came with the proof; None: those of `acl_file`."""
    expires_s: float = 0.0
    """The end of the connection in seconds of Unix time; 0.0: the proof does not expire."""


@dataclass(frozen=True)
class LoginRefusal:
    """A refused client. The text may go to the log and to the client."""

    reason: int
    text: str


Answer = ClientIdentity | LoginRefusal | None


class IdentitySource(Protocol):
    """A source of identity. Its methods are called in the event loop and never block it."""

    method: str

    @property
    def authenticates(self) -> bool:
        """Whether it wants to see each CONNECT."""
        ...

    @property
    def authorises(self) -> bool:
        """Whether it decides about rights of clients that have proved who they are."""
        ...

    async def start(self) -> None:
        """Begins to work."""

    async def authenticate(self, request: LoginRequest) -> Answer:
        """The reply to one CONNECT. It comes within the source's own timeout."""
        ...

    async def close(self) -> None:
        """Stops, and releases connections and threads."""
