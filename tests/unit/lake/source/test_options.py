from pathlib import Path

import pytest

from holdfast_lake.source.options import (
    COLUMNS,
    TASKS_MAX,
    OptionError,
    default_tasks,
    parse,
    parse_timestamp_us,
)


def test_defaults() -> None:
    options = parse({"servers": "a:1"})
    assert options.servers == (("a", 1),)
    assert options.starting_offsets is None
    assert options.fail_on_data_loss
    assert options.columns == COLUMNS
    assert options.tasks == 0
    assert default_tasks(0) >= 1
    assert default_tasks(1_000_000_000) == 500
    assert default_tasks(1 << 60) == TASKS_MAX


def test_names_are_case_insensitive() -> None:
    options = parse({"SERVERS": "a:1, [::1]:2", "failondataloss": "False", "STARTINGOFFSETS": "{}"})
    assert options.servers == (("a", 1), ("::1", 2))
    assert not options.fail_on_data_loss
    assert options.starting_offsets == {}


def test_how_long_servers_are_waited_for() -> None:
    waits = {text: parse({"servers": "a:1", "serverWait": text}).server_wait_s
             for text in ("0", "30", "30s", "5m", " 2h ")}  # fmt: skip
    assert waits == {"0": 0.0, "30": 30.0, "30s": 30.0, "5m": 300.0, " 2h ": 7200.0}
    assert parse({"servers": "a:1"}).server_wait_s is None
    for text in ("", "-1", "1d", "five"):
        with pytest.raises(OptionError, match=r"serverWait is .*; allowed: a time such as 30s, 5m"):
            parse({"servers": "a:1", "serverWait": text})


def test_times() -> None:
    assert parse_timestamp_us("t", "1790000000123") == 1_790_000_000_123_000
    for text in (
        "2026-09-21T14:13:20.5",
        "2026-09-21T14:13:20.500000Z",
        "2026-09-21 16:13:20.5+02:00",
    ):
        assert parse_timestamp_us("t", text) == 1_790_000_000_500_000


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "option..servers"),
        ({"path": "/data", "servers": "a:1"}, "is read from the broker that serves it"),
        ({"servers": "a:1", "startingOffset": "latest"}, "unknown option 'startingoffset'"),
        ({"servers": "a:1", "startingOffsets": "now"}, "startingOffsets is 'now'"),
        ({"servers": "a:1", "startingOffsets": "{}", "startingTimestamp": "1"}, "not both"),
        ({"servers": "a:1", "startingTimestamp": "noon"}, "startingTimestamp is 'noon'"),
        ({"servers": "a:1", "maxRecordsPerTrigger": "0"}, "maxRecordsPerTrigger is '0'"),
        ({"servers": "a:1", "tasks": "many"}, "tasks is 'many'"),
        ({"servers": "a:1", "failOnDataLoss": "maybe"}, "failOnDataLoss is 'maybe'"),
        ({"servers": "a:1", "columns": "topic,key"}, "columns has 'key'"),
        ({"servers": "a:1", "columns": "topic,topic"}, "at most once"),
        ({"servers": "a"}, "host:adminport"),
        ({"servers": "ftp://a:80"}, "host:adminport"),
        ({"servers": "a:0"}, "1 to 65535"),
        ({"servers": "a:70000"}, "1 to 65535"),
        ({"servers": ""}, "host:adminport"),
    ],
)
def test_bad_options_are_named(options: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse(options)


def test_option_errors_are_value_errors() -> None:
    assert issubclass(OptionError, ValueError)


def test_the_access_to_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    plain = parse({"servers": "a:1,b:2"})
    assert (plain.access.token, plain.access.is_https) == ("", False)
    file = tmp_path / "token"
    file.write_text("holdfast_1_secret\n")
    given = {"servers": "https://a:1,https://[::1]:2", "tokenFile": str(file), "caFile": "/ca"}
    options = parse(given)
    assert options.servers == (("a", 1), ("::1", 2))
    assert (options.access.token, options.access.is_https) == ("holdfast_1_secret", True)
    assert "secret" not in repr(options)
    monkeypatch.setenv("HOLDFAST_TOKEN", "from-the-environment")
    assert parse({"servers": "a:1"}).access.token == "from-the-environment"
    assert parse(given).access.token == "holdfast_1_secret"
    for wrong, text in (
        ({"servers": "https://a:1,b:2"}, "for all of them"),
        ({"servers": "ftp://a:1"}, "allowed: host:adminport"),
        ({"servers": "a:1", "caFile": "/ca"}, "needs an https:// address"),
        ({"servers": "a:1", "tokenFile": str(tmp_path / "none")}, "No such file"),
        ({"lake": "/data", "tokenFile": str(file)}, "is for servers"),
    ):
        with pytest.raises(OptionError, match=text):
            parse(wrong)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="contains no token"):
        parse(given)
