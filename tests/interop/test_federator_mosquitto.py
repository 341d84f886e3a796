"""Unmodified Mosquittos, each with `holdfast federator` beside it: what their users see."""

import contextlib
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.subscribeoptions import SubscribeOptions

from holdfast.cli.main import main
from holdfast.client import Options, Reconnect
from holdfast.client.blocking import Client as BlockingClient
from tests.e2e.brokers import MOSQUITTO
from tests.interop.paho_client import Paho, publish_props
from tests.support.manager_process import ManagerProcess
from tests.support.sidecars import Site, wait_until

MOSQUITTO_PUB = shutil.which("mosquitto_pub")
MOSQUITTO_SUB = shutil.which("mosquitto_sub")
pytestmark = [
    pytest.mark.skipif(
        None in (MOSQUITTO, MOSQUITTO_PUB, MOSQUITTO_SUB), reason="mosquitto is not installed"
    ),
    pytest.mark.timeout(180),
]
ALL = ["--interest", "#"]


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(*args: Any, **values: Any) -> Site:
        site = Site(tmp_path, *args, **values)
        made.append(site)
        site.start()
        return site

    yield make
    for site in made:
        site.stop()


@contextmanager
def listening(port: int, *options: str, count: int) -> Iterator[list[str]]:
    """What mosquitto_sub prints, complete at the end of the block."""
    assert MOSQUITTO_SUB is not None
    # Line by line: the end of its SUBSCRIBE is waited for.
    command = ["stdbuf", "-oL", MOSQUITTO_SUB, "-p", str(port), "-C", str(count), "-W", "30"]
    command += ["-d", *options]
    lines: list[str] = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("Subscribed"):
                break
        yield lines
        rest, _ = process.communicate(timeout=40)
        lines += [line for line in rest.splitlines() if not line.startswith("Client ")]
    finally:
        process.kill()
        process.wait()


def publish(port: int, *options: str) -> None:
    assert MOSQUITTO_PUB is not None
    subprocess.run([MOSQUITTO_PUB, "-p", str(port), *options], check=True, timeout=30)


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_three_brokers_in_a_line(sites: Callable[..., Site], protocol: str) -> None:
    """From end to end and back, every QoS, wildcards; nothing twice, though all want all."""
    site = sites(3, [*ALL, "--protocol", protocol])
    first, _, last = site.brokers
    for source, target in ((first, last), (last, first)):
        for qos in ("0", "1", "2"):
            with listening(target.port, "-t", "plant/+/out/#", "-q", "2", "-v", count=2) as lines:
                publish(source.port, "-t", "plant/7/out/x", "-m", f"one {qos}", "-q", qos)
                publish(source.port, "-t", "plant/7/out", "-m", f"two {qos}", "-q", qos)
            assert lines == [f"plant/7/out/x one {qos}", f"plant/7/out two {qos}"]
    with Paho(first.port, "both-ends") as here, Paho(last.port, "other-end") as there:
        for client in (here, there):
            client.subscribe("same/topic", 2)
        for number in range(50):
            here.publish("same/topic", b"here %d" % number, 2)
            there.publish("same/topic", b"there %d" % number, 2)
        for client in (here, there):
            found = client.payloads(100)
            for name in (b"here", b"there"):
                mine = [one for one in found if one.startswith(name)]
                assert mine == [b"%s %d" % (name, number) for number in range(50)]
        time.sleep(0.5)
        for client in (here, there):
            client.assert_nothing_more()
    for sidecar in site.sidecars:
        assert sidecar.stop() == 0
        assert "federator_stopped" in sidecar.log_text()
        sidecar.start()
    site.settle()


def test_properties_retain_and_expiry(sites: Callable[..., Site]) -> None:
    site = sites(2, ALL)
    with Paho(site.brokers[0].port, "a") as sender, Paho(site.brokers[1].port, "b") as reader:
        reader.subscribe("t", options=SubscribeOptions(qos=2, retainAsPublished=True))
        properties = publish_props(
            PayloadFormatIndicator=1, MessageExpiryInterval=60, ContentType="text/plain",
            ResponseTopic="answers", CorrelationData=b"\0\xff",
            UserProperty=[("a", "1"), ("a", "2")],
        )  # fmt: skip
        sender.publish("t", b"x", 1, True, properties)
        found = reader.message()
        assert (found.payload, found.qos, found.retain) == (b"x", 1, True)
        received = found.properties
        assert received.PayloadFormatIndicator == 1
        assert 50 < received.MessageExpiryInterval <= 60
        assert received.ContentType == "text/plain"
        assert received.ResponseTopic == "answers"
        assert received.CorrelationData == b"\0\xff"
        assert received.UserProperty[:2] == [("a", "1"), ("a", "2")]
        assert received.UserProperty[2][0] == "hf-federation"
        with Paho(site.brokers[1].port, "late") as late:
            late.subscribe("t", 1)
            assert late.message().payload == b"x"


