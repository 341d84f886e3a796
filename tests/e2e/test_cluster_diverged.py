"""Records that a node has set aside are listed, and published again."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from holdfast.cli.cluster.diverged import LogDirectory, properties_of
from holdfast.cli.main import main
from holdfast.log.record import MESSAGE, Record
from holdfast.protocol.mqtt.properties import (
    MESSAGE_EXPIRY_INTERVAL,
    USER_PROPERTY,
    Properties,
    encode_block,
)
from holdfast.testing import Broker
from tests.e2e.wire import Wire
from tests.support.stored_messages import stored_messages

COUNT = 20


def publish(data: Path, name: str, count: int = COUNT) -> None:
    with (
        Broker(data=data, settings={"log.partitions": 2}) as broker,
        Wire(broker.port) as wire,
    ):
        wire.connect("c", clean=False, expiry_s=3600)
        for number in range(count):
            assert wire.publish(f"t/{number}", f"{name} {number}".encode(), 2, True) in (0, 0x10)


def texts(data: Path) -> list[str]:
    return [message.payload.decode() for message in stored_messages(data, "t/+")]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The log has "common" and "present", and the one that is set aside "common" and "kept"."""
    data = tmp_path / "data"
    publish(data, "common")
    shutil.copytree(data, tmp_path / "kept")
    publish(data, "present", 2 * COUNT)
    publish(tmp_path / "kept", "kept")
    (tmp_path / "kept").rename(data / "diverged-1")
    return data


def test_they_are_listed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "diverged", "--data", str(data)]) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first == f"{data}/diverged-1: {COUNT} messages"
    assert head.split() == ["partition", "start", "end", "messages", "others", "bytes"]
    assert sum(int(row.split()[3]) for row in rows) == COUNT
    shutil.rmtree(data / "diverged-1")
    assert main(["cluster", "diverged", "--data", str(data)]) == 0
    assert "has set nothing aside" in capsys.readouterr().out


def test_they_are_published_once(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = texts(data)
    with Broker(data=data, settings={"log.partitions": 2}) as broker:
        command = ["cluster", "diverged", "publish", "--data", str(data)]
        for _ in range(2):
            assert main([*command, "--server", f"127.0.0.1:{broker.port}"]) == 0
            assert f"{COUNT} messages published, 0 have expired" in capsys.readouterr().out
        with Wire(broker.port) as wire:
            wire.connect("reader")
            wire.subscribe(("t/+", 0))
            retained = [wire.message().payload.decode() for _ in range(2 * COUNT)]
        assert set(retained) == {f"present {number}" for number in range(2 * COUNT)}
    assert sorted(texts(data)) == sorted([*before, *(f"kept {n}" for n in range(COUNT))])


def test_what_a_message_has_again(data: Path) -> None:
    """Its own properties, the time that is left, and the time and the number that it had."""
    kept = LogDirectory(data / "diverged-1")
    own: Properties = {
        USER_PROPERTY: [("a", "b"), ("hf-seq", "p:1:2")],
        MESSAGE_EXPIRY_INTERVAL: 60,
    }
    encoded = encode_block(own)
    now_us = int(datetime.now(UTC).timestamp() * 1e6)
    record = Record(1, MESSAGE, properties=encoded, timestamp_us=now_us - 10_000_000, offset=7)
    found = properties_of(kept, record)
    assert found is not None
    assert found[MESSAGE_EXPIRY_INTERVAL] in (49, 50)
    pairs = found[USER_PROPERTY]
    assert isinstance(pairs, list)
    assert [name for name, _ in pairs] == ["a", "published-at", "hf-seq"]  # type: ignore[misc]
    assert pairs[-1] == ("hf-seq", f"diverged-{kept.incarnation}-1:1:8")
    record.timestamp_us = now_us - 60_000_000
    assert properties_of(kept, record) is None


def test_nothing_is_published_without_a_server(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["cluster", "diverged", "publish", "--data", str(data), "--server", "127.0.0.1:1"]
    assert main(command) == 1
    assert "run it again" in capsys.readouterr().err
