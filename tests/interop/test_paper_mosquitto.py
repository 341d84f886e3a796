"""Federators of the published protocol beside unmodified Mosquittos, with `holdfast topology`."""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.paper.federator import PaperFederator
from bench.paper.settings import PaperSettings
from holdfast.client import Client, PublishRefused, Reconnect
from tests.e2e.brokers import MOSQUITTO, Broker, Mosquitto
from tests.support.manager_process import ManagerProcess

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")

WAIT_S = 60.0
BEACON_S = 0.3
TOPIC = "federated/plant/temperature"
BEACON = "federator/beacon/plant/temperature"


class Site:
    """Three brokers and a manager; federators come with each test."""

    def __init__(self, directory: Path) -> None:
        self.brokers: list[Mosquitto] = []
        for number in range(3):
            home = directory / f"mosquitto-{number}"
            home.mkdir()
            self.brokers.append(Mosquitto(home))
        self.manager = ManagerProcess(
            directory,
            HOLDFAST_TOPOLOGY__CORE_ANN_INTERVAL="1s",
            HOLDFAST_TOPOLOGY__BEACON_INTERVAL="1s",
            HOLDFAST_TOPOLOGY__REDUNDANCY="2",
        )

    def start(self) -> None:
        for each in (*self.brokers, self.manager):
            each.start()

    def stop(self) -> None:
        for each in (*self.brokers, self.manager):
            each.kill()

    def environment(self, number: int) -> dict[str, str]:
        port = self.brokers[number].port
        return {
            "TOPOLOGY_MANAGER_URL": self.manager.url,
            "ADVERTISED_LISTENER": f"tcp://127.0.0.1:{port}",
            "MOSQUITTO_PORT": str(port),
        }


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    started = Site(tmp_path)
    try:
        started.start()
        yield started
    finally:
        started.stop()
    assert "Traceback" not in started.manager.log_text(), started.manager.log_text()[-6000:]


class FederatorProcess(Broker):
    def __init__(self, site: Site, number: int) -> None:
        directory = site.brokers[number].directory / "federator"
        directory.mkdir()
        super().__init__(directory)
        self._environment = site.environment(number)
        self._ready_lines = 0

    def command(self) -> list[str]:
        settings = [f"{name}={value}" for name, value in self._environment.items()]
        return ["env", *settings, sys.executable, "-m", "bench.paper"]

    def launch(self) -> None:
        self._ready_lines = self._connected()
        super().launch()

    def ready(self) -> bool:
        return self._connected() > self._ready_lines

    def _connected(self) -> int:
        return self.log_text().count("federation_edge_connected")


class User:
    """A client of one broker, which subscribes, with beacons, and publishes."""

    def __init__(self, broker: Broker) -> None:
        self.client = Client("127.0.0.1", broker.port, reconnect=Reconnect(delay_max_s=0.2))
        self.received: Counter[bytes] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    async def subscribe(self) -> None:
        await self.client.subscribe((TOPIC, 2))
        self._tasks = [asyncio.create_task(self._beacon()), asyncio.create_task(self._receive())]

    async def publish(self, payload: bytes, retain: bool = False) -> None:
        await self.client.publish(TOPIC, payload, qos=2, retain=retain)

    async def _beacon(self) -> None:
        while True:
            await self.client.publish(BEACON, b"", qos=0)
            await asyncio.sleep(BEACON_S)

    async def _receive(self) -> None:
        async for message in self.client.messages():
            self.received[message.payload] += 1

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert not [each for each in results if isinstance(each, Exception)], results
        self.client.abort()


@asynccontextmanager
async def users(site: Site) -> AsyncIterator[list[User]]:
    """The first publishes and listens, without a beacon, the others subscribe."""
    made = [User(broker) for broker in site.brokers]
    try:
        for user in made:
            await user.client.connect()
        await made[0].client.subscribe((TOPIC, 2))
        made[0]._tasks = [asyncio.create_task(made[0]._receive())]
        for user in made[1:]:
            await user.subscribe()
        yield made
    finally:
        for user in made:
            await user.stop()


@asynccontextmanager
async def federators(site: Site) -> AsyncIterator[list[PaperFederator]]:
    made = [PaperFederator(PaperSettings.from_environment(site.environment(n))) for n in range(3)]
    try:
        for federator in made:
            await federator.start()
            # Ids are given in the order of joining.
            await until(partial(has_id, federator), "joined")
        yield made
    finally:
        for federator in made:
            await federator.stop()


def has_id(federator: PaperFederator) -> bool:
    return federator.status()["id"] is not None


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.05)


_numbers = iter(range(1_000_000))


async def until_delivered(publisher: User, receivers: list[User], count: int = 1) -> None:
    """Publish until each has had that many of what is published from now on: what is published
    while a mesh forms is lost."""
    sent: set[bytes] = set()
    deadline = time.monotonic() + WAIT_S
    while any(len(sent & user.received.keys()) < count for user in receivers):
        missing = [len(sent & user.received.keys()) for user in receivers]
        assert time.monotonic() < deadline, f"of {len(sent)} only {missing} are delivered"
        payload = b"%d" % next(_numbers)
        sent.add(payload)
        await publisher.publish(payload)
        await asyncio.sleep(0.01)


def root_of(federator: PaperFederator) -> int | None:
    view = federator.view("plant/temperature")
    return None if view is None else view.root


def neighbours(federator: PaperFederator) -> dict[int, bool]:
    """Of each, whether it is connected."""
    listed: Any = federator.status()["neighbours"]
    return {each["id"]: each["connected"] for each in listed}


def linked(made: list[PaperFederator]) -> bool:
    return all(list(neighbours(each).values()) == [True, True] for each in made)


