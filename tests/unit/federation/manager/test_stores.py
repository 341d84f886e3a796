"""The stores themselves: what one of the databases makes difficult, and what both must keep."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.federation.manager.state import store as store_module
from holdfast.federation.manager.state.databases import SqliteStateStore, open_store
from holdfast.federation.manager.state.federation_state import (
    FederationState,
    JoinToken,
    Member,
    PendingAnnouncement,
)
from holdfast.federation.manager.state.store import AuditLine, StateStore, StateStoreError
from tests.support.topology_databases import DATABASES, new_database

LINE = AuditLine(at_s=1.5, revision=0, actor="test", action="do", detail="x")


@pytest.fixture(params=DATABASES)
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StateStore]:
    store = open_store(new_database(request.param, tmp_path, request).url)
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
    announcements={
        (3, 0): PendingAnnouncement(receiver=3, about=0, ip="tcp://a:1", action="REMOVE")
    },
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


def test_what_a_database_cannot_write_is_an_error_of_the_store(store: StateStore) -> None:
    """SQLite takes a NUL in a text, PostgreSQL does not."""
    line = AuditLine(at_s=0, revision=0, actor="a\0b", action="", detail="")
    if isinstance(store, SqliteStateStore):
        store.save(FederationState(), FULL, line)
        assert store.load() == FULL
    else:
        with pytest.raises(StateStoreError, match="NUL"):
            store.save(FederationState(), FULL, line)
        assert store.load() == FederationState()


def test_without_a_driver_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "holdfast.federation.manager.state.postgresql", raising=False)
    with pytest.raises(StateStoreError, match=r"pip install 'holdfast\[postgresql\]'"):
        open_store("postgresql://h/d")
