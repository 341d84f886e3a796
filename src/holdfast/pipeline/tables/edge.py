"""Sparkplug B edge nodes: births give metrics their names and types, and deaths end them.

The messages of an edge node have several topics, and so are in several partitions. They arrive here
in the order in which the broker stored them, as far as one step has them. A message that is older
than the newest birth is read by the birth before it.
"""

from typing import Final, NamedTuple

from holdfast.pipeline.decoders.decoded import NAME_LENGTH_MAX, Decoded, DecodeError
from holdfast.pipeline.decoders.json_payload import Fields
from holdfast.pipeline.decoders.sparkplug import Metric, Payload, add_metric, parse_payload
from holdfast.pipeline.decoders.text_payload import ONLINE, decode_status
from holdfast.pipeline.tables.stream import (
    NOWHERE,
    At,
    Birth,
    StreamPosition,
    StreamState,
    begin_run,
    follow,
)

BIRTHS_MAX: Final = 2
"""The births kept per edge node: the newest, and the one before it for late messages."""
ALIASES_MAX: Final = 20_000
"""The most names and aliases kept per birth."""
DEVICES_MAX: Final = 1000
"""The most devices kept per edge node."""
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
        return [Emission(f"STATE/{levels[2]}", _host_state(payload))], NOWHERE
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


def edge_device(topic: str) -> str | None:
    """Returns the device of a topic of Sparkplug, or None for a command and other topics."""
    levels = topic.split("/")
    if len(levels) not in (4, 5) or levels[2] not in _TYPES:
        return None
    return "/".join([levels[1], *levels[3:]])


def _host_state(payload: bytes) -> Decoded:
    return decode_status(payload, Fields(time=("timestamp",), sent=("timestamp",)))


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
    birth = Birth(at, _bd_sequence(found), {}, {})
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
        if metric.alias is not None:
            birth.aliases[str(metric.alias)] = (metric.name, datatype)
        else:
            birth.types[f"{device}\0{metric.name}"] = datatype


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
        name, datatype = birth.aliases.get(str(metric.alias), (None, 0))
        return metric.name or name, metric.datatype or datatype
    if metric.name is None:
        return None, 0
    known = birth.types.get(f"{device}\0{metric.name}", 0) if birth is not None else 0
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
