"""The store itself: what comes back, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_federation.manager.state import store as store_module
from holdfast_federation.manager.state.federation_state import (
    FederationState,
    JoinToken,
    Member,
)
from holdfast_federation.manager.state.store import AuditLine, StateStore, StateStoreError

LINE = AuditLine(at_s=1.5, revision=0, actor="test", action="do", detail="x")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    store = StateStore(tmp_path / "topology.db")
    yield store
    store.close()


FULL = FederationState(
    revision=7,
    next_id=1 << 40,
    members={
        0: Member(id=0, ip="tcp://a:1", uuid="uuid-aaaa", epoch=(1 << 63) - 1, labels={"ü": "\0"}),
        3: Member(id=3, ip="tcp://b:1", certificate="ö'; DROP TABLE members; --"),
        4: Member(id=4, ip="tcp://c:1"),
    },
    links=frozenset({(0, 3), (3, 4)}),
    pinned=frozenset({(0, 3)}),
    forbidden=frozenset({(0, 4)}),
    tokens={"00ff": JoinToken(expires_at_s=12.25), "11": JoinToken(expires_at_s=1.0, used_by=3)},
)


def test_everything_comes_back(store: StateStore) -> None:
    empty = store.load()
    assert empty == FederationState()
    store.save(empty, FULL, LINE)
    assert store.load() == FULL
    [line] = store.audit(5)
    assert line == AuditLine(at_s=1.5, revision=7, actor="test", action="do", detail="x")


def test_addresses_and_uuids_change_hands_in_one_change(store: StateStore) -> None:
    before = FederationState(
        revision=1,
        members={
            1: Member(id=1, ip="tcp://a", uuid="uuid-aaaa"),
            2: Member(id=2, ip="tcp://b", uuid="uuid-bbbb"),
        },
    )
    after = FederationState(
        revision=2,
        members={
            1: Member(id=1, ip="tcp://b", uuid="uuid-bbbb"),
            2: Member(id=2, ip="tcp://a", uuid="uuid-aaaa"),
        },
    )
    store.save(FederationState(), before, LINE)
    store.save(before, after, LINE)
    assert store.load() == after


def test_a_change_that_fails_leaves_nothing(store: StateStore) -> None:
    """Two members with one address: found by the database, after half of it was written."""
    wrong = FederationState(
        revision=1,
        next_id=9,
        members={1: Member(id=1, ip="tcp://a"), 2: Member(id=2, ip="tcp://a")},
        links=frozenset({(1, 2)}),
    )
    with pytest.raises(StateStoreError):
        store.save(FederationState(), wrong, LINE)
    assert store.load() == FederationState()
    assert store.audit(5) == []
    store.save(FederationState(), FULL, LINE)
    assert store.load() == FULL


def test_a_change_of_another_state_is_refused(store: StateStore) -> None:
    store.save(FederationState(), FULL, LINE)
    with pytest.raises(StateStoreError, match="another manager"):
        store.save(FederationState(), FederationState(revision=1), LINE)
    assert store.load() == FULL


def test_the_audit_log_is_bounded(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "AUDIT_LINES_MAX", 3)
    state = FederationState()
    for revision in range(1, 8):
        after = FederationState(revision=revision)
        store.save(state, after, LINE)
        state = after
    assert [line.revision for line in store.audit(100)] == [7, 6, 5]
    assert [line.revision for line in store.audit(2)] == [7, 6]
