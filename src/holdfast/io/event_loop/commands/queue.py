"""Queues messages with commands of dynamic security. One batch at a time is run."""

from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.commands.user_changes import Outcomes
from holdfast.node.effects import RunCommands
from holdfast.node.publish.control import finish_commands
from holdfast.security.dynamic.commands import encode_responses

TOGETHER_MAX: Final = 100
"""The most messages whose commands are run, and change the users, together."""


class CommandQueue:
    """The messages that wait for their turn, in the order of their arrival.

    There are at most as many as connections, because each has one message under way.
    """

    def __init__(self, broker: Broker, start: Callable[[list[RunCommands]], None]) -> None:
        """`start` runs a batch, whose owner then calls `reply` and `begin`."""
        self.is_busy = False
        """Whether a batch is under way, or anything else that the next one has to wait for."""
        self.is_closed = False
        self._broker = broker
        self._start = start
        self._waiting: deque[RunCommands] = deque()

    def append(self, effect: RunCommands) -> None:
        if self.is_closed:
            finish_commands(self._broker.node.state, effect, b"")
            return
        self._waiting.append(effect)
        self.begin()

    def close(self) -> None:
        """Begins no more batches. The messages that wait are not answered."""
        self.is_closed = True
        while self._waiting:
            finish_commands(self._broker.node.state, self._waiting.popleft(), b"")

    def begin(self) -> None:
        """Begins the next batch, unless one is under way."""
        if self.is_busy or self.is_closed or not self._waiting:
            return
        self.is_busy = True
        batch = [self._waiting.popleft() for _ in range(min(TOGETHER_MAX, len(self._waiting)))]
        self._start(batch)

    def reply(self, outcomes: Outcomes) -> None:
        """Answers the messages of the batch under way, which ends with it."""
        self._broker.touch()
        for effect, found in outcomes:
            finish_commands(self._broker.node.state, effect, encode_responses(found))
        self.is_busy = False
