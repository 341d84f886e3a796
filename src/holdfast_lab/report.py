"""Adds test runs to the report: a part for each run, and one that compares them."""

from collections.abc import Sequence
from typing import Any, Final

from holdfast.client.log.lake.files import LakeError
from holdfast_lake.report import charts
from holdfast_lake.report.charts import Heading, Page, ReportPart, facts, number, table, text_of
from holdfast_lake.report.data import POINTS_MAX, Rows, Stored, thinned

RUNS_MAX: Final = 5
"""The most runs that are shown without a choice, the newest ones."""
FAULTS_MAX: Final = 200
"""The most faults that are shaded."""
TABLE_FAULTS: Final = 30
"""The most faults in the chart of downtimes."""
TIMELINE_MAX: Final = 2_000
"""The most events in the timeline."""
PERCENTILES: Final = (
    ("p50_ms", charts.SKY),
    ("p95_ms", charts.BLUE),
    ("p99_ms", charts.ORANGE),
    ("max_ms", charts.RED),
)
TIMELINE: Final = (
    ("fault_injected", charts.RED),
    ("disconnected", charts.ORANGE),
    ("role_changed", charts.BLUE),
    ("connected", charts.SKY),
    ("first confirmation", charts.GREEN),
    ("fault_healed", charts.PINK),
)


def add_to_report(page: Page, stored: Stored, run: str | None) -> None:
    """Adds the parts of the newest test runs, or of the one whose name is given.

    Raises LakeError if the lake has no run of that name.
    """
    runs = _runs(stored)
    if run is not None and run not in runs:
        known = ", ".join(runs[:10]) or "none"
        raise LakeError(f"{stored.lake} has no test run {run}; there are: {known}")
    shown = [run] if run is not None else runs[:RUNS_MAX]
    if len(runs) > len(shown):
        page.subtitle += f"; {len(shown)} of {len(runs)} test runs in detail"
    for name in shown:
        add_run(page, stored, name)
    if run is None and len(runs) > 1:
        add_comparison(page, stored, runs)


def _runs(stored: Stored) -> list[str]:
    """Returns the names of the test runs, newest first."""
    if not stored.has("experiment_runs"):
        return []
    found = stored.read("experiment_runs", ["run", "started"]).to_pylist()
    found.sort(key=lambda row: (row["started"] is not None, row["started"], row["run"]))
    return [row["run"] for row in reversed(found)]


def add_run(page: Page, stored: Stored, run: str) -> None:
    """Adds the part of one test run."""
    one: Rows = stored.read("experiment_runs", run=run).to_pylist()
    part = page.part(f"Run {run}", text_of(one[0]["name"]) if one else "")
    if not one:
        part.html.append("<p class=empty>The lake has no such run.</p>")
        return
    broken = stored.read("experiment_violations", run=run).to_pylist()
    downtime = stored.read("experiment_downtime", run=run).to_pylist()
    part.html.append(_facts(stored, one[0], broken))
    _seconds(page, part, stored, run, downtime)
    _downtime(page, part, downtime)
    _timeline(page, part, stored, run)
    _latency(page, part, stored, run)
    _counts(part, stored, run)
    violations = [
        Heading("kind", "kind"), Heading("who", "who"), Heading("publisher", "publisher"),
        Heading("topic", "topic"), Heading("sequence", "sequence"), Heading("text", "what"),
    ]  # fmt: skip
    part.html.append(table(violations, broken, "Broken promises", "none"))


def _facts(stored: Stored, run: dict[str, Any], broken: Rows) -> str:
    everything = stored.read("experiment_availability", run=run["run"]).to_pylist()
    clients = [row["availability_percent"] for row in everything if row["scope"] == "client"]
    known = [percent for percent in clients if percent is not None]
    given = [
        ("started (UTC)", text_of(run["started"])),
        ("duration", f"{number(run['duration_s'], 1)} s"),
        ("software", text_of(run["software"])),
        ("clients", text_of(run["clients"])),
        ("nodes", text_of(run["nodes"])),
        ("QoS", text_of(run["qos"])),
        ("payload", f"{run['payload_bytes']} B" if run["payload_bytes"] else "–"),
        ("faults", number(run["faults"])),
        ("published", number(run["published"])),
        ("confirmed", number(run["confirmed"])),
        ("deliveries", number(run["delivered"])),
        ("confirmed per second", number(run["confirmed_per_s"], 1)),
        ("worst client's availability", f"{number(min(known), 3)} %" if known else "–"),
    ]
    values = [(name, value, "") for name, value in given if value != "–"]
    verdict = ("broken promises", number(len(broken)), "bad" if broken else "good")
    return facts([verdict, *values])


