"""A full disk: publishes are refused with a reason, readers are served, and when space is back
so is the broker, with everything it ever acknowledged."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import wire
from tests.e2e.brokers import Holdfast
from tests.e2e.conftest import StartHoldfast

DISK_BYTES = 32 << 20
BALLAST_BYTES = 16 << 20
PAYLOAD_BYTES = 32 << 10
QUOTA_EXCEEDED = 0x97
SPACE_BACK_S = 20.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with half of it taken by a file `ballast`."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(mounted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    (mounted / "ballast").write_bytes(bytes(BALLAST_BYTES))
    yield mounted
    # Lazily: the broker is ended by a fixture that may be torn down later.
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_a_reserve_above_the_size_of_the_disk_is_refused(
    small_disk: Path, start_holdfast: StartHoldfast
) -> None:
    """The broker would refuse QoS 1 and 2 however much is free."""
    with pytest.raises(RuntimeError, match=r"reserve_bytes = 33554432: the disk of .* has "):
        start_holdfast(settings(DISK_BYTES), data=small_disk / "data")


def settings(reserve_bytes: int) -> dict[str, dict[str, object]]:
    return {"log": {"reserve_bytes": reserve_bytes, "segment_bytes": 1 << 20, "partitions": 2}}


class Traffic:
    """Numbered QoS 1 messages on `t`, and two durable subscribers: one here, one away."""

    def __init__(self, broker: Holdfast) -> None:
        self.broker = broker
        self.acknowledged: list[int] = []
        self.number = 0
        self.present = wire.Wire(broker.port)
        self.present.connect("present", expiry_s=3600)
        self.present.subscribe(("t", 1))
        with wire.Wire(broker.port) as away:
            away.connect("away", expiry_s=3600)
            away.subscribe(("t", 1))
            away.disconnect()
        self.publisher = wire.Wire(broker.port)
        self.publisher.connect("publisher", expiry_s=3600)

    def payload(self) -> bytes:
        self.number += 1
        return b"%08d" % self.number + bytes(PAYLOAD_BYTES)

    def publish(self) -> int:
        """One message, answered. Returns the reason code."""
        payload = self.payload()
        reason = self.publisher.publish("t", payload, qos=1)
        if reason < 0x80:
            self.acknowledged.append(self.number)
        return reason

    def fill(self) -> None:
        for _ in range(2 * DISK_BYTES // PAYLOAD_BYTES):
            reason = self.publish()
            if reason >= 0x80:
                assert reason == QUOTA_EXCEEDED
                return
        pytest.fail("more was acknowledged than the disk can hold")

    def wait_until_accepted(self) -> None:
        deadline = time.monotonic() + SPACE_BACK_S
        while self.publish() >= 0x80:
            assert time.monotonic() < deadline, "space is back, publishes are still refused"
            time.sleep(0.1)


def numbers(reader: wire.Wire, count: int) -> list[int]:
    return [int(reader.message().payload[:8]) for _ in range(count)]


def test_full_disk(start_holdfast: StartHoldfast, small_disk: Path) -> None:
    """[MQTT-3.4.2-1]"""
    broker = start_holdfast(settings(4 << 20), data=small_disk / "data")
    traffic = Traffic(broker)
    traffic.fill()
    assert len(traffic.acknowledged) > 100

    # QoS 2 is refused in the same way, MQTT 3 has no negative answer: it gets none.
    with wire.Wire(broker.port) as second:
        second.connect("second")
        assert second.publish("t", b"refused", qos=2) == QUOTA_EXCEEDED
        assert second.publish("t", b"refused", qos=1) == QUOTA_EXCEEDED
    with wire.Wire(broker.port, version=4) as third:
        third.connect("third")
        third.send(wire.publish("t", b"refused", 1, 1, version=4))
        with pytest.raises((wire.Closed, TimeoutError)):
            third.expect(wire.PUBACK, 1.0)

    # Readers are served: the one that is here, one that returns, QoS 0, retained look-ups.
    assert numbers(traffic.present, len(traffic.acknowledged)) == traffic.acknowledged
    with wire.Wire(broker.port) as away:
        assert away.connect("away", clean=False, expiry_s=3600).session_present
        assert numbers(away, len(traffic.acknowledged)) == traffic.acknowledged
        traffic.publisher.publish("t", b"00000000 now")
        assert away.message().payload == b"00000000 now"
        away.disconnect()
    assert traffic.present.message().payload == b"00000000 now"
    assert '"disk_full":true' in broker.admin("/readyz")[1].replace(" ", "")

    (small_disk / "ballast").unlink()
    before = len(traffic.acknowledged)
    traffic.wait_until_accepted()
    for _ in range(20):
        assert traffic.publish() < 0x80
    broker.kill()
    broker.start()
    with wire.Wire(broker.port) as away:
        assert away.connect("away", clean=False, expiry_s=3600).session_present
        rest = traffic.acknowledged[before:]
        # Progress is recorded lazily: a crash may repeat, never skip.
        repeated = numbers(away, 1)[0]
        while repeated != rest[0]:
            repeated = numbers(away, 1)[0]
        assert numbers(away, len(rest) - 1) == rest[1:]


def test_disk_without_any_space(start_holdfast: StartHoldfast, small_disk: Path) -> None:
    """Somebody else takes the reserve, too: writes fail. What is not on disk is not
    acknowledged; the broker lives on and goes on when it can."""
    broker = start_holdfast(settings(1 << 20), data=small_disk / "data")
    traffic = Traffic(broker)
    for _ in range(10):
        assert traffic.publish() < 0x80
    hog = small_disk / "hog"
    with hog.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            pass
    unanswered: dict[int, int] = {}
    for _ in range(200):
        payload = traffic.payload()
        packet_id = traffic.publisher.next_packet_id()
        unanswered[packet_id] = traffic.number
        traffic.publisher.send(wire.publish("t", payload, 1, packet_id))
    # Reading goes on, for who is here and for who comes, where nothing has to be recorded.
    with wire.Wire(broker.port) as other:
        other.connect("other")
        other.subscribe(("live", 0))
        other.publish("live", b"qos 0 goes on")
        assert other.message().payload == b"qos 0 goes on"
    assert numbers(traffic.present, 10) == traffic.acknowledged

    hog.unlink()
    while unanswered:
        answer = traffic.publisher.expect(wire.PUBACK, SPACE_BACK_S)
        number = unanswered.pop(answer.packet_id)
        if answer.reason < 0x80:
            traffic.acknowledged.append(number)
        else:
            assert answer.reason == QUOTA_EXCEEDED
    traffic.wait_until_accepted()
    broker.kill()
    broker.start()
    with wire.Wire(broker.port) as away:
        assert away.connect("away", clean=False, expiry_s=3600).session_present
        assert numbers(away, len(traffic.acknowledged)) == traffic.acknowledged


def test_a_broker_that_waits_for_space_can_be_stopped(
    start_holdfast: StartHoldfast, small_disk: Path
) -> None:
    """What the disk did not take was not acknowledged, so it need not be waited for."""
    broker = start_holdfast(settings(1), data=small_disk / "data")
    traffic = Traffic(broker)
    traffic.publisher.timeout_s = 1.0
    with contextlib.suppress(TimeoutError):
        traffic.fill()
    # A message that has taken the very last page leaves nothing waiting: a session with a will
    # that needs some more does.
    late = wire.Wire(broker.port)
    will = wire.Will("w", bytes(PAYLOAD_BYTES))
    late.send(wire.connect("late", 5, False, 0, will, [(wire.SESSION_EXPIRY, 3600)]))
    deadline = time.monotonic() + SPACE_BACK_S
    while "journal_waits_for_space" not in broker.log_text():
        assert time.monotonic() < deadline, "nothing waits for space"
        time.sleep(0.02)
    assert broker.stop() == 0
    late.abort()
    assert "journal_not_drained" in broker.log_text()
    (small_disk / "ballast").unlink()
    broker.start()
    with wire.Wire(broker.port) as away:
        assert away.connect("away", clean=False, expiry_s=3600).session_present
        assert numbers(away, len(traffic.acknowledged)) == traffic.acknowledged
