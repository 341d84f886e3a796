"""A client whose every acknowledgement a test gives, with the contract of the real one: futures
stay pending over connections, and are settled once."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

from holdfast.client.connection import Outcome, PublishResult
from holdfast.client.errors import ClientError, NotConnected, PublishRefused
from holdfast.client.identity import ProducerIdentity, identity_of
from holdfast.protocol.mqtt.packets import Properties


class Sent:
    def __init__(
        self, topic: str, payload: bytes, retain: bool, properties: Properties | None
    ) -> None:
        self.topic = topic
        self.payload = payload
        self.retain = retain
        self.properties: Properties = properties or {}
        self.future: asyncio.Future[PublishResult] = asyncio.get_running_loop().create_future()

    @property
    def identity(self) -> ProducerIdentity | None:
        return identity_of(self.properties)

    def confirm(self) -> None:
        self.future.set_result(PublishResult(0, {}))

    def refuse(self, reason: int, detail: str = "") -> None:
        self.fail(PublishRefused("refused", reason, detail))

    def fail(self, error: ClientError) -> None:
        self.future.set_exception(error)


class FakeClient:
    def __init__(self, level: int = 5) -> None:
        self.core = SimpleNamespace(options=SimpleNamespace(level=level))
        self.is_connected = True
        self.is_congested = False
        """`submit` waits then."""
        self.confirms = False
        """Whether every message is confirmed at once."""
        self.sent: list[Sent] = []
        self._changed = asyncio.Event()
        self._free = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self.is_connected and not self.is_congested

    @property
    def open(self) -> list[Sent]:
        return [one for one in self.sent if not one.future.done()]

    def free(self) -> None:
        self.is_congested = False
        self._free.set()

    async def submit(
        self,
        topic: str,
        payload: bytes,
        *,
        qos: int,
        retain: bool,
        properties: Properties | None,
    ) -> asyncio.Future[PublishResult]:
        assert qos == 1
        if not self.is_connected:
            raise NotConnected("there is no connection")
        while self.is_congested:
            await self._free.wait()
        return self._accept(topic, payload, retain, properties)

    def submit_batch(
        self,
        messages: Sequence[tuple[str, bytes, bool, Properties | None]],
        on_settled: Callable[[int, Outcome], None],
    ) -> None:
        assert self.is_ready
        for index, message in enumerate(messages):
            self._accept(*message).add_done_callback(partial(_settle, on_settled, index))

    def _accept(
        self, topic: str, payload: bytes, retain: bool, properties: Properties | None
    ) -> asyncio.Future[PublishResult]:
        sent = Sent(topic, payload, retain, properties)
        self.sent.append(sent)
        self._changed.set()
        if self.confirms:
            sent.confirm()
        return sent.future

    async def until_sent(self, count: int) -> list[Sent]:
        """Wait for `count` messages in all."""
        while len(self.sent) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.sent

    def disconnect(self) -> None:
        self.is_connected = False
        for sent in self.open:
            sent.fail(NotConnected("disconnected"))


async def settle(turns: int = 20) -> None:
    """Let everything that needs no time happen."""
    for _ in range(turns):
        await asyncio.sleep(0)


def _settle(
    on_settled: Callable[[int, Outcome], None],
    index: int,
    future: asyncio.Future[PublishResult],
) -> None:
    error = future.exception()
    if error is None:
        on_settled(index, future.result())
    else:
        assert isinstance(error, ClientError)
        on_settled(index, error)
