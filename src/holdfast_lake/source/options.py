"""Parses the options of `format("holdfast")`. Names are case-insensitive, as everywhere in Spark.

==================== ==============================================================================
servers              `host:adminport`, several separated by commas: all of one log. Tasks read from
                     servers that do not lead the partitions, and change to another on a failure.
                     `https://host:adminport` if the ports have TLS
tokenFile            a file of the driver with a token of the role `reader` for the admin ports;
                     without it the variable HOLDFAST_TOKEN of the driver, if it is set
lake                 a directory, or a URL such as `s3://BUCKET/NAME`, of a lake of that log. Its
                     records are read there, and newer ones from `servers`. Without these,
                     the lake alone
caFile               `https` only: a PEM file of the signers of the ports' certificates, on every
                     machine (default: those that the system trusts)
startingOffsets      `earliest` (default of a batch read), `latest` (default of a stream) or JSON
                     such as `{"0": 12}`; a partition left out begins at its first record
endingOffsets        `latest` (default) or JSON; batch reads only
startingTimestamp    in place of startingOffsets: ISO 8601, UTC if it names no zone, or
                     milliseconds since 1970 (like Spark's Kafka source). Each partition begins at
                     its first record that is not older. If a clock was set back, later records may
                     be older
endingTimestamp      in place of endingOffsets: each partition ends before its first record of that
                     time or later
maxRecordsPerTrigger streams only: the most offsets in one micro-batch
failOnDataLoss       `true` (default): missing offsets are an error, and so is a position behind the
                     place at which the log was restored; `false`: missing offsets are skipped, a
                     position goes back to that place, and a warning on standard error lists them
serverWait           how long a request waits for servers that are away: `30s`, `5m`, `2h`. Default:
                     5 minutes in a stream, 3 s in a batch read
topics               only messages that these MQTT filters match, separated by commas: `a/+/b,c/#`
pushFilters          batch reads: `true`: Spark's filters of partition, offset, timestamp and topic
                     limit the read. Then load another DataFrame for each query, because Spark
                     applies the limits of the first query to the next one, too. `false` (default)
tasks                the most tasks. Default: one for each 2,000,000 offsets, and no fewer than the
                     driver has processors. A stream keeps a partition in
                     one task. In a batch read each task has a part of the time
columns              only these columns, separated by commas, in that order. Spark always requests
                     all columns of a Python source, so leaving some out saves their cost
==================== ==============================================================================
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from holdfast.client.admin_access import (
    NO_ACCESS,
    VARIABLE,
    AdminAccess,
    AdminAccessError,
    admin_address,
    load_access,
)
from holdfast.client.log.reading.offsets import (
    EARLIEST,
    Offsets,
    parse_generation,
    parse_position,
)
from holdfast.log.reading.topic_filter import Clause, TopicFilter
from holdfast.numbers import whole_number
from holdfast.protocol.topics.names import InvalidFilter, check_filter, is_shared

DDL_TYPES: Final = {
    "topic": "string",
    "payload": "binary",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "qos": "tinyint",
    "retain": "boolean",
    "properties": "binary",
    "client_id": "string",
    "producer": "struct<id: string, epoch: bigint, sequence: bigint>",
}
"""The columns of the source with their types in Spark."""
COLUMNS: Final = tuple(DDL_TYPES)
NAMES: Final = (
    "servers",
    "lake",
    "tokenFile",
    "caFile",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxRecordsPerTrigger",
    "failOnDataLoss",
    "serverWait",
    "topics",
    "pushFilters",
    "tasks",
    "columns",
)
TASKS_MAX: Final = 10_000
"""The largest value of the option `tasks`."""


TASK_RECORDS_MAX: Final = 2_000_000
"""The offsets of a task, about a second of its time, for which a read gets another one."""
SERVER_WAIT_S: Final = 300.0
"""The seconds for which a stream waits for servers that are away, unless `serverWait` is given. A
restart or an upgrade takes less."""
_WAIT: Final = re.compile(r"(\d{1,9})([smh]?)")
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


class OptionError(ValueError):
    """An option cannot be used. The text names it, its value and the allowed values."""


@dataclass(frozen=True)
class SourceOptions:
    """The checked options of one read.

    A field is None if the user did not give the option and its default depends on the kind of read.
    """

    servers: tuple[tuple[str, int], ...]
    lake: str
    """The lake that has the older part of the log, or an empty text."""
    access: AdminAccess
    """The token and the transport. Tasks receive the token from the driver."""
    starting_offsets: str | Offsets | None
    ending_offsets: str | Offsets | None
    starting_timestamp_us: int | None
    ending_timestamp_us: int | None
    records_per_trigger_max: int | None
    fail_on_data_loss: bool
    server_wait_s: float | None
    """Wait of a request for servers that are away, if given."""
    topics: TopicFilter
    push_filters: bool
    tasks: int
    """The most tasks of a read. 0: see `default_tasks`."""
    columns: tuple[str, ...]
    starting_generation: int | None = None
    """The generation of the log in `startingOffsets`, if that is given."""

    @property
    def wait_s(self) -> float:
        """The seconds for which a request waits for servers that are away."""
        return self.server_wait_s or 0.0


def default_tasks(records: int) -> int:
    """Returns the most tasks of a read of some offsets, unless the user gave a number.

    A large read has as many as a large cluster can use, whatever the driver's machine is.
    """
    return min(TASKS_MAX, max(os.cpu_count() or 1, -(-records // TASK_RECORDS_MAX)))


def for_stream(options: SourceOptions) -> SourceOptions:
    """Returns the options of a stream. Raises OptionError for those of batch reads."""
    for given, name in (
        (options.ending_offsets, "endingOffsets"),
        (options.ending_timestamp_us, "endingTimestamp"),
    ):
        if given is not None:
            raise OptionError(f"{name} is for batch reads; a stream has no end")
    wait_s = SERVER_WAIT_S if options.server_wait_s is None else options.server_wait_s
    return replace(options, server_wait_s=wait_s)


def parse(options: Mapping[str, str]) -> SourceOptions:
    """Checks the options of a read. Raises OptionError, or OffsetError for a position."""
    given = {name.lower(): value for name, value in options.items()}
    known = {name.lower() for name in NAMES}
    for name in given:
        if name == "path":
            raise OptionError(
                f"the log in {given[name]} is read from the broker that serves it: give its admin"
                ' port, option("servers", "host:port") or --from; for a lake, option("lake", DIR)'
            )
        if name not in known:
            raise OptionError(f"unknown option {name!r}; there are {', '.join(NAMES)}")
    if "servers" not in given and "lake" not in given:
        raise OptionError('give option("servers", "host:adminport"), option("lake", DIR), or both')
    for end in ("starting", "ending"):
        if f"{end}offsets" in given and f"{end}timestamp" in given:
            raise OptionError(f"give {end}Offsets or {end}Timestamp, not both")
    servers, is_https = _servers(given["servers"]) if "servers" in given else ((), False)
    return SourceOptions(
        servers=servers,
        lake=given.get("lake", "").removeprefix("file://"),
        access=_access(given, is_https=is_https),
        starting_offsets=_position(given, "startingOffsets"),
        ending_offsets=_position(given, "endingOffsets"),
        starting_timestamp_us=_timestamp(given, "startingTimestamp"),
        ending_timestamp_us=_timestamp(given, "endingTimestamp"),
        records_per_trigger_max=_option_number(given, "maxRecordsPerTrigger", 1 << 62),
        fail_on_data_loss=option_flag(given, "failOnDataLoss", default=True),
        server_wait_s=_wait_s(given.get("serverwait")),
        topics=_topics(given.get("topics")),
        push_filters=option_flag(given, "pushFilters", default=False),
        tasks=_option_number(given, "tasks", TASKS_MAX) or 0,
        columns=_columns(given.get("columns")),
        starting_generation=parse_generation(
            "startingOffsets", given.get("startingoffsets", EARLIEST)
        ),
    )


def parse_timestamp_us(option: str, text: str) -> int:
    """Parses a time to microseconds since 1970. Raises OptionError."""
    text = text.strip()
    if text.isascii() and text.isdecimal():
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(
            f"{option} is {text!r}; allowed: ISO 8601 such as 2026-03-01T12:00:00Z, or "
            "milliseconds since 1970"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    elapsed = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds


def _servers(text: str) -> tuple[tuple[tuple[str, int], ...], bool]:
    """The servers, and whether they are reached by HTTPS. Raises OptionError."""
    result = []
    schemes = set()
    for item in text.split(","):
        try:
            host, port, is_https = admin_address(item)
        except AdminAccessError:
            host, port, is_https = "", 0, False
        if not host or "/" in host:
            raise OptionError(
                f"servers has {item.strip()!r}; allowed: host:adminport with a port of 1 to 65535,"
                " or https://host:adminport, several separated by commas"
            )
        result.append((host, port))
        schemes.add(is_https)
    if len(schemes) > 1:
        raise OptionError("servers has https:// for some only; allowed: for all of them, or none")
    return tuple(result), schemes == {True}


def _access(given: Mapping[str, str], *, is_https: bool) -> AdminAccess:
    """The token and CA of the servers. Raises OptionError."""
    names = [name for name in ("tokenFile", "caFile") if name.lower() in given]
    if "servers" not in given:
        if names:
            raise OptionError(f"{names[0]} is for servers; a lake needs none")
        return NO_ACCESS
    try:
        return load_access(given.get("tokenfile", ""), given.get("cafile", ""), is_https=is_https)
    except AdminAccessError as error:
        raise OptionError(f"{' or '.join(names) or VARIABLE}: {error}") from None


def _position(given: Mapping[str, str], option: str) -> str | Offsets | None:
    text = given.get(option.lower())
    return None if text is None else parse_position(option, text)


def _timestamp(given: Mapping[str, str], option: str) -> int | None:
    text = given.get(option.lower())
    return None if text is None else parse_timestamp_us(option, text)


def _option_number(given: Mapping[str, str], option: str, largest: int) -> int | None:
    text = given.get(option.lower())
    number = None if text is None else whole_number(text, largest, 1)
    if text is not None and number is None:
        raise OptionError(f"{option} is {text!r}; allowed: a number from 1 to {largest}")
    return number


def option_flag(given: Mapping[str, str], option: str, *, default: bool) -> bool:
    """Returns the option `true` or `false`. Raises OptionError."""
    text = given.get(option.lower(), str(default)).strip().lower()
    if text not in ("true", "false"):
        raise OptionError(f"{option} is {text!r}; allowed: true, false")
    return text == "true"


def _wait_s(text: str | None) -> float | None:
    match = None if text is None else _WAIT.fullmatch(text.strip())
    if text is not None and match is None:
        raise OptionError(f"serverWait is {text!r}; allowed: a time such as 30s, 5m or 2h")
    return None if match is None else int(match[1]) * _UNITS_S[match[2] or "s"]


def _topics(text: str | None) -> TopicFilter:
    if text is None:
        return TopicFilter()
    filters = tuple(each.strip() for each in text.split(","))
    for each in filters:
        try:
            check_filter(each)
            if is_shared(each):
                raise InvalidFilter("a shared subscription has no place here")
        except InvalidFilter as error:
            raise OptionError(
                f"topics is {text!r}: {error}; allowed: MQTT filters separated by commas, such as "
                "a/+/b,c/#"
            ) from None
    return TopicFilter((Clause(filters),))


def _columns(text: str | None) -> tuple[str, ...]:
    if text is None:
        return COLUMNS
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in COLUMNS:
            raise OptionError(f"columns has {name!r}; there are {', '.join(COLUMNS)}")
    if len(set(names)) != len(names):
        raise OptionError(f"columns is {text!r}: each at most once")
    return names
