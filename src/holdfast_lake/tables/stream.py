"""Tracks a stream of messages, to find repetitions, gaps and late messages.

A stream is the messages that one counter numbers: those of a topic, a device, or an edge node of
Sparkplug. The state is bounded. Invariant: after the same messages it is the same, however they
were divided into steps.

Births of a Sparkplug edge node give metrics their names and types, and deaths end them. The
messages of an edge node have several topics, and so are in several partitions. They arrive here in
the order in which the broker stored them, as far as one step has them. A message that is older than
the newest birth is read by the birth before it.
"""

from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from holdfast_lake.decoders.decoded import NAME_LENGTH_MAX, Decoded, DecodeError
from holdfast_lake.decoders.json_payload import Fields
from holdfast_lake.decoders.sparkplug import Metric, Payload, add_metric, parse_payload
from holdfast_lake.decoders.text_payload import ONLINE, decode_status

REPEATED: Final = "$repeated"
"""The metric of a repetition, which has no other reading and no value."""
SEEN_MAX: Final = 256
"""The most message ids kept per stream."""
ID_LENGTH_MAX: Final = 64
"""The most characters of an id that is kept as it is. Of a longer one the hash is kept."""
PRODUCERS_MAX: Final = 256
"""The most producers kept per stream. If a stream is in several partitions, each producer counts
once per partition."""
IDLE_DAYS_MAX: Final = 7
"""The days without a message after which the state is dropped."""
DAY_US: Final = 86_400_000_000
IDLE_US_MAX: Final = IDLE_DAYS_MAX * DAY_US
NOISE_MAX: Final = 100
"""The most messages of a stream, day and code in the quarantine. More are counted."""
DEVICES_MAX: Final = 1000
"""The most devices per stream whose newest event time is kept, and per edge node."""
GAPS_MAX: Final = 64
"""The most open gaps kept per stream. If there are more, the oldest can no longer be filled."""
REORDER_MAX: Final = 1000
"""The distance down beyond which a lower number begins a new run (the device has restarted). A 0 or
1 that is not missing begins one, too."""
JUMP_MAX: Final = 1_000_000
"""The most missing numbers of one gap. A higher number begins a new run."""

At = tuple[int, int, int, int]
"""The position of a message in a stream of several topics: store time, rank, partition, offset.

The store time is in microseconds. The rank, 0 to 2, puts births before the messages that need them.
"""
Gap = tuple[int, int, int]
"""The first and last missing number, and the time at which the gap was found (microseconds, the
broker's clock)."""


class Birth(msgspec.Struct, omit_defaults=True, array_like=True):
    """A birth of a Sparkplug edge node, with the births of its devices since then."""

    at: At
    bd_sequence: int | None = None
    aliases: dict[str, tuple[str, int]] = {}
    """The name and datatype per alias. The alias is a text, because JSON needs it."""
    types: dict[str, int] = {}
    """The datatype per device and metric name, joined by a zero character."""
    units: dict[str, str] = {}
    """The unit per alias, or per device and metric name, of metrics that have one."""


class StreamState(msgspec.Struct, omit_defaults=True):
    """The state of one stream, stored as JSON in the table's state."""

    run: int | None = None
    """The identity of the run: the offset or time at which it began. None before the first
    number."""
    high: int = 0
    """The highest number of the run."""
    raw: int = 0
    """The number on the wire for `high` (Sparkplug)."""
    gaps: list[Gap] = []
    seen: dict[str, bool | int] = {}
    """The ids of the last messages, oldest first, with the checksum of the payload. True: the
    payload does not matter, or an older version has not noted it."""
    contents: dict[int, int] = {}
    """The checksum of the payload per number of the last messages, oldest first."""
    producers: dict[str, tuple[int, int]] = {}
    """The epoch and sequence of the last message per producer (see `producer_key`), least recent
    first."""
    latest: dict[str, int] = {}
    """The newest event time per device, least recently changed first."""
    births: list[Birth] = []
    online: dict[str, bool] = {}
    """The devices of the edge node, and whether each is online (Sparkplug)."""
    units: dict[str, str] = {}
    """The last unit per device and metric, joined by a zero character, least recent first."""
    scaled: dict[str, str] = {}
    """The scale by which a number was multiplied, per device and metric, least recent first."""
    errors: dict[str, tuple[int, int]] = {}
    """The day of the last error, as a number, and the errors of that day, by code."""


class StreamPosition(msgspec.Struct, frozen=True):
    """The position of a message in its stream. All fields are None for a message without a
    number."""

    run: int | None = None
    sequence: int | None = None
    gap_before: int | None = None
    gap_opened_us: int | None = None


