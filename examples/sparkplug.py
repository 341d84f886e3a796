"""A Sparkplug B plant: an edge node with two machines, and a host application that shows them.

    pip install . protobuf
    python examples/sparkplug.py host 127.0.0.1 scada
    python examples/sparkplug.py edge 127.0.0.1 plant line-1

The edge node announces its metrics in births (NBIRTH, DBIRTH), then sends only changed values by
alias (DDATA). Its death (NDEATH) is the will of the connection. Each connection has its own number
`bdSeq`, which connects a death with its birth. The host application counts `seq` and requests
births (NCMD) when it lacks one or when a message is missing.

The broker keeps every message. The pipeline reads Sparkplug without a rule: names and types come
from the births, and `$online` from births and deaths.

Source: the Sparkplug 3.0 specification, and sparkplug_b.proto of Eclipse Tahu.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from holdfast.client import (
    Client,
    ClientError,
    ConnectionLost,
    Message,
    NotConnected,
    Options,
    TimedOut,
    Will,
)

NAMESPACE = "spBv1.0"
REBIRTH = "Node Control/Rebirth"
BD_SEQ = "bdSeq"
INT64, DOUBLE, BOOLEAN, STRING = 4, 10, 11, 12
RETRY_S = 1.0
"""The pause before the next attempt to connect."""
REBIRTH_S = 5.0
"""The least seconds between two requests for a birth of the same edge node."""

Value = float | int | bool | str | None
Readings = Mapping[str, Mapping[str, float | int | bool | str]]
"""By device, the value of each metric."""
Packet = tuple[str, bytes]
"""A topic and a payload."""


# Payloads


def _payload_class() -> type[Any]:
    """The class of payloads: the part of sparkplug_b.proto that scalar metrics need."""
    fields = {
        "Metric": "name:1:STRING alias:2:UINT64 timestamp:3:UINT64 datatype:4:UINT32 "
        "is_historical:5:BOOL is_null:7:BOOL int_value:10:UINT32 long_value:11:UINT64 "
        "float_value:12:FLOAT double_value:13:DOUBLE boolean_value:14:BOOL string_value:15:STRING",
        "Payload": "timestamp:1:UINT64 metrics:2:MESSAGE seq:3:UINT64",
    }
    file = FileDescriptorProto(name="sparkplug_b.proto", package="sparkplug", syntax="proto2")
    for message, text in fields.items():
        described = file.message_type.add(name=message)
        for name, number, kind in (each.split(":") for each in text.split()):
            entry = described.field.add(name=name, number=int(number))
            entry.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind}")
            entry.label = FieldDescriptorProto.LABEL_OPTIONAL
            if kind == "MESSAGE":
                entry.label = FieldDescriptorProto.LABEL_REPEATED
                entry.type_name = ".sparkplug.Metric"
    pool = DescriptorPool()
    pool.Add(file)
    found: type[Any] = GetMessageClass(pool.FindMessageTypeByName("sparkplug.Payload"))
    return found


Payload = _payload_class()


@dataclass(frozen=True)
class Metric:
    """A value, with the name or the alias that it is sent under."""

    value: Value
    name: str = ""
    alias: int | None = None


def encode(metrics: Iterable[Metric], seq: int | None = None) -> bytes:
    """The payload of some metrics. Those with a name also have their type, as births do."""
    payload = Payload(timestamp=_now_ms())
    if seq is not None:
        payload.seq = seq
    for each in metrics:
        metric = payload.metrics.add(timestamp=payload.timestamp)
        datatype, member, value = _typed(each.value)
        setattr(metric, member, value)
        if each.name:
            metric.name, metric.datatype = each.name, datatype
        if each.alias is not None:
            metric.alias = each.alias
    encoded: bytes = payload.SerializeToString()
    return encoded


def _typed(value: Value) -> tuple[int, str, object]:
    """The datatype, the field and its content for a value."""
    if isinstance(value, bool):
        return BOOLEAN, "boolean_value", value
    if isinstance(value, int):
        return INT64, "long_value", value & (1 << 64) - 1
    if isinstance(value, float):
        return DOUBLE, "double_value", value
    return STRING, "string_value", value


def value_of(metric: Any, datatype: int) -> Value:
    """The value of a metric of a payload."""
    for member in ("double_value", "float_value", "boolean_value", "string_value"):
        if metric.HasField(member):
            found: Value = getattr(metric, member)
            return found
    number: int = metric.long_value if metric.HasField("long_value") else metric.int_value
    bits = {1: 8, 2: 16, 3: 32, INT64: 64}.get(datatype, 0)
    if metric.is_null:
        return None
    return number - (1 << bits) if bits and number >> (bits - 1) else number


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# The edge node


class EdgeNode:
    """The messages of an edge node and its devices, in the order in which they must be sent."""

    def __init__(self, group: str, node: str) -> None:
        self.group = group
        self.node = node
        self._bd_seq = -1
        self._seq = 0
        self._values: dict[str, dict[str, float | int | bool | str]] = {}
        self._aliases: dict[tuple[str, str], int] = {}

    def topic(self, kind: str, *device: str) -> str:
        return "/".join((NAMESPACE, self.group, kind, self.node, *device))

    def connect(self) -> Will:
        """Begin a connection: return its will."""
        self._bd_seq = (self._bd_seq + 1) % 256
        topic, payload = self.death()
        return Will(topic, payload, qos=1, retain=False)

    def death(self) -> Packet:
        return self.topic("NDEATH"), encode([Metric(self._bd_seq, BD_SEQ)])

    def births(self, readings: Readings) -> list[Packet]:
        """The births of the node and of each device, with all values."""
        self._seq = 255
        self._values = {device: dict(values) for device, values in readings.items()}
        own = [Metric(self._bd_seq, BD_SEQ), Metric(False, REBIRTH)]
        found = [(self.topic("NBIRTH"), encode(own, self._next_seq()))]
        for device, values in readings.items():
            metrics = [
                Metric(value, name, self._alias(device, name)) for name, value in values.items()
            ]
            found.append((self.topic("DBIRTH", device), encode(metrics, self._next_seq())))
        return found

    def data(self, readings: Readings) -> list[Packet]:
        """The changes since the last message. Other devices or metrics need births."""
        if _names(readings) != _names(self._values):
            return self.births(readings)
        found: list[Packet] = []
        for device, values in readings.items():
            known = self._values[device]
            changed = {name: value for name, value in values.items() if known[name] != value}
            known.update(changed)
            metrics = [
                Metric(value, "", self._alias(device, name)) for name, value in changed.items()
            ]
            if metrics:
                found.append((self.topic("DDATA", device), encode(metrics, self._next_seq())))
        return found

    def is_rebirth(self, message: Message) -> bool:
        """Whether a command requests births."""
        try:
            payload = Payload.FromString(message.payload)
        except DecodeError:
            return False
        return any(each.name == REBIRTH and each.boolean_value for each in payload.metrics)

    def _next_seq(self) -> int:
        self._seq = (self._seq + 1) % 256
        return self._seq

    def _alias(self, device: str, name: str) -> int:
        return self._aliases.setdefault((device, name), len(self._aliases))


def _names(readings: Readings) -> set[tuple[str, str]]:
    return {(device, name) for device, values in readings.items() for name in values}


async def run_edge(
    server: str, edge: EdgeNode, read: Callable[[], Readings], every_s: float = 1.0
) -> None:
    """Publish what `read` returns, and stay connected, until the task is cancelled."""

    async def session(client: Client) -> None:
        await client.subscribe((edge.topic("NCMD"), 1))
        births_wanted = asyncio.Event()
        births_wanted.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_commands(client, edge, births_wanted))
            try:
                while True:
                    readings = read()
                    packets = edge.births if births_wanted.is_set() else edge.data
                    births_wanted.clear()
                    for topic, payload in packets(readings):
                        await client.publish(topic, payload)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(births_wanted.wait(), every_s)
            finally:
                # A connection that ends in order has no will. A broken one has.
                with contextlib.suppress(ClientError):
                    await client.publish(*edge.death(), qos=1)

    await _stay_connected(server, lambda: Options(will=edge.connect()), session)


async def _commands(client: Client, edge: EdgeNode, births_wanted: asyncio.Event) -> None:
    async for message in client.messages():
        if edge.is_rebirth(message):
            births_wanted.set()


# The host application


@dataclass
class KnownNode:
    """The state of one edge node, as a host application knows it."""

    bd_seq: int | None = None
    seq: int = 0
    is_online: bool = False
    names: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    """Device, name and datatype by alias."""
    values: dict[tuple[str, str], Value] = field(default_factory=dict)
    """By device ("" for the node itself) and name."""
    requested_at: float = float("-inf")


class HostApplication:
    """The state of all edge nodes, as their messages tell it."""

    def __init__(self) -> None:
        self.nodes: dict[str, KnownNode] = {}

    def take(self, topic: str, payload: bytes, now: float) -> Packet | None:
        """Take a message of an edge node. Return the request for a birth if one is needed."""
        _, group, kind, name, *device = topic.split("/")
        node = self.nodes.setdefault(f"{group}/{name}", KnownNode())
        try:
            if self._read(node, kind, "/".join(device), Payload.FromString(payload)):
                return None
        except DecodeError:
            print(f"{topic}: no Sparkplug B payload", file=sys.stderr)
            return None
        if now - node.requested_at < REBIRTH_S:
            return None
        node.requested_at = now
        return f"{NAMESPACE}/{group}/NCMD/{name}", encode([Metric(True, REBIRTH)])

    def _read(self, node: KnownNode, kind: str, device: str, payload: Any) -> bool:
        """Whether the state is complete after the message."""
        if kind == "NDEATH":
            if any(m.name == BD_SEQ and m.long_value == node.bd_seq for m in payload.metrics):
                node.is_online = False
            return True
        if kind == "NBIRTH":
            node.names.clear()
            node.values.clear()
            node.is_online = True
        elif not node.is_online or payload.seq != (node.seq + 1) % 256:
            node.is_online = False
            return False
        node.seq = payload.seq
        if kind == "DDEATH":
            node.values = {key: value for key, value in node.values.items() if key[0] != device}
        for metric in payload.metrics:
            if metric.name == BD_SEQ:
                node.bd_seq = metric.long_value
            elif metric.name and metric.HasField("alias"):
                node.names[metric.alias] = device, metric.name, metric.datatype
            known = node.names.get(metric.alias) if metric.HasField("alias") else None
            owner, name, datatype = known or (device, metric.name, metric.datatype)
            if not name:
                node.is_online = False
                return False
            node.values[owner, name] = value_of(metric, datatype)
        return True


async def run_host(
    server: str, name: str, host: HostApplication, seen: Callable[[str], None] = lambda topic: None
) -> None:
    """Read all edge nodes until the task is cancelled. `seen` is called after each message."""
    own = f"{NAMESPACE}/STATE/{name}"
    began_ms = 0

    def state(is_online: bool) -> bytes:
        return json.dumps({"online": is_online, "timestamp": began_ms}).encode()

    def options() -> Options:
        nonlocal began_ms
        began_ms = _now_ms()
        return Options(will=Will(own, state(False), qos=1, retain=True))

    async def session(client: Client) -> None:
        await client.subscribe((f"{NAMESPACE}/#", 1))
        await client.publish(own, state(True), qos=1, retain=True)
        try:
            async for message in client.messages():
                levels = message.topic.split("/")
                if message.topic == own and message.payload != state(True):
                    await client.publish(own, state(True), qos=1, retain=True)
                elif len(levels) in (4, 5) and not levels[2].endswith("CMD"):
                    command = host.take(message.topic, message.payload, time.monotonic())
                    if command is not None:
                        await client.publish(*command)
                seen(message.topic)
        finally:
            with contextlib.suppress(ClientError):
                await client.publish(own, state(False), qos=1, retain=True)

    await _stay_connected(server, options, session)


# Both


async def _stay_connected(
    server: str, options: Callable[[], Options], session: Callable[[Client], Awaitable[None]]
) -> None:
    """Run one session after another. Each has its own will, so the client does not reconnect."""
    while True:
        try:
            async with Client(servers=[server], options=options()) as client:
                await session(client)
        except* (ConnectionLost, NotConnected, TimedOut) as lost:
            print(f"{lost.exceptions[0]}; trying again", file=sys.stderr)
        await asyncio.sleep(RETRY_S)


def main() -> int:
    parser = argparse.ArgumentParser(description="A Sparkplug B plant.")
    roles = parser.add_subparsers(dest="role", required=True)
    for role, names in {"edge": ("group", "node"), "host": ("name",)}.items():
        command = roles.add_parser(role)
        command.add_argument("server", help="the broker: 127.0.0.1 or mqtts://host:8883")
        for name in names:
            command.add_argument(name)
    given = parser.parse_args()
    try:
        if given.role == "edge":
            asyncio.run(run_edge(given.server, EdgeNode(given.group, given.node), measure))
        else:
            host = HostApplication()
            asyncio.run(run_host(given.server, given.name, host, lambda topic: show(host, topic)))
    except KeyboardInterrupt:
        return 130
    except (ClientError, ValueError) as error:
        print(f"sparkplug: {error}", file=sys.stderr)
    return 1


def measure() -> Readings:
    """The values of two machines that the example invents."""
    return {
        "press": {"force": round(random.uniform(80, 90), 1), "parts": int(time.time()) % 1000},
        "oven": {"temperature": round(random.uniform(180, 182)), "door open": False},
    }


def show(host: HostApplication, topic: str) -> None:
    for name, node in host.nodes.items():
        values = ", ".join(f"{'/'.join(key)}={value}" for key, value in node.values.items())
        print(f"{topic}: {name} {'online' if node.is_online else 'offline'}: {values}")


if __name__ == "__main__":
    sys.exit(main())
