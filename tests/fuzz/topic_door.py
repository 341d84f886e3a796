"""The replies of the HTTP service that decides about topics: damaged heads and bodies.

The service is no stranger, but it may be broken. A client whose question it answers with garbage is
refused for now, and other clients notice nothing.
"""

import json
import random
import socketserver
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.e2e import wire
from tests.e2e.brokers import Broker, Holdfast
from tests.fuzz.doors import CLOSE_S
from tests.fuzz.http_doors import mutated_json
from tests.fuzz.mqtt_doors import SETTINGS
from tests.fuzz.mutation import damage, noise

ALLOWED: Final = (0, 0x10)
DENIED: Final = (0x87,)
REFUSED_FOR_NOW: Final = (0x97,)


def reply(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


GOOD: Final = {
    reply(200, b'{"result": "allow"}'): ALLOWED,
    reply(200, b'{"result": "deny"}'): DENIED,
    # Without a file of rules nothing is allowed there.
    reply(200, b'{"result": "ignore"}'): DENIED,
    reply(200, b'{"Ok": true, "Error": ""}'): ALLOWED,
    reply(200, b'{"ok": false}'): DENIED,
    reply(200, b"ok"): ALLOWED,
    reply(204, b""): ALLOWED,
    reply(403, b"no"): DENIED,
    reply(500, b""): REFUSED_FOR_NOW,
    reply(200, b"[" * 60_000): REFUSED_FOR_NOW,
    reply(200, b" " * 70_000): REFUSED_FOR_NOW,
}
"""The replies that are not damaged, and the reasons of PUBACK."""


class ReplyServer(socketserver.ThreadingTCPServer):
    """A service whose next reply is `reply`, byte for byte; the canary may do everything."""

    allow_reuse_address = True
    daemon_threads = True
    reply = b""


class ReplyHandler(socketserver.StreamRequestHandler):
    """One connection: one request, one reply."""

    def handle(self) -> None:
        length = 0
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        question = json.loads(self.rfile.read(length) or b"{}")
        is_canary = str(question.get("topic", "")).startswith("canary")
        assert isinstance(self.server, ReplyServer)
        self.wfile.write(reply(200, b"ok") if is_canary else self.server.reply)


class TopicDoor:
    name = "topics"
    expected: Sequence[str] = ()

    def __init__(self) -> None:
        self.processes: list[Broker] = []
        self.canary_port = 0
        self._cases = 0

    def start(self, directory: Path) -> None:
        self.server = ReplyServer(("127.0.0.1", 0), ReplyHandler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        service = {"topic_url": url, "timeout_s": 10.0}
        self.broker = Holdfast(directory, {**SETTINGS, "security.http": service})
        self.processes = [self.broker]
        self.broker.start()
        self.canary_port = self.broker.port

    def case(self, rng: random.Random) -> str:
        data = rng.choice(tuple(GOOD))
        expected: Sequence[int] = GOOD[data]
        kind = rng.random()
        if kind < 0.7:
            expected = (*ALLOWED, *DENIED, *REFUSED_FOR_NOW)
            if kind < 0.3:
                data = damage(rng, data, tuple(GOOD))
            elif kind < 0.6:
                found = {"result": "allow", "ok": True, "publish": ["a/#"]}
                data = reply(
                    rng.choice((200, 201, 403)), json.dumps(mutated_json(rng, found)).encode()
                )
            else:
                data = reply(200, noise(rng))
        self._cases += 1
        self.server.reply = data
        with wire.Wire(self.broker.port, timeout_s=CLOSE_S) as client:
            client.connect("fuzzed")
            # A topic of its own, about which nothing is remembered.
            reason = client.publish(f"t/{self._cases}", b"x", qos=1)
        assert reason in expected, f"0x{reason:02x} for the reply {data[:300]!r}"
        return f"0x{reason:02x}"

    def end(self) -> None:
        self.broker.kill()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
