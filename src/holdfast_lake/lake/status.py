"""Shows the state of a lake, for `holdfast pipeline status`. The module starts no Spark."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as parquet

from holdfast.client.log.lake.commits import (
    COMMITS,
    Commit,
    CommitLog,
    Skipped,
    unseen_replacement,
)
from holdfast.client.log.lake.files import LakeError, noted_failures, readable
from holdfast.client.log.lake.objects import LakePath
from holdfast.client.log.reading import offsets
from holdfast.protocol.topics.names import matches
from holdfast_lake.decoders.json_payload import NUMBERS, VALUE
from holdfast_lake.decoders.scales import POWER_MAX, SUFFIXES, ObjectScales
from holdfast_lake.decoders.text_payload import plain_value
from holdfast_lake.lake.catalog import DECLARED_BY, Catalog
from holdfast_lake.lake.samples import Sample
from holdfast_lake.lake.settings import read_settings
from holdfast_lake.lake.table import RECORDS
from holdfast_lake.source.options import parse
from holdfast_lake.source.source import LogAccess
from holdfast_lake.tables.field_roles import CODE_NAME
from holdfast_lake.tables.inference import mixtures, rule_text
from holdfast_lake.tables.rules import DEFAULT_RULES, UNMARKED_LEVELS, Rule, default_mark
from holdfast_lake.tables.topics import Topics

QUALITY: Final = "quality"
"""The table of repetitions and missing messages of each device (holdfast_lake.tables)."""
LATENCY: Final = "latency"
"""The table with the offset of each device's clock (holdfast_lake.tables)."""
HOURS: Final = "device_hours"
"""The table with the units of each metric (holdfast_lake.tables)."""
READINGS: Final = "readings"
TOPICS: Final = "topics"
HINT_FILES_MAX: Final = 24
"""The most files of such a table, one for each hour, that are looked at for hints."""
HINT_TOPICS_MAX: Final = 1000
"""The most topics that are looked at for hints."""
TOPICS_MIN: Final = 3
"""The fewest topics without a rule that are a hint."""
CLOCK_MINUTES_MIN: Final = 5
"""The fewest minutes with messages of a device that show a constant offset."""
CLOCK_SHARE: Final = 0.9
"""The share of these minutes that have it."""
CLOCK_LAG_MS: Final = 120_000
"""The most milliseconds that a message of such a minute is from the offset."""
REPETITIONS_MIN: Final = 10
"""The most repetitions that are no hint, however few messages there are."""
REPETITIONS_SHARE: Final = 0.1
"""The share of repetitions that is no hint: clients repeat few messages."""
DEVICE_HINTS_MAX: Final = 5
"""The most devices with a hint of their own of each kind."""
HINT_LENGTH_MAX: Final = 1000
"""The most characters of a hint."""
_LONG: Final = re.compile(r"(\S{80})\S+")
"""A name that is cut in a hint."""
QUARTER_MS: Final = 900_000
"""The step of the offsets of time zones."""
AHEAD_MS: Final = 2_000
"""The least milliseconds that a clock is ahead in all messages of a minute, for a hint. Messages
are never stored before they are published."""
LEAP_MS: Final = (16_500, 18_500)
"""The milliseconds that GPS time without its 18 leap seconds is ahead of the broker, less the
latency of messages."""
DAY_QUARTERS: Final = 96
"""The quarters of an hour of a day. No zone is more apart."""
GPS_QUARTERS: Final = 351_072
"""The quarters of an hour from 1970 to the begin of GPS time, 1980-01-06."""
_COMMA: Final = re.compile(r"[+-]?\d{1,3}(\.?\d{3})*,\d{1,6}(\s?[^\s\d,;]{1,8})?")
"""A text that may be a number with a decimal comma, also with a unit."""
_UNREAD: Final = re.compile(
    r"\S+ \S+=\S+ \d{10,19}.*|.*\w=-?\d[^\s,;]*[,; ]\s*\w+=-?\d.*|[$!][A-Z]{2}[A-Z\d]{3},.*|"
    r"/[A-Za-z]{3}\d.*\(.*|(?=\d*[A-Fa-f])([\dA-Fa-f]{2}){13,}",
    re.DOTALL,
)
"""Texts of several numbers: InfluxDB's lines, names with values, sentences of NMEA, telegrams of
meters, and bytes in hexadecimal digits."""
AGE_MAX_S: Final = 40 * 365 * 86_400.0
"""The greatest lag in seconds that is looked for."""


