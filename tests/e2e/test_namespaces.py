"""The network of the chaos tests loses what it is told to lose, and only that, in silence."""

import socket
from collections.abc import Iterator

import pytest

from holdfast_lab.targets.namespaces import Network, missing

SILENCE_S = 0.6


@pytest.fixture
def network() -> Iterator[Network]:
    if missing():
        pytest.skip(missing())
    with Network(["a", "b", "c"]) as made:
        yield made


def listener(network: Network, host: str) -> socket.socket:
    made = network.hosts[host].make_socket()
    made.bind((network.hosts[host].address, 1883))
    made.listen()
    made.settimeout(5)
    return made


def reaches(network: Network, source: str, target: str, timeout_s: float = 5) -> bool:
    """Whether a connection is accepted. Raises OSError when it is refused aloud."""
    with network.hosts[source].make_socket() as made:
        made.settimeout(timeout_s)
        try:
            made.connect((network.hosts[target].address, 1883))
        except TimeoutError:
            return False
        return True


def test_one_way_and_parted(network: Network) -> None:
    listeners = [listener(network, host) for host in "abc"]
    assert all(reaches(network, one, other) for one in "abc" for other in "abc" if one != other)

    accepted = listeners[0].accept()[0]
    accepted.close()
    network.cut("a", "b")
    # What stands: the bytes of b arrive at a, those of a at b do not; neither is told.
    assert not reaches(network, "a", "b", SILENCE_S)
    assert not reaches(network, "b", "a", SILENCE_S)
    assert reaches(network, "a", "c")
    assert reaches(network, "b", "c")

    network.heal()
    network.part(["c"], ["a", "b", "c"])
    assert not reaches(network, "c", "a", SILENCE_S)
    assert not reaches(network, "b", "c", SILENCE_S)
    assert reaches(network, "a", "b")
    network.heal()
    assert reaches(network, "c", "a")
    for made in listeners:
        made.close()


def test_an_open_connection_is_one_way_then_goes_on(network: Network) -> None:
    server = listener(network, "a")
    client = network.hosts["b"].make_socket()
    client.settimeout(20)
    client.connect((network.hosts["a"].address, 1883))
    accepted = server.accept()[0]
    network.cut("b", "a")
    client.sendall(b"lost for now")
    accepted.settimeout(SILENCE_S)
    with pytest.raises(TimeoutError):
        accepted.recv(100)
    accepted.sendall(b"arrives")
    assert client.recv(100) == b"arrives"
    network.heal()
    accepted.settimeout(20)
    assert accepted.recv(100) == b"lost for now"
    for made in (client, accepted, server):
        made.close()


def test_this_process_stays_where_it_is(network: Network) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    network.hosts["a"].make_socket().close()
    socket.create_connection(server.getsockname(), timeout=5).close()
    server.close()
