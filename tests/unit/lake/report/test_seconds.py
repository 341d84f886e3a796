"""The report of a span of minutes: steps of seconds, gaps as gaps, one device or a thousand."""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")
pytest.importorskip("pyspark.sql")

from holdfast_lake.lake.catalog import load_catalog
from holdfast_lake.lake.schema import RECORDS_COLUMNS
from holdfast_lake.report import report as report_module
from holdfast_lake.report.charts import TimeAxis
from holdfast_lake.report.data import TimeGrain, grain_of
from holdfast_lake.report.report import report
from tests.support.gold_files import write_rows, write_table

CATALOG = load_catalog([])
BEGIN = datetime(2026, 11, 21, 8, 0, 10, tzinfo=UTC)
GAP_S = (40.0, 46.0)


def write_lake(
    lake: Path,
    devices: int,
    every_s: float,
    seconds: int = 120,
    units: Sequence[str | None] = (None,),
) -> int:
    """Devices that send while the broker is down for GAP_S, and whose messages are stored after it.
    Returns the messages that were published meanwhile."""
    readings: list[dict[str, Any]] = []
    waited = 1  # the first one after it
    for device in range(devices):
        for number in range(int(seconds / every_s)):
            sent_s = number * every_s + device * every_s / devices
            is_late = GAP_S[0] < sent_s < GAP_S[1]
            waited += is_late
            sent = BEGIN + timedelta(seconds=sent_s)
            stored_s = (GAP_S[1] if is_late else sent_s) + 0.004
            readings.append({
                "device": f"press-{device}", "metric": "temperature", "event_time": sent,
                "unit": units[device % len(units)],
                "value_double": 20.0 + device % 9 + number % 3, "sent_time": sent,
                "store_time": BEGIN + timedelta(seconds=stored_s), "position": 0,
                "is_late": False, "is_historical": False, "topic": f"press/{device}",
                "date": BEGIN.date(),
            })  # fmt: skip
    write_table(lake, CATALOG.table("readings"), readings)
    records = [{"topic": row["topic"], "timestamp": row["store_time"]} for row in readings]
    write_rows(lake, "records", RECORDS_COLUMNS, ("date",), records)
    minute = BEGIN.replace(second=0)
    minutes = [
        {"device": f"press-{device}", "metric": "temperature", "window_start": minute,
         "unit": units[device % len(units)], "numbers": 1, "mean": 20.0, "min": 20.0,
         "max": 20.0, "messages": 1, "p50_ms": 1.0}
        for device in range(devices)
    ]  # fmt: skip
    for name in ("device_minutes", "latency", "quality"):
        columns = {column.name for column in CATALOG.table(name).columns}
        rows = [{key: row[key] for key in row.keys() & columns} for row in minutes]
        write_table(lake, CATALOG.table(name), rows)
    return waited


def charts_of(html: str) -> dict[str, dict[str, Any]]:
    """The figures by their titles."""
    match = re.search(r"(?s)<script type=application/json id=figures>(.*?)</script>", html)
    assert match is not None
    titles = re.findall(r"<figure><h3>(.*?)</h3>", html)
    return dict(zip(titles, json.loads(match.group(1)), strict=True))


def test_every_span_has_60_to_300_steps() -> None:
    span_s = 60
    while span_s < 20 * 365 * 86_400:
        grain = grain_of([BEGIN, BEGIN + timedelta(seconds=span_s)], 1)
        assert 60 <= span_s / grain.seconds < 300, (span_s, grain.name)
        span_s += span_s // 7
    names = [TimeGrain(seconds).name for seconds in (1, 15, 60, 900, 14_400, 172_800)]
    assert names == ["second", "15 seconds", "minute", "15 minutes", "4 hours", "2 days"]
    assert grain_of([BEGIN, BEGIN]).name == "minute"


