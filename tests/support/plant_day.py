"""A day of 200 devices of a plant as they publish it, and what each message means: outages,
restarts, losses, repetitions, late messages, wrong clocks, two publishers of one device, and
rubbish. The same seed gives the same day."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.support import sparkplug_wire as wire

SECOND: Final = 1_000_000
HOUR: Final = 3600 * SECOND
BEGAN_US: Final = 20_700 * 24 * HOUR + 19 * HOUR
"""Seven in the evening: so the day ends on another date."""
LENGTH_US: Final = 24 * HOUR
LATENESS_US: Final = 60 * SECOND
Producer = tuple[str, int, int]


@dataclass
class Value:
    metric: str
    value: Any
    time_us: int | None = None
    """Its own time."""
    is_historical: bool = False
    word: str | None = None
    """The text that is beside the value."""
    unit: str | None = None


@dataclass
class Part:
    """What a message says of one device."""

    device: str
    values: list[Value]


@dataclass
class Said:
    """A message and its meaning."""

    at_us: int
    topic: str
    payload: bytes
    client: str
    stream: str
    parts: list[Part] = field(default_factory=list)
    time_us: int | None = None
    sent_us: int | None = None
    """By its own field, or else the same."""
    number: int | None = None
    id: str | None = None
    producer: Producer | None = None
    retain: bool = False
    begins_run: bool = False
    """Of Sparkplug: a birth. Its numbers tell no other restart."""
    is_sparkplug: bool = False
    bad: str = ""
    """How the reason in the quarantine begins, if anything of it is there."""
    partition: int = 0
    offset: int = 0
    """Given when the messages are stored."""


class Day:
    """All messages, in the order in which they are stored."""

    def __init__(self, seed: int, devices: int = 200) -> None:
        self.chance = random.Random(seed)
        self.messages: list[Said] = []
        kinds: list[Callable[[int], None]] = [
            self._json, self._json, self._json, self._csv, self._meter, self._sparkplug, self._pair,
            self._redundant, self._counted, self._free,
        ]  # fmt: skip
        for number in range(devices):
            kinds[number % len(kinds)](number)
        self.messages.sort(key=lambda said: said.at_us)
        for before, said in zip(self.messages, self.messages[1:], strict=False):
            said.at_us = max(said.at_us, before.at_us + 1)  # one order, for all streams

    def _times(self, pace_s: float, outages: int = 1) -> list[int]:
        """When a device publishes."""
        chance = self.chance
        at = BEGAN_US + chance.randrange(2 * HOUR)
        silent = [chance.random() * LENGTH_US for _ in range(outages)]
        times = []
        while at < BEGAN_US + LENGTH_US:
            times.append(at)
            at += round(pace_s * SECOND * chance.uniform(0.8, 1.2))
            if silent and at - BEGAN_US > min(silent):
                silent.remove(min(silent))
                at += chance.randrange(HOUR, 4 * HOUR)
        return times

    def _again(self, said: Said, delay_us: int = SECOND) -> None:
        """The same message once more."""
        self.messages.append(Said(**{**said.__dict__, "at_us": said.at_us + delay_us}))

    def _clock(self) -> Callable[[int], int]:
        """A device's own: right, ahead, never set, or slow."""
        kind = self.chance.randrange(8)
        if kind == 0:
            return lambda at: at + 20 * 60 * SECOND
        if kind == 1:
            return lambda at: at - BEGAN_US + 5 * SECOND
        if kind == 2:
            return lambda at: at - 2 * 24 * HOUR
        skew = self.chance.randrange(-200_000, 200_000)
        return lambda at: at + skew - 300_000

    def _json(self, number: int) -> None:
        """A counter that is lost with the power; messages lost, repeated, and late by minutes."""
        chance = self.chance
        device, topic = f"press/{number}", f"press/{number}/data"
        clock = self._clock()
        count = chance.randrange(200)
        held: list[Said] = []
        for at in self._times(1500):
            ts = clock(at) // 1000 * 1000
            values: dict[str, Any] = {
                "temperature": round(chance.uniform(-20, 90), 2),
                "running": chance.random() < 0.7,
                "state": chance.choice(("idle", "work", "été")),
                "count": chance.choice((count, 2**60 + 1)) if count % 10 == 0 else count,
                "error": None,
            }
            document: dict[str, Any] = {"seq": count, **values, "ts": ts / SECOND}
            sent_us = ts
            if number % 3 == 0:
                sent_us = ts + 1000 * chance.randrange(50)
                document["sent"] = sent_us / SECOND
            if number % 4 == 0:
                document["motor"] = {"current": [1.5, float(count)], "ok": True}
                values |= {"motor.current.0": 1.5, "motor.current.1": float(count),
                           "motor.ok": True}  # fmt: skip
            said = Said(
                at, topic, json.dumps(document).encode(), f"client-{number}", topic,
                [Part(device, [Value(name, each) for name, each in values.items()])],
                time_us=ts, sent_us=sent_us, number=count,
            )  # fmt: skip
            luck = chance.random()
            if luck < 0.03:
                said.payload, said.bad = said.payload[:-1], "no JSON"
                said.parts, said.number, said.time_us, said.sent_us = [], None, None, None
            elif luck < 0.06:
                said.payload = json.dumps({"seq": count, "ts": ts / SECOND}).encode()
                said.parts = [Part(device, [Value("$sequence", count)])]
                said.sent_us = ts
            if 0.06 < luck < 0.1:
                pass  # lost
            elif 0.1 < luck < 0.14:
                held.append(said)
            else:
                self.messages.append(said)
                if 0.14 < luck < 0.2:
                    self._again(said)
                for late in held:
                    late.at_us = at + 1000
                    self.messages.append(late)
                held = []
            count += 1
            if luck > 0.985:
                count = 0
        if number % 2:
            self._will(device, number)

    def _will(self, device: str, number: int) -> None:
        gone = BEGAN_US + self.chance.randrange(LENGTH_US)
        for at, word in ((gone, b"offline"), (gone + HOUR, b"online")):
            self.messages.append(
                Said(
                    at, f"{device}/status", word, f"client-{number}", f"{device}/status",
                    [Part(device, [Value("$online", word == b"online")])], retain=True,
                )
            )  # fmt: skip

    def _csv(self, number: int) -> None:
        """Some lines at a time, each with its time; now and then one that is broken."""
        chance = self.chance
        topic = f"csv/{number}"
        for at in self._times(2400):
            lines, values = [], []
            for line in range(chance.choice((1, 1, 3))):
                time_us = at - (3 - line) * 10 * SECOND
                temperature = round(chance.uniform(0, 50), 1)
                lines.append(f"{time_us // 1000},{temperature},on,x")
                values += [
                    Value("temperature", temperature, time_us // 1000 * 1000),
                    Value("ok", True, time_us // 1000 * 1000, word="on"),
                ]
            first_us = values[0].time_us
            said = Said(at, topic, b"", f"client-{number}", topic, [Part(topic, values)],
                        time_us=first_us, sent_us=first_us)  # fmt: skip
            if chance.random() < 0.1:
                lines.append("1,2")
                said.bad = f"line {len(lines)} has 2 columns instead of 4"
            said.payload = "\r\n".join(lines).encode()
            self.messages.append(said)

    def _meter(self, number: int) -> None:
        """One number in a message, and nothing else."""
        chance = self.chance
        for at in self._times(1200):
            metric = chance.choice(("power", "energy"))
            topic = f"meter/{number}/{metric}"
            value = round(chance.uniform(-5, 5), 3)
            said = Said(at, topic, str(value).encode(), f"client-{number}", topic,
                        [Part(str(number), [Value(metric, value)])])  # fmt: skip
            if chance.random() < 0.05:
                said.payload, said.bad, said.parts = b"n/a", "neither a number nor a boolean", []
            self.messages.append(said)
            if chance.random() < 0.05:
                self._again(said)  # nothing tells that it is one: it is kept

    def _sparkplug(self, number: int) -> None:
        """An edge node with a device; it is born again after each outage."""
        chance = self.chance
        pace_s, outages = (150, 0) if number % 40 == 5 else (900, 3)
        node, stream = f"G/E{number}", f"spBv1.0/G/E{number}"
        client = f"client-{number}"
        born = 0
        before, count = 0, 0

        def say(at: int, kind: str, device: str, metrics: list[tuple[Value, bytes]]) -> Said:
            time_us = at // 1000 * 1000 - 4000
            payload = wire.payload(
                *(each for _, each in metrics), time_ms=time_us // 1000, seq=count % 256
            )
            topic = f"spBv1.0/G/{kind}/E{number}{device and '/' + device}"
            name = f"{node}{device and '/' + device}"
            part = Part(name, [value for value, _ in metrics])
            said = Said(at, topic, payload, client, stream, [part], time_us=time_us,
                        sent_us=time_us, number=count, is_sparkplug=True)  # fmt: skip
            if kind.endswith("BIRTH"):
                said.parts[0].values.insert(0, Value("$online", True))
                said.begins_run = kind == "NBIRTH"
            self.messages.append(said)
            return said

        for at in self._times(pace_s, outages):
            if at - before > HOUR:
                if before:
                    payload = wire.payload(
                        wire.metric(born, wire.INT64, name="bdSeq"), time_ms=before // 1000
                    )
                    gone = [Part(each, [Value("$online", False)]) for each in (node, f"{node}/D")]
                    topic = f"spBv1.0/G/NDEATH/E{number}"
                    self.messages.append(
                        Said(before + 90 * SECOND, topic, payload, client, stream, gone,
                             is_sparkplug=True)
                    )  # fmt: skip
                    born += 1
                count = 0
                level = round(chance.uniform(0, 9), 2)
                say(at, "NBIRTH", "", [
                    (Value("bdSeq", born), wire.metric(born, wire.INT64, name="bdSeq")),
                    (Value("Flow/in", 1.5), wire.metric(1.5, wire.DOUBLE, name="Flow/in", alias=7)),
                ])  # fmt: skip
                count = 1
                say(at + 1000, "DBIRTH", "D", [
                    (Value("level", level), wire.metric(level, wire.DOUBLE, name="level", alias=8)),
                    (Value("low", -2), wire.metric(-2, wire.INT32, name="low", alias=9)),
                ])  # fmt: skip
                count = 2
                before = at
                continue
            before = at
            luck = chance.random()
            if luck < 0.05:
                count += chance.randrange(1, 4)
            flow = chance.uniform(0, 100)
            own_us = at // 1000 * 1000 - 9000
            if luck < 0.6:
                say(at, "NDATA", "", [
                    (Value("Flow/in", flow, own_us),
                     wire.metric(flow, wire.DOUBLE, alias=7, typed=False, time_ms=own_us // 1000)),
                ])  # fmt: skip
            else:
                is_old = luck > 0.9
                say(at, "DDATA", "D", [
                    (Value("low", -7, None, is_old),
                     wire.metric(-7, wire.INT32, alias=9, typed=False, historical=is_old)),
                    (Value("level", flow), wire.metric(flow, wire.DOUBLE, alias=8, typed=False)),
                ])  # fmt: skip
                if luck > 0.97:
                    said = self.messages[-1]
                    said.payload += wire.block(2, wire.metric(1, wire.INT32, alias=99))
                    said.bad = "alias 99 is not known"
            count += 1

    def _pair(self, number: int) -> None:
        """Two publishers of one device, on topics of their own, that share a counter."""
        chance = self.chance
        device = f"m{number}"
        for count, at in enumerate(self._times(1000)):
            topic = f"pair/{device}/{chance.choice('ab')}"
            values = [Value("v", count % 9), Value("w", chance.uniform(-1e300, 1e300))]
            document = {"seq": count, **{each.metric: each.value for each in values}}
            said = Said(at, topic, json.dumps(document).encode(), f"client-{topic}",
                        f"device {device}", [Part(device, values)], number=count)  # fmt: skip
            if chance.random() < 0.95:
                self.messages.append(said)

    def _redundant(self, number: int) -> None:
        """Two publishers that both send every message, one of them later."""
        chance = self.chance
        topic = f"both/{number}"
        for count, at in enumerate(self._times(1000)):
            id = f"{number}-{count}"
            time_us = at // SECOND * SECOND
            document = {"message_id": id, "timestamp": time_us // SECOND, "v": count}
            said = Said(at, topic, json.dumps(document).encode(), "left", topic,
                        [Part(topic, [Value("v", count)])], time_us=time_us, sent_us=time_us,
                        id=id)  # fmt: skip
            self.messages.append(said)
            self._again(said, chance.randrange(SECOND, 1500 * SECOND))
            self.messages[-1].client = "right"

    def _counted(self, number: int) -> None:
        """A publish queue: producer sequences, and repetitions of them."""
        chance = self.chance
        topic = f"queue/{number}"
        for count, at in enumerate(self._times(800)):
            producer = (f"q{number}", 1 + count // 50, 1 + 3 * count)
            said = Said(at, topic, b'{"v":%d,"seq":%d}' % (count % 3, count), f"q{number}", topic,
                        [Part(topic, [Value("v", count % 3)])], number=count,
                        producer=producer)  # fmt: skip
            self.messages.append(said)
            if chance.random() < 0.1:
                self._again(said)

    def _free(self, number: int) -> None:
        """What nobody has declared: texts, words, lists; an empty payload, debugging."""
        chance = self.chance
        topic = f"free/{number}"
        client = f"client-{number}"
        for at in self._times(1500):
            kind = chance.randrange(6)
            said = Said(at, topic, b"", client, topic)
            if kind == 0:
                said.payload, said.parts = b"on", [Part(topic, [Value("value", True, word="on")])]
            elif kind == 1:
                said.payload = "grün".encode()
                said.parts = [Part(topic, [Value("value", "grün")])]
            elif kind == 2:
                first, second = (at - each for each in (30 * SECOND, 20 * SECOND))
                said.payload = json.dumps(
                    [{"ts": first / SECOND, "v": 1}, {"ts": second / SECOND, "v": 2.5}]
                ).encode()
                said.parts = [Part(topic, [Value("v", 1, first), Value("v", 2.5, second)])]
            elif kind == 3:
                said.retain = True  # it clears a retained message: nothing is said
            elif kind == 4:
                said.topic = f"free/{number}/debug"
                said.stream, said.payload = said.topic, b'{"v":1}'
            else:
                said.payload = b'{"v":1e999,"w":NaN,"x":1}'
                said.bad = "v is inf, which is no number; w is nan, which is no number"
                said.parts = [Part(topic, [Value("x", 1)])]
            self.messages.append(said)