def _seconds(page: Page, part: ReportPart, stored: Stored, run: str, downtime: Rows) -> None:
    rows = stored.read("experiment_seconds", run=run).to_pydict()
    seconds = rows["second"]
    chart = charts.figure("second of the run", "messages a second")
    spans = {
        row["fault"]: (row["injected_s"], row["injected_s"] + row["broken_s"], row["kind"])
        for row in downtime
    }
    charts.shade(chart, list(spans.values())[:FAULTS_MAX])
    lines = (
        ("published", charts.SKY, "dot"),
        ("confirmations", charts.BLUE, "solid"),
        ("deliveries", charts.GREEN, "solid"),
    )
    for name, colour, dash in lines:
        charts.line(chart, name, *thinned(seconds, rows[name]), colour, dash)
    unanswered = [
        (second, count) for second, count in zip(seconds, rows["unconfirmed"], strict=True) if count
    ]
    for name, colour, found in (
        ("published, never confirmed", charts.ORANGE, unanswered),
        ("lost", charts.RED, [(s, n) for s, n in zip(seconds, rows["lost"], strict=True) if n]),
    ):
        if found:
            xs, ys = zip(*found, strict=True)
            charts.bars(chart, name, xs, ys, colour)
    caption = (
        "Shaded: something is broken. What was published, never confirmed or lost is counted at "
        "the second of its PUBLISH."
    )
    if len(seconds) > POINTS_MAX:
        caption += (
            f" Of {len(seconds):,} seconds the lowest and the highest of each stretch are shown."
        )
    page.chart(part, "Messages in each second", chart, caption)


def _downtime(page: Page, part: ReportPart, downtime: Rows) -> None:
    headings = [
        Heading("fault", "fault"), Heading("kind", "what was done"),
        Heading("injected_s", "at", "s", 1),
        Heading("client_s", "longest of a client", "s", 3), Heading("client", "client"),
        Heading("partition_s", "longest of a partition", "s", 3),
        Heading("service_s", "fault to last partition's service", "s", 3),
        Heading("broken_s", "whole again after", "s", 1),
    ]  # fmt: skip
    rows = _worst(downtime)
    if not rows:
        part.html.append(table(headings, [], "Downtime of each fault", "no fault was injected"))
        return
    chart = charts.figure("downtime in seconds", "", barmode="group")
    names = [f"{row['fault']} {row['kind']}" for row in rows[:TABLE_FAULTS]]
    for column, name, colour in (
        ("client_s", "longest of a client", charts.BLUE),
        ("partition_s", "longest of a partition", charts.ORANGE),
    ):
        values = [row[column] for row in rows[:TABLE_FAULTS]]
        if any(value is not None for value in values):
            chart.add_bar(
                x=values, y=names, name=name, orientation="h", marker={"color": colour},
                hovertemplate="%{x:.3f} s<extra></extra>",
            )  # fmt: skip
    chart.update_layout(
        hovermode="closest", height=max(260, 90 + 30 * len(names)),
        yaxis={"autorange": "reversed", "rangemode": "normal"},
    )  # fmt: skip
    caption = (
        "From the last confirmation before the silence to the first one after it, as a client "
        "sees it. A client that publishes to many partitions waits for the slowest one"
    )
    if len(rows) > TABLE_FAULTS:
        caption += f"; the first {TABLE_FAULTS} of {len(rows)} faults"
    page.chart(part, "Downtime of each fault", chart, f"{caption}.")
    part.html.append(table(headings, [*rows, _mean(rows)], "The same in numbers"))


def _worst(downtime: Rows) -> Rows:
    """Returns the longest downtimes of each fault."""
    found: dict[int, dict[str, Any]] = {}
    for row in downtime:
        one = found.setdefault(
            row["fault"],
            {**row, "client_s": None, "client": None, "partition_s": None, "service_s": None},
        )
        if row["scope"] == "client" and row["downtime_s"] > (one["client_s"] or 0.0):
            one["client_s"], one["client"] = row["downtime_s"], row["name"]
        elif row["scope"] == "partition" and row["downtime_s"] > (one["partition_s"] or 0.0):
            one["partition_s"], one["service_s"] = row["downtime_s"], row["service_after_s"]
    return [found[fault] for fault in sorted(found)]


def _mean(rows: Rows) -> dict[str, Any]:
    made: dict[str, Any] = {"kind": "mean"}
    for name in ("client_s", "partition_s", "service_s", "broken_s"):
        values = [row[name] for row in rows if row[name] is not None]
        made[name] = sum(values) / len(values) if values else None
    return made


def _timeline(page: Page, part: ReportPart, stored: Stored, run: str) -> None:
    rows = stored.read("experiment_timeline", run=run).to_pylist()
    if not rows:
        return
    chart = charts.figure("seconds after the fault", "fault")
    shown = rows[:TIMELINE_MAX]
    for what, colour in TIMELINE:
        found = [row for row in shown if row["what"] == what]
        if found:
            texts = [
                f"{row['after_s']:.3f} s, {what}: "
                + " ".join(str(row[name]) for name in ("text", "client", "node") if row[name])
                + (f" partition {row['partition']}" if row["partition"] is not None else "")
                for row in found
            ]
            charts.points(
                chart, what.replace("_", " "), [row["after_s"] for row in found],
                [row["fault"] for row in found], texts, colour,
            )  # fmt: skip
    chart.update_layout(
        yaxis={
            "dtick": 1 if shown[-1]["fault"] <= 20 else None,
            "autorange": "reversed",
            "rangemode": "normal",
        }
    )
    caption = "What happened from each fault until a moment after it was healed."
    if len(rows) > len(shown):
        caption += f" The first {len(shown):,} of {len(rows):,} events."
    page.chart(part, "Timeline of the faults", chart, caption)


