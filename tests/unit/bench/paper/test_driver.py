"""The federator of the published protocol: its settings, how it joins, and what waits for brokers.
With brokers: tests/interop/test_paper_mosquitto.py."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.paper import federator as paper_federator
from bench.paper.federator import (
    NeighbourLink,
    Outlet,
    PaperFederator,
    PaperManager,
    options,
)
from bench.paper.settings import PaperSettings
from holdfast.config.problem import ConfigError
from holdfast.io.peers.complaints import Complaints
from holdfast_federation.sidecar.manager_client.http import ManagerRefuses
from tests.support.ports import free_port

WAIT_S = 30.0
JOINED = {
    "id": 7,
    "ip": "",
    "neighbors": [{"id": 0, "ip": "tcp://127.0.0.1:1"}, {"id": 3, "ip": "tcp://127.0.0.1:2"}],
    "redundancy": 3,
    "coreAnnInterval": 2_000_000_000,
    "beaconInterval": 4_000_000_000,
}
"""As the published manager answers."""

Answer = Callable[[str, bytes], tuple[int, object]]


@asynccontextmanager
async def manager_of(answer: Answer) -> AsyncIterator[str]:
    """A manager that answers (method and path, body) as a test says; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (int(line.split(":")[1]) for line in head.split("\r\n") if "ontent-Length" in line), 0
        )
        status, body = answer(" ".join(head.split()[:2]), await reader.readexactly(length))
        text = json.dumps(body).encode()
        writer.write(
            b"HTTP/1.1 %d x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
            % (status, len(text), text)
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def envelope(data: object, code: int = 200, description: str = "") -> tuple[int, object]:
    status = "success" if code == 200 else "error"
    return code, {"status": status, "code": code, "data": data, "description": description}


def settings_for(url: str, **more: Any) -> PaperSettings:
    return PaperSettings(
        broker=f"tcp://127.0.0.1:{free_port()}", advertised="tcp://me:1883", manager=url, **more
    )


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_1_what_the_manager_answers_is_used() -> None:
    """The published federator loses the answer: it has id 0, no neighbours, and no intervals."""
    asked: list[tuple[str, object]] = []

    def answer(request: str, body: bytes) -> tuple[int, object]:
        asked.append((request, json.loads(body)))
        return envelope(JOINED)

    async def test() -> None:
        async with manager_of(answer) as url:
            federator = PaperFederator(settings_for(url))
            await federator.start()
            await until(lambda: federator.status()["id"] is not None)
            status: Any = federator.status()
            assert federator._member is not None
            config = federator._member.config
            await federator.stop()
        assert asked[0] == ("POST /api/v1/join", {"ip": "tcp://me:1883"})
        assert status["id"] == 7
        assert [each["id"] for each in status["neighbours"]] == [0, 3]
        assert status["epoch"] > 1_700_000_000_000
        assert (config.redundancy, config.core_ann_interval_s) == (3, 2.0)
        assert config.beacon_interval_s == 4.0
        assert federator.status()["id"] is None

    asyncio.run(test())


def test_a_join_is_tried_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[tuple[int, object]] = [
        (500, {"oops": 1}),
        envelope(None, 400, "no"),
        envelope({"id": "seven"}),
        envelope({**JOINED, "neighbors": 4}),
        envelope({**JOINED, "coreAnnInterval": 0}),
        envelope(JOINED),
    ]
    monkeypatch.setattr("bench.paper.federator.RETRY_S", 0.01)

    async def test() -> None:
        async with manager_of(lambda request, body: answers.pop(0)) as url:
            complaints = Complaints(asyncio.get_running_loop().time)
            manager = PaperManager(settings_for(url, redundancy=1), complaints)
            standing = await manager.join()
            assert standing.id == 7
            # What is set here wins.
            assert standing.config.redundancy == 1
            assert not answers

    asyncio.run(test())


@pytest.mark.parametrize(
    ("neighbours", "found"),
    [
        (None, {}),
        ([{"Id": 0, "Ip": "tcp://a:1883"}], {0: "tcp://a:1883"}),
    ],
)
def test_the_published_manager_writes_some_things_its_way(
    neighbours: object, found: dict[int, str]
) -> None:
    async def test() -> None:
        answer = {**JOINED, "neighbors": neighbours}
        async with manager_of(lambda request, body: envelope(answer)) as url:
            complaints = Complaints(asyncio.get_running_loop().time)
            assert (await PaperManager(settings_for(url), complaints).join()).neighbours == found

    asyncio.run(test())


def test_a_published_manager_is_joined_once() -> None:
    """It would take a second join for another member, and knows no other question."""
    asked: list[str] = []

    def answer(request: str, body: bytes) -> tuple[int, object]:
        asked.append(request)
        return envelope(JOINED) if request.startswith("POST") else (404, "404 page not found")

    def has_asked(count: int) -> bool:
        return len(asked) == count

    async def test() -> None:
        async with manager_of(answer) as url:
            federator = PaperFederator(settings_for(url))
            await federator.start()
            for count in (2, 3):
                await until(lambda: federator.status()["id"] is not None)
                federator._check.set()
                await until(partial(has_asked, count))
            assert federator.status()["id"] == 7
            await federator.stop()
        assert [request.split()[0] for request in asked] == ["POST", "GET", "GET"]

    asyncio.run(test())


def test_who_was_removed_joins_again_as_another_member() -> None:
    ids = [7, 9]
    known: set[int] = set()

    def answer(request: str, body: bytes) -> tuple[int, object]:
        if request.startswith("POST"):
            known.add(ids[0])
            return envelope({**JOINED, "id": ids.pop(0)})
        node = int(request.rpartition("node=")[2])
        if node not in known:
            return envelope(None, 404, "there is no such member")
        neighbours = [{"id": 4, "ip": "tcp://127.0.0.1:4"}]
        return envelope({"revision": 5, "changed": True, "links": [], "neighbors": neighbours})

    def listed(federator: PaperFederator) -> list[int]:
        neighbours: Any = federator.status()["neighbours"]
        return [each["id"] for each in neighbours]

    async def test() -> None:
        async with manager_of(answer) as url:
            federator = PaperFederator(settings_for(url))
            await federator.start()
            await until(lambda: federator.status()["id"] == 7)
            epoch: Any = federator.status()["epoch"]
            # What it has not heard of:
            federator._check.set()
            await until(lambda: listed(federator) == [4])
            known.clear()
            federator._check.set()
            await until(lambda: federator.status()["id"] == 9)
            later: Any = federator.status()["epoch"]
            assert later > epoch
            assert listed(federator) == [0, 3]
            await federator.stop()

    asyncio.run(test())


def test_a_refusal_that_is_no_removal_changes_nothing() -> None:
    async def test() -> None:
        async with manager_of(lambda request, body: envelope(None, 401, "no token")) as url:
            complaints = Complaints(asyncio.get_running_loop().time)
            manager = PaperManager(settings_for(url), complaints)
            with pytest.raises(ManagerRefuses, match="no token"):
                await manager.neighbours(7)

    asyncio.run(test())


def test_without_a_manager_the_settings_say_who_is_who() -> None:
    async def test() -> None:
        federator = PaperFederator(
            PaperSettings(
                broker=f"tcp://127.0.0.1:{free_port()}",
                id=2,
                neighbours={1: "tcp://127.0.0.1:1", 2: "tcp://me", 3: "tcp://127.0.0.1:1"},
                core_ann_interval_s=1.0,
                epoch=5,
            )
        )
        await federator.start()
        await until(lambda: federator.status()["id"] is not None)
        status: Any = federator.status()
        assert (status["id"], status["epoch"]) == (2, 5)
        assert [each["id"] for each in status["neighbours"]] == [1, 3]
        assert status["refused"] == {"own id": 1}
        await federator.stop()

    asyncio.run(test())


def test_an_outlet_keeps_the_newest_and_counts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_federator, "QUEUE_MESSAGES_MAX", 3)
    monkeypatch.setattr(paper_federator, "QUEUE_BYTES_MAX", 100)

    async def test() -> None:
        lost: Counter[str] = Counter()
        outlet = Outlet(lost, Complaints(asyncio.get_running_loop().time), "broker")
        for _ in range(5):
            outlet.enqueue(("t", b"x", 2))
        assert (len(outlet), lost["queue full"]) == (3, 2)
        outlet.enqueue(("t", bytes(99), 2))
        assert (len(outlet), lost["queue full"]) == (2, 4)
        outlet.clear()
        assert (len(outlet), lost["broker away"]) == (0, 2)

    asyncio.run(test())


