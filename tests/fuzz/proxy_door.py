"""A listener behind a proxy: damaged headers of the PROXY protocol in front of MQTT."""

import random
from pathlib import Path
from typing import Final

from tests.e2e.listeners_broker import ListenersBroker
from tests.fuzz.doors import exchange
from tests.fuzz.mqtt_doors import SETTINGS, MqttDoor, stream
from tests.fuzz.mutation import damage, noise
from tests.support.ports import free_port
from tests.unit.protocol.test_proxy_header import GOOD

HEADERS: Final = list(GOOD)


class ProxyDoor(MqttDoor):
    name = "proxy"

    def start(self, directory: Path) -> None:
        self.port = free_port()
        table = {"port": self.port, "proxies": ["127.0.0.1"]}
        broker = ListenersBroker(directory, [table], SETTINGS)
        self.processes = [broker]
        broker.start()
        self.canary_port = broker.port
        self._broker = broker

    def case(self, rng: random.Random) -> str:
        header = rng.choice(HEADERS)
        kind = rng.random()
        if kind < 0.4:
            header = damage(rng, header, HEADERS)
        elif kind < 0.5:
            header = noise(rng)
        cut = rng.randrange(len(header) + 1)
        pieces = [header[:cut], header[cut:], *stream(rng)]
        return "answered" if exchange(self.port, pieces) else "closed"

    def end(self) -> None:
        self._broker.kill()