@dataclass(frozen=True)
class TableStatus:
    """The state of one table. Fields are None or 0 if it has not been written."""

    name: str
    layer: str
    source: str
    version: int = 0
    rows: int = 0
    """The rows ever added (bronze, silver), or the current rows (gold)."""
    quarantined: int = 0
    last_rows: int = 0
    last_commit_us: int | None = None
    last_took_s: float = 0.0
    lag: int | None = 0
    """The offsets of the log, or rows of the source, that the table lacks. None: not known."""
    lag_s: float | None = 0.0
    """The seconds for which the oldest of them has been there. None: not known."""
    counts: dict[str, int] = field(default_factory=dict)
    """The counts of all steps besides rows, such as repetitions."""
    error: str = ""
    """The error of the last step, if it failed."""


@dataclass(frozen=True)
class LakeStatus:
    """The state of a lake: its source, tables and losses."""

    lake: str
    source: dict[str, str]
    tables: list[TableStatus]
    offsets: dict[str, int] = field(default_factory=dict)
    """The offset per partition up to which the lake has the log."""
    ends: dict[str, int] | None = None
    """The end of each partition. None if the servers were not asked or did not respond."""
    problem: str = ""
    """The reason why the servers did not respond."""
    restored: bool = False
    """True if the log was restored since the last step of bronze."""
    skipped_total: int = 0
    """The number of offsets of the log that are in no table. They were missing or damaged when
    bronze read them, and failOnDataLoss=false let it skip them."""
    skipped: list[Skipped] = field(default_factory=list)
    """The last skipped ranges."""
    hints: list[str] = field(default_factory=list)
    """Signs of something wrong in the tables, and what may mend it."""
    qos0_hint: str = ""
    """The number of messages that the servers have not stored. Empty: none."""
    undeclared: list[str] = field(default_factory=list)
    """The stored tables without a declaration in this catalogue."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the status as plain data."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def __str__(self) -> str:
        return "\n".join(status_lines(self))

    def __repr__(self) -> str:  # what a notebook shows
        return str(self)


def lake_status(
    lake: LakePath,
    catalog: Catalog,
    source: Mapping[str, str],
    *,
    ask_servers: bool = True,
    with_hints: bool = True,
) -> LakeStatus:
    """Reads the state of a lake from its commits, and the end of the log from `source` unless it is
    empty. Hints cost the read of a table."""
    logs = {name: CommitLog(lake, name) for name in catalog.names()}
    last = {name: log.last() for name, log in logs.items()}
    records = last[RECORDS]
    position = dict(records.offsets) if records is not None else {}
    found = _LogEnd()
    if source and ask_servers:
        found = _look(source, position, records.log if records is not None else "")
    tables = []
    for name in catalog.names():
        if name == RECORDS:
            lag = None
            if found.ends is not None:
                lag = sum(max(0, end - position.get(p, 0)) for p, end in found.ends.items())
            tables.append(_table(name, "bronze", "the log", last[name], lag, found.lag_s))
            continue
        table = catalog.table(name)
        lag = _lag(last[name], last[table.source])
        lag_s = _lag_s(lag, last[name], logs[table.source])
        tables.append(_table(name, table.layer, table.source, last[name], lag, lag_s))
    errors = noted_failures(lake)
    tables = [replace(table, error=errors.get(table.name, "")) for table in tables]
    return LakeStatus(
        lake=str(lake),
        source=dict(source),
        tables=tables,
        offsets=position,
        ends=found.ends,
        problem=found.problem,
        restored=found.restored,
        skipped_total=records.skipped_total if records is not None else 0,
        skipped=list(records.skipped) if records is not None else [],
        hints=hints(lake, catalog) if with_hints else [],
        qos0_hint=found.qos0_hint,
        undeclared=sorted(_stored(lake) - set(last)),
    )


def _stored(lake: LakePath) -> set[str]:
    """Returns the names of all stored tables."""
    if not lake.is_dir():
        return set()
    return {each.name for each in lake.iterdir() if (each / COMMITS).is_dir()}


def hints(lake: LakePath, catalog: Catalog) -> list[str]:
    """Returns what looks wrong in the tables of a lake, and what may mend it."""
    found = (
        _number_hints, _clock_hints, _unit_hints, _text_hints, _scale_hints, _mixture_hints,
        _topic_hints, _default_hints,
    )  # fmt: skip
    hints = (hint for hints_of in found for hint in hints_of(lake, catalog))
    return [_printable(_LONG.sub(r"\1…", hint)[:HINT_LENGTH_MAX]) for hint in hints]


def _printable(text: str) -> str:
    """Returns a text without the line breaks and escapes that names of clients may have."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _newest_rows(
    lake: LakePath, catalog: Catalog, table: str, columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields the rows of the newest files of a table."""
    log = CommitLog(lake, table)
    last = log.last()
    if table not in catalog.tables or last is None:
        return
    for file in log.live(last.version)[-HINT_FILES_MAX:]:
        with suppress(OSError, pa.ArrowInvalid):  # a run is exchanging the file
            path = readable(lake / file.path)
            if set(columns) <= set(parquet.read_schema(path).names):  # else of an older version
                found = parquet.read_table(path, columns=list(columns), partitioning=None)
                yield from found.to_pylist()


def _topic_hints(lake: LakePath, catalog: Catalog) -> list[str]:
    """Returns a line for topics that begin with `$`, which no rule reads unless it names them, and
    one for topics that only the last of the default rules reads."""
    build = catalog.tables[READINGS].build if READINGS in catalog.tables else None
    rules: Sequence[Any] = getattr(build, "rules", ())
    filters = [each.filter for each in rules[:-1]]
    left: Counter[str] = Counter()
    for row in _newest_rows(lake, catalog, TOPICS, ("topic", "messages")):
        if row["topic"] in left or len(left) < HINT_TOPICS_MAX:
            left[row["topic"]] += row["messages"]
    left = Counter({topic: messages for topic, messages in left.items()
                    if not any(matches(each, topic) for each in filters)})  # fmt: skip
    others = [topic for topic in left if not topic.startswith("$")]
    for topic in others:
        del left[topic]
    hints = []
    if left:
        hints.append(
            f"{READINGS}: {left.total():,} messages of {len(left):,} topics such as {min(left)} "
            "are in no row: topics that begin with $ need a rule that names them"
        )
    if len(others) >= TOPICS_MIN:
        hints.append(
            f"{READINGS}: {len(others):,} topics such as {min(others)} match no rule, so each is a "
            "device: `holdfast pipeline infer` proposes rules. A last Rule('#') says that it is "
            "meant"
        )
    return hints


def _mixture_hints(lake: LakePath, catalog: Catalog) -> list[str]:
    """Returns the topics that mix the messages of several devices, because no rule decides them."""
    build = catalog.tables[READINGS].build if READINGS in catalog.tables else None
    rules: Sequence[Rule] = getattr(build, "rules", ())
    given = len(rules) - len(DEFAULT_RULES)
    if not rules or tuple(rules[given:]) != DEFAULT_RULES:
        return []
    known = Topics(rules)
    undecided = known.readers[max(given, 0) :]

    def is_wanted(name: str) -> bool:
        reader = None if name.startswith("$") else known[name].reader
        return reader in undecided and reader.rule.decode != "sparkplug"

    hints = []
    for each in mixtures(*Sample(lake, is_wanted).topics()):
        first, second = each.values[:2]
        are = "metric" if "metric" in each.arguments else "device"
        count = f"{len(each.topics):,} topic{'s' * (len(each.topics) > 1)}"
        hints.append(
            f"{READINGS}: {each.field} has {len(each.values):,} values such as {first} and "
            f"{second} in {each.messages:,} messages of {count} such as {each.topics[0]}, "
            f"and all are one {are}: {rule_text(each.arguments)} keeps them apart (see `holdfast "
            "pipeline infer`)"
        )
    return _some(hints, "patterns of topics")


def _default_hints(lake: LakePath, catalog: Catalog) -> list[str]:
    """Returns a line if topics are read by default rules that are not those of the older rows."""
    build = catalog.tables[READINGS].build if READINGS in catalog.tables else None
    rules: Sequence[Any] = getattr(build, "rules", ())
    topics: dict[str, Any] = {}
    for row in _newest_rows(lake, catalog, TOPICS, ("topic",)):
        topic = row["topic"]
        if topic not in topics and len(topics) < HINT_TOPICS_MAX:
            topics[topic] = next((each for each in rules if matches(each.filter, topic)), None)
    read = {topic: rule for topic, rule in topics.items() if rule in DEFAULT_RULES[:-1]}
    settings = read_settings(lake) if read else None
    if settings is None or settings.defaults == default_mark():
        return []
    changed = [topic for topic, rule in read.items()
               if settings.defaults or rule.filter.endswith(UNMARKED_LEVELS)]  # fmt: skip
    return [
        f"{READINGS}: topics such as {min(changed)} have another default rule than in the version "
        "that made the older rows: `holdfast pipeline rebuild readings` makes all rows by the "
        "rules of this one"
    ] if changed else []  # fmt: skip


def _clock_hints(lake: LakePath, catalog: Catalog) -> list[str]:
    """Returns the devices that are a constant number of quarters of an hour off, which is a local
    time, and those that are some seconds ahead."""
    minutes: dict[str, list[tuple[int, int]]] = {}
    ahead_ms: dict[str, list[float]] = defaultdict(list)
    names = ("device", "messages", "offset_min_ms", "offset_max_ms")
    for row in _newest_rows(lake, catalog, LATENCY, names):
        low, high = (row[name] for name in names[2:])
        step = round(low / QUARTER_MS) if low is not None else 0
        is_near = step != 0 and all(
            abs(each - step * QUARTER_MS) <= CLOCK_LAG_MS for each in (low, high)
        )
        found = minutes.setdefault(row["device"], [])
        found.append((step if is_near else 0, row["messages"]))
        if step == 0 and high is not None and high <= -AHEAD_MS:
            ahead_ms[row["device"]].append(-high)
    hints = []
    for device, steps in sorted(minutes.items()):
        step, same = Counter(each for each, _ in steps).most_common(1)[0]
        if step and len(steps) >= CLOCK_MINUTES_MIN and same >= CLOCK_SHARE * len(steps):
            count = sum(messages for _, messages in steps)
            way = "behind" if step > 0 else "ahead of"
            off = f"{abs(step) / 4:.2f} h"
            why = "local time? A rule with zone='Area/City' mends it, or time=None"
            if abs(step) > DAY_QUARTERS:
                off = f"{abs(step) / DAY_QUARTERS:,.2f} days"
                why = "GPS time, from 1980" if step == GPS_QUARTERS else "a wrong date"
                why += "? A rule with time=None uses the broker's time"
            hints.append(f"device {device} is {off} {way} the broker in {count:,} messages: {why}")
        early = sorted(ahead_ms[device])
        if len(early) >= max(CLOCK_MINUTES_MIN, CLOCK_SHARE * len(steps)):
            usual_ms = early[len(early) // 2]
            is_gps = LEAP_MS[0] <= usual_ms <= LEAP_MS[1]
            why = "GPS time without its 18 leap seconds" if is_gps else "is its clock set"
            hints.append(
                f"device {device} is {usual_ms / 1000:.1f} s ahead of the broker in "
                f"{len(early):,} of {len(steps):,} minutes: {why}? A rule with time=None uses the "
                "broker's time"
            )
    return _some(hints, "devices")


def _some(hints: list[str], what: str) -> list[str]:
    more = len(hints) - DEVICE_HINTS_MAX
    return hints[:DEVICE_HINTS_MAX] + ([f"and {more:,} more {what} like it"] if more > 0 else [])


def _unit_hints(lake: LakePath, catalog: Catalog) -> list[str]:
    """Returns the metrics of devices that have several units: their numbers are not comparable."""
    units: dict[tuple[str, str], set[str]] = defaultdict(set)
    mixed: Counter[tuple[str, str]] = Counter()
    for row in _newest_rows(lake, catalog, HOURS, ("device", "metric", "unit")):
        if row["unit"] is not None:
            found = row["unit"].split(", ")
            units[row["device"], row["metric"]].update(found)
            mixed[row["device"], row["metric"]] += len(found) > 1
    hints = [
        f"device {device}: {metric} has the units {', '.join(sorted(found))}"
        + (f", and no mean in {mixed[device, metric]:,} hours with several"
           if mixed[device, metric] else "")
        for (device, metric), found in sorted(units.items())
        if len(found) > 1
    ]  # fmt: skip
    return _some(hints, "metrics")


def _text_hints(lake: LakePath, catalog: Catalog) -> list[str]:
    """Returns the metrics whose texts may be numbers, also with a decimal comma."""
    found = {}
    texts: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in _newest_rows(lake, catalog, HOURS, ("device", "metric", "numbers", "last_string")):
        if not row["numbers"] and row["last_string"] is not None:
            texts[row["device"], row["metric"]].add(row["last_string"])
            if _COMMA.fullmatch(row["last_string"]):
                found[row["device"], row["metric"]] = row["last_string"]
    codes = {key: some for key, some in texts.items() if _are_numbers(key[1], some)}
    showing = {key[0] for key, some in codes.items() if len(some) > 1 or "." in min(some)}
    plain = [
        f"device {device}: {metric} has texts such as {min(some)!r}. If they are numbers, a rule "
        f"with numbers=({metric!r},) makes them numbers"
        for (device, metric), some in sorted(codes.items())
        if device in showing
    ]
    hints = [
        f"device {device}: {metric} has texts such as {text!r}. If they are numbers with a decimal "
        "comma, a rule with decimal=',' mends it (in JSON also numbers=(...))"
        for (device, metric), text in sorted(found.items())
    ]
    unread = [
        f"device {device}: no number is read from texts such as {min(some)!r}. A rule with "
        "decode=FUNCTION reads them, or decode='form' or 'csv'"
        for (device, metric), some in sorted(texts.items())
        if metric == VALUE and all(map(_UNREAD.fullmatch, some))
    ]
    return _some(hints, "metrics") + _some(plain, "metrics") + _some(unread, "devices")


def _are_numbers(metric: str, texts: Collection[str]) -> bool:
    """Returns whether texts look like numbers and the metric is not named like a code."""
    kinds = {type(plain_value(each)) for each in texts}
    return kinds <= NUMBERS and not CODE_NAME.fullmatch(metric.rpartition(".")[2].lower())


def _scale_hints(lake: LakePath, catalog: Catalog) -> list[str]:
    """Returns the numbers that are not multiplied by the scale that their device has: an earlier
    version has read them, or the scale is in another message."""
    numbers: dict[tuple[str, str], dict[str, tuple[str, str]]] = defaultdict(dict)
    scales: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    names = ("device", "metric", "min", "max", "last_string")
    for row in _newest_rows(lake, catalog, HOURS, names):
        device, metric, low, high, text = (row[name] for name in names)
        if low is None or not (low.is_integer() and high.is_integer()):
            continue
        above, _, last = metric.rpartition(".")
        place = (device, above)
        if metric == VALUE:  # a topic for each value
            above, _, last = device.rpartition("/")
            place = ("", above)
        if not last.endswith(SUFFIXES):
            if text is None:
                numbers[place][last] = (device, metric)
        elif -POWER_MAX <= low <= high <= POWER_MAX and (low or high):
            scales[place][last] = None
    build = catalog.tables[READINGS].build if READINGS in catalog.tables else None
    cure = (
        "the scale is in another message, so multiply it where you read the tables"
        if getattr(build, "is_scaled", True)
        else "`holdfast pipeline rebuild readings` multiplies what is in one message"
    )
    hints = []
    for place, fields in sorted(numbers.items()):
        known = ObjectScales(scales[place])
        for name, (device, metric) in sorted(fields.items()):
            scale, _ = known.find(name)
            if scale:
                hints.append(
                    f"device {device}: {metric} is not multiplied by 10 to the power of {scale}: "
                    f"{cure}"
                )
    return _some(hints, "metrics")


def _number_hints(lake: LakePath, catalog: Catalog) -> list[str]:
    """Returns the devices most of whose messages were dropped or are missing, by their numbers:
    these count something else."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    names = ("messages", "repetitions", "missing", "filled")
    for row in _newest_rows(lake, catalog, QUALITY, ("device", *names)):
        sums[row["device"]].update({name: row[name] for name in names})
    hints = []
    for device, found in sorted(sums.items()):
        missing = found["missing"] - found["filled"]
        if missing > found["messages"]:
            hints.append(
                f"device {device}: {missing:,} message numbers are missing, more than the "
                f"{found['messages']:,} messages that are there. If it "
                "counts over several topics, a rule with sequence_per='device' mends it; if its "
                "numbers are none, sequence=None"
            )
        if found["repetitions"] > max(found["messages"] * REPETITIONS_SHARE, REPETITIONS_MIN):
            hints.append(
                f"device {device}: {found['repetitions']:,} messages were dropped as repetitions, "
                f"beside {found['messages']:,} that are there. If their number or id is none, "
                "sequence=None or id=None mends it. "
                "If the device begins above 1 after a restart, a time in its messages does"
            )
    return _some(hints, "devices")


