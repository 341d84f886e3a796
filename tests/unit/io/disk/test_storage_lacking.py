"""What a restart makes of a replica's log that began anew: without the images that go with it, it
must get them again."""

from pathlib import Path

import pytest

from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.io.disk.storage import Storage
from holdfast.log.files.layout import snapshot_name
from holdfast.log.snapshot import SnapshotEncoder
from holdfast.node.config import NodeConfig
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState


def opened(path: Path) -> Storage:
    storage = Storage.open(path, "n1", 4, 65536, "incarnation")
    state = RecordedState(NodeConfig(node_id="n1", partitions=4), storage.journal)
    storage.replay_into(ReplicatedState(state))
    return storage


def write(storage: Storage) -> None:
    group = storage.journal.close_write_group()
    assert group is not None
    writer = GroupWriter(storage.directory, durable=True, allocate_bytes=0)
    writer.write(group)
    storage.journal.wrote(group)
    storage.journal.commit(group)


def save(storage: Storage, offsets: list[int]) -> None:
    encoder = SnapshotEncoder(0, offsets, 0)
    pieces = encoder.finish()
    storage.directory.replace_file(snapshot_name(0), pieces)


@pytest.mark.parametrize(
    ("offsets", "lacking"),
    [
        (None, [1, 3]),
        ([0, 0, 0, 0], [1, 3]),
        ([0, 100, 0, 0], [3]),
        ([0, 99, 0, 7], [1]),
        ([0, 100, 0, 7], []),
    ],
)
def test_a_crash_after_a_log_began_anew(
    tmp_path: Path, offsets: list[int] | None, lacking: list[int]
) -> None:
    storage = opened(tmp_path)
    assert storage.lacking() == []
    storage.journal.reset(1, 100)
    storage.journal.reset(3, 7)
    write(storage)
    if offsets is not None:
        save(storage, offsets)
    storage.close()
    storage = opened(tmp_path)
    assert storage.journal.start_offsets == [0, 100, 0, 7]
    assert storage.lacking() == lacking
    storage.close()


def test_a_crash_before_that_is_durable(tmp_path: Path) -> None:
    """The old log is there, with all that goes with it: the leader will begin it anew again."""
    storage = opened(tmp_path)
    storage.journal.reset(1, 100)
    storage.directory.write_watermarks(storage.journal.checkpoint())
    storage.close()
    storage = opened(tmp_path)
    assert storage.journal.next_offset == [0, 0, 0, 0]
    assert storage.lacking() == []
    storage.close()


def test_a_snapshot_that_cannot_be_read(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    storage.journal.reset(1, 100)
    write(storage)
    save(storage, [0, 100, 0, 0])
    path = tmp_path / snapshot_name(0)
    path.write_bytes(path.read_bytes()[:-1])
    storage.close()
    storage = opened(tmp_path)
    assert storage.lacking() == [1]
    storage.close()
