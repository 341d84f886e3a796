"""What an error of SQLite means, by errors that it really gives."""

import sqlite3
from pathlib import Path

import pytest

from holdfast.sqlite import Trouble, transaction, trouble_of


def connect(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(file, timeout=0, isolation_level=None)


def test_troubles(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, " * 1000)
    file = tmp_path / "a.db"
    holder, other = connect(file), connect(file)
    holder.execute("CREATE TABLE t (x)")
    holder.execute("BEGIN IMMEDIATE")
    seen = []
    for attempt in (
        lambda: connect(tmp_path / "no" / "such.db"),
        lambda: connect(tmp_path / "text").execute("SELECT * FROM t"),
        lambda: other.execute("INSERT INTO t VALUES (1)"),
        lambda: sqlite3.connect(f"file:{file}?mode=ro", uri=True).execute("CREATE TABLE u (x)"),
        lambda: other.execute("SELECT * FROM nothing"),
    ):
        with pytest.raises(sqlite3.Error) as caught:
            attempt()
        seen.append(trouble_of(caught.value))
    assert seen == [
        Trouble.CANNOT_OPEN, Trouble.NO_DATABASE, Trouble.IN_USE, Trouble.READ_ONLY,
        Trouble.DAMAGED,
    ]  # fmt: skip
    holder.execute("ROLLBACK")
    holder.execute("PRAGMA max_page_count = 2")
    with pytest.raises(sqlite3.Error) as caught:
        transaction(holder, lambda: holder.execute("INSERT INTO t VALUES (zeroblob(1000000))"))
    assert trouble_of(caught.value) is Trouble.FULL
    assert not holder.in_transaction


def test_a_transaction_is_whole_or_nothing(tmp_path: Path) -> None:
    db = connect(tmp_path / "a.db")
    db.execute("CREATE TABLE t (x)")

    def half() -> None:
        db.execute("INSERT INTO t VALUES (1)")
        raise KeyError("half")

    with pytest.raises(KeyError):
        transaction(db, half)
    assert transaction(db, lambda: db.execute("SELECT * FROM t").fetchall()) == []
    transaction(db, lambda: db.execute("INSERT INTO t VALUES (2)"))
    assert db.execute("SELECT * FROM t").fetchall() == [(2,)]
