"""Whose turn it is in a shared subscription. Delivery, windows and outboxes are the node's."""

from collections.abc import Callable


class SharedGroup:
    """`$share/name/filter` and its members, in the order in which they joined."""

    def __init__(self, name: str, filter: str) -> None:
        self.name = name
        self.filter = filter
        self._members: list[object] = []
        # Index of the member that is asked first.
        self._turn = 0

    def __len__(self) -> int:
        return len(self._members)

    def members(self) -> list[object]:
        return list(self._members)

    def add(self, member: object) -> bool:
        """False when it was a member already; it keeps its place then."""
        if member in self._members:
            return False
        self._members.append(member)
        return True

    def remove(self, member: object) -> bool:
        """False when it was no member. The turn of the others does not change."""
        if member not in self._members:
            return False
        index = self._members.index(member)
        del self._members[index]
        if index < self._turn:
            self._turn -= 1
        if self._turn >= len(self._members):
            self._turn = 0
        return True

    def next(self, is_ready: Callable[[object], bool]) -> object | None:
        """The next ready member, round robin; None when nobody is ready.

        Members that are passed over lose their turn. Asks each member at most once.
        """
        count = len(self._members)
        for step in range(count):
            index = (self._turn + step) % count
            member = self._members[index]
            if is_ready(member):
                self._turn = (index + 1) % count
                return member
        return None
