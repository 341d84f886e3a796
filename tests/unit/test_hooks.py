"""Hooks that accept, refuse, hang, raise, return nonsense, or get more events than they handle."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from holdfast.hooks import (
    Answer,
    ClientIdentity,
    Grants,
    HookClient,
    HookMessage,
    Hooks,
    LoginRefusal,
    LoginRequest,
)
from holdfast.io.event_loop import hook_runner
from holdfast.io.event_loop.hook_runner import THREADS, HookEvents, HookSource
from holdfast.io.event_loop.identity_checks import IdentityChecks
from holdfast.node.admission.observer import ClientObserver
from holdfast.node.effects import AskRights, AskSources
from holdfast.node.session.connection import AUTHENTICATING, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.stats import Stats
from holdfast.protocol.mqtt.packets import Connect
from holdfast.security.acl import AclError
from tests.support.node_bench import NodeBench
from tests.unit.node.test_publish import publish

REQUEST = LoginRequest("c", "u", b"p", "", "127.0.0.1:1", "l")
CLIENT = HookClient("c", "u", "127.0.0.1:1", "l")


class Scripted(Hooks):
    """A hook that does what a test says."""

    def __init__(
        self,
        authenticates: Callable[[], object] = lambda: None,
        authorises: Callable[[], object] = lambda: None,
    ) -> None:
        self.authenticates = authenticates
        self.authorises = authorises

    def authenticate(self, request: LoginRequest) -> Answer:
        return self.authenticates()  # type: ignore[return-value]

    def authorise(self, client: HookClient) -> Grants | None:
        return self.authorises()  # type: ignore[return-value]


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def ask(source: HookSource) -> Answer:
    await source.start()
    try:
        return await source.authenticate(REQUEST)
    finally:
        await source.close()


def fail() -> object:
    raise RuntimeError("a defect")


def test_the_first_opinion_counts() -> None:
    accepted = ClientIdentity("bob", "hook")
    refused = LoginRefusal(0x87, "no")
    hooks = [Scripted(), Scripted(lambda: accepted), Scripted(lambda: refused)]
    assert asyncio.run(ask(HookSource(hooks, 1.0))) == accepted
    assert asyncio.run(ask(HookSource(hooks[::-1], 1.0))) == refused
    assert asyncio.run(ask(HookSource([Hooks()], 1.0))) is None


def test_a_method_that_is_not_overridden_is_not_asked() -> None:
    source = HookSource([Hooks()], 1.0)
    assert not source.authenticates
    assert not source.authorises


def test_a_hook_that_raises_refuses() -> None:
    with pytest.raises(RuntimeError, match="a defect"):
        asyncio.run(ask(HookSource([Scripted(fail)], 1.0)))


@pytest.mark.parametrize("value", [True, "bob", 0, ["bob"]])
def test_a_hook_that_returns_another_type_refuses(value: object) -> None:
    with pytest.raises(TypeError, match="authenticate returned"):
        asyncio.run(ask(HookSource([Scripted(lambda: value)], 1.0)))


def test_a_hook_that_hangs_refuses() -> None:
    """And those behind it, without a call of theirs, until a thread is free again."""
    ends = threading.Event()
    calls: list[int] = []

    def hang() -> object:
        calls.append(1)
        ends.wait(20.0)
        return None

    async def run() -> None:
        source = HookSource([Scripted(hang)], 0.1)
        await source.start()
        questions = [source.authenticate(REQUEST) for _ in range(THREADS + 3)]
        results = await asyncio.gather(*questions, return_exceptions=True)
        assert all(isinstance(each, TimeoutError) for each in results)
        ends.set()
        while True:
            with suppress(TimeoutError):
                assert await source.authenticate(REQUEST) is None
                break
        assert len(calls) <= THREADS + 2
        await source.close()

    asyncio.run(run())


def test_grants_are_rights() -> None:
    async def run(value: object) -> object:
        source = HookSource([Scripted(authorises=lambda: value)], 1.0)
        await source.start()
        try:
            return await source.authorise(CLIENT)
        finally:
            await source.close()

    rules = asyncio.run(run(Grants(publish=["%u/%c"])))
    assert rules.can_write("u/c")  # type: ignore[attr-defined]
    assert not rules.can_read("u/c")  # type: ignore[attr-defined]
    assert asyncio.run(run(None)) is None
    with pytest.raises(TypeError, match="authorise returned"):
        asyncio.run(run(True))
    with pytest.raises(AclError):
        asyncio.run(run(Grants(publish=["a/#/b"])))


class Noted(Hooks):
    publish_filters = ("a/+", "a/#")

    def __init__(self) -> None:
        self.events: list[object] = []
        self.gate = threading.Event()
        self.gate.set()

    def on_connect(self, client: HookClient) -> None:
        self.gate.wait(20.0)
        self.events.append(client.client_id)
        if client.client_id == "bad":
            raise ValueError("a defect")

    def on_disconnect(self, client: HookClient, reason: str) -> None:
        self.events.append((client.client_id, reason))

    def on_publish(self, message: HookMessage) -> None:
        self.events.append(message)


def connection(client_id: str) -> Connection:
    made = Connection(1000, "127.0.0.1:1", ListenerRules("l"))
    made.client_id = client_id
    return made


def test_events_come_in_order_once_and_survive_a_defect() -> None:
    hook = Noted()

    async def run() -> None:
        events = HookEvents([hook, Hooks()], asyncio.get_running_loop(), Stats())
        assert events.observes_messages
        events.connected(connection("bad"))
        events.published(connection("c"), "a/b", b"x", 1, False)
        events.published(connection("c"), "other", b"x", 1, False)
        events.disconnected(connection("c"), "Connection lost")
        await until(lambda: len(hook.events) == 3)
        events.close()

    asyncio.run(run())
    assert hook.events == [
        "bad",
        HookMessage("c", "a/b", b"x", 1, False),
        ("c", "Connection lost"),
    ]


def test_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_runner, "EVENTS_MAX", 10)
    hook, stats = Noted(), Stats()
    hook.gate.clear()

    async def run() -> None:
        events = HookEvents([hook], asyncio.get_running_loop(), stats)
        for number in range(25):
            events.connected(connection(f"c{number}"))
            await asyncio.sleep(0)
        assert stats.hook_events_dropped == 15
        hook.gate.set()
        await until(lambda: len(hook.events) == 10 and events._waiting == 0)
        events.connected(connection("late"))
        await until(lambda: hook.events[-1] == "late")
        events.close()

    asyncio.run(run())


def test_hooks_without_messages_observe_none() -> None:
    async def run() -> None:
        events = HookEvents([Hooks()], asyncio.get_running_loop(), Stats())
        assert not events.observes_messages
        events.close()

    asyncio.run(run())


class AskedNode:
    """A node that notes the replies about its clients."""

    def __init__(self) -> None:
        self.answers: list[object] = []

    def handle_answer(self, connection: Connection, answer: Answer) -> None:
        self.answers.append(answer)

    def handle_rights(self, effect: AskRights, rules: object) -> None:
        self.answers.append(rules)


@pytest.mark.parametrize("call", [fail, lambda: True])
def test_a_client_whose_hook_fails_is_refused(call: Callable[[], object]) -> None:
    node = AskedNode()

    async def run() -> None:
        checks = IdentityChecks(node, asyncio.get_running_loop(), lambda: None)  # type: ignore[arg-type]
        checks.replace([HookSource([Scripted(call, call)], 1.0)])
        client = connection("c")
        client.state = AUTHENTICATING
        checks.ask(AskSources(client, Connect(5, True, 0, "c", None, "u", b"p", {})))
        await until(lambda: len(node.answers) == 1)
        checks.ask_rights(AskRights(client, None))
        await until(lambda: len(node.answers) == 2)
        checks.close()
        await asyncio.sleep(0)

    asyncio.run(run())
    for answer in node.answers:
        assert isinstance(answer, LoginRefusal)
        assert answer.reason == 0x88


class TopicObserver(ClientObserver):
    """Observes the messages of one topic, and notes what it was asked."""

    def __init__(self, topic: str) -> None:
        super().__init__()
        self.observes_messages = True
        self.topic = topic
        self.asked: list[str] = []
        self.payloads: list[bytes] = []

    def connected(self, connection: Connection) -> None:
        pass

    def disconnected(self, connection: Connection, reason: str) -> None:
        pass

    def published(
        self, connection: Connection, topic: str, payload: bytes, qos: int, retain: bool
    ) -> bool:
        self.asked.append(topic)
        if topic == self.topic:
            self.payloads.append(payload)
        return topic == self.topic


def test_an_observer_is_not_asked_again_about_a_topic_that_it_does_not_observe() -> None:
    world = NodeBench()
    peer = world.connect("c")

    def send(observer: TopicObserver) -> None:
        world.node.state.admission.observer = observer
        for number in (1, 2):
            peer.send(publish("a", b"a%d" % number), publish("b", b"b%d" % number, 1, number))

    first, second = TopicObserver("a"), TopicObserver("b")
    for observer, asked, payloads in (
        (first, ["a", "b", "a"], [b"a1", b"a2"]),
        (second, ["a", "b", "b"], [b"b1", b"b2"]),
    ):
        send(observer)
        assert observer.asked == asked
        assert observer.payloads == payloads
