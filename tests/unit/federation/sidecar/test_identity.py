"""The file with a member's identity, and the lock of its directory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast_federation.core.identity import EPOCH_RANDOM_STEP, BadIdentity
from holdfast_federation.sidecar.edge_broker.origin_offset import (
    STARTS_MAX,
    LogStart,
    decode_starts,
    next_starts,
    start_of,
)
from holdfast_federation.sidecar.store.identity import IDENTITY, IdentityFile


def begin(directory: Path, id: str = "") -> tuple[str, int]:
    file = IdentityFile(directory)
    identity = file.begin(id)
    file.release()
    return identity.node.hex(), identity.epoch


def test_every_start_is_a_new_epoch_of_the_same_member(tmp_path: Path) -> None:
    first, epoch = begin(tmp_path / "made")
    assert epoch == 1
    assert [begin(tmp_path / "made") for _ in range(3)] == [(first, at) for at in (2, 3, 4)]
    assert begin(tmp_path / "other")[0] != first


def test_a_copy_of_a_directory_starts_apart(tmp_path: Path) -> None:
    """Otherwise others take its messages for those of the first run of that epoch."""
    begin(tmp_path / "made")
    os.utime(tmp_path / "made" / IDENTITY, (0, 0))
    epochs = []
    for number in range(5):
        shutil.copytree(tmp_path / "made", tmp_path / str(number), copy_function=shutil.copy2)
        epochs.append(begin(tmp_path / str(number))[1])
    assert len(set(epochs)) > 1
    assert all(2 <= epoch <= 1 + EPOCH_RANDOM_STEP for epoch in epochs)


def test_a_log_that_is_put_back_has_other_starts() -> None:
    starts: list[LogStart] = next_starts([], 3, [0, 5])
    assert starts == [(3, [0, 5])]
    before = next_starts(starts, 4, [7, 5])
    assert [start_of(before, 0, offset) for offset in (0, 6, 7, 9)] == [3, 3, 4, 4]
    assert [start_of(before, 1, offset) for offset in (4, 5)] == [0, 4]
    # Nothing was appended in start 4.
    kept = next_starts(before, 5, [7, 5])
    assert kept == [(3, [0, 5]), (5, [7, 5])]
    lost = next_starts(kept, 6, [9, 9])
    after = next_starts(kept, 77, [8, 6])
    assert [start_of(lost, 0, offset) for offset in (7, 8, 9)] == [5, 5, 6]
    assert [start_of(after, 0, offset) for offset in (7, 8, 9)] == [5, 77, 77]
    for number in range(78, 78 + STARTS_MAX):
        after = next_starts(after, number, [number, 9])
    assert len(after) == STARTS_MAX
    with pytest.raises(ValueError, match="the starts of the log"):
        decode_starts(b"no")


def test_a_given_id_stays(tmp_path: Path) -> None:
    id = "0123456789abcdef" * 2
    assert begin(tmp_path, id) == (id, 1)
    assert begin(tmp_path) == (id, 2)
    with pytest.raises(BadIdentity, match=f"has the id {id}, the configuration ffff.*take one"):
        begin(tmp_path, "f" * 32)
    assert begin(tmp_path, id) == (id, 3)


def test_two_processes(tmp_path: Path) -> None:
    file = IdentityFile(tmp_path)
    file.begin()
    with pytest.raises(BadIdentity, match="in use by another process"):
        IdentityFile(tmp_path).begin()
    code = (
        "import sys; from pathlib import Path;"
        " from holdfast_federation.sidecar.store.identity import IdentityFile;"
        " IdentityFile(Path(sys.argv[1])).begin()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "in use by another process" in done.stderr
    file.release()
    assert begin(tmp_path)[1] == 2


def test_an_epoch_that_others_know_is_passed(tmp_path: Path) -> None:
    file = IdentityFile(tmp_path)
    file.begin()
    assert file.disputed() == 0
    file.dispute(41)
    file.dispute(7)
    assert file.disputed() == 41
    file.release()
    assert begin(tmp_path)[1] == 42


@pytest.mark.parametrize("content", [b"", b"garbage", b"00 1\n", b"\xff\xfe", b"ab" * 16 + b" -1"])
def test_a_damaged_file_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    begin(tmp_path)
    (tmp_path / IDENTITY).write_bytes(content)
    with pytest.raises(BadIdentity, match="identity"):
        begin(tmp_path)
    assert (tmp_path / IDENTITY).read_bytes() == content


def test_a_torn_write_leaves_the_old_one(tmp_path: Path) -> None:
    first, _ = begin(tmp_path)
    (tmp_path / f"{IDENTITY}.tmp").write_bytes(b"to")
    assert begin(tmp_path) == (first, 2)


def test_a_poisoned_number_of_starts_says_how_it_is_repaired(tmp_path: Path) -> None:
    """Another member once claimed 2^62 starts for this one, and this one believed it."""
    node = bytes(range(16))
    (tmp_path / "identity").write_text(f"{node.hex()} {2**62}\n")
    with pytest.raises(BadIdentity, match="not a count of starts: replace the number"):
        IdentityFile(tmp_path).begin()
    (tmp_path / "identity").write_text(f"{node.hex()} 1000\n")
    assert begin(tmp_path) == (node.hex(), 1001)
