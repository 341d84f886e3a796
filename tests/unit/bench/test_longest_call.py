"""The benchmark of the longest call plays every entry of the core."""

import json
from pathlib import Path

from bench.entries import KINDS, ROWS, entries
from bench.longest_call import main
from holdfast.node.metadata.commands import Command
from tests.support.wire_samples import CLUSTER, cluster_kinds, wire_samples


def test_the_figures_of_a_small_cluster(tmp_path: Path) -> None:
    """It fails if an entry has no row."""
    path = tmp_path / "figures.json"
    assert main(["--sessions", "3000", "--filters", "500", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert figures.keys() == {*ROWS, "compiled", "node death"}
    assert all(figures[name]["longest_ms"] > 0 for name in ROWS)
    assert figures["node death"]["wrongly_suspected"] == 0


def test_each_frame_and_command_has_an_example() -> None:
    samples = [each for each in wire_samples() if each.format == CLUSTER]
    played = {each.name.partition(".")[0] for each in samples}
    assert cluster_kinds() <= played
    assert KINDS.keys() <= played
    assert {f"frame {kind}" for kind in KINDS.values()} <= entries()
    proposed = {type(each.value[1]) for each in samples if each.name.startswith("PROPOSAL.")}  # type: ignore[index]
    assert proposed == set(Command.__args__)
