"""Changes of the manager's state: one after another, on a file that is slow, lost or older than
what was told."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from holdfast_federation.manager.manager import Manager
from holdfast_federation.manager.messages import JoinAnswer, JoinRequest, Report
from holdfast_federation.manager.server import Rounds
from holdfast_federation.manager.settings import ManagerSettings
from holdfast_federation.manager.state import changes
from holdfast_federation.manager.state.changes import TooMany
from holdfast_federation.manager.state.federation_state import FederationState
from holdfast_federation.manager.state.store import (
    AuditLine,
    StateStore,
    StateStoreError,
    StoreLost,
)
from tests.support.topology_brokers import FakeBrokers

T = TypeVar("T")

WAIT_S = 60.0


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.01)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 2 * WAIT_S))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    run.__signature__ = __import__("inspect").signature(test)  # type: ignore[attr-defined]
    return run


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "RETRY_S", 0.02)


class Gate(StateStore):
    """Whose changes wait until the test lets them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_reached = threading.Event()
        self.may_go = threading.Event()

    def save(self, before: FederationState, after: FederationState, line: AuditLine) -> None:
        self.is_reached.set()
        assert self.may_go.wait(WAIT_S)
        super().save(before, after, line)


def manager_with(store: StateStore) -> Manager:
    return Manager(ManagerSettings(), store, FakeBrokers())


async def join(manager: Manager, number: int) -> JoinAnswer:
    request = JoinRequest(ip=f"tcp://10.0.0.{number}:1883", uuid=f"uuid-{number:04}")
    return await manager.join(request, "test")


@asynccontextmanager
async def running(
    store: Callable[[], StateStore], clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Manager]:
    """With what looks after its database, as in the process. Opened aside, since a proxy in the
    way needs the loop."""
    manager = await asyncio.to_thread(
        lambda: Manager(ManagerSettings(), store(), FakeBrokers(), clock)
    )
    rounds = Rounds(manager)
    rounds.start()
    try:
        yield manager
    finally:
        await rounds.stop()
        await manager.stop()


@in_loop
async def test_the_loop_goes_on_while_a_change_is_stored(tmp_path: Path) -> None:
    store = Gate(tmp_path / "t.db")
    manager = manager_with(store)
    joining = asyncio.ensure_future(join(manager, 0))
    await until(store.is_reached.is_set, "the store is asked")
    behind = asyncio.ensure_future(join(manager, 1))
    assert not await manager.changed_since(0, 0.05)
    assert (manager.state.revision, joining.done()) == (0, False)
    store.may_go.set()
    assert [(await each).id for each in (joining, behind)] == [0, 1]
    await manager.stop()


@in_loop
async def test_a_change_goes_on_when_who_asked_has_gone(tmp_path: Path) -> None:
    """Else the file would be ahead of the manager, which could store nothing from then on."""
    store = Gate(tmp_path / "t.db")
    manager = manager_with(store)
    joining = asyncio.ensure_future(join(manager, 0))
    await until(store.is_reached.is_set, "the store is asked")
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    store.may_go.set()
    assert (await join(manager, 1)).id == 1
    assert sorted(manager.state.members) == [0, 1]
    assert store.load() == manager.state
    await manager.stop()


@in_loop
async def test_changes_that_wait_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "WAITING_MAX", 2)
    store = Gate(tmp_path / "t.db")
    manager = manager_with(store)
    waiting = [asyncio.ensure_future(join(manager, number)) for number in range(2)]
    await until(store.is_reached.is_set, "the store is asked")
    with pytest.raises(TooMany, match="2 changes wait"):
        await join(manager, 2)
    store.may_go.set()
    await asyncio.gather(*waiting)
    assert (await join(manager, 2)).id == 2
    await manager.stop()


