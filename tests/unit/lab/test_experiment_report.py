"""The report over tables that are written here: complete in itself, safe with any name, honest
about what it leaves out; and drawn by a real browser where there is one."""

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

pytest.importorskip("plotly")
pytest.importorskip("pyspark.sql")

from holdfast.cli.main import main
from holdfast.client.log.lake.files import LakeError
from holdfast_lake.lake.catalog import load_catalog
from holdfast_lake.report.data import thinned
from holdfast_lake.report.report import report, write_report
from tests.support.gold_files import write_table

CATALOG = load_catalog(["holdfast_lab"])
NASTY = '</script><img src=x onerror=alert(1)>&"'
BEGIN = datetime(2026, 11, 21, 8, tzinfo=UTC)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def write(lake: Path, name: str, *rows: dict[str, Any]) -> None:
    write_table(lake, CATALOG.table(name), rows)


def write_runs(lake: Path, *runs: str) -> None:
    write(
        lake,
        "experiment_runs",
        *(
            {
                "run": run, "name": NASTY, "started": BEGIN + timedelta(hours=at),
                "duration_s": 60.0, "clients": 20 * (at + 1), "faults": 1, "published": 600,
                "confirmed": 600, "delivered": 1200, "confirmed_per_s": 10.0,
            }
            for at, run in enumerate(runs)
        ),
    )  # fmt: skip
    each = [
        {
            "run": run, "measure": "publish to confirm", "qos": 1, "clients": 20 * (at + 1),
            "messages": 600, "mean_ms": 5.0 + at, "p50_ms": 4.0, "p95_ms": 8.0, "p99_ms": 11.0,
            "max_ms": 900.0, "clock_error_ms": 0.0,
        }
        for at, run in enumerate(runs)
    ]  # fmt: skip
    write(lake, "experiment_latency", *each)
    seconds = [
        {
            "run": run, "second": second, "published": 10, "confirmed": 10, "delivered": 10,
            "unconfirmed": 0, "not_delivered": 0, "lost": 1 if second == 30 else 0,
            "confirmations": 0 if 20 <= second < 23 else 10, "deliveries": 20,
            "faults": 1 if 20 <= second < 25 else 0,
        }
        for run in runs
        for second in range(60)
    ]  # fmt: skip
    write(lake, "experiment_seconds", *seconds)
    downtime = [
        {
            "run": run, "fault": 1, "kind": "kill -9", "scope": scope, "name": name,
            "injected_s": 20.0, "broken_s": 5.0, "last_before_s": 19.9, "first_after_s": 22.9,
            "downtime_s": downtime_s, "service_after_s": 2.9, "usual_s": 0.1,
        }
        for run in runs
        for scope, name, downtime_s in (("client", "p1", 3.0), ("partition", "4", 2.5))
    ]  # fmt: skip
    write(lake, "experiment_downtime", *downtime)
    timeline = [
        {"run": run, "fault": 1, "after_s": 0.4, "what": "role_changed", "node": "n2",
         "partition": 4, "text": "leader"}
        for run in runs
    ]  # fmt: skip
    write(lake, "experiment_timeline", *timeline)
    write(
        lake,
        "experiment_violations",
        *({"run": run, "kind": "lost", "who": NASTY, "text": "it is gone"} for run in runs),
    )


def write_devices(lake: Path, minutes: int) -> None:
    times = [BEGIN + timedelta(minutes=at) for at in range(minutes)]
    topics = [
        {"topic": f"d/{at % 3}", "window_start": time, "messages": 60, "bytes": 6000}
        for at, time in enumerate(times)
    ]
    write(lake, "topics", *topics)
    readings = [
        {"device": f"pump {at % 9}", "metric": "temperature", "window_start": time, "numbers": 60,
         "mean": 20.0 + at % 7, "min": 19.0, "max": 28.0}
        for at, time in enumerate(times)
    ]  # fmt: skip
    write(lake, "device_minutes", *readings)


