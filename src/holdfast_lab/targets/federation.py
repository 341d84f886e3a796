"""Federations as targets: the published LAN of twelve members, in three forms.

`FederationTarget` has the federation in its brokers. `SidecarsTarget` has Mosquittos with a
federator beside each. `BridgesTarget` has Mosquittos in a tree of bridges, which is what an
operator without a federation would configure. The publisher and the subscribers are clients of
different members.
"""

import json
import shutil
import signal
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from holdfast_lab.targets.graph import LAN, Layout, path
from holdfast_lab.targets.holdfast import HoldfastNode
from holdfast_lab.targets.mosquitto import Mosquitto
from holdfast_lab.targets.target import (
    PROGRAM,
    Fault,
    Program,
    Target,
    admin,
    first_line,
    free_port,
    wait_until,
)

TOPIC: Final = "federated/lab"
"""The topic of all experiments with federations. A federator beside a broker is told what its
clients subscribe to, so the topic is fixed."""
START_TOGETHER: Final = 4
"""The number of members that start at a time; each takes a second or two of a core."""
MOSQUITTO_INFLIGHT: Final = 1000


def id_of(member: int) -> str:
    """Returns the id of a member. The ids have the order of the numbers, so that of two ways of
    equal length the members take the one that the layout's tree has."""
    return f"{member + 1:032x}"


def write_settings(file: Path, table: Mapping[str, str | int | list[str]]) -> None:
    """Writes a configuration file with a table [federation]. The scalars and lists of JSON are
    those of TOML."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    file.write_text("\n".join(["[federation]", *lines, ""]))


class FederatedTarget(Target):
    """Members of a federation, numbered from 0, with one broker each."""

    layout: ClassVar[Layout] = LAN
    topic = TOPIC
    faults: tuple[Fault, ...] = (Fault.KILL,)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._hurt = -1

    @property
    def servers(self) -> list[str]:
        """Returns the address of the publisher's member."""
        return [self.server(self.layout.publisher)]

    @abstractmethod
    def server(self, member: int) -> str:
        """Returns the address of a member's broker for clients."""

    def status(self, member: int, topic: str = "") -> Any:
        """Returns the status of a member; empty if it does not reply."""
        return {}

    def copies(self) -> int | None:
        """Returns the messages that members sent to one another so far; None if nothing counts."""
        counters = [self.status(member).get("counters") for member in range(self.layout.members)]
        return sum(each["data_copies"] for each in counters if each) if all(counters) else None

    def relay(self) -> int:
        """Returns the last member on the way to the far subscriber."""
        return path(self.layout.parents(), self.layout.subscribers[-1])[1]

    def inject(self, fault: Fault, topic: str) -> str:
        """Kills the relay. Returns its name."""
        self._hurt = self.relay()
        self._kill(self._hurt)
        return f"member {self._hurt}"

    def heal(self) -> None:
        """Starts the killed member again."""
        if self._hurt >= 0:
            self._revive(self._hurt)
            self._hurt = -1

    @abstractmethod
    def _kill(self, member: int) -> None: ...

    @abstractmethod
    def _revive(self, member: int) -> None: ...

    def is_agreed(self) -> bool:
        """Returns whether all members know all, and have the links of the layout and no other."""
        found = [self.status(member) for member in range(self.layout.members)]
        return all(
            each
            and each.get("members") == len(found)
            and each["digest"] == found[0]["digest"]
            and sum(link["usable"] for link in each["links"]) == self.layout.degree(member)
            for member, each in enumerate(found)
        )


class FederationTarget(FederatedTarget):
    """Twelve Holdfast brokers with the federation in each."""

    name = "federation"
    title = "Holdfast, a federation of twelve"
    survives_faults = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.members: list[HoldfastNode] = []

    def start(self) -> None:
        """Starts all members and waits until they are linked. Raises `TargetError`."""
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(self.layout.members)]
        for number, address in enumerate(addresses):
            peers = [addresses[b] for a, b in self.layout.edges if a == number]
            file = self.directory / f"{number}.toml"
            # Only the links of the layout.
            table: dict[str, str | int | list[str]] = {
                "id": id_of(number),
                "listen": address,
                "degree": 0,
                "peers": peers,
            }
            write_settings(file, table)
            data = self.directory / str(number)
            self.members.append(
                HoldfastNode(f"member-{number}", self.directory, data, "-c", str(file))
            )
        start_in_turn(self.members)
        wait_until(self.is_agreed, self.members, "all members are linked and know all others")

    def stop(self) -> None:
        """Stops all members and removes their files."""
        end(self.members)
        shutil.rmtree(self.directory, ignore_errors=True)

    def version(self) -> str:
        """Returns the program and its version."""
        return first_line([*PROGRAM, "--version"])

    def pids(self) -> list[int]:
        """Returns the processes that are measured."""
        return [each.pid for each in self.members if each.is_running()]

    def server(self, member: int) -> str:
        """Returns the address of a member's broker for clients."""
        return self.members[member].server

    def status(self, member: int, topic: str = "") -> Any:
        """Returns the status of a member; empty if it does not reply."""
        return federation_status(self.members[member].admin_port, topic)

    def _kill(self, member: int) -> None:
        self.members[member].signal(signal.SIGKILL)

    def _revive(self, member: int) -> None:
        self.members[member].wait(10.0)
        self.members[member].start()
        wait_until(self.is_agreed, self.members, "all members are linked again")