@dataclass(frozen=True)
class _LogEnd:
    ends: dict[str, int] | None = None
    lag_s: float | None = None
    problem: str = ""
    restored: bool = False
    qos0_hint: str = ""


def _look(source: Mapping[str, str], position: Mapping[str, int], log: str) -> _LogEnd:
    """Asks the source for the end of its log, and how old the first record after `position` is."""
    access = None
    try:
        access = LogAccess(parse(source))
        ends = {p: bound.end for p, bound in access.log.bounds().items()}
        before, now = (offsets.generation_in(each) for each in (log, access.log.identity()))
        if offsets.is_other_log(log, access.log.identity()):
            return _LogEnd(problem=f"it has another log ({now[0]}) than this lake ({before[0]})")
        restored = log != "" and before[0] == now[0] and before[1] != now[1]
        own = {p: position.get(str(p), 0) for p in ends}
        hint = access.qos0_hint()
        if all(own[p] >= end for p, end in ends.items()):
            return _LogEnd(offsets.to_json(ends), 0.0, restored=restored, qos0_hint=hint)
        now_s = time.time()

        def is_older(age_s: float) -> bool:
            """Returns whether the lake lacks a record of this age."""
            begins = access.log.offsets_at(round((now_s - age_s) * 1_000_000))
            return any(own.get(p, 0) < begin for p, begin in begins.items())

        lag_s = _greatest(is_older)
        return _LogEnd(offsets.to_json(ends), lag_s, restored=restored, qos0_hint=hint)
    except Exception as error:  # noqa: BLE001 - shown: the status of the lake is there anyway
        text = str(error).strip()
        return _LogEnd(problem=text.splitlines()[0] if text else repr(error))
    finally:
        if access is not None:
            access.close()