class Reader(HTMLParser):
    """The tags, what they point to, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self._stack: list[str] = []
        self.feed(re.sub(r"(?s)<script>.*?</script>", "", html))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def figures(html: str) -> list[dict[str, Any]]:
    match = re.search(r"(?s)<script type=application/json id=figures>(.*?)</script>", html)
    assert match is not None
    found: list[dict[str, Any]] = json.loads(match.group(1))
    return found


def test_it_needs_no_network_and_cannot_be_broken_by_names(tmp_path: Path) -> None:
    write_runs(tmp_path, "one", "two")
    write_devices(tmp_path, 30)
    html = report(tmp_path, CATALOG)
    found = Reader(html)
    assert set(found.addresses) == {f"#part-{at}" for at in range(7)}
    assert "img" not in found.tags
    assert found.text.count("it is gone") == 2
    assert "</script><img" not in html
    assert NASTY in found.text
    assert len(figures(html)) >= 8
    titles = [trace["name"] for figure in figures(html) for trace in figure["data"]]
    assert {"confirmations", "lost", "longest of a client", "p99", "8 of 10 devices"} <= set(titles)


def test_one_run_alone(tmp_path: Path) -> None:
    write_runs(tmp_path, "one", "two")
    text = Reader(report(tmp_path, CATALOG, "one")).text
    assert "Run one" in text
    assert "Run two" not in text
    with pytest.raises(LakeError, match="no test run three; there are: two, one"):
        report(tmp_path, CATALOG, "three")


def test_some_devices_alone(tmp_path: Path) -> None:
    write_devices(tmp_path, 30)
    html = report(tmp_path, CATALOG, None, ["pump [12]", "pump 3"])
    titles = {trace["name"] for figure in figures(html) for trace in figure["data"]}
    assert {each for each in titles if each.startswith("pump")} == {"pump 1", "pump 2", "pump 3"}
    text = Reader(html).text
    assert ", only pump [12], pump 3" in text
    assert "Topics, busiest first" not in text
    with pytest.raises(LakeError, match=r"no device matches press-\*; there are .*pump 0, pump 1"):
        report(tmp_path, CATALOG, None, ["press-*"])


def test_a_lake_without_anything(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="no gold tables yet"):
        report(tmp_path, CATALOG)
    with pytest.raises(LakeError, match="there is no lake in"):
        report(tmp_path / "none", CATALOG)


def test_empty_tables_are_said_to_be_empty(tmp_path: Path) -> None:
    for name in ("topics", "device_minutes", "latency", "availability", "missing"):
        write(tmp_path, name)
    found = Reader(report(tmp_path, CATALOG))
    for words in ("No messages yet", "No readings yet", "No payload says", "No number is missing"):
        assert words in found.text


def test_a_long_span_has_longer_steps(tmp_path: Path) -> None:
    write_devices(tmp_path, 3000)
    html = report(tmp_path, CATALOG)
    lines = [trace for figure in figures(html) for trace in figure["data"] if "fill" not in trace]
    assert {len(trace["x"]) for trace in lines} == {200}
    assert "Mean of each 15 minutes, over the part of it that was observed." in html
    assert "Median and bands of 9 devices." in html


def test_thinning_keeps_every_peak() -> None:
    ys: list[float | None] = [1.0] * 10_000
    ys[4321], ys[8765], ys[77] = 99.0, -5.0, None
    xs, kept = thinned(range(10_000), ys)
    assert (xs[kept.index(99.0)], xs[kept.index(-5.0)]) == (4321, 8765)
    assert xs == sorted(xs)
    assert thinned([1, 2], [None, 3.0]) == ([1, 2], [None, 3.0])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_runs(tmp_path / "lake", "one")
    page = tmp_path / "report.html"
    command = ["pipeline", "report", "--lake", str(tmp_path / "lake"), "-o"]
    write(tmp_path / "lake", "topics")
    (tmp_path / "lake" / "lake.json").write_text('{"format": 1}')
    assert main([*command, str(page)]) == 0
    assert "Run one" not in page.read_text()
    assert main([*command, str(page), "--run", "one"]) == 2
    assert "give --tables holdfast_lab" in capsys.readouterr().err
    command[2:2] = ["--tables", "holdfast_lab"]
    assert main([*command, str(page)]) == 0
    assert "Run one" in page.read_text()
    assert main([*command, str(page), "--run", "nine"]) == 2
    assert "no test run nine" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "nowhere" / "report.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def minute(number: int) -> datetime:
    return BEGIN + timedelta(minutes=number)


def write_quality(lake: Path, devices: int, minutes: int) -> None:
    """Of each device three repetitions, in its own minute, and one outage of 90 s."""
    names = [f"d{number}" for number in range(devices)]
    rows = [
        {"device": name, "window_start": minute(at), "messages": 60, "late": 0, "missing": 0,
         "filled": 0, "wrong_clock": 0, "repetitions": 3 if at == number % minutes else 0}
        for number, name in enumerate(names)
        for at in {0, number % minutes, minutes - 1}
    ]  # fmt: skip
    write(lake, "quality", *rows)
    write(
        lake,
        "outages",
        *(
            {"device": name, "window_start": BEGIN, "outage_from": minute(5), "cause": "silence",
             "outage_to": minute(5) + timedelta(seconds=90 + number), "is_open": False,
             "duration_s": 90.0 + number}
            for number, name in enumerate(names)
        ),
    )  # fmt: skip
    folder = lake / "quarantine" / "table=readings" / "date=2026-11-21"
    folder.mkdir(parents=True)
    columns = {
        "reason": ["no JSON: " + "x" * 90, "no JSON: " + "x" * 91, NASTY],
        "topic": ["t/1", "t/2", NASTY],
        "timestamp": [minute(0), minute(1), minute(minutes - 1)],
    }  # a file of an older version: without client_id
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")


@pytest.mark.parametrize(
    ("devices", "minutes", "grain"), [(1, 50, "15 seconds"), (1000, 3 * 1440, "15 minutes")]
)
def test_what_was_wrong_is_on_a_time_axis(
    tmp_path: Path, devices: int, minutes: int, grain: str
) -> None:
    write_quality(tmp_path / "lake", devices, minutes)
    page = report(tmp_path / "lake", CATALOG)
    by_title = {each["layout"]["yaxis"]["title"].get("text"): each for each in figures(page)}
    bars = by_title[f"each {grain}"]["data"]
    assert sum(bars[0]["y"]) == 3  # the quarantine, which is the last of them
    assert f"Counts of each {grain}." in page
    quality = next(each for each in figures(page) if each["data"][0]["name"].startswith("repet"))
    assert sum(quality["data"][0]["y"]) == 3 * devices
    assert [trace["name"] for trace in quality["data"]] == ["repetitions, dropped"]
    spans = next(each for each in figures(page) if each["data"][0].get("orientation") == "h")
    assert len(set(spans["data"][1]["y"])) == min(devices, 25)
    assert f"Devices, worst first: {min(devices, 25)} of {devices:,}" in page
    # The two reasons that differ behind what is shown are one row.
    assert page.count("no JSON: " + "x" * 51 + "…") == 1
    assert NASTY not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_draws_every_chart(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    write_runs(tmp_path / "lake", "one", "two")
    write_quality(tmp_path / "lake", 30, 50)
    page = tmp_path / "report.html"
    write_report(tmp_path / "lake", CATALOG, page)
    drawn = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=20000", page.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    ).stdout  # fmt: skip
    charts = len(figures(page.read_text()))
    assert len(re.findall(r'class="chart js-plotly-plot" id="chart-\d+"', drawn)) == charts > 5
