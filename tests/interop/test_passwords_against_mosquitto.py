"""Password files between `holdfast passwd` and Debian's Mosquitto, both ways."""

import argparse
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli import passwd
from holdfast.security.passwords import PasswordFile
from tests.support.ports import free_port

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
PASSWD = shutil.which("mosquitto_passwd")
PUB = shutil.which("mosquitto_pub")
pytestmark = pytest.mark.skipif(
    MOSQUITTO is None or PASSWD is None or PUB is None, reason="mosquitto is not installed"
)

TIMEOUT_S = 10.0
USERS = [("alice", "secret"), ("bob", "with space: $ä"), ("cärl", "x" * 200)]


def holdfast_passwd(*arguments: str | Path) -> None:
    parser = argparse.ArgumentParser()
    passwd.add_parser(parser.add_subparsers())
    assert passwd.run(parser.parse_args(["passwd", *map(str, arguments)])) == 0


def mosquitto_passwd(*arguments: str | Path) -> None:
    assert PASSWD is not None
    subprocess.run([PASSWD, *map(str, arguments)], check=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("scheme", ["sha512", "sha512-pbkdf2"])
def test_we_read_what_mosquitto_passwd_writes(tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "users"
    path.touch()
    for username, password in USERS:
        mosquitto_passwd("-H", scheme, "-b", path, username, password)
    file = PasswordFile.load(path)
    for username, password in USERS:
        assert file.verify(username, password.encode())
        assert not file.verify(username, password.encode() + b"x")


def test_both_edit_one_file(tmp_path: Path) -> None:
    path = tmp_path / "users"
    holdfast_passwd("-c", "-b", path, "alice", "one")
    mosquitto_passwd("-b", path, "bob", "two")
    holdfast_passwd("-b", path, "bob", "three")
    mosquitto_passwd("-D", path, "alice")
    holdfast_passwd("-b", path, "carl", "four")
    file = PasswordFile.load(path)
    assert len(file) == 2
    assert file.verify("bob", b"three")
    assert file.verify("carl", b"four")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[int]:
    """Mosquitto with users that `holdfast passwd` wrote; its port."""
    assert MOSQUITTO is not None
    path = tmp_path / "users"
    holdfast_passwd("-c", "-b", path, *USERS[0])
    holdfast_passwd("-H", "sha512", "-b", path, *USERS[1])
    holdfast_passwd("-I", "500", "-b", path, *USERS[2])
    port = free_port()
    (tmp_path / "conf").write_text(
        f"listener {port} 127.0.0.1\npassword_file {path}\nuser root\nlog_dest stderr\n"
    )
    process = subprocess.Popen(
        [MOSQUITTO, "-c", str(tmp_path / "conf")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if b"running" in line:
            break
    yield port
    process.terminate()
    process.communicate(timeout=TIMEOUT_S)


def test_mosquitto_reads_what_we_write(broker: int) -> None:
    def connects(username: str, password: str) -> bool:
        assert PUB is not None
        command = [PUB, "-p", str(broker), "-t", "t", "-m", "x", "-u", username, "-P", password]
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT_S).returncode == 0

    for username, password in USERS:
        assert connects(username, password)
        assert not connects(username, password + "x")
