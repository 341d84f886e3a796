"""An invariant that does not hold stops the session that it concerns, and no other one."""

import asyncio
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from holdfast.cli.config import EXIT_CONFIG
from holdfast.client import Client
from holdfast.io.event_loop.failures import stop_on_unexpected
from holdfast.node.config import NodeConfig
from holdfast.node.delivery import delivery
from holdfast.node.node_state import NodeState
from holdfast.node.session.message import Message
from holdfast.node.session.session import Session, Subscription
from holdfast.protocol.mqtt import packets as m
from tests.support.broker_in_process import loop_broker
from tests.support.node_bench import NodeBench
from tests.unit.io.event_loop.test_failures import in_loop, until
from tests.unit.node.test_publish import publish, subscribe

MAIN = "import sys; from holdfast.cli.main import main; sys.exit(main())"


def _stopped(bench: NodeBench) -> dict[str, str]:
    state = bench.node.state
    assert state.stats.invariants_broken == len(state.stopped)
    return state.stopped


def _publish(bench: NodeBench, *payloads: bytes) -> None:
    publisher = bench.connect("p")
    for number, payload in enumerate(payloads, 1):
        publisher.send(publish("t", payload, 1, number))


def test_a_delivery_to_a_session_in_a_wrong_state() -> None:
    if str(delivery.__file__).endswith(".so"):
        pytest.skip("a function of the compiled form cannot be replaced")
    bench = NodeBench(NodeConfig(partitions=1, sys_interval_s=0))
    first, second = bench.connect("first"), bench.connect("second")
    for peer in (first, second):
        peer.send(subscribe("t", 1))
    deliver = delivery._deliver_to_session

    def fail_for_first(
        state: NodeState, session: Session, target: Subscription, message: Message
    ) -> None:
        if session.client_id == "first":
            raise AssertionError("planted")
        deliver(state, session, target, message)

    with patch.object(delivery, "_deliver_to_session", fail_for_first):
        _publish(bench, b"1")
    assert second.payloads() == [b"1"]
    assert _stopped(bench) == {"session first": "planted"}
    assert bench.cut == [first.connection]
    assert not bench.node.state.has_stopped_partition


def test_a_read_for_a_session_in_a_wrong_state() -> None:
    bench = NodeBench(NodeConfig(partitions=1, sys_interval_s=0, outbox_messages=2))
    behind, other = bench.connect("behind", properties={33: 1}), bench.connect("other")
    for peer in (behind, other):
        peer.send(subscribe("t", 1))
    _publish(bench, b"0", b"1", b"2", b"3")
    session = bench.node.state.sessions["behind"]
    assert not session.tailing
    bench.delay_reads = True
    behind.send(m.Ack(m.PUBACK, behind.publishes()[0].packet_id))
    assert session.reading
    # Counted too low, the outbox has no bound.
    session.outbox_bytes = -10_000
    bench.delay_reads = False
    with patch.object(bench, "_check"):
        bench.run()
    assert _stopped(bench) == {"session behind": "fewer bytes in the outbox than none"}
    assert bench.cut == [behind.connection]
    assert other.payloads() == [b"0", b"1", b"2", b"3"]


@in_loop
async def test_an_acknowledgement_that_nobody_owes(tmp_path: Path) -> None:
    """The promise of the PUBACK cannot be kept. The other client of the turn gets its own."""
    async with loop_broker(tmp_path) as broker:
        state = broker.broker.node.state
        found: list[BaseException] = []
        stop_on_unexpected(asyncio.get_running_loop(), found.append)
        wrong, right = (Client("127.0.0.1", broker.port, client_id=name) for name in "wr")
        await wrong.connect()
        await right.connect()
        connection = state.sessions["w"].connection
        assert connection is not None
        connection.unacknowledged = -1
        sent = asyncio.create_task(wrong.publish("t", b"1", qos=1))
        await right.publish("t", b"2", qos=1)
        await until(lambda: bool(state.stopped))
        assert state.stopped == {"session w": "a publish is acknowledged twice"}
        assert state.stats.invariants_broken == 1
        assert found == []
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)
        await right.disconnect()
        await wrong.disconnect()


def test_a_broker_is_not_served_without_its_checks() -> None:
    command = [sys.executable, "-O", "-c", MAIN, "serve", "--check-config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == EXIT_CONFIG
    assert "python -O" in done.stderr
