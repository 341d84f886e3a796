"""The topology manager as a process, with Mosquittos as the members' brokers."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from holdfast_federation.manager.brokers import MqttBrokers
from tests.e2e.brokers import MOSQUITTO, SOURCE, Broker, Holdfast, Mosquitto
from tests.support.manager_process import WAIT_S, ManagerProcess, await_true, command

needs_mosquitto = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ManagerProcess]:
    process = ManagerProcess(tmp_path)
    process.start()
    yield process
    process.kill()
    assert "Traceback" not in process.log_text(), process.log_text()[-6000:]


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[list[Mosquitto]]:
    started: list[Mosquitto] = []
    for number in range(4):
        directory = tmp_path / f"mosquitto-{number}"
        directory.mkdir()
        started.append(Mosquitto(directory))
        started[-1].start()
    yield started
    for each in started:
        each.kill()


@needs_mosquitto
def test_the_manager_is_killed_and_brokers_die(
    manager: ManagerProcess, brokers: list[Mosquitto]
) -> None:
    answers = [manager.join(each) for each in brokers]
    assert [answer["id"] for answer in answers] == [0, 1, 2, 3]
    assert len(answers[3]["neighbors"]) == 2
    await_true(lambda: set(manager.states().values()) == {"healthy"}, "all healthy")
    links = manager.links()

    manager.kill()
    manager.start()
    assert manager.links() == links
    assert manager.join(brokers[1])["id"] == 1
    assert manager.links() == links

    brokers[0].kill()
    await_true(lambda: sorted(manager.states()) == [1, 2, 3], "the dead member removed")
    assert manager.links() == [(1, 2), (1, 3), (2, 3)]

    manager.kill()
    brokers[0].start()
    manager.start()
    assert manager.links() == [(1, 2), (1, 3), (2, 3)]
    assert manager.join(brokers[0])["id"] == 4
    assert manager.ask("GET", "/topology")["articulation_points"] == []
    await_true(lambda: set(manager.states().values()) == {"healthy"}, "all healthy again")
    assert manager.stop() == 0


@needs_mosquitto
def test_the_brokers_of_members(brokers: list[Mosquitto]) -> None:
    async def ask() -> None:
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        impatient = MqttBrokers(0.3)
        assert await impatient.round_trip_ms(f"tcp://127.0.0.1:{port}", True) is None
        silent.close()
        patient = MqttBrokers(30)
        here = f"tcp://127.0.0.1:{brokers[0].port}"
        trips = await asyncio.gather(*(patient.round_trip_ms(here, True) for _ in range(5)))
        assert all(trip is not None and trip > 0 for trip in trips)
        brokers[0].kill()
        assert await patient.round_trip_ms(here, True) is None

    asyncio.run(ask())


def test_a_broker_that_asks_for_a_password(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    passwords = tmp_path / "passwords"
    made = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "passwd", "-c", "-b", str(passwords), "fed",
         "word"],
        env=dict(os.environ, PYTHONPATH=str(SOURCE)), capture_output=True, timeout=60,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    broker = Holdfast(tmp_path / "broker", {"security": {"password_file": str(passwords)}})
    broker.start()
    try:
        url = f"tcp://127.0.0.1:{broker.port}"
        assert asyncio.run(MqttBrokers(30).round_trip_ms(url, True)) is None
        assert asyncio.run(MqttBrokers(30, "fed", b"word").round_trip_ms(url, True))
        # Where nobody vouches for the address, name and password stay here.
        assert asyncio.run(MqttBrokers(30, "fed", b"word").round_trip_ms(url, False)) is None
    finally:
        broker.kill()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(4096):
        writer.write(data)
    writer.close()


@needs_mosquitto
def test_a_broker_that_knows_no_mqtt_5(mosquitto: Broker) -> None:
    levels: list[int] = []

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connect = await reader.readexactly(9)
        levels.append(connect[8])
        if connect[8] == 5:
            # Connection refused, unacceptable protocol version: as a broker of MQTT 3.1.1 says it.
            writer.write(b"\x20\x02\x00\x01")
            writer.close()
            return
        theirs, to_them = await asyncio.open_connection("127.0.0.1", mosquitto.port)
        to_them.write(connect)
        await asyncio.gather(copy(reader, to_them), copy(theirs, writer))

    async def ask() -> None:
        server = await asyncio.start_server(receive, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert await MqttBrokers(30).round_trip_ms(f"tcp://127.0.0.1:{port}", True)
        server.close()

    asyncio.run(ask())
    assert levels == [5, 4]


def test_the_command_line(tmp_path: Path) -> None:
    token = "a-token-for-the-operator"
    manager = ManagerProcess(tmp_path, HOLDFAST_TOPOLOGY__TOKEN=token)
    manager.start()
    environment = {"TOPOLOGY_MANAGER_URL": manager.url, "HOLDFAST_TOPOLOGY__TOKEN": token}

    def ask(*arguments: str) -> str:
        done = command(*arguments, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        join_token = ask("join-token").strip()
        request = urllib.request.Request(
            f"{manager.url}/api/v1/join",
            b'{"ip": "tcp://127.0.0.1:1"}',
            headers={"Authorization": f"Bearer {join_token}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["data"]["id"] == 0
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=30)
        assert "tcp://127.0.0.1:1" in ask("nodes")
        assert json.loads(ask("links", "--json"))["links"] == []
        assert ask("dot").startswith("graph federation {")
        assert ask("leave", "0") == "member 0 removed\n"
        refused = command("leave", "0", environment=environment)
        assert (refused.returncode, "no member 0" in refused.stderr) == (1, True)
        file = tmp_path / "operator.token"
        file.write_text(environment["HOLDFAST_TOPOLOGY__TOKEN"] + "\n")
        assert (
            json.loads(
                command("nodes", "--json", "--token-file", str(file), "--url", manager.url).stdout
            )
            == []
        )
        named = {"HOLDFAST_TOKEN": file.read_text().strip()}
        assert command("nodes", "--url", manager.url, environment=named).returncode == 0
        nobody = command("nodes", "--token", "wrong", environment=environment)
        assert (nobody.returncode, "token is not known" in nobody.stderr) == (1, True)
    finally:
        manager.kill()


def test_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    manager = ManagerProcess(
        tmp_path,
        HOLDFAST_TOPOLOGY__CERTIFICATE=str(tmp_path / "cert.pem"),
        HOLDFAST_TOPOLOGY__KEY=str(tmp_path / "key.pem"),
    )
    manager.start()
    try:
        url = f"https://127.0.0.1:{manager.port}"
        trusted = command("nodes", "--json", "--url", url, "--ca", str(tmp_path / "ca.pem"))
        assert (trusted.returncode, trusted.stdout) == (0, "[]\n")
        unknown = command("nodes", "--url", url)
        assert (unknown.returncode, "CERTIFICATE_VERIFY_FAILED" in unknown.stderr) == (1, True)
    finally:
        manager.kill()


def test_sigterm_ends_it_while_somebody_watches(manager: ManagerProcess) -> None:
    with socket.create_connection(("127.0.0.1", manager.port), timeout=WAIT_S) as watcher:
        watcher.sendall(b"GET /api/v1/watch?since=0&timeout=60 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        # Answered on the same loop after the watch has begun.
        manager.ask("GET", "/nodes")
        assert manager.stop() == 0


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"HOLDFAST_TOPOLOGY__DB_URL": "mongodb://root:secret@mongo"}, "write sqlite:///"),
        ({"HOLDFAST_TOPOLOGY__BIND": "0.0.0.0"}, "anybody who reaches 0.0.0.0"),
    ],
)
def test_a_wrong_configuration_is_said_in_a_line(environment: dict[str, str], text: str) -> None:
    done = command("serve", environment=environment)
    assert done.returncode == 2
    assert text in done.stderr
    assert "secret" not in done.stderr
    assert done.stderr.count("\n") == 1
