"""The questions about topics, asked of a service off the event loop.

Invariants
- A client has one question open at most (`broker.topic_rights.questions`), so what waits is
  bounded by the connections.
- Each is answered within the service's timeout after it is taken from the queue, and one that has
  waited longer than that in the queue has failed. So a service that hangs costs a client twice the
  timeout, however many wait.
- Addresses take turns.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from holdfast.broker.connections.pending_connects import address_of
from holdfast.broker.effects import AskTopics
from holdfast.broker.node import Node
from holdfast.broker.session.connection import CLOSED, Connection
from holdfast.broker.topic_rights.questions import handle_topics, new_asked_rules
from holdfast.security.acl import ClientRules
from holdfast.security.identity.asked_rules import FAILED, PUBLISH
from holdfast.security.identity.topic_check import TopicCheck, TopicQuestion
from holdfast.security.password_queue import PasswordQueue
from holdfast.server.event_loop.failures import watched

ASKED_MAX: Final = 64
"""The most clients about whose topics the service is asked at once. Others wait."""
WAITING_MAX: Final = 100_000
"""The most clients that wait, each with one question."""
FILTERS_AT_ONCE: Final = 8
"""The most filters of one client that the service is asked about at once."""

Answer = tuple[str, float]


class TopicServiceError(Exception):
    """The service has not decided about the topic of a will."""


class TopicChecks:
    """The open questions of one broker. The service may be replaced at any time."""

    def __init__(
        self, node: Node, loop: asyncio.AbstractEventLoop, touch: Callable[[], None]
    ) -> None:
        """`touch`: called before an answer is handed to the node."""
        self._node = node
        self._loop = loop
        self._touch = touch
        self.check: TopicCheck | None = None
        self._queue: PasswordQueue[tuple[AskTopics, float]] = PasswordQueue(
            WAITING_MAX, WAITING_MAX
        )
        self._asked = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def replace(self, check: TopicCheck | None) -> None:
        """Ask this service from now on; None: questions fail."""
        self.check = check

    def close(self) -> None:
        """End all questions."""
        for task in self._tasks:
            task.cancel()

    async def rules_of(self, connection: Connection) -> ClientRules | None:
        """The rules of a client that connects, with the decision about its will. None: the service
        does not decide about this client. Raises `TopicServiceError`."""
        check = self.check
        rules = None if check is None else new_asked_rules(self._node.state, connection)
        if check is None or rules is None:
            return None
        will = None if connection.connect is None else connection.connect.will
        if will is not None:
            verdict, _ = await check.decide(_question(connection, PUBLISH, will.topic))
            if verdict == FAILED:
                raise TopicServiceError("the service does not decide about the topic of the will")
            rules.will_verdict = verdict
        return rules

    def ask(self, effect: AskTopics) -> None:
        """Ask, and report the answers to the node."""
        address = address_of(effect.connection.remote)
        if self._queue.offer(address, (effect, self._loop.time())):
            self._begin()
        else:
            self._loop.call_soon(self._report, effect, _failed(effect))

    def _begin(self) -> None:
        while self._asked < ASKED_MAX:
            taken = self._queue.take()
            if taken is None:
                return
            effect, since = taken
            if effect.connection.state == CLOSED:
                continue
            check = self.check
            if check is None or self._loop.time() - since > check.timeout_s:
                self._loop.call_soon(self._report, effect, _failed(effect))
                continue
            self._asked += 1
            task = watched(self._answer(check, effect))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, check: TopicCheck, effect: AskTopics) -> None:
        answers: list[Answer] = []
        try:
            for start in range(0, len(effect.topics), FILTERS_AT_ONCE):
                topics = effect.topics[start : start + FILTERS_AT_ONCE]
                questions = [_question(effect.connection, effect.action, each) for each in topics]
                answers += await asyncio.gather(*map(check.decide, questions))
                if effect.connection.state == CLOSED:
                    return
        finally:
            self._asked -= 1
            self._begin()
        self._report(effect, answers)

    def _report(self, effect: AskTopics, answers: list[Answer]) -> None:
        self._touch()
        handle_topics(self._node.state, effect, answers)


def _failed(effect: AskTopics) -> list[Answer]:
    return [(FAILED, 0.0)] * len(effect.topics)


def _question(connection: Connection, action: str, topic: str) -> TopicQuestion:
    return TopicQuestion(
        connection.client_id,
        connection.username,
        connection.remote.rpartition(":")[0],
        connection.listener.name,
        action,
        topic,
    )
