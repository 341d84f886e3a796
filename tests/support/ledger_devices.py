"""Devices that publish numbered readings to a cluster, and remember what was acknowledged: what the
tables of the pipeline have to have in the end, exactly."""

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.dataset as ds

from holdfast.client import Options, Reconnect
from holdfast.client.blocking import Client

PER_MINUTE = 600
"""Readings of a device in a minute of its own time, whatever the pace of publishing."""
BEGAN_S = int(time.time()) // 3600 * 3600 - 7200
"""Of the devices' time: so far in the past that 72,000 readings of a device can be believed."""
SESSION_EXPIRY_S = 3600
REFUSED = 0x80
END_S = 120.0
REST_S = 0.05


class Device(threading.Thread):
    """Publishes 0, 1, 2, ..., the next when the one before is acknowledged. A refused one is sent
    again, and the client sends again what it has no answer to: so the log may have some twice."""

    def __init__(self, name: str, servers: Sequence[str], pause_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self.topic = f"plant/{name}"
        self.acknowledged = 0
        self.error: BaseException | None = None
        self._pause_s = pause_s
        self._stopping = threading.Event()
        options = Options(client_id=name, clean_start=False, session_expiry_s=SESSION_EXPIRY_S)
        self._client = Client(servers=list(servers), options=options, reconnect=Reconnect())

    def run(self) -> None:
        try:
            self._client.connect()
            while not self._stopping.wait(self._pause_s):
                payload = json.dumps(reading(self.topic, self.acknowledged)).encode()
                while self._client.publish(self.topic, payload, qos=1).reason >= REFUSED:
                    time.sleep(REST_S)
                self.acknowledged += 1
        except BaseException as error:  # noqa: BLE001 - told by `finish`
            self.error = error
        finally:
            self._client.close()

    def finish(self) -> None:
        """Ends after the acknowledgement that is waited for."""
        self._stopping.set()
        self.join(END_S)
        assert not self.is_alive(), f"{self.name} still waits for an acknowledgement"
        assert self.error is None, self.error


def reading(topic: str, number: int) -> dict[str, Any]:
    return {
        "message_id": f"{topic} {number}",
        "seq": number,
        "ts": BEGAN_S + number * 60 / PER_MINUTE,
        "value": number * 7 % 101,
    }


class Ledger:
    """Of all devices."""

    def __init__(self, servers: Sequence[str], count: int = 4, pause_s: float = 0.01) -> None:
        turned = [[*servers[at:], *servers[:at]] for at in range(len(servers))]
        self.devices = [
            Device(f"device-{n}", turned[n % len(servers)], pause_s) for n in range(count)
        ]

    def start(self) -> None:
        for device in self.devices:
            device.start()

    def finish(self) -> None:
        for device in self.devices:
            device.finish()

    @property
    def acknowledged(self) -> int:
        return sum(device.acknowledged for device in self.devices)

    def check(self, lake: Path) -> None:
        """The tables, as someone sees them who knows only the files."""
        self._check_readings(rows_of(lake, "readings"))
        self._check_minutes(rows_of(lake, "device_minutes"))
        assert rows_of(lake, "missing") == []
        assert not (lake / "quarantine").exists()
        stored: Counter[str] = Counter()
        for row in rows_of(lake, "topics"):
            stored[row["topic"]] += row["messages"]
        assert sum(stored.values()) == len(rows_of(lake, "records"))
        for device in self.devices:
            assert stored[device.topic] >= device.acknowledged

    def _check_readings(self, rows: list[dict[str, Any]]) -> None:
        rows = [row for row in rows if row["metric"] != "$repeated"]
        found = sorted((row["device"], row["sequence"], row["value_double"]) for row in rows)
        assert found == sorted(
            (device.topic, number, reading(device.topic, number)["value"])
            for device in self.devices
            for number in range(device.acknowledged)
        )

    def _check_minutes(self, rows: list[dict[str, Any]]) -> None:
        expected: defaultdict[tuple[str, datetime], list[int]] = defaultdict(list)
        for device in self.devices:
            for number in range(device.acknowledged):
                minute_s = BEGAN_S + number // PER_MINUTE * 60
                window = datetime.fromtimestamp(minute_s, UTC)
                value = reading(device.topic, number)["value"]
                expected[device.topic, window].append(value)
        found = {(row["device"], row["window_start"]): row for row in rows}
        assert len(found) == len(rows), "a window of a device twice"
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            row = found[key]
            assert (row["readings"], row["numbers"]) == (len(values), len(values)), key
            assert (row["first"], row["last"]) == (values[0], values[-1]), key
            assert (row["min"], row["max"]) == (min(values), max(values)), key
            assert abs(row["mean"] - fmean(values)) < 1e-9, key


def rows_of(lake: Path, table: str) -> list[dict[str, Any]]:
    """Empty for a table without files."""
    if not list((lake / table).rglob("*.parquet")):
        return []
    found = ds.dataset(lake / table, partitioning="hive").to_table()
    return [dict(row) for row in found.to_pylist()]
