"""What a client in a process of its own saw: written by it, read into the ledger of the test.

One JSON object a line: `event` (send, ok, refused, connected, subscribe, subscribed, deliver,
accuse), `at_s` (monotonic), `client`, and what belongs to the event: topic, number, qos, dup,
packet id, connection, node. A message that was sent and has no answer is one whose outcome its
client does not know.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.e2e.ledger import Interest, Key, Ledger


class EventWriter:
    """Every event is in the file when the call returns."""

    def __init__(self, path: Path, client: str) -> None:
        self.client = client
        self._file = path.open("w", buffering=1)

    def close(self) -> None:
        self._file.close()

    def write(self, event: str, **details: object) -> None:
        line = {"event": event, "at_s": time.monotonic(), "client": self.client, **details}
        self._file.write(json.dumps(line) + "\n")

    def message(self, event: str, key: Key, **details: object) -> None:
        publisher, topic, number = key
        self.write(event, publisher=publisher, topic=topic, number=number, **details)


def _key(line: dict[str, Any]) -> Key:
    return line["publisher"], line["topic"], line["number"]


def _subscribe(ledger: Ledger, line: dict[str, Any]) -> None:
    interests = [Interest(name, qos) for name, qos in line["filters"]]
    ledger.subscribe(line["client"], interests, line.get("group", ""))


_TELL: Final[dict[str, Callable[[Ledger, dict[str, Any]], None]]] = {
    "send": lambda ledger, line: ledger.send(_key(line), line["qos"], line["at_s"]),
    "ok": lambda ledger, line: ledger.acknowledge(_key(line), line["at_s"]),
    "refused": lambda ledger, line: ledger.refuse(_key(line)),
    "connected": lambda ledger, line: ledger.connected(line["client"], line["at_s"], line["node"]),
    "subscribe": _subscribe,
    "subscribed": lambda ledger, line: ledger.subscribed(line["client"], line["at_s"]),
    "deliver": lambda ledger, line: ledger.deliver(
        line["client"], _key(line), line["at_s"], line["connection"], line["dup"]
    ),
    "accuse": lambda ledger, line: ledger.accuse(line["kind"], line["client"], line["text"]),
}


class EventReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self, ledger: Ledger) -> int:
        """Tells the ledger what is new; returns how many events. The last line may be half
        there yet: then it is for the next call."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._position += end
        lines = data[:end].splitlines()
        for text in lines:
            line = json.loads(text)
            _TELL[line["event"]](ledger, line)
        return len(lines)
