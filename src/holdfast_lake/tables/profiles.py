"""Profiles of makers: TOML files that say by which topics a product is found, and how it is read.

    title = "Tasmota"
    found = [{ topic = "tele/+/LWT" }, { topic = "{base}/stats", fields = ["uptime"] }]

    [[rule]]
    filter = "{base}/+/state"
    device = "level {+1}"
    local_time = "Time"
    why = "a device for each name"

`{base}` is one level or several, found in the topics, and `{+1}` the number of the first level
after it. A rule has the fields of `Rule`, and `filter` may be a list. `local_time` is a field with
a time of an unknown zone.
The files of the package are in holdfast_lake/profiles/, with examples that are its tests.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from holdfast_lake.decoders.decoded import DecodeError
from holdfast_lake.decoders.json_payload import parse_json
from holdfast_lake.tables.rules import Rule

BASES_MAX: Final = 200
"""The most bases of one profile that need rules of their own. Topics of others are read by the
default rules."""
TOP_KEYS: Final = frozenset({"title", "order", "found", "rule", "example"})
EVIDENCE_KEYS: Final = frozenset({"topic", "fields", "text", "base"})
RULE_KEYS: Final = frozenset(each.name for each in fields(Rule)) | {"why", "local_time"}
_LEVEL: Final = re.compile(r"\{\+(\d)\}")


class ProfileError(ValueError):
    """A profile cannot be used. The text names its file and the fault."""


@dataclass(frozen=True)
class ProfileEvidence:
    """A topic that shows a product, with fields of an object or a text if the topic is common."""

    topic: re.Pattern[str]
    fields: tuple[str, ...] = ()
    text: str = ""
    base: str = ""
    """The base of a topic whose pattern has none."""

    def base_of(self, topic: str, payloads: Sequence[bytes]) -> str | None:
        """Returns the base of a topic, empty if the evidence has none. None: it is no evidence."""
        match = self.topic.fullmatch(topic)
        if match is None or not any(
            re.fullmatch(self.text or ".*", payload.decode(errors="replace"), re.DOTALL)
            and (not self.fields or _has_all(payload, self.fields))
            for payload in payloads
        ):
            return None
        return match["base"] if "base" in self.topic.groupindex else self.base


@dataclass(frozen=True)
class Profile:
    """A profile, as its file has it."""

    name: str
    title: str
    found: tuple[ProfileEvidence, ...]
    rules: tuple[dict[str, Any], ...] = field(repr=False)
    order: int = 50

    def reason(self, why: str) -> str:
        """Returns the reason of a rule, which may say nothing."""
        return f"{self.title}: {why}" if why else self.title

    def bases(self, topics: Mapping[str, Sequence[bytes]]) -> list[str]:
        """Returns the bases under which topics show the product. `topics` has some payloads of
        each."""
        bases = {
            base
            for topic, payloads in topics.items()
            for evidence in self.found
            if (base := evidence.base_of(topic, payloads)) is not None
        }
        return sorted(bases)

    def rules_at(self, base: str) -> list[dict[str, Any]]:
        """Returns the arguments of the rules below a base, with `why` and perhaps `local_time`."""
        depth = len(base.split("/"))
        rules = [rule | {"filter": one} for rule in self.rules for one in _filters(rule)]
        return [{name: _placed(value, base, depth) for name, value in rule.items()}
                for rule in rules]  # fmt: skip


def _filters(rule: Mapping[str, Any]) -> Sequence[str]:
    """Returns the filters of a rule, which may be a list: so a maker's rule takes its topics only,
    and not `{base}/+/+`, where others may have objects of several devices."""
    found: str | list[str] = rule["filter"]
    return [found] if isinstance(found, str) else found


def _placed(value: Any, base: str, depth: int) -> Any:
    """Replaces the base and the levels in a value of a rule."""
    if isinstance(value, list):
        return tuple(_placed(each, base, depth) for each in value) or None
    if isinstance(value, dict):
        return {name: _placed(each, base, depth) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    text = _LEVEL.sub(lambda match: str(depth + int(match[1])), value)
    text = re.sub(r"levels (\d+)-\1$", r"level \1", text)
    return text.replace("{base}", base)


def _has_all(payload: bytes, names: Sequence[str]) -> bool:
    try:
        document = parse_json(payload)
    except DecodeError:
        return False
    return isinstance(document, dict) and document.keys() >= set(names)


def load_profiles(folder: Path | None = None) -> list[Profile]:
    """Returns the profiles of a folder, followed by those of the package. One of the folder
    replaces one with the same name. Raises ProfileError."""
    own = {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.toml"))}
    if folder is not None and not own:
        why = "no file *.toml in it" if folder.is_dir() else "it is no folder"
        raise ProfileError(f"{folder}: {why}")
    found = [profile_of(name, path.read_bytes(), str(path)) for name, path in own.items()]
    return found + [each for each in _built_in() if each.name not in own]


@cache
def _built_in() -> tuple[Profile, ...]:
    place = files("holdfast_lake").joinpath("profiles")
    names = sorted(each.name for each in place.iterdir() if each.name.endswith(".toml"))
    found = [profile_of(name.removesuffix(".toml"), place.joinpath(name).read_bytes(), name)
             for name in names]  # fmt: skip
    return tuple(sorted(found, key=lambda each: (each.order, each.name)))


def profile_of(name: str, text: bytes, place: str) -> Profile:
    """Parses a profile. Raises ProfileError."""
    try:
        parsed = tomllib.loads(text.decode("utf-8-sig"))
        _check_keys(parsed, TOP_KEYS, "the profile")
        found = tuple(_evidence(each) for each in parsed["found"])
        profile = Profile(
            name, str(parsed["title"]), found, tuple(parsed["rule"]), parsed.get("order", 50)
        )
        for rule in parsed["rule"]:
            _check_keys(rule, RULE_KEYS, "each rule")
        for rule in profile.rules_at("base"):
            rule_of(rule)
    except KeyError as error:
        raise ProfileError(f"{place}: {error.args[0]} is missing") from None
    except (ValueError, TypeError, re.error) as error:
        raise ProfileError(f"{place}: {error}") from None
    return profile


def _check_keys(table: Any, known: frozenset[str], what: str) -> None:
    """Raises ValueError if a value of a profile is no table, or has a key that is not known."""
    if not isinstance(table, dict):
        raise ValueError(f"{what} is a table, not {table!r}")
    unknown = ", ".join(sorted(table.keys() - known))
    if unknown:
        raise ValueError(f"{unknown} is not known in {what}; there are {', '.join(sorted(known))}")


def rule_of(arguments: Mapping[str, Any]) -> Rule:
    """Returns the rule of some arguments of a profile. Raises RuleError."""
    return Rule(**{name: value for name, value in arguments.items()
                   if name not in ("why", "local_time")})  # fmt: skip


def _evidence(each: Any) -> ProfileEvidence:
    _check_keys(each, EVIDENCE_KEYS, 'each item of `found`, such as { topic = "a/+/up" },')
    if not isinstance(each.get("fields", []), list):
        raise ValueError(f"fields is {each['fields']!r}; it is a list of names")
    if word := re.search(r"\{(?!base\}).*?\}", each["topic"]):
        raise ValueError(f"topic has {word[0]}; there are {{base}}, + and #")
    parts = re.split(r"(\{base\}|\+|#)", each["topic"])
    known = {"{base}": r"(?P<base>[^/]+(?:/[^/]+)*?)", "+": "[^/]+", "#": ".*"}
    pattern = "".join(known.get(part, re.escape(part)) for part in parts)
    return ProfileEvidence(
        re.compile(pattern, re.DOTALL),
        tuple(each.get("fields", ())),
        each.get("text", ""),
        each.get("base", ""),
    )
