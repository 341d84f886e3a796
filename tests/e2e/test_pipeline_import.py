"""`holdfast pipeline import` with real brokers: exactly once, killed or repeated."""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from holdfast.cli.main import main
from holdfast.client.blocking import Client
from holdfast.client.log import LogClient
from holdfast.log.record import FLAG_RETAIN
from holdfast.protocol.mqtt.properties import CONTENT_TYPE, USER_PROPERTY, encode_block
from holdfast.testing import InProcessBroker
from holdfast_lake.lake.lake import Lake
from holdfast_lake.source.options import parse
from holdfast_lake.source.source import newest_messages
from tests.e2e.brokers import Broker
from tests.support.journal_files import TIME_US, Journal, record
from tests.support.spark_free_lake import no_spark, rows

ROWS = 8_000
TOLD = "history.csv: 8,000 rows of 10 topics"
DOCUMENT = Path(__file__).parents[2] / "docs/import.md"


def history(path: Path) -> Path:
    lines = ["line,device,at,t"]
    for number in range(ROWS):
        at = 1_760_000_000 + number
        lines.append(f"l{number % 2},d{number % 5},{at},{number}")
    path.write_text("\n".join(lines) + "\n")
    return path


def stored(broker: InProcessBroker) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{broker.admin_port}/api/v1/log") as answer:
        return sum(end for _, end in json.loads(answer.read())["ranges"])


def messages(broker: InProcessBroker) -> Counter[tuple[str, bytes]]:
    source = {"servers": f"127.0.0.1:{broker.admin_port}"}
    found, _ = newest_messages(parse(source), 10 * ROWS)
    return Counter((topic, payload) for topic, payload, _ in found)


def commands(*names: str) -> list[list[str]]:
    """The commands of the document with one of some words, without their program."""
    lines = DOCUMENT.read_text().splitlines()
    found = [line for line in lines if line.startswith("holdfast pipeline import")]
    return [
        line.replace("'", "").split()[1:] for line in found if any(name in line for name in names)
    ]


def set_created(data: Path) -> None:
    """Let a data directory be one of another second than that of the test's first broker."""
    path = data / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "created": "2020-01-01T00:00:00+00:00"}))


def test_a_file_is_imported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    history(tmp_path / "history.csv")
    done, check = commands("history.csv")
    with InProcessBroker(admin=True) as broker:
        words = [f"127.0.0.1:{broker.port}" if each == "127.0.0.1:1883" else each for each in done]
        process = subprocess.Popen([sys.executable, "-m", "holdfast.cli.main", *words])
        before = stored(broker)
        while stored(broker) < before + 100:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert 0 < len(messages(broker)) < ROWS
        for _ in range(2):
            assert main(words) == 0
            assert capsys.readouterr().out == f"{TOLD} are in the log\n"
            found = messages(broker)
            assert len(found) == found.total() == ROWS
        topic, payload = next(each for each in found if b'"t": 7}' in each[1])
        assert (topic, json.loads(payload)["ts"]) == ("plant/l1/d2", "2025-10-09T08:53:27.000000Z")

        # The tables have the rows at their time.
        lake = Lake(tmp_path / "lake", spark=no_spark())
        port = f"127.0.0.1:{broker.admin_port}"
        assert lake.run(["records", "readings"], source=port).errors == {}
        # The log of another broker is refused.
        with InProcessBroker(admin=True, data=tmp_path / "other") as other:
            set_created(tmp_path / "other")
        with InProcessBroker(admin=True, data=tmp_path / "other") as other:
            refused = lake.run("records", source=f"127.0.0.1:{other.admin_port}").errors["records"]
        assert "was made from another log" in str(refused)
        assert any(
            "2025-10-09 08:53:27+00:00" in row and "plant/l1/d2" in row and "7.0" in row
            for row in rows(lake, "readings")
        )

        # A bad line: nothing is imported.
        with open("history.csv", "a") as file:
            file.write("l1,d1,yesterday,1\nl1,a/b,1,1\n")
        assert main(words) == 1
        error = capsys.readouterr().err
        assert "holdfast: history.csv:8002: at is 'yesterday', which is no time (" in error
        assert "2 rows can be no messages, so nothing was imported" in error
        assert messages(broker) == found
        assert main([*check, "--skip-bad"]) == 0
        assert f"{TOLD} could be imported, 2 left out" in capsys.readouterr().out

        Path("dump.jsonl").write_text('{"topic": "a/b", "payload": "{\\"ts\\": 1}"}\n')
        (dump,) = commands("dump.jsonl")
        words = [f"127.0.0.1:{broker.port}" if each == "127.0.0.1:1883" else each for each in dump]
        assert main(words) == 0
        assert messages(broker)["a/b", b'{"ts": 1}'] == 1


