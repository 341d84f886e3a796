"""Hooks of a plant: machines sign in by serial number, and a list of who is on line is kept.

`pip install examples/hooks`, then in the broker's configuration: [hooks] enabled = ["plant"]
"""

import json
import os
from pathlib import Path

from holdfast.hooks import (
    Answer,
    ClientIdentity,
    Grants,
    HookClient,
    HookMessage,
    Hooks,
    LoginRefusal,
    LoginRequest,
)

NOT_AUTHORIZED = 0x87


class PlantHooks(Hooks):
    """Machines, whose serial numbers and codes are in a file, may use the topics of their line."""

    publish_filters = ("alarms/#",)

    def __init__(self) -> None:
        self.directory = Path(os.environ["PLANT_HOOKS"])
        self.machines: dict[str, dict[str, str]] = json.loads(
            (self.directory / "machines.json").read_text()
        )

    def authenticate(self, request: LoginRequest) -> Answer:
        if not (request.username or "").startswith("machine-"):
            # Not a machine: the broker goes on to its password file.
            return None
        machine = self.machines.get(request.username or "")
        if machine is None or request.password != machine["code"].encode():
            return LoginRefusal(NOT_AUTHORIZED, "unknown machine, or another code")
        return ClientIdentity(request.username, "plant")

    def authorise(self, client: HookClient) -> Grants | None:
        machine = self.machines.get(client.username or "")
        if machine is None:
            return None
        line = machine["line"]
        return Grants(publish=[f"{line}/%u/#", "alarms/%u"], subscribe=[f"{line}/#"])

    def on_connect(self, client: HookClient) -> None:
        self._write("connected", client.client_id)

    def on_disconnect(self, client: HookClient, reason: str) -> None:
        self._write("disconnected", f"{client.client_id} {reason}")

    def on_publish(self, message: HookMessage) -> None:
        self._write("alarm", f"{message.topic} {message.payload.decode(errors='replace')}")

    def _write(self, event: str, text: str) -> None:
        with (self.directory / "events.txt").open("a") as file:
            file.write(f"{event} {text}\n")