def test_a_gap_stays_a_gap(tmp_path: Path) -> None:
    waited = write_lake(tmp_path, 1, 0.2)
    html = report(tmp_path, CATALOG)
    found = charts_of(html)
    rates = found["Messages a second"]["data"][0]
    assert 115 <= len(rates["x"]) <= 121
    assert rates["y"][5:35] == [5.0] * 30
    down = [x for x, y in zip(rates["x"], rates["y"], strict=True) if y is None]
    assert "2026-11-21T08:00:52.500000+00:00" in down
    assert len(down) == 5 + 2  # and the first and the last step
    assert max(rate for rate in rates["y"] if rate is not None) > 25  # those that waited
    (shade,) = found["Messages a second"]["layout"]["shapes"]
    assert (shade["x0"][11:21], shade["x1"][11:21]) == ("08:00:50.0", "08:00:56.0")
    # The readings have their own time, so their line goes on; the latency does not.
    longest = found["Latency of all devices"]["data"][2]
    assert max(y for y in longest["y"] if y is not None) == pytest.approx(5804.0)
    assert None in longest["y"]
    assert None not in found["temperature"]["data"][-1]["y"][1:-1]
    text = re.sub("<[^>]*>", " ", html.split("<script")[0])
    assert f"6.000 {waited} 5.804" in " ".join(text.split())
    assert "Devices that sent" not in text


@pytest.mark.parametrize("seconds", [120, 86_400])
def test_each_unit_has_a_chart_of_its_own(seconds: int, tmp_path: Path) -> None:
    write_lake(tmp_path, 3, seconds / 60, seconds, units=("°C", "°F", None))
    found = charts_of(report(tmp_path, CATALOG))
    assert {"temperature (°C)", "temperature (°F)", "temperature"} <= found.keys()


def test_a_thousand_devices_are_bands(tmp_path: Path) -> None:
    write_lake(tmp_path, 1000, 4.0)
    html = report(tmp_path, CATALOG)
    found = charts_of(html)
    names = {trace["name"] for trace in found["temperature"]["data"]}
    assert names == {"all values", "8 of 10 devices", "median of the devices"}
    senders = found["Devices that sent a message"]["data"][0]["y"]
    assert senders[3:35] == [250] * 32
    assert senders[42] == 0
    assert "Devices, slowest first: 20 of 1,000" in html
    assert sum(len(trace["x"]) for each in found.values() for trace in each["data"]) < 5000
    assert "Median and bands of 1,000 devices." in html


def test_chosen_devices_have_seconds_too(tmp_path: Path) -> None:
    write_lake(tmp_path, 12, 1.0)
    found = charts_of(report(tmp_path, CATALOG, None, ["press-1", "press-2"]))
    assert {trace["name"] for trace in found["temperature"]["data"]} >= {"press-1", "press-2"}
    assert "press-3" not in json.dumps(found)


def test_too_many_rows_are_shown_by_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lake(tmp_path, 2, 1.0)
    monkeypatch.setattr(report_module, "ROWS_MAX", 100)
    html = report(tmp_path, CATALOG)
    assert "Mean of each minute." in html
    assert "Interruptions" not in html


def test_a_line_breaks_only_where_it_is_silent_for_longer_than_usual() -> None:
    axis = TimeAxis(0, 39_000_000, TimeGrain(1))
    line = [float(at) if at % 4 == 0 and not 16 < at < 28 else None for at in range(40)]
    found = axis.bridged(line)
    assert found[:17] == [float(at) for at in range(17)]
    assert found[17:28] == [None] * 11
    assert found[28:37] == [float(at) for at in range(28, 37)]
    assert axis.bridged([None, 1.0, None]) == [None, 1.0, None]


@pytest.mark.parametrize("seconds", [1, 60, 3600])
@pytest.mark.parametrize("length_s", [0.0, 0.2, 0.9, 59.0, 7200.0])
def test_every_step_is_within_the_ends(seconds: int, length_s: float) -> None:
    """The first report of a newcomer is of messages of one second: its points were out of sight."""
    begin_us = round(BEGIN.timestamp() * 1e6) + 100_000
    axis = TimeAxis(begin_us, begin_us + round(length_s * 1e6), TimeGrain(seconds))
    first, last = axis.ends
    assert all(first <= step <= last for step in axis.steps)
    assert last > first
