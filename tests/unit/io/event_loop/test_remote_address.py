"""The address of a client is in all lines about it, also where only the socket keeps it."""

import asyncio
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from holdfast.io.event_loop.loop import new_event_loop
from holdfast.io.sockets.tcp import TcpConnection
from tests.e2e import wire
from tests.support.broker_in_process import LoopBroker

RESET = struct.pack("ii", 1, 0)


def be_connected(port: int, is_reset: bool) -> str:
    """Connect and leave. Returns the client's own address."""
    with wire.Wire(port) as client:
        client.connect("c")
        host, own_port = client.socket.getsockname()[:2]
        if is_reset:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return f"{host}:{own_port}"


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_lines_have_the_address(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop], is_reset: bool
) -> None:
    async def run() -> tuple[str, list[tuple[str, object]]]:
        broker = LoopBroker(tmp_path)
        await broker.start()
        remote = await asyncio.to_thread(be_connected, broker.port, is_reset)
        await broker.broker.wait_for_disconnects(10.0)
        await broker.stop()
        notes = [each.note for each in broker.broker.notes.after(0)]
        lines = [(note.event, note.fields.get("remote")) for note in notes]
        return remote, [line for line in lines if line[0] != "metadata_leader"]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        remote, notes = runner.run(run())
    assert notes == [("connected", remote), ("disconnected", remote)]


def test_an_idle_connection_leaves_its_address_to_the_socket(tmp_path: Path) -> None:
    async def run() -> list[object]:
        broker = LoopBroker(tmp_path)
        await broker.start()
        client = await asyncio.to_thread(wire.Wire, broker.port)
        await asyncio.to_thread(client.connect, "c")
        connection = broker.broker.node.state.sessions["c"].connection
        assert connection is not None
        # uvloop keeps this callable for each connection, which needs no bound method.
        transport = connection.transport
        assert isinstance(transport, TcpConnection)
        assert transport.data_received is transport
        own = client.socket.getsockname()
        found = [f"{own[0]}:{own[1]}", connection._remote, connection.remote]
        client.socket.close()
        await broker.broker.wait_for_disconnects(10.0)
        found.append(connection.remote)
        await broker.stop()
        return found

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        own, *found = runner.run(run())
    assert found == [None, own, own]
