"""A broker with several listeners of its own rules, and Mosquitto's clients at each."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.brokers import Holdfast, broker_toml

PUB = shutil.which("mosquitto_pub")
RUN_S = 20
REFUSED = 5
"""What mosquitto_pub with MQTT 3 exits with when CONNACK says "not authorized"."""


class ListenersBroker(Holdfast):
    """`listeners`: tables of settings. The first one is that of `port`, for the test's own wait."""

    def __init__(
        self, directory: Path, listeners: list[dict[str, Any]], settings: Any = None
    ) -> None:
        directory.mkdir(exist_ok=True)
        super().__init__(directory, settings)
        self.listeners = listeners

    def command(self) -> list[str]:
        command = super().command()
        self.write()
        return command[: command.index("--bind")]

    def write(self) -> None:
        """Write the configuration: before the start, or for a reload."""
        tables = {
            **self.settings,
            "node": {"data": str(self.data), **self.settings.get("node", {})},
            "admin": {"port": self.admin_port},
        }
        text = broker_toml(tables)
        for table in [{"port": self.port}, *self.listeners]:
            text += "[[listeners]]\n"
            text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        (self.directory / "holdfast.toml").write_text(text)


def mosquitto_pub(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Publish "x" to the topic "t" at QoS 1, with these options."""
    command = [str(PUB), "-t", "t", "-m", "x", "-q", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
