"""Data directories that this and each earlier version wrote, served by this one.

`tools/formats.py --release` writes those of this version.
"""

import tarfile
from pathlib import Path

import pytest

from tests.support.format_samples import FOLDER
from tests.support.kept_data import check
from tests.support.kept_nodes import KINDS

LAKES = ("lake.tar.gz", "delta.tar.gz")
KEPT = [path for path in sorted(FOLDER.glob("*/*.tar.gz")) if path.name not in LAKES]


@pytest.mark.parametrize("archive", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_directory_of_each_version(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as kept:
        kept.extractall(tmp_path / "data", filter="data")
    with KINDS[archive.name.removesuffix(".tar.gz")](tmp_path, tmp_path / "data") as node:
        check(node.port)


def test_all_kinds_are_kept() -> None:
    for version in {path.parent for path in KEPT}:
        assert {path.name.removesuffix(".tar.gz") for path in version.glob("*")} == {
            *KINDS, "lake", "delta",
        }  # fmt: skip
