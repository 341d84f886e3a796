"""Hints of a run: clocks that are hours off in all messages, metrics with several units, and topics
that no rule reads."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

pytest.importorskip("pyspark")

from holdfast_lake.lake import status
from holdfast_lake.lake.catalog import load_catalog
from holdfast_lake.lake.lake import Lake
from holdfast_lake.lake.settings import LakeSettings, write_settings
from holdfast_lake.tables import Rule, readings_table
from holdfast_lake.tables.rules import default_mark

HOUR_MS = 3_600_000.0


class OneFile:
    """A log of commits with one file, in place of the lake's."""

    def __init__(self, lake: Path, name: str) -> None:
        self.lake, self.name = lake, name

    def last(self) -> Any:
        is_there = (self.lake / f"{self.name}.parquet").exists()
        return type("Commit", (), {"version": 1})() if is_there else None

    def live(self, version: int) -> list[Any]:
        return [type("File", (), {"path": f"{self.name}.parquet"})()]


@pytest.fixture(autouse=True)
def made_by_this_version(tmp_path: Path) -> None:
    write_settings(tmp_path, LakeSettings(1, "parquet", defaults=default_mark()))


def told(lake: Path, offsets: dict[str, list[tuple[float, float]]]) -> list[str]:
    rows = [
        {"device": device, "messages": 6, "offset_min_ms": low, "offset_max_ms": high}
        for device, minutes in offsets.items()
        for low, high in minutes
    ]
    parquet.write_table(pa.Table.from_pylist(rows), lake / "latency.parquet")
    return status.hints(lake, load_catalog([]))


def test_constant_offsets_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "CommitLog", OneFile)
    found = told(
        tmp_path,
        {
            "behind": [(5 * HOUR_MS + 200, 5 * HOUR_MS + 9000)] * 10,
            "ahead": [(-HOUR_MS + 200, -HOUR_MS + 300)] * 10,
            "half": [(-5.5 * HOUR_MS, -5.5 * HOUR_MS + 300)] * 9 + [(100.0, 900_000.0)],
            "right": [(100.0, 2000.0)] * 10,
            "gps": [(315_964_782_000.0, 315_964_783_000.0)] * 10,
            "year": [(31_536_000_200.0, 31_536_000_300.0)] * 10,
            "buffers": [(100.0, 5 * HOUR_MS)] * 10,
            "drifts": [(float(minute) * HOUR_MS, float(minute) * HOUR_MS) for minute in range(10)],
            "new": [(5 * HOUR_MS, 5 * HOUR_MS)] * 4,
        },
    )
    mends = "local time? A rule with zone='Area/City' mends it, or time=None"
    assert found == [
        f"device ahead is 1.00 h ahead of the broker in 60 messages: {mends}",
        f"device behind is 5.00 h behind the broker in 60 messages: {mends}",
        "device gps is 3,657.00 days behind the broker in 60 messages: GPS time, from 1980? A "
        "rule with time=None uses the broker's time",
        f"device half is 5.50 h ahead of the broker in 60 messages: {mends}",
        "device year is 365.00 days behind the broker in 60 messages: a wrong date? A rule with "
        "time=None uses the broker's time",
    ]
    many = {f"d{number}": [(HOUR_MS, HOUR_MS)] * 5 for number in range(8)}
    assert told(tmp_path, many)[-1] == "and 3 more devices like it"
    assert len(told(tmp_path, many)) == status.DEVICE_HINTS_MAX + 1


