"""Whole members in one event loop: brokers, their federators, and what becomes of these."""

import asyncio
from pathlib import Path

import pytest

from holdfast.broker.config import NodeConfig
from holdfast.client.client import Client
from holdfast.config.federation import Federation
from holdfast.federation.sidecar.federator import FederatorError
from holdfast.federation.sidecar.store.identity import IN_A_BROKER as DIRECTORY
from holdfast.federation.sidecar.store.identity import IdentityFile
from holdfast.protocol.mqtt.packets import SubscriptionRequest
from holdfast.server.federation import BrokerFederation
from holdfast.storage.files.layout import Manifest
from tests.support.broker_in_process import LoopBroker, loop_broker
from tests.support.peer_mesh import until
from tests.support.ports import free_port


class Site:
    def __init__(self, broker: LoopBroker, **settings: object) -> None:
        self.broker = broker
        self.federation_port = free_port()
        table = Federation(
            listen=f"127.0.0.1:{self.federation_port}",
            degree=0,
            hello_s=0.2,
            **settings,  # type: ignore[arg-type]
        )
        manifest = Manifest("n1", 4, "2026-01-01T00:00:00+00:00")
        self.federation = BrokerFederation(table, broker.broker, broker.directory, manifest)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.federation_port}"

    def client(self, name: str) -> Client:
        return Client("127.0.0.1", self.broker.port, client_id=name)

    def sends(self, filter: str) -> bool:
        edge = self.federation.status().get("edge")
        return isinstance(edge, dict) and filter in edge["export_filters"]


@pytest.mark.parametrize("memory", [False, True])
def test_two_members_in_one_loop(tmp_path: Path, memory: bool) -> None:
    config = NodeConfig(partitions=4, sys_interval_s=0, memory_durability=memory)

    async def main() -> None:
        async with (
            loop_broker(tmp_path / "a", config) as one,
            loop_broker(tmp_path / "b", config) as other,
        ):
            a = Site(one)
            b = Site(other, peers=[a.address])
            await a.federation.start()
            await b.federation.start()
            async with b.client("s") as subscriber, a.client("p") as publisher:
                await subscriber.subscribe(SubscriptionRequest("x/#", 2))
                await until(lambda: a.sends("x/#"))
                for qos in range(3):
                    await publisher.publish("x/y", b"%d" % qos, qos=qos)
                found = [await subscriber.receive() for _ in range(3)]
                assert sorted((m.payload, m.qos) for m in found if m) == [
                    (b"0", 0),
                    (b"1", 1),
                    (b"2", 2),
                ]
                mesh = a.federation.mesh("x/y")
                assert mesh["members"] == [b.federation.status()["id"]]
                values = a.federation.sys_values()
                assert (values["federation/members"], values["federation/links"]) == ("2", "1")
            await b.federation.stop()
            await a.federation.stop()
            assert a.federation.mesh("x/y") == {}
            assert a.federation.sys_values() == {"federation/running": "0"}

    asyncio.run(main())


def test_a_directory_in_use_is_told_or_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        holder = IdentityFile(tmp_path / DIRECTORY)
        async with loop_broker(tmp_path) as broker:
            holder.begin()
            site = Site(broker)
            with pytest.raises(FederatorError, match="in use by another process"):
                await site.federation.start()
            site.federation.start_soon()
            await until(lambda: "in use" in site.federation.failure)
            assert site.federation.status()["running"] is False
            # Clients are served meanwhile.
            async with site.client("c") as client:
                await client.publish("t", b"1", qos=1)
            holder.release()
            await until(lambda: site.federation.status()["running"])
            assert site.federation.failure == ""
            await site.federation.stop()

    asyncio.run(main())


def test_a_federator_that_fails_begins_anew_and_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with loop_broker(tmp_path / "a") as one, loop_broker(tmp_path / "b") as other:
            a = Site(one)
            b = Site(other, peers=[a.address])
            await a.federation.start()
            await b.federation.start()
            async with b.client("s") as subscriber, a.client("p") as publisher:
                await subscriber.subscribe(SubscriptionRequest("x", 1))
                await until(lambda: a.sends("x"))
                before = a.federation.federator
                assert before is not None
                before._fail("the test says so")
                await until(lambda: a.federation.federator is None)
                for number in range(20):
                    await publisher.publish("x", b"%d" % number, qos=1)
                for number in range(20):
                    message = await subscriber.receive()
                    assert message is not None
                    assert message.payload == b"%d" % number
                after = a.federation.federator
                assert after is not None
                assert (after.node, after.epoch) == (before.node, before.epoch + 1)
                assert a.federation.restarts == 1
            await b.federation.stop()
            await a.federation.stop()

    asyncio.run(main())
