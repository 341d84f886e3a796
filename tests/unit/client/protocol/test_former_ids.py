"""A client whose program is another than the one that its session at the server is of."""

import pytest

from holdfast.client.errors import QueueFull
from holdfast.client.options import Options
from holdfast.client.protocol.core import ClientProtocol
from holdfast.client.protocol.outgoing import PacketIds
from holdfast.protocol.mqtt import packets as pk
from tests.support.client_server import Server, publishes


def server_of(level: int = 5, packet_ids_max: int = 5) -> Server:
    options = Options(
        level=level,
        client_id="c",
        clean_start=False,
        session_expiry_s=9,
        packet_ids_max=packet_ids_max,
    )
    return Server(ClientProtocol(options))


def released(packets: list[pk.Packet]) -> list[int]:
    return [one.packet_id for one in packets if isinstance(one, pk.Ack) and one.kind == pk.PUBREL]


@pytest.mark.parametrize("level", [4, 5])
def test_releases_all_ids_of_before_first(level: int) -> None:
    server = server_of(level)
    server.core.publish("t", b"x", 2, False, 0.0)
    server.accept(True)
    sent = server.sent()
    assert released(sent) == [1, 2, 3, 4, 5]
    assert publishes(sent[5:]) == [(1, False, b"t")]
    # The answers: the server knows some, and some not.
    for packet_id in range(1, 6):
        assert not server.ack(pk.PUBCOMP, packet_id, 0x92 if level == 5 else 0)
    assert len(server.core.outgoing) == 1
    server.ack(pk.PUBREC, 1)
    assert released(server.sent()) == [1]
    assert len(server.ack(pk.PUBCOMP, 1)) == 1


def test_releases_nothing_of_its_own_session() -> None:
    server = server_of()
    server.accept(False)
    assert released(server.sent()) == []
    server.core.publish("t", b"x", 2, False, 0.0)
    server.core.handle_closed(0.0)
    server.accept(True)
    sent = server.sent()
    assert released(sent) == []
    assert publishes(sent) == [(1, True, b"t")]


def test_with_all_ids_nothing_is_released() -> None:
    server = server_of(packet_ids_max=65535)
    server.accept(True)
    assert server.sent() == []


def test_ids_stay_within_the_bound() -> None:
    ids = PacketIds(3)
    assert [ids.allocate() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(QueueFull, match="all 3"):
        ids.allocate()
    ids.release(2)
    assert ids.allocate() == 2
    server = server_of(packet_ids_max=2)
    server.accept(False)
    server.sent()
    for _ in range(4):
        server.core.publish("t", b"x", 1, False, 0.0)
    assert [one[0] for one in publishes(server.sent())] == [1, 2]
    server.ack(pk.PUBACK, 1)
    assert [one[0] for one in publishes(server.sent())] == [1]


def test_a_bridge_says_so_in_mqtt_3() -> None:
    core = ClientProtocol(Options(level=4, client_id="c", is_bridge=True))
    server = Server(core)
    core.connect(0.0)
    (connect,) = server.sent()
    assert isinstance(connect, pk.Connect)
    assert connect.is_bridge
    with pytest.raises(ValueError, match="No Local"):
        ClientProtocol(Options(level=5, is_bridge=True))
    with pytest.raises(ValueError, match="1 to 65535"):
        ClientProtocol(Options(packet_ids_max=0))