class MosquittosTarget(FederatedTarget):
    """One Mosquitto at each member."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.brokers: list[Mosquitto] = []
        for number in range(self.layout.members):
            place = directory / str(number)
            place.mkdir(parents=True)
            self.brokers.append(Mosquitto(place, inflight_max=MOSQUITTO_INFLIGHT))

    def stop(self) -> None:
        """Stops all brokers and removes their files."""
        for broker in self.brokers:
            broker.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def version(self) -> str:
        """Returns the program and its version."""
        return self.brokers[0].version()

    def pids(self) -> list[int]:
        """Returns the processes that are measured."""
        return [pid for broker in self.brokers for pid in broker.pids()]

    def server(self, member: int) -> str:
        """Returns the address of a member's broker for clients."""
        return self.brokers[member].servers[0]

    def _kill(self, member: int) -> None:
        self.brokers[member].inject(Fault.KILL, self.topic)

    def _revive(self, member: int) -> None:
        self.brokers[member].heal()


class SidecarsTarget(MosquittosTarget):
    """Mosquittos, each with `holdfast federation sidecar` beside it."""

    name = "sidecars"
    title = "Mosquitto with Holdfast's federators, twelve"
    survives_faults = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.sidecars: list[Program] = []
        self._admin_ports = [free_port() for _ in range(self.layout.members)]

    def start(self) -> None:
        """Starts all brokers, then the federators. Raises `TargetError`."""
        for broker in self.brokers:
            broker.start()
        addresses = [f"127.0.0.1:{free_port()}" for _ in self.brokers]
        for number, broker in enumerate(self.brokers):
            file = broker.directory / "federator.toml"
            write_settings(file, {"id": id_of(number), "degree": 0})
            command = [*PROGRAM, "federation", "sidecar", "-c", str(file)]
            command += ["--broker", f"mqtt://{broker.servers[0]}", "--listen", addresses[number]]
            command += ["--data-dir", str(broker.directory / "federation")]
            command += ["--admin", f"127.0.0.1:{self._admin_ports[number]}"]
            for a, b in self.layout.edges:
                command += ["--peer", addresses[b]] if a == number else []
            if number in self.layout.subscribers:
                command += ["--interest", self.topic]
            self.sidecars.append(
                Program(f"federator-{number}", command, broker.directory, self._admin_ports[number])
            )
        start_in_turn(self.sidecars)
        wait_until(self._is_complete, self.sidecars, "all federators are linked and subscribed")

    def stop(self) -> None:
        """Stops all processes and removes their files."""
        end(self.sidecars)
        super().stop()

    def pids(self) -> list[int]:
        """Returns the processes that are measured."""
        return [*super().pids(), *(each.pid for each in self.sidecars if each.is_running())]

    def status(self, member: int, topic: str = "") -> Any:
        """Returns the status of a federator; empty if it does not reply."""
        return federation_status(self._admin_ports[member], topic)

    def _is_complete(self) -> bool:
        return self.is_agreed() and all(
            self.status(number)["edge"]["is_settled"] for number in range(self.layout.members)
        )

    def _kill(self, member: int) -> None:
        """Kills the federator and its broker, as a host that fails takes both."""
        self.sidecars[member].signal(signal.SIGKILL)
        super()._kill(member)

    def _revive(self, member: int) -> None:
        super()._revive(member)
        self.sidecars[member].wait(10.0)
        self.sidecars[member].start()
        wait_until(self._is_complete, self.sidecars, "all federators are linked again")


class BridgesTarget(MosquittosTarget):
    """Mosquittos whose bridges are a shortest-path tree from the publisher, in both directions."""

    name = "bridges"
    title = "Mosquitto, twelve with bridges"

    def start(self) -> None:
        """Starts all brokers. Raises `TargetError`."""
        parents = self.layout.parents()
        for child, parent in sorted(parents.items()):
            address = self.brokers[child].servers[0]
            self.brokers[parent].extra += (
                f"connection link-{parent}-{child}\naddress {address}\ntopic # both 1\n"
                "bridge_protocol_version mqttv311\nrestart_timeout 1\nnotifications false\n"
            )
        # A bridge finds its other end if those below start first.
        for member in [*reversed(parents), self.layout.publisher]:
            self.brokers[member].start()


def start_in_turn(programs: Sequence[Program]) -> None:
    """Starts programs a few at a time; each one listens before the next ones begin."""
    for first in range(0, len(programs), START_TOGETHER):
        together = programs[first : first + START_TOGETHER]
        for each in together:
            each.start()
        for each in together:
            wait_until(each.is_listening, [each], f"{each.name} listens")


def end(programs: Sequence[Program]) -> None:
    """Stops programs at once, not one after the other. Nothing of theirs is read any more."""
    for each in programs:
        if each.is_running():
            each.signal(signal.SIGKILL)
    for each in programs:
        each.stop()


def federation_status(admin_port: int, topic: str) -> Any:
    """Returns the reply of an admin port about its federation; empty if there is none."""
    query = f"?topic={topic}" if topic else ""
    found = admin(admin_port, f"/api/v1/federation{query}")
    if not isinstance(found, dict) or "members" not in found:
        return {}
    return found