NOWHERE: Final = StreamPosition()


def producer_key(producer: str, partition: int, *, is_topic: bool) -> str:
    """Returns the key under which sequences only grow: a producer within a partition.

    `is_topic` means that the stream is one topic, which is in one partition.
    """
    return producer if is_topic else f"{partition} {producer}"


def is_repetition(state: StreamState, producer: str, epoch: int, sequence: int) -> bool:
    """Returns whether a message with a producer sequence is a repetition. For `producer` see
    `producer_key`."""
    last = state.producers.get(producer)
    if last is not None and (epoch, sequence) <= last:
        return True
    state.producers.pop(producer, None)
    state.producers[producer] = (epoch, sequence)
    if len(state.producers) > PRODUCERS_MAX:
        del state.producers[next(iter(state.producers))]
    return False


def was_seen(state: StreamState, id: str, checksum: int | None) -> bool:
    """Returns whether a message with this id has come, and notes the id.

    With a checksum, it must have had this content: a field that happens to be named `msg_id` may be
    the type of the message, or a counter that has begun again.
    """
    if len(id) > ID_LENGTH_MAX:
        id = blake2b(id.encode(), digest_size=16).hexdigest()
    known = state.seen.get(id)
    if known is not None and (known is True or checksum is None or known == checksum):
        return True
    state.seen.pop(id, None)
    state.seen[id] = True if checksum is None else checksum
    if len(state.seen) > SEEN_MAX:
        del state.seen[next(iter(state.seen))]
    return False


def count_error(state: StreamState, code: str, store_us: int) -> int:
    """Counts an error of a stream, and returns how many of this code the day has with it."""
    day = store_us // DAY_US
    last, count = state.errors.get(code, (day, 0))
    count = count + 1 if last == day else 1
    state.errors[code] = (day, count)
    return count


def is_repeated(state: StreamState, number: int, checksum: int, *, has_time: bool) -> bool:
    """Returns whether a message with this number had this content.

    The number alone is not enough: a device that has restarted uses its numbers again. Without the
    time of the message the content may be the same as well, as the temperature of an empty room is.
    Then only a number of this run is repeated, and a 0 or 1 after a higher one is a restart.
    """
    if state.contents.get(number) != checksum:
        return False
    is_missing = any(first <= number <= last for first, last, _ in state.gaps)
    return has_time or (1 < number <= state.high and not is_missing) or number == state.high


def note_content(state: StreamState, number: int, checksum: int) -> None:
    """Notes the content of a message with a number, after `follow`."""
    state.contents.pop(number, None)
    state.contents[number] = checksum
    if len(state.contents) > SEEN_MAX:
        del state.contents[next(iter(state.contents))]


def is_late(state: StreamState, device: str, event_us: int, lateness_us: int) -> bool:
    """Returns whether an event time is late for its device, and notes it if it is the newest."""
    newest = state.latest.get(device)
    note_newest(state, device, event_us)
    return newest is not None and event_us < newest - lateness_us


def note_newest(state: StreamState, device: str, event_us: int) -> None:
    """Notes an event time of a device if it is the newest."""
    newest = state.latest.get(device)
    if newest is None or event_us > newest:
        state.latest.pop(device, None)
        state.latest[device] = event_us
        if len(state.latest) > DEVICES_MAX:
            del state.latest[next(iter(state.latest))]


def follow(
    state: StreamState, number: int, begun: int, store_us: int, restarts: bool = True
) -> StreamPosition:
    """Returns the position of a message with `number`, and notes the number.

    `begun` names the run if the message begins one. With `restarts`, the numbers themselves can
    begin a new run. Otherwise only `begin_run` does.
    """
    if state.run is None:
        begin_run(state, begun, number)
        return StreamPosition(state.run, number, 0)
    if number > state.high:
        missing = number - state.high - 1
        if missing > JUMP_MAX and restarts:
            begin_run(state, begun, number)
            return StreamPosition(state.run, number, 0)
        if missing:
            state.gaps.append((state.high + 1, number - 1, store_us))
            if len(state.gaps) > GAPS_MAX:
                del state.gaps[0]
        state.high = number
        return StreamPosition(state.run, number, missing, store_us if missing else None)
    opened = _fill(state, number)
    if opened is None and restarts and number < state.high:
        back = state.high - number
        if number <= 1 or back > REORDER_MAX:
            begin_run(state, begun, number)
    return StreamPosition(state.run, number, 0, opened)


