"""Rules proposed from the messages of a log, for the file that `--tables` takes.

First the profiles of makers (profiles.py), then the levels of the topics that are left. Each
proposal is tried on the messages: no two topics may give the same metric of one device, and nothing
may be quarantined that the default rules read. A wrong rule mixes devices, and nobody would notice;
without a rule each topic is a device.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from holdfast.pipeline.decoders.decoded import DecodeError
from holdfast.pipeline.decoders.json_payload import parse_json
from holdfast.pipeline.decoders.text_payload import ONLINE, plain_value
from holdfast.pipeline.decoders.times import parse_time
from holdfast.pipeline.tables.columns import TableMessage
from holdfast.pipeline.tables.profiles import Profile, load_profiles, rule_of
from holdfast.pipeline.tables.rules import (
    DEFAULT_RULES,
    ID_FIELDS,
    SEQUENCE_FIELDS,
    SPARKPLUG,
    STATUS_LEVELS,
    TIME_FIELDS,
    Rule,
    with_defaults,
)
from holdfast.pipeline.tables.topics import Topics

TOPICS_MIN: Final = 2
"""The fewest topics of one shape from which levels are proposed."""
MESSAGES_PER_TOPIC: Final = 50
"""The newest messages of a topic that are looked at."""
DEVICE_FIELDS: Final = (
    ("device_id",), ("deviceId",), ("device",), ("dev_id",), ("devEUI",), ("sensor_id",),
    ("model", "id"), ("id",), ("mac",),
)  # fmt: skip
"""The fields that may name a device, if one topic has several."""
_ID_NAME: Final = re.compile(
    r"(?:^|[._-])(?:id|ID|uuid|UUID|guid|GUID)$|[a-z](?:Id|ID|Uuid|UUID|Guid)$"
)
"""The end of the name of a field that may identify a message: `id`, `event_id`, `messageId`."""
IDS_MIN: Final = 10
"""The fewest messages from which a message id is proposed."""
ID_LENGTH_MIN: Final = 6
"""The fewest characters of a message id."""
DAY_US: Final = 86_400_000_000
QUARTER_US: Final = 900_000_000
"""The step of the offsets of time zones in microseconds."""
LAG_US: Final = 120_000_000
"""The microseconds that a message may need, so that a constant offset is still one."""
SHARE: Final = 0.9
"""The share of messages that must agree."""
Message = tuple[str, bytes, int]
"""Topic, payload, and the time of storing in microseconds since 1970."""
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Proposal:
    """A rule as Python text, and the reason for it."""

    rule: str
    reason: str


@dataclass
class _Draft:
    """A rule to try, with what it is for."""

    arguments: Arguments
    why: str
    is_free: bool = False
    """True if several topics may give one metric: a profile, or a device from the payload."""
    group: int = -1
    """The number of the shape of topics that it is for, with its rules for online and offline."""

    @property
    def rule(self) -> Rule:
        return rule_of(self.arguments)


@dataclass
class _Topic:
    """The messages of one topic."""

    name: str
    messages: list[tuple[bytes, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.levels = tuple(self.name.split("/"))
        self.documents: list[tuple[Any, int]] = []

    def parse(self) -> None:
        """Parses the newest messages."""
        self.messages = self.messages[-MESSAGES_PER_TOPIC:]
        for payload, store_us in self.messages:
            try:
                self.documents.append((parse_json(payload), store_us))
            except DecodeError:
                self.documents.append((None, store_us))

    @property
    def objects(self) -> list[tuple[dict[str, Any], int]]:
        """The messages that are JSON objects."""
        return [(each, at) for each, at in self.documents if isinstance(each, dict)]


@dataclass
class _Use:
    """Results of a rule on messages."""

    devices: set[str] = field(default_factory=set)
    owners: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    """The topics of each device and metric."""
    messages: int = 0
    bad: int = 0
    """The messages with an error."""
    unread: int = 0
    """Those of them that have no reading at all."""

    def add(self, other: "_Use") -> None:
        """Adds what other messages have become."""
        self.devices |= other.devices
        for key, topics in other.owners.items():
            self.owners[key] |= topics
        self.messages += other.messages
        self.bad += other.bad
        self.unread += other.unread

    @property
    def has_two_topics(self) -> bool:
        """True if two topics give one metric of a device."""
        return any(len(topics) > 1 for topics in self.owners.values())


def infer(
    messages: Iterable[Message], profiles: Sequence[Profile] | None = None, zone: str | None = None
) -> list[Proposal]:
    """Returns the proposed rules, in the order in which they have to apply.

    `zone` is the zone of local times (default: that of this machine), if their offset agrees.
    """
    topics: dict[str, _Topic] = {}
    for name, payload, store_us in messages:
        if payload and not name.startswith(("$SYS", "$share", f"{SPARKPLUG}/")):
            topics.setdefault(name, _Topic(name)).messages.append((payload, store_us))
    for each in topics.values():
        each.parse()
    zone = local_zone() if zone is None else zone
    drafts = _by_profiles(topics, load_profiles() if profiles is None else profiles, zone)
    known = Topics([draft.rule for draft in drafts])
    left = [each for each in topics.values() if _no_reader(known, each.name)]
    drafts += _by_levels([each for each in left if not each.name.startswith("$")], zone)
    return _checked(drafts, list(topics.values()))


def _no_reader(known: Topics, name: str) -> bool:
    return not any(reader.matches(name) for reader in known.readers)


def _by_profiles(
    topics: Mapping[str, _Topic], profiles: Sequence[Profile], zone: str
) -> list[_Draft]:
    """Returns the rules of the makers whose topics are there, each only for topics that no earlier
    one has."""
    drafts: list[_Draft] = []
    payloads = {name: [each for each, _ in topic.messages[-5:]] for name, topic in topics.items()}
    for profile in profiles:
        for base in profile.bases(payloads):
            of_base = [
                _Draft(arguments, f"{profile.title}: {arguments.pop('why', '')}", is_free=True)
                for arguments in profile.rules_at(base)
            ]
            _resolve_zones(of_base, topics.values(), zone)
            drafts += of_base
        known = Topics([draft.rule for draft in drafts])
        payloads = {name: each for name, each in payloads.items() if _no_reader(known, name)}
    return drafts


def _resolve_zones(drafts: Sequence[_Draft], topics: Iterable[_Topic], zone: str) -> None:
    """Replaces each local time of a maker's rules by a time with its zone, or by none if the zone
    is not known. A rule without messages yet has the zone of the others."""
    names = [each.arguments["local_time"] for each in drafts if "local_time" in each.arguments]
    for name in dict.fromkeys(names):
        named = [each for each in drafts if each.arguments.get("local_time") == name]
        matches = [Topics([each.rule]).readers[0].matches for each in named]
        having = [each for each in topics if any(name in found for found, _ in each.objects)]
        of_all = [each for each in having if any(match(each.name) for match in matches)]
        for draft, match in zip(named, matches, strict=True):
            del draft.arguments["local_time"]
            own = [each for each in of_all if match(each.name)]
            draft.arguments |= _time_arguments(draft, name, own or of_all, zone)


def _time_arguments(draft: _Draft, name: str, topics: Sequence[_Topic], zone: str) -> Arguments:
    """Returns the arguments of a rule for a time that may be local, and explains them in `why`."""
    offset_us = _offset_of(name, topics)
    if offset_us == 0:
        return {"time": name}
    stored = [store_us for topic in topics for _, store_us in topic.objects]
    if offset_us is not None and {offset_us} == {_offset_at(zone, each) for each in stored}:
        return {"time": name, "zone": zone}
    if offset_us is None:
        draft.why += f"; {name} is no time that agrees with the broker's, which is used"
    else:
        draft.why += (
            f"; {name} is local time, {abs(offset_us) / 3.6e9:.2f} h "
            f"{'ahead of' if offset_us > 0 else 'behind'} the broker's, which is used: to use it, "
            f'write time="{name}" and its zone, such as zone="Europe/Berlin"'
        )
    return {"time": None, "drop": (*draft.arguments.get("drop", ()), name)}


def _offset_of(name: str, topics: Sequence[_Topic]) -> int | None:
    """Returns by how much the times of a field are ahead of the broker's, in quarters of an hour.

    None: they are no times, or do not agree.
    """
    offsets = []
    for topic in topics:
        for document, store_us in topic.objects:
            found = _inner(document, name)
            time_us = None if found is None else parse_time(found)
            if time_us is not None:
                offsets.append(time_us - store_us)
    if not offsets:
        return None
    step = round(max(offsets) / QUARTER_US) * QUARTER_US
    near = sum(abs(offset - step) <= LAG_US for offset in offsets)
    return step if near >= SHARE * len(offsets) and abs(step) < DAY_US else None


def _offset_at(zone: str, time_us: int) -> int | None:
    """Returns the offset that a zone had at a time, in microseconds, or None for no zone."""
    try:
        offset = datetime.fromtimestamp(time_us / 1e6, ZoneInfo(zone)).utcoffset()
    except (ZoneInfoNotFoundError, ValueError):
        return None
    return None if offset is None else round(offset.total_seconds() * 1_000_000)


def local_zone() -> str:
    """Returns the zone of this machine, or an empty text if it is not known."""
    name = os.environ.get("TZ", "").removeprefix(":")
    if not name:
        place = str(Path("/etc/localtime").resolve())
        name = place.partition("/zoneinfo/")[2]
    return "" if name in ("UTC", "Etc/UTC", "Universal", "Zulu") else name


def _by_levels(topics: Sequence[_Topic], zone: str) -> list[_Draft]:
    """Returns the rules for topics that no profile knows."""
    drafts: list[_Draft] = []
    groups: dict[tuple[str, int], list[_Topic]] = defaultdict(list)
    crossing = _same_below(topics)
    for each in topics:
        if each.levels[-1] not in STATUS_LEVELS:
            first = "+" if each.levels[0] in crossing else each.levels[0]
            groups[first, len(each.levels)].append(each)
    for number, (_, group) in enumerate(sorted(groups.items())):
        plain = Topics(DEFAULT_RULES)
        binary = [each for each in group if _read(plain, each).unread == len(each.messages)]
        drafts += [
            _Draft({"filter": each.name, "decode": "ignore"}, "binary payloads") for each in binary
        ]
        group = [each for each in group if each not in binary]
        draft = _of_group(group, zone) if group else None
        if draft is not None:
            own = [*_status_of(draft, topics), draft]
            drafts += [replace(each, group=number) for each in own]
    return drafts


def _same_below(topics: Sequence[_Topic]) -> set[str]:
    """Returns the first levels that have the same topics below them: these are the devices."""
    below: dict[str, set[_Levels]] = defaultdict(set)
    for each in topics:
        if len(each.levels) > 1:
            below[each.levels[0]].add(each.levels[1:])
    firsts: dict[_Levels, set[str]] = defaultdict(set)
    for first, rests in below.items():
        for rest in rests:
            firsts[rest].add(first)
    return {
        first
        for first, rests in below.items()
        if sum(len(firsts[rest]) > 1 for rest in rests) >= SHARE * len(rests)
    }


_Levels = tuple[str, ...]


def _of_group(group: Sequence[_Topic], zone: str) -> _Draft | None:
    """Returns the best rule for topics of one shape, or None: each is a device then."""
    common = _csv_of(group) or _roles_of(group, zone)
    best: tuple[tuple[bool, int], _Draft] | None = None
    for draft in _candidates(group, common):
        known, use = Topics(with_defaults([draft.rule])), _Use()
        for topic in group:
            use.add(_read(known, topic))
        if len(use.devices) < TOPICS_MIN or (not draft.is_free and _is_mixed(use)):
            continue
        rank = ("prefix" in draft.arguments, len(use.devices))
        if draft.is_free:
            return draft
        if best is None or rank < best[0]:
            best = rank, draft
    if best is not None:
        return best[1]
    if common.keys() - {"filter"} and common.get("why"):
        return _Draft({name: value for name, value in common.items() if name != "why"}
                      | {"filter": _filter(group)}, common["why"])  # fmt: skip
    return None


def _candidates(group: Sequence[_Topic], common: Arguments) -> Iterator[_Draft]:
    """Yields rules that differ in device and metric."""
    common = dict(common)
    why = common.pop("why", "")
    base = {"filter": _filter(group)} | common
    count = len(group[0].levels)
    is_object = all(len(each.objects) == len(each.messages) for each in group)
    if is_object:
        for names in DEVICE_FIELDS:
            if _has_several_devices(group, names):
                word = "field" if len(names) == 1 else "fields"
                yield _Draft(base | {"device": f"{word} {' '.join(names)}"}, why, is_free=True)
    if len(group) < TOPICS_MIN:
        return
    for level in range(count):
        of_level = {each.levels[level] for each in group}
        if len(of_level) < TOPICS_MIN:
            continue
        paths = {each.levels[: level + 1] for each in group}
        is_alone = len(of_level) == len(paths) or level == 0
        device = f"level {level + 1}" if is_alone else f"levels 1-{level + 1}"
        last = {} if level == count - 1 else {"metric": f"level {count}"}
        if is_object:
            yield _Draft(base | {"device": device}, why)
            if last:
                yield _Draft(base | {"device": device, "prefix": f"level {count}"}, why)
        else:
            yield _Draft(base | {"device": device} | last, why)


def _has_several_devices(group: Sequence[_Topic], names: Sequence[str]) -> bool:
    """Returns whether each message has some fields, and a topic has several values of them."""
    several = False
    for topic in group:
        values = {tuple(document.get(name) for name in names) for document, _ in topic.objects
                  if all(type(document.get(name)) in (str, int) for name in names)}  # fmt: skip
        found = sum(all(type(document.get(name)) in (str, int) for name in names)
                    for document, _ in topic.objects)  # fmt: skip
        if found < len(topic.messages):
            return False
        # A value of its own in each message is the message's, not the device's.
        several |= 1 < len(values) <= len(topic.messages) / 2 or (
            len(values) > 1 and names[0] not in ("id", "mac")
        )
    return several


def _roles_of(group: Sequence[_Topic], zone: str) -> Arguments:
    """Returns the fields of objects with a time or a counter under another name, and numbers in
    texts."""
    objects = [(document, at) for topic in group for document, at in topic.objects]
    if not objects:
        return {}
    found: Arguments = {}
    reasons = []
    usual = [name for name in TIME_FIELDS if any(name in each for each, _ in objects)]
    readable = [name for name in usual if _offset_is_near(name, objects)]
    if not readable:
        named = next((name for name in _names(objects) if _offset_is_near(name, objects)), None)
        if named is not None:
            draft = _Draft({}, "")
            # Times that differ are right, too: a phone sends positions of hours ago.
            is_own = _offset_of(named, group) is None
            found |= {"time": named} if is_own else _time_arguments(draft, named, group, zone)
            reasons.append(f"the time is {named}{draft.why}")
        elif usual:
            found["time"] = None
            reasons.append(f"{usual[0]} is no time of the message")
    elif _offset_of(readable[0], group):
        draft = _Draft({}, "")
        found |= _time_arguments(draft, readable[0], group, zone)
        reasons.append(f"the time is {readable[0]}{draft.why}")
    counters = [name for name in _names(objects) if _is_counter(name, group)
                and not _offset_is_near(name, objects)]  # fmt: skip
    if counters and counters[0] not in SEQUENCE_FIELDS:
        found["sequence"] = counters[0]
        reasons.append(f"{counters[0]} counts the messages")
    elif (
        not counters
        and any(name in each for name in SEQUENCE_FIELDS for each, _ in objects)
        and not any(_grows(name, topic) for name in SEQUENCE_FIELDS for topic in group)
    ):
        found["sequence"] = None
        reasons.append("the sequence does not count")
    if not any(name in each for name in ID_FIELDS for each, _ in objects):
        ids = [name for name in _names(objects) if _is_message_id(name, group)]
        if ids:
            found["id"] = ids[0]
            reasons.append(f"{ids[0]} differs in every message")
    texts = [name for name in _names(objects) if _is_number_text(name, objects)]
    if texts:
        found["numbers"] = tuple(texts)
        reasons.append(f"{len(texts)} fields are numbers in texts")
    return found | ({"why": "; ".join(reasons)} if reasons else {})


def _names(objects: Sequence[tuple[dict[str, Any], int]]) -> list[str]:
    """Returns the names of the fields of some objects, those inside of objects with dots."""
    names: dict[str, None] = {}
    for document, _ in objects[:MESSAGES_PER_TOPIC]:
        for name, value in document.items():
            names[name] = None
            if isinstance(value, dict):
                names |= dict.fromkeys(f"{name}.{each}" for each in value)
    return list(names)


def _inner(document: Mapping[str, Any], name: str) -> Any:
    if name in document:
        return document[name]
    first, dot, rest = name.partition(".")
    inner = document.get(first) if dot else None
    return inner.get(rest) if isinstance(inner, dict) else None


def _offset_is_near(name: str, objects: Sequence[tuple[dict[str, Any], int]]) -> bool:
    """Returns whether a field is a time within a day of storing, in nearly all messages."""
    near = 0
    for document, store_us in objects:
        found = _inner(document, name)
        time_us = parse_time(found) if type(found) in (int, float, str, dict) else None
        near += time_us is not None and abs(time_us - store_us) < DAY_US
    return near >= SHARE * len(objects)


def _values_of(name: str, topic: _Topic) -> list[int]:
    found = [_inner(document, name) for document, _ in topic.objects]
    return [each for each in found if type(each) is int]


def _is_counter(name: str, group: Sequence[_Topic]) -> bool:
    """Returns whether a field grows by one with each message of a topic, in messages enough."""
    steps = [
        after - before for topic in group for before, after in pairwise(_values_of(name, topic))
    ]
    return len(steps) >= 5 and sum(step == 1 for step in steps) >= SHARE * len(steps)


def _grows(name: str, topic: _Topic) -> bool:
    """Returns whether the last number of a topic is greater than the first, or it has few."""
    values = _values_of(name, topic)
    return bool(values) and (len(values) < 3 or values[-1] > values[0])


def _is_message_id(name: str, group: Sequence[_Topic]) -> bool:
    """Returns whether a field identifies the message: a text that messages share only if they are
    equal."""
    if not _ID_NAME.search(name):
        return False
    ids = [_inner(document, name) for topic in group for document, _ in topic.objects]
    payloads = {payload for topic in group for payload, _ in topic.messages}
    return (
        len(payloads) >= IDS_MIN
        and all(isinstance(each, str) and len(each) >= ID_LENGTH_MIN for each in ids)
        and len(set(ids)) == len(payloads)
        and not _offset_is_near(name, [each for topic in group for each in topic.objects])
    )


def _is_number_text(name: str, objects: Sequence[tuple[dict[str, Any], int]]) -> bool:
    """Returns whether a field is a text that is a number in all messages, and no identifier."""
    values = [_inner(document, name) for document, _ in objects]
    texts = [each for each in values if isinstance(each, str)]
    return (
        len(texts) >= 3
        and len(texts) == sum(each is not None for each in values)
        and all(type(plain_value(text)) in (int, float) for text in texts)
        and (any("." in text for text in texts) or len(set(texts)) > len(texts) / 2)
        and not _offset_is_near(name, objects)
    )


def _csv_of(group: Sequence[_Topic]) -> Arguments:
    """Returns the columns of lines with the same number of cells, most of them numbers."""
    lines = [
        (line, store_us)
        for topic in group
        for payload, store_us in topic.messages
        for line in payload.decode(errors="replace").splitlines()
    ]
    if any(topic.objects for topic in group):
        return {}
    for delimiter in (";", ",", "\t"):
        counts = {line.count(delimiter) for line, _ in lines}
        if len(counts) != 1 or not lines or counts == {0}:
            continue
        cells = [line.split(delimiter) for line, _ in lines]
        numbers = sum(plain_value(cell.strip()) is not None for line in cells for cell in line)
        if numbers < sum(map(len, cells)) / 2:
            continue
        is_time = all(
            (time_us := parse_time(line[0].strip())) is not None and abs(time_us - at) < DAY_US
            for line, (_, at) in zip(cells, lines, strict=True)
        )
        columns = tuple(f"column_{number}" for number in range(1, len(cells[0]) + 1))
        if is_time:
            columns = ("ts", *columns[1:])
        more = {"delimiter": delimiter} if delimiter != "," else {}
        why = "lines of cells: name the columns, `_` leaves one out"
        return {"decode": "csv", "columns": columns, "why": why} | more
    return {}


def _status_of(draft: _Draft, topics: Sequence[_Topic]) -> list[_Draft]:
    """Returns the rules by which online and offline are of the same devices."""
    rule = draft.rule
    if rule.level_range() is None:
        return []
    device_of = rule.device_of()
    matches = Topics([rule]).readers[0].matches
    names = {device_of(each.name, "") for each in topics if matches(each.name)}
    some: dict[tuple[str, int], list[_Topic]] = defaultdict(list)
    for each in topics:
        if each.levels[-1] in STATUS_LEVELS:
            try:
                if device_of(each.name, "") in names:
                    some[each.levels[-1], len(each.levels)].append(each)
            except DecodeError:
                continue
    return [
        _Draft(
            {"filter": _filter(group), "decode": STATUS_LEVELS[last], "device": rule.device},
            "online or offline",
        )
        for (last, _), group in sorted(some.items())
    ]


def _filter(topics: Sequence[_Topic]) -> str:
    levels = zip(*(each.levels for each in topics), strict=True)
    return "/".join(names[0] if len(set(names)) == 1 else "+" for names in levels)


def _is_mixed(use: _Use) -> bool:
    """Returns whether two topics give one metric of a device, or no two devices share a metric."""
    return use.has_two_topics or len(use.owners) == len({metric for _, metric in use.owners})


def _read(known: Topics, topic: _Topic) -> _Use:
    """Returns what the messages of a topic become."""
    use = _Use(messages=len(topic.messages))
    reader = known[topic.name].reader
    if reader is None:
        return use
    for payload, store_us in topic.messages:
        message = TableMessage(topic.name, topic.name, payload, len(payload), 0, 0, store_us, None,
                               None, 0, 0, 2)  # fmt: skip
        try:
            device, decoded = reader.read(message, payload)
        except DecodeError:
            use.bad += 1
            use.unread += 1
            continue
        use.bad += decoded.errors is not None
        use.devices.add(device)
        for metric in decoded.names:
            if metric != ONLINE:
                use.owners[device, metric].add(topic.name)
    return use


def _checked(drafts: Sequence[_Draft], topics: Sequence[_Topic]) -> list[Proposal]:
    """Returns the proposals with what each makes of the messages.

    One that quarantines what the default rules read, or mixes topics, is left out.
    """
    kept = list(drafts)
    plain = Topics(DEFAULT_RULES)
    while True:
        known = Topics(with_defaults([draft.rule for draft in kept]))
        uses = [_Use() for _ in known.readers]
        bad_before = [0] * len(uses)
        for topic in topics:
            matching = (at for at, each in enumerate(known.readers) if each.matches(topic.name))
            index = next(matching, None)
            if index is not None:
                uses[index].add(_read(known, topic))
                bad_before[index] += _read(plain, topic).bad
        wrong = [draft for draft, use, before in zip(kept, uses, bad_before, strict=False)
                 if not draft.is_free and (use.bad > before or use.has_two_topics)]  # fmt: skip
        if not wrong and not _widen(kept, uses):
            break
        kept = [draft for draft in kept if draft not in wrong]
    return [
        Proposal(_text(draft.arguments), _reason(draft, use))
        for draft, use in zip(kept, uses, strict=False)
    ]


def _widen(drafts: Sequence[_Draft], uses: Sequence[_Use]) -> bool:
    """Gives the devices of a rule their longer names if another rule has a device and metric of the
    same name: the door of one system is not that of another. Returns whether a rule has changed."""
    first: dict[tuple[str, str], int] = {}
    for at, use in enumerate(uses):
        for key in use.owners:
            other = first.setdefault(key, at)
            if other == at:
                continue
            for each in (at, other):
                draft = drafts[each] if each < len(drafts) else None
                device = "" if draft is None else draft.arguments.get("device", "")
                if draft is None or draft.is_free or not device.startswith("level "):
                    continue
                if device == "level 1":
                    continue
                for same in drafts:
                    if same.group == draft.group:
                        same.arguments["device"] = device.replace("level ", "levels 1-")
                return True
    return False


def _reason(draft: _Draft, use: _Use) -> str:
    parts = [draft.why] if draft.why else []
    if draft.arguments.get("decode") == "ignore":
        parts.append(f"{use.messages:,} messages are left out")
    elif use.messages:
        devices = sorted(use.devices)
        parts.append(f"{len(devices):,} devices, such as {', '.join(devices[:2])}")
        metrics = sorted({metric for _, metric in use.owners})
        if metrics:
            parts.append(f"{len(metrics):,} metrics, such as {', '.join(metrics[:3])}")
        if use.bad:
            parts.append(f"{use.bad:,} of {use.messages:,} messages have errors")
    else:
        parts.append("no message yet")
    return "; ".join(parts)


def _text(arguments: Arguments) -> str:
    more = "".join(f", {name}={_quoted(value)}" for name, value in arguments.items()
                   if name != "filter")  # fmt: skip
    return f"Rule({_quoted(arguments['filter'])}{more})"


def _quoted(value: Any) -> str:
    text = repr(value)
    is_plain = isinstance(value, str) and '"' not in text and "\\" not in text
    return f'"{value}"' if is_plain else text


def tables_file(proposals: Sequence[Proposal], seen: Mapping[str, int]) -> str:
    """Returns a Python file for `--tables`. `seen` are counts of messages and topics."""
    lines = [
        f'"""Rules proposed from {seen["messages"]:,} messages of {seen["topics"]:,} topics."""',
        "",
        "from holdfast.pipeline.tables import Rule, readings_table",
        "",
        "TABLES = [",
        "    readings_table(",
        "        (",
    ]
    for each in proposals:
        # A topic may have a line break, which would end the comment.
        reason = "".join(c if c.isprintable() else "?" for c in each.reason)
        lines += [f"            # {reason}", f"            {each.rule},"]
    return "\n".join([*lines, "        )", "    )", "]", ""])
