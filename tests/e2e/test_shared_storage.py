"""Nodes on one data directory in odd situations: what was acknowledged stays, and nobody serves who
should not."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from holdfast.security.dynamic.document import (
    PUBLISHES,
    RoleAcl,
    RoleGrant,
    SecurityDocument,
    SecurityRole,
    SecurityUser,
)
from holdfast.security.dynamic.file import write
from holdfast.security.passwords import hash_password
from tests.e2e import wire
from tests.e2e.brokers import SOURCE, Holdfast
from tests.e2e.pair import WAIT_S, Node, pair, wait_until

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
LEASE_S = 1.5
"""Long enough for a machine that is busy with other tests."""
LEASE = {"timeout_s": LEASE_S, "heartbeat_s": 0.1, "kill_stale_holder": False}
"""A holder that hangs must be kept from promising by the fence alone."""


def nodes_on(
    directory: Path,
    names: str = "ab",
    data: Path | None = None,
    log: dict[str, object] | None = None,
) -> AbstractContextManager[list[Node]]:
    """As `pair`."""
    return pair(directory, {"lease": LEASE, "log": log or {}}, data, names)


class Traffic:
    """Numbered QoS 1 messages on `t`, one after the other, and a durable session that is away."""

    def __init__(self, node: Node) -> None:
        self.acknowledged: list[int] = []
        self.number = 0
        with wire.Wire(node.port) as reader:
            reader.connect("reader", clean=False, expiry_s=3600)
            reader.subscribe(("t", 1))
            reader.disconnect()
        self.connect(node)

    def connect(self, node: Node) -> None:
        self.wire = wire.Wire(node.port)
        self.wire.connect("writer", expiry_s=3600)

    def send(self, count: int = 1) -> None:
        """Raises Closed, OSError or TimeoutError: then the last one may be there, or not."""
        for _ in range(count):
            self.number += 1
            assert self.wire.publish("t", b"%d" % self.number, qos=1) < 0x80
            self.acknowledged.append(self.number)

    def check(self, node: Node) -> None:
        """Everything acknowledged is there, in order; what was in doubt at most once."""
        last = self.acknowledged[-1]
        found: list[int] = []
        with wire.Wire(node.port) as reader:
            assert reader.connect("reader", clean=False, expiry_s=3600).session_present
            while not found or found[-1] != last:
                found.append(int(reader.message().payload))
        assert found == sorted(set(found))
        assert not set(self.acknowledged) - set(found)


def holder_of(nodes: list[Node]) -> Node:
    wait_until(lambda: any(node.process and node.serves() for node in nodes), "somebody serves")
    return next(node for node in nodes if node.process and node.serves())


def serve(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A node that is expected not to start."""
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", "--admin", "off", "-p", "0"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def verify(data: Path) -> None:
    """`holdfast log verify` finds no damage."""
    result = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "log", "verify", str(data)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_same_node_twice(tmp_path: Path) -> None:
    with nodes_on(tmp_path, "a") as (node,):
        traffic = Traffic(node)
        second = serve("--standby", "--id", "a", "--data", node.data)
        assert second.returncode == 1
        assert "a node 'a' is running on this directory already" in second.stderr + second.stdout
        traffic.send()
        assert node.serves()
        traffic.check(node)


def test_a_port_that_is_taken_for_a_moment(tmp_path: Path) -> None:
    """Its own old connections, or anybody's, may sit on a port that a node wants back."""
    with nodes_on(tmp_path) as (_, second):
        second.stop()
        with socket.socket() as squatter, ThreadPoolExecutor() as pool:
            squatter.bind(("127.0.0.1", second.port))
            starting = pool.submit(second.start)
            wait_until(lambda: "port_taken" in second.log_text(), "b waits for its port")
            squatter.close()
            starting.result()
        assert second.stands_by()


def test_three_nodes_and_one_holder_at_a_time(tmp_path: Path) -> None:
    with nodes_on(tmp_path, "abc") as nodes:
        traffic = Traffic(nodes[0])
        for rest in (2, 1):
            traffic.send(20)
            holder = holder_of(nodes)
            holder.kill()
            alive = [node for node in nodes if node.process]
            traffic.connect(holder_of(alive))
            assert sum(node.serves() for node in alive) == 1
            assert len(alive) == rest
        traffic.send(5)
        traffic.check(holder_of(nodes))
        verify(nodes[0].data)


def test_alone_and_shared_do_not_mix(tmp_path: Path) -> None:
    with nodes_on(tmp_path, "a") as (node,):
        alone = serve("--data", node.data)
        assert alone.returncode == 1
        assert "start this one with --standby" in alone.stderr + alone.stdout
        assert node.serves()
    plain = Holdfast(tmp_path, data=tmp_path / "plain")
    plain.start()
    try:
        standby = serve("--standby", "--data", plain.data)
        assert standby.returncode == 1
        assert "/plain is served by " in standby.stderr + standby.stdout
        assert plain.ready()
        assert not (plain.data / "lease").exists()
    finally:
        plain.kill()


