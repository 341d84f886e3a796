import io
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from holdfast.client.log.lake.commits import Skipped
from holdfast_lake.lake.runner import RunProgress, RunReport, error_text, outcome, short
from tests.unit.lake.lake.test_commits import commit


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def records(rows: int, **fields: Any) -> Any:
    return commit(1, table="records", rows=rows, **fields)


def test_a_line_a_second_on_a_terminal() -> None:
    screen, clock = Screen(), Clock()
    progress = RunProgress(screen, clock)
    for second, lag in ((0.2, 9000), (1.0, 6000), (1.5, 3000), (2.0, 2000)):
        clock.now = second
        progress.committed(records(1000), lag)
    progress.committed(commit(1, table="readings", rows=500), None)
    clock.now = 3.1
    progress.committed(commit(2, table="readings", rows=700), None)
    shown = [line for line in screen.getvalue().replace("\n", "\r").split("\r") if line.strip()]
    assert shown == [
        "records 2.0k rows, 2.0k/s, lag 6.0k (3 s left)",
        "records 4.0k rows, 2.0k/s, lag 2.0k (1 s left)",
        "records 4.0k rows, 1.3k/s, lag 2.0k (2 s left) | readings 1.2k rows, 387/s",
    ]
    progress.failed("readings", ValueError("no luck"), 2.0)
    assert "\n" in screen.getvalue()
    assert screen.getvalue().endswith("table readings failed (tried again in 2 s): no luck\n")


def test_a_line_a_minute_in_a_log() -> None:
    log, clock = io.StringIO(), Clock()
    progress = RunProgress(log, clock)
    for second in range(1, 181):
        clock.now = second
        progress.committed(records(10), 0)
    assert log.getvalue().splitlines() == [
        "records 600 rows, 11/s, lag 0",
        "records 1.2k rows, 11/s, lag 0",
        "records 1.8k rows, 11/s, lag 0",
    ]


def test_the_end() -> None:
    log, clock = io.StringIO(), Clock()
    progress = RunProgress(log, clock)
    report = RunReport()
    progress.finished(report)
    report.add(records(1200))
    report.add(commit(1, table="readings", rows=1000, quarantined=7))
    clock.now = 2.5
    progress.finished(report)
    assert log.getvalue().splitlines() == [
        "nothing new, in 0.0 s",
        "records: 1,200 rows in 1 commit",
        "readings: 1,000 rows in 1 commit, 7 quarantined",
        "2 tables have new rows, in 2.5 s",
    ]
    # The log went on by records that are no messages, such as those of a session.
    sessions = RunReport()
    sessions.add(records(0))
    assert outcome(sessions) == "nothing new"
    quiet = RunProgress(silent := io.StringIO(), clock, quiet=True)
    quiet.committed(records(1), 0)
    quiet.finished(report)
    assert silent.getvalue() == ""


def test_what_was_skipped_is_told_at_once_and_at_the_end() -> None:
    log, clock = io.StringIO(), Clock()
    progress = RunProgress(log, clock, quiet=True)
    skipped = [
        Skipped(partition=0, first=3 * number, end=3 * number + 2, version=number // 3, at_us=9)
        for number in range(9)
    ]
    committed = commit(2, table="records", rows=5, skipped=skipped, skipped_total=18)
    progress.committed(committed, 0)
    progress.committed(commit(3, table="records", skipped=skipped, skipped_total=18), 0)
    assert log.getvalue() == (
        "records: 6 offsets were not in the log any more and were skipped, by "
        "failOnDataLoss=false: 18 to 20 of partition 0, 21 to 23 of partition 0, "
        "24 to 26 of partition 0\n"
    )
    report = RunReport()
    report.add(committed)
    RunProgress(log, clock).finished(report)
    assert "records: 5 rows in 1 commit, 6 offsets skipped\n" in log.getvalue()


def test_numbers() -> None:
    assert [short(n) for n in (0, 999, 1000, 1_234_567, 2e9)] == [
        "0",
        "999",
        "1.0k",
        "1.2M",
        "2.0G",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no luck", "no luck"),
        ("", "ValueError('')"),
        (
            "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
            '  File "a.py", line 3, in b\nDamaged: x\nDataLossError: offset 7 of partition 1\n',
            "DataLossError: offset 7 of partition 1",
        ),
        ("[SOME_CLASS] It failed. SQLSTATE: 1\nJVM stacktrace:\n\tat a.b(c)\n", "[SOME_CLASS] It"),
    ],
)
def test_errors_are_short(text: str, said: str) -> None:
    assert error_text(ValueError(text)).startswith(said)
