"""The file of users and tokens, the throttle of logins, and sessions, without a port."""

import json
import multiprocessing
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest

from holdfast.api.access.gate import is_loopback_address, session_secret
from holdfast.security.access import changes, credentials, sessions, throttle
from holdfast.security.access.access_file import (
    AccessData,
    AccessError,
    AccessFile,
    parse,
    read_given,
)
from holdfast.security.access.credentials import AdminCredentials, Unauthenticated
from holdfast.security.access.scopes import ROLES, Scope
from holdfast.security.access.sessions import BrowserSessions
from holdfast.security.access.throttle import LoginThrottle, network_of

PASSWORD = "a right password"
HASHED = changes.hash_admin_password(PASSWORD)


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """The format is a promise: this text must stay readable."""
    secret = sha256(b"secret").hexdigest()
    text = json.dumps(
        {
            "format": 1,
            "users": {"ada": {"role": "admin", "password": HASHED, "created_s": 1}},
            "tokens": {"0123456789ab": {"role": "viewer", "sha256": secret, "created_s": 2}},
            "added by a later version": [],
        }
    )
    (tmp_path / "access.json").write_text(text)
    found = AdminCredentials(tmp_path)
    assert found.identify("Bearer holdfast_0123456789ab_secret", "").scope is Scope.VIEWER
    assert found.verify("ada", PASSWORD) == HASHED


def test_changes_of_several_processes_are_all_there(tmp_path: Path) -> None:

    def add(number: int) -> None:
        for at in range(5):
            AccessFile(tmp_path).change(changes.add_user(f"u{number}-{at}", "viewer", HASHED, 1))

    context = multiprocessing.get_context("fork")
    parties = [context.Process(target=add, args=(number,)) for number in range(4)]
    for each in parties:
        each.start()
    for each in parties:
        each.join(60)
        assert each.exitcode == 0
    assert len(AccessFile(tmp_path).read().users) == 20
    assert stat.S_IMODE((tmp_path / "access.json").stat().st_mode) == 0o600
    assert {each.name for each in tmp_path.iterdir()} == {"access.json", "access.lock"}


def test_changes_of_several_threads_are_all_there(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)

    def add(number: int) -> None:
        for at in range(10):
            file.change(changes.add_user(f"u{number}-{at}", "viewer", HASHED, 1))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(file.read().users) == 40


def test_wrong_changes_change_nothing(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    file.change(changes.add_user("ada", "admin", HASHED, 1))
    before = file.path.read_bytes()
    for make in (
        changes.add_user("ada", "admin", HASHED, 1),
        changes.add_user("a/b", "admin", HASHED, 1),
        changes.add_user("bob", "king", HASHED, 1),
        changes.change_user("bob", "viewer"),
        changes.remove_user("bob"),
        changes.remove_token("x"),
        changes.kept_admin(changes.remove_user("ada"), 1, AccessData()),
        changes.kept_admin(changes.change_user("ada", "viewer"), 1, AccessData()),
    ):
        with pytest.raises(AccessError):
            file.change(make)
        assert file.path.read_bytes() == before
    for made in (
        changes.add_token("viewer", 1, note="a\nb"),
        changes.add_token("viewer", 1, -1),
        changes.add_token("king", 1),
    ):
        with pytest.raises(AccessError):
            file.change(made)
    for password in ("short", "x" * 2000):
        with pytest.raises(AccessError, match="bytes"):
            changes.hash_admin_password(password)


def test_a_password_that_no_login_can_send_is_refused() -> None:
    with pytest.raises(AccessError, match="UTF-8"):
        changes.hash_admin_password("\udcff\udcfe12345678")


def test_expired_tokens_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "TOKENS_MAX", 3)
    data = AccessData()
    for _ in range(3):
        data, _ = changes.add_token("viewer", 100, 10)(data)
    with pytest.raises(AccessError):
        changes.add_token("viewer", 105)(data)
    data, (id, _) = changes.add_token("viewer", 110)(data)
    assert list(data.tokens) == [id]


