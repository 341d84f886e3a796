"""A cluster of Holdfast nodes as one member of a federation: by [federation] at every node, and by
`holdfast federator` beside it with the addresses of all nodes. The other member is a broker."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.client import Client, Options, Reconnect
from holdfast.client.protocol.effects import Message
from tests.e2e.brokers import toml
from tests.e2e.cluster_processes import ClusterProcesses
from tests.e2e.federated import HELLO_S, Member, running
from tests.support.ports import free_port
from tests.support.sidecars import Sidecar, wait_until

pytestmark = pytest.mark.timeout(240)
WAIT_S = 60.0
MESSAGES = 120
"""Of each QoS, in each direction."""
INTERVAL_S = 0.02
INTO, OUT = "into", "out"
"""Topics begin so, as seen from the cluster."""


@dataclass
class Site:
    """A cluster beside which a sidecar runs."""

    cluster: ClusterProcesses
    member: Member
    sidecar: Sidecar
    runs: int = 0

    def node_of_federator(self) -> str:
        """Empty: it is at none."""
        edge = self.sidecar.status().get("edge", {})
        if not edge.get("is_up"):
            return ""
        port = int(edge["broker"].rpartition(":")[2])
        return next(name for name, each in self.cluster.ports.items() if each == port)

    def is_settled(self) -> bool:
        here, there = self.sidecar.status(), self.member.federation()
        return bool(
            here
            and there
            and here["digest"] == there["digest"]
            and here["members"] == 2
            and here["edge"]["is_settled"]
            and here["edge"]["export_filters"] == [f"{OUT}/#"]
            and there["edge"]["export_filters"] == [f"{INTO}/#"]
        )


@dataclass
class MemberSite:
    """A cluster that is a member itself."""

    cluster: ClusterProcesses
    member: Member
    runs: int = 0

    def statuses(self) -> dict[str, dict[str, Any]]:
        """By node, of those that serve."""
        found = {}
        for node in self.cluster.running:
            with contextlib.suppress(OSError):
                code, body = node.admin("/api/v1/federation")
                if code == 200:
                    found[node.node_id] = json.loads(body)
        return found

    def node_of_federator(self) -> str:
        """Empty: it is at none."""
        found = self.statuses()
        names = {each["node"] for each in found.values() if each["running"]}
        return names.pop() if len(names) == 1 and names <= found.keys() else ""

    def is_settled(self) -> bool:
        name = self.node_of_federator()
        here, there = self.statuses().get(name, {}), self.member.federation()
        return bool(
            here.get("running")
            and there
            and here["digest"] == there["digest"]
            and here["members"] == 2
            and here["edge"]["is_up"]
            and here["edge"]["export_filters"] == [f"{OUT}/#"]
            and there["edge"]["export_filters"] == [f"{INTO}/#"]
        )


@pytest.fixture
def member_site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MemberSite]:
    """One for each test: a link that was lost several times in a minute is used again later. The
    parameter: the names of gateways besides."""
    gateways = getattr(request, "param", ())
    cluster = ClusterProcesses(tmp_path / "cluster", 3 + len(gateways), gateways=gateways)
    member = Member(tmp_path, "b")
    addresses = []
    for node in cluster.nodes.values():
        addresses.append(f"127.0.0.1:{free_port()}")
        node.settings["federation"] = {
            "listen": addresses[-1],
            "degree": 0,
            "hello_s": HELLO_S,
        }
    member.settings["federation"]["peers"] = addresses
    with cluster, running([member]):
        made = MemberSite(cluster, member)
        wait_until(made.node_of_federator, "a node runs the member")
        yield made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The same for all tests: each leaves it whole."""
    tmp_path = tmp_path_factory.mktemp("site")
    with ClusterProcesses(tmp_path / "cluster") as cluster:
        member = Member(tmp_path, "b")
        place = tmp_path / "federator"
        place.mkdir()
        configuration = place / "federator.toml"
        configuration.write_text(toml({"federation": {"degree": 0, "hello_s": HELLO_S}}))
        first, *others = cluster.ports.values()
        options = ["-c", str(configuration), "--interest", f"{INTO}/#"]
        options += ["--peer", f"127.0.0.1:{member.federation_port}"]
        for port in others:
            options += ["--broker", f"mqtt://127.0.0.1:{port}"]
        sidecar = Sidecar(place, first, options)
        with running([member]):
            sidecar.start()
            made = Site(cluster, member, sidecar)
            try:
                wait_until(made.node_of_federator, "the federator is at a node")
                yield made
            except BaseException as error:
                error.add_note(f"log of the federator:\n{sidecar.log_text()[-4000:]}")
                raise
            finally:
                sidecar.kill()
            assert "Traceback" not in sidecar.log_text(), sidecar.log_text()[-6000:]


