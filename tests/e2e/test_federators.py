"""Federators as processes, with scripted brokers: kill -9, strangers, the manager away."""

import json
import random
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_federation.core.messages.streams import Position
from holdfast_federation.sidecar.store.file import STORE, StoreFile
from tests.support.certificates import Authority
from tests.support.federator_process import FederatorProcess
from tests.support.manager_process import ManagerProcess
from tests.support.ports import free_port


class Site:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[FederatorProcess] = []

    def make(self, name: str, *filters: str, **settings: object) -> FederatorProcess:
        process = FederatorProcess(self.directory, name, list(filters), **settings)
        self.processes.append(process)
        return process

    def start(self, name: str, *filters: str, **settings: object) -> FederatorProcess:
        process = self.make(name, *filters, **settings)
        process.start()
        return process


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
    for process in found.processes:
        assert "Traceback" not in process.log(), process.log()[-6000:]


def line(site: Site) -> tuple[FederatorProcess, FederatorProcess, FederatorProcess]:
    """Origin, relay, destination. The ends do not know each other's address."""
    relay = site.start("relay", degree=0)
    peers = [relay.address]
    here = site.start("here", "a/#", peers=peers, degree=0)
    origin = site.start("origin", peers=peers, degree=0)
    origin.wants("a/#")
    return origin, relay, here


def done(origin: FederatorProcess, count: int) -> None:
    origin.until(lambda: len(origin.of("done")) >= count, f"{count} done")


def arrived(here: FederatorProcess, payloads: set[str]) -> None:
    here.until(lambda: payloads <= set(here.payloads()), "all messages")


def check_order(here: FederatorProcess) -> None:
    """Each first arrival of a number comes after those of all lower ones."""
    first: list[int] = []
    for payload in here.payloads():
        if int(payload) not in first:
            first.append(int(payload))
    assert first == sorted(first)


def position(here: FederatorProcess, origin: FederatorProcess) -> Position:
    """What a dead process's store has."""
    file = StoreFile(Path(here.settings["data"]) / STORE, bytes.fromhex(here.id))
    kept = file.open()
    file.close()
    return kept.positions.get(bytes.fromhex(origin.id), (0, 0))


def test_the_relay_is_killed(site: Site) -> None:
    """Again and again, in the middle: nothing is lost, nothing comes twice, the order stays."""
    origin, relay, here = line(site)
    count = 0
    for _ in range(3):
        for _ in range(60):
            origin.publish(str(count))
            count += 1
        relay.kill()
        for _ in range(20):
            origin.publish(str(count))
            count += 1
        relay.start()
        arrived(here, {str(number) for number in range(count)})
    done(origin, count)
    assert here.payloads() == [str(number) for number in range(count)]


def test_others_take_over_from_a_relay(site: Site) -> None:
    """It never comes back: the ends find each other by what it had told them."""
    relay = site.start("relay")
    here = site.start("here", "a/#", peers=[relay.address])
    origin = site.start("origin", peers=[relay.address])
    origin.wants("a/#")
    for number in range(100):
        origin.publish(str(number))
    relay.kill()
    for number in range(100, 200):
        origin.publish(str(number))
    arrived(here, {str(number) for number in range(200)})
    assert here.payloads() == [str(number) for number in range(200)]


def test_the_origin_is_killed(site: Site) -> None:
    """Whatever was done arrives, in order; the rest is published again, as a broker does."""
    origin, _, here = line(site)
    rng = random.Random(5)
    count = 0
    kept: set[str] = set()
    for _ in range(4):
        numbers = [str(number) for number in range(count, count + 80)]
        count += 80
        for payload in numbers:
            origin.publish(payload)
        wait = rng.randrange(1, 60)
        done(origin, wait)
        origin.kill()
        confirmed = set(origin.of("done"))
        assert len(confirmed) >= wait
        kept |= confirmed
        origin.start()
        for payload in numbers:
            if payload not in confirmed:
                origin.publish(payload)
        done(origin, 80 - len(confirmed))
        arrived(here, set(numbers))
    assert kept <= set(here.payloads())
    check_order(here)
    epochs = [epoch for _, epoch, _, _ in here.delivered()]
    assert epochs == sorted(epochs)


def test_the_origin_is_killed_while_nobody_can_be_reached(site: Site) -> None:
    origin, _, here = line(site)
    here.kill()
    for number in range(50):
        origin.publish(str(number))
    done(origin, 50)
    origin.kill()
    origin.start()
    here.start()
    arrived(here, {str(number) for number in range(50)})
    assert here.payloads() == [str(number) for number in range(50)]


