"""Bugs in delayed messages, planted: the model of `test_delayed_messages` finds each."""

from collections.abc import Iterator

import pytest

from holdfast.log.record import Record
from holdfast.node.publish.admission import STORE, Admission
from holdfast.node.publish.delayed_table import Delayed, DelayedTable, is_waiting
from holdfast.node.state import snapshot_entries as entries
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.recovery import Recovery
from holdfast.node.state.replicated import ReplicatedState
from holdfast.protocol.mqtt.publish import Publish
from tests.model.test_delayed_messages import run
from tests.support.node_bench import NodeBench
from tests.support.planted import is_found


def test_planted_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader tries again while its record is under way, and its admission stores both."""
    real = DelayedTable.take_due

    def planted(
        table: DelayedTable, wall_us: int, is_ours: object, count_max: int, again_us: int
    ) -> Iterator[Delayed]:
        return real(table, wall_us, is_ours, count_max, 100_000)  # type: ignore[arg-type]

    monkeypatch.setattr(DelayedTable, "take_due", planted)
    monkeypatch.setattr(Admission, "ends_delayed", lambda *_: False)
    monkeypatch.setattr(Admission, "_admit_due", lambda *_: STORE)
    assert is_found(run, range(60), (AssertionError, KeyError))


def test_planted_published_again_after_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery does not see that a message was published."""

    def planted(recovery: Recovery, record: Record) -> None:
        if is_waiting(record):
            recovery.state.delayed.apply(record)

    monkeypatch.setattr(Recovery, "_apply_delayed", planted)
    assert is_found(run, range(60), (AssertionError, KeyError))


def test_planted_snapshot_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot leaves them out."""

    real = ReplicatedState.snapshot

    def planted(replicated: ReplicatedState) -> Iterator[tuple[int, bytes]]:
        return (each for each in real(replicated) if each[0] != entries.SNAPSHOT_DELAYED)

    monkeypatch.setattr(ReplicatedState, "snapshot", planted)
    assert is_found(run, range(60), (AssertionError, KeyError))


def test_planted_timer_is_not_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is due before all others does not move the timer."""

    def planted(state: object) -> None:
        if not state.delayed.armed_at:  # type: ignore[attr-defined]
            real(state)  # type: ignore[arg-type]

    real = RecordedState.arm_delayed
    monkeypatch.setattr(RecordedState, "arm_delayed", planted)
    bench = NodeBench()
    peer = bench.connect("p")
    for number, delay_s in enumerate((50, 1), 1):
        topic = f"$delayed/{delay_s}/t".encode()
        peer.send(Publish(topic, b"x", 1, False, False, number, b"", 0, -1))
    bench.advance(1.1)
    assert len(bench.node.state.delayed) == 2