def begin_run(state: StreamState, run: int, number: int, raw: int = 0) -> None:
    """Begins a run. Numbers missing in the last run stay missing."""
    state.run, state.high, state.raw = run, number, raw
    state.gaps = []


def _fill(state: StreamState, number: int) -> int | None:
    """Returns the time at which the gap with `number` was found, or None if it was not missing."""
    for index, (first, last, opened_us) in enumerate(state.gaps):
        if first <= number <= last:
            parts = [(first, number - 1, opened_us), (number + 1, last, opened_us)]
            state.gaps[index : index + 1] = [part for part in parts if part[0] <= part[1]]
            while len(state.gaps) > GAPS_MAX:
                del state.gaps[0]
            return opened_us
    return None


BIRTHS_MAX: Final = 2
"""The births kept per edge node: the newest, and the one before it for late messages."""
ALIASES_MAX: Final = 20_000
"""The most names and aliases kept per birth."""
SEQUENCE_END: Final = 256
"""The numbers of Sparkplug messages are 0 to 255."""
TIME_MAX_MS: Final = 100_000_000_000_000
"""The year 5138 in milliseconds. A later time is in another unit, or invalid."""
BD_SEQUENCE: Final = "bdSeq"
"""The metric that connects a will with the birth of its session."""
_COMMANDS: Final = frozenset({"NCMD", "DCMD"})
_TYPES: Final = frozenset({"NBIRTH", "NDEATH", "NDATA", "DBIRTH", "DDEATH", "DDATA"})


class Emission(NamedTuple):
    """The readings of one device in a message."""

    device: str
    decoded: Decoded


def read_edge(
    state: StreamState, topic: str, payload: bytes, at: At
) -> tuple[list[Emission], StreamPosition]:
    """Reads one message of an edge node. Raises DecodeError."""
    levels = topic.split("/")
    if len(levels) == 3 and levels[1] == "STATE":
        state_of_host = decode_status(payload, Fields(time=("timestamp",), sent=("timestamp",)))
        return [Emission(f"STATE/{levels[2]}", state_of_host)], NOWHERE
    if len(levels) < 4 or len(levels) > 5 or levels[2] not in _TYPES | _COMMANDS:
        raise DecodeError("no topic of Sparkplug B: spBv1.0/group/type/edge node[/device]")
    kind, node = levels[2], f"{levels[1]}/{levels[3]}"
    if kind in _COMMANDS:
        return [], NOWHERE
    if (kind[0] == "D") != (len(levels) == 5):
        raise DecodeError(f"no topic of Sparkplug B: {kind} with {len(levels)} levels")
    device = node if len(levels) == 4 else f"{node}/{levels[4]}"
    found = parse_payload(payload)
    if kind == "NDEATH":
        return _node_death(state, node, found, at), NOWHERE
    place = _continue_number(state, kind, found, at)
    birth = _birth_at(state, at)
    if kind == "NBIRTH" or (kind == "DBIRTH" and birth is None):
        birth = _add_birth(state, found, at)
    if kind.endswith("BIRTH"):
        assert birth is not None
        _learn_names(birth, device, found)
    decoded = Decoded()
    decoded.time_us = decoded.sent_us = _time_us(found.time_ms, "the message", decoded)
    if kind.endswith("BIRTH"):
        _set_online(state, device, True, decoded)
    elif kind == "DDEATH":
        _set_online(state, device, False, decoded)
    _add_metrics(decoded, device, found, birth)
    return [Emission(device, decoded)], place


def distance(payload: bytes | None, first: int) -> int:
    """Returns how far the number of a Sparkplug message is behind `first`, from 0 to 255."""
    try:
        number = parse_payload(payload or b"").sequence
    except DecodeError:
        number = None
    return SEQUENCE_END if number is None else (number - first) % SEQUENCE_END


def edge_device(topic: str) -> str | None:
    """Returns the device of a topic of Sparkplug, or None for a command and other topics."""
    levels = topic.split("/")
    if len(levels) not in (4, 5) or levels[2] not in _TYPES:
        return None
    return "/".join([levels[1], *levels[3:]])


def _continue_number(state: StreamState, kind: str, found: Payload, at: At) -> StreamPosition:
    """Returns the position of a message by its number from 0 to 255, continued without end.

    The numbers begin again with each NBIRTH.
    """
    raw = found.sequence
    if raw is None or raw >= SEQUENCE_END:
        return NOWHERE
    newest = state.births[-1].at if state.births else (-1, 0, 0, 0)
    if at < newest:
        return NOWHERE
    if kind == "NBIRTH":
        begin_run(state, at[0], raw, raw)
        return StreamPosition(at[0], raw, 0)
    if state.run is None:
        begin_run(state, at[0], raw, raw)
        return StreamPosition(at[0], raw, 0)
    half = SEQUENCE_END // 2
    number = state.high + (raw - state.raw + half) % SEQUENCE_END - half
    if number > state.high:
        state.raw = raw
    return follow(state, number, at[3], at[0], restarts=False)