@contextmanager
def busy(broker: Broker) -> Iterator[None]:
    """Other clients that publish all the time, in topics that the import has subscribed to."""
    is_over = threading.Event()

    def publish() -> None:
        with Client("127.0.0.1", broker.port) as client:
            while not is_over.wait(0.05):
                client.publish("r/live", b"x", qos=1)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_many_retained_messages_of_a_busy_broker(
    mosquitto: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    """QoS 0 messages without end come before the SUBACK, and never is there silence."""
    with Client("127.0.0.1", mosquitto.port) as client:
        for number in range(3000):
            client.publish(f"{'rs'[number % 2]}/{number}", b"%d" % number, qos=0, retain=True)
        client.publish("r/last", b"1", qos=1, retain=True)
    with busy(mosquitto), InProcessBroker(admin=True) as broker:
        words = ["pipeline", "import", f"mqtt://127.0.0.1:{mosquitto.port}", "--retained"]
        words += ["--to", f"127.0.0.1:{broker.port}", "--quiet-for", "500ms"]
        words += ["--filter", "r/#", "--filter", "s/#"]
        for new in (3001, 0):
            assert main(words) == 0
            told = f"retains 3,001 messages: {new:,} imported, {3001 - new:,} were there already\n"
            assert capsys.readouterr().out.endswith(told)


def test_the_retained_messages_of_mosquitto(
    mosquitto: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client("127.0.0.1", mosquitto.port) as client:
        for number in range(50):
            client.publish(f"r/{number}", b"%d" % number, qos=1, retain=True)
        client.publish("not/retained", b"x", qos=1)
    with InProcessBroker(admin=True) as broker:
        (words,) = commands("--retained")
        ports = {"127.0.0.1:1883": broker.port, "mqtt://127.0.0.1:1884": mosquitto.port}
        here, there = (f"127.0.0.1:{port}" for port in ports.values())
        own = {"127.0.0.1:1883": here, "mqtt://127.0.0.1:1884": f"mqtt://{there}"}
        words = [own.get(each, each) for each in words] + ["--quiet-for", "300ms"]
        for new in (50, 0):
            assert main(words) == 0
            told = f"retains 50 messages: {new} imported, {50 - new} were there already\n"
            assert capsys.readouterr().out == f"mqtt://{there} {told}"
            assert messages(broker).total() == 50
        with Client("127.0.0.1", broker.port) as client:
            client.subscribe(("r/#", 1))
            kept = {each.topic: each.payload for each in client.messages(timeout_s=0.3)}
        assert kept == {f"r/{number}": b"%d" % number for number in range(50)}

        # To a broker that knows no producer sequences no file is imported.
        file = tmp_path / "a.jsonl"
        file.write_text('{"ts": 1}\n')
        assert main(["pipeline", "import", str(file), "--to", there, "--topic", "t"]) == 1
        assert "publish to a Holdfast broker" in capsys.readouterr().err
        words[words.index(f"mqtt://{there}")] = "mqtt://127.0.0.1:1"
        assert main(words) == 1
        assert "127.0.0.1:1: " in capsys.readouterr().err


def test_a_range_of_a_lake_is_published_again_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its properties and its old time, also after the lake has grown."""
    journal = Journal(tmp_path / "data", partitions=2)
    own = encode_block({CONTENT_TYPE: "text/plain", USER_PROPERTY: [("a", "1")]})

    def grow(begin: int, end: int) -> None:
        for number in range(begin, end):
            topic = f"plant/{number % 3}" if number % 5 else "other"
            journal.append(number % 2, [
                record(topic, b"%d" % number, timestamp_us=TIME_US + number * 1_000_000,
                       properties=own, flags=FLAG_RETAIN | 1)
            ])  # fmt: skip
        report = Lake(tmp_path / "lake", spark=no_spark()).run("records", source=journal.address)
        assert report.errors == {}

    grow(0, 40)
    with InProcessBroker(admin=True) as broker:
        words = [
            "pipeline",
            "replay",
            str(tmp_path / "lake"),
            "--topics",
            "plant/#",
            "--from",
            "2026-09-21T14:13:30Z",
            "--broker",
            f"127.0.0.1:{broker.port}",
        ]
        wanted = {number for number in range(60) if number >= 10 and number % 5}
        for end in (40, 40, 60):
            if end == 60:
                grow(40, 60)
            assert main(words) == 0
            count = len([number for number in wanted if number < end])
            assert f": {count:,} messages are in the log of 127.0.0.1" in capsys.readouterr().out
            found = list(LogClient(f"127.0.0.1:{broker.admin_port}").read("plant/#"))
            assert sorted(int(each.payload) for each in found) == sorted(
                number for number in wanted if number < end
            )
        for each in found:
            number = int(each.payload)
            assert each.topic == f"plant/{number % 3}"
            assert not each.retain
            assert each.properties[CONTENT_TYPE] == "text/plain"
            pairs = dict(each.properties[USER_PROPERTY])
            assert pairs["a"] == "1"
            assert pairs["hf-origin-time"] == str(TIME_US + number * 1_000_000)
        assert main([*words, "--to", "2026-09-21T14:13:35Z"]) == 0  # another range is another job
        assert len(list(LogClient(f"127.0.0.1:{broker.admin_port}").read("plant/#"))) == (
            len(found) + 4
        )
        # A day is included.
        assert main([*words, "--from", "2026-09-21", "--to", "2026-09-21"]) == 0
        assert ": 48 messages are in the log" in capsys.readouterr().out
    assert main([*words[:2], str(tmp_path / "none"), *words[3:]]) == 2
