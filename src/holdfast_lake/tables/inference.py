"""Rules proposed from the messages of a log, for the file that `--tables` takes.

First the profiles of makers (profiles.py), then the levels of the topics that are left. Each
proposal is tried on the messages: no two topics may give the same metric of one device, and nothing
may be quarantined that the default rules read. A wrong rule mixes devices, and nobody would notice;
without a rule each topic is a device.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast_lake.decoders.decoded import DecodeError
from holdfast_lake.decoders.text_payload import ONLINE
from holdfast_lake.decoders.units import UnitRules
from holdfast_lake.tables.columns import TableMessage
from holdfast_lake.tables.device_fields import (
    DEVICE_FIELDS,
    OFTEN_OTHERS,
    Mixture,
    has_several_devices,
    joined,
    mixture_of,
    other_device_fields,
)
from holdfast_lake.tables.field_roles import (
    SHARE,
    Arguments,
    TopicMessages,
    csv_of,
    discovered_units,
    is_picture,
    kinds_of,
    local_zone,
    roles_of,
    time_arguments,
)
from holdfast_lake.tables.profiles import BASES_MAX, Profile, load_profiles, rule_of
from holdfast_lake.tables.rules import (
    DEFAULT_RULES,
    SPARKPLUG,
    STATUS_LEVELS,
    Rule,
    with_defaults,
)
from holdfast_lake.tables.topics import Reader, Topics

TOPICS_MIN: Final = 2
"""The fewest topics of one shape from which levels are proposed."""
FAMILIES_MAX: Final = 1_000_000
"""The most rules of profiles. Their families have the numbers below 0, groups those from 0 on."""
DISCOVERED_MAX: Final = 100
"""The most units of a rule that were announced to Home Assistant."""
PRESENCE: Final = "online or offline"
Message = tuple[str, bytes, int]
"""Topic, payload, and the time of storing in microseconds since 1970."""


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
    """The number of the shape of topics that it is for, with its rules for online and offline, or
    of the base of its profile. Below 0: a profile."""

    units: dict[str, set[str]] = field(default_factory=dict)
    """The units that devices have announced, by metric."""

    @property
    def rule(self) -> Rule:
        return rule_of(self.arguments)


@dataclass
class _Use:
    """Results of a rule on messages."""

    devices: set[str] = field(default_factory=set)
    owners: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    """The topics of each device and metric."""
    units: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The units of each metric."""
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
        for metric, units in other.units.items():
            self.units[metric] |= units
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
    topics: dict[str, TopicMessages] = {}
    for name, payload, store_us in messages:
        if payload and not name.startswith(("$SYS", "$share", f"{SPARKPLUG}/")):
            topics.setdefault(name, TopicMessages(name)).messages.append((payload, store_us))
    for each in topics.values():
        each.parse()
    zone = local_zone() if zone is None else zone
    drafts = _by_profiles(topics, load_profiles() if profiles is None else profiles, zone)
    known = Topics([draft.rule for draft in drafts])
    left = [each for each in topics.values() if _no_reader(known, each.name)]
    drafts += _by_levels([each for each in left if not each.name.startswith("$")], zone)
    _add_discovered(drafts, topics)
    return _checked(drafts, list(topics.values()))


def mixtures(
    topics: Mapping[str, TopicMessages], clients: Mapping[str, Sequence[str]]
) -> list[Mixture]:
    """Returns the topics that mix the messages of several devices, if no rule decides them. Topics
    of a maker are judged by its rules only.

    `clients` has the client id of each message of a topic.
    """
    drafts = _by_profiles(topics, load_profiles(), "")
    known = Topics([draft.rule for draft in drafts])
    found = []
    for name, topic in topics.items():
        reader = next((each for each in known.readers if each.matches(name)), None)
        if reader is None:
            found.append(mixture_of(topic, clients[name]))
        elif reader.fields.device and len(devices := _read(reader, topic).devices) > 1:
            draft = drafts[known.readers.index(reader)]
            fields = " ".join(reader.fields.device)
            some = {at: draft.arguments[at] for at in ("filter", "device")}
            found.append(Mixture(some, fields, (*sorted(devices),), (name,), len(topic.messages)))
    return joined(filter(None, found))


