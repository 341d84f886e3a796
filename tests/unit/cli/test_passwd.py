"""`holdfast passwd`: what it writes, what it refuses, and that it never leaves half a file."""

import argparse
import io
import os
import stat
from pathlib import Path

import pytest

from holdfast.cli import passwd
from holdfast.security.passwords import DEFAULT_ITERATIONS, PasswordFile
from holdfast.security.scram_file import ScramFile, make_credentials


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    passwd.add_parser(parser.add_subparsers())
    return passwd.run(parser.parse_args(["passwd", *map(str, arguments)]))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_add_change_delete(tmp_path: Path) -> None:
    path = tmp_path / "users"
    assert run("-c", "-b", path, "alice", "one") == 0
    assert mode_of(path) == 0o600
    assert run("-b", path, "bob", "two") == 0
    assert run("-H", "sha512", "-b", path, "carl", "three") == 0
    assert run("-I", "50", "-b", path, "alice", "four") == 0
    file = PasswordFile.load(path)
    assert file.verify("alice", b"four")
    assert not file.verify("alice", b"one")
    assert file.verify("bob", b"two")
    assert file.verify("carl", b"three")
    lines = path.read_text().split("\n")
    assert [line[:8] for line in lines] == ["alice:$7", "bob:$7$1", "carl:$6$", ""]
    assert lines[0].startswith("alice:$7$50$")
    assert lines[1].startswith(f"bob:$7${DEFAULT_ITERATIONS}$")
    assert run("-D", path, "bob") == 0
    assert len(PasswordFile.load(path)) == 2
    assert os.listdir(tmp_path) == ["users"]
    assert run("-c", "-b", path, "dora", "five") == 0
    assert len(PasswordFile.load(path)) == 1


def test_comments_and_order_stay(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text("# staff\nalice:old\n\n# devices\nbob:old\n")
    assert run("-b", path, "alice", "x") == 0
    lines = path.read_text().split("\n")
    assert lines[0] == "# staff"
    assert lines[1].startswith("alice:$7$")
    assert lines[2:] == ["", "# devices", "bob:old", ""]


def test_upgrade_hashes_plain_passwords_once(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text("# plain\nalice:one:1\nbob:$ix\n")
    assert run("-U", "-I", "10", path) == 0
    once = path.read_text()
    file = PasswordFile.load(path)
    assert file.verify("alice", b"one:1")
    assert file.verify("bob", b"$ix")
    assert run("-U", path) == 0
    assert path.read_text() == once
    path.write_text("alice\n")
    assert run("-U", path) == 1
    assert path.read_text() == "alice\n"


def test_scram(tmp_path: Path) -> None:
    path = tmp_path / "scram"
    assert run("--scram", "-c", "-b", path, "alice", "one") == 0
    assert run("--scram", "-I", "5000", "-b", path, "bob", "two") == 0
    assert run("--scram", "-b", path, "alice", "three") == 0
    lines = path.read_text().split("\n")
    assert lines[0].startswith("# decoy:")
    assert len(lines) == 4
    file = ScramFile.load(path)
    alice = file.lookup("alice")
    assert alice == make_credentials("three", salt=alice.salt)
    assert file.lookup("bob").iterations == 5000
    assert run("--scram", "-D", path, "alice") == 0
    assert len(ScramFile.load(path)) == 1


def test_scram_with_both_methods(tmp_path: Path) -> None:
    path = tmp_path / "scram"
    assert run("--scram", "-c", "-b", path, "alice", "one") == 0
    assert run("--scram-sha-512", "-b", path, "alice", "one") == 0
    assert run("--scram-sha-512", "-b", path, "alice", "two") == 0
    file = ScramFile.load(path)
    assert len(file) == 2
    for method, password in (("SCRAM-SHA-256", "one"), ("SCRAM-SHA-512", "two")):
        alice = file.lookup("alice", method)
        assert alice == make_credentials(password, salt=alice.salt, method=method)
    assert run("-D", path, "alice") == 0
    assert len(ScramFile.load(path)) == 0


def test_an_existing_file_keeps_mode_and_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "users"
    link = tmp_path / "link"
    assert run("-c", "-b", path, "alice", "one") == 0
    path.chmod(0o640)
    link.symlink_to(path)
    assert run("-b", link, "bob", "two") == 0
    assert link.is_symlink()
    assert mode_of(path) == 0o640
    assert len(PasswordFile.load(path)) == 2
    assert capsys.readouterr().err == ""
    path.chmod(0o644)
    assert run("-D", path, "bob") == 0
    assert mode_of(path) == 0o644
    assert "readable by everyone" in capsys.readouterr().err


def test_password_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "users"
    monkeypatch.setattr("sys.stdin", io.StringIO("from pipe \n"))
    assert run("-c", path, "alice") == 0
    assert PasswordFile.load(path).verify("alice", b"from pipe ")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(path, "alice") == 1


def test_password_is_asked_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "users"

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    answers = ["one", "one", "two", "other", "", ""]
    monkeypatch.setattr("getpass.getpass", lambda prompt: answers.pop(0))
    assert run("-c", path, "alice") == 0
    assert PasswordFile.load(path).verify("alice", b"one")
    before = path.read_text()
    assert run(path, "alice") == 1
    assert "do not match" in capsys.readouterr().err
    assert run(path, "alice") == 1
    assert "empty" in capsys.readouterr().err
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-c", "-D", "FILE", "a"], "choose one of -c, -D and -U"),
        (["-U", "FILE", "a"], "-U takes FILE only"),
        (["-U", "--scram", "FILE"], "-U takes FILE only"),
        (["FILE"], "name the user"),
        (["-b", "FILE", "a"], "-b needs"),
        (["-b", "-D", "FILE", "a"], "choose one of -b and -D"),
        (["FILE", "a", "password"], "it needs -b"),
        (["--scram", "-H", "sha512", "-b", "FILE", "a", "b"], "one hash only"),
        (["-b", "FILE", "a:b", "x"], "a user name has no ':'"),
        (["-b", "FILE", "", "x"], "a user name has"),
        (["-b", "FILE", "a\nb", "x"], "a user name has"),
        (["-b", "FILE", "#a", "x"], "would be a comment"),
        (["-b", "FILE", "a" * 65536, "x"], "at most 65535"),
        (["-I", "0", "-b", "FILE", "a", "x"], "iterations are 1"),
        (["-I", "0", "--scram", "-b", "FILE", "a", "x"], "iterations are 4096"),
        (["-D", "FILE", "nobody"], "no user 'nobody'"),
        (["-b", "MISSING", "a", "x"], "does not exist; -c creates it"),
        (["-c", "-b", "NOWHERE", "a", "x"], "No such file or directory"),
    ],
)
def test_refusals_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    path = tmp_path / "users"
    path.write_text("known:x\n")
    places = {
        "FILE": str(path),
        "MISSING": str(tmp_path / "missing"),
        "NOWHERE": str(tmp_path / "no" / "users"),
    }
    assert run(*(places.get(argument, argument) for argument in arguments)) == 1
    assert text in capsys.readouterr().err
    assert path.read_text() == "known:x\n"
    assert os.listdir(tmp_path) == ["users"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "users"
    path.write_text("known:x\n")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert run("-b", path, "a", "x") == 1
    assert "No space left" in capsys.readouterr().err
    assert path.read_text() == "known:x\n"
    assert os.listdir(tmp_path) == ["users"]