def test_filters_and_sources_of_interest(sites: Callable[..., Site]) -> None:
    """Only what is wanted and allowed goes; wants are learnt from beacons, words and the log."""
    lines = "log_dest topic\nlog_type subscribe\nlog_type unsubscribe\nlog_type notice"
    site = sites(
        2,
        [],
        mosquitto_lines=lines,
        everybody_takes=False,
        own_options={0: ["--export", "out/#"], 1: ["--import", "out/#", "--import", "more/#"]},
    )
    sender, reader = site.brokers

    def is_taken(count: int) -> bool:
        edge = site.sidecars[0].status()["edge"]
        return bool(edge["is_settled"] and len(edge["export_filters"]) == count)

    with Paho(sender.port, "a") as source, Paho(reader.port, "b") as sink:
        sink.subscribe("out/log", 1)
        sink.subscribe("secret", 1)
        wait_until(lambda: is_taken(1), "the subscription in the log")
        sink.publish("federator/beacon/out/beacon", b"")
        wait_until(lambda: is_taken(2), "the beacon")
        sink.publish("federator/interest", b'{"filters": ["out/word/#", "more/x"], "ttl": 60}')
        wait_until(lambda: is_taken(3), "the word, but what may not leave")
        for topic in ("out/beacon", "out/word/deep", "out/none", "more/x", "secret", "out/log"):
            source.publish(topic, topic.encode(), 1)
        assert sink.message().payload == b"out/log"
        source.publish("out/log", b"end", 1)
        assert sink.message().payload == b"end"

        def delivered() -> object:
            return site.sidecars[1].status()["edge"]["counts"]

        wait_until(lambda: delivered() == {"imported": 4}, "nothing else was brought")
        metrics = site.sidecars[1].get("/metrics") or ""
        assert 'holdfast_federation_edge_messages_total{outcome="imported"} 4.0' in metrics
        assert "holdfast_federation_links 1.0" in metrics
        mesh = site.sidecars[0].get("/api/v1/federation?topic=out/log") or ""
        assert site.sidecars[1].status()["id"] in mesh
        assert site.sidecars[0].get("/api/v1/federation?topic=%23") is None
        assert site.sidecars[0].get("/readyz") == '{"ready":true}'
        port = f"127.0.0.1:{site.sidecars[0].admin_port}"
        assert main(["federation", "status", "--admin", port]) == 0
        assert main(["federation", "mesh", "out/log", "--admin", port]) == 0


def flow(site: Site, disturb: list[Callable[[], None]]) -> dict[int, list[int]]:
    """Publishes at one end while things happen; the numbers that arrive at the other end, by QoS. A
    number is published once with each, on a topic of its own: clients put QoS 2 behind QoS 1."""
    source, target = site.brokers[0], site.brokers[-1]
    steps = 50
    with Paho(target.port, "reader", clean=False, expiry_s=600) as reader:
        reader.subscribe("flow/+", 2)
        for number, action in enumerate(disturb):
            with Paho(source.port, "writer") as writer:
                for step in range(steps):
                    for qos in (1, 2):
                        writer.publish(f"flow/{qos}", b"%d" % (number * steps + step), qos)
                    if step == steps // 2:
                        acting = threading.Thread(target=action)
                        acting.start()
            acting.join()
            site.settle()
        with Paho(source.port, "writer") as writer:
            for qos in (1, 2):
                writer.publish(f"flow/{qos}", b"-1", qos)
        found: dict[int, list[int]] = {1: [], 2: []}
        while not all(-1 in numbers for numbers in found.values()):
            message = reader.message(40)
            found[int(message.topic[-1])].append(int(message.payload))
        return {qos: numbers[:-1] for qos, numbers in found.items()}


