"""The questions about topics that wait for a service: turns, and a service that hangs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from holdfast.io.event_loop.topic_checks import ASKED_MAX, FILTERS_AT_ONCE, Answer, TopicChecks
from holdfast.node.effects import AskTopics
from holdfast.node.session.connection import Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.security.identity.asked_rules import ALLOW, FAILED, SUBSCRIBE
from holdfast.security.identity.topic_check import TopicCheck, TopicQuestion
from tests.support.node_bench import NodeBench

Reply = Callable[[TopicQuestion], Awaitable[Answer]]


class Service:
    """A service that the test answers for."""

    timeout_s = 30.0

    def __init__(self, reply: Reply) -> None:
        self.asked: list[str] = []
        self._reply = reply

    async def decide(self, question: TopicQuestion) -> Answer:
        self.asked.append(question.topic)
        return await self._reply(question)


class Checks(TopicChecks):
    """Keeps the answers instead of handing them to the node."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(NodeBench().node, asyncio.get_running_loop(), lambda: None)
        self.service = Service(reply)
        self.replace(cast(TopicCheck, self.service))
        self.done: dict[str, list[str]] = {}
        self.is_done = asyncio.Event()

    def subscribe(self, name: str, count: int) -> None:
        connection = Connection(1000, f"{name}:1", ListenerRules("l"))
        connection.client_id = name
        filters = [f"{name}/{number}" for number in range(count)]
        self.ask(AskTopics(connection, SUBSCRIBE, filters, None))

    def _report(self, effect: AskTopics, answers: list[Answer]) -> None:
        assert len(answers) == len(effect.topics)
        self.done[effect.connection.client_id] = [verdict for verdict, _ in answers]
        self.is_done.set()


def test_clients_with_many_filters_take_turns_with_others() -> None:
    async def run() -> None:
        async def allow(question: TopicQuestion) -> Answer:
            await asyncio.sleep(0)
            return ALLOW, 1.0

        checks = Checks(allow)
        for number in range(ASKED_MAX):
            checks.subscribe(f"many{number}", 10 * FILTERS_AT_ONCE)
        checks.subscribe("one", 1)
        await checks.is_done.wait()
        assert checks.done == {"one": [ALLOW]}
        while len(checks.done) <= ASKED_MAX:
            checks.is_done.clear()
            await checks.is_done.wait()
        assert checks.done["many0"] == [ALLOW] * 10 * FILTERS_AT_ONCE

    asyncio.run(run())


def test_a_service_that_hangs_is_not_asked_about_the_other_filters() -> None:
    async def run() -> None:
        async def hang(question: TopicQuestion) -> Answer:
            await asyncio.sleep(checks.service.timeout_s)
            return FAILED, 0.0

        checks = Checks(hang)
        checks.service.timeout_s = 0.05
        checks.subscribe("c", 1000)
        await checks.is_done.wait()
        assert checks.done == {"c": [FAILED] * 1000}
        assert len(checks.service.asked) == FILTERS_AT_ONCE

    asyncio.run(run())
