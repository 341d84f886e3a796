"""Nodes on one directory that does not answer any more, as an NFS server that is cut off."""

import socket
from pathlib import Path

import pytest

from tests.e2e.pair import Node, wait_until
from tests.e2e.test_shared_storage import Traffic, nodes_on
from tests.support.faulty_disk import faulty_disk, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def accepts(node: Node) -> bool:
    try:
        socket.create_connection(("127.0.0.1", node.port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_holder_whose_directory_hangs_gives_up(tmp_path: Path) -> None:
    """Every look at the lease hangs with the directory, so the holder goes by its clock: it serves
    nobody any more, whether or not another node could take over."""
    with (
        faulty_disk(tmp_path / "disk") as disk,
        nodes_on(tmp_path, data=disk.directory / "data") as (first, second),
    ):
        traffic = Traffic(first)
        traffic.send(3)
        disk.hang()
        try:
            wait_until(lambda: is_closed(traffic.wire.socket), "clients of the holder are cut off")
            wait_until(lambda: not accepts(first), "the holder takes no clients")
            assert not second.serves()
        finally:
            disk.go_on()
        wait_until(lambda: first.serves() or second.serves(), "one of the two serves again")
        assert "the directory hangs" in first.log_text()
        traffic.connect(first if first.serves() else second)
        traffic.send()
        traffic.check(first if first.serves() else second)