@dataclass
class Received:
    numbers: dict[str, list[int]] = field(default_factory=dict)
    """By topic, in order of arrival."""
    last_s: float = 0.0
    quiet_s: float = 0.0
    """The longest time between two."""

    def take(self, message: Message) -> None:
        now = time.monotonic()
        if self.last_s:
            self.quiet_s = max(self.quiet_s, now - self.last_s)
        self.last_s = now
        self.numbers.setdefault(message.topic, []).append(int(message.payload))

    def has_all(self) -> bool:
        found = [set(self.numbers.get(topic, ())) for topic in self.numbers]
        return len(found) == 2 and all(len(numbers) == MESSAGES for numbers in found)

    def check(self) -> None:
        """Nothing is lost, the order is kept; at QoS 2 nothing comes twice."""
        for topic, numbers in self.numbers.items():
            assert list(dict.fromkeys(numbers)) == list(range(MESSAGES)), topic
            if topic.endswith("2"):
                assert len(numbers) == MESSAGES, topic


@contextlib.asynccontextmanager
async def user(name: str, *ports: int, received: Received | None = None) -> AsyncIterator[Client]:
    """A client with a session, that goes to another node when its own is lost."""
    async with Client(
        servers=[f"127.0.0.1:{port}" for port in ports],
        reconnect=Reconnect(delay_max_s=0.2),
        options=Options(client_id=name, clean_start=False, session_expiry_s=600),
        on_message=received.take if received is not None else lambda message: None,
    ) as client:
        yield client


async def publish_all(client: Client, prefix: str) -> None:
    """Publishes without waiting for each, and waits for all in the end."""
    futures = []
    for number in range(MESSAGES):
        for qos in (1, 2):
            futures.append(await client.submit(f"{prefix}/{qos}", b"%d" % number, qos=qos))
        await asyncio.sleep(INTERVAL_S)
    await asyncio.gather(*futures)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        await asyncio.sleep(0.05)


