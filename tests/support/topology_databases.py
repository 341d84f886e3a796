"""The databases that a topology manager can keep its state in, for tests that run with each."""

import sqlite3
from pathlib import Path
from typing import Protocol

import pytest

from tests.support.postgresql import PostgresqlServer

DATABASES = ("sqlite", "postgresql")


class Database(Protocol):
    url: str

    def execute(self, sql: str) -> None:
        """From beside the manager."""


class SqliteDatabase:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.url = f"sqlite:///{file}"

    def execute(self, sql: str) -> None:
        connection = sqlite3.connect(self.file)
        try:
            connection.execute(sql)
            connection.commit()
        finally:
            connection.close()


class PostgresqlDatabase:
    def __init__(self, server: PostgresqlServer) -> None:
        self.server = server
        self.name = server.new_database()
        self.url = server.url(self.name)

    def execute(self, sql: str) -> None:
        self.server.execute(self.name, sql)


def new_database(kind: str, directory: Path, request: pytest.FixtureRequest) -> Database:
    """Of one of DATABASES; skips the test where there is no such server."""
    if kind == "sqlite":
        return SqliteDatabase(directory / "topology.db")
    return PostgresqlDatabase(request.getfixturevalue("postgresql_server"))
