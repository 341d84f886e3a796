"""The edge of a federator beside a Debian Mosquitto, over MQTT 5 and 3.1.1, and beside Holdfast.
The federation is scripted."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from holdfast.client import Client, Options, SubscriptionRequest
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.properties import encode_block
from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.edge import RetainedFound
from holdfast_federation.sidecar.edge_mqtt.edge import MqttEdge
from holdfast_federation.sidecar.edge_mqtt.interest_sources import SourceSettings
from holdfast_federation.sidecar.edge_mqtt.loop_marker import MARK
from holdfast_federation.sidecar.edge_mqtt.retained import RetainingMqttEdge, edge_for
from holdfast_federation.sidecar.edge_mqtt.settings import EdgeSettings
from holdfast_federation.sidecar.edge_mqtt.state import FILE, EdgeState
from tests.e2e.brokers import MOSQUITTO, Broker, Holdfast, Mosquitto
from tests.support.edge_host import WAIT_S, ScriptedHost, until

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
TIMEOUT_S = 110.0
LEVELS = pytest.mark.parametrize("level", [5, 4], ids=["mqtt5", "mqtt311"])
ORIGIN = b"O" * 16
LOG_LINES = (
    "log_dest topic\nlog_type subscribe\nlog_type unsubscribe\nlog_type notice\nlog_type warning"
)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    started = Mosquitto(tmp_path, LOG_LINES)
    started.start()
    yield started
    started.kill()


def settings_for(mosquitto: Broker, level: int = 5, **values: object) -> EdgeSettings:
    return EdgeSettings(
        servers=(f"mqtt://127.0.0.1:{mosquitto.port}",),
        directory=mosquitto.directory / "edge",
        level=level,
        wait_s=40.0,
        **values,  # type: ignore[arg-type]
    )


@asynccontextmanager
async def running(settings: EdgeSettings, host: ScriptedHost) -> AsyncIterator[MqttEdge]:
    edge = edge_for(settings)
    await edge.start(host)
    try:
        yield edge
    finally:
        await edge.stop()


async def wanting(edge: MqttEdge, host: ScriptedHost, *filters: str) -> None:
    """Until it is subscribed to."""
    edge.set_wanted_filters(frozenset(filters))
    await until(lambda: host.is_up, "the edge comes up")
    await until(
        lambda: edge.status()["is_settled"] is True, f"subscribed to {filters}: {edge.status()}"
    )


def user(mosquitto: Broker, level: int = 5, name: str = "") -> Client:
    return Client("127.0.0.1", mosquitto.port, options=Options(level=level, client_id=name))


def message_id(sequence: int) -> MessageId:
    return MessageId(ORIGIN, 1, sequence)


def delivery_of(sequence: int, message: Message) -> DeliverLocally:
    return DeliverLocally(message_id(sequence), message, sequence if message.qos else 0, 1)


async def deliver(edge: MqttEdge, message: Message, sequence: int) -> None:
    done = asyncio.Event()
    edge.deliver(delivery_of(sequence, message), done.set)
    async with asyncio.timeout(WAIT_S):
        await done.wait()


@LEVELS
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_exports_what_is_wanted_in_order(mosquitto: Mosquitto, level: int, qos: int) -> None:
    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto, level), host) as edge:
            await wanting(edge, host, "a/+/c", "x/#")
            async with user(mosquitto) as client:
                for number in range(300):
                    await client.publish(f"a/{number % 2}/c", b"%d" % number, qos=qos)
                await client.publish("a/b", b"not wanted", qos=qos)
                await client.publish("x", b"last", qos=qos)
            await until(lambda: len(host.published) == 301, "all exported")
            assert host.payloads() == [*(b"%d" % number for number in range(300)), b"last"]
            assert {message.qos for message in host.published} == {qos}

    run(test)


@LEVELS
def test_imports_in_order_and_does_not_take_them_back(mosquitto: Mosquitto, level: int) -> None:
    async def test() -> None:
        host = ScriptedHost()
        async with (
            running(settings_for(mosquitto, level), host) as edge,
            user(mosquitto) as client,
        ):
            await client.subscribe(("t/#", 2))
            await wanting(edge, host, "#")
            undone = set(range(1, 301))
            for number in range(1, 301):
                message = Message("t/x", b"%d" % number, 1 + number % 2)
                edge.deliver(delivery_of(number, message), partial(undone.remove, number))
            await until(lambda: not undone, "all delivered")
            await deliver(edge, Message("t/x", b"301", 0), 301)
            found = [await client.receive() for _ in range(301)]
            assert [one.payload for one in found if one] == [b"%d" % n for n in range(1, 302)]
            assert [one.qos for one in found if one] == [*(1 + n % 2 for n in range(1, 301)), 0]
            await client.publish("t/x", b"of a client", qos=1)
            await until(lambda: bool(host.published), "the client's message")
            assert host.payloads() == [b"of a client"]

    run(test)


def test_properties_and_retain_flag_travel_both_ways(mosquitto: Mosquitto) -> None:
    sent: pr.Properties = {
        pr.PAYLOAD_FORMAT_INDICATOR: 1,
        pr.CONTENT_TYPE: "text/plain",
        pr.RESPONSE_TOPIC: "answers",
        pr.CORRELATION_DATA: b"\0\1",
        pr.USER_PROPERTY: [("a", "1"), ("a", "2"), ("b", "ü")],
    }

    async def test() -> None:
        host = ScriptedHost()
        async with (
            running(settings_for(mosquitto), host) as edge,
            user(mosquitto) as client,
        ):
            await wanting(edge, host, "out/#")
            properties = {**sent, pr.MESSAGE_EXPIRY_INTERVAL: 100}
            await client.publish("out/1", b"x", qos=2, retain=True, properties=properties)
            await until(lambda: bool(host.published), "exported")
            exported = host.published[0]
            assert exported.properties == encode_block(sent)
            assert exported.is_retained
            assert exported.expiry_s is not None
            assert 90 < exported.expiry_s <= 100
            await client.subscribe(SubscriptionRequest("in/#", 2, False, True))
            back = Message("in/1", b"y", 1, True, exported.properties, 50.5)
            await deliver(edge, back, 1)
            imported = await client.receive()
            assert imported is not None
            assert imported.retain
            assert imported.properties.pop(pr.MESSAGE_EXPIRY_INTERVAL) == 51
            pairs = imported.properties.pop(pr.USER_PROPERTY)
            assert pairs == [("a", "1"), ("a", "2"), ("b", "ü"), (MARK, f"{ORIGIN.hex()}:1:1")]
            del sent[pr.USER_PROPERTY]
            assert imported.properties == sent

    run(test)


def test_what_carries_a_mark_never_leaves(mosquitto: Mosquitto) -> None:
    """As a bridge beside us would bring it back, or a client that copies properties."""

    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto), host) as edge, user(mosquitto) as client:
            await wanting(edge, host, "#")
            mark: pr.Properties = {pr.USER_PROPERTY: [(MARK, "anything")]}
            await client.publish("t", b"round", qos=1, properties=mark)
            await client.publish("t", b"new", qos=1)
            await until(lambda: bool(host.published), "exported")
            assert host.payloads() == [b"new"]
            assert counts(edge)["echo"] == 1

    run(test)


@LEVELS
def test_a_retained_message_of_before_is_no_publication(mosquitto: Mosquitto, level: int) -> None:
    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto, level), host) as edge, user(mosquitto) as client:
            for number in range(200):
                await client.publish(f"t/{number}", b"old", qos=1, retain=True)
            await wanting(edge, host, "other")
            await wanting(edge, host, "t/#", "other")
            await client.publish("t/1", b"new", qos=1, retain=True)
            await until(lambda: bool(host.published), "exported")
            assert [(one.payload, one.is_retained) for one in host.published] == [(b"new", True)]

    run(test)


def test_no_copies_while_wider_filters_replace_narrower_ones(mosquitto: Mosquitto) -> None:
    """Mosquitto sends one for each subscription that matches."""

    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto), host) as edge, user(mosquitto) as client:
            await wanting(edge, host, "a/b")
            count = 0

            async def publish_on() -> None:
                nonlocal count
                while True:
                    # Equal ones in pairs: they are to be told from copies.
                    await client.publish("a/b", b"%d" % (count // 2), qos=2)
                    count += 1

            publishing = asyncio.create_task(publish_on())
            for filters in (["a/+"], ["+/b", "a/+"], ["#"], ["a/b"], ["a/#", "a/b"]) * 4:
                await wanting(edge, host, *filters)
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            await client.publish("a/b", b"end", qos=2)
            await until(lambda: b"end" in host.payloads(), "the end")
            exported = [int(payload) for payload in host.payloads() if payload != b"end"]
            whole = [number // 2 for number in range(len(exported))]
            assert exported == whole
            assert len(exported) in (count, count + 1)
            assert counts(edge)["copy"] > 0

    run(test)


@LEVELS
def test_what_is_not_done_comes_again_and_what_is_done_does_not(
    mosquitto: Mosquitto, level: int
) -> None:
    """The connection is cut: the broker keeps the session."""

    async def test() -> None:
        host = ScriptedHost()
        async with (
            running(settings_for(mosquitto, level), host) as edge,
            user(mosquitto) as client,
        ):
            await wanting(edge, host, "t")
            host.holds = True
            for number in range(20):
                await client.publish("t", b"%d" % number, qos=1 + number % 2)
            await until(lambda: len(host.published) == 20, "all came")
            first, *rest = host.waiting
            first()
            # An acknowledgement leaves at the end of the turn.
            await asyncio.sleep(0)
            cut(edge)
            await until(lambda: len(host.downs) == 1, "down")
            for done in rest[:9]:
                done()
            await until(lambda: host.is_up, "up again")
            host.holds = False
            await client.publish("t", b"20", qos=2)
            for done in rest[9:]:
                done()
            await until(lambda: b"20" in host.payloads(), "the new one")
            assert host.payloads() == [b"%d" % number for number in range(21)]
            await until(lambda: edge.status()["waiting_for_custody"] == 0, "acknowledged")

    run(test)


def test_a_broker_that_sends_more_than_it_may(mosquitto: Mosquitto) -> None:
    """As Mosquitto 2.0.11 does when it has been asked for a small window."""

    async def test() -> None:
        host = ScriptedHost()
        host.holds = True
        settings = settings_for(mosquitto, window_messages=20)
        async with running(settings, host) as edge, user(mosquitto) as client:
            await wanting(edge, host, "t")
            for number in range(300):
                await client.submit("t", b"%d" % number, qos=1)

            def is_all_there() -> bool:
                host.release()
                return len(host.published) == 300

            await until(is_all_there, "all exported")
            assert set(host.payloads()) == {b"%d" % number for number in range(300)}

    run(test)


@LEVELS
def test_deliveries_survive_a_cut_once(mosquitto: Mosquitto, level: int) -> None:
    async def test() -> None:
        host = ScriptedHost()
        async with (
            running(settings_for(mosquitto, level, inflight_messages=10), host) as edge,
            user(mosquitto) as client,
        ):
            await client.subscribe(("t", 2))
            await wanting(edge, host, "other")
            undone = {number: Message("t", b"%d" % number, 2) for number in range(1, 201)}

            def give_all() -> None:
                for number, message in list(undone.items()):
                    edge.deliver(delivery_of(number, message), partial(done, number))

            def done(number: int) -> None:
                undone.pop(number)
                if number in (50, 120):
                    cut(edge)

            give_all()
            for times in (1, 2):
                await until(lambda n=times: len(host.downs) == n, "down")  # type: ignore[misc]
                await until(lambda: host.is_up, "up again")
                give_all()
            await until(lambda: not undone, "all done")
            found = [await client.receive() for _ in range(200)]
            assert [one.payload for one in found if one] == [b"%d" % n for n in range(1, 201)]
            await client.publish("t", b"end", qos=2)
            last = await client.receive()
            assert last is not None
            assert last.payload == b"end"

    run(test)


@LEVELS
def test_the_session_outlives_the_process(mosquitto: Mosquitto, level: int) -> None:
    """A second edge on the same directory gets what came meanwhile, and gives up what is no
    longer wanted. What the first had taken at QoS 2 and not released hides nothing."""

    async def test() -> None:
        settings = settings_for(mosquitto, level)
        first = ScriptedHost()
        async with running(settings, first) as edge:
            await wanting(edge, first, "t", "u/#")
            client_id = edge.client_id
        async with user(mosquitto) as client:
            for number in range(50):
                await client.publish("t", b"%d" % number, qos=1)
        second = ScriptedHost()
        async with running(settings, second) as edge, user(mosquitto) as client:
            assert edge.client_id == client_id
            await until(lambda: second.is_up, "up")
            assert not second.published
            await wanting(edge, second, "v", "t")
            await until(lambda: len(second.published) == 50, "what waited")
            await wanting(edge, second, "v")
            assert edge.status()["export_filters"] == ["v"]
            await client.publish("t", b"no more", qos=1)
            await client.publish("v", b"new", qos=1)
            await until(lambda: len(second.published) == 51, "the new filter")
            assert second.payloads() == [*(b"%d" % number for number in range(50)), b"new"]

    run(test)


@LEVELS
@pytest.mark.parametrize("has_lost_file", [False, True])
def test_nothing_is_acknowledged_before_the_host_reports(
    mosquitto: Mosquitto, level: int, has_lost_file: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker sends at once what waited for the session, and a whole life of the federator ends
    without a report of its host. Nothing is lost, whatever the state file says: the disk may have
    been full when the filter was to be saved."""

    async def test() -> None:
        settings = settings_for(mosquitto, level)
        first = ScriptedHost()
        async with running(settings, first) as edge:
            await wanting(edge, first, "t")
        async with user(mosquitto) as client:
            for number in range(50):
                await client.publish("t", b"%d" % number, qos=1 + number % 2)
        path = settings.directory / FILE
        if has_lost_file:
            path.write_bytes(msgspec.json.encode(EdgeState(json.loads(path.read_bytes())["token"])))
        silent = ScriptedHost()
        async with running(settings, silent) as edge:
            await until(lambda: silent.is_up, "it is up")
            # Behind all that waited, on the same connection.
            await until(lambda: edge.status()["waiting_for_interest"] == 50, "all have come")
            await until(lambda: "until it learns what other" in caplog.text, "a line says so")
        assert not silent.published
        last = ScriptedHost()
        async with running(settings, last) as edge:
            await wanting(edge, last, "t")
            await until(lambda: len(last.published) == 50, "all")
            assert sorted(last.payloads()) == sorted(b"%d" % number for number in range(50))

    run(test)