def test_clocks_that_are_seconds_ahead_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message is stored before it is published. Behind, it may be the latency."""
    monkeypatch.setattr(status, "CommitLog", OneFile)
    leap = [(-17_990.0, -17_300.0 - second) for second in range(10)]
    found = told(
        tmp_path,
        {
            "leap": [*leap, (100.0, 200.0)],
            "early": [(-40_000.0, -39_000.0)] * 10,
            "behind": [(18_000.0, 18_300.0)] * 10,
            "jitters": [(-18_000.0, 300.0)] * 10,
            "nearly right": [(-1500.0, -900.0)] * 10,
            "seldom": [(-18_000.0, -17_500.0)] * 8 + [(100.0, 300.0)] * 2,
            "new": leap[:4],
        },
    )
    mends = "A rule with time=None uses the broker's time"
    assert found == [
        "device early is 39.0 s ahead of the broker in 10 of 10 minutes: is its clock set? "
        f"{mends}",
        "device leap is 17.3 s ahead of the broker in 10 of 11 minutes: GPS time without its 18 "
        f"leap seconds? {mends}",
    ]


def test_metrics_of_several_units_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "CommitLog", OneFile)
    units = {"a": [None, "°C", "°F"], "b": ["°C", None, "°C"], "c": ["kW, W", "kW, W", "W"]}
    rows = [{"device": device, "metric": "t", "unit": unit, "numbers": 1, "last_string": "1,5"}
            for device, some in units.items() for unit in some]  # fmt: skip
    texts = {"d": "21,5 °C", "e": "1,2,3", "f": "21.5", "g": None, "h": "a,5"}
    rows += [{"device": device, "metric": "t", "unit": None, "numbers": 0, "last_string": text}
             for device, text in texts.items()]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "device_hours.parquet")
    assert status.hints(tmp_path, load_catalog()) == [
        "device a: t has the units °C, °F",
        "device c: t has the units W, kW, and no mean in 2 hours with several",
        "device d: t has texts such as '21,5 °C'. If they are numbers with a decimal comma, a rule "
        "with decimal=',' mends it (in JSON also numbers=(...))",
        "device f: t has texts such as '21.5'. If they are numbers, a rule with numbers=('t',) "
        "makes them numbers",
    ]


def test_topics_with_a_dollar_that_no_rule_names_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "CommitLog", OneFile)
    aws = [f"$aws/things/pump-{number}/shadow/update" for number in (3, 4, 4)]
    rows = [{"topic": topic, "messages": 2} for topic in (*aws, "plant/$state", "a")]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "topics.parquet")
    assert status.hints(tmp_path, load_catalog()) == [
        f"readings: 6 messages of 2 topics such as {aws[0]} are in no row: topics that begin "
        "with $ need a rule that names them"
    ]
    named = readings_table((Rule("$aws/things/+/shadow/#", decode="ignore"),))
    assert status.hints(tmp_path, load_catalog(tables=[named])) == []


def test_topics_that_no_rule_of_the_user_matches_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "CommitLog", OneFile)
    topics = ["plug1/tele/STATE", "plug2/tele/STATE", "esp/sensor/a/state", "esp/status"]
    rows = [{"topic": topic, "messages": 2} for topic in topics * 2]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "topics.parquet")
    (hint,) = status.hints(tmp_path, load_catalog())
    assert "3 topics such as esp/sensor/a/state match no rule" in hint
    assert "`holdfast pipeline infer` proposes rules" in hint
    for rule in (Rule("+/tele/+", device="level 1"), Rule("#")):
        table = readings_table((rule,))
        assert status.hints(tmp_path, load_catalog(tables=[table])) == []


def test_changed_default_rules_are_told_where_they_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of one topic before and after an update are not of one device."""
    monkeypatch.setattr(status, "CommitLog", OneFile)
    monkeypatch.setattr(status, "TOPICS_MIN", 100)

    def hints_of(topic: str, defaults: str, *rules: Rule) -> list[str]:
        write_settings(tmp_path, LakeSettings(1, "parquet", defaults=defaults))
        rows = [{"topic": each, "messages": 1} for each in ("a/b", topic)]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "topics.parquet")
        return status.hints(tmp_path, load_catalog((), [readings_table(rules)]))

    (told,) = hints_of("plug/lwt", "")
    assert told == (
        "readings: topics such as plug/lwt have another default rule than in the version that made "
        "the older rows: `holdfast pipeline rebuild readings` makes all rows by the rules of this "
        "one"
    )
    assert hints_of("plug/LWT", "") == [], "that rule has not changed"
    assert len(hints_of("plug/LWT", "of another version")) == 1
    assert hints_of("plug/lwt", "", Rule("plug/#")) == [], "a rule of the user applies"
    assert hints_of("plug/lwt", default_mark()) == []


def test_a_lake_keeps_the_mark_of_its_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"servers": "a:1"}

    def mark() -> str:
        lake = Lake(tmp_path)
        lake.remember(source)
        settings = status.read_settings(tmp_path)
        assert settings is not None
        return settings.defaults

    write_settings(tmp_path, LakeSettings(1, "parquet"))
    with monkeypatch.context() as patch:
        patch.setattr(Lake, "_has_read", lambda *_: True)
        assert mark() == "", "its rows are those of an older version"
    assert mark() == default_mark(), "it has no rows, or they are just made again"