def test_federators_are_killed(sites: Callable[..., Site]) -> None:
    """kill -9 of the one at the origin, the relay, the one at the destination, of all at once, in
    the middle of traffic: nothing is lost, and what is repeated is in order otherwise."""
    site = sites(3, [*ALL])

    def kill(*numbers: int) -> Callable[[], None]:
        def act() -> None:
            for number in numbers:
                site.sidecars[number].kill()
            for number in numbers:
                site.sidecars[number].start()

        return act

    found = flow(site, [kill(0), kill(1), kill(2), kill(0, 1, 2)])
    for numbers in found.values():
        assert list(dict.fromkeys(numbers)) == list(range(200))


def test_federators_are_stopped(sites: Callable[..., Site]) -> None:
    """SIGTERM in the middle of traffic, at both ends: nothing is lost, and nothing comes twice."""
    site = sites(2, [*ALL])

    def restart(number: int) -> Callable[[], None]:
        def act() -> None:
            assert site.sidecars[number].stop() == 0
            site.sidecars[number].start()

        return act

    found = flow(site, [restart(0), restart(1)])
    for qos, numbers in found.items():
        lost = sorted({*range(100)} - {*numbers})
        twice = sorted(number for number in {*numbers} if numbers.count(number) > 1)
        assert (lost, twice) == ([], []), f"QoS {qos}: {lost} lost, {twice} twice"
        assert numbers == list(range(100))


def test_members_of_a_topology_manager(tmp_path: Path) -> None:
    """Configured by the published environment, wanting by the published beacon."""
    manager = ManagerProcess(tmp_path)
    site = Site(tmp_path, 3, [], everybody_takes=False, manager=manager.url)
    try:
        manager.start()
        site.start()
        wait_until(lambda: len(manager.ask("GET", "/topology")["links"]) == 3, "all are linked")
        manager.kill()
        with Paho(site.brokers[0].port, "a") as one, Paho(site.brokers[2].port, "b") as other:
            other.subscribe("federated/t", 2)
            other.publish("federator/beacon/federated/t", b"")
            wait_until(
                lambda: site.sidecars[0].status()["edge"]["export_filters"] == ["federated/t"],
                "the topic is wanted",
            )
            site.settle()
            one.publish("federated/t", b"x", 2)
            assert other.message().payload == b"x"
            beacon_ttl_s = 6.0
            wait_until(
                lambda: site.sidecars[0].status()["edge"]["export_filters"] == [],
                "nobody wants it any more",
                beacon_ttl_s + 20,
            )
    finally:
        site.stop()
        manager.kill()


def test_retained_messages_are_everybodys(tmp_path: Path) -> None:
    """What was retained before there was a federation, what is removed, and what is new."""
    site = Site(tmp_path, 2, [*ALL])
    first, second = site.brokers

    def retained_at_second() -> dict[str, bytes]:
        with Paho(second.port, "late") as late:
            late.subscribe("r/#", 1)
            found: dict[str, bytes] = {}
            with contextlib.suppress(queue.Empty):
                while True:
                    message = late.message(0.3)
                    found[message.topic] = message.payload
            return found

    try:
        first.start()
        with Paho(first.port, "before") as writer:
            for number in range(20):
                writer.publish(f"r/{number}", b"old", 1, True)
        second.start()
        for sidecar in site.sidecars:
            sidecar.start()
        site.settle()
        wait_until(lambda: len(retained_at_second()) == 20, "what was retained before")
        with Paho(first.port, "before") as writer:
            writer.publish("r/1", b"", 1, True)
            writer.publish("r/2", b"new", 1, True)
        expected = {f"r/{number}": b"old" for number in range(20) if number != 1} | {"r/2": b"new"}
        wait_until(lambda: retained_at_second() == expected, "what was changed")
    finally:
        site.stop()


def test_a_broker_is_killed(sites: Callable[..., Site]) -> None:
    """kill -9 of the destination's Mosquitto: what is published meanwhile waits, and comes in order
    when it is back. What Mosquitto had acknowledged and not delivered is its loss."""
    site = sites(2, [*ALL])
    source, target = site.brokers
    with Paho(source.port, "writer") as writer:
        target.kill()
        for number in range(200):
            writer.publish("kept", b"%d" % number, 1)
        wait_until(
            lambda: not site.sidecars[1].status()["edge"]["is_connected"], "the federator notices"
        )
        target.start()
        with Paho(target.port, "reader") as reader:
            reader.subscribe("kept", 1)
            # What came before the subscription is nobody's; all the rest is here.
            site.settle()
            writer.publish("kept", b"end", 1)
            found: list[bytes] = []
            while b"end" not in found:
                found.append(reader.message().payload)
    numbers = [int(one) for one in found if one != b"end"]
    assert numbers == list(range(200 - len(numbers), 200))
    # The reader may have the last one before its acknowledgement reaches the federator.
    wait_until(
        lambda: site.sidecars[1].status()["edge"]["counts"]["imported"] >= 201,
        "all are acknowledged",
    )


