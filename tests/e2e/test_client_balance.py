"""Drains at a pace and balanced returns of clients, with three real nodes."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast.client import Options, Reconnect
from holdfast.client.client import Client
from holdfast.client.errors import ClientError
from holdfast.node.placement.client_shares import STEADY_S
from tests.e2e.brokers import SOURCE
from tests.e2e.cluster_processes import ClusterProcesses

WAIT_S = 60.0
SETTINGS = {"cluster": {"partitions": 8}}


async def until(
    condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = WAIT_S
) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.05)


class Fleet:
    """One client of MQTT 5 to three of 3.1.1, each with a durable session and a topic of its own.
    Those of MQTT 5 follow the Server Reference. The others connect again to the node with the
    fewest clients, as a load balancer would choose."""

    def __init__(self, cluster: ClusterProcesses) -> None:
        self.cluster = cluster
        self.received: dict[str, list[int]] = {}
        self.sent = 0
        self.moves = 0
        self._clients: dict[str, Client] = {}
        self._lives: list[asyncio.Task[None]] = []

    async def join(self, name: str, count: int) -> None:
        """Connect clients to a node."""
        for _ in range(count):
            client_id = f"c{len(self.received)}"
            self.received[client_id] = []
            if len(self.received) % 4 == 1:
                client = self._new(client_id, self.cluster.ports[name], 5, Reconnect())
                await client.connect()
            else:
                client = await self._old(client_id, self.cluster.ports[name])
                self._lives.append(asyncio.create_task(self._live(client_id, client)))
            await client.subscribe((f"to/{client_id}", 1))

    def _new(self, client_id: str, port: int, level: int, policy: Reconnect | None) -> Client:
        numbers = self.received[client_id]
        client = self._clients[client_id] = Client(
            "127.0.0.1",
            port,
            reconnect=policy,
            options=Options(
                level=level, client_id=client_id, clean_start=False, session_expiry_s=600
            ),
            on_message=lambda message: numbers.append(int(message.payload)),
        )
        return client

    async def _old(self, client_id: str, port: int) -> Client:
        client = self._new(client_id, port, 4, None)
        await client.connect()
        return client

    async def _live(self, client_id: str, client: Client) -> None:
        while True:
            await client.wait_closed()
            self.moves += 1
            client = await self._find(client_id)

    async def _find(self, client_id: str) -> Client:
        """Connect to the node with the fewest clients that takes some."""
        while True:
            counts = await asyncio.to_thread(self.counts)
            for node in sorted(counts, key=counts.__getitem__):
                with contextlib.suppress(ClientError):
                    return await self._old(client_id, self.cluster.ports[node])

    async def publish(self, publisher: Client) -> None:
        """Publish one message to each client."""
        for client_id in self.received:
            payload = str(self.sent).encode()
            assert (await publisher.publish(f"to/{client_id}", payload, qos=1)).reason == 0
        self.sent += 1

    async def complete(self) -> bool:
        """Whether each client has received every message."""
        return all(set(each) == set(range(self.sent)) for each in self.received.values())

    def counts(self) -> dict[str, int]:
        """The clients of the fleet at each node, the publisher not counted."""
        body = json.loads(self.cluster.nodes["n1"].admin("/api/v1/cluster/clients")[1])
        return {each["node"]: each["clients"] for each in body["nodes"]}

    async def leave(self) -> None:
        for task in self._lives:
            task.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        for client in self._clients.values():
            await client.disconnect()


def command(cluster: ClusterProcesses, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *[sys.executable, "-m", "holdfast.cli.main", "cluster", *arguments],
            *["--admin", f"127.0.0.1:{cluster.nodes['n1'].admin_port}"],
        ],
        env={"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_balance_makes_28_27_0_even_and_loses_nothing(tmp_path: Path) -> None:
    async def scenario(cluster: ClusterProcesses) -> None:
        fleet = Fleet(cluster)
        await fleet.join("n1", 28)
        await fleet.join("n2", 26)
        publisher = Client("127.0.0.1", cluster.ports["n2"], reconnect=Reconnect(), client_id="p")
        await publisher.connect()
        assert fleet.counts() == {"n1": 28, "n2": 27, "n3": 0}
        began = time.monotonic()
        balance = command(cluster, "rebalance", "--connections", "--clients-per-s", "5")
        while balance.poll() is None:
            await fleet.publish(publisher)
        output, errors = balance.communicate()
        assert balance.returncode == 0, errors
        # Nine clients of each node at five a second.
        assert time.monotonic() - began > 1.5
        assert "each node sends at most 5 clients away a second" in errors
        assert "n1 " in errors
        assert output.startswith("no node has clients to send away; clients now: n1 ")

        async def is_even() -> bool:
            """A node that is late for a CONNECT lets its client go back, so one run may not do."""
            if fleet.counts() == {"n1": 19, "n2": 18, "n3": 18}:
                return True
            more = command(cluster, "rebalance", "--connections")
            await asyncio.to_thread(more.communicate)
            return False

        await until(is_even, "even")
        await fleet.publish(publisher)
        await until(fleet.complete, "every message at every client")
        assert fleet.moves > 0
        again = command(cluster, "rebalance", "--connections", "--json")
        output, errors = again.communicate()
        assert json.loads(output) == {"clients": {"n1": 19, "n2": 18, "n3": 18}}, errors
        await asyncio.to_thread(cluster.kill9, "n3")
        await until(lambda: cannot_balance(cluster), "refused without n3")
        await publisher.disconnect()
        await fleet.leave()

    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        asyncio.run(scenario(cluster))


async def cannot_balance(cluster: ClusterProcesses) -> bool:
    refused = command(cluster, "rebalance", "--connections")
    _, errors = await asyncio.to_thread(refused.communicate)
    return refused.returncode == 2 and "n3 is down: clients are sent away only while all" in errors


def test_a_drain_has_a_pace_and_undrain_ends_it(tmp_path: Path) -> None:
    async def scenario(cluster: ClusterProcesses) -> None:
        fleet = Fleet(cluster)
        await fleet.join("n3", 20)
        drain = command(cluster, "drain", "n3", "--clients-per-s", "4", "--no-wait")
        output, errors = drain.communicate()
        assert output == "n3 is being drained: its clients are sent away at 4 a second\n", errors

        async def some_have_left() -> bool:
            return fleet.counts()["n3"] < 18

        await until(some_have_left, "some clients leave")
        undrain = command(cluster, "undrain", "n3")
        assert await asyncio.to_thread(undrain.wait) == 0

        async def is_back() -> bool:
            return await asyncio.to_thread(cluster.nodes["n3"].readiness) == 200

        await until(is_back, "n3 is ready")
        kept = fleet.counts()["n3"]
        assert kept > 5
        await asyncio.sleep(1)
        assert fleet.counts()["n3"] == kept
        drain = command(cluster, "drain", "n3", "--clients-per-s", "50", "--timeout", "60")
        output, errors = await asyncio.to_thread(drain.communicate)
        assert drain.returncode == 0, errors
        assert "n3: its clients are sent away at 50 a second" in errors
        assert output.endswith("holds no replica, and has no client\n")
        assert fleet.counts()["n3"] == 0
        await fleet.leave()

    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        asyncio.run(scenario(cluster))


def test_a_node_that_stops_sends_its_clients_away_over_some_time(tmp_path: Path) -> None:
    settings = {"cluster": {"partitions": 8, "drain_clients_per_s": 10.0}}

    async def scenario(cluster: ClusterProcesses) -> None:
        fleet = Fleet(cluster)
        await fleet.join("n3", 20)
        stopping = asyncio.create_task(asyncio.to_thread(cluster.stop, "n3"))
        seen = set()
        publisher = Client("127.0.0.1", cluster.ports["n1"], reconnect=Reconnect(), client_id="p")
        await publisher.connect()
        while not stopping.done():
            await fleet.publish(publisher)
            body = json.loads(cluster.nodes["n1"].admin("/api/v1/cluster/clients")[1])
            seen.add(sum(each["clients"] for each in body["nodes"] if each["node"] != "n3"))
        assert await stopping == 0
        # Twenty clients at ten a second: between none and all there were others.
        assert len(seen) > 3
        await until(fleet.complete, "every message at every client")
        await publisher.disconnect()
        await fleet.leave()

    with ClusterProcesses(tmp_path, 3, settings) as cluster:
        asyncio.run(scenario(cluster))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_clients_are_balanced_without_a_command(tmp_path: Path) -> None:
    settings = {"cluster": {"partitions": 8, "rebalance_connections_per_s": 20.0}}

    async def scenario(cluster: ClusterProcesses) -> None:
        fleet = Fleet(cluster)
        await fleet.join("n1", 12)

        async def is_even() -> bool:
            return set(fleet.counts().values()) == {4}

        # Each new leader of the metadata, of which a busy machine has some, begins to count again.
        await until(is_even, "even", 6 * STEADY_S)
        await fleet.leave()

    with ClusterProcesses(tmp_path, 3, settings) as cluster:
        asyncio.run(scenario(cluster))
