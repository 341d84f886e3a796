"""The size of the report of a lake of years and 10,000 devices, and what it says to leave out."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")
pytest.importorskip("pyspark.sql")

import plotly.graph_objects as go

from holdfast_lake.lake.catalog import load_catalog
from holdfast_lake.report import data
from holdfast_lake.report.charts import Page, spans
from holdfast_lake.report.data import STEPS_MAX, grain_of
from holdfast_lake.report.report import report
from tests.support.gold_files import write_table

CATALOG = load_catalog([])
BEGIN = datetime(2016, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
DEVICES = 10_000
YEARS = 10
FLAPS = 200
"""The outages of one device."""
BYTES_MAX = 3 << 20
"""The most bytes of a report, without the program that draws it."""


def day(number: int) -> datetime:
    return BEGIN + DAY * number


def write_years(lake: Path) -> None:
    """Devices with long names, of which 30 are down again and again, and 500 metrics."""
    names = [f"hall/{number}/{'x' * 300}" for number in range(DEVICES)]
    metrics = [f"m{number}-{'y' * 5_000}" for number in range(500)]
    days = [day(at * 365 * YEARS // DEVICES) for at in range(DEVICES)]
    minutes: list[dict[str, Any]] = [
        {"device": name, "metric": metrics[at % 500],
         "window_start": days[at], "numbers": 60, "mean": at / 7, "min": at / 9, "max": at / 3}
        for at, name in enumerate(names)
    ]  # fmt: skip
    write_table(lake, CATALOG.table("device_minutes"), minutes)
    outages = [
        {"device": name, "window_start": days[at], "outage_from": days[at] + DAY * turn / FLAPS,
         "outage_to": days[at] + DAY * (turn + 0.5) / FLAPS, "cause": "silence",
         "duration_s": 14.4, "is_open": False}
        for at, name in enumerate(names)
        for turn in range(FLAPS if at < 30 else 1)
    ]  # fmt: skip
    write_table(lake, CATALOG.table("outages"), outages)
    for name, more in (
        ("topics", {"messages": 60, "rate": 1.0}),
        ("missing", {"stream": "s", "first": 1, "last": 9, "count": 9, "opened_at": BEGIN}),
        ("availability", {"up_s": 80_000.0, "down_s": 6_400.0, "outages": 1}),
        ("quality", {"messages": 60, "repetitions": 1, "late": 1, "missing": 1}),
        ("latency", {"p50_ms": 1.0, "p99_ms": 2.0, "max_ms": 900.0}),
    ):
        columns = {column.name for column in CATALOG.table(name).columns}
        rows = [
            {"window_start": days[at], "topic": each, "device": each, **more}
            for at, each in enumerate(names)
        ]
        kept = [{key: row[key] for key in row.keys() & columns} for row in rows]
        write_table(lake, CATALOG.table(name), kept)


def text_of(html: str) -> str:
    return " ".join(re.sub("<[^>]*>", " ", html.split("<script")[0]).split())


def test_the_report_of_years_is_small_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    write_years(tmp_path)
    html = report(tmp_path, CATALOG)
    drawn = re.sub(r"(?s)<script>.*?</script>", "", html)
    assert len(drawn.encode()) < BYTES_MAX
    text = text_of(html)
    assert "and 444 more" in text  # metrics with fewer readings
    assert "25 of 10,000 devices with outages" in text
    assert f"The longest 1,000 of their {25 * FLAPS:,} outages." in text
    assert f"Outages, newest first: 40 of {30 * FLAPS + DEVICES - 30:,}" in text
    assert "Ranges, longest first: 40 of 10,000" in text
    assert not re.search("[xy]{200}", drawn)


def test_a_span_of_any_length_has_a_bounded_number_of_steps() -> None:
    for days in (3, 365 * 24, 365 * 30, 365 * 900):
        grain = grain_of([BEGIN, BEGIN + DAY * days])
        assert days * 86_400 / grain.seconds < STEPS_MAX


def write_hours(lake: Path, name: str, hours: int, every_s: int) -> None:
    """A file for each hour of five devices, and an old small one that is written last."""
    rows = [
        {"device": f"pump {device}", "metric": "t", "numbers": 1, "mean": 1.0, "min": 1.0,
         "max": 1.0, "window_start": at, "date": at.date().isoformat(), "hour": str(at.hour)}
        for hour in range(hours)
        for second in range(0, 3600, every_s)
        for device in range(5)
        for at in [BEGIN + timedelta(hours=hour, seconds=second)]
    ]  # fmt: skip
    write_table(lake, CATALOG.table(name), rows)


def test_a_table_that_is_too_large_is_shown_from_some_time_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hours(tmp_path, "device_minutes", 10, 60)
    monkeypatch.setattr(data, "ROWS_MAX", 900)
    text = text_of(report(tmp_path, CATALOG))
    assert "device_minutes: 2,100 rows up to 2016-01-01 06:59 UTC" in text
    found = data.Stored(tmp_path, CATALOG.tables.values())
    assert len(found.read("device_minutes")) == 900
    # With rows of hours it is shown whole.
    write_hours(tmp_path, "device_hours", 10, 3600)
    text = text_of(report(tmp_path, CATALOG))
    assert "Not shown" not in text
    assert "From the table device_hours: device_minutes has 3,000 rows." in text
    # A device is chosen from all rows, and only its rows count.
    text = text_of(report(tmp_path, CATALOG, None, ["pump 3"]))
    assert "Not shown" not in text


def write_long_topics(lake: Path, minutes: int) -> None:
    """Topics of 60 kB that a small file has once."""
    names = [f"{number}/{'x' * 60_000}/{number}" for number in range(20)]
    rows = [
        {"window_start": BEGIN + timedelta(minutes=minute), "topic": name, "messages": 1,
         "rate": 1.0, "date": "2016-01-01", "hour": "0"}
        for minute in range(minutes)
        for name in names
    ]  # fmt: skip
    write_table(lake, CATALOG.table("topics"), rows)


def test_long_names_are_short_in_memory_and_stay_apart(tmp_path: Path) -> None:
    write_long_topics(tmp_path, 60)
    found = data.Stored(tmp_path, CATALOG.tables.values())
    rows = found.read("topics", ["topic", "window_start", "messages", "rate"])
    assert rows.num_rows == 1_200
    assert rows.nbytes < 1 << 20
    names = rows["topic"].unique().to_pylist()
    assert len(names) == 20
    assert all(len(name) <= data.TEXT_BYTES_MAX for name in names)
    assert {(name.split("/")[0], name.rsplit("/")[-1]) for name in names} == {
        (str(number), str(number)) for number in range(20)
    }


def test_a_newest_file_that_is_too_large_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hours(tmp_path, "device_minutes", 3, 60)
    monkeypatch.setattr(data, "BYTES_MAX", 10_000)
    found = data.Stored(tmp_path, CATALOG.tables.values())
    assert found.read("device_minutes").num_rows == 0
    assert str(found.cut["device_minutes"]) == "900 rows up to 2016-01-01 02:59 UTC"
    assert "device_minutes: 900 rows" in text_of(report(tmp_path, CATALOG))
    assert found.rows("device_minutes", ["device", "metric", "mean"], 1_000) is None


HOSTILE = "<!--<script>a</script><a href='https://x.example'>"


def test_a_name_neither_ends_the_figures_nor_becomes_a_link() -> None:
    page = Page("t", "s")
    chart = go.Figure()
    spans(chart, "outages", [(HOSTILE, BEGIN, BEGIN + DAY)], "#111")
    page.chart(page.part(HOSTILE, HOSTILE), HOSTILE, chart, HOSTILE)
    html = page.render()
    found = re.search(r"<script type=application/json id=figures>(.*?)</script>", html, re.DOTALL)
    assert found is not None
    assert "<" not in found[1]
    (figure,) = json.loads(found[1])
    (trace,) = figure["data"]
    assert trace["y"] == [HOSTILE.replace("<", "&lt;")]
    assert trace["hovertemplate"] == "%{y}<br>%{customdata}<extra>outages</extra>"
    assert "<a href='https:" not in html