def test_interest_is_saved_before_it_is_reported(mosquitto: Mosquitto) -> None:
    """Else a crash would end interest by which other members have sent already. A statement is
    valid after a restart even if it was last saved long ago: renewals are not saved."""

    class Host(ScriptedHost):
        def change_interest(self, added: Iterable[str], removed: Iterable[str]) -> None:
            super().change_interest(added, removed)
            saved = msgspec.json.decode(path.read_bytes(), type=EdgeState).interest
            assert sorted(filter for _, _, filter, _ in saved) == sorted(self.interest)

    settings = settings_for(mosquitto, sources=SourceSettings(reads_log=False))
    path = settings.directory / FILE

    async def test() -> None:
        host = Host()
        async with running(settings, host), user(mosquitto) as client:

            async def are_stated(*filters: str) -> None:
                deadline = asyncio.get_running_loop().time() + WAIT_S
                while sorted(host.interest) != sorted(filters):
                    # It may not listen yet.
                    assert asyncio.get_running_loop().time() < deadline, host.interest
                    for filter in filters:
                        await client.publish(f"federator/beacon/{filter}", b"", qos=1)
                    await asyncio.sleep(0.05)

            await are_stated("a")
            await are_stated("a", "b")
        state = json.loads(path.read_bytes())
        path.write_text(json.dumps(state | {"written_at": state["written_at"] - 86_400}))
        again = Host()
        async with running(settings, again):
            assert sorted(again.interest) == ["a", "b"]

    run(test)


