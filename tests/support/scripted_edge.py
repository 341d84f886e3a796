"""A broker's stand-in at a federator's edge, and federators that have one."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.config.federation import Federation
from holdfast.protocol.topics.names import matches
from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.edge import EdgeHost, ReadingDone, RetainedFound
from holdfast_federation.sidecar.federator import Federator
from holdfast_federation.sidecar.store.member_files import MemberStorage
from tests.support.federation_settings import member_settings
from tests.support.ports import free_port

WAIT_S = 40.0
SECRET = "a secret of the members, 32 or more\n"


async def until(condition: Callable[[], object], what: str = "") -> None:
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"in vain: {what}"
        await asyncio.sleep(0.005)


class ScriptedEdge:
    def __init__(self, filters: Iterable[str] = (), is_up: bool = True) -> None:
        self.filters = list(filters)
        self.starts_up = is_up
        self.wanted: frozenset[str] = frozenset()
        self.delivered: list[tuple[MessageId, Message, int]] = []
        self.holds = False
        """Whether `done` of what is delivered waits for `finish`."""
        self.held: list[Callable[[], None]] = []
        self.stopped = False
        self._host: EdgeHost | None = None

    @property
    def host(self) -> EdgeHost:
        assert self._host is not None, "not started"
        return self._host

    async def start(self, host: EdgeHost) -> None:
        self._host = host
        host.change_interest(self.filters, ())
        if self.starts_up:
            host.edge_up()

    def set_wanted_filters(self, filters: frozenset[str]) -> None:
        self.wanted = filters

    def deliver(self, delivery: DeliverLocally, done: Callable[[], None]) -> None:
        self.delivered.append((delivery.id, delivery.message, delivery.place))
        if self.holds:
            self.held.append(done)
        else:
            done()

    async def stop(self) -> None:
        self.stopped = True

    def finish(self) -> None:
        held, self.held = self.held, []
        for done in held:
            done()

    def payloads(self) -> list[str]:
        return [message.payload.decode() for _, message, _ in self.delivered]

    def payloads_of(self, topic: str, least_qos: int = 0, most_qos: int = 2) -> list[str]:
        return [
            message.payload.decode()
            for _, message, _ in self.delivered
            if message.topic == topic and least_qos <= message.qos <= most_qos
        ]

    def publish(self, payload: str, topic: str = "a/1", qos: int = 1) -> "asyncio.Event":
        """Set when it is done."""
        done = asyncio.Event()
        self.host.publish(Message(topic, payload.encode(), qos), done.set)
        return done


class RetainingScriptedEdge(ScriptedEdge):
    """Retains what is published and what it is given."""

    def __init__(self, filters: Iterable[str] = (), is_up: bool = True) -> None:
        super().__init__(filters, is_up)
        self.retained: dict[str, Message] = {}
        self.given: list[Message] = []
        """By `retain`."""
        self.reads: list[frozenset[str]] = []
        self.fails = False
        """Whether readings fail."""
        self.found_max = 1_000_000
        """The most messages that a reading finds."""

    def read_retained(self, filters: frozenset[str], done: ReadingDone) -> None:
        self.reads.append(filters)
        loop = asyncio.get_running_loop()
        if self.fails:
            loop.call_soon(done, None)
            return
        found = [
            message
            for message in self.retained.values()
            if any(matches(filter, message.topic) for filter in filters)
        ]
        kept = found[: self.found_max]
        loop.call_soon(done, RetainedFound(kept, kept == found))

    def retain(self, id: MessageId, message: Message, done: Callable[[], None]) -> None:
        self.given.append(message)
        self._keep(message)
        done()

    def deliver(self, delivery: DeliverLocally, done: Callable[[], None]) -> None:
        if delivery.message.is_retained:
            self._keep(delivery.message)
        super().deliver(delivery, done)

    def publish_retained(self, payload: str, topic: str = "a/1", qos: int = 1) -> "asyncio.Event":
        done = asyncio.Event()
        message = Message(topic, payload.encode(), qos, True)
        self._keep(message)
        self.host.publish(message, done.set)
        return done

    def texts(self) -> dict[str, str]:
        return {topic: message.payload.decode() for topic, message in self.retained.items()}

    def _keep(self, message: Message) -> None:
        if message.payload:
            self.retained[message.topic] = message
        else:
            self.retained.pop(message.topic, None)


class Site:
    """`async with Site(tmp_path) as site`: federators that are stopped at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.running: list[Federator] = []
        self.ports: dict[str, int] = {}
        self.config = FederationConfig(dial_every_s=0.05, dial_every_max_s=0.1, retry_s=0.2)

    async def __aenter__(self) -> "Site":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for federator in list(self.running):
            await self.stop(federator)

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports.setdefault(name, free_port())}"

    def settings(self, name: str, peers: Iterable[str] = (), **more: Any) -> Federation:
        """`peers`: names of others, or addresses."""
        table: dict[str, Any] = {
            "data": str(self.directory / name),
            "listen": self.address(name),
            "peers": [peer if ":" in peer else self.address(peer) for peer in peers],
        }
        return member_settings(table | more)

    async def start(
        self,
        name: str,
        edge: ScriptedEdge,
        peers: Iterable[str] = (),
        state: MemberStorage | None = None,
        **more: Any,
    ) -> Federator:
        federator = Federator(self.settings(name, peers, **more), edge, self.config, state)
        await federator.start()
        self.running.append(federator)
        return federator

    async def stop(self, federator: Federator) -> None:
        self.running.remove(federator)
        await federator.stop()
