"""A good client of the process that is fuzzed: it publishes to itself, again and again."""

import threading
import time
from typing import Final

from tests.e2e import wire

CANARY_S: Final = 10.0
"""A message that takes longer to come back is a failure. Generous: the machine is shared."""
PAUSE_S: Final = 0.01
TOPIC: Final = "canary/x"


class Canary:
    """`with Canary(port) as canary:`; afterwards `delays_s` and `failure`."""

    def __init__(self, port: int) -> None:
        self.delays_s: list[float] = []
        self.failure = ""
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary")

    def __enter__(self) -> "Canary":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def worst_s(self) -> float:
        return max(self.delays_s, default=0.0)

    def median_s(self) -> float:
        return sorted(self.delays_s)[len(self.delays_s) // 2] if self.delays_s else 0.0

    def _run(self) -> None:
        try:
            with wire.Wire(self._port, timeout_s=CANARY_S) as client:
                client.connect("the-canary-of-the-fuzzers")
                client.subscribe((TOPIC, 1))
                number = 0
                while not self._stop.wait(PAUSE_S):
                    number += 1
                    payload = b"%d" % number
                    began = time.monotonic()
                    reason = client.publish(TOPIC, payload, qos=1)
                    message = client.message()
                    self.delays_s.append(time.monotonic() - began)
                    if reason or message.payload != payload:
                        got = message.payload[:40]
                        self.failure = f"message {number}: reason {reason}, {got!r} came back"
                        return
        except (OSError, wire.Closed) as error:
            self.failure = f"after {len(self.delays_s)} messages: {error!r}"
