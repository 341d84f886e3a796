"""Fixtures of the unit tests."""

import pytest


@pytest.fixture(params=["single", "one"])
def both_forms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bench of the test drives a single node, and then a cluster of one."""
    monkeypatch.setattr("tests.support.node_bench.IS_ONE", request.param == "one")
