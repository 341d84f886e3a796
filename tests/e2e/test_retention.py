"""Retention on a running broker: the journal stays bounded, sessions hold it back within limits,
retained messages outlive the segments they came in."""

import json
import re

from tests.e2e import wire
from tests.e2e.brokers import PROCESSES, Holdfast
from tests.e2e.conftest import StartHoldfast
from tests.support.waiting import until

SMALL = {"segment_bytes": 65536, "snapshot_bytes": 65536, "partitions": 2}


def first_offsets(broker: Holdfast) -> list[int]:
    return [first for first, _ in json.loads(broker.admin("/api/v1/log")[1])["ranges"]]


def journal_bytes(broker: Holdfast) -> int:
    """Without the segment that each process writes, whose space is reserved."""
    sealed = [
        path for each in broker.directories() for path in sorted(each.glob("journal/*.log"))[:-1]
    ]
    return sum(path.stat().st_size for path in sealed)


def publish_many(broker: Holdfast, count: int, topic: str = "t") -> None:
    with wire.Wire(broker.port) as client:
        client.connect()
        for number in range(count):
            client.publish(topic, b"%06d" % number + bytes(1000), 1)


def until_at_most(broker: Holdfast, limit: int, topic: str) -> None:
    """Waits until the journal is as small. Only what is below the snapshot before the last one is
    removed, so each snapshot is followed by messages for which another one is due."""
    written = -1

    def is_small() -> bool:
        nonlocal written
        snapshots = broker.log_text().count(" snapshot sequence=")
        if snapshots > written:
            written = snapshots
            publish_many(broker, 70, topic)
        return journal_bytes(broker) <= limit

    until(is_small, "the journal is too large")


def test_journal_stays_bounded_and_retained_messages_stay(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast({"log": SMALL, "log.retention": {"bytes": 262144}})
    with wire.Wire(broker.port) as client:
        client.connect()
        client.publish("kept", b"retained", 1, retain=True)
    publish_many(broker, 1500)
    until(lambda: max(first_offsets(broker)) > 0, "nothing was removed")
    # A recovery may need what came after the older of the two snapshots: what the last two
    # intervals brought, and what came while they were written. The rest is the limit.
    until_at_most(broker, PROCESSES * (262144 + 6 * 65536), "t")
    broker.kill()
    broker.start()
    with wire.Wire(broker.port) as client:
        client.connect()
        client.subscribe(("kept", 1))
        message = client.message()
        assert (message.payload, message.retain) == (b"retained", True)


def test_session_that_is_away_holds_the_log_back_up_to_its_limit(
    start_holdfast: StartHoldfast,
) -> None:
    retention = {"bytes": 131072, "session_bytes": 10_000_000}
    broker = start_holdfast({"log": SMALL, "log.retention": retention})
    with wire.Wire(broker.port) as away:
        away.connect("away", clean=False, expiry_s=3600)
        away.subscribe(("t", 1))
    publish_many(broker, 600)
    until(lambda: "retention_held_back" in broker.log_text(), "retention never looked")
    metrics = broker.admin("/metrics")[1]
    pinned = re.findall(r"^holdfast_log_pinned_bytes\{.*\} (\S+)", metrics, re.MULTILINE)
    assert [float(each) > 131072 for each in pinned if float(each)] == [True]
    assert re.search(r"^holdfast_log_pinned_bytes_limit\{.*\} 1e\+07", metrics, re.MULTILINE)
    free = re.findall(r"^holdfast_disk_full_in_seconds\{.*\} (\S+)", metrics, re.MULTILINE)
    assert set(free) == {"+Inf"}, "retention bounds the log"
    with wire.Wire(broker.port) as away:
        assert away.connect("away", clean=False, expiry_s=3600).session_present
        numbers = [int(away.message().payload[:6]) for _ in range(600)]
    assert numbers == list(range(600))


def test_last_messages_of_every_topic_stay(start_holdfast: StartHoldfast) -> None:
    """Seed 003's ring: of each topic the last so many, however long ago they came."""
    retention = {"age_s": 0, "per_topic_last": 10}
    broker = start_holdfast({"log": SMALL, "log.retention": retention})
    publish_many(broker, 10, "quiet")
    publish_many(broker, 800, "busy")
    # Superseded messages take no space.
    until_at_most(broker, 300_000, "busy")
    with wire.Wire(broker.port) as client:
        client.connect()
        client.publish("t", b"still works", 1)
