"""The changes that this node has proposed and of which it does not know yet what came.

A request is sent again, under its id, until it is seen applied or its time is over: at once to a
new leader, else after RETRY_S. It is carried out once.
"""

from dataclasses import dataclass
from typing import Final

RETRY_S: Final = 0.3
SOON_S: Final = 0.02
"""After the node that was asked has said that it does not lead."""
TIMEOUT_S: Final = 5.0
PENDING_MAX: Final = 256
NEVER: Final = float("inf")


@dataclass(frozen=True)
class Accepted:
    version: int
    """Of the metadata, with the change."""


@dataclass(frozen=True)
class RequestRefused:
    text: str
    """Nothing was changed."""


@dataclass(frozen=True)
class Unknown:
    text: str
    """It may have been carried out, or may yet be."""


Outcome = Accepted | RequestRefused | Unknown


@dataclass
class PendingProposal:
    request: int
    request_id: str
    command: bytes
    retry_at: float
    until: float


class Proposals:
    """By request id, oldest first."""

    def __init__(self, node_id: str, nonce: str) -> None:
        """`nonce`: another one for each start of the process, so that ids do not come again."""
        self._prefix = f"{node_id}.{nonce}."
        self._count = 0
        self._pending: dict[str, PendingProposal] = {}

    def next_request(self) -> int:
        self._count += 1
        return self._count

    def is_full(self) -> bool:
        return len(self._pending) >= PENDING_MAX

    def add(self, request: int, command: bytes, now: float) -> None:
        pending = PendingProposal(
            request, f"{self._prefix}{request}", command, now, now + TIMEOUT_S
        )
        self._pending[pending.request_id] = pending

    def request_ids(self) -> list[str]:
        return list(self._pending)

    def take(self, request_id: str) -> int | None:
        """The request, which is done now; None if nobody waits for it."""
        pending = self._pending.pop(request_id, None)
        return None if pending is None else pending.request

    def take_expired(self, now: float) -> list[int]:
        expired = [pending for pending in self._pending.values() if now >= pending.until]
        for pending in expired:
            del self._pending[pending.request_id]
        return [pending.request for pending in expired]

    def take_due(self, now: float) -> list[PendingProposal]:
        """Those to be sent now."""
        due = [pending for pending in self._pending.values() if now >= pending.retry_at]
        for pending in due:
            pending.retry_at = now + RETRY_S
        return due

    def retry_soon(self, request_id: str, now: float) -> None:
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.retry_at = min(pending.retry_at, now + SOON_S)

    def retry_all(self, now: float) -> None:
        for pending in self._pending.values():
            pending.retry_at = now

    def timer(self) -> float:
        if not self._pending:
            return NEVER
        return min(
            (min(pending.retry_at, pending.until) for pending in self._pending.values()),
            default=NEVER,
        )

    def expiry(self) -> float:
        """The timer while there is nobody to send to."""
        return min((pending.until for pending in self._pending.values()), default=NEVER)
