"""Runs the published federation in the cloud: nine members on four continents, one topology
manager.

Each member has a host with a network of its own, and packets between two hosts take as long as
between their continents. Member 8 has two neighbours, 0 and 7, both of which fail at once. With
`CloudTarget` the members repair their links on their own until the manager has decided, which is
the default. With `ManagedCloudTarget` the manager alone does, as in the study.
"""

import json
import secrets
import shutil
import signal
import time
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Final

from holdfast_lab.targets.federation import (
    FederatedTarget,
    end,
    federation_status,
    start_in_turn,
    write_settings,
)
from holdfast_lab.targets.graph import Layout
from holdfast_lab.targets.holdfast import HoldfastNode
from holdfast_lab.targets.target import (
    PROGRAM,
    Fault,
    Program,
    TargetError,
    first_line,
    free_port,
    wait_until,
)
from holdfast_lab.targets.wide_network import WideHost, WideNetwork, missing

DYING: Final = (0, 7)
LONELY: Final = 8
MANAGER: Final = "manager"
CLIENTS: Final = "clients"
"""The host of the clients. Each one is beside its broker, so its packets are not delayed."""
CONTINENTS: Final = (
    "America", "Europe", "Africa", "Asia", "America", "Europe", "Africa", "Asia", "Europe",
)  # fmt: skip
"""The continent of each member. The study has the same four, without a list."""
MANAGER_CONTINENT: Final = "America"
WITHIN_S: Final = 0.001
DELAYS_S: Final = {
    frozenset({"America", "Europe"}): 0.040,
    frozenset({"America", "Africa"}): 0.110,
    frozenset({"America", "Asia"}): 0.095,
    frozenset({"Europe", "Africa"}): 0.075,
    frozenset({"Europe", "Asia"}): 0.060,
    frozenset({"Africa", "Asia"}): 0.120,
}
"""One way, chosen in the order of magnitude of public clouds; the study does not give its own."""
REQUEST_S: Final = 10.0
PORT: Final = 1883
FEDERATION_PORT: Final = 7883


def delay_s(one: str, other: str) -> float:
    """Returns the time from one host to another, one way, in seconds."""
    if CLIENTS in (one, other):
        return 0.0
    here, there = _continent(one), _continent(other)
    return WITHIN_S if here == there else DELAYS_S[frozenset({here, there})]


def _continent(host: str) -> str:
    return MANAGER_CONTINENT if host == MANAGER else CONTINENTS[int(host)]


class CloudNode(HoldfastNode):
    """A member on a host of its own. Its admin port is on the host's loopback."""

    def __init__(self, name: str, directory: Path, host: WideHost, file: Path) -> None:
        super().__init__(name, directory, directory / name, "-c", str(file))
        self.host = host
        self.port = PORT
        at = self.command.index("--bind")
        self.command[at : at + 4] = ["--bind", host.address, "-p", str(PORT)]
        self.command = host.command(self.command)

    @property
    def server(self) -> str:
        """The address for clients."""
        return f"{self.host.address}:{PORT}"

    def is_listening(self) -> bool:
        """Whether it is ready."""
        return bool(self.status())

    def status(self, topic: str = "") -> Any:
        """Returns the status of its membership; empty if it does not reply."""
        with self.host.entered():
            return federation_status(self.admin_port, topic)


class ManagerProgram(Program):
    """`holdfast federation manager serve` on a host of its own."""

    def __init__(self, directory: Path, host: WideHost) -> None:
        self.host = host
        port = free_port()
        self.url = f"http://{host.address}:{port}"
        environment = {
            "HOLDFAST_TOPOLOGY__DB_URL": f"sqlite:///{directory}/topology.db",
            "HOLDFAST_TOPOLOGY__BIND": host.address,
            "HOLDFAST_TOPOLOGY__ALLOW_ANONYMOUS": "true",
            # The intervals of the study.
            "HOLDFAST_TOPOLOGY__PROBE_INTERVAL_S": "5",
            "HOLDFAST_TOPOLOGY__PROBE_TIMEOUT_S": "3",
        }
        command = ["env", *(f"{name}={value}" for name, value in environment.items())]
        command += [*PROGRAM, "federation", "manager", "serve", "--port", str(port)]
        super().__init__(MANAGER, host.command(command), directory, port)

    def is_listening(self) -> bool:
        """Whether it is ready."""
        try:
            with self.host.entered(), urllib.request.urlopen(f"{self.url}/healthz", timeout=1.0):
                return True
        except OSError:
            return False

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Returns the data of a reply. Raises `TargetError`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/v1{path}", data, method=method)
        try:
            with (
                self.host.entered(),
                urllib.request.urlopen(request, timeout=REQUEST_S) as reply,
            ):
                return json.load(reply)["data"]
        except (OSError, ValueError, KeyError) as error:
            raise TargetError(f"the manager does not reply to {path}: {error}") from error


