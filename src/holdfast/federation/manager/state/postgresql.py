"""Stores the manager's state in PostgreSQL, in the schema `holdfast_topology`.

One manager runs at a time. Its connection has an advisory lock, so a manager that has lost the
connection has lost the lock and cannot write. The revision protects each change in addition,
because a pooler may give one connection to several clients.

The caller's time limit (`interrupt`) ends a call to a server that hangs. A `statement_timeout`
would not do: it would also end the wait of a COMMIT for a standby, and report success.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from holdfast.federation.manager.state.store import VERSION, StateStore, StateStoreError, StoreLost

T = TypeVar("T")

SCHEMA: Final = "holdfast_topology"
LOCK: Final = 0x486F6C6466617374
"""The number of the advisory lock: `Holdfast` in ASCII."""
LOCK_WAIT_S: Final = 5
"""The seconds to wait for a lock, the advisory one included. The server may not have noticed yet
that the previous manager is down."""
CONNECT_TIMEOUT_S: Final = 5
DEAD_PEER_S: Final = 11
"""After so long either side notices that the other's machine is gone."""

_CONNECTION: Final[dict[str, Any]] = {
    "application_name": "holdfast-topology",
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 1000 * DEAD_PEER_S,
    "target_session_attrs": "read-write",
}
"""The settings of a connection, unless the URL has others."""

_SESSION: Final = (
    f"SET search_path = {SCHEMA}; SET idle_in_transaction_session_timeout = '30s';"
    " SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3;"
    f" SET tcp_user_timeout = {1000 * DEAD_PEER_S}"
)

