"""The alert rules and the dashboard use metrics and labels that brokers have, and Prometheus takes
them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.metrics.catalog import COUNTER, HISTOGRAM, METRICS

DEPLOY = Path(__file__).parents[3] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = json.loads((DEPLOY / "grafana" / "holdfast.json").read_text())
NAME = re.compile(r"\b((?:holdfast|process)_[a-z_0-9]+)(?:\{([^}]*)\})?")
PROMTOOL = shutil.which("promtool")
TARGET_LABELS = {"job", "instance"}
"""That Prometheus adds to each scrape."""


def exposed() -> dict[str, set[str]]:
    """The labels of each series that a scrape can have."""
    found: dict[str, set[str]] = {}
    for name, each in METRICS.items():
        base = each.exposed(name)
        for suffix in ("_bucket", "_sum", "_count") if each.kind == HISTOGRAM else ("",):
            found[base + suffix] = {*each.labels, *({"le"} if suffix == "_bucket" else ())}
    return found


SERIES = exposed()


def panels(parent: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in parent["panels"]:
        yield panel
        if panel["type"] == "row":
            yield from panels(panel)


def queries() -> Iterator[str]:
    for panel in panels(DASHBOARD):
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        yield variable["query"]
    text = (PROMETHEUS / "alerts.yml").read_text()
    yield from re.findall(r"expr: (?!\|)(.*)", text)
    yield from re.findall(r"expr: \|\n((?: {10,}.*\n)+)", text)
    yield from re.findall(r"series: '(.*)'", (PROMETHEUS / "alerts_test.yml").read_text())


QUERIES = list(queries())


@pytest.mark.parametrize("query", QUERIES)
def test_every_series_and_label_is_there(query: str) -> None:
    for name, selectors in NAME.findall(query):
        assert name in SERIES, name
        labels = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", selectors))
        assert labels <= SERIES[name] | TARGET_LABELS, (name, labels)


def test_counters_are_read_as_rates() -> None:
    """The value of a counter alone says nothing: it begins again at each start."""
    counters = {each.exposed(name) for name, each in METRICS.items() if each.kind == COUNTER}
    for query in QUERIES:
        for name, _ in NAME.findall(query):
            if name in counters or name.endswith("_bucket"):
                assert "rate(" in query or "increase(" in query, query


def test_much_is_shown() -> None:
    assert len(QUERIES) > 60
    shown = {name for query in QUERIES for name, _ in NAME.findall(query)}
    for name, each in METRICS.items():
        if each.kind == HISTOGRAM:
            assert f"{each.exposed(name)}_bucket" in shown


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels(DASHBOARD)]
    assert len(ids) == len(set(ids))
    for panel in panels(DASHBOARD):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_prometheus_accepts_the_files(arguments: tuple[str, ...]) -> None:
    if PROMTOOL is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    result = subprocess.run(
        [PROMTOOL, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_documented() -> None:
    alerts = re.findall(r"alert: (\w+)", (PROMETHEUS / "alerts.yml").read_text())
    page = (DEPLOY.parent / "docs" / "monitoring.md").read_text()
    assert set(re.findall(r"`(Holdfast[A-Z]\w+)`", page)) == set(alerts)
