"""Changes of the manager's state: one after another, on a database that is slow, lost, taken by
another manager or older than what was told."""

import asyncio
import random
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest

from holdfast.federation.manager.manager import Manager
from holdfast.federation.manager.messages import JoinAnswer, JoinRequest, Report
from holdfast.federation.manager.server import Rounds
from holdfast.federation.manager.settings import ManagerSettings
from holdfast.federation.manager.state import changes
from holdfast.federation.manager.state import changes as store_thread
from holdfast.federation.manager.state import postgresql as postgresql_store
from holdfast.federation.manager.state.changes import Changes, TooMany
from holdfast.federation.manager.state.databases import SqliteStateStore
from holdfast.federation.manager.state.federation_state import FederationState
from holdfast.federation.manager.state.postgresql import PostgresqlStore
from holdfast.federation.manager.state.store import (
    AuditLine,
    StateStore,
    StateStoreError,
    StoreLost,
)
from tests.support.cutting_proxy import CuttingProxy
from tests.support.postgresql import PASSWORD, PostgresqlServer
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
    monkeypatch.setattr(changes, "CHECK_S", 0.2)
    monkeypatch.setattr(changes, "RETRY_S", 0.02)
    monkeypatch.setattr(postgresql_store, "LOCK_WAIT_S", 1)


class Gate(SqliteStateStore):
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
    assert sorted(SqliteStateStore(tmp_path / "t.db").load().members) == [0]


class FailingDisk(SqliteStateStore):
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
async def test_a_database_is_lost_and_found(postgresql_server: PostgresqlServer) -> None:
    database = postgresql_server.new_database()
    async with running(lambda: PostgresqlStore(postgresql_server.url(database))) as manager:
        await join(manager, 0)
        end_connections(postgresql_server, database)
        await until(lambda: manager.changes.losses == 1, "the loss is noticed without a change")
        await until(lambda: not manager.changes.unknown_because, "it is back")
        assert (await join(manager, 1)).id == 1
        assert (await join(manager, 0)).id == 0


@in_loop
async def test_nobody_is_dead_for_the_time_without_a_database(
    postgresql_server: PostgresqlServer,
) -> None:
    """Their reports were refused, and they ask ever more seldom."""
    now = [0.0]
    database = postgresql_server.new_database()
    url = postgresql_server.url(database)
    async with running(lambda: PostgresqlStore(url), lambda: now[0]) as manager:
        for number in range(5):
            await join(manager, number)
            await manager.report(number, Report())
        end_connections(postgresql_server, database)
        await until(lambda: manager.changes.losses == 1, "the loss is noticed")
        now[0] += 60
        await until(lambda: not manager.changes.unknown_because, "it is back")
        for number in range(3):
            await manager.report(number, Report())
        for _ in range(3):
            await Rounds(manager).probe_all()
        assert sorted(manager.state.members) == list(range(5))


@in_loop
async def test_another_manager_takes_over_and_gives_back(
    postgresql_server: PostgresqlServer,
) -> None:
    database = postgresql_server.new_database()
    url = postgresql_server.url(database)
    async with running(lambda: PostgresqlStore(url)) as first:
        await join(first, 0)
        with pytest.raises(StateStoreError, match=r"another manager uses this database \(from 127"):
            await asyncio.to_thread(PostgresqlStore, url)
        second = manager_with(await taken_over(postgresql_server, database))
        await join(second, 1)
        await second.leave(0, "test")
        await until(
            lambda: "another manager" in first.changes.unknown_because, "the first has noticed"
        )
        revision = first.state.revision
        for refused in (join(first, 2), first.report(0, Report()), first.changed_since(-1, 0)):
            with pytest.raises(StateStoreError, match="another manager"):
                await refused
        assert first.state.revision == revision
        await second.stop()
        await until(lambda: not first.changes.unknown_because, "the first goes on")
        assert first.state == second.state
        assert sorted(first.verdict().states) == [1]
        assert (await join(first, 2)).id == 2


def end_connections(server: PostgresqlServer, database: str) -> None:
    server.execute(
        "postgres",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE datname = '{database}' AND application_name = 'holdfast-topology'",
    )


