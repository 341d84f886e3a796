"""What is done to a cluster. A fault is a generator: it hurts, yields how many seconds the load
goes on, and heals what it hurt; when it is over, every node runs again or is about to."""

import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.e2e.chaos_site import CLIENTS, Site, busiest
from tests.e2e.cluster_processes import ClusterNode
from tests.support.waiting import patience

STOP_TIMEOUT_S: Final = 30.0
SECOND_FAULT_S: Final = (0.02, 0.8)
"""After the first one: in the middle of the failover."""


@dataclass
class Scene:
    """`busy`: the topics that probes publish to. `pause_max_s`: the longest SIGSTOP."""

    site: Site
    rng: random.Random
    busy: list[str]
    pause_max_s: float = 8.0
    victims: set[str] = field(default_factory=set)
    """The nodes that this fault hurt, for the measurements."""
    notes: list[str] = field(default_factory=list)
    """The draws and the deeds, for the report."""

    @property
    def nodes(self) -> dict[str, ClusterNode]:
        return self.site.nodes

    @property
    def storing(self) -> list[str]:
        """The data nodes."""
        return [name for name, node in self.nodes.items() if node.has_data]

    @property
    def gateways(self) -> list[str]:
        return [name for name, node in self.nodes.items() if not node.has_data]

    def hit(self, name: str) -> ClusterNode:
        self.victims.add(name)
        return self.nodes[name]

    def busy_leader(self) -> str:
        return busiest(self.site.leaders(), self.busy) or self.any_node()

    def any_node(self, *but: str) -> str:
        return self.rng.choice([name for name in self.nodes if name not in but])

    def others(self, name: str) -> list[str]:
        return [other for other in self.nodes if other != name]

    def hold_s(self) -> float:
        return self.rng.uniform(1.0, 3.0)

    def pause_s(self) -> float:
        """As often below a second as above it."""
        return math.exp(self.rng.uniform(math.log(0.1), math.log(self.pause_max_s)))


Fault = Callable[[Scene], Iterator[float]]


class Planned(NamedTuple):
    """A round to be played. What it draws follows from the seed; whom it hits may also depend on
    who leads at that moment."""

    kind: str
    fault: Fault
    seed: str


def plan(names: Sequence[str], faults: Mapping[str, Fault], seed: int) -> list[Planned]:
    """A name is that of a fault, or KIND@SEED from the report of another run."""
    found = []
    for number, name in enumerate(names, 1):
        kind, _, known = name.partition("@")
        found.append(Planned(kind, faults[kind], known or f"{seed}-{number}"))
    return found


def kill_nodes(scene: Scene, *names: str) -> None:
    """At the same moment, as near as can be."""
    nodes = [scene.hit(name) for name in names]
    for node in nodes:
        assert node.process is not None
        node.process.kill()
    for node in nodes:
        node.kill()


def _kill_and_launch(scene: Scene, *names: str) -> Iterator[float]:
    kill_nodes(scene, *names)
    yield scene.hold_s()
    for name in names:
        scene.nodes[name].launch()


def kill_leader(scene: Scene) -> Iterator[float]:
    yield from _kill_and_launch(scene, scene.busy_leader())


def kill_metadata_leader(scene: Scene) -> Iterator[float]:
    yield from _kill_and_launch(scene, scene.site.metadata_leader() or scene.any_node())


def kill_two(scene: Scene) -> Iterator[float]:
    first = scene.busy_leader()
    yield from _kill_and_launch(scene, first, scene.any_node(first))


def kill_all(scene: Scene) -> Iterator[float]:
    yield from _kill_and_launch(scene, *scene.nodes)


def kill_processes(scene: Scene) -> Iterator[float]:
    """One of a broker's processes or all of them; its supervisor starts others."""
    name = scene.busy_leader()
    processes = scene.hit(name).children()
    assert processes, f"{name} has one process: set HOLDFAST_PROCESSES"
    for process_id in scene.rng.sample(processes, scene.rng.choice((1, len(processes)))):
        os.kill(process_id, signal.SIGKILL)
    yield scene.hold_s()


def pause_process(scene: Scene) -> Iterator[float]:
    """One of a broker's processes, while the others and the supervisor go on."""
    process_id = scene.rng.choice(scene.hit(scene.busy_leader()).children())
    os.kill(process_id, signal.SIGSTOP)
    yield scene.pause_s()
    os.kill(process_id, signal.SIGCONT)


def pause_leader(scene: Scene) -> Iterator[float]:
    node = scene.hit(scene.busy_leader())
    node.pause()
    yield scene.pause_s()
    node.resume()


def part_from_peers(scene: Scene) -> Iterator[float]:
    """Its clients still reach it; it must not promise them anything."""
    name = scene.busy_leader()
    scene.hit(name)
    scene.site.network.part([name], scene.others(name))
    yield scene.hold_s() + 1
    scene.site.network.heal()


