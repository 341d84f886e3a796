"""Units of measurement: the known ones, numbers followed by one, and the units that a rule gives.

A unit is written in one way in the tables, so that `C`, `degC` and `°C` are no change of the unit.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from holdfast_lake.decoders.decoded import Decoded

UNIT_LENGTH_MAX: Final = 32
"""The most characters of a unit that a payload or a rule names."""
UNIT_FIELDS: Final = ("unit", "units", "unit_of_measurement", "uom")
"""The fields with the unit of the number beside them."""
VALUE_FIELDS: Final = ("value", "Value", "val", "v")
"""The fields whose unit it is if there are several fields."""
NAME_FIELDS: Final = frozenset({"id", "name", "device", "device_id", "deviceId", "device_name",
    "sensor", "sensor_id", "sensorId", "sensor_name", "serial", "host", "model", "type", "kind",
    "mac", "location", "room"})  # fmt: skip
"""The fields of an object that name what is measured, and have no unit."""
STATE_FIELDS: Final = frozenset({"on", "state", "status", "active", "enabled", "online",
    "connected", "available", "valid", "ok", "ready", "running", "alarm", "fault", "error",
    "low_battery", "battery_low", "charging", "motion", "occupancy", "presence", "contact", "open",
    "closed", "door", "window", "tamper", "leak", "water_leak", "smoke", "relay", "switch",
    "output", "power", "heating", "cooling", "simulated", "success"})  # fmt: skip
"""The fields that have no unit as long as they are true or false. A `temperature` that is false may
be one that is missing."""
UNITS_MAX: Final = 1000
"""The most units of metrics that the state of a stream keeps."""

_KNOWN: Final = (
    "K % ppm ppb V mV kV µV A mA µA W mW kW MW GW Wh kWh MWh GWh VA kVA MVA var kvar varh kvarh Ah "
    "mAh Ω kΩ MΩ Hz kHz MHz GHz J kJ MJ GJ Pa hPa kPa MPa bar mbar psi mmHg inHg m mm cm km µm ft "
    "mi in m² cm² m³ cm³ ft³ l ml gal m³/h m³/s l/h l/min l/s gal/min m/s km/h mph kn mm/h rpm g "
    "kg mg µg t lb oz µg/m³ mg/m³ g/m³ mg/l lx lm cd W/m² kWh/m² dB dBm dBA s ms µs min h d B kB "
    "MB GB TB KiB MiB GiB TiB bit/s kbit/s Mbit/s Gbit/s B/s kB/s MB/s GB/s KiB/s MiB/s ° °C °F "
    "µSv/h Bq/m³ µS/cm mS/cm S/m NTU EUR USD EUR/kWh N Nm T mT µT"
)
_OTHERS: Final = {
    "°C": "C ℃ ºC degC DegC deg_C Cel celsius Celsius", "°F": "F ℉ ºF degF DegF fahrenheit "
    "Fahrenheit", "K": "kelvin Kelvin", "%": "percent pct %RH %rH RH%", "Ω": "Ohm ohm ohms",
    "kΩ": "kOhm kohm", "MΩ": "MOhm", "var": "VAr VAR", "kvar": "kVAr kVAR", "varh": "VArh VARh",
    "kvarh": "kVArh kVARh", "l": "L liter litre", "ml": "mL", "l/h": "L/h", "l/min": "L/min lpm",
    "l/s": "L/s", "mg/l": "mg/L", "gal/min": "gpm", "km/h": "kmh kph kmph", "kn": "kt kts knots",
    "rpm": "RPM 1/min U/min", "mph": "mi/h", "lx": "lux Lux", "dBA": "dB(A)", "s": "sec secs "
    "second seconds", "min": "mins minute minutes", "h": "hr hrs hour hours", "d": "day days",
    "bit/s": "bps", "kbit/s": "kbps", "Mbit/s": "Mbps", "Gbit/s": "Gbps", "°": "deg degree degrees",
    "EUR": "€", "USD": "$", "EUR/kWh": "€/kWh", "W": "watt watts Watt", "V": "volt volts Volt",
    "A": "amp amps Ampere", "kWh": "kwh KWh", "Wh": "wh", "hPa": "hpa", "dBm": "dbm",
}  # fmt: skip
_PLAIN_LETTERS: Final = str.maketrans("µ\u03bc²³\u2126", "uu23\u03a9")
"""Letters with several codes, or often written by others: two of them look like a micro, two like
an ohm."""
_SPELLINGS: Final = {
    spelling.translate(_PLAIN_LETTERS): unit
    for unit in (*_KNOWN.split(), *_OTHERS)
    for spelling in (unit, *_OTHERS.get(unit, "").split())
}
_MEASURED: Final = re.compile(
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)(\s*\*\s*|\s*)([^\d\s*.,+-]\S*)"
)
_CODE: Final = re.compile(r"\+?0[0-9]+|[0-9]{12}")
"""A number that may be a name, as in text_payload.py, or the time 261130114000W of a meter."""
_DOUBTFUL: Final = re.compile(r"[A-Fa-f]+|[A-UX-Za-z]")
"""Units that are none directly behind a number: `12F` may be a hexadecimal number, `3A` a flat."""


_DECIMALS: Final = {
    sign: re.compile(
        rf"([+-]?)(\d{{1,3}}(?:[{other}' \xa0\u202f]\d{{3}})+|\d+)(?:[{sign}](\d+))?(?![\d.,])(.*)",
        re.ASCII | re.DOTALL,
    )
    for sign, other in ((",", "."), (".", ","))
}
"""A number by its decimal sign, where the other one separates thousands, with a unit behind."""


def with_point(text: str, decimal: str) -> str | None:
    """Returns a text with a number as others write it: `1.234,5 kWh` is `1234.5 kWh` with a decimal
    comma. None: it is no such number. Without a decimal sign the text is returned unchanged."""
    if not decimal:
        return text
    match = _DECIMALS[decimal].fullmatch(text)
    if match is None:
        return None
    sign, whole, part, rest = match.groups()
    return f"{sign}{re.sub('[^0-9]', '', whole)}{f'.{part}' if part else ''}{rest}"


_NUMBER_LIKE: Final = re.compile(r"[+-]?\d[\d.,' \xa0\u202f]*(?:\s*[^\d\s,;.][^\s,;]*)?")
"""A text that may be a number with separators and a unit."""
DECIMALS_MIN: Final = 3
"""The fewest different texts that show a decimal sign."""
DIGITS_MIN: Final = 5
"""The fewest different digits behind a comma that are no second number, such as a status."""


def decimal_of(texts: Iterable[str], *, may_be_two: bool = False) -> str:
    """Returns the decimal sign of some texts if they need one, and show it: a text that no other
    sign explains, such as `21,5`, and none that speaks against it. `1,234` shows nothing.

    Without units, all have the same number of decimals. `3,15` and `20,4` may be two numbers each.
    With `may_be_two`, 21,45 and 22,47 may be two as well, as a temperature and a humidity are: the
    decimals begin with a zero somewhere, or are digits that differ.
    """
    numbers = {text for text in texts if _NUMBER_LIKE.fullmatch(text)}
    for sign, other in ((",", "."), (".", ",")):
        shown = [text for text in numbers if "," in text and with_point(text, other) is None]
        plain = {text.rpartition(sign)[2] for text in shown if text[-1].isdigit()}
        is_one = any(each.startswith("0") and len(each) > 1 for each in plain) or (
            len(plain) >= DIGITS_MIN and max(map(len, plain)) == 1
        )
        if (
            may_be_two
            and plain
            and not is_one
            and not any("," in text and "." in text for text in shown)
        ):
            continue
        if (
            len(shown) >= DECIMALS_MIN
            and len(set(map(len, plain))) <= 1
            and all(with_point(text, sign) is not None for text in numbers)
        ):
            return sign
    return ""


def known_unit(text: object) -> str | None:
    """Returns the one spelling of a unit, or None for a value that is no known unit."""
    return _SPELLINGS.get(text.strip().translate(_PLAIN_LETTERS)) if type(text) is str else None


def named_unit(text: object) -> str | None:
    """Returns a unit that a rule or a format vouches for: also one that is not known."""
    if type(text) is not str or not 0 < len(text.strip()) <= UNIT_LENGTH_MAX:
        return None
    return known_unit(text) or text.strip()


def measured_value(
    text: str, *, by_rule: bool = False, decimal: str = ""
) -> tuple[float | int, str] | None:
    """Parses a number that is followed by a known unit: `21.5 °C`, `45%`, `001234.567*kWh`.

    Without `by_rule`, a text that may be a code or a name is not one: `12F`, `0012 W`.
    """
    found = with_point(text, decimal) if len(text) <= 2 * UNIT_LENGTH_MAX else None
    match = None if found is None else _MEASURED.fullmatch(found)
    unit = None if match is None else known_unit(match[3])
    if match is None or unit is None:
        return None
    if not by_rule and (
        _CODE.fullmatch(match[1]) or (not match[2] and _DOUBTFUL.fullmatch(match[3]))
    ):
        return None
    is_whole = match[1].lstrip("+-").isdecimal()
    value = int(match[1]) if is_whole else float(match[1])
    return (value, unit) if math.isfinite(value) else None


def measured_field(names: Collection[str], truths: Collection[str]) -> str | None:
    """Returns the field of an object whose unit is beside it. None: it may be another one's.

    It depends on the names, and on which of them are true or false (`truths`). Counter-example: the
    only number of `{"temperature": null, "rpm": 1200, "unit": "°C"}` would be 1200 °C.
    """
    value = next((name for name in VALUE_FIELDS if name in names), None)
    if value is not None:
        return value
    states = {name for name in truths if name.lower() in STATE_FIELDS}
    no_values = states.union(UNIT_FIELDS, NAME_FIELDS)
    others = [name for name in names if name not in no_values]
    return others[0] if len(others) == 1 else None


class UnitRules:
    """The units that a rule gives to metrics: fixed ones, `field NAME` and `last NAME`.

    The `*` of a name stands for what the first `*` of the metric's pattern stands for.
    """

    def __init__(self, units: Mapping[str, str]) -> None:
        self._rules = []
        self._noted = []
        for pattern, unit in units.items():
            word, _, name = unit.partition(" ")
            is_name = word in ("field", "last") and name != ""
            self._rules.append((star_pattern(pattern), word if is_name else "", name or unit, unit))
            if word == "last" and is_name:
                self._noted.append(star_pattern(name))

    def apply(self, decoded: Decoded, names: list[str], texts: Mapping[str, str]) -> set[str]:
        """Gives units to numbers without their own. `names` has a metric for each reading, and
        `texts` the texts of the payload by name. Returns the names of fields that are units."""
        used = set()
        for at, name in enumerate(names):
            for pattern, word, other, unit in self._rules:
                match = pattern.fullmatch(name)
                if match is None:
                    continue
                if word == "field":
                    field = other_name(other, match)
                    used |= {field} & texts.keys()
                    decoded.set_unit(at, named_unit(texts.get(field)))
                elif not word:
                    decoded.set_unit(at, named_unit(unit))
                break
        return used

    def follow(self, decoded: Decoded, device: str, known: dict[str, str]) -> None:
        """Notes the units of a device, and gives numbers the last ones: `last NAME`."""
        for name, value in zip(decoded.names, decoded.values, strict=True):
            unit = named_unit(value)
            if unit is not None and any(pattern.fullmatch(name) for pattern in self._noted):
                known.pop(f"{device}\0{name}", None)
                known[f"{device}\0{name}"] = unit
                if len(known) > UNITS_MAX:
                    del known[next(iter(known))]
        for at, name in enumerate(decoded.names if known else ()):
            for pattern, word, other, _ in self._rules:
                match = pattern.fullmatch(name)
                if match is not None:
                    if word == "last":
                        decoded.set_unit(at, known.get(f"{device}\0{other_name(other, match)}"))
                    break

    def has(self, metric: str) -> bool:
        """Returns whether a metric has a unit by the rule."""
        return any(pattern.fullmatch(metric) for pattern, *_ in self._rules)

    @property
    def has_last(self) -> bool:
        """True if a unit comes from an earlier message."""
        return bool(self._noted)


def star_pattern(text: str) -> re.Pattern[str]:
    """Returns the pattern of a name in which a `*` stands for any characters."""
    return re.compile("(.*)".join(map(re.escape, text.split("*"))), re.DOTALL)


def other_name(name: str, match: re.Match[str]) -> str:
    """Returns a name with what the first `*` of a pattern stands for in place of its own `*`."""
    return name.replace("*", match[1]) if match.re.groups else name
