"""The edge inside a broker: the broker and its clients are real, a test plays the federation."""

import asyncio
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.log.journal.segment import WriteGroup
from holdfast.node import federation_session as federating
from holdfast.node.publish.admission import DISK_FULL, Admission
from holdfast.node.refusal import Rejection
from holdfast.protocol.mqtt.packets import PUBLISH, Properties
from holdfast.protocol.mqtt.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MESSAGE_EXPIRY_INTERVAL,
    RESPONSE_TOPIC,
    TOPIC_ALIAS,
    USER_PROPERTY,
    decode_block,
    encode_block,
)
from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.edge_broker.origin_offset import (
    LogPlace,
    offset_in,
    with_offset,
    without_offset,
)
from tests.support.broker_in_process import LoopBroker, loop_broker
from tests.support.edge_site import LOG, OTHER, OURS, Site, run
from tests.support.peer_mesh import until

# Out


def test_only_what_is_wanted_and_may_leave_goes_out(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.start(exports=["plant/#", "$SYS/#"])
        await site.want("plant/+/t", "office/#", "#", "$SYS/#", "federator/#")
        async with site.client("c") as client:
            for topic in ("plant/1/t", "office/x", "federator/core_ann/x", "plant/2/x", "plant"):
                await client.publish(topic, topic, qos=1)
        await until(lambda: len(site.host.published) == 3)
        assert [each.topic for each in site.host.published] == ["plant/1/t", "plant/2/x", "plant"]

    run(tmp_path, scenario)


def test_quality_flag_and_properties_go_out_whole(tmp_path: Path) -> None:
    properties: Properties = {
        CONTENT_TYPE: "text/plain",
        RESPONSE_TOPIC: "answers",
        CORRELATION_DATA: b"\x26\x00\x08hf-place",
        USER_PROPERTY: [("a", "1"), ("hf-place", "forged"), ("b", "2")],
        MESSAGE_EXPIRY_INTERVAL: 100,
    }

    async def scenario(site: Site) -> None:
        await site.start()
        await site.want("#")
        async with site.client("c") as client:
            for qos in range(3):
                await client.publish("t", b"%d" % qos, qos=qos, retain=True, properties=properties)
        await until(lambda: len(site.host.published) == 3)
        for qos, message in enumerate(site.host.published):
            assert (message.qos, message.payload, message.is_retained) == (qos, b"%d" % qos, True)
            assert message.expiry_s is not None
            assert 99 <= message.expiry_s <= 100
            place = offset_in(message.properties)
            assert (place is None) == (qos == 0)
            if place is not None:
                assert (place.node, place.log) == (OURS, LOG)
            block = without_offset(message.properties)
            found = decode_block(block, 0, len(block), PUBLISH)
            assert found == {
                CONTENT_TYPE: "text/plain",
                RESPONSE_TOPIC: "answers",
                CORRELATION_DATA: b"\x26\x00\x08hf-place",
                USER_PROPERTY: [("a", "1"), ("b", "2")],
            }

    run(tmp_path, scenario)


def test_a_session_that_is_taken_away_gives_no_more(tmp_path: Path) -> None:
    """Another node takes it over while messages for the edge are under way within this process."""

    async def scenario(site: Site) -> None:
        await site.start()
        await site.want("#")
        edge, state = site.edge, site.loop_broker.broker.node.state
        with patch.object(edge, "_schedule"):
            async with site.client("c") as client:
                for number in range(5):
                    await client.publish("t", b"%d" % number, qos=1)
            connection = edge._connection
            assert connection is not None
            assert connection.session is not None
            assert len(connection.session.inflight) == 5
            site.loop_broker.broker.touch()
            federating.disconnect(state, connection)
        assert connection.session is None
        edge._run()
        assert site.host.published == []
        await until(lambda: edge.has_lost_session)

    run(tmp_path, scenario)


def test_places_in_the_log_are_told_and_stay_the_same_after_a_crash(tmp_path: Path) -> None:
    """What was handed over and not confirmed comes again, under the same place, in order."""

    async def main() -> None:
        broker = LoopBroker(tmp_path)
        await broker.start()
        site = await Site(broker).start()
        await site.want("#")
        site.host.takes = False
        async with site.client("c") as client:
            for number in range(20):
                await client.publish(f"t/{number % 3}", b"%d" % number, qos=1 + number % 2)
        await until(lambda: len(site.host.published) == 20)
        before = {each.payload: offset_in(each.properties) for each in site.host.published}
        assert len(set(before.values())) == 20
        # The first of them is in custody, and the log knows; of the others it knows nothing.
        await broker.broker.drain_journal()
        journal = broker.broker.node.state.journal
        written = journal.sequence
        site.host.waiting[0]()
        await until(lambda: journal.sequence > written)
        await broker.broker.drain_journal()
        await broker.crash()
        async with loop_broker(tmp_path) as again:
            site = await Site(again).start()
            await until(lambda: len(site.host.published) >= 19)
            assert {each.payload: offset_in(each.properties) for each in site.host.published} == {
                payload: place for payload, place in before.items() if payload != b"0"
            }
            for topic in range(3):
                numbers = [int(each) for each in site.host.payloads(f"t/{topic}")]
                assert numbers == sorted(numbers)
            await site.edge.stop()

    asyncio.run(main())


def test_what_the_federation_replaced_before_the_start_is_told(tmp_path: Path) -> None:
    """Of a removal nothing is left: a publication from before the start that the broker retains
    nothing of may have met one. A client's own removal is handed over behind it."""

    async def main() -> None:
        async with loop_broker(tmp_path) as broker:
            site = await Site(broker).start()
            site.host.takes = False
            await site.want("#")
            async with site.client("c") as client:
                for topic in ("removed", "brought", "kept"):
                    await client.publish(topic, "x", qos=1, retain=True)
            await until(lambda: len(site.host.published) == 3)
            assert not any(each.is_replaced for each in site.host.published)
            for topic, payload in (("removed", b""), ("brought", b"y")):
                id = MessageId(OTHER, 1, 1)
                message = Message(topic, payload, 1, True)
                site.edge.retain(id, message, lambda: site.done.append(b"done"))
            await until(lambda: len(site.done) == 2)
            await site.edge.stop()
        async with loop_broker(tmp_path) as broker:
            again = await Site(broker).start()
            await again.want("#")
            await until(lambda: len(again.host.published) == 3)
            async with again.client("c") as client:
                await client.publish("new", "x", qos=1, retain=True)
                await client.publish("new", "", qos=1, retain=True)
            await until(lambda: len(again.host.published) == 5)
            found = {(one.topic, one.payload): one.is_replaced for one in again.host.published}
            assert found == {
                ("removed", b"x"): True,
                ("brought", b"x"): True,
                ("kept", b"x"): False,
                ("new", b"x"): False,
                ("new", b""): False,
            }
            await again.edge.stop()

    asyncio.run(main())


def test_a_federation_without_room_closes_the_window_and_loses_nothing(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.start()
        await site.want("t/#")
        site.host.takes = False
        async with site.client("c") as client:
            futures = [
                await client.submit(f"t/{n % 5}", b"%d" % n, qos=1, properties=None)
                for n in range(3000)
            ]
            await asyncio.gather(*futures)
            window = site.loop_broker.config.inflight_max
            await until(lambda: len(site.host.published) == window)
            # What is wanted changes meanwhile: nothing that waits is given up for that.
            site.edge.set_wanted_filters(frozenset(["#"]))
            await client.publish("other", b"last", qos=1)
            site.host.takes = True
            while site.host.waiting:
                site.host.waiting.pop(0)()
            await until(lambda: len(site.host.published) >= 3001)
        for topic in range(5):
            mine = [b"%d" % n for n in range(3000) if n % 5 == topic]
            assert site.host.payloads(f"t/{topic}") == mine
        assert site.host.payloads("other") == [b"last"]
        session = site.loop_broker.broker.node.state.sessions["$federation"]
        await until(lambda: set(session.subscriptions) == {"#"})

    run(tmp_path, scenario)


# In


def test_what_comes_in_reaches_clients_whole_and_never_goes_out(tmp_path: Path) -> None:
    fields: Properties = {CONTENT_TYPE: "x", USER_PROPERTY: [("a", "1"), ("hf-seq", "p:1:1")]}

    async def scenario(site: Site) -> None:
        await site.start()
        await site.want("#")
        async with site.client("s") as subscriber:
            await subscriber.subscribe(("a/#", 2))
            for qos in range(3):
                site.deliver(
                    "a/b", b"%d" % qos, qos, qos + 1, properties=encode_block(fields), expiry_s=9.5
                )
            for qos in range(3):
                message = await subscriber.receive()
                assert message is not None
                assert (message.payload, message.qos) == (b"%d" % qos, qos)
                expiry_s = message.properties.pop(MESSAGE_EXPIRY_INTERVAL)
                assert expiry_s in (9, 10)
                assert message.properties == fields
            await until(lambda: len(site.done) == 3)
        async with site.client("p") as client:
            await client.publish("a/b", b"mine", qos=1)
        await until(lambda: site.host.payloads() == [b"mine"])

    run(tmp_path, scenario)


def test_a_place_in_the_log_of_its_origin_counts_once_under_any_id(tmp_path: Path) -> None:
    """An origin that crashed hands over again what it had handed over, with new ids."""

    def marked(offset: int, log: str = "l", node: bytes = OTHER) -> bytes:
        return with_offset(b"", LogPlace(node, log, 3, offset))

    async def scenario(site: Site) -> None:
        await site.start()
        async with site.client("s") as subscriber:
            await subscriber.subscribe(("a", 2))
            site.deliver("a", b"1", 2, 1, properties=marked(7))
            site.deliver("a", b"2", 1, 2, properties=marked(8))
            site.deliver("a", b"1", 2, 1, epoch=2, properties=marked(7))
            site.deliver("a", b"2", 1, 2, epoch=2, properties=marked(8))
            site.deliver("a", b"3", 2, 3, epoch=2, properties=marked(9))
            # Another log begins anew; another node's place is no place of this origin.
            site.deliver("a", b"4", 2, 4, epoch=2, properties=marked(0, "m"))
            site.deliver("a", b"5", 2, 5, epoch=2, properties=marked(1, node=OURS))
            site.deliver("a", b"6", 2, 6, epoch=2, properties=marked(1, node=OURS))
            for payload in (b"1", b"2", b"3", b"4", b"5", b"6"):
                message = await subscriber.receive()
                assert message is not None
                assert message.payload == payload
                assert (USER_PROPERTY in message.properties) == (payload in b"56")
            await until(lambda: len(site.done) == 8)
        stats = site.loop_broker.broker.node.state.stats
        assert stats.producer_duplicates == 2

    run(tmp_path, scenario)


def test_what_was_done_is_durable_and_what_was_not_comes_again(tmp_path: Path) -> None:
    async def main() -> None:
        broker = LoopBroker(tmp_path)
        await broker.start()
        site = await Site(broker).start()
        for place in range(1, 51):
            site.deliver(f"t/{place % 3}", b"%d" % place, 1 + place % 2, place)
        await until(lambda: len(site.done) >= 1)
        done = list(site.done)
        await broker.crash()
        async with loop_broker(tmp_path) as again:
            site = await Site(again).start()
            assert set(done) <= set(_stored(again))
            for place in range(1, 51):
                site.deliver(f"t/{place % 3}", b"%d" % place, 1 + place % 2, place)
            await until(lambda: len(site.done) == 50)
            payloads = _stored(again)
            assert len(payloads) == len(set(payloads)) == 50
            await site.edge.stop()

    asyncio.run(main())


def test_what_is_refused_later_is_stored_first_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader of the partition has no room, which the edge does not know."""

    async def scenario(site: Site) -> None:
        await site.start()
        refused = []

        def refuse(self: Admission, tail: object, partition: int) -> Rejection:
            refused.append(partition)
            return DISK_FULL

        with monkeypatch.context() as patch:
            patch.setattr(Admission, "_refusal", refuse)
            for place in range(1, 21):
                site.deliver("t", b"%d" % place, 1 + place % 2, place)
            await until(lambda: len(refused) > 2)
            assert site.done == []
            assert site.edge.status()["waiting_for_broker"] == 20
        site.deliver("t", b"21", 1, 21)
        await until(lambda: len(site.done) == 21)
        assert _stored(site.loop_broker) == [b"%d" % place for place in range(1, 22)]

    run(tmp_path, scenario)


def test_what_an_earlier_epoch_sends_late_is_done(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.start()
        site.deliver("t", b"new", 1, 1, epoch=2)
        site.deliver("t", b"old", 1, 9, epoch=1)
        await until(lambda: site.done == [b"new", b"old"])
        assert _stored(site.loop_broker) == [b"new"]

    run(tmp_path, scenario)


def test_a_repetition_is_done_when_the_first_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_at_the_disk(monkeypatch)

    async def scenario(site: Site) -> None:
        await site.start()
        gate.clear()
        site.deliver("t", b"first", 1, 1)
        site.deliver("t", b"again", 1, 1)
        waiting = site.loop_broker.broker.node.state.journal
        await until(lambda: sum(waiting.next_offset) > sum(waiting.high_watermark))
        await asyncio.sleep(0)
        assert site.done == []
        gate.set()
        await until(lambda: site.done == [b"first", b"again"])

    run(tmp_path, scenario)


def test_a_version_is_compared_with_those_on_their_way_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_at_the_disk(monkeypatch)

    async def scenario(site: Site) -> None:
        await site.start()
        state = site.loop_broker.broker.node.state
        done: list[str] = []

        def retain(payload: bytes, number: int) -> None:
            message = Message("t", payload, 1, True)
            name = payload.decode()
            site.edge.retain(MessageId(OTHER, 1, number), message, lambda: done.append(name))

        retain(b"a", 1)
        await until(lambda: done == ["a"])
        gate.clear()
        site.deliver("t", b"b", 1, 1, retain=True)
        journal = state.journal
        await until(lambda: sum(journal.next_offset) > sum(journal.high_watermark))
        retain(b"a", 2)
        gate.set()
        await until(lambda: len(done) == 2 and site.done == [b"b"])
        kept = state.retained.get("t")
        assert kept is not None
        assert kept.payload == b"a"

    run(tmp_path, scenario)


def test_the_federation_is_no_client_that_counts(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.start()
        await site.want("a", "b/#")
        state = site.loop_broker.broker.node.state
        config = state.config
        for is_running in (True, False):
            if not is_running:
                await site.edge.stop()
                recorded = state.recorded.sessions["$federation"]
                await until(lambda: not recorded.owner)  # noqa: B023
            assert (state.client_sessions(), state.cluster.away()) == (0, (0, 0, 0))
            most, config.sessions_max = config.sessions_max, 1
            assert state.cluster.has_room("c")
            config.sessions_max = most

    run(tmp_path, scenario)


def gate_at_the_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written while it is clear."""
    gate, write = threading.Event(), GroupWriter.write

    def write_later(writer: GroupWriter, group: WriteGroup) -> None:
        assert gate.wait(10)
        write(writer, group)

    monkeypatch.setattr(GroupWriter, "write", write_later)
    gate.set()
    return gate


def _places(broker: LoopBroker) -> list[tuple[int, int]]:
    watermarks = broker.broker.node.state.journal.high_watermark
    return [
        (partition, offset) for partition, end in enumerate(watermarks) for offset in range(end)
    ]


def _stored(broker: LoopBroker) -> list[bytes]:
    return [one.payload for one in map(_fetch(broker), _places(broker)) if one]


def _fetch(broker: LoopBroker):  # type: ignore[no-untyped-def]
    return lambda place: broker.broker.reader.fetch(*place)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("$SYS/x", b"", 1), "reserved topic"),
        (Message("federator/topology_ann", b"", 1), "reserved topic"),
        (Message("federator", b"", 0), "reserved topic"),
        (Message("other", b"", 1), "import filters"),
        (Message("in/+", b"", 1), "bad topic"),
        (Message("in/x", b"", 1, properties=b"\xff\xff\xff"), "bad properties"),
        (Message("in/x", b"", 1, properties=b"\x26\x00\x05ab"), "bad properties"),
        (Message("in/x", b"", 1, properties=encode_block({TOPIC_ALIAS: 3})), "bad properties"),
        (Message("in/x", b"", 1, properties=b"\x0b\x05"), "bad properties"),
        (Message("in/x", b"", 1, properties=b"\x02\x00\x00\x00\x05"), "bad properties"),
    ],
)
def test_what_may_not_come_in_is_refused_counted_and_done(
    tmp_path: Path, message: Message, reason: str
) -> None:
    async def scenario(site: Site) -> None:
        await site.start(imports=["in/#"])
        delivery = DeliverLocally(MessageId(OTHER, 1, 1), message, 1, 1)
        site.edge.deliver(delivery, lambda: site.done.append(b"x"))
        await until(lambda: site.done)
        assert site.edge.counts == {f"import refused: {reason}": 1}
        assert not any(map(_fetch(site.loop_broker), _places(site.loop_broker)))

    run(tmp_path, scenario)


def test_a_full_disk_holds_what_comes_in_back_in_order(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.start()
        state = site.loop_broker.broker.node.state
        async with site.client("s") as subscriber:
            await subscriber.subscribe(("a", 2))
            state.disk_full = True
            for place in range(1, 6):
                site.deliver("a", b"%d" % place, 1, place)
            await asyncio.sleep(0.3)
            assert site.done == []
            state.disk_full = False
            for place in range(1, 6):
                message = await subscriber.receive()
                assert message is not None
                assert message.payload == b"%d" % place

    run(tmp_path, scenario)
