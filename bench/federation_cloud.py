"""The published run in the cloud: nine members of a real topology manager, two of which die.

Members 0 and 7 are the only neighbours of member 8, and are killed at once, or their hosts are cut
off. Before that, the manager itself is killed and started again. All the while member 3 publishes
at QoS 1 to subscribers at 5 and 8: between the living nothing may be lost.

Each member has a network namespace of its own where the kernel lets us make one, else all are on
loopback, and nobody can be cut off. Played as configured by default, where a member that has too
few links dials others by itself until the manager has decided, and with the manager alone.
"""

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.failover_sending import TOPIC
from bench.federation_faults import Campaign, Round, Traffic
from bench.federation_graph import Layout
from bench.federation_members import (
    POLL_S,
    START_TIMEOUT_S,
    BuiltIn,
    MembersFailed,
    start_all,
    wait_until,
)
from holdfast.security.access.access_file import AccessFile
from holdfast.security.access.changes import add_token
from tests.e2e.brokers import Broker
from tests.e2e.federated import Member
from tests.support.manager_process import ManagerProcess
from tests.support.namespaces import Host, Network

MEMBERS: Final = 9
DYING: Final = (0, 7)
LONELY: Final = 8
PUBLISHER: Final = 3
SUBSCRIBERS: Final = (5, LONELY)
OPERATOR: Final = "operator"
"""The host of the manager and of the clients."""
MANAGER_KILLED: Final = "manager kill -9"
MEMBERS_KILLED: Final = "0 and 7 kill -9"
MEMBERS_CUT_OFF: Final = "0 and 7 cut off"
"""Nothing says so but silence."""
TARGETS_S: Final = {MANAGER_KILLED: 0.5, MEMBERS_KILLED: 3.0, MEMBERS_CUT_OFF: None}
"""Silences. Where the manager alone repairs, that of the killed is only told."""
REQUEST_S: Final = 5.0
RELINK_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Cloud:
    repairs_itself: bool
    fault: str
    """MEMBERS_KILLED or MEMBERS_CUT_OFF."""
    campaign: Campaign
    relinked_s: float
    """From the kill until the manager had given member 8 new neighbours and it was linked with
    them."""
    neighbours: list[int]

    def targets_s(self) -> dict[str, float | None]:
        healing_s = TARGETS_S[MEMBERS_KILLED] if self.repairs_itself else None
        return {**TARGETS_S, MEMBERS_KILLED: healing_s}

    def as_json(self) -> dict[str, object]:
        return {
            "repairs_itself": self.repairs_itself,
            "fault": self.fault,
            "relinked_s": self.relinked_s,
            "neighbours": self.neighbours,
            **self.campaign.as_json(),
        }


class CloudMember(Member):
    """On a host of its own."""

    def __init__(self, directory: Path, name: str, settings: dict[str, Any], host: Host) -> None:
        self.host = host
        super().__init__(directory, name, settings)
        self.settings["security"] = {"allow_anonymous": True}
        self.settings["federation"]["listen"] = f"{host.address}:{self.federation_port}"
        # The admin port asks other hosts than its own for a token.
        make = add_token("admin", int(time.time()))
        self.token = AccessFile(self.data).change(make)[1]

    def command(self) -> list[str]:
        there = ["--bind", self.host.address, "--admin", f"{self.host.address}:{self.admin_port}"]
        return self.host.command([*super().command(), *there])

    def ready(self) -> bool:
        return self.serves()

    def admin(self, path: str) -> tuple[int, str]:
        url = f"http://{self.host.address}:{self.admin_port}{path}"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self.token}"})
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


