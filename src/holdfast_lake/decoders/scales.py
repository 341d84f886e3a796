"""Multiplies numbers by the power of ten that a field beside them has, as SunSpec's devices send.

`{"current": 523, "current_scale": -2}` is 5.23 A. SunSpec's names end in `_SF`, others in `_scale`
or `_sf`. The scale of `l1_current` and `AphA` is that of `current` and `A`, and the objects of a
list have the scales of the object around it.

Invariant: a number beside its scale is multiplied, or left out and reported, unless the message
shows that it is multiplied already. A number that was multiplied before and comes without its scale
is left out and reported, because the scale may have changed. A `_scale` may be a factor as well, so
it is a power of ten only where an object has a negative one, or SunSpec's names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from holdfast_lake.decoders.decoded import BAD, Decoded, DecodeError
from holdfast_lake.decoders.json_payload import flatten
from holdfast_lake.decoders.units import other_name, star_pattern

SUFFIXES: Final = ("_scale", "_sf", "_SF")
"""The ends of the names of scales."""
POWER_MAX: Final = 10
"""The greatest power of SunSpec, and the least one with a minus."""
_WORD: Final = 1 << 16
"""The values of a register. One that was read without its sign has -2 as 65534."""
NO_SCALE: Final = (-(1 << 15), 1 << 15)
"""The scales that mean `not implemented`: 0x8000, with its sign and without."""
NOT_IMPLEMENTED: Final = (*NO_SCALE, _WORD - 1, -(1 << 31), (1 << 32) - 1)
"""The numbers that mean `not implemented`: of 16 and 32 bits, with a sign and without."""
_COUNTED: Final = re.compile(r".*(?:energy|wh|vah|varh)", re.DOTALL | re.IGNORECASE)
"""The names of counters of 32 bits, for which 32768 and 65535 are numbers like others."""
_PHASES: Final = re.compile(
    r"[lp]?[123]n?|[lp]?(?:12|23|31)|[lp]?l?n|ll|[abc]|ab|bc|ca|phase|import|export|total|actual|"
    r"q[1-4]"
)
"""The words that may be before or behind the name of a scale: `l1_current`, `voltage_ln`,
`import_energy_active`."""
_SUNSPEC_ENDS: Final = (
    re.compile(r"ph(?:[abc]|ab|bc|ca)\Z"), re.compile(r"(?:exp|imp|cab|snk|trns|ot)\Z"),
    re.compile(r"\A(?:ph|pp)"),
)  # fmt: skip
"""The parts of names of SunSpec's models 10x and 20x that share a scale: AphA, PPVphAB,
TotWhImpPhA, TmpSnk."""
SCALED_MAX: Final = 256
"""The most numbers of a stream whose scales are kept."""
WORDS_MAX: Final = 12
"""The most words of a name in which the name of a scale is looked for."""

_Positions = Mapping[str, int]


class Scales:
    """The scales of a rule, and those that messages show."""

    def __init__(self, rules: Mapping[str, str] | None = None) -> None:
        """Prepares the patterns of a rule: metric to scale, or to an empty text for none."""
        self._rules = [(star_pattern(name), scale) for name, scale in (rules or {}).items()]

    def apply(self, decoded: Decoded, before: dict[str, str] | None = None) -> None:
        """Multiplies the numbers of a message by their scales. The scales stay readings.

        `before` has the scales by which numbers of the stream were multiplied, by device and
        metric. It is changed.
        """
        if not self._rules and not before and not has_scale(decoded.names):
            return
        found: dict[int, str] = {}
        for objects in _objects(decoded):
            known = {}
            for prefix, fields in objects.items():
                scales = {name: decoded.values[at] for name, at in fields.items()
                          if name.endswith(SUFFIXES)}  # fmt: skip
                if scales:
                    known[prefix] = ObjectScales(scales, scales.values())
            for prefix, fields in objects.items() if known or self._rules else ():
                self._apply_to_object(prefix, fields, objects, known, decoded, found)
        if before is not None:
            _follow(decoded, found, before)

    def _apply_to_object(
        self,
        prefix: str,
        fields: _Positions,
        objects: Mapping[str, _Positions],
        known: Mapping[str, "ObjectScales"],
        decoded: Decoded,
        found: dict[int, str],
    ) -> None:
        """Multiplies the numbers of an object. `found` gets the places of those with a scale or a
        rule, and the scale of each that is multiplied."""
        chain = [(above, known[above]) for above in _above(prefix) if above in known]
        values = decoded.values
        pairs: list[tuple[int, int, bool]] = []
        for field, at in fields.items():
            ruled = self._by_rule(f"{prefix}{field}")
            if ruled is not None:
                found[at] = ""
                self._apply_rule(at, ruled, prefix, objects, decoded)
                continue
            for above, scales in () if field.endswith(SUFFIXES) else chain:
                name, is_sure = scales.find(field)
                if name:
                    found[at] = ""
                    pairs.append((at, objects[above][name], is_sure))
                    break
        powers = {of: _power(values[of]) for _, of, _ in pairs}
        is_sunspec = any(scales.is_sunspec for _, scales in chain)
        is_proven = is_sunspec or any(scales.has_negative for _, scales in chain)
        if any(sure and powers[of] and not _is_whole(values[at]) for at, of, sure in pairs):
            return  # no register has a fraction: somebody has multiplied already
        for at, of, is_sure in pairs:
            power = powers[of]
            if is_proven and values[of] in NO_SCALE:
                _leave_out(at, of, decoded, values[at] not in (0.0, *NOT_IMPLEMENTED))
            elif is_proven and _is_missing(decoded.names[at], values[at]):
                _leave_out(at, of, decoded, values[at] > 0)  # type: ignore[operator]
            elif power == 0 or not (is_proven or is_sure):
                continue  # the speed_scale of a fan_speed shows nothing
            elif power is not None and is_proven and is_sure:
                found[at] = decoded.names[of]
                _multiply(at, power, decoded)
            else:
                name, scale = decoded.names[at], decoded.names[of]
                decoded.refuse(
                    f"{name[:40]} is {values[at]:g} beside {scale[:40]} {values[of]:g}, which may "
                    f"be a power of ten, a factor or of another field: it is left out until a rule "
                    f'has scales={{"{name[:40]}": "{scale[:40]}"}}, or "" for none'
                )
                values[at] = None

    def _by_rule(self, metric: str) -> str | None:
        """Returns the scale that the rule gives to a metric. None: the rule does not name it."""
        for pattern, scale in self._rules:
            match = pattern.fullmatch(metric)
            if match is not None:
                return other_name(scale, match)
        return None

    def _apply_rule(
        self,
        at: int,
        scale: str,
        prefix: str,
        objects: Mapping[str, _Positions],
        decoded: Decoded,
    ) -> None:
        """Multiplies a number by the scale that a rule gives to it. It leaves out one whose scale
        is not there."""
        name = decoded.names[at]
        if not scale or name == scale:
            return
        above, _, last = scale.rpartition(".")
        of = objects.get(f"{above}." if above else "", {}).get(last)
        power = None if of is None else _power(decoded.values[of])
        if of is not None and decoded.values[of] in NO_SCALE:
            _leave_out(at, of, decoded, decoded.values[at] not in (0.0, *NOT_IMPLEMENTED))
        elif power is None:
            decoded.refuse(f"{name[:40]} is left out: {scale[:40]}, its scale, is no power of ten")
            decoded.values[at] = None
        elif of is not None and _is_missing(name, decoded.values[at]):
            _leave_out(at, of, decoded, False)
        else:
            _multiply(at, power, decoded)


def _follow(decoded: Decoded, found: Mapping[int, str], before: dict[str, str]) -> None:
    """Notes the scales by which numbers are multiplied, and leaves out whole numbers that have come
    without theirs."""
    for at, name in enumerate(decoded.names):
        key, value = f"{decoded.device or ''}\0{name}", decoded.values[at]
        if found.get(at):
            before.pop(key, None)
            before[key] = found[at]
            if len(before) > SCALED_MAX:
                del before[next(iter(before))]
        elif at not in found and key in before and value and _is_whole(value):
            decoded.refuse(
                f"{name[:40]} is {value:g} without {before[key][:40]}, by which it was multiplied "
                "before: it is left out, unless a rule has scales={"
                f'"{name[:40]}": ""'
                "}"
            )
            decoded.values[at] = None


def has_scale(names: Sequence[str]) -> bool:
    """Returns whether one of some names is that of a scale."""
    return any(name.endswith(SUFFIXES) for name in names)


class ObjectScales:
    """The scales of one object, by what they are the scale of."""

    def __init__(self, names: Iterable[str], values: Iterable[object] = ()) -> None:
        self._names = {name[: name.rindex("_")]: name for name in names if name.rindex("_")}
        self._joined = {base.replace("_", "").lower(): name for base, name in self._names.items()
                        if name.lower().endswith("_sf")}  # fmt: skip
        self.is_sunspec = any(name.endswith("_SF") for name in self._names.values())
        self.has_negative = any((_power(value) or 0) < 0 for value in values)

    def find(self, field: str) -> tuple[str, bool]:
        """Returns the scale of a field of the object, and whether it certainly is. Empty: the field
        has none. Its cost does not depend on the number of scales."""
        if field in self._names:
            return self._names[field], True
        words = field.split("_") if self._names else ()
        if not 0 < len(words) <= WORDS_MAX:
            return "", False
        parts = [field.replace("_", "").lower()]
        for end in _SUNSPEC_ENDS if self._joined else ():
            parts += [shorter for part in parts if (shorter := end.sub("", part)) != part]
        for part in parts if self._joined else ():
            if part in self._joined:
                return self._joined[part], True
        for length in range(len(words) - 1, 0, -1):
            for at in range(len(words) - length + 1):
                name = self._names.get("_".join(words[at : at + length]))
                if name is not None:
                    rest = words[:at] + words[at + length :]
                    return name, all(map(_PHASES.fullmatch, rest))
        return "", False


def scale_reasons(documents: Iterable[Any]) -> list[str]:
    """Returns which numbers of some objects are multiplied by the scales beside them, and which
    are left out until a rule says what their scales are."""
    multiplied: dict[str, None] = {}
    left_out: dict[str, None] = {}
    for document in documents:
        decoded = Decoded()
        try:
            flatten("", document, decoded, 1)
        except DecodeError:
            continue
        if not has_scale(decoded.names):
            continue
        before = list(decoded.values)
        Scales().apply(decoded)
        for name, sent, value in zip(decoded.names, before, decoded.values, strict=True):
            if value is None and sent is not None and sent not in NOT_IMPLEMENTED:
                left_out[name] = None
            elif value != sent and value is not None:
                multiplied[name] = None
    reasons = []
    if multiplied:
        reasons.append(f"{', '.join(list(multiplied)[:3])}: {len(multiplied)} in all are multiplied"
                       " by 10 to the power of the scale beside them")  # fmt: skip
    if left_out:
        some = list(left_out)[:3]
        reasons.append(
            f"{', '.join(some)} may be multiplied by the scale beside: left out until "
            f'scales={{"{some[0]}": "..."}} has the field of its power of ten, or "" for none'
        )
    return reasons


def _objects(decoded: Decoded) -> Iterator[dict[str, dict[str, int]]]:
    """Yields the positions of the numbers by object and field, for each reading of a list that has
    its own time."""
    objects: dict[str, dict[str, int]] = {}
    times = decoded.times
    for at, name in enumerate(decoded.names):
        above, dot, last = name.rpartition(".")
        is_next = times is not None and at > 0 and times[at] != times[at - 1]
        if objects and (is_next or last in objects.get(above + dot, ())):
            yield objects
            objects = {}
        if type(decoded.values[at]) is float:
            objects.setdefault(above + dot, {})[last] = at
    yield objects


def _above(prefix: str) -> Iterator[str]:
    """Yields the prefix of an object and those of the objects around it, `a.0.`, `a.` and ``."""
    yield prefix
    while prefix:
        prefix = prefix[: prefix.rfind(".", 0, -1) + 1]
        yield prefix


def _power(value: object) -> int | None:
    """Returns the power of ten that a scale is. None: it is none."""
    if not isinstance(value, float) or not value.is_integer():
        return None
    power = int(value)
    if _WORD - POWER_MAX <= power < _WORD:
        power -= _WORD
    return power if abs(power) <= POWER_MAX else None


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


def _is_missing(name: str, value: object) -> bool:
    """Returns whether a number means that the device has none."""
    is_counter = _COUNTED.match(name) is not None
    return value in NOT_IMPLEMENTED and not (is_counter and value in (1 << 15, _WORD - 1))


def _multiply(at: int, power: int, decoded: Decoded) -> None:
    """Multiplies a number by a power of ten, rounded once, and keeps what was sent as `523e-2`."""
    value = decoded.values[at]
    if power == 0 or not isinstance(value, float):
        return
    digits = (decoded.exact or {}).get(at) or (
        str(int(value)) if value.is_integer() else repr(value)
    )
    decoded.values[at] = float(Decimal(digits).scaleb(power)) + 0.0
    decoded.exact = (decoded.exact or {}) | {at: f"{digits}e{power}"}


def _leave_out(at: int, of: int, decoded: Decoded, is_told: bool) -> None:
    """Makes a number that the device does not have null, with a report if it may be one."""
    if is_told:
        value, scale = decoded.values[at], decoded.values[of]
        decoded.refuse(
            f"{decoded.names[at][:40]} is {value:g} with the scale {scale:g}, by which SunSpec "
            "says that there is none: its value is left out",
            "bad",
        )
        decoded.rate([at], BAD)
    decoded.values[at] = None