def _latency(page: Page, part: ReportPart, stored: Stored, run: str) -> None:
    rows = stored.read("experiment_latency", run=run).to_pylist()
    headings = [
        Heading("measure", "measure"), Heading("qos", "QoS"), Heading("messages", "messages"),
        *(Heading(f"{name}_ms", name, "ms", 2) for name in ("mean", "p50", "p95", "p99", "max")),
        Heading("clock_error_ms", "clocks may be off", "ms", 2),
    ]  # fmt: skip
    if rows:
        chart = charts.figure("", "milliseconds")
        names = [f"{row['measure']},<br>QoS {row['qos']}" for row in rows]
        for column, colour in PERCENTILES:
            values = [row[column] for row in rows]
            texts = [f"{column.removesuffix('_ms')}: {number(value, 2)} ms" for value in values]
            charts.points(chart, column.removesuffix("_ms"), names, values, texts, colour)
        chart.update_layout(yaxis={"type": "log", "rangemode": "normal"})
        page.chart(
            part, "Latency", chart,
            "From a message's first PUBLISH; what an outage held back counts. Logarithmic.",
        )  # fmt: skip
    part.html.append(table(headings, rows, "Latency in numbers", "nothing was confirmed"))


def _counts(part: ReportPart, stored: Stored, run: str) -> None:
    promises = [
        Heading("qos", "QoS"), Heading("published", "published"),
        Heading("sends", "PUBLISH packets"), Heading("confirmed", "confirmed"),
        Heading("owed", "owed deliveries"), Heading("deliveries", "deliveries"),
        Heading("lost", "lost"), Heading("duplicates", "duplicates"),
        Heading("duplicates_explained", "explained repetitions"),
        Heading("reordered", "out of order"),
    ]  # fmt: skip
    rows = stored.read("experiment_promises", run=run).to_pylist()
    part.html.append(table(promises, rows, "Loss, repetitions and order by QoS"))
    availability = [
        Heading("scope", "scope"), Heading("name", "name"),
        Heading("availability_percent", "available", "%", 3), Heading("outages", "outages"),
        Heading("outage_s", "together", "s", 3), Heading("longest_s", "longest", "s", 3),
        Heading("usual_s", "usual time between confirmations", "s", 4),
        Heading("observed_s", "observed", "s", 1),
    ]  # fmt: skip
    rows = stored.read("experiment_availability", run=run).to_pylist()
    rows.sort(key=lambda row: (row["scope"] != "all", row["availability_percent"] or 0.0))
    part.html.append(table(availability, rows, "Availability, the worst first"))
    traffic = [
        Heading("client", "client"), Heading("node", "node"), Heading("connections", "connections"),
        Heading("publishes", "PUBLISH to node"), Heading("confirmations", "confirmations"),
        Heading("deliveries", "deliveries to client"), Heading("refusals", "refused"),
        Heading("from_s", "from", "s", 1), Heading("duration_s", "for", "s", 1),
    ]  # fmt: skip
    rows = stored.read("experiment_traffic", run=run).to_pylist()
    part.html.append(table(traffic, rows, "Conversations"))


def add_comparison(page: Page, stored: Stored, runs: Sequence[str]) -> None:
    """Adds a comparison of runs: latency by number of clients, and throughput."""
    part = page.part("Test runs compared", f"{len(runs)} runs")
    rows = [row for row in stored.read("experiment_runs").to_pylist() if row["run"] in runs]
    latency = [row for row in stored.read("experiment_latency").to_pylist() if row["run"] in runs]
    by_clients = [row for row in latency if row["clients"] is not None]
    if len({row["clients"] for row in by_clients}) > 1:
        chart = charts.figure("clients", "milliseconds")
        pairs = sorted({(row["measure"], row["qos"]) for row in by_clients})
        for at, (measure, qos) in enumerate(pairs):
            found = sorted(
                (row["clients"], row["mean_ms"])
                for row in by_clients
                if (row["measure"], row["qos"]) == (measure, qos)
            )
            xs, ys = zip(*found, strict=True)
            charts.line(
                chart, f"{measure}, QoS {qos}", xs, ys, charts.COLOURS[at % len(charts.COLOURS)]
            )
        page.chart(part, "Mean latency by number of clients", chart, "One point a run.")
    headings = [
        Heading("run", "run"), Heading("name", "what"), Heading("started", "started (UTC)"),
        Heading("clients", "clients"), Heading("qos", "QoS"), Heading("faults", "faults"),
        Heading("published", "published"), Heading("confirmed", "confirmed"),
        Heading("duration_s", "duration", "s", 1),
        Heading("confirmed_per_s", "confirmed", "1/s", 1),
    ]  # fmt: skip
    part.html.append(table(headings, rows, "Runs"))