async def flow(
    site: Site | MemberSite,
    disturb: Callable[[], Awaitable[None]],
    *,
    is_sent_before: bool = False,
) -> dict[str, Received]:
    """Both ways, while something happens to the cluster; what arrived. `is_sent_before`: all that
    leaves the cluster is acknowledged to its publisher by then, and all else is sent after it."""
    arrived = {INTO: Received(), OUT: Received()}
    site.runs += 1
    # Clients of the cluster are at the node that is not disturbed, first.
    own = site.node_of_federator()
    others = sorted(site.cluster.ports, key=lambda name: name == own)
    ports = [site.cluster.ports[name] for name in others]
    async with (
        user(f"cluster-reader-{site.runs}", *ports, received=arrived[INTO]) as reader,
        user(f"member-reader-{site.runs}", site.member.port, received=arrived[OUT]) as other_reader,
        user(f"cluster-writer-{site.runs}", *ports) as writer,
        user(f"member-writer-{site.runs}", site.member.port) as other_writer,
    ):
        await reader.subscribe((f"{INTO}/#", 2))
        await other_reader.subscribe((f"{OUT}/#", 2))
        await until(site.is_settled, "the federation settles")
        publishing = [asyncio.create_task(publish_all(other_writer, INTO))]
        if is_sent_before:
            await publish_all(writer, OUT)
        else:
            publishing.append(asyncio.create_task(publish_all(writer, OUT)))
        await until(
            lambda: all(
                len(each.numbers) == 2 and min(map(len, each.numbers.values())) > MESSAGES // 4
                for each in arrived.values()
            ),
            "some messages in both directions",
        )
        await disturb()
        await asyncio.gather(*publishing)
        try:
            await until(lambda: all(each.has_all() for each in arrived.values()), "all messages")
        except AssertionError as error:
            for each in arrived.values():
                for topic, numbers in each.numbers.items():
                    missing = sorted(set(range(MESSAGES)) - set(numbers))
                    error.add_note(f"{topic}: {len(numbers)} came, {missing[:20]} are missing")
            error.add_note(f"{site.member.federation()}")
            if isinstance(site, MemberSite):
                error.add_note(f"{site.statuses()}")
            raise
        # What would come twice would come now.
        await writer.publish(f"{OUT}/2", b"%d" % MESSAGES, qos=2)
        await other_writer.publish(f"{INTO}/2", b"%d" % MESSAGES, qos=2)
        await until(
            lambda: all(
                each.numbers[f"{prefix}/2"][-1] == MESSAGES for prefix, each in arrived.items()
            ),
            "the end",
        )
    for prefix, each in arrived.items():
        each.numbers[f"{prefix}/2"].pop()
    return arrived


async def await_move(site: MemberSite, before: str) -> None:
    """Until another node than `before` runs the member."""
    began_s = time.monotonic()
    await until(
        lambda: site.node_of_federator() not in ("", before), "another node runs the member"
    )
    print(f"moved in {time.monotonic() - began_s:.2f} s")


def check_same_member(site: MemberSite, arrived: dict[str, Received], id: str) -> None:
    for prefix, each in arrived.items():
        each.check()
        print(f"{prefix}: quiet for {each.quiet_s:.2f} s")
    assert site.statuses()[site.node_of_federator()]["id"] == id


def test_the_node_that_runs_the_member_is_killed(member_site: MemberSite) -> None:
    """kill -9 in the middle of traffic: another node runs the same member."""
    site = member_site
    before = site.node_of_federator()
    id = site.statuses()[before]["id"]

    async def kill() -> None:
        await asyncio.to_thread(site.cluster.kill9, before)
        await await_move(site, before)

    arrived = asyncio.run(flow(site, kill))
    check_same_member(site, arrived, id)
    site.cluster.restart(before)
    site.cluster.wait_healthy()


def test_the_node_that_runs_the_member_hangs(member_site: MemberSite) -> None:
    """SIGSTOP: its connections stay open. When it goes on, the member runs elsewhere for long."""
    site = member_site
    before = site.node_of_federator()
    id = site.statuses()[before]["id"]

    async def hang() -> None:
        site.cluster.pause(before)
        await await_move(site, before)
        site.cluster.resume(before)

    arrived = asyncio.run(flow(site, hang))
    check_same_member(site, arrived, id)
    site.cluster.wait_healthy()


def test_the_member_moves_by_command(member_site: MemberSite) -> None:
    """The node is drained, so that others lead, the member's home included."""
    site = member_site
    before = site.node_of_federator()
    id = site.statuses()[before]["id"]
    admin = ["--admin", f"127.0.0.1:{site.cluster.nodes[before].admin_port}"]

    async def drain() -> None:
        assert await asyncio.to_thread(main, ["cluster", "drain", before, *admin]) == 0
        await await_move(site, before)

    arrived = asyncio.run(flow(site, drain))
    check_same_member(site, arrived, id)
    assert main(["cluster", "undrain", before, *admin]) == 0
    site.cluster.wait_healthy()


