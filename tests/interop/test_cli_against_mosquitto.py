"""`holdfast pub` and `sub` beside mosquitto_pub and mosquitto_sub: the same arguments against the
same Mosquitto give the same bytes on standard output and the same exit code."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.cli.main import main
from tests.e2e.brokers import MOSQUITTO, SOURCE, Mosquitto
from tests.support.ports import free_port

PUB = shutil.which("mosquitto_pub")
SUB = shutil.which("mosquitto_sub")
pytestmark = pytest.mark.skipif(
    MOSQUITTO is None or PUB is None or SUB is None, reason="mosquitto is not installed"
)

RUN_S = 30
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "TZ": "UTC-5:30"}
OURS = {
    "pub": [sys.executable, "-m", "holdfast.cli.main", "pub"],
    "sub": [sys.executable, "-m", "holdfast.cli.main", "sub"],
}
THEIRS = {"pub": [str(PUB)], "sub": [str(SUB)]}

RETAINED: list[tuple[list[str], bytes | None]] = [
    (["-t", "r/1", "-m", "pay1"], None),
    (["-t", "r/2", "-m", "pay2", "-q", "1"], None),
    (["-t", "r/3", "-m", "with space", "-q", "2"], None),
    (["-t", "json/1", "-m", '{"a":1.50,"b":[true,null,"ü\\u00e9"],"c":{},"d":-3}'], None),
    (["-t", "json/2", "-m", '[1,2,"x"]'], None),
    (["-t", "json/not", "-m", "{"], None),
    (["-t", "binary", "-s"], b"a\xff\x01\x1f\x7f\xc3\xa9\n"),
    (
        [
            *["-V", "5", "-t", "props", "-m", 'x"y\\z\té'],
            *["-D", "publish", "content-type", "text/plain"],
            *["-D", "publish", "response-topic", "answer/here"],
            *["-D", "publish", "correlation-data", "cd"],
            *["-D", "publish", "user-property", "k", "v"],
            *["-D", "publish", "user-property", "k", "v 2"],
            *["-D", "publish", "payload-format-indicator", "1"],
        ],
        None,
    ),
]


class Brokers:
    """`open` takes anybody, `closed` nobody without a password, `small` allows less."""

    def __init__(self, directory: Path) -> None:
        acl = directory / "acl"
        acl.write_text("topic readwrite ok/#\ntopic read ro/#\n")
        self.started: list[Mosquitto] = []
        self.ports = {"nobody": free_port()}
        for name, extra in (
            ("open", ""),
            ("closed", "allow_anonymous false"),
            ("small", f"max_qos 1\nretain_available false\nacl_file {acl}"),
        ):
            (directory / name).mkdir()
            broker = Mosquitto(directory / name, extra)
            broker.start()
            self.started.append(broker)
            self.ports[name] = broker.port


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    found = Brokers(tmp_path_factory.mktemp("brokers"))
    for arguments, data in RETAINED:
        finished = run(THEIRS, "pub", ["-p", str(found.ports["open"]), "-r", *arguments], data)
        assert finished.returncode == 0, finished
    yield found
    for broker in found.started:
        broker.kill()


def run(
    tools: dict[str, list[str]], tool: str, arguments: list[str], data: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*tools[tool], *arguments],
        input=data if data is not None else b"",
        capture_output=True,
        timeout=RUN_S,
        env=ENVIRONMENT,
        check=False,
    )


def run_both(
    tool: str, arguments: list[str], data: bytes | None = None
) -> tuple[subprocess.CompletedProcess[bytes], subprocess.CompletedProcess[bytes]]:
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, tools, tool, arguments, data) for tools in (OURS, THEIRS)]
        return futures[0].result(), futures[1].result()


def masked(output: bytes) -> bytes:
    """What differs between two runs of the same program: times and assigned ids."""
    output = re.sub(rb"auto-[0-9A-F-]{36}", b"auto-ID", output)
    # Mosquitto 2.0.11 writes a Z and the offset.
    output = re.sub(rb'"(\d{4}-[\d-]+T[\d:]+)\.\d{6}Z?\+', rb'"\1.000000+', output)
    output = re.sub(rb"T\d\d:\d\d:\d\d", b"T00:00:00", output)
    return re.sub(rb"\b\d{10}\.\d{9}\b", b"0.0", output)


def assert_same(tool: str, arguments: list[str], data: bytes | None = None) -> bytes:
    ours, theirs = run_both(tool, arguments, data)
    assert masked(ours.stdout) == masked(theirs.stdout), (ours, theirs)
    assert ours.returncode == theirs.returncode, (ours, theirs)
    return ours.stderr


SUBSCRIPTIONS = [
    ["-t", "r/1", "-C", "1"],
    ["-t", "r/1", "-C", "1", "-v"],
    ["-t", "r/1", "-C", "1", "-N"],
    ["-t", "r/1", "-C", "1", "-N", "-v"],
    ["-t", "r/#", "-C", "3", "-v"],
    ["-t", "r/1", "-t", "r/3", "-C", "2", "-v"],
    ["-t", "r/#", "-T", "r/1", "-T", "r/3/#", "-C", "1"],
    ["-t", "r/#", "-W", "1", "-v"],
    ["-t", "nothing", "-W", "1"],
    ["-t", "nothing", "-C", "1", "-W", "1", "--quiet"],
    ["-t", "r/#", "-R", "-W", "1"],
    ["-t", "r/#", "--retained-only", "-C", "3"],
    ["-t", "nothing", "-E"],
    ["-t", "nothing", "-E", "-V", "5", "-q", "2"],
    ["-t", "r/2", "-C", "1", "-q", "1", "-F", "%t %q %r %l %m"],
    ["-t", "r/3", "-C", "1", "-q", "2", "-V", "5", "-F", "%t %q %r %l %m"],
    ["-t", "r/3", "-C", "1", "-q", "2", "-V", "31", "-F", "%t %q %r %l %m"],
    ["-t", "binary", "-C", "1", "-F", "%p|%x|%X|%l"],
    ["-t", "binary", "-C", "1"],
    ["-t", "props", "-C", "1", "-V", "5", "-F", "%t|%A|%C|%D|%E|%F|%P|%R|%S|%%|%x"],
    ["-t", "props", "-C", "1", "-F", "%C|%D|%P|"],
    ["-t", "r/1", "-C", "1", "-F", "[%10t][%-10t][%010t][%3.2t][%.3t][%10p][%-10p][%5l][%05l]"],
    ["-t", "r/1", "-C", "1", "-F", "[%-5l][%5m][%05m][%05q][%3r][%x][%X]"],
    ["-t", "props", "-C", "1", "-V", "5", "-F", "[%12C][%-12C][%.4C][%30R][%5F][%05F]"],
    ["-t", "r/1", "-C", "1", "-F", "@Y-@m @@ @j %I|%U|%-40I|%40I|%5U"],
    ["-t", "r/1", "-C", "1", "-F", "\\\\ \\0 \\a\\e\\n\\r\\t\\v ü"],
    ["-t", "r/1", "-C", "1", "-F", ""],
    ["-t", "r/1", "-C", "1", "-v", "-F", "%t"],
    ["-t", "r/1", "-C", "1", "-N", "-F", "%t;"],
    ["-t", "r/2", "-C", "1", "-q", "1", "-F", "%j"],
    ["-t", "props", "-C", "1", "-V", "5", "-F", "%j"],
    ["-t", "json/1", "-C", "1", "-F", "%j"],
    ["-t", "json/1", "-C", "1", "-F", "%J"],
    ["-t", "json/not", "-C", "1", "-F", "%J"],
    ["-t", "none/1", "-t", "none/2", "-U", "none/3", "-E"],
    ["-t", "r/1", "-C", "1", "-k", "5", "-A", "127.0.0.1"],
    ["-t", "r/1", "-D", "subscribe", "user-property", "a", "b", "-C", "1"],
    ["-t", "r/1", "-D", "connect", "receive-maximum", "3", "-C", "1", "-u", "name"],
]


@pytest.mark.parametrize("arguments", SUBSCRIPTIONS, ids=" ".join)
def test_sub_prints_the_same(brokers: Brokers, arguments: list[str]) -> None:
    assert_same("sub", ["-p", str(brokers.ports["open"]), *arguments])


PUBLICATIONS: list[tuple[list[str], bytes | None]] = [
    (["-t", "p/a", "-m", "text"], None),
    (["-t", "p/a", "-m", "ü", "-q", "1"], None),
    (["-t", "p/a", "-m", "x", "-q", "2", "-V", "5"], None),
    (["-t", "p/a", "-m", "x", "-V", "31", "-i", "fixed"], None),
    (["-t", "p/a", "-n"], None),
    (["-t", "p/a", "-m", ""], None),
    (["-t", "p/a", "-s"], b"whole\ninput\n"),
    (["-t", "p/a", "-l"], b"one\n\nthree\r\n"),
    (["-t", "p/a", "-l", "-q", "2", "-M", "2"], b"".join(b"%d\n" % i for i in range(15))),
    (["-t", "p/a", "-f", "/etc/hostname"], None),
    (["-t", "p/a", "-m", "again", "--repeat", "3", "-q", "1"], None),
    (["-t", "p/a", "-m", "x", "--repeat", "2", "--repeat-delay", "0.05"], None),
    (["-t", "p/b", "-t", "p/a", "-m", "last topic counts"], None),
    (["-t", "p/a", "-m", "x", "-V", "5", "-x", "5", "-i", "i", "-c"], None),
    (
        ["-t", "p/a", "-m", "x", "-D", "publish", "topic-alias", "3", "--repeat", "3"],
        None,
    ),
    (["-t", "p/a", "-m", "x", "-D", "publish", "user-property", "k", "v"], None),
    (["-t", "p/a", "-m", "x", "--will-topic", "w", "--will-payload", "p", "--will-qos", "1"], None),
]


@pytest.mark.parametrize(("arguments", "data"), PUBLICATIONS, ids=str)
def test_pub_sends_the_same(brokers: Brokers, arguments: list[str], data: bytes | None) -> None:
    """What a subscriber gets, and what the publishers print."""
    port = str(brokers.ports["open"])
    outcomes = []
    for tools in (OURS, THEIRS):
        subscriber = subprocess.Popen(
            [
                *["stdbuf", "-oL", str(SUB), "-p", port, "-t", "p/#", "-q", "2", "-V", "5", "-d"],
                *["-F", "%t|%q|%r|%x|%P"],
            ],
            stdout=subprocess.PIPE,
        )
        assert subscriber.stdout is not None
        try:
            for line in subscriber.stdout:
                if line.startswith(b"Subscribed"):
                    break
            finished = run(tools, "pub", ["-p", port, *arguments], data)
            run(THEIRS, "pub", ["-p", port, "-t", "p/end", "-m", "", "-q", "2"])
            received = []
            for line in subscriber.stdout:
                if line.startswith(b"p/end|"):
                    break
                if b"|" in line:
                    received.append(line)
        finally:
            subscriber.kill()
            subscriber.wait()
            subscriber.stdout.close()
        outcomes.append((finished.returncode, masked(finished.stdout), received))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][2]) > 0


REFUSALS = [
    ("pub", "open", ["-t", "a", "-m", "x", "-P", "password without user"]),
    ("pub", "closed", ["-t", "a", "-m", "x"]),
    ("pub", "closed", ["-t", "a", "-m", "x", "-V", "31"]),
    ("pub", "closed", ["-t", "a", "-m", "x", "-V", "5"]),
    ("pub", "closed", ["-t", "a", "-m", "x", "--quiet"]),
    ("pub", "nobody", ["-t", "a", "-m", "x"]),
    ("pub", "nobody", ["-h", "no.such.host.invalid", "-t", "a", "-m", "x"]),
    ("pub", "open", ["-t", "a", "-m", "x", "-A", "192.0.2.1"]),
    ("pub", "small", ["-t", "no/access", "-m", "x", "-q", "1", "-V", "5"]),
    ("pub", "small", ["-t", "no/access", "-m", "x", "-q", "1"]),
    ("sub", "closed", ["-t", "a"]),
    ("sub", "closed", ["-t", "a", "-V", "5"]),
    ("sub", "nobody", ["-t", "a"]),
    ("sub", "open", ["-t", "a", "--cafile", "/nonexistent"]),
    ("sub", "open", ["-t", "a", "--cafile", "/etc/ssl/certs/ca-certificates.crt"]),
]


@pytest.mark.parametrize(("tool", "broker", "arguments"), REFUSALS, ids=str)
def test_refusals_end_the_same(
    brokers: Brokers, tool: str, broker: str, arguments: list[str]
) -> None:
    ours, theirs = run_both(tool, ["-p", str(brokers.ports[broker]), *arguments])
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout), (ours, theirs)
    assert bool(ours.stderr) == bool(theirs.stderr), (ours, theirs)


WRONG_USE = [
    ("pub", []),
    ("pub", ["-t", "a"]),
    ("pub", ["-m", "x"]),
    ("pub", ["-t", "a", "-m", "x", "-n"]),
    ("pub", ["-t", "a", "-m", "x", "-l"]),
    ("pub", ["-t", "a", "-f", "/nonexistent"]),
    ("pub", ["-t", "a/#", "-m", "x"]),
    ("pub", ["-t", "a", "-m", "x", "-q", "3"]),
    ("pub", ["-t", "a", "-m", "x", "-q"]),
    ("pub", ["-t", "a", "-m", "x", "-p", "70000"]),
    ("pub", ["-t", "a", "-m", "x", "-V", "4"]),
    ("pub", ["-t", "a", "-m", "x", "-k", "3"]),
    ("pub", ["-t", "a", "-m", "x", "-c"]),
    ("pub", ["-t", "a", "-m", "x", "-i", "a", "-I", "b"]),
    ("pub", ["-t", "a", "-m", "x", "-i", ""]),
    ("pub", ["-t", "a", "-m", "x", "--repeat", "0"]),
    ("pub", ["-t", "a", "-m", "x", "-x", "soon"]),
    ("pub", ["-t", "a", "-m", "x", "-V", "5", "-x", "4294967296"]),
    ("pub", ["-t", "a", "-m", "x", "-M", "0"]),
    ("pub", ["-t", "a", "-m", "x", "--will-payload", "x"]),
    ("pub", ["-t", "a", "-m", "x", "--will-retain"]),
    ("pub", ["-t", "a", "-m", "x", "--will-topic", "w/#"]),
    ("pub", ["-t", "a", "-m", "x", "--will-topic", "w", "--will-qos", "3"]),
    ("pub", ["-t", "a", "-m", "x", "-D", "publish", "nonsense", "x"]),
    ("pub", ["-t", "a", "-m", "x", "-D", "nonsense", "content-type", "x"]),
    ("pub", ["-t", "a", "-m", "x", "-D", "connect", "content-type", "x"]),
    ("pub", ["-t", "a", "-m", "x", "-D", "publish", "topic-alias", "300000"]),
    ("pub", ["-t", "a", "-m", "x", "-D", "publish", "user-property", "a"]),
    ("pub", ["-L", "http://localhost/a", "-m", "x"]),
    ("pub", ["-L", "mqtt://localhost", "-m", "x"]),
    ("pub", ["--bogus"]),
    ("sub", []),
    ("sub", ["-U", "a"]),
    ("sub", ["-t", "a#"]),
    ("sub", ["-t", "a", "-T", "a#"]),
    ("sub", ["-t", "a", "-U", "a#"]),
    ("sub", ["-t", "a", "-q", "3"]),
    ("sub", ["-t", "a", "-C", "0"]),
    ("sub", ["-t", "a", "-C"]),
    ("sub", ["-t", "a", "-W", "0"]),
    ("sub", ["-t", "a", "-c"]),
    ("sub", ["-t", "a", "-R", "--retained-only"]),
    ("sub", ["-t", "a", "--random-filter", "0.01"]),
    ("sub", ["-t", "a", "--random-filter", "x"]),
    ("sub", ["-t", "a", "-F", "%z"]),
    ("sub", ["-t", "a", "-F", "a%"]),
    ("sub", ["-t", "a", "-F", "a@"]),
    ("sub", ["-t", "a", "-F", "a\\"]),
    ("sub", ["-t", "a", "-F", "\\q"]),
    ("sub", ["-t", "a", "--cert", "x"]),
    ("sub", ["-t", "a", "-m", "x"]),
]


@pytest.mark.parametrize(("tool", "arguments"), WRONG_USE, ids=str)
def test_wrong_use_ends_the_same(
    tool: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ours:
        sys.exit(main([tool, *arguments]))
    assert ours.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("Error: ")
    # Not that no broker is there.
    assert said.endswith(" --help' to see usage.\n") or "Unable to open file" in said
    assert run(THEIRS, tool, arguments).returncode == 1


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("pub", ["-m", "from a URL"]), ("sub", ["-C", "1"])],
    ids=str,
)
def test_url(brokers: Brokers, tool: str, arguments: list[str]) -> None:
    assert_same(tool, ["-L", f"mqtt://user:pass@127.0.0.1:{brokers.ports['open']}/r/1", *arguments])


def test_session_is_kept(brokers: Brokers) -> None:
    """-c: what was published meanwhile is printed on return, whichever program was there first."""
    base = ["-p", str(brokers.ports["open"]), "-t", "kept/#", "-q", "1", "-c", "-i", "keeper"]
    for first, second in ((OURS, THEIRS), (THEIRS, OURS)):
        assert run(first, "sub", [*base, "-E"]).returncode == 0
        run(second, "pub", ["-p", base[1], "-t", "kept/1", "-m", "missed you", "-q", "1"])
        finished = run(second, "sub", [*base, "-C", "1", "-v"])
        assert (finished.returncode, finished.stdout) == (0, b"kept/1 missed you\n")


def test_what_is_not_offered_is_refused_by_name() -> None:
    for option in ("--psk", "--unix", "--proxy", "--ws"):
        finished = run(OURS, "sub", ["-t", "a", option, "x"])
        assert finished.returncode == 1
        assert option.encode() in finished.stderr


def test_both_survive_a_restart_of_the_broker(tmp_path: Path) -> None:
    """sub subscribes again, pub -l sends again what was not acknowledged."""
    broker = Mosquitto(tmp_path)
    broker.start()
    port = str(broker.port)
    subscriber = subprocess.Popen(
        [*OURS["sub"], "-p", port, "-t", "t", "-q", "1", "-d", "-C", "2"],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    publisher = subprocess.Popen(
        [*OURS["pub"], "-p", port, "-t", "t", "-q", "1", "-l"],
        stdin=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert subscriber.stdout is not None
    assert publisher.stdin is not None
    lines = iter(subscriber.stdout)
    try:
        assert any(line.startswith(b"Subscribed") for line in lines)
        publisher.stdin.write(b"before\n")
        publisher.stdin.flush()
        assert any(line == b"before\n" for line in lines)
        broker.kill()
        publisher.stdin.write(b"while away\n")
        publisher.stdin.flush()
        broker.start()
        assert any(line.startswith(b"Subscribed") for line in lines)
        publisher.stdin.write(b"after\n")
        publisher.stdin.close()
        assert publisher.wait(RUN_S) == 0
        rest = list(lines)
        assert b"after\n" in rest or b"while away\n" in rest
        assert subscriber.wait(RUN_S) == 0
    finally:
        for process in (subscriber, publisher):
            process.kill()
            process.wait()
        subscriber.stdout.close()
        broker.kill()