def test_the_destination_is_killed_before_its_broker_has_it(site: Site) -> None:
    origin, _, here = line(site)
    here.say(hold=True)
    here.until(lambda: here.status()["id"], "held")
    for number in range(40):
        origin.publish(str(number))
    done(origin, 40)
    here.until(lambda: here.status()["delivering"] == 40, "deliveries")
    here.kill()
    assert here.payloads() == []
    here.start()
    arrived(here, {str(number) for number in range(40)})
    assert here.payloads() == [str(number) for number in range(40)]


def test_the_destination_is_killed_at_any_moment(site: Site) -> None:
    """Nothing is lost, and nothing below the stored position comes again."""
    origin, _, here = line(site)
    rng = random.Random(3)
    count = 0
    places = []
    for _ in range(4):
        for _ in range(100):
            origin.publish(str(count))
            count += 1
        least = len(here.payloads()) + rng.randrange(1, 60)
        here.until(lambda least=least: len(here.payloads()) >= least, "some")  # type: ignore[misc]
        here.kill()
        before = here.delivered()
        epoch, place = position(here, origin)
        here.start()
        arrived(here, {str(number) for number in range(count)})
        again = here.delivered()[len(before) :]
        assert all(at >= place for _, life, at, _ in again if life == epoch)
        places.append(place)
    assert max(places) > 100
    check_order(here)
    assert len(here.payloads()) <= count + 4 * 256


def test_strangers(site: Site, tmp_path: Path) -> None:
    """A wrong secret is refused with a line on both sides; garbage costs the garbage's sender its
    connection. What flows goes on."""
    for name in ("secret", "other"):
        (tmp_path / name).write_text(f"{name} of this federation, with more than 32 characters")
        (tmp_path / name).chmod(0o600)
    secret = str(tmp_path / "secret")
    here = site.start("here", "a/#", secret_file=secret)
    origin = site.start("origin", peers=[here.address], secret_file=secret)
    origin.wants("a/#")
    stranger = site.start(
        "stranger", "#", peers=[here.address], secret_file=str(tmp_path / "other")
    )
    rng = random.Random(1)
    sockets = []
    for number in range(200):
        origin.publish(str(number))
        one = socket.create_connection(("127.0.0.1", here.port))
        sockets.append(one)
        one.setblocking(False)
        try:
            one.send(rng.randbytes(rng.choice((1, 10, 10_000))))
        except OSError:
            continue
    arrived(here, {str(number) for number in range(200)})
    for one in sockets:
        one.close()
    here.until(lambda: "does not know this federation's secret" in here.log(), "a line")
    stranger.until(lambda: "has it the same federation.secret_file?" in stranger.log(), "a line")
    assert len(here.log().splitlines()) < 60, here.log()
    assert here.payloads() == [str(number) for number in range(200)]
    assert stranger.payloads() == []
    status = here.status()
    assert [link["id"] for link in status["links"]] == [origin.id]
    assert status["members"] == 2
    assert status["counters"]["refused"]["magic"] > 50


def test_the_manager_is_away(site: Site, tmp_path: Path) -> None:
    """It links the members; messages, restarts and links go on without it; it hears of all when it
    is back."""
    directory = tmp_path / "manager"
    directory.mkdir()
    # Nobody's broker answers: as long as that goes for all, nobody is removed.
    manager = ManagerProcess(directory, HOLDFAST_TOPOLOGY__PROBE_INTERVAL_S="5")
    manager.start()
    try:
        more = {
            "manager": manager.url,
            "broker": f"tcp://127.0.0.1:{free_port()}",
            "labels": ["site=x"],
        }
        here = site.start("here", "a/#", **more)
        more["broker"] = f"tcp://127.0.0.1:{free_port()}"
        origin = site.start("origin", **more)
        more["broker"] = f"tcp://127.0.0.1:{free_port()}"
        third = site.start("third", **more)
        origin.wants("a/#")
        for process in (here, origin, third):
            process.until(
                lambda process=process: len(process.status()["links"]) == 2,  # type: ignore[misc]
                "links",
            )
        assert {node["uuid"] for node in manager.ask("GET", "/nodes")} == {
            here.id, origin.id, third.id,
        }  # fmt: skip
        manager.kill()
        for number in range(50):
            origin.publish(str(number))
        arrived(here, {str(number) for number in range(50)})
        here.kill()
        for number in range(50, 100):
            origin.publish(str(number))
        done(origin, 100)
        # Its neighbours are in its directory.
        here.start()
        arrived(here, {str(number) for number in range(100)})
        assert not here.status()["manager"]["connected"]
        manager.start()
        deadline = time.monotonic() + 60
        while True:
            nodes = {node["uuid"]: node for node in manager.ask("GET", "/nodes")}
            # They report by themselves, and the one that was restarted has joined again.
            if (
                all(
                    node["reported_ago_s"] is not None and node["digest"] for node in nodes.values()
                )
                and nodes[here.id]["epoch"] == 2
            ):
                break
            assert time.monotonic() < deadline, nodes
            time.sleep(0.1)
        assert len(nodes) == 3
        links = manager.ask("GET", "/topology")["links"]
        assert [link["up"] for link in links] == [True, True, True]
        assert here.status()["manager"]["connected"]
    finally:
        manager.kill()
    # It was killed right behind its first messages, which may come again.
    assert set(here.payloads()) == {str(number) for number in range(100)}
    check_order(here)


