"""The pipeline's checks of a run, and the ledger's, which were written apart: they must agree."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from holdfast_lab.topic_checks import check_topic, count_topic
from holdfast_lab.topic_history import History, Row
from tests.e2e.ledger_checks import legal_duplicates
from tests.support.experiment_scripts import (
    PLANTED,
    RandomRun,
    broken,
    counted,
    findings,
    right_run,
)

SEEDS = 120


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(tmp_path: Path, name: str) -> None:
    plant, expected = PLANTED[name]
    script = right_run()
    plant(script)
    path = tmp_path / "run.jsonl"
    ledger = script.write(path, "run")
    found = [one for one in findings(path) if one.kind != "repetition"]
    assert {(one.kind, one.who) for one in found} == expected
    assert bool(broken(ledger)) == bool(expected)


def test_agrees_with_the_ledger(tmp_path: Path) -> None:
    kinds: Counter[str] = Counter()
    kept = 0
    for seed in range(SEEDS):
        path = tmp_path / "run.jsonl"
        ledger = RandomRun(random.Random(seed)).make().write(path, "run")
        found = findings(path)
        wrong = [one for one in found if one.kind != "repetition"]
        keys = [
            None
            if one.publisher is None or one.sequence is None
            else (one.publisher, one.topic, one.sequence)
            for one in wrong
        ]
        judged = counted((one.kind, one.who, key) for one, key in zip(wrong, keys, strict=True))
        assert judged == broken(ledger), f"seed {seed}"
        explained = Counter(one.text for one in found if one.kind == "repetition")
        assert explained == legal_duplicates(ledger), f"seed {seed}"
        kinds.update(one.kind for one in found)
        kept += not wrong
    assert set(kinds) == {
        "lost", "missed after SUBACK", "duplicate", "reordered", "disagreement", "invented",
        "will not due", "two owners", "retained", "repetition",
    }  # fmt: skip
    assert kept > 5


def row(event: str, n: int, time_us: int, host: str = "a", **fields: Any) -> Row:
    return Row(event, n, host, host, time_us, error_us=500, **fields)


@pytest.mark.parametrize(("sent_us", "is_owed"), [(1900, False), (2100, True)])
def test_two_clocks_leave_a_doubt(sent_us: int, is_owed: bool) -> None:
    """The SUBACK came at 1000 by another host's clock, and each may be off by 500."""
    filters = [{"filter": "t", "qos": 1}]
    message: dict[str, Any] = {"publisher": "p", "sequence": 0, "qos": 1}
    rows = [
        row("subscribing", 1, 0, "b", client="s", filters=filters),
        row("subscribed", 2, 1000, "b", client="s"),
        row("published", 1, sent_us, **message),
        row("confirmed", 2, sent_us + 50, publisher="p", sequence=0),
    ]
    assert [one.kind for one in check_topic(History("t", rows))] == ["lost"] * is_owed


def test_members_of_a_group_with_two_writers() -> None:
    """Their numbers have no common order: who had it first is told by the time."""
    filters = [{"filter": "t", "qos": 1}]
    message: dict[str, Any] = {"publisher": "p", "sequence": 0}
    delivered = {**message, "connection": 1}
    rows = [
        row("subscribing", 1, 0, "x", client="m1", group="g", filters=filters),
        row("subscribing", 1, 0, "y", client="m2", group="g", filters=filters),
        row("subscribed", 2, 1, "x", client="m1"),
        row("published", 1, 5000, **message, qos=1),
        row("confirmed", 2, 5100, **message),
        row("delivered", 900, 6000, "x", client="m1", **delivered),
        row("disconnected", 901, 7000, "x", client="m1", connection=1),
        row("delivered", 3, 8000, "y", client="m2", **delivered, dup=True),
    ]
    found = list(check_topic(History("t", rows)))
    assert [(one.kind, one.text) for one in found] == [("repetition", "resent with DUP")]


def test_a_filter_without_a_name_matches_nothing() -> None:
    filters: list[dict[str, Any]] = [{"filter": None, "qos": 1}, {"filter": "t", "qos": None}]
    rows = [
        row("subscribing", 1, 0, client="s", filters=filters),
        row("subscribed", 2, 1, client="s"),
        row("published", 3, 100, publisher="p", sequence=0, qos=1),
        row("confirmed", 4, 200, publisher="p", sequence=0),
    ]
    history = History("t", rows)
    assert list(check_topic(history)) == []
    assert [(one.qos, one.confirmed, one.owed) for one in count_topic(history)] == [(1, 1, 0)]
