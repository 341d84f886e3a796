"""The publisher of the failover benchmarks that uses paho."""

import argparse
import threading
import time
from typing import Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from bench.failover_sending import TOPIC, Pace, payload_of
from bench.trace import Event, TraceWriter

KEEP_ALIVE_S: Final = 1
PACKET_IDS: Final = 65535
POLL_S: Final = 0.02


class PahoPublisher:
    """paho has one server: the application gives it the next one whenever it has lost one."""

    def __init__(self, arguments: argparse.Namespace, trace: TraceWriter) -> None:
        self._servers = [_host_and_port(server) for server in arguments.server]
        self._at = 0
        self._trace = trace
        self._sequences: dict[int, int] = {}
        self.window = threading.Semaphore(arguments.window)
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=arguments.client_id,
            clean_session=False,
            protocol=paho.MQTTv311,
        )
        client.max_inflight_messages_set(arguments.window)
        # The annotation says int; a float works, and one second is what it would be otherwise.
        client.reconnect_delay_set(arguments.paho_delay_s, arguments.paho_delay_s)
        client.on_publish = self._on_publish
        client.on_disconnect = lambda *_: self._walk()
        client.on_connect_fail = lambda *_: self._walk()
        self._client = client

    def start(self) -> None:
        self._client.connect_async(*self._servers[0], keepalive=KEEP_ALIVE_S)
        self._client.loop_start()

    def _walk(self) -> None:
        self._at = (self._at + 1) % len(self._servers)
        self._client.connect_async(*self._servers[self._at], keepalive=KEEP_ALIVE_S)

    def _on_publish(self, *event: object) -> None:
        self._trace.write(Event.CONFIRMED, self._sequences.pop(int(str(event[2]))))
        self.window.release()

    def publish(self, sequence: int) -> None:
        # The acknowledgement may be faster than `publish` returns the packet id, and it arrives
        # with locks held that `publish` takes: the packet id must be known before.
        packet_id = (sequence - 1) % PACKET_IDS + 1
        self._sequences[packet_id] = sequence
        self._trace.write(Event.SENT, sequence)
        info = self._client.publish(TOPIC, payload_of(sequence), qos=1)
        if info.mid != packet_id:
            raise ValueError(f"paho gave message {sequence} the packet id {info.mid}")

    def unconfirmed(self) -> int:
        return len(self._sequences)

    def stop(self) -> None:
        self._client.on_disconnect = None
        self._client.disconnect()
        self._client.loop_stop()


def publish_with_paho(arguments: argparse.Namespace, pace: Pace, trace: TraceWriter) -> None:
    publisher = PahoPublisher(arguments, trace)
    publisher.start()
    while not pace.is_over():
        time.sleep(max(0.0, pace.wait_s()))
        if publisher.window.acquire(timeout=POLL_S):
            publisher.publish(pace.next())
    deadline_s = time.monotonic() + arguments.drain_s
    while publisher.unconfirmed() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    publisher.stop()


def _host_and_port(server: str) -> tuple[str, int]:
    host, _, port = server.rpartition(":")
    return host, int(port)
