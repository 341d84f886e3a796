"""Whole members in one event loop: brokers, their federators, and what becomes of these."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, PropertyMock, patch

import pytest

from holdfast.client.client import Client
from holdfast.config.federation import Federation
from holdfast.io.event_loop.failures import stop_on_unexpected
from holdfast.log.files.layout import Manifest
from holdfast.node.config import NodeConfig
from holdfast.protocol.mqtt.packets import SubscriptionRequest
from holdfast_federation.core.effects import Message
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.routing.link_health import LinkTable
from holdfast_federation.sidecar.federator import Federator, FederatorError
from holdfast_federation.sidecar.in_broker import BrokerFederation
from holdfast_federation.sidecar.store.identity import IN_A_BROKER as DIRECTORY
from holdfast_federation.sidecar.store.identity import IdentityFile
from tests.support.broker_in_process import LoopBroker, loop_broker
from tests.support.peer_mesh import until
from tests.support.ports import free_port
from tests.unit.io.event_loop.test_failures import in_loop


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
        self.federation = BrokerFederation(table, broker.broker, broker.directory, lambda: manifest)

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
        async with (
            loop_broker(tmp_path / "a") as one,
            loop_broker(tmp_path / "b") as other,
        ):
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


@in_loop
async def test_a_member_in_a_wrong_state_begins_again_and_the_broker_goes_on(
    tmp_path: Path,
) -> None:
    """A confirmation finds fewer bytes in custody than the confirmed message has."""
    async with (
        loop_broker(tmp_path / "a") as one,
        loop_broker(tmp_path / "b") as other,
    ):
        found: list[BaseException] = []
        stop_on_unexpected(asyncio.get_running_loop(), found.append)
        a = Site(one)
        b = Site(other, peers=[a.address])
        await a.federation.start()
        await b.federation.start()
        async with b.client("s") as subscriber, a.client("p") as publisher:
            await subscriber.subscribe(SubscriptionRequest("x", 1))
            await until(lambda: a.sends("x"))
            federator = a.federation.federator
            assert federator is not None
            federator.member.custody.bytes -= 1
            await publisher.publish("x", b"0", qos=1)
            await until(lambda: a.federation.restarts)
            failure = str(await federator.failed())
            assert "a frame of" in failure
            assert "fewer bytes are in custody than none" in failure
            for number in range(1, 20):
                await publisher.publish("x", b"%d" % number, qos=1)
            for number in range(20):
                message = await subscriber.receive()
                assert message is not None
                assert message.payload == b"%d" % number
        assert found == []
        await b.federation.stop()
        await a.federation.stop()


PEER = b"p" * 16
INPUTS: dict[str, Callable[[Federator], None]] = {
    "all_stored": lambda federator: federator.on_stored([]),
    "broker_has_retained": lambda federator: federator.edge_up(),
    "desired_topology": lambda federator: federator.set_desired({}),
    "frame": lambda federator: federator.link_frame(PEER, b""),
    "handle_timers": lambda federator: federator._ring(),
    "link_busy": lambda federator: federator.link_busy(PEER, True),
    "link_down": lambda federator: federator.link_down(PEER),
    "link_up": lambda federator: federator.link_up(PEER),
    "local_interest": lambda federator: federator.change_interest(["y"], []),
    "local_publish": lambda federator: federator.publish(Message("x", b"", 1), NotImplemented),
    "note_received": lambda federator: federator.link_stirred(PEER),
    "memory": lambda federator: federator._noticing._attempt(federator._noticing._remember),  # type: ignore[union-attr]
    "remote_version": lambda federator: federator._flush(),
    "timer": lambda federator: federator._flush(),
}
"""Each method of a member that the federator calls, and what makes it do so."""


@pytest.mark.parametrize("name", INPUTS)
@in_loop
async def test_each_input_that_breaks_an_invariant_stops_the_member(
    tmp_path: Path, name: str
) -> None:
    """Nothing is done of what it concluded, and `done` of a message is not called."""
    async with loop_broker(tmp_path) as broker:
        found: list[BaseException] = []
        stop_on_unexpected(asyncio.get_running_loop(), found.append)
        site = Site(broker)
        async with site.client("c") as client:
            await client.publish("x", b"1", qos=1, retain=True)
            await site.federation.start()
            federator = site.federation.federator
            assert federator is not None
            planted = PropertyMock if name == "remote_version" else Mock
            target = LinkTable if name == "note_received" else FederationMember
            with (
                patch.object(target, name, planted(side_effect=AssertionError("planted"))),
                patch.object(LinkTable, "__contains__", Mock(return_value=True)),
            ):
                INPUTS[name](federator)
                failure = str(await federator.failed())
                assert "made this member fail: AssertionError('planted')" in failure
                assert not federator._effects
                # What comes until it is stopped finds it so.
                for cause in INPUTS.values():
                    cause(federator)
            await client.publish("x", b"2", qos=1)
        await site.federation.stop()
        assert found == []
