"""The metadata benchmark measures what it says."""

import json
from pathlib import Path

import pytest

from bench.metadata import main, measure


def test_figures_of_a_small_cluster() -> None:
    figures = measure(4, 16)
    assert figures["death_commands"] == 1
    # Each of the four holds 12 of the 48 replicas, and leads 4 of the 16 partitions.
    assert figures["death_changes"] == 12
    # Begun, in sync, and instead of the dead one, then leaders put right.
    assert figures["replace_changes"] >= 3 * 12
    assert figures["join_changes"] >= 3 * 9
    assert figures["heartbeats_per_s"] == 30
    assert all(value >= 0 for value in figures.values())


def test_the_table_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert main(["--shapes", "3x8,5x8", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert list(written) == ["3x8", "5x8"]
    printed = capsys.readouterr().out
    assert "3x8" in printed.splitlines()[0]
    assert all(name in printed for name in written["3x8"])


def test_a_shape_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--shapes", "2x64"])
    assert "needed is <nodes, 3 or more>x<partitions>" in capsys.readouterr().err
