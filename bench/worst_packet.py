"""How long one client's worst packets keep everybody else waiting.

    python -m bench.worst_packet [--rounds 5] [--only NAME] [--json PATH]

A broker with its default limits holds 20,000 retained messages and 100,000 subscriptions of ten
sessions. Each row plays the worst that one packet, or one read of packets, can ask for. Meanwhile
another connection, the canary, sends PINGREQ after PINGREQ. The hold is the CPU time that the
broker spends until an answer comes, at worst. Unlike the time that passes, which is shown beside
it, it hardly grows with what else runs on the machine. It counts the broker's other threads as
well. A row's figures are the best of its rounds. Ends with 1 if a hold is above LIMIT_MS.
"""

import contextlib
import itertools
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench import brokers
from bench.options import new_parser, write_json
from holdfast.node.config import NodeConfig
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.decode import FILTERS_MAX
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.fields import binary_field, string_field, varint
from holdfast.protocol.mqtt.properties import REPEATS_MAX
from holdfast.protocol.mqtt.publish import Publish

LIMIT_MS = 50.0
RETAINED = 20_000
SUBSCRIPTIONS = 100_000
SESSIONS = 10
FILTERS = min(FILTERS_MAX, 30_000)
"""In one SUBSCRIBE or UNSUBSCRIBE."""
PACKET_BYTES = min(getattr(NodeConfig(), "packet_bytes_max", 1 << 28), 16 << 20)
CONNECT_BYTES = min(getattr(NodeConfig(), "connect_bytes", 1 << 28), PACKET_BYTES)
PROPERTIES = min(REPEATS_MAX, 65_000, (CONNECT_BYTES - 1000) // 7)
READ_BYTES = 256 << 10
QUIET_S = 0.25
QUIET_MS = 5.0
ROUND_S_MAX = 90.0
PING = encode(m.Pingreq(), 5)

numbers = itertools.count()


class Client:
    """A connection that reads, and forgets, what it gets."""

    def __init__(self, port: int, client_id: str = "", **connect: object) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = 0
        self.pings = 0
        self.name = client_id or f"worst-{next(numbers)}"
        if connect.get("connects", True):
            expiry_s = connect.get("expiry_s", 0)
            fields = {17: expiry_s} if expiry_s else {}
            clean = bool(connect.get("clean", True))
            will = connect.get("will")
            packet = m.Connect(5, clean, 0, self.name, will, None, None, fields)  # type: ignore[arg-type]
            self.socket.sendall(encode(packet, 5))
            self.socket.recv(4096)
        self.thread = threading.Thread(target=self._drain, daemon=True)
        self.thread.start()

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.socket.recv(1 << 20):
                self.received += len(data)

    def send(self, *packets: object) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(
                b"".join(each if isinstance(each, bytes) else encode(each, 5) for each in packets)
            )  # type: ignore[arg-type]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join(10)
        self.socket.close()


class Canary:
    def __init__(self, port: int, pid: int) -> None:
        # As bench.process.cpu_s, of this process alone.
        self.clock = (~pid << 3) | 2
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(encode(m.Connect(5, True, 0, "canary", None, None, None, {}), 5))
        self.socket.recv(4096)
        self.worst_ms = 0.0
        self.worst_cpu_ms = 0.0
        self.slow_at = time.monotonic()
        self.answered_at = time.monotonic()
        threading.Thread(target=self._ping, daemon=True).start()

    def _ping(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                used = time.clock_gettime(self.clock)
                sent = time.perf_counter()
                self.socket.sendall(PING)
                if not self.socket.recv(2):
                    return
                waited_ms = (time.perf_counter() - sent) * 1e3
                used_ms = (time.clock_gettime(self.clock) - used) * 1e3
                self.worst_ms = max(self.worst_ms, waited_ms)
                self.worst_cpu_ms = max(self.worst_cpu_ms, used_ms)
                self.answered_at = time.monotonic()
                if used_ms > QUIET_MS:
                    self.slow_at = time.monotonic()
                time.sleep(0.001)

    def wait_for_quiet(self) -> None:
        """Until nothing was slow for a while; an answer that is still due is slow."""
        start = time.monotonic()
        while True:
            now = time.monotonic()
            if now - self.answered_at < QUIET_S / 5 and now - max(start, self.slow_at) > QUIET_S:
                return
            if now - start > ROUND_S_MAX:
                raise TimeoutError(f"the loop is not quiet after {ROUND_S_MAX:.0f} s")
            time.sleep(0.01)


class World:
    def __init__(self, port: int, pid: int, filters: int) -> None:
        self.port = port
        self.filters = filters
        self.crowd: list[Client] = []
        publisher = Client(port)
        for start in range(0, RETAINED, 500):
            publisher.send(
                *(
                    publish(f"fleet{number}/state", b"retained", retain=True)
                    for number in range(start, start + 500)
                )
            )
        publisher.close()
        for session in range(SESSIONS):
            client = Client(port, f"crowd-{session}", expiry_s=3600)
            count = SUBSCRIPTIONS // SESSIONS
            subscribe_all(client, [f"plant{session}/+/line{n}/#" for n in range(count)], 500)
            self.crowd.append(client)
        self.canary = Canary(port, pid)
        self.canary.wait_for_quiet()


def publish(
    topic: str,
    payload: bytes,
    qos: int = 0,
    packet_id: int = 0,
    *,
    retain: bool = False,
    properties: bytes = b"",
) -> bytes:
    return encode(
        Publish(topic.encode(), payload, qos, retain, False, packet_id, properties, 0, -1), 5
    )


def subscribe(
    filters: list[str], qos: int = 1, *, identifier: int = 0, retained: bool = True
) -> bytes:
    """`retained`: with a look at what is retained."""
    fields = {11: [identifier]} if identifier else {}
    requests = [
        m.SubscriptionRequest(filter, qos, False, False, 0 if retained else 2) for filter in filters
    ]
    return encode(m.Subscribe(1, requests, fields), 5)  # type: ignore[arg-type]


def subscribe_all(client: Client, filters: list[str], at_once: int) -> None:
    """In packets of `at_once`, one after the other's answer."""
    for start in range(0, len(filters), at_once):
        before = client.received
        client.send(subscribe(filters[start : start + at_once], identifier=7, retained=False))
        wait_until(lambda before=before: client.received > before)  # type: ignore[misc]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ROUND_S_MAX
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


def user_properties(count: int) -> bytes:
    return b"\x26\x00\x01a\x00\x01b" * count


def raw(first: int, body: bytes) -> bytes:
    return bytes((first,)) + varint(len(body)) + body


Shot = tuple[Client, bytes]
"""A connection and what it sends while the canary is watched."""


def connect_with_properties(world: World) -> Shot:
    block = user_properties(PROPERTIES)
    body = string_field("MQTT") + b"\x05\x02\x00\x00" + varint(len(block)) + block
    return Client(world.port, connects=False), raw(0x10, body + string_field("properties"))


def connect_with_will(world: World) -> Shot:
    block = user_properties(PROPERTIES)
    block = block[: 7 * ((CONNECT_BYTES - 200_000) // 7)]
    body = string_field("MQTT") + b"\x05\x06\x00\x00\x00" + string_field("w" * 65_000)
    body += varint(len(block)) + block + string_field("t" * 65_535) + binary_field(b"p" * 65_535)
    return Client(world.port, connects=False), raw(0x10, body)


def publish_long_topic(world: World) -> Shot:
    return Client(world.port), publish("/".join(["t" * 326] * 200), b"x", 1, 1)


def publish_with_properties(world: World) -> Shot:
    return Client(world.port), publish("a", b"x", 1, 1, properties=user_properties(PROPERTIES))


def publish_large(world: World) -> Shot:
    return Client(world.port), publish("a", bytes(PACKET_BYTES - 100), 1, 1)


def publish_flood(world: World) -> Shot:
    return Client(world.port), publish("a", b"") * (READ_BYTES // 6)


def alias_storm(world: World) -> Shot:
    packets = [publish("a", b"", properties=b"")[:0]]
    for number in range(READ_BYTES // 12):
        properties = b"\x23" + (1 + number % 64).to_bytes(2, "big")
        body = string_field(f"{number % 1000}") + varint(len(properties)) + properties
        packets.append(raw(0x30, body))
    return Client(world.port), b"".join(packets)


def subscribe_nothing_retained(world: World) -> Shot:
    return Client(world.port), subscribe([f"+/none{n}" for n in range(min(200, world.filters))])


def subscribe_wildcards(world: World) -> Shot:
    client = Client(world.port, expiry_s=60)
    filters = [f"+/deep{n}/+/{client.name}/#" for n in range(world.filters)]
    return client, subscribe(filters, retained=False)


def subscribe_all_retained(world: World) -> Shot:
    return Client(world.port), subscribe(["#"], 0)


def subscribe_shared(world: World) -> Shot:
    client = Client(world.port, expiry_s=60)
    return client, subscribe([f"$share/g/{client.name}/{n}" for n in range(world.filters)])


def subscribe_bad(world: World) -> Shot:
    client = Client(world.port, f"{next(numbers)}" + "i" * 60_000)
    return client, subscribe([f"bad#{n}" for n in range(world.filters)])


def subscribe_flood(world: World) -> Shot:
    client = Client(world.port)
    packets = []
    size = 0
    while size <= READ_BYTES:
        packets.append(subscribe([f"{len(packets)}-{n}" for n in range(500)]))
        size += len(packets[-1])
    return client, b"".join(packets)


def subscribe_long(world: World) -> Shot:
    filters = [
        f"{n}/" + "/".join(["f" * 320] * 199)
        for n in range(min(world.filters, PACKET_BYTES // 65_000 - 1, 500))
    ]
    return Client(world.port), subscribe(filters)


def subscribe_queues(world: World) -> Shot:
    """One queue again and again, and as many as there is room for beside other filters."""
    client = Client(world.port, expiry_s=60)
    half = world.filters // 2
    return client, subscribe(
        ["$queue/q/0"] * half + [f"$queue/q/{n}" for n in range(world.filters - half)]
    )


def unsubscribe_shared(world: World) -> Shot:
    client = Client(world.port, expiry_s=60)
    filters = [f"$share/g/{client.name}/{n}" for n in range(world.filters)]
    subscribe_all(client, filters, world.filters)
    return client, encode(m.Unsubscribe(1, filters), 5)


def unsubscribe_wildcards(world: World) -> Shot:
    client = Client(world.port, expiry_s=60)
    filters = [f"+/deep{n}/{client.name}/#" for n in range(world.filters)]
    subscribe_all(client, filters, world.filters)
    return client, encode(m.Unsubscribe(1, filters), 5)


def flood(first: int, body: Callable[[int], bytes]) -> Callable[[World], Shot]:
    def shot(world: World) -> Shot:
        packets: list[bytes] = []
        size = 0
        while size <= READ_BYTES:
            packets.append(raw(first, body(len(packets) % 65_000 + 1)))
            size += len(packets[-1])
        return Client(world.port), b"".join(packets)

    return shot


def two(number: int) -> bytes:
    return number.to_bytes(2, "big")


def acknowledge_in_groups(world: World) -> Shot:
    """Its window is full, and it is in thousands of groups."""
    client = Client(world.port)
    count = min(10_000, world.filters * 10)
    subscribe_all(client, [f"$share/g/{client.name}/{n}" for n in range(count)], world.filters)
    publisher = Client(world.port)
    for number in range(400):
        publisher.send(publish(f"{client.name}/{number}", b"x", 1, number + 1))
    wait_until(lambda: client.received > 256 * 20)
    publisher.close()
    return client, b"".join(raw(0x40, two(number)) for number in range(1, 257))


def with_subscriptions(world: World, kind: str, expiry_s: int) -> Client:
    client = Client(world.port, expiry_s=expiry_s)
    made = [f"{kind}{client.name}/{n}" for n in range(SUBSCRIPTIONS // 2)]
    made += [f"{kind}+/{client.name}/{n}" for n in range(SUBSCRIPTIONS // 2)]
    subscribe_all(client, made, min(world.filters, 1000))
    return client


def take_over(kind: str, expiry_s: int) -> Callable[[World], Shot]:
    def shot(world: World) -> Shot:
        old = with_subscriptions(world, kind, expiry_s)
        packet = m.Connect(5, True, 0, old.name, None, None, None, {})
        return Client(world.port, connects=False), encode(packet, 5)

    return shot


def resume(world: World) -> Shot:
    old = with_subscriptions(world, "", 60)
    packet = m.Connect(5, False, 0, old.name, None, None, None, {})
    return Client(world.port, connects=False), encode(packet, 5)


def disconnect(kind: str) -> Callable[[World], Shot]:
    def shot(world: World) -> Shot:
        client = with_subscriptions(world, kind, 60)
        return client, encode(m.Disconnect(0, {17: 0}), 5)

    return shot


def disconnect_with_properties(world: World) -> Shot:
    block = user_properties(PROPERTIES)
    return Client(world.port), raw(0xE0, b"\x00" + varint(len(block)) + block)


def auth(world: World) -> Shot:
    block = b"\x15\x00\x01x" + user_properties(PROPERTIES)
    return Client(world.port), raw(0xF0, b"\x18" + varint(len(block)) + block)


def overlap(world: World) -> Shot:
    """One client has thousands of filters that all match, and somebody has just subscribed."""
    client = Client(world.port)
    options = [("+", f"o{level}") for level in range(15)]
    filters = ["/".join(levels) for levels in itertools.product(*options)]
    subscribe_all(client, filters, min(world.filters, 1000))
    other = Client(world.port)
    topic = "/".join(f"o{level}" for level in range(15))
    return other, subscribe(["x/+"]) + publish(topic, b"x", 0)


def wide_fan_out(world: World) -> Shot:
    """1,000 connections subscribe to what a will says."""
    for number in range(1000 - len(world.crowd)):
        client = Client(world.port)
        client.send(subscribe(["fan"], number % 2))
        world.crowd.append(client)
    will = m.Will("fan", b"x", 1, False, {})
    return Client(world.port, will=will), b"\0\0"


def catch_up(world: World) -> Shot:
    client = with_subscriptions(world, "", 600)
    client.send(encode(m.Disconnect(), 5))
    client.close()
    publisher = Client(world.port)
    for number in range(500):
        publisher.send(publish(f"{client.name}/{number}", b"x", 1, number + 1))
    wait_until(lambda: publisher.received >= 4 * 500)
    publisher.close()
    packet = m.Connect(5, False, 0, client.name, None, None, None, {17: 60})
    return Client(world.port, connects=False), encode(packet, 5)


SHOTS: dict[str, Callable[[World], Shot]] = {
    "CONNECT, user properties": connect_with_properties,
    "CONNECT, will with user properties": connect_with_will,
    "PUBLISH, topic of 65,399 bytes": publish_long_topic,
    "PUBLISH, user properties": publish_with_properties,
    "PUBLISH, largest": publish_large,
    "PUBLISH flood": publish_flood,
    "PUBLISH, alias storm": alias_storm,
    "PUBLISH, 32,768 filters of one session match": overlap,
    "SUBSCRIBE, 200 filters, none retained": subscribe_nothing_retained,
    "SUBSCRIBE #, 20,000 retained": subscribe_all_retained,
    "SUBSCRIBE, wildcards": subscribe_wildcards,
    "SUBSCRIBE, $share": subscribe_shared,
    "SUBSCRIBE, $queue": subscribe_queues,
    "SUBSCRIBE, bad filters, long client id": subscribe_bad,
    "SUBSCRIBE, long filters": subscribe_long,
    "SUBSCRIBE flood": subscribe_flood,
    "UNSUBSCRIBE, wildcards": unsubscribe_wildcards,
    "UNSUBSCRIBE, $share": unsubscribe_shared,
    "PINGREQ flood": flood(0xC0, lambda _: b""),
    "PUBACK flood": flood(0x40, two),
    "PUBREC flood": flood(0x50, two),
    "PUBREL flood": flood(0x62, two),
    "PUBACK of a full window, 10,000 groups": acknowledge_in_groups,
    "AUTH, user properties": auth,
    "DISCONNECT, user properties": disconnect_with_properties,
    "DISCONNECT ends 100,000 subscriptions": disconnect(""),
    "DISCONNECT ends 100,000 $share": disconnect("$share/g/"),
    "CONNECT resumes 100,000 subscriptions": resume,
    "CONNECT, clean start over 100,000": take_over("", 60),
    "CONNECT, clean start over 100,000 $share": take_over("$share/g/", 60),
    "CONNECT, 100,000 filters behind by 500": catch_up,
    "will to 1,000 clients": wide_fan_out,
}


def measure(world: World, shot: Callable[[World], Shot], rounds: int) -> tuple[int, float, float]:
    """Bytes sent, and the least of the rounds' holds and slowest answers in ms."""
    canary = world.canary
    hold_ms = answer_ms = float("inf")
    size = 0
    for _ in range(rounds):
        client, data = shot(world)
        canary.wait_for_quiet()
        canary.worst_ms = canary.worst_cpu_ms = 0.0
        client.send(data)
        size = len(data)
        canary.wait_for_quiet()
        hold_ms = min(hold_ms, canary.worst_cpu_ms)
        answer_ms = min(answer_ms, canary.worst_ms)
        client.close()
        canary.wait_for_quiet()
        if hold_ms > 1000:
            break
    return size, hold_ms, answer_ms


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.worst_packet", __doc__, "--python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--filters", type=int, default=FILTERS, help="in one SUBSCRIBE")
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name contains this")
    arguments = parser.parse_args(argv)
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        broker = brokers.start_holdfast(Path(directory), "fsync", arguments.python)
        try:
            world = World(broker.port, broker.pid, arguments.filters)
            print(f"{'packet':46} {'bytes':>11} {'hold, ms':>9} {'answer, ms':>11}", flush=True)
            for name, shot in SHOTS.items():
                if arguments.only.lower() not in name.lower():
                    continue
                size, hold_ms, answer_ms = measure(world, shot, arguments.rounds)
                mark = "  too long" if hold_ms > LIMIT_MS else ""
                print(f"{name:46} {size:>11,} {hold_ms:>9.1f} {answer_ms:>11.1f}{mark}", flush=True)
                figures[name] = {
                    "bytes": size,
                    "hold_ms": round(hold_ms, 1),
                    "answer_ms": round(answer_ms, 1),
                }
        finally:
            broker.stop()
    write_json(arguments.json, figures)
    return 1 if any(each["hold_ms"] > LIMIT_MS for each in figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