def test_everything_is_killed(sites: Callable[..., Site]) -> None:
    """kill -9 of a federator and of its broker together, on both sides: afterwards it works as
    before, without anybody's help."""
    site = sites(2, [*ALL])
    for _ in range(2):
        for broker, sidecar in zip(site.brokers, site.sidecars, strict=True):
            sidecar.kill()
            broker.kill()
        for broker, sidecar in zip(site.brokers, site.sidecars, strict=True):
            sidecar.start()
            broker.start()
        site.settle()
        with Paho(site.brokers[0].port, "a") as one, Paho(site.brokers[1].port, "b") as other:
            for client in (one, other):
                client.subscribe("t", 2)
            one.publish("t", b"one", 2)
            other.publish("t", b"other", 2)
            for client in (one, other):
                assert sorted(client.payloads(2)) == [b"one", b"other"]
                client.assert_nothing_more()


def test_a_bridge_beside_us_makes_no_loop(tmp_path: Path, sites: Callable[..., Site]) -> None:
    """The brokers are bridged, too, in both directions on the same topics: what came by the
    federation does not go into it again on the other side. The bridge's own copies are its own."""
    site = Site(tmp_path, 2, [*ALL])
    first, second = site.brokers
    second.inflight_max = 100
    second.extra = (
        f"connection beside\naddress 127.0.0.1:{first.port}\nbridge_protocol_version mqttv50\n"
        "restart_timeout 1\ntopic loop/# both 1\n"
    )
    try:
        site.start()
        with Paho(first.port, "a") as one, Paho(second.port, "b") as other:
            for client in (one, other):
                client.subscribe("loop/#", 1)

            def is_bridged() -> bool:
                one.publish("loop/probe", b"probe", 1)
                time.sleep(0.3)
                return any("echo" in one.status()["edge"]["counts"] for one in site.sidecars)

            wait_until(is_bridged, "the bridge brings something back")
            found: list[bytes] = []
            one.publish("loop/x", b"x", 1)
            with contextlib.suppress(queue.Empty):
                while True:
                    # A loop would never be quiet for so long.
                    found.append(one.message(2.0).payload)
                    assert found.count(b"x") <= 3
            assert b"x" in found
    finally:
        site.stop()


def test_a_broker_that_saves_its_state_is_killed(tmp_path: Path) -> None:
    """kill -9 of the origin's Mosquitto and then of the destination's, both with `persistence true`
    and a save after each change, while messages flow. What it acknowledged in the moment before may
    be lost or come again; the order holds, and what is published later arrives."""
    site = Site(tmp_path, 2, [*ALL])
    for broker in site.brokers:
        broker.extra = (
            f"persistence true\npersistence_location {broker.directory}/\n"
            "autosave_on_changes true\nautosave_interval 1\n"
        )
    try:
        site.start()
        source, target = site.brokers
        count = 0
        with BlockingClient(
            servers=[f"127.0.0.1:{source.port}"],
            reconnect=Reconnect(delay_max_s=0.2),
            options=Options(client_id="writer", clean_start=False, session_expiry_s=600),
        ) as writer:
            reader_options = Options(client_id="reader", clean_start=False, session_expiry_s=600)
            found: list[int] = []
            with BlockingClient(
                servers=[f"127.0.0.1:{target.port}"],
                reconnect=Reconnect(delay_max_s=0.2),
                options=reader_options,
                on_message=lambda message: found.append(int(message.payload)),
            ) as reader:
                reader.subscribe(("flow", 2))
                later: list[int] = []
                for broker in (source, target):
                    futures = []
                    for step in range(100):
                        futures.append(writer.submit("flow", b"%d" % count, qos=2))
                        count += 1
                        if step == 50:
                            broker.kill()
                            broker.start()
                    for future in futures:
                        future.result(30)
                    site.settle()
                    wait_until(lambda: reader.is_connected, "the reader is back")
                    for _ in range(20):
                        writer.publish("flow", b"%d" % count, qos=2)
                        later.append(count)
                        count += 1
                    wait_until(lambda: later[-1] in found, "what was published later")
        first = list(dict.fromkeys(found))
        assert first == sorted(first)
        assert set(later) <= set(found)
    finally:
        site.stop()
