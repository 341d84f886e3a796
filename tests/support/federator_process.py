"""A federator as a process, with a scripted broker.

    python -m tests.support.federator_process DIRECTORY < commands > events

DIRECTORY has `settings.json`, and gets `delivered`, a line `ORIGIN EPOCH PLACE PAYLOAD` for each
message before it is confirmed. Commands and events are JSON, one a line:

    {"publish": PAYLOAD, "topic": TOPIC, "qos": QOS}   {"done": PAYLOAD}
    {"interest": FILTERS}                              {"wanted": FILTERS}, whenever it changes
    {"hold": true | false}     whether the broker confirms what it is given
    {"status": true}                                   {"status": STATUS}

The first event is {"ready": ID}, and {"failed": TEXT} is the last one.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.sidecar.federator import Federator, FederatorError
from tests.support.federation_settings import member_settings
from tests.support.ports import free_port
from tests.support.scripted_edge import ScriptedEdge

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


def say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class FileEdge(ScriptedEdge):
    def __init__(self, path: Path, filters: list[str]) -> None:
        super().__init__(filters)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def set_wanted_filters(self, filters: frozenset[str]) -> None:
        super().set_wanted_filters(filters)
        say(wanted=sorted(filters))

    def deliver(self, delivery: DeliverLocally, done: Callable[[], None]) -> None:
        if not self.holds:
            id, message = delivery.id, delivery.message
            line = f"{id.node.hex()} {id.epoch} {delivery.place} {message.payload.decode()}\n"
            os.write(self._file, line.encode())
        super().deliver(delivery, done)
        self.delivered.clear()


async def main() -> None:
    directory = Path(sys.argv[1])
    table = json.loads((directory / "settings.json").read_text())
    edge = FileEdge(directory / "delivered", table.pop("filters"))
    config = FederationConfig(dial_every_s=0.1, dial_every_max_s=0.2, degree_min=table["degree"])
    federator = Federator(member_settings(table), edge, config)
    await federator.start()
    say(ready=federator.node.hex())
    loop = asyncio.get_running_loop()
    threading.Thread(target=read_commands, args=(loop, federator, edge), daemon=True).start()
    error = await federator.failed()
    say(failed=str(error))
    await federator.stop()


def read_commands(
    loop: asyncio.AbstractEventLoop, federator: Federator, edge: ScriptedEdge
) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(carry_out, json.loads(line), federator, edge)


def carry_out(command: dict[str, Any], federator: Federator, edge: ScriptedEdge) -> None:
    if "publish" in command:
        payload = command["publish"]
        message = Message(command["topic"], payload.encode(), command["qos"])
        edge.host.publish(message, lambda: say(done=payload))
    elif "interest" in command:
        edge.host.change_interest(command["interest"], ())
    elif "hold" in command:
        edge.holds = command["hold"]
    else:
        say(status=federator.status())


class FederatorProcess:
    """Started, killed and started again."""

    def __init__(self, directory: Path, name: str, filters: list[str], **settings: Any) -> None:
        self.directory = directory / name
        self.directory.mkdir()
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.settings: dict[str, Any] = {
            "data": str(self.directory / "data"),
            "listen": self.address,
            "filters": filters,
            "degree": 2,
            **settings,
        }
        self.process: subprocess.Popen[str] | None = None
        self.events: list[dict[str, Any]] = []
        self.id = ""
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Returns when it is ready."""
        assert self.process is None
        (self.directory / "settings.json").write_text(json.dumps(self.settings))
        environment = dict(os.environ, PYTHONPATH=f"{ROOT / 'src'}:{ROOT}", PYTHONUNBUFFERED="1")
        self.events = []
        with (self.directory / "log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.federator_process", self.directory],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=environment, cwd=ROOT, text=True,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(self.process, self.events))
        self._reader.start()
        self.until(lambda: self.of("ready"), "ready")
        [self.id] = self.of("ready")

    def _read(self, process: "subprocess.Popen[str]", events: list[dict[str, Any]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            # The last one may be torn.
            if line.endswith("\n"):
                events.append(json.loads(line))

    def kill(self) -> None:
        """SIGKILL; what it said until then is in `events`."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        assert self._reader is not None
        self._reader.join()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def say(self, **command: object) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def publish(self, payload: str, topic: str = "a/1", qos: int = 1) -> None:
        self.say(publish=payload, topic=topic, qos=qos)

    def of(self, name: str) -> list[Any]:
        return [event[name] for event in list(self.events) if name in event]

    def status(self) -> dict[str, Any]:
        count = len(self.of("status"))
        self.say(status=True)
        self.until(lambda: len(self.of("status")) > count, "status")
        found: dict[str, Any] = self.of("status")[-1]
        return found

    def wants(self, *filters: str) -> None:
        """Wait until others are known to want these here."""
        self.until(lambda: self.of("wanted")[-1:] == [sorted(filters)], f"{filters} wanted")

    def delivered(self) -> list[tuple[str, int, int, str]]:
        """Origin, epoch, place and payload."""
        path = self.directory / "delivered"
        written = path.read_text() if path.exists() else ""
        # The last line may still be written.
        fields = [line.split(" ", 3) for line in written[: written.rfind("\n") + 1].splitlines()]
        return [(node, int(epoch), int(place), text) for node, epoch, place, text in fields]

    def payloads(self) -> list[str]:
        return [payload for _, _, _, payload in self.delivered()]

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline or (self.process and self.process.poll() is not None):
                raise AssertionError(f"in vain: {what}\n{self.log()[-4000:]}")
            time.sleep(0.01)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        uvloop.run(main())
    except FederatorError as error:
        say(failed=str(error))
        sys.exit(1)
