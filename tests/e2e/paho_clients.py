"""Publishers and readers of the independent ledger, with paho, one in each process.

Everything happens in one thread. paho then sends nothing new between a connection and what it
repeats on it, so the messages of a publisher have one order.
"""

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MessageState

from tests.e2e.event_log import EventWriter
from tests.e2e.ledger import Key

TURN_S: Final = 0.01
INTERVAL_S: Final = 0.02
CONNECT_S: Final = 1.0
KEEP_ALIVE_S: Final = 2
WINDOW: Final = 16
DRAIN_S: Final = 60.0
PAYLOAD_BYTES: Final = 200


def payload_of(publisher: str, number: int) -> bytes:
    """Each byte depends on the number, so a changed or exchanged one shows."""
    text = f"{publisher} {number} "
    return text.encode() + bytes(
        (number * 31 + at * 7) % 251 for at in range(PAYLOAD_BYTES - len(text))
    )


class _Paho:
    """One client with a durable session and a list of servers. When it loses one, it connects to
    the next."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.events = EventWriter(arguments.events, arguments.client)
        self._servers = [server.rsplit(":", 1) for server in arguments.server]
        self._at = -1
        self.connections = 0
        self.client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=arguments.client,
            clean_session=False,
            protocol=paho.MQTTv311,
        )
        self.client.connect_timeout = CONNECT_S
        self.client.max_inflight_messages_set(WINDOW)
        self.client.on_connect = self._on_connect

    def serve(self) -> None:
        """One turn: what has arrived, or an attempt to connect."""
        if self.client.loop(TURN_S) == paho.MQTT_ERR_SUCCESS:
            return
        self._at = (self._at + 1) % len(self._servers)
        host, port = self._servers[self._at]
        # paho 2.2 forgets a PUBREC when two connections in a row are refused, and then sends the
        # PUBLISH again: it expects the former of these two states at each attempt.
        for message in self.client._out_messages.values():
            if message.state == MessageState.MQTT_MS_RESEND_PUBREL:
                message.state = MessageState.MQTT_MS_WAIT_FOR_PUBCOMP
        try:
            self.client.connect(host, int(port), keepalive=KEEP_ALIVE_S)
        except OSError:
            time.sleep(TURN_S)

    def _on_connect(self, _client: Any, _data: Any, flags: Any, reason: Any, _: Any) -> None:
        if reason.is_failure:
            return
        self.connections += 1
        node = ":".join(self._servers[self._at])
        self.events.write("connected", node=node)
        if self.connections > 1 and not flags.session_present:
            text = f"at connection {self.connections}, to {node}"
            self.events.write("accuse", kind="session lost", text=text)
        self.on_ready()

    def on_ready(self) -> None:
        raise NotImplementedError


class Publisher(_Paho):
    """Counts its messages from 0 on one topic."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        (self._topic,) = arguments.topic
        self._qos = arguments.qos
        self._number = 0
        self._unconfirmed: dict[int, Key] = {}
        self.client.on_publish = self._on_publish

    def on_ready(self) -> None:
        """paho sends what is unconfirmed again when this returns."""
        for packet_id, key in self._unconfirmed.items():
            self.events.message("send", key, qos=self._qos, dup=True, packet_id=packet_id)

    def _on_publish(self, _client: Any, _data: Any, packet_id: int, *_: Any) -> None:
        """PUBACK, or at QoS 2 PUBCOMP."""
        self.events.message("ok", self._unconfirmed.pop(packet_id), packet_id=packet_id)

    def run(self, over: threading.Event) -> None:
        """Raises TimeoutError when something stays unconfirmed at the end."""
        due = 0.0
        while not over.is_set():
            self.serve()
            now = time.monotonic()
            if now < due or len(self._unconfirmed) >= WINDOW or not self.client.is_connected():
                continue
            due = now + INTERVAL_S
            self._publish()
        deadline = time.monotonic() + DRAIN_S
        while self._unconfirmed:
            self.serve()
            if time.monotonic() > deadline:
                raise TimeoutError
        self.client.disconnect()

    def _publish(self) -> None:
        name, number = self.events.client, self._number
        self._number += 1
        key = (name, self._topic, number)
        self.events.message("send", key, qos=self._qos, dup=False)
        info = self.client.publish(self._topic, payload_of(name, number), qos=self._qos)
        self._unconfirmed[info.mid] = key


class Reader(_Paho):
    """Writes down each message that paho hands to the application, of QoS 2 with PUBREL."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self._filters = [(name, arguments.qos) for name in arguments.topic]
        self._is_subscribed = False
        self.events.write("subscribe", filters=self._filters)
        self.client.on_subscribe = self._on_subscribe
        self.client.on_message = self._on_message

    def on_ready(self) -> None:
        if not self._is_subscribed:
            self.client.subscribe(self._filters)

    def _on_subscribe(self, *event: Any) -> None:
        if any(reason.is_failure for reason in event[3]):
            self.events.write("accuse", kind="subscription refused", text=str(event[3]))
        elif not self._is_subscribed:
            self._is_subscribed = True
            self.events.write("subscribed")

    def _on_message(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        publisher, number, _ = message.payload.split(b" ", 2)
        key = (publisher.decode(), message.topic, int(number))
        is_changed = message.payload != payload_of(key[0], key[2])
        details = {"dup": message.dup, "is_changed": is_changed}
        self.events.message("deliver", key, connection=self.connections, **details)
        if is_changed:
            self.events.write("accuse", kind="changed", text=f"{key}: {message.payload!r}")

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            self.serve()
        self.client.disconnect()


def publish(arguments: argparse.Namespace, over: threading.Event) -> None:
    Publisher(arguments).run(over)


def read(arguments: argparse.Namespace, over: threading.Event) -> None:
    Reader(arguments).run(over)


ROLES: Final[dict[str, Callable[[argparse.Namespace, threading.Event], None]]] = {
    "paho-publish": publish,
    "paho-read": read,
}