def test_a_plain_directory_becomes_shared_and_keeps_everything(tmp_path: Path) -> None:
    data = tmp_path / "data"
    plain = Holdfast(tmp_path, {"log": {"segment_bytes": 1 << 16}}, data)
    # A pair has no directory of several processes.
    plain.processes = 1
    plain.start()
    with wire.Wire(plain.port) as client:
        client.connect("reader", clean=False, expiry_s=3600)
        client.subscribe(("kept/#", 1))
        client.disconnect()
    with wire.Wire(plain.port) as client:
        client.connect("writer")
        client.publish("state/x", b"retained", qos=1, retain=True)
        for number in range(300):
            client.publish(f"kept/{number % 3}", b"%d" % number + bytes(1000), qos=1)
    plain.kill()
    segments = len(list((data / "journal").glob("*.log")))
    assert segments > 2
    with nodes_on(tmp_path, data=data, log={"segment_bytes": 1 << 16}) as (first, second):
        first.kill()
        wait_until(second.serves, "b serves")
        with wire.Wire(second.port) as client:
            assert client.connect("reader", clean=False, expiry_s=3600).session_present
            numbers = [int(client.message().payload.strip(b"\0")) for _ in range(300)]
            assert sorted(numbers) == list(range(300))
            client.subscribe(("state/#", 1))
            message = client.message()
            assert (message.payload, message.retain) == (b"retained", True)
        verify(data)


def test_a_stopped_holder_that_goes_on_promises_nothing(tmp_path: Path) -> None:
    with nodes_on(tmp_path) as (first, second):
        traffic = Traffic(first)
        for _ in range(2):
            old = holder_of([first, second])
            new = second if old is first else first
            traffic.connect(old)
            traffic.send(20)
            assert old.process is not None
            os.kill(old.process.pid, signal.SIGSTOP)
            for _ in range(5):
                traffic.number += 1
                traffic.wire.send(wire.publish("t", b"%d" % traffic.number, 1, traffic.number))
            wait_until(new.serves, "the other one serves")
            stale, fresh = traffic.wire, Traffic(new)
            fresh.send(5)
            os.kill(old.process.pid, signal.SIGCONT)
            try:
                answers = stale.wait_closed(10)
            except ConnectionError:
                answers = []
            assert not [frame for frame in answers if frame.kind == wire.PUBACK]
            # The same process, as a standby.
            wait_until(old.stands_by, "the old one stands by")
            assert new.serves()
            assert "lease_lost" in old.log_text()
            verify(first.data)


def test_a_standby_killed_in_the_middle_of_its_takeover(tmp_path: Path) -> None:
    """At any moment of it: the next one finds everything."""
    chance = random.Random(4)
    with nodes_on(tmp_path, "abc") as nodes:
        traffic = Traffic(nodes[0])
        for _ in range(4):
            holder = holder_of(nodes)
            traffic.connect(holder)
            traffic.send(10)
            victim = next(node for node in nodes if node is not holder)
            holder.kill()
            # Most of a takeover is over within some hundredths of a second.
            time.sleep(chance.random() * 0.06)
            victim.kill()
            holder_of(nodes)
            for node in (holder, victim):
                node.start()
        traffic.connect(holder_of(nodes))
        traffic.send(5)
        traffic.check(holder_of(nodes))
        verify(nodes[0].data)


def test_both_killed(tmp_path: Path) -> None:
    with nodes_on(tmp_path) as nodes:
        traffic = Traffic(nodes[0])
        traffic.send(50)
        for node in nodes:
            node.kill()
        nodes[1].start()
        wait_until(nodes[1].serves, "b serves")
        traffic.check(nodes[1])
        verify(nodes[0].data)