def test_nothing_waits_for_a_neighbour_whose_broker_is_away() -> None:
    async def test() -> None:
        lost: Counter[str] = Counter()
        complaints = Complaints(asyncio.get_running_loop().time)
        address = f"tcp://127.0.0.1:{free_port()}"
        link = NeighbourLink(1, address, options("federator_2", None, None), lost, complaints)
        for _ in range(3):
            link.enqueue(("t", b"x", 2))
        assert (link.queued, lost["broker away"], link.is_up) == (0, 3, False)
        await link.stop()
        with pytest.raises(ValueError, match="unknown scheme"):
            NeighbourLink(1, "gopher://x", options("x", None, None), lost, complaints)

    asyncio.run(test())


def test_the_published_environment() -> None:
    settings = PaperSettings.from_environment(
        {
            "TOPOLOGY_MANAGER_URL": "http://manager:8080/",
            "ADVERTISED_LISTENER": "tcp://broker-a:1883",
            "MOSQUITTO_PORT": "2883",
            "CORE_ANN_INTERVAL": "1m30s",
            "BEACON_INTERVAL": "500ms",
            "FED_REDUNDANCY": "3",
        },
        {"qos": 1},
    )
    assert settings.manager == "http://manager:8080"
    assert settings.advertised == "tcp://broker-a:1883"
    assert settings.broker == "tcp://127.0.0.1:2883"
    assert (settings.core_ann_interval_s, settings.beacon_interval_s) == (90.0, 0.5)
    assert (settings.redundancy, settings.qos) == (3, 1)