_TABLES: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BIGINT NOT NULL);
CREATE TABLE members (
    id BIGINT PRIMARY KEY, uuid TEXT UNIQUE, ip TEXT NOT NULL UNIQUE, body TEXT NOT NULL
);
CREATE TABLE links (
    low BIGINT NOT NULL, high BIGINT NOT NULL, PRIMARY KEY (low, high), CHECK (low < high)
);
CREATE TABLE rules (
    low BIGINT NOT NULL, high BIGINT NOT NULL, rule TEXT NOT NULL, PRIMARY KEY (low, high)
);
CREATE TABLE tokens (hash TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE announcements (
    receiver BIGINT NOT NULL, about BIGINT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (receiver, about)
);
CREATE TABLE audit (
    at BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at_s DOUBLE PRECISION NOT NULL,
    revision BIGINT NOT NULL, actor TEXT NOT NULL, action TEXT NOT NULL, detail TEXT NOT NULL
);
"""

_HINTS: Final = {
    "42501": f"let its user make the schema (GRANT CREATE ON DATABASE), or make {SCHEMA} for it",
    "25006": "this server takes no writes: name the primary in DB_URL",
    "53100": "the server's disk is full: make room",
}
"""By SQLSTATE."""
_LOST_CLASSES: Final = ("08", "57")
"""The classes of SQLSTATE of a lost connection and of a server that its operator stops."""


class PostgresqlStore(StateStore):
    """A state store in a PostgreSQL database."""

    def __init__(self, url: str) -> None:
        """Connects, and creates missing tables. Raises StateStoreError."""
        self._parameters = _CONNECTION | _parsed(url)
        self.name = _name(self._parameters)
        self._connection: psycopg.Connection | None = None
        self._connect()

    def _connect(self) -> None:
        if self._connection is not None and not self._connection.closed:
            return
        with self._explained():
            self._connection = psycopg.connect(
                **self._parameters, autocommit=True, prepare_threshold=None
            )
            self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        try:
            with self._explained():
                self._session(self._connection)
        except BaseException:
            self.close()
            raise

    def _session(self, connection: psycopg.Connection) -> None:
        connection.execute(f"{_SESSION}; SET lock_timeout = '{LOCK_WAIT_S}s'".encode())
        [durability] = _row(connection, "SHOW synchronous_commit")
        if durability == "off":
            connection.execute("SET synchronous_commit = on")
        try:
            connection.execute("SELECT pg_advisory_lock(%s)", (LOCK,))
        except psycopg.errors.LockNotAvailable:
            raise StateStoreError(
                f"{self.name}: another manager uses this database{self._holder(connection)}; stop"
                " it first, or give this one a database of its own"
            ) from None
        self._prepare(connection)

    def _holder(self, connection: psycopg.Connection) -> str:
        found = connection.execute(
            "SELECT host(client_addr), pid FROM pg_stat_activity JOIN pg_locks USING (pid)"
            " WHERE locktype = 'advisory' AND granted AND objsubid = 1"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            " AND (classid::bigint << 32) + objid::bigint = %s",
            (LOCK,),
        ).fetchone()
        if found is None:
            return ""
        return f" (from {found[0] or 'the same machine'}, server process {found[1]})"

    def _prepare(self, connection: psycopg.Connection) -> None:
        with connection.transaction():
            [schema] = _row(connection, f"SELECT to_regnamespace('{SCHEMA}')::text")
            if schema is None:
                connection.execute(f"CREATE SCHEMA {SCHEMA}".encode())
            [meta] = _row(connection, f"SELECT to_regclass('{SCHEMA}.meta')::text")
            if meta is None:
                connection.execute(_TABLES)
                connection.execute(
                    "INSERT INTO meta VALUES ('revision', 0), ('next_id', 0), ('format', %s)",
                    (VERSION,),
                )
        [version] = _row(connection, "SELECT max(value) FROM meta WHERE name = 'format'")
        self._check_version(version if isinstance(version, int) else 0)

    def _connected(self) -> psycopg.Connection:
        if self._connection is None or self._connection.closed:
            raise StoreLost(f"{self.name}: there is no connection")
        return self._connection

    def _all(self, sql: str) -> Sequence[tuple[Any, ...]]:
        return self._connected().execute(sql.encode()).fetchall()

    def _run(self, sql: str, values: Sequence[object]) -> int:
        return self._connected().execute(_ours(sql), values).rowcount

    def _run_many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        self._connected().cursor().executemany(_ours(sql), rows)

    def _transaction(self, work: Callable[[], T]) -> T:
        with self._connected().transaction():
            return work()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except psycopg.errors.SerializationFailure:
            raise self._conflict() from None
        except psycopg.Error as error:
            code = error.sqlstate or ""
            is_lost = self._connection is None or self._connection.closed
            is_lost = is_lost or code[:2] in _LOST_CLASSES
            is_lost = is_lost or (not code and not isinstance(error, psycopg.DataError))
            text = f"{self.name}: {' '.join(str(error).split())}"
            if hint := _HINTS.get(code):
                text = f"{text}: {hint}"
            if is_lost:
                self.close()
                raise StoreLost(text) from error
            raise StateStoreError(text) from error

    def check(self) -> None:
        try:
            with self._explained():
                self._connected().execute("SELECT 1")
        except StoreLost:
            raise
        except StateStoreError as error:
            self.close()
            raise StoreLost(str(error)) from error

    def interrupt(self) -> None:
        connection = self._connection
        if connection is None or connection.closed:
            return
        try:
            # Not by the server, which may stand still: the end of the stream ends the call.
            with socket.socket(fileno=os.dup(connection.fileno())) as stream:
                stream.shutdown(socket.SHUT_RDWR)
        except (OSError, psycopg.Error):
            # It has ended by itself.
            return

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _parsed(url: str) -> dict[str, Any]:
    """Returns the parsed URL. Raises StateStoreError without any text of the URL, because a part of
    the password may have been parsed as a host, a port or a database."""
    try:
        found = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        found = {"host": "@"}
    port = str(found.get("port") or "").replace(",", "")
    names = f"{found.get('host') or ''}{found.get('dbname') or ''}"
    if "@" in names or (port and not (port.isascii() and port.isdecimal())):
        raise StateStoreError(
            "DB_URL: write postgresql://USER:PASSWORD@HOST:5432/DATABASE, with %-escapes for"
            " special characters, as %2F for / and %40 for @"
        ) from None
    return found


def _name(parameters: dict[str, Any]) -> str:
    host = parameters.get("host") or parameters.get("hostaddr") or "localhost"
    port = parameters.get("port") or "5432"
    return f"postgresql://{host}:{port}/{parameters.get('dbname') or ''}"


def _ours(sql: str) -> bytes:
    return sql.replace("?", "%s").encode()


def _row(connection: psycopg.Connection, sql: str) -> tuple[Any, ...]:
    found = connection.execute(sql.encode()).fetchone()
    assert found is not None
    return found