def test_a_broker_that_forgot_everything_is_subscribed_to_again(mosquitto: Mosquitto) -> None:
    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto), host) as edge:
            await wanting(edge, host, "t/#")
            mosquitto.kill()
            await until(lambda: not host.is_up, "down")
            mosquitto.start()
            await wanting(edge, host, "t/#")
            async with user(mosquitto) as client:
                await client.publish("t/1", b"x", qos=1)
            await until(lambda: host.payloads() == [b"x"], "exported")

    run(test)


def test_interest_of_every_source(mosquitto: Mosquitto) -> None:
    async def test() -> None:
        host = ScriptedHost()
        sources = SourceSettings(beacon_ttl_s=1.0)
        settings = settings_for(mosquitto, interest=("always/#",), sources=sources)
        async with running(settings, host) as edge, user(mosquitto, name="talker") as client:
            assert host.interest == ["always/#"]
            await wanting(edge, host, "other/#")
            await client.publish("federator/beacon/a/b", b"")
            await until(lambda: "a/b" in host.interest, "the beacon's topic")
            await client.publish("federator/interest", b'{"filters": ["c/+"], "ttl": 60}')
            await until(lambda: "c/+" in host.interest, "the word's filter")
            await client.subscribe(("d/#", 1), ("$share/g/e", 1))
            await until(lambda: {"d/#", "$share/g/e"} <= set(host.interest), "the log's filters")
            assert "other/#" not in host.interest
            assert not [one for one in host.interest if one.startswith(("federator", "$SYS"))]
            await client.unsubscribe("d/#")
            await until(lambda: "d/#" not in host.interest, "unsubscribed")
            await until(lambda: "a/b" not in host.interest, "the beacon has expired")
            await client.publish("federator/interest", b'{"filters": ["c/+"], "ttl": 0}')
            await until(lambda: "c/+" not in host.interest, "taken back")
        assert set(host.interest) == {"always/#", "$share/g/e"}

    run(test)


