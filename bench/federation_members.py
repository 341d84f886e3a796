"""The members of a federation as processes, in every way of federating brokers that is compared.

    with VARIANTS["builtin"](layout, directory) as members:
        ...  # all are linked, and each can be published to

What a member needs in order to know of a subscriber is given to it (`beacons`, an interest) or is
found out by it from the subscription itself.
"""

import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from bench import process
from holdfast_lab.targets.graph import Layout, branches
from tests.e2e.brokers import MOSQUITTO, Broker, Mosquitto, toml
from tests.e2e.federated import Member
from tests.support.sidecars import Sidecar

TOPIC: Final = "federated/bench"
"""The prefix is the published protocol's; the others need none."""
BEACON_TOPIC: Final = "federator/beacon/bench"
START_TIMEOUT_S: Final = 120.0
START_TOGETHER: Final = 4
"""So many processes of Python start at a time: each takes a second or two of a core."""
POLL_S: Final = 0.05
LOG_CHARACTERS: Final = 2000
HELLO_S: Final = 2.0
"""The default."""
CORE_ANN_INTERVAL_S: Final = 2.0
BEACON_INTERVAL_S: Final = 2.0
PAPER_REDUNDANCY: Final = 3
"""As in the paper's run on a LAN."""
MOSQUITTO_LINES: Final = (
    "set_tcp_nodelay true\nconnection_messages false\n"
    "log_dest stderr\nlog_type error\nlog_type warning\n"
)
MOSQUITTO_INFLIGHT: Final = 1000


class MembersFailed(Exception):
    """The members did not come to what they should; the text says which, with their logs."""


@dataclass(frozen=True)
class Traffic:
    """What members have sent to one another since their starts."""

    at_s: float
    """As time.monotonic()."""
    copies: int
    """Of messages; each link that one crosses counts once."""
    control: int
    """Frames that carry neither a message nor its confirmation."""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Raises MembersFailed."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise MembersFailed(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)


def start_all(brokers: Sequence[Broker]) -> None:
    """A few at a time. Raises RuntimeError with the log of one that does not serve."""
    for first in range(0, len(brokers), START_TOGETHER):
        together = brokers[first : first + START_TOGETHER]
        for broker in together:
            broker.launch()
        for broker in together:
            broker.await_ready()


def id_of(member: int) -> str:
    """In the order of the numbers: of equally long ways the one by the lowest is taken, by the
    members as in the layout's tree."""
    return f"{member + 1:032x}"


def mosquitto(directory: Path, name: str, lines: str = "") -> Mosquitto:
    place = directory / name
    place.mkdir()
    return Mosquitto(place, MOSQUITTO_LINES + lines, MOSQUITTO_INFLIGHT)


