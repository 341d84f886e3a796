"""Log lines are bounded: in length, in number, and in what a peer can write into them."""

import ast
import io
import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from holdfast.cli import logs
from holdfast.cli.log_rate import (
    EVENTS_MAX,
    LINE_CHARACTERS_MAX,
    LINES_BURST,
    LINES_PER_S,
    LineRate,
    cut_value,
    event_of,
    one_line,
)
from holdfast.cli.logs import parse_format
from tests.support.source_tree import modules, place

INFO, ERROR, CRITICAL = logging.INFO, logging.ERROR, logging.CRITICAL


def admitted(rate: LineRate, event: str, level: int, count: int, now: float) -> int:
    return sum(rate.admit(event, level, now) for _ in range(count))


def test_a_burst_then_a_rate() -> None:
    rate = LineRate()
    assert admitted(rate, "refused", INFO, 1000, 0.0) == LINES_BURST
    assert admitted(rate, "refused", INFO, 1000, 1.0) == LINES_PER_S
    # After a pause there may be a burst again, and no more than one.
    assert admitted(rate, "refused", INFO, 1000, 100.0) == LINES_BURST


def test_events_and_levels_do_not_share() -> None:
    rate = LineRate()
    admitted(rate, "refused", INFO, 1000, 0.0)
    assert rate.admit("refused", ERROR, 0.0)
    assert rate.admit("ready", INFO, 0.0)


def test_a_line_is_asked_about_before_it_is_made() -> None:
    """So that a flood of clients pays for no lines that are left out; they are counted alike."""
    rate = LineRate()
    asked = [
        not rate.suppresses("connected", INFO, 0.0) and rate.admit("connected", INFO, 0.0)
        for _ in range(1000)
    ]
    assert sum(asked) == LINES_BURST
    (summary,) = rate.summaries(1.0)
    assert summary.lines == 1000 - LINES_BURST
    assert not rate.suppresses("stopping", CRITICAL, 0.0)


def test_errors_are_never_silenced() -> None:
    rate = LineRate()
    seconds = 60
    written = sum(
        rate.admit("failed", ERROR, second + part / 1000)
        for second in range(seconds)
        for part in range(1000)
    )
    assert seconds * LINES_PER_S <= written <= seconds * LINES_PER_S + LINES_BURST
    assert admitted(rate, "stopping", CRITICAL, 1000, 0.0) == 1000


def test_summaries_count_every_line_once() -> None:
    rate = LineRate()
    total = 0
    written = 0
    told = 0
    for step in range(300):
        now = step / 10
        total += 50
        written += admitted(rate, "refused", INFO, 50, now)
        if step % 70 == 69:
            (summary,) = rate.summaries(now)
            assert (summary.event, summary.level) == ("refused", INFO)
            assert summary.seconds <= 7.0
            told += summary.lines
    told += sum(each.lines for each in rate.summaries(30.0))
    assert written + told == total
    assert rate.summaries(31.0) == []


def test_events_are_bounded() -> None:
    """Texts of libraries have values in them: their first words are no fixed set."""
    rate = LineRate()
    now = 0.0
    lines = 0
    for number in range(4 * EVENTS_MAX):
        now += 0.0001
        lines += rate.admit(f"event-{number}", INFO, now)
    assert len(rate._buckets) <= EVENTS_MAX + 2
    assert lines <= EVENTS_MAX + LINES_BURST + LINES_PER_S * now + EVENTS_MAX
    # Quiet ones are forgotten.
    assert rate.admit("late", INFO, now + 1000)
    assert len(rate._buckets) < 10


@pytest.mark.parametrize(
    ("message", "event"),
    [("connection_refused remote=%r", "connection_refused"), ("", ""), ("x" * 1000, "x" * 64)],
)
def test_event_of(message: str, event: str) -> None:
    assert event_of(message) == event


def test_values_are_cut() -> None:
    assert cut_value("x" * 256) == "x" * 256
    assert cut_value("x" * 257) == "x" * 256 + "..."
    assert cut_value(b"x" * 300) == b"x" * 256 + b"..."
    assert cut_value(ValueError("x" * 300)) == "x" * 256 + "..."
    assert cut_value(10**300) == 10**300


def test_one_line() -> None:
    assert one_line("günstig 日本") == "günstig 日本"
    assert one_line("a\nb\x1b[2J\u202ec\x00") == "a\\nb\\x1b[2J\\u202ec\\x00"
    assert len(one_line("y" * 100_000)) == LINE_CHARACTERS_MAX + 3


@pytest.fixture(params=["text", "json"])
def lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Where the process's lines go."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(logs, "_now", lambda: 0.0)
    names = [*logs.LOGGERS]
    before = [
        (logging.getLogger(name), logging.getLogger(name).handlers, logging.getLogger(name).level)
        for name in names
    ]
    options = {"_srcfile", "logThreads", "logProcesses", "logMultiprocessing"}
    kept = {name: getattr(logging, name) for name in options}
    logs.set_up_logging("info", request.param)
    yield stream
    for name, value in kept.items():
        setattr(logging, name, value)
    for logger, handlers, level in before:
        for handler in logger.handlers:
            handler.close()
        logger.handlers = handlers
        logger.propagate = True
        logger.setLevel(level)