def test_a_damaged_file_never_raises_anything_else(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    file.change(changes.add_user("ada", "admin", HASHED, 1))
    file.change(changes.add_token("viewer", 1, 10, "note"))
    good = file.path.read_bytes()
    assert parse(good, "x").is_set_up
    rng = random.Random(13)
    refused: list[str] = []
    for _ in range(3000):
        damaged = bytearray(good)
        for _ in range(rng.choice((1, 1, 3, 20))):
            at = rng.randrange(len(damaged))
            match rng.randrange(3):
                case 0:
                    damaged[at] = rng.randrange(256)
                case 1:
                    del damaged[at : at + rng.randrange(1, 40)]
                case _:
                    damaged[at:at] = rng.choice((b"[" * 5000, b"{", b"null", b"-1", b'"', b"1e999"))
            if not damaged:
                break
        try:
            parse(bytes(damaged), "x")
        except AccessError as error:
            refused.append(str(error))
    assert len(refused) > 1000
    assert not any("\n" in text or HASHED in text for text in refused)


def test_garbage_in_headers_never_raises_anything_else(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    id, token = file.change(changes.add_token("viewer", 1))
    found = AdminCredentials(tmp_path)
    refused: list[str] = []
    rng = random.Random(7)
    pieces = ["Bearer", "bearer", " ", "holdfast_", id, "_", token, "\x00", "\xff", "\udcff", "é",
              "=", ";", "holdfast_session", '"', ",", "x" * 5000, "\t", ""]  # fmt: skip
    for _ in range(5000):
        text = "".join(rng.choices(pieces, k=rng.randrange(8)))
        secret = session_secret(text)
        try:
            owner = found.identify(text, secret)
        except Unauthenticated as error:
            refused.append(str(error))
        else:
            assert text.lower().startswith("bearer ")
            assert text[7:].strip() == token
            assert owner.scope is Scope.VIEWER
    assert not any("\n" in each or token in each for each in refused)


def test_an_unknown_user_costs_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AccessFile(tmp_path).change(changes.add_user("ada", "admin", HASHED, 1))
    found = AdminCredentials(tmp_path)
    checked: list[str] = []
    verify = credentials.PasswordHash.verify

    def noting(self: credentials.PasswordHash, password: bytes) -> bool:
        checked.append(self.digest.decode().rpartition("$")[0].rpartition("$")[0])
        return verify(self, password)

    monkeypatch.setattr(credentials.PasswordHash, "verify", noting)
    assert found.verify("ada", "wrong one") == ""
    assert found.verify("nobody", "wrong one") == ""
    # The stand-in's password is no way in either.
    assert found.verify("nobody", "a password of nobody") == ""
    assert len(checked) == 3
    assert len(set(checked)) == 1


def test_a_removed_file_leaves_the_users(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    file.change(changes.add_user("ada", "admin", HASHED, 1))
    found = AdminCredentials(tmp_path)
    file.path.unlink()
    found.refresh()
    assert found.is_set_up
    file.path.write_text("{")
    found.refresh()
    assert list(found.data.users) == ["ada"]
    file.path.unlink()
    file.change(changes.add_user("bob", "viewer", HASHED, 1))
    found.refresh()
    assert list(found.data.users) == ["bob"]


def test_last_uses_outlive_a_restart(tmp_path: Path) -> None:
    _, token = AccessFile(tmp_path).change(changes.add_token("viewer", 1))
    id = token.split("_")[1]
    found = AdminCredentials(tmp_path)
    assert found.last_use_s(f"token {id}") == 0
    found.identify(f"Bearer {token}", "")
    found.save_uses()
    assert not (tmp_path / "access-use.json").exists()
    found.save_uses(at_once=True)
    assert time.time() - AdminCredentials(tmp_path).last_use_s(f"token {id}") < 60
    (tmp_path / "access-use.json").write_text("nonsense")
    assert AdminCredentials(tmp_path).last_use_s(f"token {id}") == 0


def test_the_throttle_counts_before_and_gives_back() -> None:
    door = LoginThrottle()
    waits = [door.begin("10.0.0.1", "ada", 0.0) for _ in range(throttle.ADDRESS_ATTEMPTS + 1)]
    assert waits[:-1] == [0.0] * throttle.ADDRESS_ATTEMPTS
    assert waits[-1] == pytest.approx(throttle.ADDRESS_REGAIN_S)
    # Another address is not disturbed, until the user's own bound.
    assert door.begin("10.0.0.2", "ada", 0.0) == 0.0
    assert door.begin("10.0.0.1", "ada", throttle.ADDRESS_REGAIN_S) == 0.0
    for number in range(throttle.USER_ATTEMPTS):
        door.begin(f"10.0.1.{number}", "ada", 0.0)
    assert door.begin("10.0.2.1", "ada", 0.0) > 0
    assert door.begin("10.0.2.1", "bob", 0.0) == 0.0
    for _ in range(100):
        assert door.begin("10.0.3.1", "eve", 0.0) == 0.0
        door.succeeded("10.0.3.1", "eve", 0.0)


def test_the_throttle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "KEYS_MAX", 10)
    door = LoginThrottle()
    for number in range(1000):
        door.begin(f"10.0.{number // 250}.{number % 250}", f"u{number}", 0.0)
    assert len(door._addresses._left) == 10
    assert len(door._users._left) == 10


def test_networks() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff")
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert network_of("odd") == "odd"
    assert is_loopback_address("127.0.0.9")
    assert is_loopback_address("::1")
    assert is_loopback_address("::ffff:127.0.0.1")
    for stranger in ("10.0.0.1", "::", "", "localhost", "127.0.0.1.evil.example"):
        assert not is_loopback_address(stranger)


def test_sessions_end_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = BrowserSessions()
    secret = table.begin("ada", HASHED, 0.0)
    assert table.find(secret, sessions.IDLE_S - 1) is not None
    assert table.find(secret, 2 * sessions.IDLE_S - 2) is not None
    assert table.find(secret, 4 * sessions.IDLE_S) is None
    busy = table.begin("ada", HASHED, 0.0)
    at = 0.0
    while at < sessions.SESSION_S:
        assert table.find(busy, at) is not None
        at += sessions.IDLE_S / 2
    assert table.find(busy, sessions.SESSION_S) is None
    many = [table.begin("ada", HASHED, 0.0) for _ in range(sessions.SESSIONS_PER_OWNER_MAX + 1)]
    assert table.find(many[0], 1.0) is None
    assert table.find(many[1], 1.0) is not None
    monkeypatch.setattr(sessions, "SESSIONS_MAX", 5)
    for number in range(50):
        table.begin(f"u{number}", HASHED, 0.0)
    assert len(table) <= sessions.SESSIONS_PER_OWNER_MAX + 1


def test_identify_from_several_threads(tmp_path: Path) -> None:
    file = AccessFile(tmp_path)
    tokens = [file.change(changes.add_token(role, 1))[1] for role in ROLES]
    found = AdminCredentials(tmp_path)
    failures: list[BaseException] = []

    def identify() -> None:
        try:
            for number in range(2000):
                found.identify(f"Bearer {tokens[number % 4]}", "")
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=identify) for _ in range(4)]
    for each in threads:
        each.start()
    for number in range(20):
        found.change(changes.add_user(f"u{number}", "viewer", HASHED, 1))
        found.save_uses(at_once=True)
    for each in threads:
        each.join(60)
    assert failures == []


