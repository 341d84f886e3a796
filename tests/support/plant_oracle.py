"""What the tables have to have of a `plant_day.Day`: from the meanings of the messages alone, as
docs/tables.md says it, in plain Python and without any code of the pipeline."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds

from tests.support.plant_day import LATENESS_US, SECOND, Said, Value

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
YEAR_2000_US: Final = 946_684_800 * SECOND
FUTURE_US: Final = 300 * SECOND
DAY_US: Final = 86_400 * SECOND
Row = dict[str, Any]


def moment(time_us: int) -> datetime:
    return EPOCH + timedelta(microseconds=time_us)


def micros(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


def optional(time_us: int | None) -> datetime | None:
    return None if time_us is None else moment(time_us)


def day_of(time_us: int) -> date:
    return moment(time_us).date()


class Stream:
    """What was received of one stream, all of it remembered."""

    def __init__(self) -> None:
        self.last_of_producer: dict[tuple[str, int], tuple[int, int]] = {}
        self.ids: set[str] = set()
        self.payloads: dict[int, bytes] = {}
        self.newest_us: dict[str, int] = {}
        self.run: int | None = None
        self.high = 0
        self.missing: dict[int, tuple[datetime, str]] = {}
        """Of the run: when it was found, and the device of the message behind."""
        self.left: list[tuple[int, int, datetime, str]] = []
        """Run, number and those, of the runs before."""

    def is_repetition(self, said: Said) -> bool:
        if said.producer is not None:
            name, *place = said.producer
            last = self.last_of_producer.get((name, said.partition))
            if last is not None and tuple(place) <= last:
                return True
            self.last_of_producer[name, said.partition] = (place[0], place[1])
        if said.id is not None:
            if said.id in self.ids:
                return True
            self.ids.add(said.id)
        elif said.number is not None and said.producer is None and not said.is_sparkplug:
            if self.payloads.get(said.number) == said.payload:
                return True
            self.payloads[said.number] = said.payload
        return False

    def place(self, said: Said) -> Row:
        """Columns of `readings`."""
        number = said.number
        if number is None:
            return dict.fromkeys(("run", "sequence", "gap_before", "gap_opened_at"))
        gap, opened = 0, None
        missing = number - self.high - 1
        if said.begins_run or self.run is None or (missing > 10**6 and not said.is_sparkplug):
            self._begin(said)
        elif missing >= 0:
            if missing:
                gap, opened = missing, moment(said.at_us)
                told = (opened, said.parts[0].device)
                self.missing |= dict.fromkeys(range(self.high + 1, number), told)
            self.high = number
        elif number in self.missing:
            opened = self.missing.pop(number)[0]
        elif (
            not said.is_sparkplug
            and number < self.high
            and (number <= 1 or self.high - number > 1000)
        ):
            self._begin(said)
        return {"run": self.run, "sequence": number, "gap_before": gap, "gap_opened_at": opened}

    def _begin(self, said: Said) -> None:
        assert said.number is not None
        self.left += self._open()
        self.run = said.offset if said.stream == said.topic else said.at_us
        self.high, self.missing = said.number, {}

    def _open(self) -> list[tuple[int, int, datetime, str]]:
        assert self.run is not None or not self.missing
        return [(self.run or 0, number, *told) for number, told in self.missing.items()]

    def still_missing(self) -> list[tuple[int, int, datetime, str]]:
        return self.left + self._open()


class Expected:
    """Rows of every table."""

    def __init__(self, messages: Iterable[Said]) -> None:
        self.messages = list(messages)
        self.streams: dict[str, Stream] = defaultdict(Stream)
        self.readings: list[Row] = []
        self.quarantine: list[Row] = []
        for said in self.messages:
            self._take(said)

    def _take(self, said: Said) -> None:
        stream = self.streams[said.stream]
        if (said.parts or said.bad) and stream.is_repetition(said):
            self._repeat(said)
            return
        if said.bad:
            self.quarantine.append(
                {
                    "reason": said.bad, "topic": said.topic, "partition": said.partition,
                    "offset": said.offset, "timestamp": moment(said.at_us),
                    "payload": said.payload, "client_id": said.client,
                    "table": "readings", "date": day_of(said.at_us),
                }
            )  # fmt: skip
        if not said.parts:
            return
        place = stream.place(said)
        position = 0
        for part in said.parts:
            before_us = stream.newest_us.get(part.device)
            for value in part.values:
                own_us = said.time_us if value.time_us is None else value.time_us
                event_us, claimed_us = believed(said, own_us)
                late = False
                if own_us is not None and claimed_us is None:
                    late = before_us is not None and event_us < before_us - LATENESS_US
                    newest_us = stream.newest_us.get(part.device, event_us)
                    stream.newest_us[part.device] = max(newest_us, event_us)
                self.readings.append(
                    {
                        "device": part.device, "metric": value.metric,
                        "event_time": moment(event_us), **columns_of(value),
                        "store_time": moment(said.at_us), "sent_time": optional(said.sent_us),
                        "claimed_time": optional(claimed_us), "topic": said.topic,
                        "partition": said.partition, "offset": said.offset,
                        "position": position, "message_id": said.id, "stream": said.stream,
                        **place, "is_late": late, "is_historical": value.is_historical,
                        "quality": None, "date": day_of(said.at_us),
                    }
                )  # fmt: skip
                position += 1

    def _repeat(self, said: Said) -> None:
        """A repetition leaves one row, and nothing else."""
        names = ("value_double", "value_string", "value_boolean", "sent_time", "claimed_time",
                 "message_id", "run", "sequence", "gap_before", "gap_opened_at",
                 "quality", "unit")  # fmt: skip
        at = moment(said.at_us)
        self.readings.append(
            {
                **dict.fromkeys(names), "device": said.parts[0].device, "metric": "$repeated",
                "event_time": at, "store_time": at, "topic": said.topic,
                "partition": said.partition, "offset": said.offset, "position": 0,
                "stream": said.stream, "is_late": False, "is_historical": False,
                "date": day_of(said.at_us),
            }
        )  # fmt: skip

    def tables(self) -> dict[str, Callable[[], list[Row]]]:
        """The rows of each table."""
        return {
            "records": self.records, "readings": lambda: self.readings, "gaps": self.gaps,
            "missing": self.missing, "device_minutes": lambda: self.windows(60),
            "device_hours": lambda: self.windows(3600), "latency": self.latency,
            "quality": self.quality, "topics": self.topics,
            "outages": lambda: self.presence()[0], "availability": lambda: self.presence()[1],
        }  # fmt: skip

    def quality(self) -> list[Row]:
        groups = grouped(
            (row for row in self.readings if row["position"] == 0),
            lambda row: (row["device"], begin_of(row["store_time"], 60)),
        )
        return [
            {
                "device": device, **dated(start),
                "messages": sum(row["metric"] != "$repeated" for row in rows),
                "repetitions": sum(row["metric"] == "$repeated" for row in rows),
                "late": sum(row["is_late"] for row in rows),
                "wrong_clock": sum(row["claimed_time"] is not None for row in rows),
                "missing": sum(row["gap_before"] or 0 for row in rows),
                "filled": sum(
                    row["gap_opened_at"] is not None and not row["gap_before"] for row in rows
                ),
            }
            for (device, start), rows in groups.items()
        ]  # fmt: skip

    def records(self) -> list[Row]:
        names = ("id", "epoch", "sequence")
        return [
            {
                "topic": said.topic, "payload": said.payload, "partition": said.partition,
                "offset": said.offset, "timestamp": moment(said.at_us), "qos": 1,
                "retain": said.retain, "properties": b"", "client_id": said.client,
                "producer": dict(zip(names, said.producer, strict=True)) if said.producer else None,
                "date": day_of(said.at_us),
            }
            for said in self.messages
        ]  # fmt: skip

    def gaps(self) -> list[Row]:
        rows = []
        for row in self.readings:
            if row["position"] == 0 and row["gap_opened_at"] is not None:
                count = row["gap_before"]
                first, last = row["sequence"] - count, row["sequence"] - (1 if count else 0)
                rows.append(
                    {
                        **{name: row[name] for name in (
                            "stream", "run", "device", "store_time", "partition", "offset")},
                        "event": "missing" if count else "filled", "first": first, "last": last,
                        "count": count or 1, "opened_at": row["gap_opened_at"],
                    }
                )  # fmt: skip
        return rows

    def missing(self) -> list[Row]:
        rows: list[Row] = []
        for name, stream in self.streams.items():
            numbers = sorted(stream.still_missing())
            for at, (run, number, opened, device) in enumerate(numbers):
                if at and numbers[at - 1][:2] == (run, number - 1):
                    rows[-1]["last"] = number
                    rows[-1]["count"] += 1
                    continue
                start = opened.replace(hour=0, minute=0, second=0, microsecond=0)
                rows.append(
                    {
                        "stream": name, "device": device, "window_start": start, "run": run,
                        "first": number, "last": number, "count": 1, "opened_at": opened,
                        "date": start.date(),
                    }
                )  # fmt: skip
        return rows

    def windows(self, seconds: int) -> list[Row]:
        groups = grouped(
            (row for row in self.readings if not row["metric"].startswith("$")),
            lambda row: (row["device"], row["metric"], begin_of(row["event_time"], seconds)),
        )
        observed = Observed(groups, "event_time", seconds)
        return [
            {
                "device": device, "metric": metric, **dated(start), **window(rows),
                "rate": observed.rate(len(rows), start),
            }
            for (device, metric, start), rows in groups.items()
        ]  # fmt: skip

    def latency(self) -> list[Row]:
        groups = grouped(
            (
                row
                for row in self.readings
                if row["position"] == 0 and row["sent_time"] is not None
                and not row["is_historical"]
            ),
            lambda row: (row["device"], begin_of(row["store_time"], 60)),
        )  # fmt: skip
        found = []
        for (device, start), rows in groups.items():
            every = [micros(row["store_time"]) - micros(row["sent_time"]) for row in rows]
            good = sorted(
                each
                for each, row in zip(every, rows, strict=True)
                if row["claimed_time"] is None and -FUTURE_US <= each <= DAY_US
            )
            told = {
                "min_ms": good[0] / 1000, "max_ms": good[-1] / 1000,
                "mean_ms": sum(good) / len(good) / 1000,
                **{f"p{share}_ms": percentile(good, share / 100) / 1000 for share in (50, 90, 99)},
            } if good else {}  # fmt: skip
            names = ("min_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms", "mean_ms")
            found.append(
                {
                    "device": device, **dated(start), "messages": len(every),
                    "wrong_clock": len(every) - len(good), "ahead": sum(each < 0 for each in good),
                    **dict.fromkeys(names), **told,
                    "offset_min_ms": min(every) / 1000, "offset_max_ms": max(every) / 1000,
                }
            )  # fmt: skip
        return found

    def topics(self) -> list[Row]:
        groups = grouped(self.records(), lambda row: (row["topic"], begin_of(row["timestamp"], 60)))
        observed = Observed(groups, "timestamp", 60)
        found = []
        for (topic, start), rows in groups.items():
            sizes = [len(row["payload"]) for row in rows]
            found.append(
                {
                    "topic": topic, **dated(start), "messages": len(rows),
                    "rate": observed.rate(len(rows), start),
                    "bytes": sum(sizes), "bytes_rate": observed.rate(sum(sizes), start),
                    "bytes_min": min(sizes),
                    "bytes_max": max(sizes), "retained": sum(row["retain"] for row in rows),
                    "clients": len({row["client_id"] for row in rows}),
                }
            )  # fmt: skip
        return found

    def presence(self) -> tuple[list[Row], list[Row]]:
        """outages, availability"""
        heard: dict[str, dict[tuple[int, int, int], bool]] = defaultdict(dict)
        reported: dict[str, list[int]] = defaultdict(list)
        for row in self.readings:
            if row["metric"] == "$repeated":
                continue
            place = (micros(row["store_time"]), row["partition"], row["offset"])
            gone = row["metric"] == "$online" and row["value_boolean"] is False
            if row["metric"] == "$online":
                reported[row["device"]].append(place[0])
            heard[row["device"]][place] = heard[row["device"]].get(place, False) or gone
        ends: dict[int, int] = {}
        for each in heard.values():
            for at, _, _ in each:
                ends[at // DAY_US * DAY_US] = max(at, ends.get(at // DAY_US * DAY_US, 0))
        outages, availability = [], []
        for device, each in heard.items():
            for day_us, end_us in ends.items():
                times = [
                    (place[0], gone)
                    for place, gone in sorted(each.items())
                    if day_us - DAY_US <= place[0] < day_us + DAY_US
                ]
                if times:
                    found, usual_us, spread = outages_of(times, day_us, end_us)
                    reports = any(day_us - DAY_US <= at < day_us + DAY_US
                                  for at in reported[device])  # fmt: skip
                    known = observed_of(times, day_us, end_us) and (reports or usual_us)
                    outages += [{"device": device, **dated(moment(day_us)), **o} for o in found]
                    observed_us = observed_of(times, day_us, end_us)
                    # In whole microseconds: so that nothing is rounded twice.
                    down_us = sum(micros(o["outage_to"]) - micros(o["outage_from"]) for o in found)
                    up_us = observed_us - down_us
                    availability.append(
                        {
                            "device": device, **dated(moment(day_us)),
                            "messages": sum(at >= day_us for at, _ in times),
                            "observed_s": observed_us / 1e6, "down_s": down_us / 1e6,
                            "up_s": up_us / 1e6,
                            "availability": up_us / observed_us if known else None,
                            "outages": len(found),
                            "longest_s": max((o["duration_s"] for o in found), default=0.0),
                            "usual_interval_s": None if usual_us is None else usual_us / 1e6,
                            "silence": "outage" if usual_us else "uneven" if spread else "few",
                            "interval_spread": spread,
                        }
                    )  # fmt: skip
        return outages, availability


def check_table(lake: Path, name: str, wanted: Iterable[Row]) -> None:
    """The files of a table have these rows, with the same columns, so often as they are there."""
    kind = pa.schema([("date", pa.date32())])
    files = [str(path) for path in (lake / name).rglob("*.parquet")]
    found = ds.dataset(files, partitioning=ds.partitioning(kind, flavor="hive"),
                       partition_base_dir=str(lake / name)).to_table().to_pylist()  # fmt: skip
    for row in found:
        if "hour" in row:  # a directory of its own, beside the day's
            assert row.pop("hour") == row["window_start"].hour
        if name == "gaps":  # which has no partitions
            assert row.pop("date") is None
    one, other = counted(found), counted(wanted)
    more, fewer = one - other, other - one
    assert more + fewer == Counter(), (
        f"{more.total()} rows that should not be there, such as {sorted(more, key=str)[:2]}; "
        f"{fewer.total()} are missing, such as {sorted(fewer, key=str)[:2]}"
    )
    assert one


def counted(rows: Iterable[Row]) -> Counter[Any]:
    return Counter(
        tuple(sorted((name, str(value) if type(value) is dict else value)
                     for name, value in row.items()))
        for row in rows
    )  # fmt: skip


def believed(said: Said, time_us: int | None) -> tuple[int, int | None]:
    if time_us is None:
        return said.at_us, None
    if YEAR_2000_US <= time_us <= said.at_us + FUTURE_US:
        return time_us, None
    return said.at_us, time_us


def columns_of(value: Value) -> Row:
    row: Row = dict.fromkeys(("value_double", "value_string", "value_boolean"))
    row["unit"] = value.unit
    content = value.value
    if isinstance(content, bool):
        row["value_boolean"], row["value_string"] = content, value.word
    elif isinstance(content, str):
        row["value_string"] = content
    elif content is not None:
        row["value_double"], row["value_string"] = float(content), value.word
        if isinstance(content, int) and abs(content) > 2**53:
            row["value_string"] = str(content)
    return row


def begin_of(time: datetime, seconds: int) -> datetime:
    time_us = micros(time)
    return moment(time_us - time_us % (seconds * SECOND))


def dated(start: datetime) -> Row:
    """`window_start`, and the day that is its partition."""
    return {"window_start": start, "date": start.date()}


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def percentile(values: Sequence[Any], share: float) -> float:
    """Of sorted values, between two of them in proportion."""
    rank = (len(values) - 1) * share
    below = math.floor(rank)
    part = rank - below
    if part == 0:
        return float(values[below])
    return float(values[below] * (1 - part) + values[below + 1] * part)


class Observed:
    """The part of each window that was observed: from the hour's first time to its last."""

    def __init__(self, groups: dict[Any, list[Row]], time: str, seconds: int) -> None:
        self.seconds = seconds
        self.times: dict[int, list[int]] = defaultdict(list)
        for rows in groups.values():
            for row in rows:
                self.times[micros(row[time]) // (3600 * SECOND)].append(micros(row[time]))

    def rate(self, count: int, start: datetime) -> float | None:
        begin = micros(start)
        times = self.times[begin // (3600 * SECOND)]
        span_us = min(begin + self.seconds * SECOND, max(times)) - max(begin, min(times))
        return count / (span_us / SECOND) if span_us >= 10 * SECOND else None


def mean_of(values: Sequence[float]) -> float | None:
    """Of sorted values: corrected once by what they differ from it, and between the extremes."""
    total = 0.0
    for value in values:
        total += value
    if not values or not math.isfinite(total):
        return None
    rough, rest = total / len(values), 0.0
    for value in values:
        rest += value - rough
    return min(max(rough + rest / len(values), values[0]), values[-1])


def window(rows: list[Row]) -> Row:
    """Statistics of a device and metric."""
    order = ("event_time", "partition", "offset", "position")
    rows = sorted(rows, key=lambda row: tuple(row[name] for name in order))
    told = [row["value_double"] for row in rows if row["value_double"] is not None]
    texts = [row["value_string"] for row in rows if row["value_string"] is not None]
    values = sorted(told)
    mean = mean_of(values)
    stddev = None
    if len(values) > 1 and mean is not None:
        squares = 0.0
        for value in values:
            squares += (value - mean) * (value - mean)
        stddev = math.sqrt(squares / (len(values) - 1)) if math.isfinite(squares) else None
    shares = {f"p{share}": percentile(values, share / 100) if values else None
              for share in (50, 90, 99)}  # fmt: skip
    units = {row["unit"] for row in rows} - {None}
    assert len(units) <= 1
    return {
        "unit": next(iter(units), None),
        "readings": len(rows), "late": sum(row["is_late"] for row in rows), "numbers": len(values),
        "min": values[0] if values else None, "max": values[-1] if values else None,
        "mean": mean, "stddev": stddev, "first": told[0] if told else None,
        "last": told[-1] if told else None, **shares,
        "trues": sum(row["value_boolean"] is True for row in rows),
        "falses": sum(row["value_boolean"] is False for row in rows),
        "last_string": texts[-1] if texts else None,
    }  # fmt: skip


def observed_of(times: Sequence[tuple[int, bool]], day_us: int, end_us: int) -> int:
    return max(end_us - max(times[0][0], day_us), 0)


def expectation_of(intervals: Sequence[int]) -> tuple[float | None, float | None]:
    """The usual one of sorted intervals, if silence is an outage, and how uneven they are."""
    if len(intervals) < 8:
        return None, None
    usual_us = percentile(intervals, 0.9)
    normal = [each for each in intervals if each <= max(5 * usual_us, 10 * SECOND)]

    def until(share: Fraction) -> int:
        """The interval in which this share of the time has passed, shorter ones first."""
        passed = 0
        for each in normal:
            passed += each
            if passed >= share * sum(normal):
                return each
        raise AssertionError("no interval")

    short, long = until(Fraction(1, 4)), until(Fraction(9, 10))
    if sum(each >= Fraction(short, 2) for each in normal) < 8:
        return None, None
    silences = len(intervals) - len(normal)
    uneven = long / short > 2.5 or (silences > 3 and silences > len(intervals) // 20)
    return None if uneven else usual_us, long / short


def outages_of(
    times: Sequence[tuple[int, bool]], day_us: int, end_us: int
) -> tuple[list[Row], float | None, float | None]:
    """Of one device on a day, by its messages of that day and the one before (when, whether it was
    said to be gone); its usual interval, if silence is an outage, and the spread of its
    intervals."""
    intervals: list[int] = []
    heard = [at for at, gone in times if not gone]
    burst_us = heard[0] if heard else 0
    for before, at in pairwise(heard):
        if at - before >= 2 * SECOND or at - burst_us >= 10 * SECOND:
            intervals.append(at - before)
            burst_us = at
    usual_us, spread = expectation_of(sorted(intervals))
    found: list[Row] = []

    def note(begin_us: int | None, until_us: int | None, cause: str) -> None:
        if begin_us is None:
            return
        first, last = max(begin_us, day_us), end_us if until_us is None else min(until_us, end_us)
        if last > first:
            found.append(
                {
                    "outage_from": moment(first), "outage_to": moment(last),
                    "duration_s": (last - first) / 1e6, "cause": cause,
                    "began_before": begin_us < day_us, "is_open": until_us is None,
                }
            )  # fmt: skip

    last_us: int | None = None
    gone_us: int | None = None
    for at, gone in [*times, (None, False)]:
        if gone:
            gone_us = at if gone_us is None else gone_us
            continue
        silence_us = (end_us if at is None else at) - (last_us if last_us is not None else 0)
        is_long = usual_us is not None and silence_us > max(5 * usual_us, 10 * SECOND)
        begin_us = last_us if is_long and last_us is not None else gone_us
        note(begin_us, at, "silence" if gone_us is None else "offline")
        last_us, gone_us = at, None
    return found, usual_us, spread