def lose_host(scene: Scene) -> Iterator[float]:
    """Nothing gets in or out."""
    name = scene.busy_leader()
    scene.hit(name)
    scene.site.network.part([name], [*scene.others(name), CLIENTS])
    yield scene.hold_s() + 1
    scene.site.network.heal()


def part_one_way(scene: Scene) -> Iterator[float]:
    """It hears the others and is not heard, or the other way round."""
    name = scene.busy_leader()
    scene.hit(name)
    is_mute = scene.rng.random() < 0.5
    for other in scene.others(name):
        scene.site.network.cut(*((name, other) if is_mute else (other, name)))
    yield scene.hold_s() + 1
    scene.site.network.heal()


def part_bridge(scene: Scene) -> Iterator[float]:
    """Two sides that see one another only through the node in the middle."""
    _bridge, *rest = scene.rng.sample(list(scene.nodes), len(scene.nodes))
    left, right = rest[::2], rest[1::2]
    scene.victims.update(left if len(left) < len(right) else right)
    scene.site.network.part(left, right)
    yield scene.hold_s() + 1
    scene.site.network.heal()


def fill_disk(scene: Scene) -> Iterator[float]:
    name = scene.storing[-1]
    scene.hit(name)
    hog = scene.site.disks[name].directory / "hog"
    with hog.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 20)):
                pass
        except OSError:
            pass
    yield scene.hold_s() + 1
    hog.unlink()


def hang_disk(scene: Scene) -> Iterator[float]:
    """For less than a node waits for its disk, or for longer; everything else of it runs."""
    name = next(iter(scene.nodes))
    scene.hit(name)
    disk = scene.site.disks[name]
    disk.hang()
    yield scene.rng.uniform(0.5, 8.0)
    disk.go_on()


def _lose_power(scene: Scene, *names: str) -> None:
    """Whatever these nodes have not synced is gone."""
    kill_nodes(scene, *names)
    for name in names:
        scene.site.disks[name].lose_power()


def power_loss(scene: Scene) -> Iterator[float]:
    """Every acknowledged message is on the disk of the node that loses power, or on two others."""
    name = scene.busy_leader()
    _lose_power(scene, name)
    yield scene.hold_s()
    scene.nodes[name].launch()


def power_loss_of_all(scene: Scene) -> Iterator[float]:
    """Every acknowledged message is on the disks: no memory is left to take it from."""
    names = scene.storing
    _lose_power(scene, *names)
    kill_nodes(scene, *scene.gateways)
    yield scene.hold_s()
    for name in scene.rng.sample(list(scene.nodes), len(scene.nodes)):
        scene.nodes[name].launch()


def forgetful_quorum(scene: Scene) -> Iterator[float]:
    """A minority is paused while the others acknowledge; one of these loses power; then it and the
    paused ones are the only majority. It must have everything that it helped to acknowledge."""
    names = scene.rng.sample(scene.storing, len(scene.storing))
    few = (len(names) - 1) // 2
    away, forgetful, rest = names[:few], names[few], names[few + 1 :]
    scene.notes.append(f"paused {away}, power lost {forgetful}, then paused {rest}")
    for name in away:
        scene.hit(name).pause()
    yield scene.hold_s() + 1
    _lose_power(scene, forgetful)
    for name in rest:
        scene.hit(name).pause()
    for name in away:
        scene.nodes[name].resume()
    scene.nodes[forgetful].launch()
    yield scene.hold_s() + 3
    for name in rest:
        scene.nodes[name].resume()


def rolling_restart(scene: Scene) -> Iterator[float]:
    """SIGTERM, one node after the other, each as soon as the one before serves again."""
    for name in list(scene.nodes):
        node = scene.hit(name)
        assert node.process is not None
        node.process.send_signal(signal.SIGTERM)
        for _ in patience(STOP_TIMEOUT_S, f"{name} does not stop"):
            if node.process.poll() is not None:
                break
            yield 0.1
        node.process = None
        node.launch()
        yield from wait_whole(scene, STOP_TIMEOUT_S)


def wipe_disk(scene: Scene) -> Iterator[float]:
    name = scene.busy_leader()
    kill_nodes(scene, name)
    yield scene.hold_s()
    for path in scene.nodes[name].data.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    scene.nodes[name].launch()


def kill_during_failover(scene: Scene) -> Iterator[float]:
    """The second one is the next to decide: the metadata leader, or any other."""
    first = scene.busy_leader()
    kill_nodes(scene, first)
    yield scene.rng.uniform(*SECOND_FAULT_S)
    second = scene.site.metadata_leader()
    if second in ("", first):
        second = scene.any_node(first)
    kill_nodes(scene, second)
    yield scene.hold_s()
    for name in (second, first):
        scene.nodes[name].launch()


