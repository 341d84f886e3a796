"""Queues password checks for a thread, limited and fair between addresses.

A wrong password costs the client a packet and the broker milliseconds of CPU, or a hundred with
argon2id. So a storm of them fills only its own address's part of the queue, and the addresses take
turns. A client elsewhere waits for one check of each address, not for the storm.
"""

from collections import deque
from typing import Final, Generic, TypeVar

T = TypeVar("T")

WAITING_MAX: Final = 4096
"""The most checks that wait."""
WAITING_PER_ADDRESS_MAX: Final = 1024
"""The most checks of one address that wait. A site behind one address has its clients back in
seconds; further ones are told to come later."""


class PasswordQueue(Generic[T]):
    """The checks that wait, by address.

    Invariant: no address is served twice while another one waits.
    """

    def __init__(
        self, waiting_max: int = WAITING_MAX, per_address_max: int = WAITING_PER_ADDRESS_MAX
    ) -> None:
        self._waiting_max = waiting_max
        self._per_address_max = per_address_max
        # By address; the next one to be served comes first.
        self._waiting: dict[str, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def offer(self, address: str, check: T) -> bool:
        """Queues a check. False: there is no room for it."""
        waiting = self._waiting.get(address)
        if self._count >= self._waiting_max:
            return False
        if waiting is None:
            self._waiting[address] = deque((check,))
        elif len(waiting) >= self._per_address_max:
            return False
        else:
            waiting.append(check)
        self._count += 1
        return True

    def take(self) -> T | None:
        """Removes and returns the next check, or None."""
        for address, waiting in self._waiting.items():
            check = waiting.popleft()
            self._count -= 1
            del self._waiting[address]
            if waiting:
                # Behind all other addresses.
                self._waiting[address] = waiting
            return check
        return None
