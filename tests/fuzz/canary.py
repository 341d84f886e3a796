"""A good client of the process that is fuzzed: it publishes to itself, again and again."""

import threading
import time
from pathlib import Path
from typing import Final

from tests.e2e import wire

CANARY_S: Final = 10.0
"""A message that takes longer to come back is a failure. Generous: the machine is shared."""
PAUSE_S: Final = 0.01
TOPIC: Final = "canary/x"


class Canary:
    """`with Canary(port, pid) as canary:`; afterwards `delays_s` and `failure`.

    On a machine that others load, a long delay is mostly a process that waits for a processor.
    `own_s` has the delays without that.
    """

    def __init__(self, port: int, pid: int) -> None:
        self.delays_s: list[float] = []
        self.own_s: list[float] = []
        """The delays without the time that the node's event loop waited for a processor."""
        self._schedule = Path(f"/proc/{pid}/task/{pid}/schedstat")
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

    def worst_own_s(self) -> float:
        return max(self.own_s, default=0.0)

    def _waited_s(self) -> float:
        """How long the main thread of the process has waited for a processor since its start."""
        try:
            return int(self._schedule.read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            # Not on Linux, or without CONFIG_SCHED_INFO: nothing is known.
            return 0.0

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
                    waited_s = self._waited_s()
                    began = time.monotonic()
                    reason = client.publish(TOPIC, payload, qos=1)
                    message = client.message()
                    self.delays_s.append(time.monotonic() - began)
                    self.own_s.append(self.delays_s[-1] - (self._waited_s() - waited_s))
                    if reason or message.payload != payload:
                        got = message.payload[:40]
                        self.failure = f"message {number}: reason {reason}, {got!r} came back"
                        return
        except (OSError, wire.Closed) as error:
            self.failure = f"after {len(self.delays_s)} messages: {error!r}"
