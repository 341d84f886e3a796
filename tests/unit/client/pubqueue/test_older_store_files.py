"""SQLite files that commit 704ebb7 wrote, before the stores had one base: they open, and keep
everything."""

import gzip
from pathlib import Path

import pytest

from holdfast.client.pubqueue.messages import Failed, QueueEntry
from holdfast.client.pubqueue.sqlite import SqliteStore
from holdfast.client.pubqueue.store import QueueChange
from holdfast.protocol.mqtt import properties as pr
from holdfast_federation.core.identity import MessageId
from holdfast_federation.manager.state.store import StateStore
from holdfast_federation.sidecar.store.file import MemberStoreChange, MemberStoreError, StoreFile
from tests.unit.federation.manager.test_stores import FULL, LINE

FILES = Path(__file__).parents[3] / "data" / "stores"
NODE, ORIGIN = b"\x01" * 16, b"\x02" * 16


def unpacked(name: str, directory: Path) -> Path:
    path = directory / f"{name}.db"
    path.write_bytes(gzip.decompress((FILES / f"{name}.db.gz").read_bytes()))
    return path


def test_a_publish_queue(tmp_path: Path) -> None:
    store = SqliteStore(unpacked("queue", tmp_path))
    opened = store.open("sequence", 1_700_000_001.0)
    assert (opened.producer, opened.epoch, opened.last_sequence, opened.count) == (
        "old", 1_700_000_001, 3, 1,
    )  # fmt: skip
    [entry] = store.read(0, 10, 1 << 20)
    assert (entry.sequence, entry.epoch, entry.topic, entry.payload) == (1, 7, "a/b", b"\x00\xff")
    assert (entry.retain, entry.put_at, entry.expires_at) == (True, 1.25, 2.5)
    assert entry.properties == {pr.CONTENT_TYPE: "x"}
    [failed] = store.list_failed()
    assert isinstance(failed, Failed)
    assert (failed.entry.sequence, failed.reason, failed.text) == (3, 135, "not authorised")
    store.apply(QueueChange([QueueEntry(4, 8, "d", b"4", None, False, 1.0, 0.0, 70)], [1]))
    store.close()


def test_a_member(tmp_path: Path) -> None:
    path = unpacked("member", tmp_path)
    with pytest.raises(MemberStoreError, match=f"belongs to member {NODE.hex()}"):
        StoreFile(path, ORIGIN).open()
    file = StoreFile(path, NODE)
    kept = file.open()
    assert [data for data, _ in kept.custody] == [b"one", b"nine"]
    assert kept.positions == {ORIGIN: (3, 44)}
    assert kept.retained == {"a/b": b"kept"}
    assert kept.memory == [b"m1", b"m2"]
    assert kept.former == {}
    change = MemberStoreChange({MessageId(NODE, 3, 1): b"new"}, {MessageId(NODE, 1, 1)})
    change.former[ORIGIN, 2] = 7
    file.apply(change)
    file.close()
    kept = StoreFile(path, NODE).open()
    assert [data for data, _ in kept.custody] == [b"nine", b"new"]
    assert kept.former == {(ORIGIN, 2): 7}


def test_a_manager(tmp_path: Path) -> None:
    store = StateStore(unpacked("manager", tmp_path))
    assert store.load() == FULL
    assert [line.action for line in store.audit(5)] == [LINE.action]
    store.close()


def test_no_store_opens_the_file_of_another(tmp_path: Path) -> None:
    with pytest.raises(MemberStoreError, match="another program's database"):
        StoreFile(unpacked("queue", tmp_path), NODE).open()
