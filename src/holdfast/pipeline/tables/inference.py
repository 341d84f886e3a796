"""Rules proposed from the messages of a log, for the file that `--tables` takes.

The proposals follow the conventions of Tasmota, Zigbee2MQTT and Home Assistant, and otherwise the
levels of the topics: the level that tells most topics apart is the device, and the last level of
topics with single values is the metric.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from holdfast.pipeline.decoders.text_payload import number
from holdfast.pipeline.tables.rules import SPARKPLUG, STATUS_LEVELS

TOPICS_MIN: Final = 2
"""The fewest topics of one shape from which a rule is proposed."""
DEVICE_FIELDS: Final = ("device_id", "deviceId", "device")
_TASMOTA: Final = ("tele", "stat", "cmnd")
_TASMOTA_LAST: Final = frozenset({"STATE", "SENSOR", "LWT", "RESULT", "INFO1", "INFO2", "INFO3"})
_Levels = tuple[str, ...]


@dataclass(frozen=True)
class Proposal:
    """A rule as Python text, and the reason for it."""

    rule: str
    reason: str


@dataclass
class _Topic:
    """The messages of one topic, as far as the proposals need them."""

    levels: _Levels
    is_object: bool = True
    is_number: bool = True
    fields: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The values of the fields that may name a device."""

    def add(self, payload: bytes) -> None:
        try:
            document: Any = msgspec.json.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            document = None
        self.is_object &= type(document) is dict
        text = payload[:64].decode(errors="replace").strip()
        self.is_number &= number(text) is not None
        if type(document) is dict:
            for name in DEVICE_FIELDS:
                if type(document.get(name)) is str:
                    self.fields[name].add(document[name])


def infer(messages: Iterable[tuple[str, bytes]]) -> list[Proposal]:
    """Return the proposed rules, in the order in which they have to apply."""
    topics: dict[str, _Topic] = {}
    for topic, payload in messages:
        if payload and not topic.startswith(("$", f"{SPARKPLUG}/")):
            if topic not in topics:
                topics[topic] = _Topic(tuple(topic.split("/")))
            topics[topic].add(payload)
    left = list(topics.values())
    found: list[Proposal] = []
    for convention in (_tasmota, _zigbee2mqtt, _home_assistant):
        proposals, left = convention(left)
        found += proposals
    shapes: dict[tuple[str, int, bool], list[_Topic]] = defaultdict(list)
    for each in left:
        if each.levels[-1] not in STATUS_LEVELS:
            shapes[each.levels[0], len(each.levels), each.is_object].append(each)
    for _, some in sorted(shapes.items()):
        if len(some) >= TOPICS_MIN:
            found += _objects(some) if some[0].is_object else _values(some)
    return found


def _tasmota(topics: Sequence[_Topic]) -> tuple[list[Proposal], list[_Topic]]:
    own = [each for each in topics if len(each.levels) == 3 and each.levels[0] in _TASMOTA]
    if not any(each.levels[2] in _TASMOTA_LAST for each in own):
        return [], list(topics)
    devices = len({each.levels[1] for each in own})
    return [
        Proposal('Rule("cmnd/#", decode="ignore")', "Tasmota: commands are no readings"),
        Proposal('Rule("tele/+/LWT", decode="status", device="level 2")', "Tasmota: online"),
        *(
            Proposal(
                f'Rule("{first}/+/+", device="level 2", time=None)',
                f"Tasmota: {devices} devices; its Time has no zone, so the broker's time is used",
            )
            for first in ("tele", "stat")
        ),
    ], [each for each in topics if each not in own]


def _zigbee2mqtt(topics: Sequence[_Topic]) -> tuple[list[Proposal], list[_Topic]]:
    bases = sorted(
        {each.levels[0] for each in topics if each.levels[1:3] in (("bridge", "state"),
                                                                  ("bridge", "info"))}
    )  # fmt: skip
    found = []
    for base in bases:
        found += [
            Proposal(f'Rule({f"{base}/bridge/#"!r}, decode="ignore")', "Zigbee2MQTT: no readings"),
            Proposal(
                f'Rule({f"{base}/+/availability"!r}, decode="status", device="level 2")',
                "Zigbee2MQTT: online",
            ),
            Proposal(
                f'Rule({f"{base}/+"!r}, decode="json", device="level 2", time="last_seen")',
                "Zigbee2MQTT: a device for each friendly name",
            ),
        ]
    return found, [each for each in topics if each.levels[0] not in bases]


def _home_assistant(topics: Sequence[_Topic]) -> tuple[list[Proposal], list[_Topic]]:
    own = [each for each in topics if each.levels[0] == "homeassistant"]
    found = [
        Proposal(
            'Rule("homeassistant/#", decode="ignore")', "Home Assistant: discovery is no reading"
        )
    ]
    return (found if own else []), [each for each in topics if each not in own]


def _objects(topics: Sequence[_Topic]) -> list[Proposal]:
    """Return the rule for JSON objects: a level, or a field if one topic has several devices."""
    for name in DEVICE_FIELDS:
        if all(each.fields.get(name) for each in topics):
            devices = set().union(*(each.fields[name] for each in topics))
            if any(len(each.fields[name]) > 1 for each in topics):
                return [
                    Proposal(
                        f'Rule({_filter(topics)!r}, decode="json", device="field {name}")',
                        f"{len(devices)} devices in {len(topics)} topics, by the field {name}",
                    )
                ]
    level = _telling_level(topics, range(len(topics[0].levels)))
    if level is None:
        return []
    return [_by_level(topics, level, 'decode="json"', "")]


def _values(topics: Sequence[_Topic]) -> list[Proposal]:
    """Return the rule for single values: the last level is the metric."""
    count = len(topics[0].levels)
    metrics = {each.levels[-1] for each in topics}
    level = _telling_level(topics, range(count - 1))
    if count < 3 or level is None or len(metrics) >= len(topics):
        return []
    is_number = all(each.is_number for each in topics)
    return [
        _by_level(
            topics,
            level,
            'decode="number"' if is_number else 'decode="auto"',
            f', metric="level {count}"',
        )
    ]


def _by_level(topics: Sequence[_Topic], level: int, decode: str, more: str) -> Proposal:
    names = {each.levels[level] for each in topics}
    paths = {each.levels[: level + 1] for each in topics}
    is_alone = len(names) == len(paths)
    device = f"level {level + 1}" if is_alone or level == 0 else f"levels 1-{level + 1}"
    return Proposal(
        f'Rule({_filter(topics)!r}, {decode}, device="{device}"{more})',
        f"{len(paths)} devices in {len(topics)} topics, such as {'/'.join(topics[0].levels)}",
    )


def _telling_level(topics: Sequence[_Topic], among: Iterable[int]) -> int | None:
    """Return the level with the most names, the last of several. None if all have one name."""
    names = {level: len({each.levels[level] for each in topics}) for level in among}
    level = max(names, key=lambda each: (names[each], each), default=None)
    return level if level is not None and names[level] > 1 else None


def _filter(topics: Sequence[_Topic]) -> str:
    levels = zip(*(each.levels for each in topics), strict=True)
    return "/".join(names[0] if len(set(names)) == 1 else "+" for names in levels)


def tables_file(proposals: Sequence[Proposal], seen: Mapping[str, int]) -> str:
    """Return a Python file for `--tables`. `seen` are counts of messages and topics."""
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