def pause_during_failover(scene: Scene) -> Iterator[float]:
    """One node is killed, another one stops in the middle, for longer than it may be silent."""
    first = scene.busy_leader()
    kill_nodes(scene, first)
    yield scene.rng.uniform(*SECOND_FAULT_S)
    node = scene.hit(scene.any_node(first))
    node.pause()
    yield scene.rng.uniform(0.5, 3.0)
    node.resume()
    yield scene.hold_s()
    scene.nodes[first].launch()


def kill_gateways(scene: Scene) -> Iterator[float]:
    """One or all of them: nothing of their sessions is on a disk of theirs."""
    count = scene.rng.randint(1, len(scene.gateways))
    yield from _kill_and_launch(scene, *scene.rng.sample(scene.gateways, count))


def kill_leader_and_gateway(scene: Scene) -> Iterator[float]:
    """Records that the gateway has forwarded are in a log that has no leader, or in none."""
    gateway = scene.rng.choice(scene.gateways)
    yield from _kill_and_launch(scene, scene.busy_leader(), gateway)


def pause_gateway(scene: Scene) -> Iterator[float]:
    node = scene.hit(scene.rng.choice(scene.gateways))
    node.pause()
    yield scene.pause_s()
    node.resume()


def part_gateway(scene: Scene) -> Iterator[float]:
    """From some data nodes, for its clients and itself reach the others."""
    name = scene.rng.choice(scene.gateways)
    scene.hit(name)
    lost = scene.rng.sample(scene.storing, scene.rng.randint(1, len(scene.storing)))
    scene.site.network.part([name], lost)
    yield scene.hold_s() + 1
    scene.site.network.heal()


def drain_and_kill(scene: Scene) -> Iterator[float]:
    """Partitions move away from a data node while a leader is killed, and come back."""
    leader = scene.busy_leader()
    name = scene.rng.choice([each for each in scene.storing if each != leader])
    yield from _until_accepted(scene, "drain", node=name)
    yield scene.hold_s() * scene.rng.random()
    yield from _kill_and_launch(scene, leader)
    yield scene.hold_s()
    yield from _until_accepted(scene, "undrain", node=name)


def resize_and_kill(scene: Scene) -> Iterator[float]:
    """Each partition gives up a replica, and gets another one while a leader is killed."""
    yield from _until_accepted(scene, "resize", replication_factor="2", min_insync="2")
    yield scene.hold_s()
    leader = scene.busy_leader()
    yield from _until_accepted(scene, "resize", replication_factor="3", min_insync="2")
    yield scene.hold_s() * scene.rng.random()
    yield from _kill_and_launch(scene, leader)


def _until_accepted(scene: Scene, action: str, **parameters: str) -> Iterator[float]:
    """A change may be refused while another leader of the metadata is elected."""
    for _ in patience(STOP_TIMEOUT_S, f"{action} {parameters} is refused"):
        if not scene.site.operate(action, **parameters):
            break
        yield 0.2
    scene.notes.append(f"{action} {parameters}")


def wait_whole(scene: Scene, timeout_s: float) -> Iterator[float]:
    """Raises AssertionError."""
    began = time.monotonic()
    for _ in patience(timeout_s, "the site is not whole"):
        if scene.site.whole_since(began):
            return
        yield 0.1


OF_ONE_NODE: Final[dict[str, Fault]] = {
    "kill -9": kill_leader,
    "kill -9 processes": kill_processes,
    "SIGSTOP process": pause_process,
    "SIGSTOP": pause_leader,
    "host lost": lose_host,
    "full disk": fill_disk,
    "power loss": power_loss,
}
OF_GATEWAYS_AND_MOVES: Final[dict[str, Fault]] = {
    "kill -9 gateways": kill_gateways,
    "kill -9 leader and gateway": kill_leader_and_gateway,
    "SIGSTOP gateway": pause_gateway,
    "gateway partition": part_gateway,
    "drain with kill -9": drain_and_kill,
    "resize with kill -9": resize_and_kill,
}
OF_A_CLUSTER: Final[dict[str, Fault]] = {
    "kill -9 leader": kill_leader,
    "kill -9 metadata leader": kill_metadata_leader,
    "kill -9 two": kill_two,
    "kill -9 all": kill_all,
    "SIGSTOP": pause_leader,
    "partition": part_from_peers,
    "host lost": lose_host,
    "one-way partition": part_one_way,
    "bridge partition": part_bridge,
    "full disk": fill_disk,
    "disk hangs": hang_disk,
    "rolling restart": rolling_restart,
    "wiped disk": wipe_disk,
    "kill during failover": kill_during_failover,
    "pause during failover": pause_during_failover,
    "power loss": power_loss,
    "power loss of all": power_loss_of_all,
    "forgetful quorum": forgetful_quorum,
}