def _add_discovered(drafts: list[_Draft], topics: Mapping[str, TopicMessages]) -> None:
    """Adds the units that devices have announced to Home Assistant, where all topics of a rule
    agree."""
    known = Topics([draft.rule for draft in drafts])
    for name, fields in discovered_units(topics.values()).items():
        reader = known[name].reader
        if reader is None and name in topics and _no_reader(known, name):
            drafts.append(_Draft({"filter": name}, "units by the discovery of Home Assistant"))
            known = Topics([draft.rule for draft in drafts])
            reader = known[name].reader
        if reader is None:
            continue
        draft = drafts[known.readers.index(reader)]
        with suppress(DecodeError):  # the topic has fewer levels than the rule wants
            for path, unit in fields.items():
                is_one = path == (reader.rule.value or "")
                metric = reader.metric_of(name) if is_one else path
                draft.units.setdefault(metric, set()).add(unit)
    for draft in drafts:
        given = draft.arguments.get("units", {})
        certain = {metric: unit for metric, (unit, *others) in draft.units.items() if not others}
        own = UnitRules(given)
        more = [metric for metric in certain if not own.has(metric)][:DISCOVERED_MAX]
        if more:
            draft.arguments["units"] = {**given, **{metric: certain[metric] for metric in more}}


def _no_reader(known: Topics, name: str) -> bool:
    return not any(reader.matches(name) for reader in known.readers)


def _by_profiles(
    topics: Mapping[str, TopicMessages], profiles: Sequence[Profile], zone: str
) -> list[_Draft]:
    """Returns the rules of the makers whose topics are there, each only for topics that no earlier
    one has."""
    drafts: list[_Draft] = []
    payloads = {name: [each for each, _ in topic.messages[-5:]] for name, topic in topics.items()}
    for profile in profiles:
        bases = profile.bases(payloads)
        first = len(drafts)
        for base in _merged(profile, bases, payloads):
            family = len(drafts) - FAMILIES_MAX
            of_base = [
                _Draft(arguments, profile.reason(arguments.pop("why", "")), True, family)
                for arguments in profile.rules_at(base)
            ]
            _resolve_zones(of_base, topics.values(), zone)
            drafts += of_base
        if bases:
            known = Topics([draft.rule for draft in drafts[first:]])
            payloads = {name: each for name, each in payloads.items() if _no_reader(known, name)}
    return drafts


def _merged(profile: Profile, bases: Sequence[str], topics: Iterable[str]) -> list[str]:
    """Returns bases in which a `+` stands for several, if it takes no other topic: a node that is
    new next week then has its rules."""
    found: dict[str, list[str]] = defaultdict(list)
    for base in bases:
        above, slash, _ = base.rpartition("/")
        found[f"{above}{slash}+"].append(base)
    result = []
    for pattern, some in found.items():
        rules = Topics([rule_of(each) for each in profile.rules_at(pattern)])
        known, depth = {tuple(base.split("/")) for base in some}, len(pattern.split("/"))
        is_safe = len(some) > 1 and all(
            tuple(name.split("/")[:depth]) in known or _no_reader(rules, name) for name in topics
        )
        result += [pattern] if is_safe else some
    return result[:BASES_MAX]


def _resolve_zones(drafts: Sequence[_Draft], topics: Iterable[TopicMessages], zone: str) -> None:
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
            found, why = time_arguments(name, own or of_all, zone)
            drops = (*draft.arguments.get("drop", ()), *found.pop("drop", ()))
            draft.arguments |= found | ({"drop": drops} if drops else {})
            draft.why += why


