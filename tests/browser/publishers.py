"""Publishers that go on through a failover, for pages that show one."""

import threading
from collections.abc import Iterable
from types import TracebackType

from holdfast.client import ClientError, Options, Reconnect
from holdfast.client.blocking import Client

INTERVAL_S = 0.05


class Publishers:
    """`with Publishers(addresses):` publishes at QoS 1 to some topics at some nodes, one after the
    other."""

    def __init__(self, addresses: Iterable[str], topics: int = 12) -> None:
        self._addresses = list(addresses)
        self._topics = topics
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(at,), daemon=True)
            for at in range(len(self._addresses))
        ]

    def __enter__(self) -> "Publishers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(30.0)

    def _run(self, at: int) -> None:
        client = Client(
            servers=self._addresses[at:] + self._addresses[:at],
            options=Options(client_id=f"meter-{at}", clean_start=False, session_expiry_s=60),
            reconnect=Reconnect(),
        )
        client.connect()
        number = 0
        while not self._stopping.wait(INTERVAL_S):
            number += 1
            topic = f"plant/{at}/sensor-{number % self._topics}"
            try:
                client.publish(topic, b'{"value": %d}' % number, qos=1)
            except ClientError:
                # Of a node that is killed: the next publish goes to another one.
                continue
        client.close()
