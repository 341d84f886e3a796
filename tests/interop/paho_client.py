"""paho-mqtt with what arrives in a queue, so that a test reads from top to bottom."""

import queue
from types import TracebackType
from typing import Any, Literal

from paho.mqtt import client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

WAIT_S = 10.0
NOTHING_S = 0.3
"""How long a test watches for what must not come (a barrier shows most of it already)."""


def props(kind: int, **values: Any) -> Properties:
    """`kind`: a PacketTypes value; names as paho has them, e.g. SessionExpiryInterval=60."""
    made: Properties = Properties(kind)  # type: ignore[no-untyped-call]
    for name, value in values.items():
        setattr(made, name, value)
    return made


def publish_props(**values: Any) -> Properties:
    return props(PacketTypes.PUBLISH, **values)


class Paho:
    """One paho client with its network thread."""

    def __init__(
        self,
        port: int,
        name: str,
        version: int = mqtt.MQTTv5,
        clean: bool = True,
        expiry_s: int = 0,
        will: tuple[str, bytes, int, bool] | None = None,
        will_props: Properties | None = None,
        connect_props: dict[str, Any] | None = None,
        keep_alive_s: int = 60,
        manual_ack: bool = False,
        window: int = 20,
        transport: Literal["tcp", "websockets"] = "tcp",
    ) -> None:
        self.version = version
        more: dict[str, Any] = {} if version == 5 else {"clean_session": clean}
        self.client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            name,
            protocol=MQTTProtocolVersion(version),
            manual_ack=manual_ack,
            transport=transport,
            **more,
        )
        self.client.max_inflight_messages_set(window)
        self.client.on_connect = self._on_connect
        self.client.on_message = self._on_message
        self.client.on_subscribe = self._on_answer
        self.client.on_unsubscribe = self._on_answer
        self.client.on_publish = self._on_publish
        self.client.on_disconnect = self._on_disconnect
        if will is not None:
            self.client.will_set(*will, properties=will_props)
        # Any: paho's properties have their attributes only where they are set.
        self.messages: queue.Queue[Any] = queue.Queue()
        self.disconnected: queue.Queue[ReasonCode] = queue.Queue()
        self._connected: queue.Queue[tuple[mqtt.ConnectFlags, ReasonCode, Properties | None]] = (
            queue.Queue()
        )
        self._answers: queue.Queue[list[ReasonCode]] = queue.Queue()
        self._published: queue.Queue[ReasonCode] = queue.Queue()
        options: dict[str, Any] = {}
        if version == 5:
            values = dict(connect_props or {})
            if expiry_s:
                values["SessionExpiryInterval"] = expiry_s
            options = {
                "clean_start": clean,
                "properties": props(PacketTypes.CONNECT, **values),
            }
        self.client.connect("127.0.0.1", port, keep_alive_s, **options)
        self.client.loop_start()
        self.properties: Any
        self.flags, self.reason, self.properties = self._connected.get(timeout=WAIT_S)

    def _on_connect(
        self,
        client: mqtt.Client,
        userdata: object,
        flags: mqtt.ConnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        self._connected.put((flags, reason, properties))

    def _on_message(self, client: mqtt.Client, userdata: object, message: mqtt.MQTTMessage) -> None:
        self.messages.put(message)

    def _on_answer(
        self,
        client: mqtt.Client,
        userdata: object,
        packet_id: int,
        reasons: list[ReasonCode],
        properties: Properties | None,
    ) -> None:
        self._answers.put(reasons)

    def _on_publish(
        self,
        client: mqtt.Client,
        userdata: object,
        packet_id: int,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        self._published.put(reason)

    def _on_disconnect(
        self,
        client: mqtt.Client,
        userdata: object,
        flags: mqtt.DisconnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        self.disconnected.put(reason)

    def __enter__(self) -> "Paho":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def publish(
        self,
        topic: str,
        payload: bytes,
        qos: int = 0,
        retain: bool = False,
        properties: Properties | None = None,
    ) -> int:
        """Publish and wait until it is done. Returns the reason code."""
        self.client.publish(topic, payload, qos, retain, properties)
        return self._published.get(timeout=WAIT_S).value

    def subscribe(
        self,
        filter_: str,
        qos: int = 0,
        options: SubscribeOptions | None = None,
        properties: Properties | None = None,
    ) -> int:
        """Returns the reason code of the SUBACK."""
        if options is not None:
            self.client.subscribe(filter_, options=options, properties=properties)
        elif self.version == 5:
            chosen = SubscribeOptions(qos=qos)
            self.client.subscribe(filter_, options=chosen, properties=properties)
        else:
            self.client.subscribe(filter_, qos)
        return self._answers.get(timeout=WAIT_S)[0].value

    def unsubscribe(self, filter_: str) -> None:
        self.client.unsubscribe(filter_)
        self._answers.get(timeout=WAIT_S)

    def message(self, timeout_s: float = WAIT_S) -> Any:
        return self.messages.get(timeout=timeout_s)

    def payloads(self, count: int) -> list[bytes]:
        return [self.message().payload for _ in range(count)]

    def assert_nothing_more(self) -> None:
        try:
            message = self.messages.get(timeout=NOTHING_S)
        except queue.Empty:
            return
        raise AssertionError(f"not expected: {message.topic} {message.payload!r}")

    def close(self, properties: Properties | None = None, reason: ReasonCode | None = None) -> None:
        """DISCONNECT (a second call does nothing) and end of the thread."""
        if self.version == 5:
            self.client.disconnect(reason, properties)
        else:
            self.client.disconnect()
        self.client.loop_stop()

    def vanish(self) -> None:
        """End without DISCONNECT."""
        self.client.loop_stop()
        socket = self.client.socket()
        assert socket is not None
        socket.close()
