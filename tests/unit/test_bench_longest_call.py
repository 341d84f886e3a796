"""The benchmark of the longest call measures each kind of call, and its cluster comes to rest."""

import json
from pathlib import Path

from bench.longest_call import main


def test_the_figures_of_a_small_cluster(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert main(["--sessions", "3000", "--filters", "500", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    kinds = {"death_turn_ms", "death_frame_ms", "interest_frame_ms", "interest_disconnect_ms"}
    assert kinds <= figures.keys()
    assert all(figures[name] > 0 for name in kinds)
    assert figures["death_wrongly_suspected"] == 0
