"""Proposals of this node whose outcome is still unknown.

A request is sent again, under its id, until it is applied or has expired. A new leader gets it at
once, the same leader after RETRY_S. It is carried out once, because the id is remembered
(`state_machine`).
"""

from typing import Final

from msgspec import Struct

RETRY_S: Final = 0.3
"""The seconds after which an unapplied request is sent again."""
SOON_S: Final = 0.02
"""The seconds before a retry after the receiver has replied that it does not lead."""
TIMEOUT_S: Final = 5.0
"""The seconds after which the outcome of a request is reported as unknown."""
PENDING_MAX: Final = 256
"""The most requests under way."""
NEVER: Final = float("inf")


class Accepted(Struct, frozen=True):
    """The change was made."""

    version: int
    """The version of the metadata with the change."""


class RequestRefused(Struct, frozen=True):
    """The change was refused."""

    text: str
    """The reason. The metadata is unchanged."""


class Unknown(Struct, frozen=True):
    """The outcome was not learnt in time."""

    text: str
    """The reason. The change may have been made, or may yet be made."""


Outcome = Accepted | RequestRefused | Unknown


class PendingProposal(Struct):
    """A request under way."""

    request: int
    request_id: str
    command: bytes
    retry_at: float
    until: float


class Proposals:
    """The requests under way by request id, oldest first."""

    def __init__(self, node_id: str, nonce: str) -> None:
        """Starts without requests. `nonce` differs for each start of the process, so ids are never
        reused."""
        self._prefix = f"{node_id}.{nonce}."
        self._count = 0
        self._pending: dict[str, PendingProposal] = {}

    def next_request(self) -> int:
        """The number of a new request."""
        self._count += 1
        return self._count

    def is_full(self) -> bool:
        """True if no more requests may be added."""
        return len(self._pending) >= PENDING_MAX

    def add(self, request: int, command: bytes, now: float) -> None:
        """Adds a request, due at once."""
        pending = PendingProposal(
            request, f"{self._prefix}{request}", command, now, now + TIMEOUT_S
        )
        self._pending[pending.request_id] = pending

    def request_ids(self) -> list[str]:
        return list(self._pending)

    def finish(self, request_id: str) -> int | None:
        """Removes a finished request and returns its number; None if it is no longer under way."""
        pending = self._pending.pop(request_id, None)
        return None if pending is None else pending.request

    def pop_expired(self, now: float) -> list[int]:
        """Removes the expired requests and returns their numbers."""
        expired = [pending for pending in self._pending.values() if now >= pending.until]
        for pending in expired:
            del self._pending[pending.request_id]
        return [pending.request for pending in expired]

    def pop_due(self, now: float) -> list[PendingProposal]:
        """The requests to send now; each is due again after RETRY_S."""
        due = [pending for pending in self._pending.values() if now >= pending.retry_at]
        for pending in due:
            pending.retry_at = now + RETRY_S
        return due

    def retry_soon(self, request_id: str, now: float) -> None:
        """Retries the request after SOON_S at most."""
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.retry_at = min(pending.retry_at, now + SOON_S)

    def retry_all(self, now: float) -> None:
        """Retries all requests now, because the leader has changed."""
        for pending in self._pending.values():
            pending.retry_at = now

    def timer(self) -> float:
        """The time of the next retry or expiry."""
        if not self._pending:
            return NEVER
        return min(
            (min(pending.retry_at, pending.until) for pending in self._pending.values()),
            default=NEVER,
        )

    def expiry(self) -> float:
        """The time of the next expiry: the timer while no leader is known."""
        return min((pending.until for pending in self._pending.values()), default=NEVER)
