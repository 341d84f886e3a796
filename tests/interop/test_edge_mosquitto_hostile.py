"""What clients of a Mosquitto can do to the federator beside it: messages that Mosquitto takes and
passes on, and that are beyond what we read or send."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from paho.mqtt.properties import Properties

from holdfast_federation.sidecar.edge import RetainedFound
from holdfast_federation.sidecar.edge_mqtt.retained import RetainingMqttEdge
from tests.e2e.brokers import MOSQUITTO, Mosquitto
from tests.interop.paho_client import Paho, publish_props
from tests.interop.test_edge_mosquitto import counts, run, running, settings_for, user, wanting
from tests.support.edge_host import ScriptedHost, until
from tests.support.sidecars import Site

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")


def many_properties(count: int, size: int) -> Properties:
    return publish_props(UserProperty=[("n", "x" * size)] * count)


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    started = Mosquitto(tmp_path)
    started.start()
    yield started
    started.kill()


def publish(port: int, what: str, qos: int, retain: bool = False) -> None:
    """A message against the rules, or beyond our bounds."""
    with Paho(port, "hostile") as client:
        if what == "levels":
            client.publish("t" + "/x" * 200, b"poison", qos, retain)
        elif what == "pairs":
            client.publish("t", b"poison", qos, retain, many_properties(70_000, 1))
        else:
            client.publish("t", b"poison", qos, retain, publish_props(ResponseTopic=""))


@pytest.mark.parametrize(
    ("what", "qos"), [("levels", 0), ("levels", 1), ("levels", 2), ("pairs", 2), ("response", 1)]
)
def test_what_cannot_be_read_holds_nothing_up(mosquitto: Mosquitto, what: str, qos: int) -> None:
    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto), host) as edge:
            await wanting(edge, host, "#")

            def publish_all() -> None:
                with Paho(mosquitto.port, "user") as client:
                    client.publish("t", b"before", qos)
                    publish(mosquitto.port, what, qos)
                    client.publish("t", b"after", qos)

            await asyncio.to_thread(publish_all)
            await until(lambda: b"after" in host.payloads(), "what came behind")
            assert host.payloads() == [b"before", b"after"]
            assert not host.downs
            assert counts(edge)["unreadable"] == 1
            await until(lambda: edge.status()["waiting_for_custody"] == 0, "acknowledged")

    run(test)


def test_what_cannot_be_read_hides_nothing_else_that_is_retained(mosquitto: Mosquitto) -> None:
    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto), host) as edge, user(mosquitto) as client:
            assert isinstance(edge, RetainingMqttEdge)
            await wanting(edge, host, "other")
            await client.publish("r", b"good", qos=1, retain=True)
            for what in ("levels", "pairs"):
                await asyncio.to_thread(publish, mosquitto.port, what, 1, True)
            done: asyncio.Future[RetainedFound | None] = asyncio.get_running_loop().create_future()
            edge.read_retained(frozenset({"#"}), done.set_result)
            found = await done
            assert found is not None
            assert [message.payload for message in found.messages] == [b"good"]

    run(test)


def test_words_that_cannot_be_read_are_passed_over(mosquitto: Mosquitto) -> None:
    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto), host) as edge, user(mosquitto) as client:
            await wanting(edge, host, "other")

            def speak() -> None:
                with Paho(mosquitto.port, "hostile") as hostile:
                    word = b'{"filters": ["bad"], "ttl": 60}'
                    poison = publish_props(ResponseTopic="")
                    hostile.publish("federator/interest", word, 1, False, poison)

            await asyncio.to_thread(speak)
            await client.publish("federator/interest", b'{"filters": ["good"], "ttl": 60}', qos=1)
            await until(lambda: host.interest == ["good"], "the good word")
            assert edge.status()["is_settled"] is True

    run(test)


def test_a_message_with_too_many_properties_goes_nowhere(tmp_path: Path) -> None:
    """Other members would close the link over it, again and again."""
    site = Site(tmp_path, 2, ["--interest", "#"])
    try:
        site.start()
        first, second = site.brokers
        with Paho(first.port, "a") as writer, Paho(second.port, "b") as reader:
            reader.subscribe("t", 2)
            for qos in (0, 1, 2):
                writer.publish("t", b"large", qos, False, many_properties(30, 60_000))
                writer.publish("t", b"small", qos)
            assert [reader.message(30).payload for _ in range(3)] == [b"small"] * 3
            reader.assert_nothing_more()
        status = site.sidecars[0].status()
        assert status["counters"]["dropped"]["properties too large"] == 3
        assert [link["usable"] for link in status["links"]] == [True]
        assert "BadFrame" not in site.sidecars[1].log_text()
        assert "closed" not in site.sidecars[1].log_text()
    finally:
        site.stop()
