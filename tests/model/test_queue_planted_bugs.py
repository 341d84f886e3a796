"""Bugs in queues, planted: the model of `test_queue_sessions` finds each."""

import pytest

from holdfast.node.groups import queue_changes as changes
from holdfast.node.session.session import Group
from holdfast.node.state import snapshot_entries as entries
from holdfast.node.state.recorded_state import RecordedState
from tests.model.test_queue_sessions import run
from tests.support import node_bench
from tests.support.planted import is_found


def test_planted_no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue has no keeper: its group ends with its last member."""
    monkeypatch.setattr(changes, "create_queue", lambda *arguments: None)
    assert is_found(run)


def test_planted_snapshot_without_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot leaves out the groups whose members have no durable session."""

    def planted(group: Group) -> bool:
        return any(
            session.expiry_s > 0 and not session.client_id.startswith("$")
            for session in group.members
        )

    monkeypatch.setattr(entries, "is_durable_group", planted)
    assert is_found(run)


def test_planted_keeper_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot leaves out the keepers."""
    real = entries.snapshot_entries

    def planted(state: RecordedState) -> object:
        for key in state.queues:
            state.sessions[key].recorded = False
        return real(state)

    monkeypatch.setattr(node_bench, "snapshot_entries", planted)
    assert is_found(run)
