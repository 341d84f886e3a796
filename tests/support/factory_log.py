"""A log of a small factory: every kind of payload, gaps, repetitions, late and broken messages, two
days of it. The same arguments give the same records."""

import json
from pathlib import Path

from tests.support.journal_files import Journal

DAY_US = 86_400_000_000
BEGAN_US = 20_700 * DAY_US + 20 * 3_600_000_000
STEP_US = 900_000
SEGMENT_BYTES = 60_000
DEVICES = 7


def write_factory_log(directory: Path, messages: int) -> Journal:
    journal = Journal(directory, partitions=5, segment_bytes=SEGMENT_BYTES)
    for number in range(messages):
        time_us = BEGAN_US + number * STEP_US + (number // (messages // 2)) * 8 * 3_600_000_000
        topic, payload = message(number, time_us)
        journal.publish(topic, payload, timestamp_us=time_us)
        if number % 50 == 49:
            journal.publish(topic, payload, timestamp_us=time_us + 1)
    return journal


def message(number: int, time_us: int) -> tuple[str, bytes]:
    device = number % DEVICES
    if number % 37 == 5:
        return f"plant/{device}/json", b'{"value": '
    if device == 5:
        return f"plant/{device}/number", b"%d.%d" % (number, number % 10)
    if device == 6:
        state = b"offline" if number % 4 == 0 else b"online"
        return f"plant/{number % 3}/json/status", state
    late_us = 200_000_000 if number % 41 == 0 else 0
    sequence = number // DEVICES
    fields = {
        "message_id": f"{device} {sequence}",
        "seq": sequence + (number // 300) * 2,  # numbers are left out now and then
        "ts": (time_us - late_us) / 1e6,
        "sent": (time_us - 3_000 - number % 17) / 1e6,
        "motor": {"temperature": number / 7, "on": number % 2 == 0},
        "state": f"word {number % 3}",
    }
    return f"plant/{device}/json", json.dumps(fields).encode()
