"""Shares a table that all clients fill together.

Invariant: no owner gets more than is left for all others: the first one at most half of the table,
the second one a quarter. What is acknowledged cannot give way later. Counter-example without
shares: one user takes the whole table, for good.
"""


class Shares:
    """The amount of each owner, in any unit, and their sum."""

    def __init__(self) -> None:
        self.total = 0
        self._by_owner: dict[str, int] = {}

    def of(self, owner: str) -> int:
        """The amount of an owner."""
        return self._by_owner.get(owner, 0)

    def change(self, owner: str, amount: int) -> None:
        """Adds to the share of an owner, or takes from it."""
        left = self.of(owner) + amount
        assert left >= 0, "a share below nothing"
        self.total += amount
        if left:
            self._by_owner[owner] = left
        else:
            self._by_owner.pop(owner, None)

    def has_room(self, owner: str, amount: int, most: int) -> bool:
        """Whether the owner may add this amount to a table that takes `most`."""
        return self.of(owner) + amount <= most - self.total - amount

    def check(self) -> None:
        """Raises `AssertionError` unless the total is the sum of the shares."""
        assert self.total == sum(self._by_owner.values()), "the sum of the shares"