def _by_levels(topics: Sequence[TopicMessages], zone: str) -> list[_Draft]:
    """Returns the rules for topics that no profile knows."""
    drafts: list[_Draft] = []
    groups: dict[tuple[str, int, str], list[TopicMessages]] = defaultdict(list)
    crossing = _same_below(topics)
    for each in topics:
        if not _may_be_presence(each):
            first = "+" if each.levels[0] in crossing else each.levels[0]
            groups[first, len(each.levels), each.decode].append(each)
    present = {each.levels[:-1] for each in topics if _may_be_presence(each)}
    # Filters of text topics may have wildcards, so those of binary documents come before.
    in_order = sorted(groups.items(), key=lambda item: (not item[0][2], item[0]))
    for number, ((_, _, decode), group) in enumerate(in_order):
        if not decode:
            unread = [each for each in group if _read_plainly(each).unread == len(each.messages)]
            drafts += [
                _Draft({"filter": each.name, "decode": "ignore"}, "binary payloads")
                for each in unread
                if all(is_picture(payload) for payload, _ in each.messages)
            ]
            group = [each for each in group if each not in unread]
        draft = _of_group(group, zone, present) if group else None
        if draft is not None:
            own = [*_status_of(draft, topics, group), draft]
            drafts += [replace(each, group=number) for each in own]
        elif decode:
            drafts += [_Draft({"filter": each.name, "decode": decode}, "") for each in group]
    return drafts


def _may_be_presence(topic: TopicMessages) -> bool:
    """Returns whether a topic may say online or offline. A gateway's list of tags does not."""
    is_listed = all(isinstance(document, list) for document, _ in topic.documents)
    return topic.levels[-1] in STATUS_LEVELS and not is_listed


def _same_below(topics: Sequence[TopicMessages]) -> set[str]:
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


def _of_group(group: Sequence[TopicMessages], zone: str, present: Set[_Levels]) -> _Draft | None:
    """Returns the best rule for topics of one shape, or None: each is a device then. `present` are
    the levels above online or offline."""
    common = csv_of(group) or roles_of(group, zone)
    above = {each.levels[:-1] for each in group}
    if above <= present and not any(each.objects for each in group) and not common:
        count = len(group[0].levels)
        device = f"levels 1-{count - 1}" if count > 2 else "level 1"
        arguments = {"filter": _filter(group), "device": device, "metric": f"level {count}"}
        return _Draft(arguments, "a device for each that is online or offline")
    if group[0].decode:
        common["decode"] = group[0].decode
    documents = [document for topic in group for document, _ in topic.documents]
    if group[0].decode == "senml" and all("bn" in document[0] for document in documents):
        arguments = {"filter": _filter(group), "decode": "senml", "device": "field bn"}
        return _Draft(arguments, "SenML: a device for each base name", is_free=True)
    best: tuple[tuple[bool, bool, int], _Draft] | None = None
    for draft in _candidates(group, common):
        # Objects have names of their own. Beside plain values they need those of their topics.
        has_longer = "prefix" in draft.arguments and "metric" not in draft.arguments
        if best is not None and not draft.is_free and best[0] < (False, has_longer):
            continue
        reader, use = Reader(draft.rule), _Use()
        for topic in group:
            use.add(_read(reader, topic))
        if len(use.devices) < TOPICS_MIN or (
            not draft.is_free
            and (_is_mixed(use) or not _names_all(draft.rule, group, len(use.devices)))
        ):
            continue
        has_several = any(len(units) > 1 for units in use.units.values())
        rank = (has_several, has_longer, len(use.devices))
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


