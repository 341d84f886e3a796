"""A broker with its edge in the test's loop, and a federation that the test plays."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.client.client import Client
from holdfast.client.options import Options
from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.edge_broker.edge import BrokerEdge
from tests.support.broker_in_process import LoopBroker, loop_broker
from tests.support.peer_mesh import until

OURS = bytes(15) + b"\1"
OTHER = bytes(15) + b"\2"
LOG = "log1"


class Host:
    """The federation. `takes`: whether it confirms at once."""

    def __init__(self) -> None:
        self.takes = True
        self.published: list[Message] = []
        self.waiting: list[Callable[[], None]] = []
        self.interest: dict[str, int] = {}
        self.is_up = False

    def publish(self, message: Message, done: Callable[[], None]) -> None:
        self.published.append(message)
        if self.takes:
            done()
        else:
            self.waiting.append(done)

    def change_interest(self, added: Iterable[str], removed: Iterable[str]) -> None:
        for filter in added:
            self.interest[filter] = self.interest.get(filter, 0) + 1
        for filter in removed:
            self.interest[filter] -= 1
            if not self.interest[filter]:
                del self.interest[filter]

    def edge_up(self) -> None:
        self.is_up = True

    def edge_down(self, reason: str) -> None:
        self.is_up = False

    def payloads(self, topic: str = "") -> list[bytes]:
        return [each.payload for each in self.published if not topic or each.topic == topic]


class Site:
    """A broker with its edge."""

    def __init__(self, broker: LoopBroker) -> None:
        self.loop_broker = broker
        self.host = Host()
        self.edge = BrokerEdge(broker.broker, ["#"], ["#"])
        self.done: list[bytes] = []

    async def start(
        self, exports: list[str] | None = None, imports: list[str] | None = None
    ) -> "Site":
        broker = self.loop_broker.broker
        self.edge = BrokerEdge(broker, exports or ["#"], imports or ["#"])
        self.edge.identify(lambda: OURS, lambda partition, offset: LOG)
        await self.edge.start(self.host)
        await until(lambda: self.host.is_up)
        return self

    async def want(self, *filters: str) -> None:
        self.edge.set_wanted_filters(frozenset(filters))
        await until(lambda: self.edge.status()["export_filters"])

    def client(self, name: str, **options: object) -> Client:
        return Client(
            "127.0.0.1",
            self.loop_broker.port,
            options=Options(client_id=name, **options),  # type: ignore[arg-type]
        )

    def deliver(
        self,
        topic: str,
        payload: bytes,
        qos: int,
        place: int,
        *,
        epoch: int = 1,
        properties: bytes = b"",
        expiry_s: float | None = None,
        retain: bool = False,
        node: bytes = OTHER,
        is_plain: bool = True,
        granted: tuple[str, ...] | None = (),
        is_regranted: bool = False,
    ) -> None:
        message = Message(topic, payload, qos, retain, properties, expiry_s)
        id = MessageId(node, epoch, place)
        delivery = DeliverLocally(id, message, place, 1, is_plain, granted, is_regranted)
        self.edge.deliver(delivery, lambda: self.done.append(payload))


def run(directory: Path, scenario: Callable[[Site], object]) -> None:
    async def main() -> None:
        async with loop_broker(directory) as broker:
            site = Site(broker)
            await scenario(site)  # type: ignore[misc]
            await site.edge.stop()

    asyncio.run(main())