def _greatest(is_older: Callable[[float], bool]) -> float:
    """Returns the greatest age in seconds of which `is_older` is true, to a tenth of it."""
    low_s, high_s = 0.0, 1.0
    while is_older(high_s) and high_s < AGE_MAX_S:
        low_s, high_s = high_s, 2 * high_s
    while high_s - low_s > max(0.1, low_s / 10):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if is_older(middle_s) else (low_s, middle_s)
    return low_s


def _lag(commit: Commit | None, source: Commit | None) -> int | None:
    if source is None:
        return 0
    if commit is None or commit.consumed is None:
        return source.rows_total
    if commit.consumed.lineage != source.lineage:
        return None
    if commit.consumed.upto == source.version:
        return 0
    lag = max(0, source.rows_total - commit.consumed.rows)
    unseen = unseen_replacement(source, commit.consumed)
    return lag if unseen is None else max(lag, 1)


def _lag_s(lag: int | None, commit: Commit | None, source: CommitLog) -> float | None:
    """Returns for how long the source has had rows that the table has not read."""
    last = source.last()
    if not lag or last is None:
        return None if lag is None else 0.0
    first = commit.consumed.upto + 1 if commit is not None and commit.consumed is not None else 1
    try:
        at_us = source.read(first).committed_at_us
    except LakeError:  # an old commit, which is not kept
        at_us = commit.committed_at_us if commit is not None else last.committed_at_us
    return max(0.0, time.time() - at_us / 1e6)