class CloudTarget(FederatedTarget):
    """Nine Holdfast brokers on four continents; members and manager repair the links."""

    name = "cloud"
    title = "Holdfast, nine in the cloud"
    # The manager links them. This layout has only their number and the clients.
    layout = Layout(tuple((each, each + 1) for each in range(8)), 3, (5, LONELY))
    survives_faults = True
    faults = (Fault.MANAGER, Fault.KILL, Fault.CUT)
    degree: ClassVar[int] = 2

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        if reason := missing():
            raise TargetError(f"{self.name} needs hosts with networks of their own: {reason}")
        self.members: list[CloudNode] = []
        self.ids: list[int] = []
        """The manager's id of each member."""
        self._last: Fault | None = None
        self.network = WideNetwork(
            [*map(str, range(self.layout.members)), MANAGER, CLIENTS], delay_s
        )
        self.manager = ManagerProgram(directory, self.network.hosts[MANAGER])

    def entered(self) -> AbstractContextManager[None]:
        """The network of the clients."""
        return self.network.hosts[CLIENTS].entered()

    def start(self) -> None:
        """Starts the manager and all members, with 8 linked to 0 and 7. Raises `TargetError`."""
        secret = self.directory / "secret"
        secret.write_text(f"{secrets.token_hex(32)}\n")
        secret.chmod(0o600)
        for number in range(self.layout.members):
            host = self.network.hosts[str(number)]
            file = self.directory / f"{number}.toml"
            table: dict[str, str | int | list[str]] = {
                "listen": f"{host.address}:{FEDERATION_PORT}", "secret_file": str(secret),
                "manager": self.manager.url, "broker": f"tcp://{host.address}:{PORT}",
                "degree": self.degree,
            }  # fmt: skip
            write_settings(file, table)
            with file.open("a") as more:
                more.write("[security]\nallow_anonymous = true\n")
            self.members.append(CloudNode(f"member-{number}", self.directory, host, file))
        start_in_turn([self.manager])
        start_in_turn(self.members)
        self._complete()

    def stop(self) -> None:
        """Stops all processes, their network, and removes their files."""
        end([*self.members, self.manager])
        self.network.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def version(self) -> str:
        """Returns the program and its version."""
        return first_line([*PROGRAM, "--version"])

    def pids(self) -> list[int]:
        """Returns the processes that are measured."""
        return [each.pid for each in [*self.members, self.manager] if each.is_running()]

    def server(self, member: int) -> str:
        """Returns the address of a member's broker for clients."""
        return self.members[member].server

    def status(self, member: int, topic: str = "") -> Any:
        """Returns the status of a member; empty if it does not reply."""
        return self.members[member].status(topic)

    def links(self) -> list[tuple[int, int]]:
        """Returns the links that the manager has decided, by the numbers of the members."""
        number_of = {id: number for number, id in enumerate(self.ids)}
        found = self.manager.request("GET", "/topology")["links"]
        return sorted(
            (number_of[link["a"]], number_of[link["b"]])
            for link in found
            if {link["a"], link["b"]} <= number_of.keys()
        )

    def inject(self, fault: Fault, topic: str) -> str:
        """Fails the manager, or members 0 and 7 at once. Returns who failed."""
        self._last = fault
        if fault is Fault.MANAGER:
            self.manager.signal(signal.SIGKILL)
            return MANAGER
        if fault is Fault.CUT:
            self.network.isolate([str(number) for number in DYING])
        else:
            for number in DYING:
                self.members[number].signal(signal.SIGKILL)
        return "members 0 and 7"

    def await_relinked(self, timeout_s: float) -> list[int]:
        """Waits until the manager has given member 8 living neighbours and it is linked to them.

        Returns these. Raises `TargetError` when that takes too long.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            near = {number for link in self.links() if LONELY in link for number in link}
            near.discard(LONELY)
            if len(near) >= 2 and not near & set(DYING) and near <= self._linked():
                return sorted(near)
            time.sleep(0.05)
        raise TargetError(f"member 8 was not linked to living members within {timeout_s:g} s")

    def heal(self) -> None:
        """Starts again what failed, and links 8 to 0 and 7 again."""
        self.network.heal()
        failed: list[Program] = []
        if self._last is Fault.MANAGER:
            failed = [self.manager]
        elif self._last is Fault.KILL:
            failed = [self.members[number] for number in DYING]
        for each in failed:
            each.wait(10.0)
        start_in_turn(failed)
        if self._last is not Fault.MANAGER:
            self._complete()

    def _kill(self, member: int) -> None:
        self.members[member].signal(signal.SIGKILL)

    def _revive(self, member: int) -> None:
        self.members[member].start()

    def _complete(self) -> None:
        """Waits until all members have joined, and links 8 to 0 and 7 and to no other."""
        wait_until(self._is_joined, self.members, "all members have joined")
        self.ids = [
            int(self.status(number)["manager"]["id"]) for number in range(len(self.members))
        ]
        others = [number for number in range(self.layout.members) if number != LONELY]
        self._rule({each: "pin" if each in DYING else "forbid" for each in others})
        wait_until(lambda: self._linked() == set(DYING), self.members, "8 is linked to 0 and 7")
        self._rule(dict.fromkeys(others, "none"))

    def _is_joined(self) -> bool:
        found = [self.status(number) for number in range(self.layout.members)]
        return all(
            each.get("members") == len(found) and (each["manager"] or {}).get("connected")
            for each in found
        )

    def _rule(self, rules: dict[int, str]) -> None:
        lonely = self.ids[LONELY]
        links = [{"a": self.ids[each], "b": lonely, "rule": rule} for each, rule in rules.items()]
        self.manager.request("PUT", "/links", {"links": links})

    def _linked(self) -> set[int]:
        """Returns the members to which 8 has a usable link."""
        numbers = {self.status(number).get("id"): number for number in range(len(self.members))}
        links = self.status(LONELY).get("links", [])
        return {numbers[link["id"]] for link in links if link["usable"] and link["id"] in numbers}


class ManagedCloudTarget(CloudTarget):
    """The same, where the manager alone repairs the links."""

    name = "cloud-manager"
    title = "Holdfast, nine in the cloud, the manager alone"
    degree = 0
