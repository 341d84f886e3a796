"""What clients do wrong costs the operator's disk a bounded number of bounded lines."""

import socket
from pathlib import Path

from holdfast.protocol.mqtt.decode import FILTERS_MAX
from tests.e2e import wire
from tests.e2e.conftest import StartHoldfast

LONG_ID = "i" * 60_000


def test_one_subscribe_is_one_line(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast()
    with wire.Wire(broker.port) as client:
        client.connect(LONG_ID)
        before = len(broker.log_text())
        codes = client.subscribe(*[("a#", 0)] * FILTERS_MAX)
        assert set(codes) == {0x8F}
        client.ping()
    text = broker.log_text()[before:]
    assert text.count("invalid_filter") == 1
    assert f"filters={FILTERS_MAX}" in text
    assert len(text) < 2000


def test_refused_connects_are_cut_and_counted(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    broker = start_holdfast({"security": {"allow_anonymous": False}})
    packet = wire.connect(LONG_ID)
    for _ in range(500):
        with socket.create_connection(("127.0.0.1", broker.port), timeout=10) as one:
            one.sendall(packet)
            assert one.recv(100)[:1] == b"\x20"
    broker.stop()
    text = broker.log_text()
    assert len(text) < 150_000
    assert "connection_refused" in text
    # 30 MB of client ids arrived.
    assert "lines_suppressed event=connection_refused count=" in text
