"""The model of one node of a large cluster has all sessions and the filters of all other nodes."""

import json
from pathlib import Path

import pytest

from bench.node_memory import NodeModel, filter_of, main


def test_a_node_has_all_sessions_and_the_filters_of_all_others() -> None:
    model = NodeModel(3)
    model.record_sessions(9)
    model.announce_filters(6)
    sessions = model.replicated.state.sessions
    assert {each.owner for each in sessions.values()} == {"n1", "n2", "n3"}
    assert list(sessions["client-4"].subscriptions) == [filter_of(4)]
    assert model.filters.plain.match(filter_of(5)) == ["n3"]
    assert sorted(model.filters.of_peers()) == sorted(map(filter_of, range(6)))


def test_the_figures_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    command = ["--nodes", "3", "--sessions", "50", "--filters", "50", "--json", str(path)]
    assert main(command) == 0
    figures = json.loads(path.read_text())
    assert figures["us_per_session"] > 0
    assert figures["metadata_kb_1024_partitions"] > figures["metadata_kb_64_partitions"] > 0
    assert "bytes per filter" in capsys.readouterr().out
