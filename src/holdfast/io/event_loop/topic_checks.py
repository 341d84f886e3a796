"""Asks a service about topics, off the event loop.

Invariants
- A client has one question open at most (`node.topic_rights.questions`), so what waits is
  bounded by the connections.
- Each part of it (`FILTERS_AT_ONCE`) is answered within the service's timeout after it is taken
  from the queue. One that has waited longer than that in the queue has failed, and so have the
  parts behind one that hung. So a service that hangs costs a client twice the timeout, however many
  wait.
- Addresses take turns, after each part. Counter-example without the parts: 64 clients that
  subscribe to 1,000 filters each would let all others wait until their questions fail.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from holdfast.io.event_loop.failures import watched
from holdfast.node.connections.pending_connects import address_of
from holdfast.node.effects import AskTopics
from holdfast.node.node import Node
from holdfast.node.session.connection import CLOSED, Connection
from holdfast.node.topic_rights.questions import handle_topics, new_asked_rules
from holdfast.security.acl import ClientRules
from holdfast.security.identity.asked_rules import FAILED, PUBLISH
from holdfast.security.identity.topic_check import TopicCheck, TopicQuestion
from holdfast.security.password_queue import PasswordQueue

ASKED_MAX: Final = 64
"""The most clients about whose topics the service is asked at once. Others wait."""
WAITING_MAX: Final = 100_000
"""The most clients that wait, each with one question."""
FILTERS_AT_ONCE: Final = 8
"""The most filters of one client that the service is asked about at once."""

HUNG: Final = 0.9
"""The part of the timeout after which a reply that failed did not come in time."""

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
        # The question, its answers so far, and since when it waits.
        self._queue: PasswordQueue[tuple[AskTopics, list[Answer], float]] = PasswordQueue(
            WAITING_MAX, WAITING_MAX
        )
        self._asked = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def replace(self, check: TopicCheck | None) -> None:
        """Asks this service from now on; None: questions fail."""
        self.check = check

    def close(self) -> None:
        """Ends all questions."""
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
        """Asks, and reports the answers to the node."""
        self._offer(effect, [])
        self._begin()

    def _offer(self, effect: AskTopics, answers: list[Answer]) -> None:
        """Queues a question that has these answers so far."""
        address = address_of(effect.connection.remote)
        if not self._queue.offer(address, (effect, answers, self._loop.time())):
            self._fail(effect, answers)

    def _fail(self, effect: AskTopics, answers: list[Answer]) -> None:
        """Marks all topics without a decision as failed."""
        missing = len(effect.topics) - len(answers)
        self._loop.call_soon(self._report, effect, answers + [(FAILED, 0.0)] * missing)

    def _begin(self) -> None:
        while self._asked < ASKED_MAX:
            taken = self._queue.take()
            if taken is None:
                return
            effect, answers, since = taken
            if effect.connection.state == CLOSED:
                continue
            check = self.check
            if check is None or self._loop.time() - since > check.timeout_s:
                self._fail(effect, answers)
                continue
            self._asked += 1
            task = watched(self._answer(check, effect, answers))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, check: TopicCheck, effect: AskTopics, answers: list[Answer]) -> None:
        """Asks about the next part of the topics. The rest takes another turn."""
        began = self._loop.time()
        try:
            topics = effect.topics[len(answers) : len(answers) + FILTERS_AT_ONCE]
            questions = [_question(effect.connection, effect.action, each) for each in topics]
            part = await asyncio.gather(*map(check.decide, questions))
        finally:
            self._asked -= 1
        answers += part
        has_failed = any(verdict == FAILED for verdict, _ in part)
        if len(answers) == len(effect.topics):
            self._report(effect, answers)
        elif has_failed and self._loop.time() - began >= HUNG * check.timeout_s:
            self._fail(effect, answers)
        else:
            self._offer(effect, answers)
        self._begin()

    def _report(self, effect: AskTopics, answers: list[Answer]) -> None:
        self._touch()
        handle_topics(self._node.state, effect, answers)


def _question(connection: Connection, action: str, topic: str) -> TopicQuestion:
    return TopicQuestion(
        connection.client_id,
        connection.username,
        connection.remote.rpartition(":")[0],
        connection.listener.name,
        action,
        topic,
    )