def _table(
    name: str, layer: str, source: str, commit: Commit | None, lag: int | None, lag_s: float | None
) -> TableStatus:
    if commit is None:
        return TableStatus(name, layer, source, lag=lag, lag_s=lag_s)
    return TableStatus(
        name=name,
        layer=layer,
        source=source,
        version=commit.version,
        rows=commit.rows_total,
        quarantined=commit.quarantined_total,
        last_rows=commit.rows,
        last_commit_us=commit.committed_at_us,
        last_took_s=commit.took_s,
        lag=lag,
        lag_s=lag_s,
        counts=commit.counts_total,
    )


def status_lines(status: LakeStatus) -> list[str]:
    """Formats a status for a terminal."""
    source = ", ".join(f"{name} {value}" for name, value in status.source.items()) or "not known"
    lines = [f"lake    {status.lake}", f"source  {source}"]
    if status.problem:
        lines.append(f"        cannot be asked: {status.problem}")
    lines += _losses(status)
    heads = ("table", "layer", "from", "rows", "quarantined", "lag", "behind", "version",
             "last commit")  # fmt: skip
    rows = [heads, *(_cells(table) for table in status.tables)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(heads))]
    right = {3, 4, 5, 6, 7}
    lines.append("")
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines += [f"{table.name}: failed in its last step: {table.error}"
              for table in status.tables if table.error]  # fmt: skip
    lines += [
        f"{table.name}: {number:,} {name}"
        for table in status.tables
        for name, number in table.counts.items()
    ]
    told = [status.qos0_hint] if status.qos0_hint else []
    lines += [f"hint: {hint}" for hint in (*told, *status.hints)]
    if status.undeclared:
        names = ", ".join(status.undeclared)
        lines += ["", f"also there: {names}; give --tables with {DECLARED_BY}"]
    return lines