def test_all_nodes_are_killed(member_site: MemberSite) -> None:
    """The other member goes on; what it wants is known after the start."""
    site = member_site
    before = site.node_of_federator()
    id = site.statuses()[before]["id"]

    async def kill() -> None:
        await asyncio.to_thread(site.cluster.kill9, *site.cluster.nodes)
        await asyncio.to_thread(site.cluster.restart, *site.cluster.nodes)
        await until(lambda: site.node_of_federator() != "", "a node runs the member")

    arrived = asyncio.run(flow(site, kill, is_sent_before=True))
    check_same_member(site, arrived, id)
    site.cluster.wait_healthy()


collected: dict[Client, list[str]] = {}
"""The messages that each visitor has received."""


@contextlib.asynccontextmanager
async def visitor(name: str, port: int) -> AsyncIterator[Client]:
    """A client without a session."""
    found: list[str] = []
    async with Client(
        "127.0.0.1", port, client_id=name, on_message=lambda m: found.append(m.payload.decode())
    ) as client:
        collected[client] = found
        yield client


@pytest.mark.parametrize("member_site", [("n4",)], indirect=True, ids=["with a gateway"])
def test_clients_at_every_node_are_clients_of_the_member(member_site: MemberSite) -> None:
    """Sessions that end with their connection, a shared group, QoS 0 and retained messages, at all
    nodes; then again with another node that runs the member."""
    site = member_site

    async def go(round: str, names: list[str]) -> None:
        ports = site.cluster.ports
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            here = {name: await enter(visitor(f"{round}-{name}", ports[name])) for name in names}
            there = await enter(visitor(f"{round}-b", site.member.port))
            grouped = [
                await enter(visitor(f"{round}-group-{port}", port))
                for port in (*(ports[name] for name in names), site.member.port)
            ]
            for client in (*here.values(), there):
                await client.subscribe((f"{round}/all/#", 1))
            for client in grouped:
                await client.subscribe((f"$share/g/{round}/group/#", 1))
            await there.subscribe((f"{round}/out/#", 1))
            found = await asyncio.to_thread(site.statuses)
            assert found.keys() == set(names), "every node replies"
            assert len({each["id"] for each in found.values()}) == 1
            node = site.node_of_federator()
            await until(
                lambda: (
                    f"{round}/all/#" in site.member.federation()["edge"]["export_filters"]
                    and {f"{round}/all/#", f"{round}/group/#", f"{round}/out/#"}
                    <= set(site.statuses()[node]["edge"]["export_filters"])
                ),
                "interest",
            )
            sent = []
            for number in range(30):
                for publisher, client in (("b", there), *here.items()):
                    sent.append(f"{publisher} {number}")
                    await client.publish(f"{round}/all/{publisher}", sent[-1].encode(), qos=1)
                    await client.publish(f"{round}/group/{publisher}", sent[-1].encode(), qos=1)
            await until(
                lambda: all(
                    len(collected[client]) >= len(sent) for client in (*here.values(), there)
                ),
                "all messages",
            )
            await until(
                lambda: sum(len(collected[client]) for client in grouped) >= len(sent),
                "all messages of the group",
            )
            for name in names:
                await here[name].publish(f"{round}/out/{name}", b"quick", qos=0)
                await here[name].publish(f"{round}/out/{name}", b"last", qos=1)
            await until(lambda: collected[there].count("last") == len(names), "the last ones")
            for client in here.values():
                assert sorted(collected[client]) == sorted(sent)
            assert collected[there].count("quick") == len(names)
            assert sorted(collected[there][: len(sent)]) == sorted(sent)
            taken = [text for client in grouped for text in collected[client]]
            assert sorted(taken) == sorted(sent), "each once"
            at_b = collected[grouped[-1]]
            assert {text[0] for text in at_b} == {"b"}, "each member serves its own clients first"
            await there.publish(f"{round}/all/kept", b"kept at b", qos=1, retain=True)
            await here[names[0]].publish(f"{round}/all/own", b"kept here", qos=1, retain=True)
            await until(lambda: "kept here" in collected[there], "it is there")
            await until(
                lambda: all("kept at b" in collected[client] for client in here.values()),
                "it is here",
            )
            for port in (ports[names[-1]], site.member.port):
                late = await enter(visitor(f"{round}-late-{port}", port))
                await late.subscribe((f"{round}/all/#", 1))
                await until(
                    lambda late=late: sorted(collected[late]) == ["kept at b", "kept here"],  # type: ignore[misc]
                    "what is retained",
                )

    names = sorted(site.cluster.nodes)
    asyncio.run(go("first", names))
    killed = site.node_of_federator()
    site.cluster.kill9(killed)
    asyncio.run(await_move(site, killed))
    asyncio.run(go("second", [name for name in names if name != killed]))


