"""A fleet of 22 bought devices over eight hours of a night: what each publishes and what it means.

The night is that of Berlin in which summer time ends, and it has a midnight of UTC. The meanings
are `plant_day.Said`, of which `plant_oracle` makes the tables. Nothing here is code of the
pipeline.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from zoneinfo import ZoneInfo

from tests.support import sparkplug_wire as wire
from tests.support.plant_day import Part, Said, Value

ZONE: Final = "Europe/Berlin"
BEGIN_S: Final = int(datetime(2026, 10, 24, 19, tzinfo=UTC).timestamp())
HOURS: Final = 8
END_S: Final = BEGIN_S + HOURS * 3600
MESSAGES_MIN: Final = 8000


@dataclass
class Published:
    """One message of a device, `at_s` by the simulated clock."""

    at_s: float
    topic: str
    payload: bytes
    meaning: Said
    breaks: bool = False
    """True if the connection has ended after the message before, without a DISCONNECT: the broker
    publishes the will then."""


@dataclass
class Device:
    """One connection."""

    client: str
    messages: list[Published] = field(default_factory=list)
    will: Said | None = None


def said(topic: str, payload: bytes, device: str, values: dict[str, Any], **more: Any) -> Said:
    units = more.pop("units", {})
    parts = [Part(device, [each if isinstance(each, Value) else
                           Value(name, each, unit=units.get(name))
                           for name, each in values.items()])]  # fmt: skip
    time_us = more.get("time_us")
    return Said(0, topic, payload, "", more.pop("stream", topic), parts,
                **{"sent_us": time_us} | more)  # fmt: skip


def local(at_s: int) -> str:
    """The local time of a device that knows its zone and does not say it."""
    return datetime.fromtimestamp(at_s, ZoneInfo(ZONE)).strftime("%Y-%m-%dT%H:%M:%S")


class Fleet:
    """All devices."""

    def __init__(self, seed: int = 7) -> None:
        self.chance = random.Random(seed)
        self.devices: list[Device] = []
        self.local: set[tuple[str, bytes]] = set()
        """The messages whose time has no zone."""
        for number in (1, 2):
            self._tasmota(number)
            self._phone(number)
            self._soil(number)
            self._board(number)
            self._press(number)
            self._logger(number)
            self._plug(number)
        self._zigbee()
        self._receiver()
        self._edge()

    def meanings(self) -> dict[tuple[str, bytes], Said]:
        """Each message that can be in the log."""
        found = {}
        for device in self.devices:
            for each in (*(one.meaning for one in device.messages), device.will):
                if each is not None:
                    each.client = device.client
                    found[each.topic, each.payload] = each
        return found

    def names(self) -> set[str]:
        """The devices of the tables."""
        return {part.device for each in self.meanings().values() for part in each.parts}

    def _times(self, pace_s: int, silences: int = 1) -> list[int]:
        """When a device publishes, with silences of 10 minutes to 2 hours."""
        chance = self.chance
        at = BEGIN_S + chance.randrange(60)
        silent = sorted(chance.uniform(1.5 * 3600, HOURS * 3600) for _ in range(silences))
        times = []
        while at < END_S:
            times.append(at)
            at += round(pace_s * chance.uniform(0.8, 1.2))
            if silent and at - BEGIN_S > silent[0]:
                silent.pop(0)
                at += chance.randrange(600, 7200)
        return times

    def _add(
        self,
        client: str,
        pace_s: int,
        make: Callable[[int, int], Said | None],
        presence: tuple[str, str, bytes, bytes] | None = None,
    ) -> Device:
        """Adds a device. `presence` are a topic, a device, and the words for online and offline."""
        device = Device(client)
        if presence is not None:
            topic, name, online, offline = presence
            device.will = said(topic, offline, name, {"$online": False})
        last = 0
        for count, at in enumerate(self._times(pace_s, 3 if presence else 1)):
            if presence is not None and (not last or at - last > 500):
                topic, name, online, _ = presence
                meaning = said(topic, online, name, {"$online": True})
                device.messages.append(Published(at, topic, online, meaning, bool(last)))
            last = at
            found = make(count, at)
            if found is not None:
                device.messages.append(Published(at, found.topic, found.payload, found))
        self.devices.append(device)
        return device

    def _tasmota(self, number: int) -> None:
        name = f"plug{number}"

        def make(count: int, at: int) -> Said:
            power = round(self.chance.uniform(0, 90), 1)
            document = {"Time": local(at), "ENERGY": {"Total": count, "Power": power}}
            payload = json.dumps(document).encode()
            self.local.add((f"tele/{name}/SENSOR", payload))
            return said(f"tele/{name}/SENSOR", payload, name,
                        {"ENERGY.Total": count, "ENERGY.Power": power},
                        units={"ENERGY.Total": "kWh", "ENERGY.Power": "W"},
                        time_us=at * 1_000_000)  # fmt: skip

        self._add(name, 60, make, (f"tele/{name}/LWT", name, b"Online", b"Offline"))

    def _plug(self, number: int) -> None:
        """A Shelly: components, and its own clock only in `sys`."""
        name = f"shellyplus1pm-{number}"

        def make(count: int, at: int) -> Said:
            if count % 5 == 0:
                document: dict[str, Any] = {"mac": f"A{number}", "uptime": count, "time": "22:33",
                                            "unixtime": at}  # fmt: skip
                return said(f"{name}/status/sys", json.dumps(document).encode(), name,
                            {"sys.mac": f"A{number}", "sys.uptime": count},
                            time_us=at * 1_000_000)  # fmt: skip
            watts = round(self.chance.uniform(0, 2000), 1)
            document = {"id": 0, "output": count % 2 == 0, "apower": watts}
            return said(f"{name}/status/switch:0", json.dumps(document).encode(), name,
                        {"switch:0.output": count % 2 == 0, "switch:0.apower": watts},
                        units={"switch:0.apower": "W"})  # fmt: skip

        self._add(name, 75, make, (f"{name}/online", name, b"true", b"false"))

    def _phone(self, number: int) -> None:
        """It keeps its positions while it has no network, and sends them all at once."""
        topic, name = f"owntracks/u{number}/phone", f"u{number}/phone"
        kept: list[Published] = []
        device = Device(name)
        for count, at in enumerate(self._times(45)):
            document = {"_type": "location", "lat": 52 + count / 1000, "batt": 90, "tst": at}
            meaning = said(topic, json.dumps(document).encode(), name,
                           {"_type": "location", "lat": 52 + count / 1000, "batt": 90},
                           units={"lat": "°", "batt": "%"},
                           time_us=at * 1_000_000)  # fmt: skip
            kept.append(Published(at, topic, meaning.payload, meaning))
            if count % 100 < 60 or count % 100 > 98:
                for late, each in enumerate(reversed(kept)):
                    each.at_s = at + late / 1000
                device.messages += sorted(kept, key=lambda each: each.at_s)
                kept = []
        self.devices.append(device)

    def _soil(self, number: int) -> None:
        """The Things Stack: numbered uplinks, of which some are lost; a join begins again."""
        name = f"soil-{number}"
        topic = f"v3/app@ttn/devices/{name}/up"
        state = {"count": 0, "of": 0}

        def make(count: int, at: int) -> Said | None:
            state["count"] += 1
            if count == 200:
                state["count"] = 0
            if self.chance.random() < 0.05:
                return None
            value = round(self.chance.uniform(0, 60), 2)
            document = {
                "end_device_ids": {"device_id": name}, "received_at": f"{utc(at)}Z",
                "uplink_message": {
                    "f_port": 1, "f_cnt": state["count"], "frm_payload": "AQI=",
                    "decoded_payload": {"moisture": value}, "received_at": f"{utc(at - 1)}Z",
                },
            }  # fmt: skip
            return said(topic, json.dumps(document).encode(), name,
                        {"uplink_message.f_port": 1,
                         "uplink_message.decoded_payload.moisture": value},
                        time_us=(at - 1) * 1_000_000, number=state["count"])  # fmt: skip

        self._add(name, 90, make)

    def _board(self, number: int) -> None:
        """ESPHome: one value a topic with its unit, and no time."""
        name = ("attic", "garage")[number - 1]

        def make(count: int, at: int) -> Said:
            sensor = ("temperature", "humidity")[count % 2]
            value = round(self.chance.uniform(-5, 90), 1)
            unit = ("°C", "%")[count % 2]
            text = f"{value} {unit}"
            return said(f"{name}/sensor/{sensor}/state", text.encode(), name,
                        {f"sensor/{sensor}": Value(f"sensor/{sensor}", value, word=text, unit=unit)}
                        )  # fmt: skip

        self._add(name, 30, make, (f"{name}/status", name, b"online", b"offline"))

    def _press(self, number: int) -> None:
        """A counter, losses, repetitions, broken payloads; the clock of the second is ahead."""
        name = f"press{number}"
        topic = f"plant/line1/{name}/data"
        ahead_s = 0 if number == 1 else 20 * 60
        state = {"count": 0}
        device = Device(name)
        for at in self._times(20, 2):
            state["count"] += 1
            luck = self.chance.random()
            if luck < 0.03:
                continue  # lost
            if luck > 0.997:
                state["count"] = 0  # its power was off
            document = {"ts": at + ahead_s, "seq": state["count"], "rpm": at % 977, "on": True}
            payload = json.dumps(document).encode()
            meaning = said(topic, payload, name, {"rpm": at % 977, "on": True},
                           time_us=(at + ahead_s) * 1_000_000, number=state["count"])  # fmt: skip
            if 0.03 < luck < 0.05:
                meaning = Said(0, topic, payload[:-1], "", topic, bad="no JSON")
            delay_s = 200 if 0.05 < luck < 0.08 else 0
            times = 2 if 0.08 < luck < 0.12 else 1
            for again in range(times):
                device.messages.append(
                    Published(at + delay_s + 30 * again, topic, meaning.payload, meaning)
                )
        device.messages.sort(key=lambda each: each.at_s)
        self.devices.append(device)

    def _logger(self, number: int) -> None:
        topic, name = f"csv/{number}", str(number)

        def make(count: int, at: int) -> Said:
            value = round(self.chance.uniform(0, 50), 1)
            values = {each.metric: each for each in (
                Value("column_2", count, at * 1_000_000), Value("column_3", value, at * 1_000_000)
            )}  # fmt: skip
            return said(topic, f"{utc(at)}Z;{count};{value}".encode(), name, values,
                        time_us=at * 1_000_000)  # fmt: skip

        self._add(f"logger{number}", 60, make)

    def _zigbee(self) -> None:
        """A coordinator with a door and a bulb."""

        def make(count: int, at: int) -> Said:
            name = ("door", "bulb")[count % 2]
            last = datetime.fromtimestamp(at, ZoneInfo(ZONE)).isoformat()
            document = {"battery": f"{90 - count % 7}.00", "contact": count % 3 == 0,
                        "linkquality": count, "last_seen": last}  # fmt: skip
            return said(f"zigbee2mqtt/{name}", json.dumps(document).encode(), name,
                        {"battery": 90 - count % 7, "contact": count % 3 == 0,
                         "linkquality": count}, units={"battery": "%"},
                        time_us=at * 1_000_000)  # fmt: skip

        online = (b'{"state":"online"}', b'{"state":"offline"}')
        self._add("z2m", 40, make, ("zigbee2mqtt/bridge/state", "zigbee2mqtt/bridge", *online))

    def _receiver(self) -> None:
        """Three thermometers by radio, in one topic, with local time."""

        def make(count: int, at: int) -> Said:
            number = count % 3 + 1
            value = round(self.chance.uniform(-10, 40), 1)
            document = {"time": local(at).replace("T", " "), "model": "Acurite", "id": number,
                        "temperature_C": value, "mic": "CRC", "battery_ok": count}  # fmt: skip
            payload = json.dumps(document).encode()
            self.local.add(("rtl_433/pi/events", payload))
            return said("rtl_433/pi/events", payload, f"Acurite/{number}",
                        {"temperature_C": value, "battery_ok": count},
                        units={"temperature_C": "°C"},
                        time_us=at * 1_000_000)  # fmt: skip

        self._add("rtl", 25, make)

    def _edge(self) -> None:
        """A Sparkplug edge node with a device. It is born again after each silence."""
        device, stream = Device("edge"), "spBv1.0/G/E"
        count, before = 0, 0

        def publish(at: int, kind: str, part: str, values: list[Value], *metrics: bytes) -> None:
            payload = wire.payload(*metrics, time_ms=at * 1000, seq=count % 256)
            name = f"G/E{part and '/' + part}"
            meaning = Said(
                0, f"spBv1.0/G/{kind}/E{part and '/' + part}", payload, "", stream,
                [Part(name, values)], time_us=at * 1_000_000, sent_us=at * 1_000_000,
                number=count, is_sparkplug=True, begins_run=kind == "NBIRTH",
            )  # fmt: skip
            breaks = kind == "NBIRTH" and before > 0
            device.messages.append(Published(at, meaning.topic, payload, meaning, breaks))

        born = wire.metric(0, wire.INT64, name="bdSeq")
        for at in self._times(40, 3):
            if at - before > 500:
                count = 0
                publish(at, "NBIRTH", "", [Value("$online", True), Value("bdSeq", 0)], born)
                count = 1
                publish(at, "DBIRTH", "D",
                        [Value("$online", True), Value("level", 0.5, unit="m³")],
                        wire.metric(0.5, wire.DOUBLE, name="level", alias=8)
                        + wire.unit("m3"))  # fmt: skip
                count = 2
            level = self.chance.uniform(0, 9)
            if self.chance.random() < 0.03:
                count += 1
            publish(at, "DDATA", "D", [Value("level", level, unit="m³")],
                    wire.metric(level, wire.DOUBLE, alias=8, typed=False))  # fmt: skip
            count, before = count + 1, at
        device.will = Said(
            0, "spBv1.0/G/NDEATH/E", wire.payload(born), "", stream,
            [Part(each, [Value("$online", False)]) for each in ("G/E", "G/E/D")],
            is_sparkplug=True,
        )  # fmt: skip
        self.devices.append(device)


def by_the_broker(time_us: int, at_us: int) -> int:
    """A local time of the hour that the night has twice is the last one that is not after the
    broker's, but for the five minutes by which a clock may be ahead."""
    time = datetime.fromtimestamp(time_us / 1_000_000, ZoneInfo(ZONE))
    first, second = (round(time.replace(fold=fold).timestamp() * 1_000_000) for fold in (0, 1))
    return second if second <= at_us + 300_000_000 else first


def utc(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
