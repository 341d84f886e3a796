"""Bugs in queues, planted: the model of `test_queue_sessions` finds each."""

from collections.abc import Iterator

import pytest

from holdfast.node.groups import queue_changes as changes
from holdfast.node.state.groups import GroupPositions
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import GroupEntry
from holdfast.node.state.snapshot_entries import SNAPSHOT_SESSION
from tests.model.test_queue_sessions import run
from tests.support.planted import is_found


def test_planted_no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue has no keeper: its group ends with its last member."""
    monkeypatch.setattr(changes, "create_queue", lambda *arguments: None)
    assert is_found(run)


def test_planted_snapshot_with_a_later_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot has the end of the log as the position of each group."""
    real = GroupPositions.entry

    def planted(groups: GroupPositions, key: str) -> GroupEntry:
        entry = real(groups, key)
        entry.positions = list(groups._state.delivered)
        return entry

    monkeypatch.setattr(GroupPositions, "entry", planted)
    assert is_found(run)


def test_planted_keeper_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot leaves out the keepers."""
    real = ReplicatedState.snapshot

    def planted(replicated: ReplicatedState) -> Iterator[tuple[int, bytes]]:
        for kind, data in real(replicated):
            if kind != SNAPSHOT_SESSION or b"$queue" not in data:
                yield kind, data

    monkeypatch.setattr(ReplicatedState, "snapshot", planted)
    assert is_found(run)
