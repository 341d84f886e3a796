"""Which epoch counts, and that nothing is guessed when its file is damaged."""

from pathlib import Path

import pytest

from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.journal.epoch_folders import (
    CLAIM_BYTES,
    CLAIMED_NAME,
    NEVER_SHARED,
    CorruptEpoch,
    Epoch,
    epoch_folders,
    newest_claimed,
    newest_epoch,
    read_epoch,
    remove_epoch,
    write_epoch,
)


@pytest.fixture
def root(tmp_path: Path) -> OsFileSystem:
    return OsFileSystem(tmp_path)


def begin(root: OsFileSystem, number: int) -> None:
    Epoch(number).files(root).make_folder("journal")


def test_a_directory_that_was_never_shared(root: OsFileSystem) -> None:
    root.make_folder("journal")
    assert newest_epoch(root) == NEVER_SHARED
    assert NEVER_SHARED.files(root) is root
    with pytest.raises(FileNotFoundError):
        newest_claimed(root)


def test_an_epoch_counts_when_its_file_is_there(root: OsFileSystem) -> None:
    first = Epoch(1, "a", "2026-01-01T00:00:00+00:00", {0: 4096, 17: 0})
    begin(root, 1)
    assert newest_epoch(root) == NEVER_SHARED
    write_epoch(root, first)
    assert newest_epoch(root) == first == read_epoch(root, 1)
    # Claimed by somebody who never came to it.
    begin(root, 2)
    assert epoch_folders(root) == [1, 2]
    assert newest_epoch(root) == first
    begin(root, 3)
    write_epoch(root, Epoch(3, "b"))
    assert newest_epoch(root).number == 3


def test_every_damage_of_an_epoch_is_an_error(root: OsFileSystem, tmp_path: Path) -> None:
    """Falling back to an older epoch would lose what the newer one promised."""
    begin(root, 1)
    write_epoch(root, Epoch(1, "a", "", {5: 100}))
    path = tmp_path / "epochs/0000000001/epoch.json"
    whole = path.read_bytes()
    for length in range(len(whole) - 2):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptEpoch, match=r"epoch\.json is damaged"):
            newest_epoch(root)
    for position, byte in enumerate(whole):
        if chr(byte).isalnum():
            path.write_bytes(whole[:position] + bytes([byte ^ 1]) + whole[position + 1 :])
            with pytest.raises(CorruptEpoch):
                newest_epoch(root)


def test_an_epoch_under_the_name_of_another(root: OsFileSystem, tmp_path: Path) -> None:
    begin(root, 1)
    begin(root, 2)
    write_epoch(root, Epoch(1, "a"))
    text = (tmp_path / "epochs/0000000001/epoch.json").read_bytes()
    (tmp_path / "epochs/0000000002/epoch.json").write_bytes(text)
    with pytest.raises(CorruptEpoch):
        newest_epoch(root)


def test_claims_are_told_by_the_size(root: OsFileSystem) -> None:
    root.make_folder("lease")
    file = root.open_write(CLAIMED_NAME, create=True)
    assert newest_claimed(root) == 0
    for claimed, expected in ((1, 1), (7, 7), (3, 7), (6, 7), (8, 8)):
        # In whatever order claimants come to it.
        file.write(claimed * CLAIM_BYTES, [claimed.to_bytes(8, "big")])
        assert newest_claimed(root) == expected


@pytest.mark.parametrize("number", [0, 4])
def test_removing_an_epoch_leaves_the_others(
    root: OsFileSystem, tmp_path: Path, number: int
) -> None:
    for each in (0, 4, 5):
        files = Epoch(each).files(root)
        files.make_folder("journal")
        files.make_folder("snapshots")
        files.open_write("journal/x.log", create=True).close()
        if each:
            write_epoch(root, Epoch(each))
    (tmp_path / "manifest.json").write_text("{}")
    remove_epoch(root, number)
    remove_epoch(root, number)
    assert not Epoch(number).files(root).list("journal")
    assert epoch_folders(root) == ([4, 5] if number == 0 else [5])
    assert newest_epoch(root).number == 5
    assert Epoch(5).files(root).list("journal") == ["x.log"]
    assert (tmp_path / "manifest.json").exists()