def _candidates(group: Sequence[TopicMessages], common: Arguments) -> Iterator[_Draft]:
    """Yields rules that differ in device and metric."""
    common = dict(common)
    why = common.pop("why", "")
    base = {"filter": _filter(group)} | common
    count = len(group[0].levels)
    is_object = all(len(each.objects) == len(each.messages) for each in group)
    if is_object:
        fields = kinds_of([each for topic in group for each in topic.objects])
        for names in (*DEVICE_FIELDS, *other_device_fields(fields)):
            word = "field" if len(names) == 1 else "fields"
            device = f"{word} {' '.join(names)}"
            if device != common.get("metric") and has_several_devices(group, names):
                # Two rooms may have a sensor of one name. The other fields are of one device.
                is_free = names[0] in ("id", "mac") or names[0] not in OFTEN_OTHERS
                yield _Draft(base | {"device": device}, why, is_free=is_free)
    if len(group) < TOPICS_MIN:
        return
    for level in range(count):
        of_level = {each.levels[level] for each in group}
        if len(of_level) < TOPICS_MIN or "" in of_level:
            continue
        paths = {each.levels[: level + 1] for each in group}
        is_alone = len(of_level) == len(paths) or level == 0
        device = f"level {level + 1}" if is_alone else f"levels 1-{level + 1}"
        has_name = (
            level == count - 1 or "metric" in base or "" in {each.levels[-1] for each in group}
        )
        below = {each.levels[level + 1 : -1] for each in group}
        rest = f"level {count}" if len(below) == 1 else f"levels {level + 2}-{count}"
        last = {} if has_name else {"metric": rest}
        has_parts = any(isinstance(document, dict | list)
                        for each in group for document, _ in each.documents)  # fmt: skip
        if is_object:
            yield _Draft(base | {"device": device}, why)
            if last:
                yield _Draft(base | {"device": device, "prefix": rest}, why)
        elif last or level == 0:
            # Under one name the objects need no other, also if some are broken.
            if last and has_parts and len({each.levels[level + 1 :] for each in group}) > 1:
                yield _Draft(base | {"device": device, "prefix": rest} | last, why)
            yield _Draft(base | {"device": device} | last, why)
        else:
            above = "level 1" if level == 1 else f"levels 1-{level}"
            parts = f', prefix="level {count}"' if has_parts else ""
            one = f'if it is one device, device="{above}", metric="level {count}"{parts}'
            yield _Draft(base | {"device": device}, f"{why}; {one}" if why else one)


def _status_of(
    draft: _Draft, topics: Sequence[TopicMessages], group: Sequence[TopicMessages]
) -> list[_Draft]:
    """Returns the rules by which online and offline are of the same devices as a group of
    topics."""
    rule = draft.rule
    if rule.level_range() is None:
        return []
    device_of = rule.device_of()
    names = {device_of(each.name, "") for each in group} - STATUS_LEVELS.keys()
    some: dict[tuple[str, int], list[TopicMessages]] = defaultdict(list)
    takes = Topics([rule]).readers[0].matches
    taken = []
    for each in topics:
        if _may_be_presence(each):
            try:
                if device_of(each.name, "") in names:
                    some[each.levels[-1], len(each.levels)].append(each)
                    continue
            except DecodeError:
                continue
            if takes(each.name):  # the will of a station is none of its metrics
                taken.append(each)
    places = [([each], "levels 1--2") for each in taken]
    places += [(group, rule.device) for _, group in sorted(some.items())]
    drafts = []
    for some_topics, device in places:
        last = some_topics[0].levels[-1]
        arguments = {"filter": _filter(some_topics), "decode": STATUS_LEVELS[last],
                     "device": device}  # fmt: skip
        if STATUS_LEVELS[last] == "presence":
            # The 2 of an inverter that is `available` is no `value` beside its other metrics.
            is_alike = len(some_topics[0].levels) == len(group[0].levels) and last[:1] != "$"
            named = str(draft.arguments.get("metric", "")) if is_alike else ""
            arguments["metric"] = named if named.startswith("level") else last.strip("$")
        drafts.append(_Draft(arguments, PRESENCE))
    return drafts


