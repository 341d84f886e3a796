"""Password files: the three hashes, errors with file and line, and the work an attempt costs."""

from pathlib import Path

import pytest

from holdfast.security import passwords
from holdfast.security.passwords import (
    DEFAULT_ITERATIONS,
    PasswordError,
    PasswordFile,
    PasswordHash,
    hash_password,
    parse_hash,
)

# Written by Debian's mosquitto_passwd 2.0.11.
MOSQUITTO_7 = (
    "$7$101$Lk47GxprIVxcgeqd$zcDnyy7kzcRg0i5tOvSRd0mDxCrZJ61BTdBsDzMzcD13KQzAogWCUH0r5pcYGb"
    "xjkamgspFcP9cdnpKx4DqvRQ=="
)
MOSQUITTO_6 = (
    "$6$vvbckziKmVoJzlX4$JqM0E4C2f/vxdswkAc91iKXwFWgarI1XZJ/sYumHOgzeWqdnk0Vae7Dc2hJ2WnWzEh"
    "ag7lopJ+dq/Or/rxLtCQ=="
)


def test_lines_that_mosquitto_wrote() -> None:
    file = PasswordFile.parse(f"alice:{MOSQUITTO_7}\nbob:{MOSQUITTO_6}\n", "f")
    assert len(file) == 2
    assert file.verify("alice", b"secret")
    assert not file.verify("alice", b"Secret")
    assert file.verify("bob", b"pw")
    assert not file.verify("bob", b"secret")


@pytest.mark.parametrize("scheme", passwords.SCHEMES)
def test_each_scheme(scheme: str) -> None:
    text = hash_password("pâss:$", scheme)
    file = PasswordFile.parse(f"# comment\n\nü ser:{text}\r\n", "f")
    assert file.verify("ü ser", "pâss:$".encode())
    assert not file.verify("ü ser", b"pass:$")


def test_salt_and_iterations() -> None:
    assert hash_password("x") != hash_password("x")
    assert hash_password("x", iterations=5).startswith("$7$5$")
    assert hash_password("x").startswith(f"$7${DEFAULT_ITERATIONS}$")
    assert hash_password("x", salt=b"salt") == hash_password(b"x", salt=b"salt")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("x", "md5"), "unknown hash 'md5'"),
        (("x", "sha512-pbkdf2", 0), "iterations are 1"),
        (("x", "sha512-pbkdf2", 10**9), "iterations are 1"),
    ],
)
def test_hash_errors(arguments: tuple[str, str, int], text: str) -> None:
    with pytest.raises(PasswordError, match=text):
        hash_password(*arguments)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("alice", "user:hash"),
        (":x", "user:hash"),
        ("alice:", "holdfast passwd -U"),
        ("alice:plain", "holdfast passwd -U"),
        ("alice:$5$a$b", "a hash is"),
        ("alice:$6$c2FsdA==", "a hash is"),
        ("alice:$6$c2FsdA==$!!", "not base64"),
        ("alice:$6$c2FsdA==$c2hvcnQ=", "exactly 64"),
        ("alice:$6$$c2hvcnQ=", "at least 1"),
        ("alice:$7$0$c2FsdA==$c2hvcnQ=", "iterations are 1"),
        ("alice:$7$x$c2FsdA==$c2hvcnQ=", "iterations are 1"),
        ("alice:$7$99999999999$c2FsdA==$c2hvcnQ=", "iterations are 1"),
        ("alice:$argon2id$v=19$m=1", "not a valid argon2id"),
        (f"ok:{MOSQUITTO_6}", "already in line 2"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "users"
    path.write_text(f"# first\nok:{MOSQUITTO_7}\n{line}\n")
    with pytest.raises(PasswordError, match=text) as caught:
        PasswordFile.load(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "secret" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(PasswordError, match="No such file"):
        PasswordFile.load(tmp_path / "missing")
    (tmp_path / "latin").write_bytes(b"ok\xff")
    with pytest.raises(PasswordError, match="not UTF-8 at byte 2"):
        PasswordFile.load(tmp_path / "latin")


def test_argon2_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    line = "$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHQ$aGFzaGhhc2g"
    parse_hash(line)
    monkeypatch.setitem(sys.modules, "argon2", None)
    with pytest.raises(PasswordError, match="argon2-cffi"):
        parse_hash(line)
    with pytest.raises(PasswordError, match="argon2-cffi"):
        hash_password("x", "argon2id")


class Counting:
    """Which hashes were computed, in place of how long that took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work: list[tuple[str, int]] = []
        verify = PasswordHash.verify

        def counted(hashed: PasswordHash, password: bytes) -> bool:
            self.work.append((hashed.scheme, hashed.iterations))
            return verify(hashed, password)

        monkeypatch.setattr(PasswordHash, "verify", counted)


def test_unknown_users_cost_what_known_ones_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"u{n}:{hash_password('x', 'sha512-pbkdf2', 10 + n % 2)}" for n in range(8)]
    file = PasswordFile.parse("\n".join(lines), "f")
    counting = Counting(monkeypatch)
    for number in range(60):
        assert not file.verify(f"nobody{number}", b"x")
    assert len(counting.work) == 60
    assert set(counting.work) == {("sha512-pbkdf2", 10), ("sha512-pbkdf2", 11)}
    counting.work.clear()
    for _ in range(5):
        file.verify("nobody", b"guess")
    assert len(set(counting.work)) == 1


def test_an_empty_file_costs_a_default_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    file = PasswordFile.parse("", "f")
    counting = Counting(monkeypatch)
    assert not file.verify("a", b"")
    assert counting.work == [("sha512-pbkdf2", DEFAULT_ITERATIONS)]


def test_a_right_password_is_remembered_and_a_wrong_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = PasswordFile.parse(f"alice:{MOSQUITTO_7}\nalic:{MOSQUITTO_7}", "f")
    counting = Counting(monkeypatch)
    assert file.verify("alice", b"secret")
    assert file.verify("alice", b"secret")
    assert len(counting.work) == 1
    for _ in range(2):
        assert not file.verify("alice", b"wrong")
        # The same bytes under another name.
        assert not file.verify("alic", b"esecret")
    assert len(counting.work) == 5
    assert file.verify("alice", b"secret")
    assert len(counting.work) == 5