def join_token(manager: ManagerProcess, operator: str) -> str:
    request = urllib.request.Request(f"{manager.url}/api/v1/join-tokens", b"{}", method="POST")
    request.add_header("Authorization", f"Bearer {operator}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["data"]["token"])


def test_a_join_token_is_used_once(site: Site, tmp_path: Path) -> None:
    """What a member got for it opens the manager's door after a restart."""
    directory = tmp_path / "manager"
    directory.mkdir()
    operator = "the operator's token"
    manager = ManagerProcess(
        directory,
        HOLDFAST_TOPOLOGY__TOKEN=operator,
        HOLDFAST_TOPOLOGY__PROBE_INTERVAL_S="5",
    )
    manager.start()
    try:
        token_file = tmp_path / "token"
        token_file.write_text(join_token(manager, operator))
        member = site.start(
            "member",
            manager=manager.url,
            manager_token_file=str(token_file),
            broker=f"tcp://127.0.0.1:{free_port()}",
        )
        member.until(lambda: member.status()["manager"]["connected"], "a place")
        place = member.status()["manager"]["id"]
        member.kill()
        member.start()
        member.until(lambda: member.status()["manager"]["connected"], "its place again")
        assert member.status()["manager"]["id"] == place
        kept = Path(member.settings["data"]) / "manager.json"
        assert kept.stat().st_mode & 0o077 == 0
        # Without it the used token does not help, and the log says what does.
        member.kill()
        kept.unlink()
        member.start()
        member.until(lambda: "has been used by member" in member.log(), "a line")
        token_file.write_text(operator + "\n")
        member.until(lambda: member.status()["manager"]["connected"], "its place, by another token")
        assert member.status()["manager"]["id"] == place
    finally:
        manager.kill()


def test_a_member_shows_the_manager_its_certificate(site: Site, tmp_path: Path) -> None:
    directory = tmp_path / "manager"
    directory.mkdir()
    authority = Authority(tmp_path)
    server, root, mine = authority.issue(), authority.issue("root"), authority.issue("member-1")
    manager = ManagerProcess(
        directory,
        HOLDFAST_TOPOLOGY__CERTIFICATE=server.certificate,
        HOLDFAST_TOPOLOGY__KEY=server.key,
        HOLDFAST_TOPOLOGY__CLIENT_CA=authority.ca,
        HOLDFAST_TOPOLOGY__OPERATORS="root",
        HOLDFAST_TOPOLOGY__PROBE_INTERVAL_S="60",
    )
    manager.tls = ssl.create_default_context(cafile=authority.ca)
    manager.tls.load_cert_chain(root.certificate, root.key)
    manager.start()
    try:
        member = site.start(
            "member",
            manager=manager.url,
            manager_ca=authority.ca,
            manager_certificate=mine.certificate,
            manager_key=mine.key,
            broker=f"tcp://127.0.0.1:{free_port()}",
        )
        member.until(lambda: member.status()["manager"]["connected"], "a place")
        place = member.status()["manager"]["id"]
        member.kill()
        member.start()
        member.until(lambda: member.status()["manager"]["connected"], "its place again")
        [node] = manager.ask("GET", "/nodes")
        assert (node["id"], node["certificate"], node["epoch"]) == (place, "member-1", 2)
    finally:
        manager.kill()
