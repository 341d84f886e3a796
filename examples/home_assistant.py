"""A power meter that Home Assistant finds automatically, also after a restart.

Home Assistant reads `homeassistant/<component>/<device>/<object>/config` (MQTT discovery). These
messages and the newest state are retained, and the broker has them on its disk before it
acknowledges them. So the meter need not announce itself again when the broker or Home Assistant
starts again::

    python examples/home_assistant.py 127.0.0.1 meter-1

In Home Assistant: Settings, Devices and services, MQTT, with the same broker.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from random import uniform

from holdfast.client import Client, ClientError, Options, Reconnect, Will

SENSORS = {
    "power": ("Power", "W", "measurement"),
    "energy": ("Energy", "kWh", "total_increasing"),
}
"""By device class: the name, the unit and the state class."""
FAREWELL_S = 2.0
"""The most seconds to report that the device is switched off."""


def discovery(device: str) -> dict[str, dict[str, object]]:
    """The configuration of each sensor, by topic."""
    return {
        f"homeassistant/sensor/{device}/{kind}/config": {
            "name": name,
            "unique_id": f"{device}_{kind}",
            "device_class": kind,
            "state_class": state_class,
            "unit_of_measurement": unit,
            "state_topic": f"{device}/state",
            "value_template": f"{{{{ value_json.{kind} }}}}",
            "availability_topic": f"{device}/available",
            "device": {"identifiers": [device], "name": device, "manufacturer": "Example"},
        }
        for kind, (name, unit, state_class) in SENSORS.items()
    }


async def run(server: str, device: str, readings: AsyncIterator[dict[str, float]]) -> None:
    """Announce the device, and publish readings until there are no more."""
    options = Options(
        client_id=device, will=Will(f"{device}/available", b"offline", qos=1, retain=True)
    )
    connected = asyncio.Event()
    async with Client(
        servers=[server],
        reconnect=Reconnect(),
        options=options,
        on_connect=lambda session_present, server: connected.set(),
    ) as client:
        try:
            for topic, config in discovery(device).items():
                await client.publish(topic, json.dumps(config), qos=1, retain=True)
            async for reading in readings:
                await client.publish(f"{device}/state", json.dumps(reading), qos=1, retain=True)
                if connected.is_set():
                    # The broker has published the will of the connection before this one.
                    connected.clear()
                    await client.publish(f"{device}/available", b"online", qos=1, retain=True)
        finally:
            # A connection that ends in order has no will.
            with contextlib.suppress(TimeoutError, ClientError):
                async with asyncio.timeout(FAREWELL_S):
                    await client.publish(f"{device}/available", b"offline", qos=1, retain=True)


async def measure() -> AsyncIterator[dict[str, float]]:
    energy_kwh = 0.0
    while True:
        power_w = uniform(180, 220)
        energy_kwh += power_w / 3_600_000
        yield {"power": round(power_w, 1), "energy": round(energy_kwh, 6)}
        await asyncio.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="A power meter for Home Assistant.")
    parser.add_argument("server", help="the broker: 127.0.0.1 or mqtts://host:8883")
    parser.add_argument("device", help="the name of the meter: meter-1")
    given = parser.parse_args()
    try:
        asyncio.run(run(given.server, given.device, measure()))
    except KeyboardInterrupt:
        return 130
    except (ClientError, ValueError) as error:
        print(f"home_assistant: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
