"""A federator as an edge sees it, without a federation: it remembers what it is told."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from holdfast_federation.core.effects import Message

WAIT_S = 45.0


class ScriptedHost:
    def __init__(self) -> None:
        self.published: list[Message] = []
        self.waiting: list[Callable[[], None]] = []
        """Of the published ones, while `holds`."""
        self.holds = False
        self.interest: list[str] = []
        self.removed: list[str] = []
        """Topics of which clients removed what was retained."""
        self.ups = 0
        self.downs: list[str] = []

    @property
    def is_up(self) -> bool:
        return self.ups > len(self.downs)

    def publish(self, message: Message, done: Callable[[], None]) -> None:
        self.published.append(message)
        if self.holds:
            self.waiting.append(done)
        else:
            done()

    def change_interest(self, added: Iterable[str], removed: Iterable[str]) -> None:
        for filter in removed:
            self.interest.remove(filter)
        self.interest += added

    def retained_removed(self, removals: Mapping[str, int]) -> None:
        self.removed += removals

    def edge_up(self) -> None:
        assert not self.is_up, "up twice"
        self.ups += 1

    def edge_down(self, reason: str) -> None:
        assert self.is_up, "down twice"
        self.downs.append(reason)

    def release(self) -> None:
        waiting, self.waiting = self.waiting, []
        for done in waiting:
            done()

    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.published]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Raises AssertionError with `what` when it does not become true."""
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"in vain: {what}"
        await asyncio.sleep(0.01)
