"""`holdfast top`: rates from two replies, the screen, and the sampling of topics behind it."""

import sys

import msgspec
import pytest

from holdfast.api.routes import top_routes
from holdfast.api.routes.top_routes import COUNTERS, TopTopics
from holdfast.api.views.top import TopDurations, TopReply, TopSession, TopTopic
from holdfast.cli.main import main
from holdfast.cli.top import TopView, cluster_screen, screen, with_rates
from holdfast.client.admin_connection import AdminError
from holdfast.node.publish.topic_samples import SAMPLES_MAX, SAMPLES_WANTED, TopicSamples

BOUNDS = ["0.001", "0.01", "+Inf"]


def reply(**changes: object) -> TopReply:
    empty = TopDurations(BOUNDS, [0, 0, 0])
    values: dict[str, object] = {
        "node": "n1",
        "time_s": 100.0,
        "uptime_s": 3700.0,
        "connections": 3,
        "sessions": 5,
        "sessions_away": 2,
        "sessions_behind": 1,
        "backlog_records": 1234,
        "counters": dict.fromkeys(COUNTERS, 10),
        "acknowledge": empty,
        "deliver": empty,
        "fdatasync": empty,
        "slow_sessions": [],
        "topics": [],
        "topics_problem": "",
    }
    return msgspec.convert(msgspec.to_builtins(values | changes), TopReply)


def test_rates_are_changes_per_second() -> None:
    later = reply(
        time_s=102.0,
        uptime_s=3702.0,
        counters=dict.fromkeys(COUNTERS, 110),
        acknowledge=TopDurations(BOUNDS, [50, 100, 100]),
        fdatasync=TopDurations(BOUNDS, [0, 0, 7]),
    )
    view = with_rates(reply(), later)
    assert set(view.rates.values()) == {50.0}
    assert (view.acknowledge_s.p50, view.acknowledge_s.p99) == (0.001, 0.01)
    # Above the last bound nothing is known, and without durations neither.
    assert view.fdatasync_s.p50 is None
    assert view.deliver_s.p50 is None


def test_a_node_that_has_started_again_has_no_negative_rates() -> None:
    view = with_rates(reply(), reply(time_s=3.0, uptime_s=2.0, counters=dict.fromkeys(COUNTERS, 4)))
    assert set(view.rates.values()) == {2.0}


def test_the_screen_is_safe_and_short() -> None:
    hostile = "\x1b[2J" + "x" * 500
    slow = TopSession(hostile, "alice", "", False, True, 5_000_000, 3, 0)
    topic = TopTopic("a\nb", 1200.0, 5e6, 0.5)
    view = with_rates(reply(), reply(time_s=101.0, slow_sessions=[slow], topics=[topic]))
    lines = list(screen(view))
    text = "\n".join(lines)
    assert text.replace("\n", "").isprintable()
    assert "5.0M" in text
    assert "a\\nb" in text
    assert "1.2k" in text
    assert "up 01:01:40" in lines[0]
    assert max(len(line) for line in lines) < 160
    assert msgspec.json.decode(msgspec.json.encode(view), type=TopView) == view


def test_a_session_of_several_nodes_is_listed_once() -> None:
    """A session that is away is in the reply of each replica. A connected one wins."""
    away = TopSession("a", "", "", False, False, 9, 0, 0)
    here = TopSession("c", "", "10.0.0.1:5", True, False, 5, 0, 0)
    gone = TopSession("c", "", "", False, False, 7, 0, 0)
    views = [
        with_rates(reply(), reply(node=node, slow_sessions=sessions))
        for node, sessions in (("n1", [away, here]), ("n2", [away, gone]))
    ]
    rows = [line.split() for line in cluster_screen(views, 10)]
    assert [row[2] for row in rows if row[:1] == ["a"]] == ["away"]
    assert [row[2] for row in rows if row[:1] == ["c"]] == ["10.0.0.1:5"]