async def taken_over(server: PostgresqlServer, database: str) -> PostgresqlStore:
    """Whoever asks first after the connection's end has the lock: perhaps not at the first try."""
    while True:
        end_connections(server, database)
        try:
            return await asyncio.to_thread(PostgresqlStore, server.url(database))
        except StateStoreError:
            continue


@in_loop
async def test_a_database_from_a_backup_is_not_gone_on_with(
    postgresql_server: PostgresqlServer,
) -> None:
    """Members have been told a later revision, and ids that this database would give again."""
    database = postgresql_server.new_database()
    url = postgresql_server.url(database)
    async with running(lambda: PostgresqlStore(url)) as manager:
        for number in range(3):
            await join(manager, number)
        postgresql_server.execute(database, "UPDATE meta SET value = 1 WHERE name = 'revision'")
        end_connections(postgresql_server, database)
        await until(
            lambda: "revision is 1" in manager.changes.unknown_because, "it is seen to be older"
        )
        with pytest.raises(StateStoreError, match="was a backup restored"):
            await join(manager, 3)
        assert manager.state.revision == 3
    again = manager_with(PostgresqlStore(url))
    assert again.state.revision == 1
    await again.stop()


@in_loop
async def test_a_server_that_stands_still_holds_nothing_up(
    postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trigger sleeps in its stead: the connection is alive, and no answer comes."""
    monkeypatch.setattr(store_thread, "ANSWER_S", 0.5)
    database = postgresql_server.new_database()
    async with running(lambda: PostgresqlStore(postgresql_server.url(database))) as manager:
        await join(manager, 0)
        postgresql_server.execute(
            database,
            "CREATE FUNCTION asleep() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM pg_sleep(1000); RETURN NEW; END $$;"
            " CREATE TRIGGER asleep BEFORE INSERT ON audit EXECUTE FUNCTION asleep()",
        )
        with pytest.raises(StoreLost, match=r"no answer in 0\.5 s"):
            await join(manager, 1)
        assert manager.changes.unknown_because
        end_connections(postgresql_server, database)
        postgresql_server.execute(database, "DROP TRIGGER asleep ON audit")
        await until(lambda: not manager.changes.unknown_because, "it is back")
        assert sorted(manager.state.members) == [0]
        assert (await join(manager, 1)).id == 1


@in_loop
async def test_connections_cut_at_any_byte(postgresql_server: PostgresqlServer) -> None:
    """Before, in and after a COMMIT, either way: what was answered is there, nobody is there twice,
    and the revision that is known never goes back."""
    draw = random.Random(5)
    lives = iter([(None, None)])

    def cut_after() -> tuple[int | None, int | None]:
        limit = draw.randrange(1_500, 12_000)
        return next(lives, (limit, None) if draw.random() < 0.5 else (None, limit))

    database = postgresql_server.new_database()
    revisions: list[int] = []
    answered: dict[int, int] = {}

    async def come(manager: Manager, number: int) -> None:
        while number not in answered:
            try:
                answered[number] = (await join(manager, number)).id
            except StateStoreError:
                await asyncio.sleep(0.01)
            revisions.append(manager.state.revision)

    async with CuttingProxy(postgresql_server.port, cut_after) as proxy:
        url = postgresql_server.url(database, port=proxy.port)
        async with running(lambda: PostgresqlStore(url)) as manager:
            await join(manager, 100)
            proxy.cut_all()
            for first in range(0, 60, 6):
                await asyncio.gather(*(come(manager, first + more) for more in range(6)))
            await until(lambda: not manager.changes.unknown_because, "it is back")
            last = manager.state
            losses = manager.changes.losses
    store = PostgresqlStore(postgresql_server.url(database))
    kept = store.load()
    lines = store.audit(1_000)
    store.close()
    assert losses > 5
    assert kept == last
    assert revisions == sorted(revisions)
    members = {member.uuid: member.id for member in kept.members.values()}
    assert {f"uuid-{number:04}": id for number, id in answered.items()} == {
        uuid: id for uuid, id in members.items() if uuid != "uuid-0100"
    }
    # Each revision has its line, and the later ones are of the later changes.
    assert [line.revision for line in lines] == list(range(kept.revision, 0, -1))


def test_the_revision_guards_where_a_pooler_makes_the_lock_worthless(
    postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = postgresql_server.new_database()
    first = PostgresqlStore(postgresql_server.url(database))
    monkeypatch.setattr(postgresql_store, "LOCK", 1)
    second = PostgresqlStore(postgresql_server.url(database))
    line = AuditLine(at_s=0, revision=0, actor="", action="")
    known = [first.load(), second.load()]
    first.save(known[0], FederationState(revision=1, next_id=1), line)
    with pytest.raises(StateStoreError, match="another manager writes"):
        second.save(known[1], FederationState(revision=1, next_id=9), line)
    assert second.load() == FederationState(revision=1, next_id=1)
    # The other one is in the middle of its change: what is waited for is decided by its end.
    writing = psycopg.connect(postgresql_server.url(database))
    for ends in (writing.rollback, writing.commit):
        before = second.load()
        writing.execute(
            "UPDATE holdfast_topology.meta SET value = value + 1 WHERE name = 'revision'"
        )
        with pytest.raises(StateStoreError, match="lock timeout"):
            second.save(before, FederationState(revision=before.revision + 1), line)
        saving = threading.Thread(target=ends)
        failed = ""
        waiting = threading.Timer(0.3, saving.start)
        waiting.start()
        try:
            second.save(before, FederationState(revision=before.revision + 1), line)
        except StateStoreError as error:
            failed = str(error)
        waiting.join()
        saving.join()
        assert ("another manager writes" in failed) is (ends == writing.commit)
    for each in (first, second, writing):
        each.close()


def test_a_store_that_is_read_while_it_is_away_says_so(
    postgresql_server: PostgresqlServer,
) -> None:
    database = postgresql_server.new_database()
    store = PostgresqlStore(postgresql_server.url(database))
    known = Changes(store)
    end_connections(postgresql_server, database)
    with pytest.raises(StoreLost):
        store.check()
    with pytest.raises(StoreLost, match="no connection"):
        store.audit(1)
    assert store.load() == known.state
    store.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"password": "another"}, "password authentication failed"),
        ({"database": "nowhere"}, 'database "nowhere" does not exist'),
        ({"port": 1}, "(?i)connection refused"),
    ],
)
def test_what_is_wrong_is_said_without_the_password(
    postgresql_server: PostgresqlServer, change: dict[str, Any], text: str
) -> None:
    url = postgresql_server.url(**{"database": "postgres", **change})
    with pytest.raises(StateStoreError, match=text) as caught:
        PostgresqlStore(url)
    assert "\n" not in str(caught.value)
    assert PASSWORD not in str(caught.value)
    assert "another" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:secret@h:x/d", "postgresql://u:secret/word@h/d",
        "postgresql://u:1/secret@h/d",
        "postgresql://u:se@secret@h/d",
    ],
)  # fmt: skip
def test_a_url_that_cannot_be_read_is_not_shown(url: str) -> None:
    with pytest.raises(StateStoreError, match="DB_URL: write postgresql://") as caught:
        PostgresqlStore(url)
    assert "secret" not in str(caught.value)


def test_a_user_who_may_make_no_schema(postgresql_server: PostgresqlServer) -> None:
    database = postgresql_server.new_database()
    postgresql_server.execute(database, f"CREATE ROLE {database} LOGIN PASSWORD '{PASSWORD}'")
    url = postgresql_server.url(database).replace("holdfast:", f"{database}:")
    with pytest.raises(StateStoreError, match="GRANT CREATE ON DATABASE"):
        PostgresqlStore(url)
    postgresql_server.execute(database, f"CREATE SCHEMA holdfast_topology AUTHORIZATION {database}")
    store = PostgresqlStore(url)
    assert store.load() == FederationState()
    store.close()


def test_a_standby_is_refused(postgresql_server: PostgresqlServer) -> None:
    database = postgresql_server.new_database()
    postgresql_server.execute(
        "postgres", f"ALTER DATABASE {database} SET default_transaction_read_only = on"
    )
    with pytest.raises(StateStoreError, match="read-only"):
        PostgresqlStore(postgresql_server.url(database))


def test_a_database_without_durability_is_asked_for_it(
    postgresql_server: PostgresqlServer,
) -> None:
    database = postgresql_server.new_database()
    postgresql_server.execute("postgres", f"ALTER DATABASE {database} SET synchronous_commit = off")
    store = PostgresqlStore(postgresql_server.url(database))
    assert store._all("SHOW synchronous_commit") == [("on",)]
    store.close()
