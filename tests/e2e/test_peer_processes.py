"""Links to nodes that are processes of their own: killed, stopped, started again."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.brokers import SOURCE
from tests.support.peer_mesh import Mesh, run, until
from tests.support.ports import free_port

ROOT = SOURCE.parent


class Processes:
    """Nodes as processes; whatever happens, they end with the test."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}

    def address(self, node_id: str) -> str:
        return f"127.0.0.1:{self.ports.setdefault(node_id, free_port())}"

    def start(self, node_id: str, **peers: str) -> None:
        self.running[node_id] = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.peer_process",
                node_id,
                self.address(node_id).rpartition(":")[2],
                *(f"{peer}={address}" for peer, address in peers.items()),
            ],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env=dict(os.environ, PYTHONPATH=f"{SOURCE}:{ROOT}"),
        )

    def signal(self, node_id: str, number: int) -> None:
        self.running[node_id].send_signal(number)

    def kill(self, node_id: str) -> None:
        process = self.running.pop(node_id)
        process.kill()
        process.communicate()


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    for node_id in list(started.running):
        started.kill(node_id)


def test_kill_and_restart(processes: Processes) -> None:
    """The death of a process is known by its socket and its port; its return as well."""

    async def test() -> None:
        async with Mesh() as mesh:
            one = await mesh.start("n1")
            for node_id in ("n2", "n3"):
                processes.start(node_id, n1=one.address)
            one.links.set_peers({node_id: processes.address(node_id) for node_id in ("n2", "n3")})
            await until(lambda: one.linked() == ["n2", "n3"])
            for _ in range(3):
                one.events.clear()
                processes.kill("n2")
                await until(lambda: ("refused", "n2") in one.events)
                assert one.events[0] == ("disconnected", "n2")
                assert one.linked() == ["n3"]
                one.frames.clear()
                processes.start("n2", n1=one.address)
                await until(lambda: one.linked() == ["n2", "n3"])
                assert one.events[-1] == ("connected", "n2")
                assert one.links.send("n2", 5, b"still there?")
                await until(lambda: one.frames)
                assert one.frames == [("n2", 5, b"still there?")]
            assert ("disconnected", "n3") not in one.events

    run(test)


def test_a_stopped_process_that_goes_on(processes: Processes) -> None:
    """It does not read: what is sent waits up to the limit, then the link is closed, and made
    again when the process goes on. Nothing is lost or repeated within one link."""

    async def test() -> None:
        async with Mesh() as mesh:
            one = await mesh.start("n1", send_bytes_max=1_000_000, handshake_timeout_s=1.0)
            processes.start("n2", n1=one.address)
            one.links.set_peers({"n2": processes.address("n2")})
            await until(lambda: one.linked() == ["n2"])

            processes.signal("n2", signal.SIGSTOP)
            sent = [number.to_bytes(4, "big") * 20 for number in range(100)]
            for payload in sent:
                assert one.links.send("n2", 1, payload)
                await asyncio.sleep(0)
            processes.signal("n2", signal.SIGCONT)
            await until(lambda: len(one.frames) == 100)
            assert [payload for _, _, payload in one.frames] == sent
            assert ("disconnected", "n2") not in one.events

            one.events.clear()
            processes.signal("n2", signal.SIGSTOP)
            await until(lambda: not one.links.send("n2", 1, b"x" * 1_000_000))
            await until(lambda: ("disconnected", "n2") in one.events)
            # The kernel still accepts for it; a handshake that nobody answers ends by its time.
            await until(lambda: one.refusals("timeout"))
            assert ("refused", "n2") not in one.events
            processes.signal("n2", signal.SIGCONT)
            await until(lambda: one.linked() == ["n2"])
            one.frames.clear()
            assert one.links.send("n2", 2, b"again")
            await until(lambda: one.frames)
            assert one.frames == [("n2", 2, b"again")]

    run(test)


def test_mesh_of_processes_survives_a_storm_of_kills(processes: Processes) -> None:
    """After any order of deaths and returns every pair is linked, once."""

    async def test() -> None:
        async with Mesh() as mesh:
            one = await mesh.start("n2")
            names = ["n1", "n3"]
            peers: dict[str, Any] = {name: processes.address(name) for name in names}
            peers["n2"] = one.address
            for name in names:
                processes.start(name, **peers)
            one.links.set_peers(peers)
            for turn in range(4):
                await until(lambda: one.linked() == names)
                name = names[turn % 2]
                connects = one.links.metrics.connects
                processes.kill(name)
                processes.start(name, **peers)
                await until(lambda: one.links.metrics.connects > connects)  # noqa: B023
            await until(lambda: one.linked() == names)
            for name in names:
                told = [event for event, node_id in one.events if node_id == name]
                links = [event for event in told if event != "refused"]
                assert links == ["connected", "disconnected"] * (len(links) // 2) + ["connected"]

    run(test)
