"""The benchmark of federations, as small as it gets, with real brokers and federators."""

from pathlib import Path

import pytest

from tests.e2e.brokers import MOSQUITTO
from tests.e2e.test_benchmarks import run

GRAPH = ["--graph", "0-1 1-2", "--publisher", "2", "--subscriber", "1", "--subscriber", "0"]


@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
def test_three_members_of_two_kinds_are_compared(tmp_path: Path) -> None:
    options = ["--only", "latency", *GRAPH, "--rounds", "1", "--messages", "20", "--qos", "2"]
    figures = run("federation", tmp_path, *options, "--variant", "bridges", "--variant", "builtin")[
        "latency"
    ]
    runs = {(each["variant"], each["load"]): each for each in figures["runs"]}
    assert set(runs) == {(v, load) for v in ("bridges", "builtin") for load in "AB"}
    for each in runs.values():
        assert (each["sent"], each["lost"], each["duplicates"], each["reordered"]) == (20, 0, 0, 0)
        assert each["latencies"]["0"]["mean_ms"] > 0
        assert each["cpu_s"] > 0
    # The nearer subscriber is on the way to the other one.
    assert runs["builtin", "A"]["copies"] == pytest.approx(2.0, abs=0.5)
    assert figures["observed"]["bridges"]["copies"] == pytest.approx(2.0, abs=0.5)
    assert figures["violations"] == []