def test_the_numbers_fit_into_80_columns() -> None:
    slow = TopSession("c" * 70, "alice", "192.168.100.200:50000", False, True, 5_000_000, 3, 0)
    topic = TopTopic("plant/" + "t" * 90, 1234.0, 5e6, 0.5)
    view = with_rates(reply(), reply(time_s=101.0, slow_sessions=[slow], topics=[topic]))
    lines = list(screen(view, 80))
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("plant/ttt")
    assert lines[-1].endswith("...        1.2k     5.0M  0.5")
    narrow = list(screen(view, 20))
    assert narrow[-1].split()[1:] == ["1.2k", "5.0M", "0.5"]


class Replies:
    """An admin port that fails between its replies, and then ends the command."""

    def __init__(self, *replies: TopReply | AdminError) -> None:
        self._replies = list(replies)

    def ask(self, port: object, lines: int) -> TopReply:
        if not self._replies:
            raise KeyboardInterrupt
        found = self._replies.pop(0)
        if isinstance(found, AdminError):
            raise found
        return found


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_node_that_starts_again(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal stays, and shows why nothing comes; a pipe ends."""
    gone = AdminError("nothing listens there")
    replies = Replies(reply(), reply(time_s=101.0), gone, reply(time_s=3.0, uptime_s=2.0))
    monkeypatch.setattr("holdfast.cli.top._ask", replies.ask)
    monkeypatch.setattr("holdfast.cli.top.time.sleep", lambda pause_s: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert main(["top"]) == (0 if is_terminal else 1)
    shown = capsys.readouterr()
    if is_terminal:
        assert shown.out.index("nothing listens there\n\ntrying again") < shown.out.index(
            "00:00:02"
        )
    else:
        assert shown.err == "holdfast: nothing listens there\n"


def test_what_is_missing_is_said() -> None:
    lines = list(screen(with_rates(reply(), reply(time_s=101.0))))
    assert "no slow sessions" in lines
    assert lines[-1] == "no publishes"
    problem = list(screen(with_rates(reply(), reply(time_s=101.0, topics_problem="install it"))))
    assert problem[-1] == "install it"


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--lines", "0"], ["-n", "101"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *arguments]) == 2
    assert "--interval is" in capsys.readouterr().err


def test_samples_are_bounded_and_stand_for_all() -> None:
    samples = TopicSamples()
    for _ in range(10 * SAMPLES_MAX):
        samples.add(b"t", "c", 1)
    found, weight = samples.take()
    assert len(found) == SAMPLES_MAX
    assert weight * len(found) == pytest.approx(10 * SAMPLES_MAX)
    # From now on the stride fits the rate.
    for _ in range(10 * SAMPLES_MAX):
        samples.add(b"t", "c", 1)
    found, weight = samples.take()
    assert SAMPLES_WANTED / 2 < len(found) < 2 * SAMPLES_WANTED
    assert samples.take() == ([], 0.0)


def test_publishers_that_take_turns_are_all_sampled() -> None:
    """A fixed stride would always meet the same one."""
    samples = TopicSamples()
    for _ in range(2):
        samples.take()
        for number in range(100 * SAMPLES_WANTED):
            samples.add(b"%d" % (number % 100), "c", 1)
    found, _ = samples.take()
    counts = [sum(topic == b"%d" % number for topic, _, _ in found) for number in range(100)]
    assert min(counts) > 0
    assert max(counts) < 5 * len(found) / 100


def test_the_busiest_topics_among_very_many_are_found() -> None:
    sketches = pytest.importorskip("datasketches")
    top = TopTopics()
    top._windows = [top_routes._Window(sketches)]
    for number in range(50_000):
        samples = [(b"rare/%d" % number, "c", 10), (b"hot/%d" % (number % 3), "hot", 100)]
        top._count(samples, 2.0)
    rates = top._rates([top._windows[0].topics], 3, sketches)
    assert {each.name for each in rates} == {"hot/0", "hot/1", "hot/2"}
    hottest = rates[0]
    assert hottest.bytes_per_s > 50 * hottest.messages_per_s
    assert hottest.error_per_s < hottest.messages_per_s