@in_loop
async def test_the_end_waits_for_the_change_under_way_and_refuses_the_rest(tmp_path: Path) -> None:
    store = Gate(tmp_path / "t.db")
    manager = manager_with(store)
    first = asyncio.ensure_future(join(manager, 0))
    await until(store.is_reached.is_set, "the store is asked")
    second = asyncio.ensure_future(join(manager, 1))
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(manager.stop())
    await asyncio.sleep(0)
    store.may_go.set()
    await stopping
    assert (await first).id == 0
    with pytest.raises(StateStoreError, match="stopping"):
        await second
    assert sorted(StateStore(tmp_path / "t.db").load().members) == [0]


class FailingDisk(StateStore):
    """Whose next COMMIT is in the file, or is not, and fails: as when a sync does."""

    fails = ""

    def _transaction(self, work: Callable[[], T]) -> T:
        fails, self.fails = self.fails, ""
        if not fails:
            return super()._transaction(work)
        if fails == "after":
            super()._transaction(work)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error


@pytest.mark.parametrize("fails", ["before", "after"])
@in_loop
async def test_a_disk_that_fails_in_a_commit(tmp_path: Path, fails: str) -> None:
    """It is read again, since nobody knows; asking again gives the same id."""
    store = FailingDisk(tmp_path / "t.db")
    async with running(lambda: store) as manager:
        await join(manager, 0)
        store.fails = fails
        with pytest.raises(StoreLost, match="disk I/O error"):
            await join(manager, 1)
        await until(lambda: not manager.changes.unknown_because, "it is read again")
        assert sorted(manager.state.members) == ([0, 1] if fails == "after" else [0])
        assert (await join(manager, 1)).id == 1
        assert (await join(manager, 2)).id == 2


@in_loop
async def test_nobody_is_dead_for_the_time_without_a_database(tmp_path: Path) -> None:
    """Their reports were refused, and they ask ever more seldom."""
    now = [0.0]
    store = FailingDisk(tmp_path / "t.db")
    async with running(lambda: store, lambda: now[0]) as manager:
        for number in range(5):
            await join(manager, number)
            await manager.report(number, Report())
        store.fails = "before"
        with pytest.raises(StoreLost):
            await join(manager, 9)
        assert manager.changes.losses == 1
        now[0] += 60
        await until(lambda: not manager.changes.unknown_because, "it is back")
        for number in range(3):
            await manager.report(number, Report())
        for _ in range(3):
            await Rounds(manager).probe_all()
        assert sorted(manager.state.members) == list(range(5))


@in_loop
async def test_a_database_from_a_backup_is_not_gone_on_with(tmp_path: Path) -> None:
    """Members have been told a later revision, and ids that this database would give again."""
    store = FailingDisk(tmp_path / "t.db")
    async with running(lambda: store) as manager:
        for number in range(3):
            await join(manager, number)
        with closing(sqlite3.connect(tmp_path / "t.db")) as beside, beside:
            beside.execute("UPDATE meta SET value = 1 WHERE name = 'revision'")
        store.fails = "before"
        with pytest.raises(StoreLost):
            await join(manager, 3)
        await until(
            lambda: "revision is 1" in manager.changes.unknown_because, "it is seen to be older"
        )
        for refused in (join(manager, 3), manager.report(0, Report())):
            with pytest.raises(StateStoreError, match="was a backup restored"):
                await refused
        assert manager.state.revision == 3
    again = manager_with(StateStore(tmp_path / "t.db"))
    assert again.state.revision == 1
    await again.stop()


class Slow(StateStore):
    """A connection whose next change never ends, unless it is interrupted."""

    hangs = False

    def _transaction(self, work: Callable[[], T]) -> T:
        hangs, self.hangs = self.hangs, False
        if hangs:
            forever = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT * FROM n"
            for _ in self._connected().execute(forever):
                pass
        return super()._transaction(work)


@in_loop
async def test_a_change_that_never_ends_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "ANSWER_S", 0.3)
    store = Slow(tmp_path / "t.db")
    async with running(lambda: store) as manager:
        await join(manager, 0)
        store.hangs = True
        with pytest.raises(StateStoreError, match="interrupted"):
            await join(manager, 1)
        assert sorted(manager.state.members) == [0]
        assert (await join(manager, 1)).id == 1
