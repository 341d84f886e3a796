"""When a damaged directory is put aside, and when it is not."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.io.disk.replacement import AsideDirectory
from holdfast.io.disk.storage import Storage
from holdfast.node.config import NodeConfig
from holdfast.node.effects import Note
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, NodePhase, PartitionInfo
from holdfast.node.node_state import NodeState
from holdfast.node.runtime.replacement import Replacement
from tests.support.bench_cores import new_journal
from tests.support.journal_port import new_state


def metadata(*in_sync: tuple[str, ...], state: str = NodePhase.DOWN) -> ClusterMetadata:
    """Of n1, which is damaged, n2 and n3."""
    nodes = {name: NodeInfo(name, "i", f"{name}:1", "", "") for name in ("n1", "n2", "n3")}
    nodes["n1"] = replace(nodes["n1"], state=state)
    partitions = tuple(PartitionInfo(("n1", "n2", "n3"), (), "", 1, each) for each in in_sync)
    return ClusterMetadata("c", 3, 2, nodes, partitions, 1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Storage.open(tmp_path, "n1", 2, 1 << 20, "first").close()
    return tmp_path


@pytest.fixture
def state() -> NodeState:
    return new_state(NodeConfig(partitions=2), new_journal(2, [0, 0], 0))


def notes(state: NodeState) -> list[Note]:
    return [effect for effect in state.effects if isinstance(effect, Note)]


def test_it_is_put_aside_once_others_have_everything(state: NodeState) -> None:
    replacement = Replacement("n1", state, "")
    assert not replacement.step(metadata(("n1", "n2"), ("n2",)), False)
    assert replacement.step(metadata(("n2", "n3"), ("n2",)), True)
    assert not replacement.step(metadata(("n2", "n3"), ("n2",)), True)


def test_the_last_copy_is_kept_and_that_is_said_once(state: NodeState) -> None:
    replacement = Replacement("n1", state, "")
    # Nobody has decided yet.
    assert not replacement.step(None, False)
    assert not replacement.step(metadata(("n1",), ("n1", "n2"), state=NodePhase.UP), False)
    assert not notes(state)
    for _ in range(3):
        assert not replacement.step(metadata(("n1",), ("n2", "n3")), False)
    (note,) = notes(state)
    assert (note.event, note.fields["partitions"]) == ("damaged_last_copy", [0])
    # Another one was let lead.
    assert replacement.step(metadata(("n2",), ("n2", "n3")), True)


def test_a_disk_that_damages_what_was_fetched_anew_is_not_trusted_again(state: NodeState) -> None:
    again = Replacement("n1", state, "/data/damaged")
    for _ in range(3):
        assert not again.step(metadata(("n2",)), True)
    (note,) = notes(state)
    assert note.level == "critical"
    assert "replace the disk" in str(note.fields["text"])


def test_the_directory_is_put_aside_at_the_next_start(root: Path) -> None:
    directory = AsideDirectory(root)
    assert not directory.path
    assert AsideDirectory(root).path == ""
    assert directory.mark(keep=False)
    assert AsideDirectory(root).path == str(root / "damaged")
    assert (root / "damaged" / "manifest.json").exists()
    assert not (root / "manifest.json").exists()
    Storage.open(root, "n1", 2, 1 << 20, "second").close()
    assert AsideDirectory(root).path
    assert (root / "manifest.json").exists()


def test_what_was_put_aside_is_removed_when_the_node_is_in_sync(
    root: Path, state: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    replacement = Replacement("n1", state, "damaged")
    monkeypatch.setattr("holdfast.io.disk.replacement.POLL_S", 0.001)
    assert AsideDirectory(root).mark(keep=False)
    directory = AsideDirectory(root)
    Storage.open(root, "n1", 2, 1 << 20, "second").close()
    views = [None, metadata(("n2",), ("n2",)), metadata(("n1", "n2"), ("n2",))]

    def has_everything() -> bool:
        assert (root / "damaged").exists()
        view = views.pop(0) if views else metadata(("n2", "n1"), ("n1", "n2", "n3"))
        return replacement.has_everything(view)

    asyncio.run(directory.forget(has_everything, lambda: [0, 1], lambda: 0))
    assert views == []
    assert not (root / "damaged").exists()
    assert not directory.path
    assert not AsideDirectory(root).path