def test_a_lake_goes_on_without_scales_until_its_readings_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else 523 and 5.23 would be one metric of one device."""
    write_settings(tmp_path, LakeSettings(1, "parquet", defaults=default_mark()))

    def is_scaled() -> bool:
        Lake(tmp_path).remember({"servers": "a:1"})
        lake = Lake(tmp_path)
        assert lake.redeclared() == []
        return bool(lake.catalog.tables["readings"].build.is_scaled)  # type: ignore[union-attr]

    with monkeypatch.context() as patch:
        patch.setattr(Lake, "_has_read", lambda *_: True)
        assert not is_scaled()
    assert is_scaled()
    with monkeypatch.context() as patch:
        patch.setattr(Lake, "_has_read", lambda *_: True)
        assert is_scaled(), "its rows were made by this version"


def test_numbers_without_their_scale_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "CommitLog", OneFile)
    rows = [
        {"device": device, "metric": metric, "numbers": 5, "min": low, "max": high,
         "last_string": text, "unit": None}
        for device, metric, low, high, text in (
            ("old", "pv.current", 500.0, 523.0, None),
            ("old", "pv.current_scale", -2.0, -2.0, None),
            ("old", "current", 500.0, 523.0, None),
            ("new", "current", 5.0, 5.0, "500e-2"), ("new", "current_scale", -2.0, -2.0, None),
            ("none", "zoom", 5.0, 5.0, None), ("none", "zoom_scale", 0.0, 0.0, None),
            ("done", "current", 5.0, 5.23, None), ("done", "current_scale", -2.0, -2.0, None),
            ("se/A", "value", 500.0, 523.0, None), ("se/A_SF", "value", -2.0, -1.0, None),
            ("other/A", "value", 500.0, 523.0, None),
        )
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "device_hours.parquet")
    what = "is not multiplied by 10 to the power of"
    assert status.hints(tmp_path, load_catalog([]).unscaled()) == [
        f"device {device}: {metric} {what} {scale}: `holdfast pipeline rebuild readings` "
        "multiplies what is in one message"
        for device, metric, scale in (("se/A", "value", "A_SF"),
                                      ("old", "pv.current", "current_scale"))
    ]  # fmt: skip
    assert "the scale is in another message" in status.hints(tmp_path, load_catalog([]))[0]


def test_numbers_in_texts_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "CommitLog", OneFile)
    rows = [
        {"device": "air", "metric": metric, "numbers": 0, "last_string": text, "unit": None}
        for metric, texts in (
            ("pm02", ("12", "7")), ("atmp", ("21.5",)), ("serialno", ("840", "841")), ("n", ("3",)),
            ("firmware", ("3.1", "3.2")), ("card", ("0012", "0013")), ("mode", ("on", "off")),
            ("state", ("7", "open")),
        )
        for text in texts
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "device_hours.parquet")
    assert status.hints(tmp_path, load_catalog([])) == [
        f"device air: {metric} has texts such as {text!r}. If they are numbers, a rule with "
        f"numbers=({metric!r},) makes them numbers"
        for metric, text in (("atmp", "21.5"), ("n", "3"), ("pm02", "12"))
    ]


def test_texts_of_several_numbers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of InfluxDB, sentences of NMEA and advertisements of Bluetooth are read as texts."""
    monkeypatch.setattr(status, "CommitLog", OneFile)
    unread = (
        "weather,location=us temperature=82,humidity=71.5 1790000000000000000",
        "cpu,host=a usage_idle=90.5 1790000000000000000", "temp=20.5 hum=45 bat=3.7",
        "cpu,cpu=cpu0 usage_user=1.5 1790000000000000000\ncpu,cpu=cpu1 usage_user=2.5 1790000000",
        "$GPRMC,123519,A,4807.038,N,01131.000,E,022.4,084.4,230394,003.1,W*6A",
        "/ISk5\\2MT382-1000\r\n\r\n1-3:0.2.8(50)\r\n1-0:1.8.1(123456.789*kWh)\r\n!F46A",
        "0201061BFF99040512FC5394C37C0004FFFC040CAC364200CDCBB8334C884F",
    )  # fmt: skip
    texts = (
        "on", "0T01:00:10", "2026-09-21T14:13:20Z", "192.168.1.5:1883", "a=1", "1.2.3", "04A1B2C3",
        "f47ac10b-58cc-4372-a567-0e02b2c3d479", "heating, 2 zones", "00123456789012345678901234",
        "$5 and more", "/dev/sda1 (ok)", "E2801160600002084F8A1B2C",
    )  # fmt: skip
    rows = [{"device": f"d{at:02}", "metric": "value", "numbers": 0, "last_string": text,
             "unit": None} for at, text in enumerate(unread + texts)]  # fmt: skip
    rows.append(rows[0] | {"metric": "note", "device": "json"})
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "device_hours.parquet")
    monkeypatch.setattr(status, "DEVICE_HINTS_MAX", 20)
    found = status.hints(tmp_path, load_catalog([]))
    assert [each.split(":")[0] for each in found] == [f"device d{at:02}" for at in range(7)]
    assert found[2] == (
        "device d02: no number is read from texts such as 'temp=20.5 hum=45 bat=3.7'. A rule with "
        "decode=FUNCTION reads them, or decode='form' or 'csv'"
    )
