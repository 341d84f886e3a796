"""The edge inside a broker: what its clients want, and what is retained."""

import asyncio
from pathlib import Path

from holdfast.protocol.mqtt.packets import Properties
from holdfast.protocol.mqtt.properties import CONTENT_TYPE, MESSAGE_EXPIRY_INTERVAL
from holdfast_federation.core.effects import Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.edge import RetainedFound
from holdfast_federation.sidecar.edge_broker.interest import importable
from tests.support.broker_in_process import loop_broker
from tests.support.edge_site import OTHER, Site, run
from tests.support.peer_mesh import until


def test_interest_is_the_subscription_table_with_sessions_that_are_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with loop_broker(tmp_path) as broker:
            site = Site(broker)
            away = site.client("away", session_expiry_s=1000)
            await away.connect()
            await away.subscribe("offline/+", "$share/g/work/#")
            await away.disconnect()
        async with loop_broker(tmp_path) as broker:
            site = Site(broker)
            await site.start()
            assert site.host.interest == {"offline/+": 1, "$share/g/work/#": 1}
            one, two = site.client("one"), site.client("two")
            await one.connect()
            await two.connect()
            await one.subscribe("a/#", "offline/+")
            await two.subscribe("a/#", "b")
            await until(lambda: site.host.interest.get("b") == 1)
            assert site.host.interest["a/#"] == 1
            await one.disconnect()
            await two.unsubscribe("b")
            await until(lambda: "b" not in site.host.interest)
            assert site.host.interest == {"offline/+": 1, "$share/g/work/#": 1, "a/#": 1}
            two.abort()
            await until(lambda: "a/#" not in site.host.interest)
            await site.edge.stop()

    asyncio.run(main())


def test_interest_is_told_as_far_as_it_may_come_in(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.start(imports=["in/#", "both/+/x"])
        async with site.client("c") as client:
            await client.subscribe("#", "in/a", "out/#", "$share/g/+/+/x")
            await until(lambda: site.host.interest)
            assert set(site.host.interest) == {
                "in/#",
                "both/+/x",
                "in/a",
                *importable("$share/g/+/+/x", ["in/#", "both/+/x"]),
            }
        await until(lambda: not site.host.interest)

    run(tmp_path, scenario)


# Retained


async def read(site: Site, *filters: str) -> list[Message]:
    """The retained messages, all of them."""
    done: list[RetainedFound | None] = []
    site.edge.read_retained(frozenset(filters), done.append)
    await until(lambda: done)
    [found] = done
    assert found is not None
    assert found.is_complete
    return found.messages


def test_what_is_retained_is_told_as_it_went_out(tmp_path: Path) -> None:
    properties: Properties = {CONTENT_TYPE: "x", MESSAGE_EXPIRY_INTERVAL: 100}

    async def scenario(site: Site) -> None:
        await site.start(exports=["out/#", "both/#"])
        await site.want("#")
        async with site.client("c") as client:
            for number in range(1000):
                await client.submit(f"out/{number}", b"%d" % number, qos=1, retain=True)
            await client.publish("both/x", b"x", qos=2, retain=True, properties=properties)
            await client.publish("stays/here", b"y", qos=1, retain=True)
        await until(lambda: len(site.host.published) == 1001)
        sent = {message.topic: message for message in site.host.published}
        found = await read(site, "#", "both/+")
        told = {message.topic: message for message in found}
        assert len(told) == len(found)
        assert told.keys() == sent.keys()
        for topic, message in told.items():
            assert (message.payload, message.qos, message.properties) == (
                sent[topic].payload,
                sent[topic].qos,
                sent[topic].properties,
            )
            assert message.delivered_id is None
            assert (message.expiry_s is None) == (topic != "both/x")

    run(tmp_path, scenario)


def test_what_is_retained_for_the_federation_is_no_publication_and_told_as_come_in(
    tmp_path: Path,
) -> None:
    async def scenario(site: Site) -> None:
        await site.start(imports=["a/#"])
        await site.want("#")
        for topic, payload in (("a/x", b"1"), ("elsewhere", b"2")):
            site.edge.retain(
                MessageId(OTHER, 1, 1),
                Message(topic, payload, 1, True),
                lambda payload=payload: site.done.append(payload),  # type: ignore[misc]
            )
        await until(lambda: sorted(site.done) == [b"1", b"2"])
        async with site.client("c") as client:
            await client.subscribe("#")
            message = await client.receive()
            assert message is not None
            assert (message.topic, message.payload, message.retain) == ("a/x", b"1", True)
        found = await read(site, "#")
        assert [(one.topic, one.delivered_id is None) for one in found] == [("a/x", False)]
        assert site.host.published == []
        assert site.edge.counts == {"retained": 1, "import refused: import filters": 1}

    run(tmp_path, scenario)