def test_the_lock_is_no_link_and_belongs_to_whom_it_belonged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory may be of another user, who lets the lock be a file of root."""
    given: list[int] = []
    monkeypatch.setattr(
        AccessFile, "_give_owner", lambda self, descriptor: given.append(descriptor)
    )
    victim = tmp_path / "victim"
    victim.touch(0o600)
    data = tmp_path / "data"
    data.mkdir()
    make = changes.add_user("ada", "admin", HASHED, 1)
    for target in (victim, tmp_path / "missing"):
        (data / "access.lock").symlink_to(target)
        with pytest.raises(AccessError, match=r"access\.lock"):
            AccessFile(data).change(make)
        (data / "access.lock").unlink()
    assert not (tmp_path / "missing").exists()
    assert not given
    (data / "access.lock").hardlink_to(victim)
    AccessFile(data).change(make)
    assert len(given) == 1, "the new file only"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up the rights of root")
def test_root_works_as_the_owner_of_the_directory() -> None:
    # The other user has to enter each directory above.
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        _check_root(Path(name))


def _check_root(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    os.chown(data, 12_345, 12_345)
    secret = tmp_path / "secret"
    secret.write_text("{}")
    secret.chmod(0o600)
    command = [sys.executable, "-m", "holdfast.cli.main", "access", "token", "create", "--role"]
    command += ["admin", "--data", str(data)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
    assert {each.stat().st_uid for each in data.iterdir()} == {12_345}
    (data / "access.json").unlink()
    (data / "access.json").symlink_to(secret)
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert "Permission denied" in done.stderr


def test_users_of_the_configuration_count_beside_those_of_the_file(tmp_path: Path) -> None:
    own = AccessFile(tmp_path / "own")
    id, token = own.change(changes.add_token("viewer", 1))
    given = AccessFile(tmp_path / "given")
    other = given.change(changes.add_token("admin", 1))[1]
    found = AdminCredentials(tmp_path / "own", read_given(str(given.path)))
    assert found.identify(f"Bearer {token}", "").scope is Scope.VIEWER
    assert found.identify(f"Bearer {other}", "").scope is Scope.ADMIN
    # It is an administrator that a change over the port leaves.
    found.change(changes.kept_admin(changes.remove_token(id), 1, found.given))
    assert set(json.loads(own.path.read_text())["tokens"]) == set()
    found.use_given(AccessData())
    with pytest.raises(Unauthenticated):
        found.identify(f"Bearer {other}", "")
    with pytest.raises(AccessError, match=r"admin\.access_file: .*No such file"):
        read_given(str(tmp_path / "none"))
