"""Chooses a database by its URL."""

from pathlib import Path
from typing import Final

from holdfast.federation.manager.state.sqlite import SqliteStateStore
from holdfast.federation.manager.state.store import StateStore, StateStoreError

SQLITE: Final = "sqlite:///"
POSTGRESQL: Final = ("postgresql://", "postgres://")


def check_url(url: str) -> None:
    """Checks a database URL. Raises ValueError for an invalid one, with a text that contains no
    secret."""
    if url.startswith(POSTGRESQL) or (url.startswith(SQLITE) and url != SQLITE):
        return
    scheme, separator, _ = url.partition("://")
    raise ValueError(
        f"{scheme if separator else 'no URL'!r}: write {SQLITE}/path/to/topology.db, or"
        " postgresql://user:password@host/database"
    )


def open_store(url: str) -> StateStore:
    """Opens the database of a checked URL. Raises StateStoreError."""
    if url.startswith(SQLITE):
        return SqliteStateStore(Path(url.removeprefix(SQLITE)))
    try:
        from holdfast.federation.manager.state.postgresql import PostgresqlStore
    except ImportError as error:
        raise StateStoreError(
            f"DB_URL names PostgreSQL, and its driver cannot be loaded ({error}): pip install"
            " 'holdfast[postgresql]'"
        ) from None
    return PostgresqlStore(url)