def _losses(status: LakeStatus) -> list[str]:
    """Describes records that are missing permanently."""
    lines = []
    if status.restored:
        lines.append(
            "        the log was restored since the last run: the next run says whether the lake"
            " has messages that the log has lost"
        )
    if status.skipped_total:
        last = status.skipped[-1]
        ago_s = max(0.0, time.time() - last.at_us / 1e6)
        lines.append(
            f"skipped {status.skipped_total:,} offsets of the log are in no table, the last "
            f"{_ago(ago_s)} ago: {last.first} to {last.end} of partition {last.partition}"
        )
    for partition, end in (status.ends or {}).items():
        position = status.offsets.get(partition, 0)
        if position > end:
            lines.append(
                f"        partition {partition} is in the lake up to offset {position}, the log "
                f"ends at {end}: it has lost its end, or is another log"
            )
    return lines


def _cells(table: TableStatus) -> tuple[str, ...]:
    if table.last_commit_us is None:
        commit = "never"
    else:
        ago_s = max(0.0, time.time() - table.last_commit_us / 1e6)
        commit = f"{_ago(ago_s)} ago, {table.last_rows:,} rows in {table.last_took_s:.2f} s"
    return (
        table.name,
        table.layer,
        table.source,
        f"{table.rows:,}",
        f"{table.quarantined:,}",
        "?" if table.lag is None else f"{table.lag:,}",
        "?" if table.lag_s is None else _ago(table.lag_s),
        str(table.version),
        commit,
    )


def _ago(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
