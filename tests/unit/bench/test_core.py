"""The benchmark of the core alone: every message of a round is delivered and acknowledged."""

import pytest

from bench.core import FORMS, MESSAGES, ROWS, Core, Row, measure


@pytest.mark.parametrize("form", FORMS)
def test_a_round_leaves_nothing_behind(form: str) -> None:
    core = Core(Row(1, 3), form)
    core.round()
    assert sum(each.node.state.stats.publish_sent for each in core.machines) == 3 * MESSAGES
    for subscriber in core.subscribers:
        session = subscriber.connection.session
        assert session is not None
        assert session.inflight == {}


@pytest.mark.parametrize("name", ROWS)
def test_it_measures_each_row(name: str) -> None:
    found = measure(ROWS[name], ["one"], 1)
    assert all(0 < figures.cpu_us < 1_000_000 for figures in found.values())
