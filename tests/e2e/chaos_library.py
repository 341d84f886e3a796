"""Clients of the chaos tests that are others' code: this project's client and paho, each in a
process of its own.

    python -m tests.e2e.chaos_library holdfast-publish --client NAME --events FILE --server H:P ...

A publisher sends until a line or the end arrives on its standard input, then waits for what is
unconfirmed; a subscriber receives until then. Both end with 0.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from holdfast.client.client import Client
from holdfast.client.errors import ClientError
from holdfast.client.options import Options
from holdfast.client.protocol.effects import Message
from holdfast.client.reconnect import Reconnect
from holdfast.client.servers import Server
from holdfast.protocol.mqtt import packets as pk
from tests.e2e import paho_clients
from tests.e2e.brokers import SOURCE
from tests.e2e.event_log import EventReader, EventWriter
from tests.e2e.ledger import Key, Ledger

ROOT: Final = Path(__file__).parents[2]
INTERVAL_S: Final = 0.02
EXPIRY_S: Final = 3600
WINDOW: Final = 16
DRAIN_S: Final = paho_clients.DRAIN_S
END_S: Final = DRAIN_S + 20.0


def payload_of(key: Key) -> bytes:
    return f"{key[0]} {key[2]} ".encode().ljust(64, b".")


def key_of(topic: str, payload: bytes) -> Key:
    publisher, number, _ = payload.split(b" ", 2)
    return publisher.decode(), topic, int(number)


class Numbers:
    """The messages of a publisher, one topic after the other."""

    def __init__(self, publisher: str, topics: Sequence[str]) -> None:
        self._publisher = publisher
        self._topics = topics
        self._count = 0

    def next(self) -> Key:
        number, at = divmod(self._count, len(self._topics))
        self._count += 1
        return self._publisher, self._topics[at], number


def _told_to_end() -> threading.Event:
    over = threading.Event()

    def wait() -> None:
        sys.stdin.readline()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    return over


class _Watched:
    """Our client, with every packet that matters told to the event log."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.events = EventWriter(arguments.events, arguments.client)
        self._connections = 0
        self._sent: dict[int, Key] = {}
        self.client = Client(
            servers=arguments.server,
            reconnect=Reconnect(first_delay_s=0.02, delay_max_s=0.3),
            options=Options(
                client_id=arguments.client,
                clean_start=False,
                session_expiry_s=EXPIRY_S,
                inflight_max=WINDOW,
                connect_timeout_s=1.5,
                response_timeout_s=1.5,
                ping_interval_s=0.5,
                trace=True,
            ),
            on_connect=self._on_connect,
            on_trace=self._on_trace,
        )

    def _on_connect(self, session_present: bool, server: Server) -> None:
        self._connections += 1
        self.events.write("connected", node=str(server))
        if self._connections > 1 and not session_present:
            text = f"at connection {self._connections}, to {server}"
            self.events.write("accuse", kind="session lost", text=text)

    def _on_trace(self, sent: bool, packet: pk.Packet) -> None:
        if sent and isinstance(packet, pk.Publish):
            topic = packet.topic if isinstance(packet.topic, str) else packet.topic.decode()
            key = key_of(topic, packet.payload)
            self._sent[packet.packet_id] = key
            details = {"qos": packet.qos, "dup": packet.dup, "packet_id": packet.packet_id}
            self.events.message("send", key, **details)
        elif not sent and isinstance(packet, pk.Ack) and packet.kind in (pk.PUBACK, pk.PUBREC):
            event = "refused" if packet.reason >= 0x80 else "ok"
            details = {"packet_id": packet.packet_id, "reason": packet.reason}
            self.events.message(event, self._sent[packet.packet_id], **details)

    async def publish(self, topics: Sequence[str], qos: int, over: threading.Event) -> None:
        numbers = Numbers(self.events.client, topics)
        # What an outage held back does not follow in a burst.
        window = asyncio.Semaphore(WINDOW)

        def finished(done: asyncio.Future[Any]) -> None:
            done.exception()
            window.release()

        async with self.client:
            while not over.is_set():
                await asyncio.sleep(INTERVAL_S)
                if window.locked():
                    continue
                await window.acquire()
                key = numbers.next()
                future = await self.client.submit(key[1], payload_of(key), qos=qos)
                future.add_done_callback(finished)
            async with asyncio.timeout(DRAIN_S):
                await self.client.flush()

    async def subscribe(self, filters: Sequence[str], qos: int, over: threading.Event) -> None:
        wanted = [(name, qos) for name in filters]
        self.events.write("subscribe", filters=wanted)
        async with self.client:
            receiving = asyncio.create_task(self._receive())
            await self.client.subscribe(*wanted)
            self.events.write("subscribed")
            await asyncio.to_thread(over.wait)
            if receiving.done():
                receiving.result()
            receiving.cancel()

    async def _receive(self) -> None:
        async for message in self.client.messages():
            self._take(message)

    def _take(self, message: Message) -> None:
        key = key_of(message.topic, message.payload)
        self.events.message("deliver", key, connection=message.connection, dup=message.dup)


def _holdfast_publish(arguments: argparse.Namespace, over: threading.Event) -> None:
    asyncio.run(_Watched(arguments).publish(arguments.topic, arguments.qos, over))


def _holdfast_subscribe(arguments: argparse.Namespace, over: threading.Event) -> None:
    asyncio.run(_Watched(arguments).subscribe(arguments.topic, arguments.qos, over))


ROLES: Final[dict[str, Callable[[argparse.Namespace, threading.Event], None]]] = {
    "holdfast-publish": _holdfast_publish,
    "holdfast-subscribe": _holdfast_subscribe,
    **paho_clients.ROLES,
}


class LibraryClient:
    """One such process, seen from the test. `prefix` starts it on another host."""

    def __init__(
        self,
        role: str,
        name: str,
        servers: Sequence[str],
        topics: Sequence[str],
        qos: int,
        directory: Path,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.events = directory / f"{name}.events"
        self._reader = EventReader(self.events)
        self._errors = directory / f"{name}.errors"
        command = [sys.executable, "-m", "tests.e2e.chaos_library", role]
        command += ["--client", name, "--events", str(self.events), "--qos", str(qos)]
        command += [part for server in servers for part in ("--server", server)]
        command += [part for topic in topics for part in ("--topic", topic)]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*prefix, *command],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stderr=errors,
                env=dict(os.environ, PYTHONPATH=str(SOURCE)),
            )

    def tell(self, ledger: Ledger) -> None:
        """What it saw since the last call."""
        self._reader.read(ledger)

    def stop_soon(self) -> None:
        """It publishes nothing new from now on; a subscriber goes away."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> str:
        """ "" for one that ended as it should."""
        if self._process.returncode == 0:
            return ""
        words = self._errors.read_text(errors="replace").strip()[-2000:]
        return f"{self.name} ended with {self._process.returncode}: {words}"

    def kill(self) -> None:
        if not self.has_ended():
            self._process.kill()
        self.stop_soon()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos_library")
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--client", required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--server", action="append", required=True, metavar="HOST:PORT")
    parser.add_argument("--topic", action="append", required=True, help="or filter")
    parser.add_argument("--qos", type=int, required=True)
    arguments = parser.parse_args()
    over = _told_to_end()
    try:
        ROLES[arguments.role](arguments, over)
    except TimeoutError:
        print(f"unconfirmed after {DRAIN_S:g} s", file=sys.stderr)
        return 1
    except ClientError as error:
        print(f"{arguments.role}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