def test_the_managers_files_are_named_as_for_other_members() -> None:
    names = ("token_file", "ca", "certificate", "key")
    settings = PaperSettings.from_environment(
        {
            "TOPOLOGY_MANAGER_URL": "https://manager",
            "ADVERTISED_LISTENER": "tcp://broker-a:1883",
            **{f"HOLDFAST_FEDERATION__MANAGER_{name.upper()}": name for name in names},
        }
    )
    assert [getattr(settings, f"manager_{name}") for name in names] == list(names)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "TOPOLOGY_MANAGER_URL"),
        ({"TOPOLOGY_MANAGER_URL": "http://m"}, "ADVERTISED_LISTENER"),
        ({"TOPOLOGY_MANAGER_URL": "ftp://m", "ADVERTISED_LISTENER": "a"}, "http://host:8080"),
        ({"TOPOLOGY_MANAGER_URL": "m", "ADVERTISED_LISTENER": "x://a"}, "unknown scheme"),
        ({"TOPOLOGY_MANAGER_URL": "m", "ADVERTISED_LISTENER": "a", "FED_REDUNDANCY": "0"}, "1 to"),
        (
            {"TOPOLOGY_MANAGER_URL": "m", "ADVERTISED_LISTENER": "a", "BEACON_INTERVAL": "5"},
            "BEACON_INTERVAL: '5' is no duration",
        ),
        (
            {"TOPOLOGY_MANAGER_URL": "m", "ADVERTISED_LISTENER": "a", "MOSQUITTO_PORT": "x"},
            "broker",
        ),
        (
            {
                "TOPOLOGY_MANAGER_URL": "https://m",
                "ADVERTISED_LISTENER": "a",
                "HOLDFAST_FEDERATION__MANAGER_KEY": "k",
            },
            "go together",
        ),
        (
            {
                "TOPOLOGY_MANAGER_URL": "http://m",
                "ADVERTISED_LISTENER": "a",
                "HOLDFAST_FEDERATION__MANAGER_CERTIFICATE": "c",
                "HOLDFAST_FEDERATION__MANAGER_KEY": "k",
            },
            "with https://",
        ),
    ],
)
def test_wrong_settings_say_what_to_do(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PaperSettings.from_environment(environ)


@pytest.mark.parametrize("name", ["password_file", "manager_token_file"])
def test_a_file_that_is_not_there_is_told_at_the_start(name: str, tmp_path: Path) -> None:
    async def test() -> None:
        more = {"username": "u", name: str(tmp_path / "missing")}
        with pytest.raises(ConfigError, match="missing: cannot be read"):
            await PaperFederator(settings_for("http://127.0.0.1:1", **more)).start()

    asyncio.run(test())