def test_publications_reach_subscribers_of_other_brokers_once(site: Site) -> None:
    async def test() -> None:
        async with federators(site) as made, users(site) as (publisher, *subscribers):
            await until(lambda: linked(made), "all linked")
            await until_delivered(publisher, subscribers, 100)
            # Its own broker's: as it published them, and not once more from the federation.
            await until_delivered(publisher, [publisher])
            for user in (publisher, *subscribers):
                assert set(user.received.values()) == {1}
            # The lower one of those that subscribers are at, if both found no root.
            await until(
                lambda: {root_of(each) for each in made} in ({1}, {2}), "agreed about the root"
            )
            assert json.loads(json.dumps(made[0].status()))["neighbours"]

            # Any client may publish on the federators' topics: it is refused and counted.
            for topic in ("core_ann/x", "memb_ann/x", "routing/x", "topology_ann", "beacon/"):
                await publisher.client.publish(f"federator/{topic}", b'{"CoreId": null', qos=1)
            refused: Any = made[0].status()["refused"]
            await until(lambda: made[0].status()["refused"] != refused, "refused")
            await until_delivered(publisher, subscribers)

    asyncio.run(test())


def test_a_federator_is_killed_and_restarted(site: Site) -> None:
    async def test() -> None:
        processes = [FederatorProcess(site, number) for number in range(3)]
        try:
            for process in processes:
                await asyncio.to_thread(process.start)
            async with users(site) as (publisher, *subscribers):
                await publisher.publish(b"retained", retain=True)
                await until_delivered(publisher, subscribers, 20)

                # A subscriber's; the others go on.
                processes[1].kill()
                await until_delivered(publisher, [subscribers[1]], 20)
                await asyncio.to_thread(processes[1].start)
                await until_delivered(publisher, subscribers, 20)

                # The publisher's: what it numbers anew is not taken for what it said before, and
                # what is retained at its broker is no publication.
                processes[0].kill()
                await asyncio.to_thread(processes[0].start)
                await until_delivered(publisher, subscribers, 20)
                assert all(user.received[b"retained"] <= 1 for user in subscribers)
                assert await asyncio.to_thread(processes[2].stop) == 0
        finally:
            for process in processes:
                process.kill()
        for process in processes:
            assert "Traceback" not in process.log_text(), process.log_text()[-6000:]

    asyncio.run(test())


def test_a_broker_is_killed_and_restarted(site: Site) -> None:
    """The manager removes its member, which its federator finds out when the broker is back; it
    subscribes again, and is a member with another id."""

    async def test() -> None:
        async with federators(site) as made, users(site) as (publisher, *subscribers):
            await until(lambda: linked(made), "all linked")
            await until_delivered(publisher, subscribers)
            site.brokers[1].kill()
            await until(
                lambda: list(neighbours(made[0])) == [2] and list(neighbours(made[2])) == [0],
                "the dead broker's member removed",
            )
            await until_delivered(publisher, [subscribers[1]], 20)
            await asyncio.to_thread(site.brokers[1].start)
            await until(lambda: made[1].status()["id"] == 3, "joined again")
            await until(lambda: linked(made), "all linked again")
            await until_delivered(publisher, subscribers, 20)

    asyncio.run(test())


def acl_of_the_documentation() -> str:
    text = (Path(__file__).parents[2] / "docs" / "federation-paper.md").read_text()
    return text.partition("```\npattern ")[2].partition("```")[0]


def test_clients_that_are_no_federators_are_kept_out(tmp_path: Path) -> None:
    """With the documented list of permissions; and without a manager."""
    acl = tmp_path / "acl"
    acl.write_text("pattern " + acl_of_the_documentation())
    brokers = []
    for number in range(2):
        home = tmp_path / str(number)
        home.mkdir()
        brokers.append(Mosquitto(home, f"acl_file {acl}"))

    async def test() -> None:
        made = [
            PaperFederator(
                PaperSettings(
                    broker=f"tcp://127.0.0.1:{own.port}",
                    id=number,
                    neighbours={1 - number: f"tcp://127.0.0.1:{other.port}"},
                    core_ann_interval_s=1.0,
                    beacon_interval_s=1.0,
                    username="federator",
                )
            )
            for number, (own, other) in enumerate((brokers, brokers[::-1]))
        ]
        publisher, subscriber = (User(broker) for broker in brokers)
        try:
            for broker in brokers:
                broker.start()
            for federator in made:
                await federator.start()
            for user in (publisher, subscriber):
                await user.client.connect()
            await subscriber.subscribe()
            await until_delivered(publisher, [subscriber])
            forged = b'{"CoreId":0,"SenderId":0,"Seqn":9,"Dist":0}'
            with pytest.raises(PublishRefused):
                await publisher.client.publish(
                    "federator/core_ann/plant/temperature", forged, qos=1
                )
            await until_delivered(publisher, [subscriber], 20)
            assert [each.status()["refused"] for each in made][1] == {}
        finally:
            for user in (publisher, subscriber):
                await user.stop()
            for federator in made:
                await federator.stop()
            for broker in brokers:
                broker.kill()

    asyncio.run(test())


def test_the_manager_is_away_and_messages_are_not(site: Site) -> None:
    async def test() -> None:
        async with federators(site) as made, users(site) as (publisher, *subscribers):
            await until(lambda: linked(made), "all linked")
            await until_delivered(publisher, subscribers)
            site.manager.kill()
            # The own broker's return makes a federator ask: nobody answers.
            made[1]._check.set()
            await until_delivered(publisher, subscribers, 50)
            await asyncio.to_thread(site.manager.start)
            assert linked(made)

    asyncio.run(test())
