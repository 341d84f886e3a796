"""Links between nodes over real sockets, all in one event loop."""

import asyncio
import dataclasses
import logging
import random
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from msgspec.structs import replace

from holdfast.config.schema import Cluster
from holdfast.io.peers import inquiry
from holdfast.io.peers.authentication import PeerAuth
from holdfast.io.peers.mesh import GREETINGS_MAX
from holdfast.security.peer_handshake import MAGIC, Handshake
from holdfast.security.peer_identity import PeerIdentity, Refusal
from holdfast.security.tls import TlsError
from tests.support.peer_mesh import BAD_KIND, SECRET, Mesh, PeerNode, run, until
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def no_errors_of_the_loop(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A callback or a task that failed is logged by asyncio, and nowhere else."""
    yield
    assert [one for one in caplog.records if one.name == "asyncio"] == []


async def linked_pair(mesh: Mesh, **changes: Any) -> tuple[PeerNode, PeerNode]:
    one = await mesh.start("n1", **changes)
    two = await mesh.start("n2", **changes)
    one.links.set_peers({"n2": two.address})
    await until(lambda: one.linked() and two.linked())
    return one, two


def test_a_port_that_does_not_reply_may_be_no_peer_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """An HTTP server waits for the rest of a line."""
    monkeypatch.setattr(
        inquiry, "BOUNDS", dataclasses.replace(inquiry.BOUNDS, handshake_timeout_s=0.2)
    )

    async def test() -> None:
        with socket.create_server(("127.0.0.1", free_port())) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            auth = PeerAuth.load(Cluster())
            with pytest.raises(Refusal, match="not a peer port"):
                await inquiry.ask_identity(address, PeerIdentity("n1", "0", ""), auth)

    run(test)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_three_nodes_find_each_other(loop: str) -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            nodes = [await mesh.start(f"n{number}") for number in range(1, 4)]
            addresses = [node.address for node in nodes]
            for node in nodes:
                node.links.set_join(addresses)
            await until(lambda: all(len(node.linked()) == 2 for node in nodes))
            peers = {node.node_id: node.address for node in nodes}
            for node in nodes:
                node.links.set_cluster("c", 1)
                node.links.set_peers(peers)
            assert nodes[0].identities["n3"].peer_address == nodes[2].address
            assert nodes[0].links.send("n3", 7, b"hello")
            await until(lambda: nodes[2].frames)
            assert nodes[2].frames == [("n1", 7, b"hello")]
            for node in nodes:
                assert [event for event, _ in node.events] == ["connected", "connected"]

    run(test, loop=loop)


def test_an_address_without_a_name_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            node = await mesh.start("n1")
            address = f"127.0.0.1:{free_port()}"
            with caplog.at_level("INFO"):
                node.links.set_join([address])
                await until(lambda: "peer_problem" in caplog.text)
            told = [each.getMessage() for each in caplog.records if "problem" in each.msg]
            assert told == [f"peer_problem text='nothing listens at {address}'"]

    run(test)


def test_a_problem_of_either_side_has_a_subject(caplog: pytest.LogCaptureFixture) -> None:
    """A reset is information in both directions, because the restart of a node causes it."""

    async def test() -> None:
        async with Mesh() as mesh:
            node = await mesh.start("n1")
            _, writer = await asyncio.open_connection(*node.address.split(":"))
            stranger = "{}:{}".format(*writer.get_extra_info("sockname"))
            await until(lambda: node.links._open)
            one: socket.socket = writer.get_extra_info("socket")
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with caplog.at_level("INFO"):
                writer.transport.abort()
                await until(lambda: "peer_problem" in caplog.text)
            told = [each for each in caplog.records if "problem" in each.msg]
            text = f"peer_problem text='{stranger}: reset the connection'"
            assert [(each.levelname, each.getMessage()) for each in told] == [("INFO", text)]

    run(test)


@pytest.mark.parametrize("seed", range(20))
def test_both_dial_at_the_same_moment(seed: int) -> None:
    """Whoever comes first by how much: one link, and both have the same."""

    async def test() -> None:
        chance = random.Random(seed)
        async with Mesh() as mesh:
            one, two = await mesh.start("n1"), await mesh.start("n2")

            async def dial(node: PeerNode, other: PeerNode) -> None:
                for _ in range(chance.randrange(12)):
                    await asyncio.sleep(0)
                node.links.set_peers({other.node_id: other.address})

            await asyncio.gather(dial(one, two), dial(two, one))
            await until(lambda: one.linked() and two.linked())
            one.answers = True
            for number in range(50):
                assert two.links.send("n1", 1, bytes((number,)))
                await asyncio.sleep(0)
            await until(lambda: len(two.frames) == 50)
            assert two.frames == [("n1", 1, bytes((number,))) for number in range(50)]
            for node in (one, two):
                assert [event for event, _ in node.events] == ["connected"]

    run(test)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_frames_arrive_whole_and_in_order(loop: str) -> None:
    async def test() -> None:
        chance = random.Random(1)
        async with Mesh() as mesh:
            one, two = await linked_pair(mesh)
            sent: list[tuple[str, int, bytes]] = []
            for _ in range(300):
                size = chance.choice((0, 1, 100, 5000, 70_000, 300_000))
                pieces = [chance.randbytes(size // 4) for _ in range(chance.randrange(5))]
                sent.append(("n1", chance.randrange(BAD_KIND), b"".join(pieces)))
                payload = pieces if chance.random() < 0.5 else b"".join(pieces)
                assert one.links.send("n2", sent[-1][1], payload)
                if chance.random() < 0.3:
                    one.links.flush()
                if chance.random() < 0.3:
                    await asyncio.sleep(0)
            await until(lambda: len(two.frames) == len(sent))
            assert two.frames == sent
            assert one.links.metrics.frames_out == two.links.metrics.frames_in == 300
            assert one.links.metrics.bytes_out == two.links.metrics.bytes_in
            await until(lambda: one.links.pending_bytes("n2") == 0)
            assert not one.links.send("nobody", 1, b"")
            assert one.links.pending_bytes("nobody") == 0

    run(test, loop=loop)


def test_one_turn_is_one_write() -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one, two = await linked_pair(mesh)
            link = one.links._links["n2"]
            writes: list[int] = []
            transport: Any = link._transport

            class Counting:
                def write(self, data: bytes) -> None:
                    writes.append(len(data))
                    transport.write(data)

                def __getattr__(self, name: str) -> Any:
                    return getattr(transport, name)

            link._transport = Counting()  # type: ignore[assignment]
            for _ in range(100):
                one.links.send("n2", 1, b"12345")
            assert writes == []
            assert one.links.pending_bytes("n2") == 1000
            await until(lambda: len(two.frames) == 100)
            assert writes == [1000]

    run(test)


@pytest.mark.parametrize("seed", range(6))
def test_a_storm_of_ends_and_beginnings(seed: int) -> None:
    """Links are closed, nodes end and come back, on either side and at the same time; then every
    pair is linked, both ends mean the same connection, and each handler was told in turn."""

    async def test() -> None:
        chance = random.Random(seed)
        async with Mesh() as mesh:
            nodes = {name: await mesh.start(name) for name in ("n1", "n2", "n3", "n4")}
            peers = {name: node.address for name, node in nodes.items()}
            for node in nodes.values():
                node.links.set_peers(peers)
            for _ in range(60):
                name = chance.choice(list(nodes))
                match chance.randrange(4):
                    case 0:
                        old = nodes[name]
                        await old.links.stop()
                        nodes[name] = await mesh.start(name, port=old.links.port)
                        nodes[name].links.set_peers(peers)
                    case 1:
                        nodes[name].links.close(chance.choice(list(nodes)), "in the test")
                    case 2:
                        for link in list(nodes[name].links._links.values())[:2]:
                            link.abort()
                    case _:
                        fewer = {one: peers[one] for one in chance.sample(list(peers), 2)}
                        nodes[name].links.set_peers(fewer)
                        nodes[name].links.set_peers(peers)
                for _ in range(chance.choice((0, 1, 3, 20))):
                    await asyncio.sleep(0)
                if chance.random() < 0.2:
                    await asyncio.sleep(0.03)
            await until(lambda: all(len(node.linked()) == 3 for node in nodes.values()))
            await settled(list(nodes.values()))
            for node in mesh.nodes:
                for name in nodes:
                    told = [event for event, peer in node.events if peer == name]
                    links = [event for event in told if event != "refused"]
                    assert links[::2] == ["connected"] * len(links[::2])
                    assert links[1::2] == ["disconnected"] * len(links[1::2])

    run(test)


async def settled(nodes: list[PeerNode]) -> None:
    """Every node can reach every other one: a link may look alive on one side for a moment."""

    def all_heard() -> bool:
        for node in nodes:
            heard = {sender for sender, _, _ in node.frames}
            if len(heard) < len(nodes) - 1:
                return False
        return True

    for node in nodes:
        node.frames.clear()

    async def ask() -> None:
        while True:
            for node in nodes:
                for other in node.linked():
                    node.links.send(other, 1, b"")
            await asyncio.sleep(0.01)

    asking = asyncio.ensure_future(ask())
    await until(all_heard)
    asking.cancel()


def test_links_follow_the_list_of_peers() -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one, two, three = [await mesh.start(f"n{number}") for number in range(1, 4)]
            one.links.set_peers({"n1": one.address, "n2": two.address, "n3": three.address})
            await until(lambda: one.linked() == ["n2", "n3"])
            one.links.set_peers({"n1": one.address, "n3": three.address})
            await until(lambda: two.events[-1:] == [("disconnected", "n1")])
            assert one.linked() == ["n3"]
            assert not one.links.send("n2", 1, b"")
            # Who is not on the list may come by itself, as a node that wants to join.
            two.links.set_join([one.address])
            await until(lambda: one.linked() == ["n2", "n3"])

    run(test)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_lost_peer_is_refused_and_comes_back(loop: str) -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one, two = await linked_pair(mesh)
            port = two.links.port
            await two.links.stop()
            await until(lambda: ("refused", "n2") in one.events)
            assert one.events[:3] == [
                ("connected", "n2"),
                ("disconnected", "n2"),
                ("refused", "n2"),
            ]
            assert one.refusals("nobody") >= 1
            again = await mesh.start("n2", port=port)
            await until(lambda: one.linked() == ["n2"])
            await until(lambda: again.linked() == ["n1"])

    run(test, loop=loop)


def test_join_addresses_are_the_way_back_when_all_addresses_have_changed() -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one, two = await mesh.start("n1"), await mesh.start("n2")
            one.links.set_peers({"n2": f"127.0.0.1:{free_port()}"})
            one.links.set_join([one.address, two.address])
            await until(lambda: one.linked() == ["n2"])

    run(test)


def test_no_dialling_without_end_of_what_is_connected() -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            nodes = [await mesh.start(f"n{number}") for number in range(1, 3)]
            for node in nodes:
                node.links.set_join([each.address for each in nodes])
            await until(lambda: all(node.linked() for node in nodes))
            dialers = [each for node in nodes for each in node.links._dialers.values()]
            assert len(dialers) == 2
            await until(lambda: not any(dialer.needed.is_set() for dialer in dialers))
            assert all(node.events == [("connected", node.linked()[0])] for node in nodes)

    run(test)


def test_a_node_knows_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one = await mesh.start("n1", peer_address="other.name:1")
            one.links.set_join([one.address])
            await until(lambda: one.refusals("self") == 2)
            assert one.events == []
            assert one.links._dialers == {}

    run(test)
    assert caplog.records == []


def complaints(caplog: pytest.LogCaptureFixture, *levels: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno in (levels or (logging.WARNING, logging.ERROR))
    ]


async def strangers(mesh: Mesh, one: PeerNode, two: PeerNode, *reasons: str) -> None:
    """Dial each other, and wait until both have refused or been refused."""
    one.links.set_join([two.address])
    two.links.set_join([one.address])
    await until(lambda: one.refusals(*reasons) >= 3 and two.refusals(*reasons) >= 3)
    assert one.linked() == two.linked() == []
    assert one.events == two.events == []


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"wire_version": 1}, {"wire_version": 2}, "wire version 2, this node speaks 1: upgrade"),
        ({"cluster_id": "a"}, {"cluster_id": "b"}, "n2 belongs to the cluster b, n1 to a"),
        ({"node_id": "n2"}, {}, "two nodes have the id n2"),
        ({"auth": PeerAuth(b"x" * 32)}, {}, "does not know this cluster's secret"),
        ({"auth": PeerAuth()}, {}, "has it the same cluster.secret_file?"),
    ],
)
def test_who_does_not_belong_together(
    caplog: pytest.LogCaptureFixture, first: dict[str, Any], second: dict[str, Any], text: str
) -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one = await mesh.start(**({"node_id": "n1"} | first))
            two = await mesh.start(**({"node_id": "n2"} | second))
            await strangers(
                mesh,
                one,
                two,
                *("version", "cluster", "same_id", "secret", "secret_there", "refused_there"),
            )
            said.extend(complaints(caplog))

    said: list[str] = []
    run(test)
    assert any(text in line for line in said), said
    # Again and again refused, but not again and again logged: one line per end and direction.
    assert len(said) <= 4, said
    assert len(set(said)) == len(said)


def test_set_cluster_parts_with_nodes_of_another() -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one = await mesh.start("n1")
            two = await mesh.start("n2", cluster_id="b")
            three = await mesh.start("n3")
            one.links.set_join([two.address, three.address])
            await until(lambda: one.linked() == ["n2", "n3"])
            one.links.set_cluster("a", 1)
            await until(lambda: two.events == [("connected", "n1"), ("disconnected", "n1")])
            assert one.linked() == ["n3"]

    run(test)


def test_who_was_removed_comes_back_only_with_another_disk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one, two = await linked_pair(mesh)
            disk = two.links.identity.incarnation
            one.links.set_removed([("n2", disk), ("n3", disk)])
            await until(lambda: two.events == [("connected", "n1"), ("disconnected", "n1")])
            two.links.set_join([one.address])
            await until(lambda: two.refusals("removed_there") >= 2)
            # It is told, and so knows that it is for good.
            assert two.events[2:4] == [("removed", ""), ("removed", "")]
            assert one.linked() == []
            wiped = await mesh.start("n2", incarnation="another")
            wiped.links.set_join([one.address])
            await until(lambda: one.linked() == ["n2"])
            assert ("removed", "") not in wiped.events
            assert ("removed", "") not in one.events

    run(test)
    assert any("n2 was removed from the cluster" in line for line in complaints(caplog))


def test_a_wiped_disk_is_no_restart(caplog: pytest.LogCaptureFixture) -> None:
    """As long as the link to the earlier one lives; a second process of the same directory, which
    can only be a restart, replaces it."""

    async def test() -> None:
        async with Mesh() as mesh:
            one, _ = await linked_pair(mesh)
            wiped = await mesh.start("n2", incarnation="another")
            wiped.links.set_join([one.address])
            await until(lambda: wiped.refusals("refused_there") >= 2)
            assert wiped.events == []
            assert one.events == [("connected", "n2")]
            again = await mesh.start("n2")
            again.links.set_join([one.address])
            await until(lambda: again.linked() == ["n1"] and len(one.events) >= 3)
            assert one.events[:3] == [
                ("connected", "n2"),
                ("disconnected", "n2"),
                ("connected", "n2"),
            ]

    run(test)
    assert any("another node is connected as n2" in line for line in complaints(caplog))


@pytest.mark.parametrize(("stays", "restarts"), [("n1", "n2"), ("n2", "n1")])
def test_a_restart_that_was_not_noticed(stays: str, restarts: str) -> None:
    """After a power cut the other machine does not say that its connections are gone."""

    async def test() -> None:
        async with Mesh() as mesh:
            one, old = await mesh.start(stays), await mesh.start(restarts)
            old.links.set_join([one.address])
            await until(lambda: one.linked() and old.linked())
            old.links.set_join([])
            new = await mesh.start(restarts)
            new.links.set_join([one.address])
            await until(lambda: new.linked() == [stays] and len(one.events) >= 3)
            assert one.events == [
                ("connected", restarts),
                ("disconnected", restarts),
                ("connected", restarts),
            ]
            one.links.send(restarts, 1, b"to the new one")
            await until(lambda: new.frames)
            assert old.frames == []
            await until(lambda: old.linked() == [])

    run(test)


def test_another_node_at_a_peers_address(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one, two = await mesh.start("n1"), await mesh.start("n2")
            one.links.set_peers({"n3": two.address})
            await until(lambda: one.refusals("unexpected") >= 2)
            assert one.events == two.events == []

    run(test)
    assert any("n2 answers where n3 should be" in line for line in complaints(caplog))


def test_bad_frames_end_the_link_and_only_that(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one, two = await linked_pair(mesh, frame_bytes_max=1000)
            one.links.send("n2", 1, b"good")
            one.links.send("n2", BAD_KIND, b"")
            one.links.send("n2", 1, b"too late")
            await until(lambda: two.events.count(("connected", "n1")) == 2)
            assert two.frames == [("n1", 1, b"good")]
            with pytest.raises(ValueError, match="kind 3 with 1001 bytes"):
                one.links.send("n2", 3, b"x" * 1001)
            one.links._links["n2"]._frame_bytes_max = 2000
            one.links.send("n2", 3, [b"x" * 1000, b"x"])
            await until(lambda: two.events.count(("connected", "n1")) == 3)
            assert two.frames == [("n1", 1, b"good")]

    run(test)
    said = " ".join(complaints(caplog))
    assert "frame of kind 99 that cannot be read: it is bad" in said
    assert "frame of kind 3 with 1001 bytes, more than 1000" in said


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_peer_that_does_not_read_is_cut_off(caplog: pytest.LogCaptureFixture, loop: str) -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one, two = await linked_pair(mesh, send_bytes_max=1_000_000)
            transport = two.links._links["n1"]._transport
            assert transport is not None
            transport.pause_reading()
            sent = 0
            while one.links.send("n2", 1, b"x" * 100_000):
                sent += 1
                assert one.links.pending_bytes("n2") <= 1_100_005
                await asyncio.sleep(0)
            assert sent >= 10
            assert one.links.metrics.overflows == 1
            await until(lambda: ("disconnected", "n2") in one.events)

    run(test, loop=loop)
    assert any("n2" in line and "does not read" in line for line in complaints(caplog))


# Strangers


async def hold(address: str, said: bytes = b"") -> tuple[asyncio.StreamReader, Any]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    return reader, writer


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side closes."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def opening(node_id: str) -> list[bytes]:
    """What a node that dials says: preamble and proof to an acceptor whose nonce is zero."""
    identity = PeerIdentity(node_id, "i")
    dialler = Handshake(True, identity, SECRET, b"d" * 32, lambda peer, last: None)
    said = [dialler.take_out()]
    dialler.receive(MAGIC + b"\0\1" + b"\0" * 32)
    return [*said, dialler.take_out()]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_garbage_gets_nothing(loop: str) -> None:
    async def test() -> None:
        preamble, proof = opening("n9")
        async with Mesh() as mesh:
            one = await mesh.start("n1", handshake_timeout_s=0.1)
            for said in (
                b"",
                b"\0",
                b"GET / HTTP/1.1\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01",
                b"\x10\x0c\x00\x04MQTT\x04\x02\x00<\x00\x00",
                MAGIC,
                MAGIC + b"\0",
                MAGIC + b"\1",
                preamble[:-1],
            ):
                reader, writer = await hold(one.address, said)
                assert await rest(reader) == b"", said
                writer.close()
            for said in (preamble, preamble + proof, preamble + b"\0" * 50, preamble + b"\xff"):
                reader, writer = await hold(one.address, said)
                answer = await rest(reader)
                assert answer[:10] == MAGIC + b"\0\1"
                assert len(answer) == 42, said
                writer.close()
            reader, writer = await hold(one.address, MAGIC + b"\0\2")
            assert (await rest(reader))[:10] == MAGIC + b"\0\1"
            writer.close()
            assert one.events == []
            await until(lambda: not one.links._listener.greetings)

    run(test, loop=loop)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_strangers_cannot_keep_a_node_out(loop: str) -> None:
    """More silent connections than there are places, and a node that still gets in."""

    async def test() -> None:
        async with Mesh() as mesh:
            one = await mesh.start("n1", handshake_timeout_s=60)
            held = [await hold(one.address, MAGIC[:4]) for _ in range(GREETINGS_MAX + 20)]
            await until(lambda: one.refusals("crowded") == 20)
            assert len(one.links._listener.greetings) == GREETINGS_MAX
            for reader, _ in held[:20]:
                assert await rest(reader) == b""
            two = await mesh.start("n2")
            two.links.set_join([one.address])
            await until(lambda: two.linked() == ["n1"])
            for _, writer in held:
                writer.close()

    run(test, loop=loop)


def test_slowness_is_limited_however_busy_it_looks() -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one = await mesh.start("n1", handshake_timeout_s=0.3)
            reader, writer = await hold(one.address)
            ended = asyncio.ensure_future(rest(reader))
            for byte in opening("n9")[0]:
                if ended.done():
                    break
                writer.write(bytes((byte,)))
                await asyncio.wait([ended], timeout=0.05)
            assert await ended == b""
            assert one.refusals("timeout") == 1
            writer.close()

    run(test)


def test_a_dialled_address_that_never_answers() -> None:
    """And one that says nothing but the right magic: the dialler gives no more than a proof."""

    async def test() -> None:
        heard: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(MAGIC + b"\0\1" + b"\0" * 32)
            heard.append(await rest(reader))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        silent = socket.create_server(("127.0.0.1", 0))
        async with Mesh() as mesh:
            one = await mesh.start("n1", handshake_timeout_s=0.1)
            ports = [one_server.getsockname()[1] for one_server in (*server.sockets, silent)]
            one.links.set_join([f"127.0.0.1:{port}" for port in ports])
            await until(lambda: one.refusals("timeout") >= 4 and heard)
            assert len(heard[0]) == 42 + 3 + 32
            assert b"n1" not in heard[0]
        silent.close()
        server.close()
        await server.wait_closed()

    run(test)


def test_an_address_that_cannot_be_used(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one = await mesh.start("n1")
            one.links.set_peers({"n2": "a..b:1", "n3": "no.such.host.invalid:1"})
            await until(lambda: len(complaints(caplog)) == 2)
            assert one.events == []

    run(test)
    assert any(
        "n2 at a..b:1: cannot be reached: no valid host name" in line for line in complaints(caplog)
    )


def test_an_address_that_is_taken() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            async with Mesh() as mesh:
                with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
                    await mesh.start("n1", port=port)

    run(test)


# Certificates


class Certificates:
    """Of nodes, all by one CA."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = trustme.CA()
        self.ca = directory / "ca.pem"
        self.authority.cert_pem.write_to_path(self.ca)

    def settings(self, name: str, common_name: str | None = None) -> Cluster:
        issued = self.authority.issue_cert(name, common_name=common_name)
        certificate = self.directory / f"{name}.pem"
        key = self.directory / f"{name}.key"
        for number, pem in enumerate(issued.cert_chain_pems):
            pem.write_to_path(certificate, append=number > 0)
        issued.private_key_pem.write_to_path(key)
        return Cluster(certificate=str(certificate), key=str(key), ca=str(self.ca))

    def auth(self, name: str, secret: bytes = b"", common_name: str | None = None) -> PeerAuth:
        return replace(PeerAuth.load(self.settings(name, common_name)), secret=secret)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_certificates(certificates: Certificates, secret: bytes, loop: str) -> None:
    async def test() -> None:
        async with Mesh() as mesh:
            one = await mesh.start("n1", certificates.auth("n1", secret))
            two = await mesh.start("n2", certificates.auth("elsewhere", secret, common_name="n2"))
            one.links.set_join([two.address])
            two.links.set_join([one.address])
            await until(lambda: one.linked() == ["n2"] and two.linked() == ["n1"])
            sent = [bytes((number % 256,)) * 3001 * (number % 40) for number in range(200)]
            for payload in sent:
                assert one.links.send("n2", 1, payload)
            await until(lambda: len(two.frames) == 200)
            assert [payload for _, _, payload in two.frames] == sent

    run(test, loop=loop)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("of another CA", "certificate verify failed"),
        ("of another node", "the certificate of n2 is for n3"),
        ("none", "speaks TLS, and this node has no cluster.certificate"),
        ("none to dial with", "peer did not return a certificate"),
        ("no secret", "does not know this cluster's secret"),
    ],
)
def test_certificates_that_do_not_count(
    certificates: Certificates,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    case: str,
    text: str,
) -> None:
    def auth() -> PeerAuth:
        match case:
            case "of another CA":
                return Certificates(tmp_path).auth("n2", SECRET)
            case "of another node":
                return certificates.auth("n3", SECRET)
            case "none":
                return PeerAuth(SECRET)
            case "none to dial with":
                bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                bare.check_hostname = False
                bare.load_verify_locations(certificates.ca)
                return replace(certificates.auth("n3", SECRET), client=bare)
        return certificates.auth("n2", b"x" * 32)

    async def test() -> None:
        async with Mesh() as mesh:
            one = await mesh.start("n1", certificates.auth("n1", SECRET))
            two = await mesh.start("n2", auth())
            for node, other in ((one, two), (two, one)):
                node.links.set_join([other.address])
            await until(
                lambda: all(sum(node.links.metrics.refused.values()) >= 3 for node in mesh.nodes)
            )
            assert one.events == two.events == []

    run(test)
    assert any(text in line for line in complaints(caplog)), complaints(caplog)


def test_files_of_certificates_that_do_not_work(certificates: Certificates) -> None:
    good = certificates.settings("n1")
    with pytest.raises(TlsError, match="cannot read the CA file"):
        PeerAuth.load(replace_setting(good, ca="missing.pem"))
    with pytest.raises(TlsError, match="the key does not belong to"):
        PeerAuth.load(replace_setting(good, key=certificates.settings("n2").key))


def replace_setting(cluster: Cluster, **changes: str) -> Cluster:
    fields = {name: getattr(cluster, name) for name in ("certificate", "key", "ca")}
    return Cluster(**(fields | changes))
