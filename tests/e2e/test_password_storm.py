"""A storm of wrong passwords keeps no known client out, and is refused once it fills its bound."""

import contextlib
import socket
from pathlib import Path

from holdfast.io.event_loop.password_checks import THREADS
from holdfast.security.password_queue import WAITING_PER_ADDRESS_MAX
from holdfast.security.passwords import hash_password
from tests.e2e import wire
from tests.e2e.brokers import one_process
from tests.e2e.conftest import StartHoldfast

ITERATIONS = 300_000
"""About 0.1 s a check and thread."""
STORM_ADDRESS = "127.0.0.2"
STORM = WAITING_PER_ADDRESS_MAX + 200
SERVER_BUSY = 0x89


def _client(port: int, name: str, password: bytes, source: str = "127.0.0.1") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(source, 0))
    one.sendall(wire.connect(name, username=name, password=password))
    return one


def _reason(one: socket.socket) -> int:
    return one.recv(4)[3]


@one_process("each process has its own limit")
def test_storm(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    hashed = hash_password("right", iterations=ITERATIONS)
    file.write_text(f"known:{hashed}\nnew:{hashed}\n")
    broker = start_holdfast(
        {
            "security": {"password_file": str(file)},
            "limits": {"connect_timeout_s": 120.0},
        }
    )
    with _client(broker.port, "known", b"right") as known:
        assert _reason(known) == 0
    storm = [_client(broker.port, "known", b"wrong", STORM_ADDRESS) for _ in range(STORM)]
    try:
        # Refused at once: the last ones find the queue of their address full.
        assert _reason(storm[-1]) == SERVER_BUSY
        # Who was here before needs no place in it, even at that address.
        with _client(broker.port, "known", b"right", STORM_ADDRESS) as known:
            assert _reason(known) == 0
        # A client that was never here, from elsewhere, does not wait for the storm.
        with _client(broker.port, "new", b"right", "127.0.0.3") as new:
            assert _reason(new) == 0
        assert broker.metric("passwords_waiting") > 0
        assert broker.metric("authentications_shed_total") > 0
    finally:
        for one in storm:
            with contextlib.suppress(OSError):
                one.close()
    # What has gone is checked no more: a newcomer of the same address waits for nothing but what
    # the threads have begun.
    before = broker.metric("authentications_failed_total")
    with _client(broker.port, "new", b"other", STORM_ADDRESS) as again:
        assert _reason(again) == 0x86
    checked = broker.metric("authentications_failed_total") - before
    assert 1 <= checked <= 2 * THREADS + 1
