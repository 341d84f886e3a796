"""Publishes a run's events from their file, so that they become records of a broker's log."""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from holdfast.client.client import Client
from holdfast.client.connection import Outcome
from holdfast.client.errors import ClientError, PublishRefused
from holdfast.client.identity import IDENTITY_PROPERTY, ProducerIdentity
from holdfast.client.options import Options
from holdfast.client.reconnect import Reconnect
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Properties
from holdfast.protocol.mqtt.properties import USER_PROPERTY
from holdfast_lab.events import topic_of

WINDOW: Final = 2000
"""The events that are published and confirmed before the next ones are read."""
RETRY_S: Final = 0.5
"""The seconds before refused events are sent again."""
RETRIED: Final = frozenset({reasons.QUOTA_EXCEEDED, reasons.SERVER_BUSY, reasons.UNSPECIFIED_ERROR})
"""Refusals that may be transient."""

Message = tuple[str, bytes, bool, Properties | None]


class _Head(msgspec.Struct):
    run: str
    writer: str
    n: int
    event: str


def publish_events(
    path: Path,
    servers: Sequence[str],
    *,
    username: str | None = None,
    password: bytes | None = None,
    timeout_s: float = 600.0,
) -> int:
    """Publishes every event of the file with QoS 1, in order, and returns their number.

    It returns when the last event is confirmed. `servers` are MQTT addresses of one Holdfast
    broker, in any order.

    The call may be repeated, also after a failure half-way: each event carries its number as the
    sequence of a producer. The producer is named after the file's first event, so the broker stores
    each event once. Raises ValueError for a line that is no event, ClientError if no server accepts
    an event, and TimeoutError.
    """
    options = Options(username=username, password=password, inflight_max=WINDOW)
    return asyncio.run(_publish_all(path, servers, options, timeout_s))


async def _publish_all(
    path: Path, servers: Sequence[str], options: Options, timeout_s: float
) -> int:
    count = 0
    async with asyncio.timeout(timeout_s):
        client = Client(servers=servers, reconnect=Reconnect(), options=options)
        async with client:
            with path.open("rb") as file:
                messages = _messages(path, file)
                while window := list(islice(messages, WINDOW)):
                    await _publish_window(client, window)
                    count += len(window)
    return count


async def _publish_window(client: Client, window: list[Message]) -> None:
    """Publishes some events, and returns when all are confirmed.

    After a transient refusal the refused event and all behind it are sent again, in order. The
    broker drops those that it has already. Raises ClientError.
    """
    while window:
        outcomes = await _submit(client, window)
        failed = [at for at, outcome in enumerate(outcomes) if isinstance(outcome, ClientError)]
        if not failed:
            return
        error = outcomes[failed[0]]
        assert isinstance(error, ClientError)
        if not isinstance(error, PublishRefused) or error.reason not in RETRIED:
            raise error
        window = window[failed[0] :]
        await asyncio.sleep(RETRY_S)


async def _submit(client: Client, window: list[Message]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    settled = asyncio.Event()

    def resolve(at: int, outcome: Outcome) -> None:
        outcomes[at] = outcome
        if len(outcomes) == len(window):
            settled.set()

    while True:
        try:
            client.submit_batch(window, resolve)
            break
        except ClientError:
            # The client is reconnecting. `flush` raises if it has given up.
            await client.flush()
            await asyncio.sleep(RETRY_S)
    await settled.wait()
    return [outcomes[at] for at in range(len(window))]


def _messages(path: Path, lines: Iterator[bytes]) -> Iterator[Message]:
    decode = msgspec.json.Decoder(_Head).decode
    producer = ""
    for number, line in enumerate(lines, 1):
        try:
            head = decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: not an event: {error}") from None
        producer = producer or f"experiment-{hashlib.sha256(line).hexdigest()[:32]}"
        identity = ProducerIdentity(producer, 0, head.n)
        properties: Properties = {USER_PROPERTY: [(IDENTITY_PROPERTY, str(identity))]}
        yield topic_of(head.run, head.event), line.rstrip(b"\n"), False, properties