def _filter(topics: Sequence[TopicMessages]) -> str:
    levels = zip(*(each.levels for each in topics), strict=True)
    return "/".join(names[0] if len(set(names)) == 1 else "+" for names in levels)


def _names_all(rule: Rule, group: Sequence[TopicMessages], devices: int) -> bool:
    """Returns whether device and metric have each level of the topics that may vary.

    The messages may not show it. Counter-example: a sensor of one value, zwave/+/+/49/0/+, has two
    next week, and both are the metric `value` of one device. Levels above many devices, none of
    which has the name of another, are only their places.
    """
    levels = rule.filter.split("/")
    named: set[int] = set()
    for text in filter(None, (rule.device, rule.metric, rule.prefix)):
        begin, end = rule.level_range(text) or (1, 0)
        places = [place if place > 0 else len(levels) + 1 + place for place in (begin, end)]
        named |= {*range(places[0], places[1] + 1)} if end else set()
    first = (rule.level_range() or (0, 0))[0]
    if first > 1 and devices > 2 * len({each.levels[: first - 1] for each in group}):
        named |= set(range(1, first))
    return not first or all(at in named for at, each in enumerate(levels, 1) if each == "+")


def _is_mixed(use: _Use) -> bool:
    """Returns whether two topics give one metric of a device, or no two devices share a metric.

    Metrics that no two devices share are right if their units show that they differ.
    """
    units = [unit for units in use.units.values() for unit in units]
    is_measured = len(set(units)) > 1 and len(units) == len(use.units)
    return use.has_two_topics or (
        not is_measured and len(use.owners) == len({metric for _, metric in use.owners})
    )


def _read(reader: Reader | None, topic: TopicMessages) -> _Use:
    """Returns what the messages of a topic become by a rule. The topic keeps it: many rules are
    tried, and each again beside the others."""
    if reader is None:
        return _Use(messages=len(topic.messages))
    known: _Use | None = topic.uses.get(reader.rule)
    if known is not None:
        return known
    use = topic.uses[reader.rule] = _Use(messages=len(topic.messages))
    metrics: dict[str, set[str]] = defaultdict(set)
    for payload, store_us in topic.messages:
        message = TableMessage(topic.name, topic.name, payload, len(payload), 0, 0, store_us,
                               "the client id", None, 0, 0, 2)  # fmt: skip
        try:
            device, decoded = reader.read(message, payload)
        except DecodeError:
            use.bad += 1
            use.unread += 1
            continue
        use.bad += decoded.errors is not None
        metrics[device].update(decoded.names)
        for at, unit in (decoded.units or {}).items():
            use.units[decoded.names[at]].add(unit)
    use.devices = set(metrics)
    for device, names in metrics.items():
        for metric in names:
            # A device may be reported on several topics, but not on two of one kind.
            name = metric if metric != ONLINE else f"{ONLINE} {topic.levels[-1]}"
            use.owners[device, name].add(topic.name)
    return use


_PLAIN: Final = Topics(DEFAULT_RULES)


def _read_plainly(topic: TopicMessages) -> _Use:
    """Returns what the messages of a topic become by the default rules."""
    return _read(next((each for each in _PLAIN.readers if each.matches(topic.name)), None), topic)


def _checked(drafts: Sequence[_Draft], topics: Sequence[TopicMessages]) -> list[Proposal]:
    """Returns the proposals with what each makes of the messages.

    One that quarantines what the default rules read, or mixes topics, is left out.
    """
    kept = list(drafts)
    while True:
        known = Topics(with_defaults([draft.rule for draft in kept]))
        uses = [_Use() for _ in known.readers]
        bad_before = [0] * len(uses)
        for topic in topics:
            matching = (at for at, each in enumerate(known.readers) if each.matches(topic.name))
            index = next(matching, None)
            if index is not None:
                reader = known.readers[index]
                uses[index].add(_read(None if reader.decoder == "ignore" else reader, topic))
                bad_before[index] += _read_plainly(topic).bad
        wrong = [draft for draft, use, before in zip(kept, uses, bad_before, strict=False)
                 if not draft.is_free and (use.bad > before or use.has_two_topics)]  # fmt: skip
        if not wrong and not _widen(kept, uses):
            break
        # Online and offline are of the devices of the group's other rule.
        groups = {each.group for each in wrong if each.why != PRESENCE and each.group >= 0}
        kept = [each for each in kept if each not in wrong and each.group not in groups]
    return [
        Proposal(rule_text(draft.arguments), _reason(draft, use))
        for draft, use in zip(kept, uses, strict=False)
    ]