def test_nobody_guesses_what_a_damaged_epoch_sealed(tmp_path: Path) -> None:
    with nodes_on(tmp_path) as (first, second):
        traffic = Traffic(first)
        traffic.send(10)
        first.kill()
        wait_until(second.serves, "b serves")
        traffic.connect(second)
        traffic.send(10)
        second.kill()
        file = second.newest_epoch_folder() / "epoch.json"
        whole = file.read_bytes()
        file.write_bytes(whole.replace(b'"epoch": 2', b'"epoch": 7'))
        first.process = subprocess.Popen(
            first.command(), stderr=first.log.open("ab"), stdout=subprocess.DEVNULL, env=ENVIRONMENT
        )
        wait_until(lambda: "epoch.json is damaged" in first.log_text(), "the log says it")
        assert not first.serves()
        result = subprocess.run(
            [sys.executable, "-m", "holdfast.cli.main", "log", "verify", str(first.data)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        assert result.returncode != 0
        assert "epoch.json is damaged: restore it" in result.stdout + result.stderr
        file.write_bytes(whole)
        wait_until(first.serves, "a serves")
        traffic.check(first)


def test_users_of_dynamic_security_are_those_of_the_directory(tmp_path: Path) -> None:
    """A change at the holder is in force at the next one, and no reload brings the file back."""
    file, document = tmp_path / "users.json", SecurityDocument()
    _, _, iterations, salt, password = hash_password("secret", iterations=1).split("$")
    commands = RoleAcl(PUBLISHES, "$CONTROL/dynamic-security/#", allow=True)
    document.roles["admin"] = SecurityRole("admin", acls=(commands,))
    document.users["admin"] = SecurityUser(
        "admin",
        roles=(RoleGrant("admin"),),
        iterations=int(iterations),
        salt=salt,
        password=password,
    )
    write(file, document)
    security = {"dynamic_security_file": str(file), "allow_anonymous": False}

    def login(client: wire.Wire, user: str) -> bool:
        client.send(wire.connect(user, username=user, password=b"secret"))
        return wire.read_connack(client.expect(wire.CONNACK), 5).reason == 0

    def may_log_in(node: Node) -> bool:
        with wire.Wire(node.port) as client:
            return login(client, "alice")

    with pair(tmp_path, {"lease": LEASE, "security": security}) as (first, second):
        assert not may_log_in(first)
        with wire.Wire(first.port) as admin:
            assert login(admin, "admin")
            change = {"command": "createClient", "username": "alice", "password": "secret"}
            command = json.dumps({"commands": [change]}).encode()
            assert admin.publish("$CONTROL/dynamic-security/v1", command, qos=1) < 0x80
            wait_until(lambda: may_log_in(first), "alice is a user")
        first.kill()
        wait_until(second.serves, "b serves")
        assert may_log_in(second)
        assert second.process is not None
        second.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "reloaded settings" in second.log_text(), "b has reloaded")
        assert may_log_in(second)


# The directory itself


def test_the_directory_vanishes_and_comes_back(tmp_path: Path) -> None:
    """The holder ends, or stands by as long as it must; nobody begins a new directory in its place;
    who stood by takes over when it is back."""
    with nodes_on(tmp_path) as (first, second):
        traffic = Traffic(first)
        traffic.send(20)
        away = tmp_path / "away"
        first.data.rename(away)
        assert first.process is not None
        first.process.wait(WAIT_S)
        assert not first.data.exists()
        assert "the data directory is gone" in first.log_text()
        assert not second.serves()
        away.rename(first.data)
        wait_until(second.serves, "b serves")
        traffic.connect(second)
        traffic.send(5)
        traffic.check(second)
        verify(first.data)


def test_an_empty_mount_point_is_not_a_new_directory(tmp_path: Path) -> None:
    """What is seen when a file system is not mounted."""
    with nodes_on(tmp_path) as (first, second):
        traffic = Traffic(first)
        traffic.send(20)
        away = tmp_path / "away"
        first.data.rename(away)
        first.data.mkdir()
        assert first.process is not None
        first.process.wait(WAIT_S)
        assert list(first.data.iterdir()) == []
        assert not second.serves()
        first.data.rmdir()
        away.rename(first.data)
        wait_until(second.serves, "b serves")
        traffic.check(second)


def mount(*arguments: object) -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    command = ["mount", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, 64 MiB in memory."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount("-t", "tmpfs", "-o", f"size={64 << 20}", "tmpfs", mounted)
    yield mounted
    # What a test has mounted over it, too.
    while subprocess.run(["umount", "-l", str(mounted)], capture_output=True).returncode == 0:
        pass


def test_the_directory_becomes_read_only(tmp_path: Path, disk: Path) -> None:
    """Through files that it has open the holder goes on. When it dies nobody can take over, and
    somebody does as soon as it is possible."""
    with nodes_on(tmp_path, data=disk / "data") as (first, second):
        traffic = Traffic(first)
        traffic.send(20)
        mount("-o", "bind", disk, disk)
        mount("-o", "remount,bind,ro", disk)
        traffic.send(5)
        first.kill()
        wait_until(lambda: "Read-only file system" in second.log_text(), "the log says it")
        assert not second.serves()
        mount("-o", "remount,bind,rw", disk)
        wait_until(second.serves, "b serves")
        traffic.connect(second)
        traffic.send(5)
        traffic.check(second)
        verify(first.data)


def test_the_disk_fills_up_and_the_holder_dies(tmp_path: Path, disk: Path) -> None:
    log: dict[str, object] = {"reserve_bytes": 1 << 16, "segment_bytes": 1 << 20}
    with nodes_on(tmp_path, data=disk / "data", log=log) as (first, second):
        traffic = Traffic(first)
        traffic.send(20)
        hog = disk / "hog"
        with hog.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:
                pass
        first.kill()
        time.sleep(LEASE_S + 0.5)
        claims = json.dumps([path.name for path in (disk / "data" / "lease").iterdir()])
        hog.unlink()
        wait_until(second.serves, "b serves")
        assert claims.count(".claim") < 4
        traffic.connect(second)
        traffic.send(5)
        traffic.check(second)
        verify(disk / "data")