class CloudMembers(BuiltIn):
    name = "cloud"

    def __init__(self, parent: Path, repairs_itself: bool, network: Network | None) -> None:
        # The manager links them; this layout only says how many there are, and who publishes.
        edges = tuple((member, member + 1) for member in range(MEMBERS - 1))
        more: dict[str, object] = {"degree": 2 if repairs_itself else 0}
        super().__init__(Layout(edges, PUBLISHER, SUBSCRIBERS), parent, more)
        self.network = network
        # With the published intervals of probes.
        environment = {
            "HOLDFAST_TOPOLOGY__PROBE_INTERVAL_S": "5",
            "HOLDFAST_TOPOLOGY__PROBE_TIMEOUT_S": "3",
        }
        if network is not None:
            self._move_to(network)
            environment["HOLDFAST_TOPOLOGY__BIND"] = network.hosts[OPERATOR].address
            environment["HOLDFAST_TOPOLOGY__ALLOW_ANONYMOUS"] = "true"
        self.manager = ManagerProcess(self.directory, **environment)
        if network is not None:
            self.manager.url = f"http://{network.hosts[OPERATOR].address}:{self.manager.port}"
        for number, member in enumerate(self.members):
            settings = member.settings["federation"]
            settings.pop("peers")
            settings |= {"manager": self.manager.url, "broker": f"tcp://{self.address(number)}"}

    def _move_to(self, network: Network) -> None:
        secret = self.directory / "secret"
        secret.write_text("between members of an experiment, and nobody else\n")
        secret.chmod(0o600)
        self.members = [
            CloudMember(
                self.directory,
                member.name,
                {**member.settings, "federation": _without(member.settings["federation"], secret)},
                network.hosts[member.name],
            )
            for member in self.members
        ]
        self.brokers = [*self.members]

    def address(self, number: int) -> str:
        """For clients."""
        member: Broker = self.members[number]
        host = member.host.address if isinstance(member, CloudMember) else "127.0.0.1"
        return f"{host}:{member.port}"

    def cut_off(self, numbers: tuple[int, ...]) -> None:
        assert self.network is not None
        lost = {str(number) for number in numbers}
        self.network.part(sorted(lost), sorted(set(self.network.hosts) - lost))

    def _start(self) -> None:
        self.manager.start()
        start_all(self.brokers)
        wait_until(self._is_joined, "all members have joined", START_TIMEOUT_S)
        self.ids = [int(self.status(number)["manager"]["id"]) for number in range(MEMBERS)]
        """What the manager calls them."""
        self._link_the_lonely()

    def _stop(self) -> None:
        super()._stop()
        self.manager.kill()

    def logs(self) -> str:
        return f"{super().logs()}\n--- manager:\n{self.manager.log_text()[-2000:]}"

    def _is_joined(self) -> bool:
        found = [self.status(number) for number in range(MEMBERS)]
        return all(
            each.get("members") == MEMBERS and (each["manager"] or {}).get("connected")
            for each in found
        )

    def _link_the_lonely(self) -> None:
        """Have it linked with DYING and with nobody else, and then free of rules."""
        others = [number for number in range(MEMBERS) if number != LONELY]
        self._rule({each: "pin" if each in DYING else "forbid" for each in others})
        wait_until(lambda: self.linked() == set(DYING), "8 is linked with 0 and 7", START_TIMEOUT_S)
        self._rule(dict.fromkeys(others, "none"))

    def _rule(self, rules: dict[int, str]) -> None:
        lonely = self.ids[LONELY]
        links = [{"a": self.ids[each], "b": lonely, "rule": rule} for each, rule in rules.items()]
        self.manager.ask("PUT", "/links", {"links": links})

    def linked(self) -> set[int]:
        """Members with which the lonely one is."""
        numbers = {self.status(number).get("id"): number for number in range(MEMBERS)}
        links = self.status(LONELY)["links"]
        return {numbers.get(link["id"], -1) for link in links if link["usable"]}

    def desired(self) -> set[int]:
        """With which it should be by what the manager says."""
        lonely = self.ids[LONELY]
        pairs = [pair for pair in self.manager.links() if lonely in pair]
        return {self.ids.index(one if other == lonely else other) for one, other in pairs}

    def await_relinked(self) -> list[int]:
        """With whom. Raises MembersFailed."""
        living: dict[str, Any] = {}

        def is_relinked() -> bool:
            desired = self.desired()
            if len(desired) < 2 or desired & set(DYING):
                return False
            ids = {self.status(number)["id"] for number in desired}
            living["desired"] = sorted(desired)
            links = self.status(LONELY)["links"]
            return ids <= {link["id"] for link in links if link["usable"]}

        wait_until(is_relinked, "8 is linked with living members", RELINK_TIMEOUT_S)
        found: list[int] = living["desired"]
        return found


def _without(settings: dict[str, Any], secret: Path) -> dict[str, Any]:
    """The table [federation] without its address, and with what another one than loopback takes."""
    return {
        **{key: value for key, value in settings.items() if key != "listen"},
        "secret_file": str(secret),
    }


@contextmanager
def network_of_members() -> Iterator[Network]:
    """This thread, and what it starts, is on the operator's host meanwhile."""
    names = [str(number) for number in range(MEMBERS)]
    with Network([*names, OPERATOR]) as network, network.hosts[OPERATOR].entered():
        yield network


def play(
    directory: Path,
    repairs_itself: bool,
    fault: str = MEMBERS_KILLED,
    network: Network | None = None,
) -> Cloud:
    """MEMBERS_CUT_OFF takes a network. Raises MembersFailed, ClientFailed."""
    with CloudMembers(directory, repairs_itself, network) as members:
        addresses = {member: members.address(member) for member in SUBSCRIBERS}
        place = members.directory / "clients"
        place.mkdir()
        with Traffic(place, members.address(PUBLISHER), addresses) as traffic:
            origin = members.members[PUBLISHER]
            origin.await_interest(TOPIC, len(SUBSCRIBERS))
            origin.await_sending(TOPIC)
            traffic.publish()
            _await_delivery(traffic)
            rounds = [_kill_manager(members, traffic)]
            from_s = time.monotonic()
            if fault == MEMBERS_CUT_OFF:
                members.cut_off(DYING)
            else:
                for number in DYING:
                    members.members[number].kill()
            neighbours = members.await_relinked()
            relinked_s = time.monotonic() - from_s
            _await_delivery(traffic)
            silence_s = traffic.silence_s(LONELY, from_s, time.monotonic())
            rounds.append(Round(fault, silence_s))
            campaign = Campaign(rounds, traffic.finish())
        return Cloud(repairs_itself, fault, campaign, relinked_s, neighbours)


def _kill_manager(members: CloudMembers, traffic: Traffic) -> Round:
    from_s = time.monotonic()
    members.manager.kill()
    _await_delivery(traffic)
    members.manager.start()
    _await_delivery(traffic)
    return Round(MANAGER_KILLED, traffic.silence_s(LONELY, from_s, time.monotonic()))


def _await_delivery(traffic: Traffic) -> None:
    """Raises MembersFailed."""
    for member in SUBSCRIBERS:
        if not traffic.delivers(member):
            raise MembersFailed(f"nothing is delivered at {member}")


def print_cloud(cloud: Cloud) -> None:
    repaired = "repaired by members and manager" if cloud.repairs_itself else "by the manager alone"
    print(
        f"{cloud.fault}, {repaired}:"
        f" 8 linked with {' and '.join(map(str, cloud.neighbours))} after {cloud.relinked_s:.1f} s"
        f" (to within {POLL_S:g} s)"
    )