def _widen(drafts: Sequence[_Draft], uses: Sequence[_Use]) -> bool:
    """Gives the devices of a rule their longer names if another rule has a device of the same name
    elsewhere: the desk of one system is not that of another. Returns whether a rule has changed."""
    first: dict[str, tuple[int, set[_Levels]]] = {}
    for at, (draft, use) in enumerate(zip(drafts, uses, strict=False)):
        _, end = draft.rule.level_range() or (0, 0)
        paths: dict[str, set[_Levels]] = defaultdict(set)
        for (device, _), topics in use.owners.items() if end else ():
            paths[device] |= {_path(topic, end) for topic in topics}
        for device, own in paths.items():
            other, theirs = first.setdefault(device, (at, own))
            if drafts[other].group == draft.group or own & theirs:
                continue
            pair = sorted((draft, drafts[other]), key=lambda each: each.is_free)
            changed = [_lengthen(drafts, each.group) for each in pair if each.group != -1
                       if each.is_free == pair[0].is_free]  # fmt: skip
            if any(changed) or (not pair[0].is_free and _lengthen(drafts, pair[1].group)):
                return True
    return False


def _path(topic: str, end: int) -> "_Levels":
    """Returns the levels of a topic up to the last one of its device."""
    levels = tuple(topic.split("/"))
    return levels[: end if end > 0 else len(levels) + end + 1]


def _lengthen(drafts: Sequence[_Draft], group: int) -> bool:
    """Gives the devices of a group of rules all levels from the first one on. It returns False if
    they have them, or if other topics of a maker begin in another way: `tele/x` and `stat/x`."""
    some = [each for each in drafts if each.group == group]
    named = {id(each): each.rule.level_range() or (1, 1) for each in some}
    above = {tuple(each.rule.filter.split("/")[: begin - 1]) for each in some
             if (begin := named[id(each)][0]) > 1}  # fmt: skip
    if not above or (group < 0 and len(above) > 1):
        return False
    for each in some:
        begin, end = named[id(each)]
        if begin > 1:
            each.arguments["device"] = f"levels 1-{end}"
    return True


def _reason(draft: _Draft, use: _Use) -> str:
    parts = [draft.why] if draft.why else []
    if draft.arguments.get("decode") == "ignore":
        parts.append(f"{use.messages:,} messages are left out")
    elif use.messages:
        devices = sorted(use.devices)
        parts.append(f"{_count(devices, 'device')}, such as {', '.join(devices[:2])}")
        metrics = sorted({each for _, each in use.owners if not each.startswith(f"{ONLINE} ")})
        if metrics:
            some = [f"{each} ({', '.join(sorted(use.units[each]))})" if each in use.units else each
                    for each in metrics[:3]]  # fmt: skip
            parts.append(f"{_count(metrics, 'metric')}, such as {', '.join(some)}")
        if use.bad:
            parts.append(f"{use.bad:,} of {use.messages:,} messages have errors")
    else:
        parts.append("no message yet")
    return "; ".join(parts)


def _count(some: Sequence[str], what: str) -> str:
    return f"{len(some):,} {what}{'s' * (len(some) != 1)}"


def rule_text(arguments: Arguments) -> str:
    """Returns a rule as Python text."""
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
        "from holdfast_lake.tables import Rule, readings_table",
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
