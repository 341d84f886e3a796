"""Debian's mosquitto_pub, mosquitto_sub and mosquitto_rr against Holdfast (and Mosquitto)."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.brokers import Broker, Mosquitto

PUB = shutil.which("mosquitto_pub")
SUB = shutil.which("mosquitto_sub")
RR = shutil.which("mosquitto_rr")
RUN_S = 20
pytestmark = pytest.mark.skipif(SUB is None, reason="mosquitto-clients is not installed")

VERSIONS = pytest.mark.parametrize("version", ["31", "311", "5"])


def publish(broker: Broker, *arguments: str, stdin: str = "") -> None:
    command = [str(PUB), "-h", "127.0.0.1", "-p", str(broker.port), *arguments]
    subprocess.run(command, input=stdin, text=True, check=True, timeout=RUN_S)


class Subscriber:
    """mosquitto_sub, subscribed when the constructor returns. Prints one line a message."""

    def __init__(
        self, broker: Broker, *arguments: str, format_: str = "%t|%p|%q|%r", count: int = 0
    ) -> None:
        command = [str(SUB), "-h", "127.0.0.1", "-p", str(broker.port), "-d", "-F", format_]
        if count:
            command += ["-C", str(count)]
        self.process = subprocess.Popen(
            ["stdbuf", "-oL", *command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._read_until("Subscribed")

    def _read_until(self, start: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(start):
                return
        raise AssertionError(f"mosquitto_sub ended: {self.lines}")

    def messages(self) -> list[str]:
        """Wait until it ends by its count. Returns what it printed of messages."""
        assert self.process.stdout is not None
        lines = [*self.lines, *self.process.stdout.read().splitlines()]
        assert self.process.wait(RUN_S) == 0, lines
        return [line for line in lines if "|" in line]

    def stop(self) -> None:
        self.process.terminate()
        self.messages()


@VERSIONS
@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_lines_from_standard_input(broker: Broker, unique: str, version: str, qos: str) -> None:
    if isinstance(broker, Mosquitto) and (version, qos) == ("5", "2"):
        pytest.skip("2.0.11 exceeds the receive maximum, and mosquitto_sub ends")
    arguments = ("-V", version, "-q", qos, "-t", unique)
    subscriber = Subscriber(broker, *arguments, count=200)
    publish(broker, *arguments, "-l", stdin="".join(f"line {n}\n" for n in range(200)))
    expected = [f"{unique}|line {n}|{qos}|0" for n in range(200)]
    assert subscriber.messages() == expected


@VERSIONS
def test_file_payload(broker: Broker, unique: str, version: str, tmp_path: Path) -> None:
    content = bytes(range(256)) * 4096
    (tmp_path / "payload").write_bytes(content)
    arguments = ("-V", version, "-q", "2", "-t", unique)
    subscriber = Subscriber(broker, *arguments, format_="|%l|%x", count=1)
    publish(broker, *arguments, "-f", str(tmp_path / "payload"))
    assert subscriber.messages() == [f"|{len(content)}|{content.hex()}"]


@VERSIONS
def test_retained(broker: Broker, unique: str, version: str) -> None:
    arguments = ("-V", version, "-q", "1", "-t", f"{unique}/a")
    publish(broker, *arguments, "-m", "kept", "-r")
    subscriber = Subscriber(broker, "-V", version, "-q", "1", "-t", f"{unique}/#", count=1)
    assert subscriber.messages() == [f"{unique}/a|kept|1|1"]
    publish(broker, *arguments, "-n", "-r")
    subscriber = Subscriber(broker, "-V", version, "-q", "1", "-t", f"{unique}/#", count=1)
    publish(broker, *arguments, "-m", "live")
    assert subscriber.messages() == [f"{unique}/a|live|1|0"]


@VERSIONS
def test_durable_session(broker: Broker, unique: str, version: str) -> None:
    session = ["-V", version, "-i", unique[-20:], "-q", "2", "-t", unique]
    session += ["-x", "60", "-c"] if version == "5" else ["-c"]
    Subscriber(broker, *session).stop()
    for number in range(10):
        publish(broker, "-V", version, "-q", "2", "-t", unique, "-m", str(number))
    again = Subscriber(broker, *session, count=10)
    assert again.messages() == [f"{unique}|{n}|2|0" for n in range(10)]


@pytest.mark.parametrize("version", ["311", "5"])
def test_will(broker: Broker, unique: str, version: str) -> None:
    watcher = Subscriber(broker, "-V", version, "-q", "1", "-t", f"{unique}/will", count=1)
    mortal = Subscriber(
        *(broker, "-V", version, "-t", unique),
        *("--will-topic", f"{unique}/will", "--will-payload", "gone", "--will-qos", "1"),
    )
    mortal.process.kill()
    mortal.process.communicate()
    assert watcher.messages() == [f"{unique}/will|gone|1|0"]


def test_properties(broker: Broker, unique: str) -> None:
    subscriber = Subscriber(
        *(broker, "-V", "5", "-q", "1", "-t", unique),
        format_="|%p|%C|%R|%D|%P|%F|%E|%S",
        count=1,
    )
    publish(
        *(broker, "-V", "5", "-q", "1", "-t", unique, "-m", "payload"),
        *("-D", "publish", "content-type", "text/csv"),
        *("-D", "publish", "response-topic", "answers"),
        *("-D", "publish", "correlation-data", "42"),
        *("-D", "publish", "user-property", "one", "1"),
        *("-D", "publish", "user-property", "two", "2"),
        *("-D", "publish", "payload-format-indicator", "1"),
        *("-D", "publish", "message-expiry-interval", "90"),
    )
    (line,) = subscriber.messages()
    _, payload, kind, response, correlation, pairs, indicator, expiry, identifier = line.split("|")
    assert (payload, kind, response, correlation) == ("payload", "text/csv", "answers", "42")
    assert pairs.split() == ["one:1", "two:2"]
    assert (indicator, identifier) == ("1", "")
    assert 85 <= int(expiry) <= 90


@pytest.mark.skipif(RR is None, reason="mosquitto_rr is not installed")
def test_request_and_response(broker: Broker, unique: str) -> None:
    """mosquitto_rr asks, a subscriber that sees the response topic answers."""
    asked = Subscriber(broker, "-V", "5", "-t", f"{unique}/ask", format_="|%R", count=1)
    command = [
        *(str(RR), "-h", "127.0.0.1", "-p", str(broker.port), "-V", "5", "-q", "1"),
        *("-t", f"{unique}/ask", "-e", f"{unique}/answer", "-m", "question", "-W", "10"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        (line,) = asked.messages()
        assert line == f"|{unique}/answer"
        publish(broker, "-V", "5", "-q", "1", "-t", f"{unique}/answer", "-m", "answer")
        output, _ = asking.communicate(timeout=RUN_S)
    assert output == "answer\n"


def test_sys_topics(broker: Broker) -> None:
    """Debian's tools and dashboards read these names."""
    subscriber = Subscriber(broker, "-t", "$SYS/broker/version", "-W", "15", count=1)
    (line,) = subscriber.messages()
    topic, text, _, retain = line.split("|")
    assert topic == "$SYS/broker/version"
    assert text
    assert retain == "1"