def test_garbage_on_control_topics_is_counted(mosquitto: Mosquitto) -> None:
    garbage = [
        b"", b"\xff\xfe", b"{", b"[]", b'{"filters": "x", "ttl": 1}',
        b'{"filters": ["a/#/b"], "ttl": 1}', b'{"filters": ["a"], "ttl": -1}',
        b'{"filters": ["a"], "ttl": 1e300}', b'{"filters": ["a"], "ttl": 1, "more": 1}',
        b'{"filters": [' + b'"a",' * 2000 + b'"a"], "ttl": 1}', b"x" * 100_000,
    ]  # fmt: skip

    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto), host) as edge, user(mosquitto) as client:
            await wanting(edge, host, "t")
            for payload in garbage:
                await client.publish("federator/interest", payload, qos=1)
            await client.publish(f"federator/edge/{edge.client_id}", b"fence 00", qos=1)
            await client.publish("federator/beacon/", b"")
            await client.publish("federator/interest", b'{"filters": ["good"], "ttl": 9}', qos=1)
            await until(lambda: "good" in host.interest, "the good one")
            assert counts(edge)["refused interest"] == len(garbage)
            assert counts(edge)["refused beacon"] == 1
            await client.publish("t", b"still here", qos=1)
            await until(lambda: host.payloads() == [b"still here"], "exported")

    run(test)


