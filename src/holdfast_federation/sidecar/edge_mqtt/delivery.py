"""Publishes the messages of `Imports` with one client, in order.

A broker that forwards QoS 2 at PUBREL lets a later QoS 1 message overtake it. For each topic,
therefore, only messages of one of the two are in flight at a time.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Final, NamedTuple

from holdfast.client.client import Client
from holdfast.client.connection import Outcome, PublishResult
from holdfast.client.errors import PublishRefused
from holdfast.client.identity import IDENTITY_PROPERTY
from holdfast.client.options import LEVEL_5
from holdfast.io.peers.complaints import Complaints
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import Properties
from holdfast_federation.sidecar.edge_mqtt.imports import Import, Imports, is_transient
from holdfast_federation.sidecar.edge_mqtt.loop_marker import inbound, user_properties

EXPIRY_MAX_S: Final = (1 << 32) - 1
BATCH_MESSAGES_MAX: Final = 256
"""The most messages in one write to the socket.

A batch also ends with the message that reaches BATCH_BYTES_MAX.
"""
BATCH_BYTES_MAX: Final = 1 << 17


class _Sending(NamedTuple):
    entry: Import
    qos: int
    properties: Properties | None


class ImportDelivery:
    """The sender of one client, limited by its window and by one QoS per topic."""

    def __init__(
        self,
        client: Client,
        imports: Imports,
        producer: str,
        on_busy: Callable[[str], None],
        complain: Complaints,
    ) -> None:
        """`producer`: the prefix of producer ids, unique to this member, used if the broker
        supports sequences. `on_busy`: called when the broker refuses a message for now; later
        messages must not arrive before it."""
        self._client = client
        self._imports = imports
        self._producer = producer
        self._on_busy = on_busy
        self._complain = complain
        self._work = asyncio.Event()
        self._in_flight = 0
        # For each topic with messages in flight: their QoS and number.
        self._topics: dict[str, tuple[int, int]] = {}
        self._is_ending = False

    def wake(self) -> None:
        """Continues, because `imports` has a new message."""
        self._work.set()

    async def run(self) -> None:
        """Sends until the client accepts no further connection.

        Raises `ConnectionLost` or `NotConnected` at that point.
        """
        while True:
            # Messages wait in `imports`, not in the client: `imports` is cleared when the broker is
            # busy. So only messages in flight can arrive before a refused one.
            await self._client.until_ready()
            batch = self._next_batch()
            if batch:
                self._send(batch)
            else:
                self._work.clear()
                await self._work.wait()

    def end(self) -> None:
        """Sends no more messages. Those in flight may still be acknowledged."""
        self._is_ending = True

    @property
    def in_flight(self) -> int:
        """The number of unacknowledged messages of QoS 1 and 2."""
        return self._in_flight

    def _has_room(self) -> bool:
        first = self._imports.first()
        if self._is_ending or first is None:
            return False
        core = self._client.core
        window = min(core.options.inflight_max, core.limits.receive_maximum)
        if self._in_flight >= window:
            return False
        qos = self._qos(first)
        return not qos or self._topics.get(first.message.topic, (qos, 0))[0] == qos

    def _qos(self, entry: Import) -> int:
        return min(entry.message.qos, self._client.core.limits.qos_max)

    def _count(self, topic: str, qos: int, by: int) -> None:
        self._in_flight += by
        count = self._topics.get(topic, (qos, 0))[1] + by
        if count:
            self._topics[topic] = (qos, count)
        else:
            del self._topics[topic]

    def _next_batch(self) -> list[_Sending]:
        """Returns the next messages of equal QoS. Expired and invalid ones are finished instead."""
        batch: list[_Sending] = []
        size = 0
        while len(batch) < BATCH_MESSAGES_MAX and size < BATCH_BYTES_MAX and self._has_room():
            first = self._imports.first()
            assert first is not None
            qos = self._qos(first)
            if batch and qos != batch[0].qos:
                break
            entry = self._imports.next()
            assert entry is first
            sending = self._sending(entry, qos)
            if sending is None:
                continue
            if qos:
                self._count(entry.message.topic, qos, 1)
            size += len(entry.message.payload) + len(entry.message.properties)
            batch.append(sending)
        return batch

    def _sending(self, entry: Import, qos: int) -> _Sending | None:
        """Prepares a message. None: it has expired or cannot be sent, and is finished."""
        left_s = math.inf
        if entry.expires_at is not None:
            left_s = entry.expires_at - asyncio.get_running_loop().time()
            if left_s <= 0:
                self._finish(entry, "expired")
                return None
        try:
            return _Sending(entry, qos, self._properties(entry, qos, left_s))
        except ProtocolViolation as error:
            self._drop(entry, error)
            return None

    def _send(self, batch: list[_Sending]) -> None:
        retain_available = self._client.core.limits.retain_available
        self._client.submit_batch(
            [
                (
                    sending.entry.message.topic,
                    sending.entry.message.payload,
                    sending.entry.message.is_retained and retain_available,
                    sending.properties,
                )
                for sending in batch
            ],
            lambda index, outcome: self._resolved(batch[index], outcome),
            batch[0].qos,
        )

    def _properties(self, entry: Import, qos: int, left_s: float) -> Properties | None:
        if self._client.core.options.level < LEVEL_5:
            return None
        producer = ""
        known = user_properties(self._client.connack_properties)
        # A Holdfast broker announces for each QoS whether it deduplicates by our sequences.
        if (IDENTITY_PROPERTY, str(qos)) in known:
            producer = f"{self._producer}-{entry.id.node.hex()}"
        properties = inbound(entry.id, entry.message, producer, entry.place)
        if left_s < math.inf:
            properties[pr.MESSAGE_EXPIRY_INTERVAL] = min(math.ceil(left_s), EXPIRY_MAX_S)
        return properties

    def _resolved(self, sending: _Sending, outcome: Outcome) -> None:
        entry = sending.entry
        if sending.qos:
            self._count(entry.message.topic, sending.qos, -1)
            self._work.set()
        if isinstance(outcome, PublishResult):
            self._finish(entry, "imported")
        elif isinstance(outcome, PublishRefused) and not is_transient(outcome):
            self._drop(entry, outcome)
        else:
            self._imports.failed(entry)
            if isinstance(outcome, PublishRefused):
                self._complain.say("busy", str(outcome), f"waits for its broker: {outcome}")
                self._on_busy(str(outcome))

    def _drop(self, entry: Import, error: Exception) -> None:
        topic = entry.message.topic[:200]
        self._complain.say(
            "dropped", type(error).__name__, f"dropped a message for {topic!r}: {error}"
        )
        self._finish(entry, "refused by the broker")

    def _finish(self, entry: Import, reason: str) -> None:
        done = self._imports.finished(entry, reason)
        if done is not None:
            done()
