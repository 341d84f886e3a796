"""When a damaged directory is put aside, and when it is not."""

import asyncio
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.cluster.metadata.model import ClusterMetadata, NodeInfo, NodePhase, PartitionInfo
from holdfast.server.disk.storage import Storage
from holdfast.server.replacement import Replacement


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


def test_it_is_put_aside_once_others_have_everything(root: Path) -> None:
    replacement = Replacement(root, "n1")
    assert not replacement.has_aside
    both = metadata(("n1", "n2"), ("n2",))
    assert not replacement.step(both, False)
    assert Replacement(root, "n1").has_aside is False
    assert replacement.step(metadata(("n2", "n3"), ("n2",)), True)
    assert not replacement.step(metadata(("n2", "n3"), ("n2",)), True)
    again = Replacement(root, "n1")
    assert again.has_aside
    assert (root / "damaged" / "manifest.json").exists()
    assert not (root / "manifest.json").exists()


def test_the_last_copy_is_kept_and_that_is_said_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replacement = Replacement(root, "n1")
    with caplog.at_level(logging.WARNING, "holdfast"):
        # Nobody has decided yet.
        assert not replacement.step(None, False)
        assert not replacement.step(metadata(("n1",), ("n1", "n2"), state=NodePhase.UP), False)
        assert not caplog.records
        for _ in range(3):
            assert not replacement.step(metadata(("n1",), ("n2", "n3")), False)
    (record,) = caplog.records
    assert record.getMessage().startswith("damaged_last_copy partitions=[0] ")
    assert not Replacement(root, "n1").has_aside
    # Another one was let lead.
    assert replacement.step(metadata(("n2",), ("n2", "n3")), True)


def test_a_disk_that_damages_what_was_fetched_anew_is_not_trusted_again(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Replacement(root, "n1").step(metadata(("n2",)), True)
    again = Replacement(root, "n1")
    Storage.open(root, "n1", 2, 1 << 20, "second").close()
    with caplog.at_level(logging.CRITICAL, "holdfast"):
        for _ in range(3):
            assert not again.step(metadata(("n2",)), True)
    (record,) = [one for one in caplog.records if one.levelno == logging.CRITICAL]
    assert "replace the disk" in record.getMessage()
    third = Replacement(root, "n1")
    assert third.has_aside
    assert (root / "manifest.json").exists()


def test_what_was_put_aside_is_removed_when_the_node_is_in_sync(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.replacement.POLL_S", 0.001)
    assert Replacement(root, "n1").step(metadata(("n2",)), True)
    replacement = Replacement(root, "n1")
    views = [None, metadata(("n2",), ("n2",)), metadata(("n1", "n2"), ("n2",))]

    def view() -> ClusterMetadata | None:
        assert (root / "damaged").exists()
        return views.pop(0) if views else metadata(("n2", "n1"), ("n1", "n2", "n3"))

    asyncio.run(replacement.forget_aside(view))
    assert views == []
    assert not (root / "damaged").exists()
    assert not replacement.has_aside
    assert not Replacement(root, "n1").has_aside