def test_reads_and_sets_what_is_retained(mosquitto: Mosquitto) -> None:
    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto), host) as edge, user(mosquitto) as client:
            assert isinstance(edge, RetainingMqttEdge)
            await wanting(edge, host, "other")
            for number in range(100):
                await client.publish(f"r/{number}", b"%d" % number, qos=1, retain=True)
            for number, payload in ((7, b"set"), (8, b"")):
                set_there = asyncio.Event()
                message = Message(f"r/{number}", payload, 1, True)
                edge.retain(message_id(number), message, set_there.set)
                async with asyncio.timeout(WAIT_S):
                    await set_there.wait()
            done: asyncio.Future[RetainedFound | None] = asyncio.get_running_loop().create_future()
            edge.read_retained(frozenset({"r/#", "r/+"}), done.set_result)
            found = await done
            assert found is not None
            messages = {message.topic: message for message in found.messages}
            assert len(messages) == 99
            assert messages["r/99"].payload == b"99"
            assert messages["r/99"].delivered_id is None
            assert messages["r/7"].payload == b"set"
            assert messages["r/7"].delivered_id == message_id(7)
            assert not host.published

    run(test)


@pytest.mark.parametrize("qualities", [(1,), (2,), (1, 2)])
def test_a_holdfast_broker_takes_repetitions_once(
    holdfast_broker: Holdfast, qualities: tuple[int, ...]
) -> None:
    """A federator that dies after the PUBACK and before it notes its position delivers again. What
    came with a publisher's own sequence keeps it under another name."""

    async def test() -> None:
        settings = settings_for(holdfast_broker)
        own: pr.Properties = {pr.USER_PROPERTY: [("hf-seq", "pump:9:9")]}
        async with user(holdfast_broker) as client:
            await client.subscribe(("t", 2))
            for begin in (1, 1, 11):
                host = ScriptedHost()
                async with running(settings, host) as edge:
                    await wanting(edge, host, "other")
                    for number in range(begin, begin + 20):
                        qos = qualities[number % len(qualities)]
                        message = Message("t", b"%d" % number, qos, properties=encode_block(own))
                        await deliver(edge, message, number)
            await client.publish("t", b"end")
            found: list[bytes] = []
            while b"end" not in found:
                message_there = await client.receive()
                assert message_there is not None
                found.append(message_there.payload)
                if message_there.payload == b"1":
                    pairs = message_there.properties[pr.USER_PROPERTY]
                    assert isinstance(pairs, list)
                    assert ("hf-seq-origin", "pump:9:9") in pairs
            assert found[:-1] == [b"%d" % number for number in range(1, 31)]

    run(test)


def counts(edge: MqttEdge) -> dict[str, int]:
    found = edge.status()["counts"]
    assert isinstance(found, dict)
    return found


def cut(edge: MqttEdge) -> None:
    """The socket of the connection that carries messages is gone; both sides keep the session."""
    client = edge._client
    assert client is not None
    assert client._transport is not None
    client._transport.abort()
