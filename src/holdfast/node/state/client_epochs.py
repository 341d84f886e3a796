"""Session epochs of clients, bounded in a way that every node and every recovery has the same.

Each record of a table is of one partition. So the records come in one order, and above the bound
the client with the lowest rank goes. Invariant: what a table has is a function of the records so
far, and applying some of them again changes nothing. So the rank is in the record: a dropped client
that is added again is dropped again. Counter-example: the oldest one of a dict goes. A snapshot
that is ahead of its offset lacks client a, which was dropped, and the records from that offset on
add a again and drop b.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

HEAP_FREE = 64
"""The entries that the heap may have beyond twice the clients."""


class ClientEpochs:
    """The newest epoch of each client in the records of one partition."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        # Client id -> epoch and rank, which never decreases while the client is known.
        self._of: dict[str, tuple[int, int]] = {}
        # (rank, client id), also outdated ones.
        self._order: list[tuple[int, str]] = []

    def __contains__(self, client_id: str) -> bool:
        return client_id in self._of

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def epoch(self, client_id: str) -> int:
        """Returns the newest epoch of a client, or -1."""
        return self._of.get(client_id, (-1, 0))[0]

    def items(self) -> list[tuple[str, int, int]]:
        """Returns client id, epoch and rank of each client."""
        return [(client_id, epoch, rank) for client_id, (epoch, rank) in self._of.items()]

    def note(self, client_id: str, epoch: int, rank: int) -> None:
        """Adds an epoch of a client, unless a newer one is known."""
        known = self._of.get(client_id)
        if known is not None and (epoch, rank) <= known:
            return
        self._of[client_id] = (epoch, rank)
        heappush(self._order, (rank, client_id))
        if len(self._of) > self._count_max:
            self._drop_lowest()
        if len(self._order) > 2 * len(self._of) + HEAP_FREE:
            self._order = [(rank, client_id) for client_id, (_, rank) in self._of.items()]
            heapify(self._order)

    def _drop_lowest(self) -> None:
        while True:
            rank, client_id = heappop(self._order)
            if self._of.get(client_id, (0, -1))[1] == rank:
                del self._of[client_id]
                return