def test_a_cluster_leaves_when_no_node_has_the_table(member_site: MemberSite) -> None:
    """One node after the other is started without it. The session that holds messages back ends
    with the last one."""
    site = member_site
    logs = {name: node.log_text for name, node in site.cluster.nodes.items()}
    for name, node in site.cluster.nodes.items():
        assert not any("federation_left" in text() for text in logs.values())
        assert site.cluster.stop(name) == 0
        del node.settings["federation"]
        site.cluster.restart(name)
        site.cluster.wait_healthy()
    wait_until(
        lambda: any("federation_left" in text() for text in logs.values()), "the session ends"
    )


def test_the_node_of_the_federator_is_killed(site: Site) -> None:
    """kill -9 in the middle of traffic: the federator goes on with its session at another node."""

    async def kill() -> None:
        name = site.node_of_federator()
        await asyncio.to_thread(site.cluster.kill9, name)
        await until(
            lambda: site.node_of_federator() not in ("", name),
            "the federator is at another node",
        )

    arrived = asyncio.run(flow(site, kill))
    for prefix, each in arrived.items():
        each.check()
        print(f"{prefix}: quiet for {each.quiet_s:.2f} s")
    site.cluster.restart(*(name for name, node in site.cluster.nodes.items() if not node.runs))
    site.cluster.wait_healthy()


def test_leaderships_move_by_command(site: Site) -> None:
    """The node of the federator is drained and its partitions are led by others; the federator
    stays where it is."""

    async def drain() -> None:
        name = site.node_of_federator()
        admin = ["--admin", f"127.0.0.1:{site.cluster.nodes[name].admin_port}"]
        assert await asyncio.to_thread(main, ["cluster", "drain", name, *admin]) == 0
        leaders = {each["leader"] for each in site.cluster.status()["partitions"]}
        assert name not in leaders
        assert await asyncio.to_thread(main, ["cluster", "undrain", name, *admin]) == 0
        # The undrained node takes replicas again, meanwhile: then it is to be asked again.
        deadline = time.monotonic() + WAIT_S
        while await asyncio.to_thread(main, ["cluster", "rebalance", *admin]):
            assert time.monotonic() < deadline, "the cluster does not come to rest"
            await asyncio.sleep(0.2)

    arrived = asyncio.run(flow(site, drain))
    for prefix, each in arrived.items():
        each.check()
        print(f"{prefix}: quiet for {each.quiet_s:.2f} s")


def test_the_federator_is_killed(site: Site) -> None:
    """kill -9 of the federator: the cluster keeps its session, and tells by their numbers what is
    brought again. What it had read and not acknowledged may leave twice."""

    async def kill() -> None:
        site.sidecar.kill()
        site.sidecar.start()
        await until(lambda: bool(site.node_of_federator()), "the federator is at a node")

    arrived = asyncio.run(flow(site, kill))
    into, out = arrived[INTO], arrived[OUT]
    into.check()
    assert into.numbers[f"{INTO}/1"] == list(range(MESSAGES))
    for topic, numbers in out.numbers.items():
        assert list(dict.fromkeys(numbers)) == list(range(MESSAGES)), topic
    wait_until(site.is_settled, "the federation settles")