def _birth_at(state: StreamState, at: At) -> Birth | None:
    """Returns the last birth at or before `at`."""
    for birth in reversed(state.births):
        if birth.at <= at:
            return birth
    return None


def _add_birth(state: StreamState, found: Payload, at: At) -> Birth:
    birth = Birth(at, _bd_sequence(found), {}, {}, {})
    state.births.append(birth)
    state.births.sort(key=lambda known: known.at)
    del state.births[:-BIRTHS_MAX]
    return birth


def _bd_sequence(found: Payload) -> int | None:
    for metric in found.metrics:
        if metric.name == BD_SEQUENCE and isinstance(metric.raw, int):
            return metric.raw
    return None


def _learn_names(birth: Birth, device: str, found: Payload) -> None:
    for metric in found.metrics:
        if metric.name is None or len(metric.name) > NAME_LENGTH_MAX:
            continue
        if len(birth.types) + len(birth.aliases) >= ALIASES_MAX:
            break
        datatype = metric.datatype or 0
        key = _key(metric, device)
        if metric.alias is not None:
            birth.aliases[key] = (metric.name, datatype)
        else:
            birth.types[key] = datatype
        if metric.unit is not None:
            birth.units[key] = metric.unit


def _key(metric: Metric, device: str) -> str:
    """Returns the name of a metric within its birth."""
    return f"{device}\0{metric.name}" if metric.alias is None else str(metric.alias)


def _add_metrics(decoded: Decoded, device: str, found: Payload, birth: Birth | None) -> None:
    """Adds the metrics with their names. A metric that cannot be read becomes an error of the
    message."""
    if found.body:
        decoded.refuse(f"a body of the format {found.format[:40]!r} is not decoded", "format")
    times: list[int | None] = [None] * len(decoded.names)
    historical: list[bool] = [False] * len(decoded.names)
    for metric in found.metrics:
        name, datatype = _named(metric, device, birth)
        if name is None:
            decoded.refuse(
                f"alias {metric.alias} is not known: no birth of this edge node before has it"
                if metric.alias is not None
                else "a metric without name and alias",
                "name",
            )
            continue
        before = len(decoded.names)
        if metric.unit is None and birth is not None:
            metric.unit = birth.units.get(_key(metric, device))
        try:
            add_metric(decoded, name, metric, datatype)
        except DecodeError as error:
            decoded.refuse(f"{name}: {error}", error.code)
        added = len(decoded.names) - before
        times += [_time_us(metric.time_ms, name, decoded)] * added
        historical += [metric.is_historical] * added
    decoded.times = times
    decoded.historical = historical


def _time_us(time_ms: int | None, what: str, decoded: Decoded) -> int | None:
    if time_ms is None or time_ms == 0:
        return None
    if time_ms > TIME_MAX_MS:
        decoded.refuse(f"{what}: {time_ms} is no time in milliseconds", "time")
        return None
    return time_ms * 1000


def _named(metric: Metric, device: str, birth: Birth | None) -> tuple[str | None, int]:
    if metric.alias is not None and birth is not None:
        name, datatype = birth.aliases.get(_key(metric, device), (None, 0))
        return metric.name or name, metric.datatype or datatype
    if metric.name is None:
        return None, 0
    known = birth.types.get(_key(metric, device), 0) if birth is not None else 0
    return metric.name, metric.datatype or known


def _set_online(state: StreamState, device: str, online: bool, decoded: Decoded) -> None:
    decoded.add(ONLINE, online)
    if device in state.online or len(state.online) < DEVICES_MAX:
        state.online[device] = online


def _node_death(state: StreamState, node: str, found: Payload, at: At) -> list[Emission]:
    """Processes the will of an edge node: it and all its devices are down.

    A will whose bdSeq differs from that of the last birth belongs to an earlier session and has no
    effect.
    """
    birth = _birth_at(state, at)
    number = _bd_sequence(found)
    of_birth = number if birth is None or birth.bd_sequence is None else birth.bd_sequence
    if number is not None and number != of_birth:
        return []
    emissions = []
    for device in [node, *(name for name in sorted(state.online) if name != node)]:
        decoded = Decoded()
        _set_online(state, device, False, decoded)
        emissions.append(Emission(device, decoded))
    return emissions
