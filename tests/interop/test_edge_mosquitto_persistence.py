"""The edge beside a Mosquitto with `persistence true` that is killed: it comes back as of its last
save, with an older session of ours."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.brokers import MOSQUITTO, Mosquitto
from tests.interop.test_edge_mosquitto import run, running, settings_for, user, wanting
from tests.support.edge_host import ScriptedHost, until

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    # Only when it is told to, by SIGUSR1.
    lines = f"persistence true\npersistence_location {tmp_path}/\nautosave_interval 0"
    started = Mosquitto(tmp_path, lines)
    started.start()
    yield started
    started.kill()


async def save(mosquitto: Mosquitto) -> None:
    """Until what it holds now is in its file."""
    database = mosquitto.directory / "mosquitto.db"
    before = database.stat().st_mtime_ns if database.exists() else 0
    assert mosquitto.process is not None
    mosquitto.process.send_signal(signal.SIGUSR1)
    await until(lambda: database.exists() and database.stat().st_mtime_ns > before, "saved")


def freeze(mosquitto: Mosquitto) -> None:
    assert mosquitto.process is not None
    mosquitto.process.send_signal(signal.SIGSTOP)
    # Only then it reads nothing any more.
    os.waitid(os.P_PID, mosquitto.process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize("qos", [1, 2])
def test_new_messages_are_not_taken_for_old_ones(mosquitto: Mosquitto, qos: int) -> None:
    """It gives new messages the packet ids of those that it has forgotten, which we have
    acknowledged, and it has not released."""

    async def publish(begin: int, end: int) -> None:
        async with user(mosquitto) as client:
            for number in range(begin, end):
                await client.publish("t", b"%d" % number, qos=qos)

    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto), host) as edge:
            await wanting(edge, host, "t")
            await publish(0, 5)
            await until(lambda: len(host.published) == 5, "the first ones")
            await until(lambda: edge.status()["waiting_for_custody"] == 0, "acknowledged")
            # It answers behind the acknowledgements.
            await wanting(edge, host, "t", "u")
            await save(mosquitto)
            host.holds = True
            await publish(5, 15)
            await until(lambda: len(host.published) == 15, "all came")
            freeze(mosquitto)
            host.holds = False
            host.release()
            await asyncio.sleep(0)
            mosquitto.kill()
            await until(lambda: not host.is_up, "down")
            mosquitto.start()
            await until(lambda: host.is_up, "up again")
            await publish(15, 30)
            await until(lambda: host.payloads()[-1] == b"29", "the last one")
            assert host.payloads() == [b"%d" % number for number in range(30)]

    run(test)


def test_what_it_forgot_to_have_handed_over_comes_again(mosquitto: Mosquitto) -> None:
    """Saved while they wait for our acknowledgement, which is not: nothing is lost, and the order
    holds. At QoS 2 what we have not seen released is known again."""

    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto), host) as edge:
            await wanting(edge, host, "t/#")
            host.holds = True
            async with user(mosquitto) as client:
                for number in range(20):
                    await client.publish(f"t/{1 + number % 2}", b"%d" % number, qos=1 + number % 2)
            await until(lambda: len(host.published) == 20, "all came")
            await save(mosquitto)
            host.holds = False
            host.release()
            await until(lambda: edge.status()["waiting_for_custody"] == 0, "acknowledged")
            mosquitto.kill()
            await until(lambda: not host.is_up, "down")
            mosquitto.start()
            await wanting(edge, host, "t/#")
            async with user(mosquitto) as client:
                await client.publish("t/1", b"end", qos=2)
            await until(lambda: b"end" in host.payloads(), "the end")
            for topic, numbers in (("t/1", range(0, 20, 2)), ("t/2", range(1, 20, 2))):
                found = [one.payload for one in host.published if one.topic == topic]
                expected = [b"%d" % number for number in numbers]
                assert list(dict.fromkeys(one for one in found if one != b"end")) == expected
                # Each round in order: a repetition is a whole one.
                assert found[: len(expected)] == expected

    run(test)