def test_a_flood_is_a_few_lines_and_a_summary(lines: io.StringIO) -> None:
    logger = logging.getLogger("holdfast")
    for _ in range(2000):
        logger.info("connection_refused client=%r error=%r", "c" * 5000, "no\nno")
    for handler in logger.handlers:
        handler.close()
    text = lines.getvalue()
    assert len(text) < 40_000
    written = text.splitlines()
    assert len(written) == LINES_BURST + 1
    if not written[0].startswith("{"):
        assert f"event=connection_refused count={2000 - LINES_BURST}" in written[-1]
        assert "'" + "c" * 256 + "...'" in written[0]
        return
    lines_found = [json.loads(line) for line in written]
    assert {each["level"] for each in lines_found} == {"info"}
    assert lines_found[0]["client"] == "c" * 256 + "..."
    last = lines_found[-1]
    assert (last["of_event"], last["count"]) == ("connection_refused", 2000 - LINES_BURST)


def test_a_traceback_is_bounded(lines: io.StringIO) -> None:
    try:
        raise ValueError("z" * 1_000_000)
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
    assert 10_000 < len(lines.getvalue()) < 40_000


SOURCE = Path(logs.__file__).parents[1]
EVENT = re.compile(r"[a-z0-9_]+( [a-z0-9_]+=('[^']*'|\S+))*")
NAMES_PROMISED = {"on_delivered failed sequence=%d", "on_failed failed sequence=%d"}


@cache
def logged(path: Path) -> frozenset[str]:
    """The formats of the log lines of a module; values in an f-string are x."""
    return frozenset(formats(path))


def formats(path: Path) -> Iterator[str]:
    for call in ast.walk(ast.parse(path.read_text())):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner, name = ast.unparse(call.func.value), call.func.attr
            if owner == "logger" and name not in ("isEnabledFor", "addHandler"):
                format = call.args[1 if name == "log" else 0]
                parts = format.values if isinstance(format, ast.JoinedStr) else [format]
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts
                )


FOR_PEOPLE = {place("holdfast_lake"), place("client/log")}
"""Their lines are sentences for the user of a program."""


def test_every_line_is_an_event_with_values() -> None:
    """The limit of lines counts by event. The pipeline's lines are for a person at a notebook."""
    paths = [path for _, path in modules() if not FOR_PEOPLE & set(path.parents)]
    lines = {line for path in paths for line in logged(path)} - NAMES_PROMISED
    assert len(lines) > 100
    assert [line for line in sorted(lines) if not EVENT.fullmatch(line)] == []


def json_lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("lines", ["json"], indirect=True)
def test_values_of_an_event_are_members(lines: io.StringIO) -> None:
    logger = logging.getLogger("holdfast")
    logger.info("connected client=%r user=%r version=%r", "c\u202e1", "", 5)
    logger.warning("ready listeners=%s took_s=%.1f text='all is well' of=%d/%d", ["a"], 0.25, 1, 2)
    logger.error("failed error=%r flag=%s nothing=%r", ValueError("no"), True, None)
    one, two, three = json_lines(lines)
    assert one.pop("time")
    assert one == {
        "level": "info",
        "node_id": "",
        "event": "connected",
        "client": "c\u202e1",
        "user": "",
        "version": 5,
    }
    assert "\u202e" not in lines.getvalue()
    assert two["listeners"] == ["a"]
    assert (two["took_s"], two["text"], two["of"]) == (0.25, "all is well", "1/2")
    assert (three["error"], three["flag"], three["nothing"]) == ("no", True, None)


@pytest.mark.parametrize("lines", ["json"], indirect=True)
def test_a_value_never_replaces_a_member_of_the_line(lines: io.StringIO) -> None:
    logging.getLogger("holdfast").info("lines_suppressed event=%s level=%s", "x", "y")
    logging.getLogger("uvicorn.error").error("Some text = of a library: %s", "z")
    one, two = json_lines(lines)
    assert (one["event"], one["level"]) == ("lines_suppressed", "info")
    assert (one["of_event"], one["of_level"]) == ("x", "y")
    assert "event" not in two
    assert two["message"] == "Some text = of a library: z"


@pytest.mark.parametrize("lines", ["json"], indirect=True)
def test_values_in_json_are_bounded(lines: io.StringIO) -> None:
    logging.getLogger("holdfast").info("found names=%s raw=%r", ["n" * 100] * 500, b"\xff" * 5000)
    assert len(lines.getvalue()) < 4000


def test_every_line_of_the_broker_can_be_divided() -> None:
    """What the tree logs is divided into the same names that the text shows."""
    for _, module in modules():
        if FOR_PEOPLE & set(module.parents):
            continue
        for line in logged(module) - NAMES_PROMISED:
            parsed = parse_format(line)
            assert parsed.event == line.partition(" ")[0]
            assert len(parsed.parts) == len(re.findall(r" [a-z0-9_]+=", line)), line