class Members(ABC):
    """`with Members(...)`: running, linked as in the layout."""

    name: ClassVar[str]
    beacons: ClassVar[bool] = False
    """Whether subscribers have to announce themselves on BEACON_TOPIC."""
    observed: ClassVar[str] = ""
    """The filter by which copies and control are seen at the brokers, if nothing counts them."""
    holds_qos1: ClassVar[bool] = False
    """Whether what it acknowledges is promised to arrive."""

    def __init__(self, layout: Layout, parent: Path) -> None:
        self.layout = layout
        self.directory = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=parent))
        self.brokers: list[Broker] = []
        """One of each member, in order."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except (AssertionError, MembersFailed) as error:
            text = self.logs()
            self.close()
            raise MembersFailed(f"{self.name}: {error}\n{text}") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    @abstractmethod
    def _start(self) -> None: ...

    def _stop(self) -> None:
        for broker in self.brokers:
            broker.kill()

    def pids(self) -> list[int]:
        return [broker.process.pid for broker in self.brokers if broker.process is not None]

    def port(self, member: int) -> int:
        return self.brokers[member].port

    def cpu_s(self) -> float:
        return sum(process.cpu_s(pid) for pid in self.pids())

    def rss_bytes(self) -> int:
        return sum(process.rss_bytes(pid) for pid in self.pids())

    def traffic(self) -> Traffic | None:
        """None: nothing counts it."""
        found = [self.status(member).get("counters") for member in range(self.layout.members)]
        if not all(found):
            return None
        counters: list[dict[str, Any]] = [each for each in found if each]
        return Traffic(
            time.monotonic(),
            sum(each["data_copies"] for each in counters),
            sum(each["control_frames"] for each in counters),
        )

    def status(self, member: int) -> dict[str, Any]:
        """Of its federator; empty while it says nothing, or there is none."""
        return {}

    def logs(self) -> str:
        tails = [
            f"--- {self.name} {number}:\n{broker.log_text()[-LOG_CHARACTERS:]}"
            for number, broker in enumerate(self.brokers)
            if broker.log_text()
        ]
        return "\n".join(tails)

    def _is_agreed(self) -> bool:
        """All know all, and have the links of the layout and no other."""
        found = [self.status(member) for member in range(self.layout.members)]
        return all(
            each
            and each.get("members") == len(found)
            and each["digest"] == found[0]["digest"]
            and sum(link["usable"] for link in each["links"]) == self.layout.degree(member)
            for member, each in enumerate(found)
        )


class Bridges(Members):
    """Mosquittos whose bridges are the links of a shortest-path tree from the publisher; each
    carries everything both ways, as a tree must whose subscribers may be anywhere."""

    name = "bridges"
    observed = TOPIC

    def _start(self) -> None:
        parents = self.layout.parents()
        brokers = {
            member: mosquitto(self.directory, str(member)) for member in range(self.layout.members)
        }
        self.brokers = [*brokers.values()]
        for child, parent in sorted(parents.items()):
            brokers[parent].extra += self._bridge(parent, child, brokers[child].port)
        # Those below first, so that a bridge finds its other end.
        for member in [*reversed(parents), self.layout.publisher]:
            brokers[member].start()

    def _bridge(self, parent: int, child: int, port: int) -> str:
        return (
            f"connection link-{parent}-{child}\naddress 127.0.0.1:{port}\n"
            f"bridge_protocol_version mqttv311\nrestart_timeout 1\nnotifications false\n"
            f"{self._topics(parent, child)}\n"
        )

    def _topics(self, parent: int, child: int) -> str:
        return "topic # both 2"


class PrunedBridges(Bridges):
    """The same tree, by somebody who knows where the subscribers are, and that they stay."""

    name = "bridges-pruned"

    def _topics(self, parent: int, child: int) -> str:
        leads = (parent, child) in branches(self.layout.parents(), self.layout.subscribers)
        return f"topic {TOPIC if leads else 'unused'} out 2"


class BuiltIn(Members):
    """`holdfast serve` with [federation]. `durability` as in [log]; `more` for [federation]."""

    name = "builtin"
    holds_qos1 = True
    durability: ClassVar[str] = "fsync"

    def __init__(self, layout: Layout, parent: Path, more: dict[str, object] | None = None) -> None:
        super().__init__(layout, parent)
        settings: dict[str, dict[str, Any]] = {
            "log": {"durability": self.durability},
            "federation": {"hello_s": HELLO_S, **(more or {})},
        }
        self.members = [
            Member(self.directory, str(number), settings) for number in range(layout.members)
        ]
        self.brokers = [*self.members]
        for number, member in enumerate(self.members):
            member.settings["federation"]["id"] = id_of(number)
            member.link_to(*(self.members[b] for a, b in layout.edges if a == number))

    def _start(self) -> None:
        start_all(self.brokers)
        wait_until(self._is_agreed, "everybody is linked and knows everybody", START_TIMEOUT_S)

    def status(self, member: int) -> dict[str, Any]:
        return self.members[member].federation()


class BuiltInMemory(BuiltIn):
    """Without fdatasync before an acknowledgement, as Mosquitto without persistence."""

    name = "builtin-memory"
    durability = "memory"


class Sidecars(Members):
    """Mosquittos, each with `holdfast federator` beside it."""

    name = "sidecar"
    holds_qos1 = True

    def __init__(self, layout: Layout, parent: Path) -> None:
        super().__init__(layout, parent)
        self.sidecars: list[Sidecar] = []
        for number in range(layout.members):
            broker = mosquitto(self.directory, str(number))
            self.brokers.append(broker)
            configuration = broker.directory / "federator.toml"
            # Only the links of the layout.
            table = {"id": id_of(number), "degree": 0, "hello_s": HELLO_S}
            configuration.write_text(toml({"federation": table}))
            options = ["-c", str(configuration)]
            if number in layout.subscribers:
                options += ["--interest", TOPIC]
            self.sidecars.append(Sidecar(broker.directory, broker.port, options))
        for one, other in layout.edges:
            self.sidecars[one].options += ["--peer", self.sidecars[other].address]

    def _start(self) -> None:
        start_all(self.brokers)
        for first in range(0, len(self.sidecars), START_TOGETHER):
            together = self.sidecars[first : first + START_TOGETHER]
            for sidecar in together:
                sidecar.start()
            wait_until(
                lambda together=together: all(map(self._answers, together)),  # type: ignore[misc]
                "the federators answer",
                START_TIMEOUT_S,
            )
        wait_until(self._is_settled, "everybody is linked, knows everybody", START_TIMEOUT_S)

    def _answers(self, sidecar: Sidecar) -> bool:
        if sidecar.process is None or sidecar.process.poll() is not None:
            raise MembersFailed(f"a federator has ended:\n{sidecar.log_text()[-LOG_CHARACTERS:]}")
        return bool(sidecar.status())

    def _is_settled(self) -> bool:
        return self._is_agreed() and all(
            sidecar.status().get("edge", {}).get("is_settled") for sidecar in self.sidecars
        )

    def _stop(self) -> None:
        for sidecar in self.sidecars:
            sidecar.kill()
        super()._stop()

    def pids(self) -> list[int]:
        federators = [each.process.pid for each in self.sidecars if each.process is not None]
        return [*super().pids(), *federators]

    def status(self, member: int) -> dict[str, Any]:
        return self.sidecars[member].status()

    def logs(self) -> str:
        tails = [each.log_text()[-LOG_CHARACTERS:] for each in self.sidecars]
        return "\n".join([super().logs(), *filter(None, tails)])


class PaperFederatorProcess(Broker):
    """Beside `broker`; its neighbours are told to it, for there is no manager here."""

    def __init__(
        self, directory: Path, id: int, broker: Broker, neighbours: dict[int, int]
    ) -> None:
        super().__init__(directory)
        self._options = ["--id", str(id), "--broker", f"tcp://127.0.0.1:{broker.port}"]
        for neighbour, port in neighbours.items():
            self._options += ["--neighbour", f"{neighbour}=tcp://127.0.0.1:{port}"]

    def command(self) -> list[str]:
        return [
            *[sys.executable, "-m", "bench.paper", *self._options],
            *["--core-ann-interval-s", str(CORE_ANN_INTERVAL_S)],
            *["--beacon-interval-s", str(BEACON_INTERVAL_S)],
            *["--redundancy", str(PAPER_REDUNDANCY)],
        ]

    def ready(self) -> bool:
        return "is connected" in self.log_text()


class Paper(Members):
    """Mosquittos, each with a federator of the published protocol beside it."""

    name = "paper"
    beacons = True
    observed = "federator/#"

    def __init__(self, layout: Layout, parent: Path) -> None:
        super().__init__(layout, parent)
        self.brokers = [mosquitto(self.directory, str(number)) for number in range(layout.members)]
        self.federators: list[PaperFederatorProcess] = []
        for number, broker in enumerate(self.brokers):
            near = [b if a == number else a for a, b in layout.edges if number in (a, b)]
            place = self.directory / f"federator-{number}"
            place.mkdir()
            ports = {each: self.brokers[each].port for each in near}
            self.federators.append(PaperFederatorProcess(place, number, broker, ports))

    def _start(self) -> None:
        start_all(self.brokers)
        start_all(self.federators)

    def _stop(self) -> None:
        for federator in self.federators:
            federator.kill()
        super()._stop()

    def pids(self) -> list[int]:
        federators = [each.process.pid for each in self.federators if each.process is not None]
        return [*super().pids(), *federators]


VARIANTS: Final[dict[str, Callable[[Layout, Path], Members]]] = {
    each.name: each for each in (Bridges, PrunedBridges, BuiltIn, BuiltInMemory, Sidecars, Paper)
}
NEED_MOSQUITTO: Final = (Bridges.name, PrunedBridges.name, Sidecars.name, Paper.name)


def missing(variant: str) -> str:
    """What the variant needs and is not here, in words."""
    if variant in NEED_MOSQUITTO and MOSQUITTO is None:
        return "mosquitto is not installed (on Debian: apt install mosquitto)"
    return ""
