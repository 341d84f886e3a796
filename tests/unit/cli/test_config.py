"""`holdfast config`: check, show, explain, and the import of Mosquitto's files."""

import json
import tomllib
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.config.load import load
from holdfast.config.problem import ConfigError
from holdfast.config.values import all_keys
from holdfast.security.psk import has_psk

CONFIGURATION = """\
[limits]
sessions = 7
[[listeners]]
port = 1884
[[listeners]]
port = 1885
"""


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    path = tmp_path / "holdfast.toml"
    path.write_text(CONFIGURATION)
    return path


def test_every_value_has_its_source(
    configuration: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_LISTENERS__1__BIND", "127.0.0.2")
    assert main(["config", "show", "-c", str(configuration), "--json"]) == 0
    found = {each["key"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["limits.sessions"]["value"] == 7
    assert found["limits.sessions"]["origin"] == str(configuration)
    assert found["listeners[1].bind"]["origin"] == "environment HOLDFAST_LISTENERS__1__BIND"
    assert found["listeners[0].bind"]["origin"] == "default"
    assert found["security.allow_anonymous"]["origin"] == "resolved from other settings"
    assert main(["config", "show", "-c", str(configuration), "--changed"]) == 0
    keys = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert keys == [
        *["listeners[0].port", "listeners[1].bind", "listeners[1].port"],
        *["security.allow_anonymous", "limits.sessions"],
    ]


def test_the_file_needs_no_option(
    configuration: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config import` has none either. Two files are one too many."""
    file = str(configuration)
    for words in ([file], ["-c", file]):
        assert main(["config", "show", *words, "--changed"]) == 0
        assert "limits.sessions = 7" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["config", "show", file, "-c", file])
    configuration.write_text("[limits]\nsessions = 'x'\n")
    assert main(["config", "check", file]) == 2
    assert f"{file}: limits.sessions" in capsys.readouterr().err


def test_every_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    from msgspec import inspect

    from holdfast.config.schema import Config

    for key in all_keys(inspect.type_info(Config)):
        assert main(["config", "explain", key]) == 0, key
        assert "allowed: " in capsys.readouterr().out


def test_a_key_is_explained(configuration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "limits.sessions", "-c", str(configuration)]) == 0
    out = capsys.readouterr().out
    assert f"limits.sessions = 7  # {configuration}" in out
    assert "a whole number, 1 or more" in out
    assert "HOLDFAST_LIMITS__SESSIONS" in out
    assert "0x97" in out
    assert main(["config", "explain", "listeners[1].port", "-c", str(configuration)]) == 0
    assert capsys.readouterr().out.startswith("listeners[1].port = 1885")
    for key in ("listeners[1].port", "listeners.1.port"):
        assert main(["config", "explain", key, "-c", str(configuration)]) == 0
        out = capsys.readouterr().out
        assert out.startswith("listeners[1].port = 1885")
        assert "HOLDFAST_LISTENERS__1__PORT" in out
    assert main(["config", "explain", "listeners", "-c", str(configuration)]) == 0
    assert "listeners[1].port = 1885" in capsys.readouterr().out
    assert main(["config", "explain", "limits.sesions"]) == 2
    assert "did you mean limits.sessions?" in capsys.readouterr().err


def test_all_files_that_a_start_opens_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "holdfast.toml"
    (tmp_path / "acl").write_text("user alice\ntopic reed #\n")
    (tmp_path / "file").write_text("")
    path.write_text(
        f'[node]\ndata = "{tmp_path}/file/data"\n'
        f'[security]\nacl_file = "{tmp_path}/acl"\n'
        f'[[listeners]]\ncertificate = "{tmp_path}/none.pem"\nkey = "{tmp_path}/none.key"\n'
    )
    assert main(["config", "check", "-c", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert f"{tmp_path}/acl:2" in lines[0]
    assert f"{tmp_path}/none.pem" in lines[1]
    assert "node.data" in lines[2]
    path.write_text("")
    assert main(["config", "check", "-c", str(path)]) == 0
    assert capsys.readouterr().out == "configuration is fine\n"


def test_serve_checks_all_files_and_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text(f'[security]\npassword_file = "{tmp_path}/none"\n[admin]\nbind = "0.0.0.0"\n')
    assert main(["serve", "-c", str(path), "--check-config"]) == 2
    *warnings, problem = capsys.readouterr().err.splitlines()
    assert all("warning: admin.bind" in each for each in warnings)
    assert f"{tmp_path}/none" in problem


@pytest.mark.parametrize("key", ["node.data", "admin.access_file"])
def test_an_admin_port_with_tokens_does_not_ask_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    data = tmp_path / "data"
    text = f'node.data = "{data}"\nadmin.bind = "0.0.0.0"\n'
    path = tmp_path / "holdfast.toml"
    path.write_text(text)
    assert main(["config", "check", "-c", str(path)]) == 0
    missing, unencrypted = capsys.readouterr().err.splitlines()
    assert "other machines need a token" in missing
    assert "without admin.certificate" in unencrypted

    directory = data if key == "node.data" else tmp_path / "given"
    assert main(["access", "token", "create", "--data", str(directory), "--role", "admin"]) == 0
    if key != "node.data":
        path.write_text(f'{text}admin.access_file = "{directory}/access.json"\n')
    capsys.readouterr()
    assert main(["config", "check", "-c", str(path)]) == 0
    assert capsys.readouterr().err.splitlines() == [unencrypted]


def test_a_mosquitto_conf_is_recognized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "any.conf"
    path.write_text("# comment\nlistener 1883\n")
    assert main(["serve", "-c", str(path)]) == 2
    assert "`holdfast config import` translates it" in capsys.readouterr().err


MOSQUITTO = """\
listener 1883
listener 8883 127.0.0.1
cafile ca.pem
certfile server.pem
keyfile server.key
require_certificate true
listener 9001
protocol websockets
password_file passwd
max_queued_messages 1000
max_inflight_messages 0
max_keepalive 0
persistent_client_expiration 2w
log_type debug
connection away
address example.org
topic # both 2
crlfile crl.pem
"""


def test_a_mosquitto_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mosquitto.conf"
    path.write_text(MOSQUITTO)
    assert main(["config", "import", str(path), "--out", str(tmp_path / "out")]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert [note.split(":")[2] for note in notes] == ["10", "15"]
    made = tmp_path / "out" / "holdfast.toml"
    config = load(made)
    assert [(each.bind, each.port) for each in config.listeners] == [
        ("0.0.0.0", 1883),
        ("127.0.0.1", 8883),
        ("0.0.0.0", 9001),
    ]
    assert config.listeners[1].require_certificate
    assert config.listeners[1].certificate_user == "none"
    assert config.listeners[2].transport == "websocket"
    assert config.listeners[2].path == "*"
    assert config.security.allow_anonymous is False
    assert config.security.password_file == "passwd"
    assert config.limits.inflight_max == config.limits.keep_alive_s_max == 65_535
    assert config.limits.session_expiry_s_max == 14 * 86_400
    assert config.logging.level == "debug"
    assert config.node.data == str(tmp_path / "out" / "data")
    text = (tmp_path / "out" / "holdfast.toml").read_text()
    assert text.startswith("# Differences to mosquitto.conf, by line:\n# ")
    # A second import overwrites nothing.
    assert main(["config", "import", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "File exists" in capsys.readouterr().err


def test_rules_of_mosquitto_listeners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mosquitto.conf"
    path.write_text(
        "per_listener_settings true\npassword_file first\n"
        "listener 1884 10.0.0.1\nacl_file guests.acl\nallow_anonymous true\nmount_point guests\n"
        "listener 8883\ncafile ca.pem\ncertfile server.pem\nkeyfile server.key\n"
        "require_certificate true\nuse_identity_as_username true\ncrlfile crl.pem\n"
        "tls_version tlsv1.3\nciphers HIGH\nallow_anonymous false\n"
        "listener 0 /run/mosquitto.sock\nenable_proxy_protocol 2\n"
    )
    assert main(["config", "import", str(path), "--out", str(tmp_path / "out")]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert [note.split(":")[2] for note in notes] == ["6", "18"]
    first, guests, users, local = load(tmp_path / "out" / "holdfast.toml").listeners
    assert (first.port, first.password_file) == (1883, "first")
    assert (guests.acl_file, guests.password_file) == ("guests.acl", "")
    assert (guests.allow_anonymous, guests.mount) == (True, "guests/")
    assert (users.allow_anonymous, users.certificate_user) == (False, "cn")
    assert (users.crl, users.tls_minimum, users.tls_ciphers) == ("crl.pem", "1.3", "HIGH")
    assert (local.socket, local.socket_mode) == ("/run/mosquitto.sock", "0666")


def test_pre_shared_keys_of_mosquitto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mosquitto.conf"
    path.write_text(
        "psk_file keys\nlistener 8883\npsk_hint site\nuse_identity_as_username true\n"
        "listener 8884\npsk_hint site\nmax_qos 1\nlistener 1884\n"
    )
    assert main(["config", "import", str(path), "--out", str(tmp_path / "out")]) == 0
    # That is for one listener there, and for all here.
    assert [note.split(":")[2] for note in capsys.readouterr().err.splitlines()] == ["7"]
    made = tmp_path / "out" / "holdfast.toml"
    tables = tomllib.loads(made.read_text())["listeners"]
    found = [(each.get("psk_file"), each.get("certificate_user")) for each in tables]
    assert found == [("keys", "cn"), ("keys", "none"), (None, None)]
    (tmp_path / "keys").write_text("dev-1:0a0b\n")
    problems: list[str] = []
    try:
        load(made)
    except ConfigError as error:
        problems = error.problems
    said = [line for line in problems if "psk_file" in line]
    expected = [] if has_psk() else ["needs Python 3.13 or later"] * 2
    assert [line.rpartition(": ")[2] for line in said] == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tls_version sslv3", "known are tlsv1.1, tlsv1.2, tlsv1.3"),
        ("listener x", "mosquitto.conf:1: 'x' is no whole number"),
        ("allow_anonymous yes", "neither true nor false"),
        ("persistent_client_expiration 14", "a number with h, d, w, m or y"),
        ("include_dir .", ""),
    ],
)
def test_wrong_mosquitto_lines(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mosquitto.conf"
    path.write_text(text + "\n")
    assert main(["config", "import", str(path)]) == 1
    error = capsys.readouterr().err
    assert (said or "more than 100 included files") in error
    assert error.count("\n") == 1


def test_every_line_of_an_import_is_a_setting(tmp_path: Path) -> None:
    """What is printed is TOML that loads."""
    path = tmp_path / "mosquitto.conf"
    path.write_text('port 1884\npassword_file with "quotes" in it\n')
    assert main(["config", "import", str(path), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "holdfast.toml").read_text()
    assert tomllib.loads(text)["security"]["password_file"] == 'with "quotes" in it'


def test_the_copied_users_are_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users.json").write_text("{}")
    path = tmp_path / "mosquitto.conf"
    text = f"plugin dynamic_security.so\nplugin_opt_config_file {tmp_path}/users.json\n"
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["config", "import", str(path), "--out", "out"]) == 0
    made = load(tmp_path / "out" / "holdfast.toml")
    assert made.security.dynamic_security_file == str(tmp_path / "out" / "dynamic-security.json")


def test_a_group_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users = tmp_path / "dynamic-security.json"
    users.write_text('{"anonymousGroup": "guests"}')
    path = tmp_path / "mosquitto.conf"
    path.write_text(f"plugin dynamic_security.so\nplugin_opt_config_file {users}\n")
    assert main(["config", "import", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "anonymousGroup: there is no group 'guests'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("security.http.url", "https://user:hunter2@example.org/x"),
        ("security.jwt.jwks", "http://user:hunter2@example.org/x"),
        ("security.jwt.jwks", "ftp://user:hunter2@example.org/x"),
    ],
)
def test_a_password_in_a_url_is_refused_and_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, url: str
) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text(f'{key} = "{url}"\n')
    for command in ("check", "show"):
        assert main(["config", command, "-c", str(path)]) == 2
        captured = capsys.readouterr()
        assert key in captured.err
        assert "***@example.org" in captured.err
        assert "hunter2" not in captured.out + captured.err


def test_what_an_import_cannot_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"port 1883\n\xff")
    lost = tmp_path / "mosquitto.conf"
    lost.write_text(f"include_dir {tmp_path}/conf.d\n")
    for path, text in (
        (tmp_path / "none", f"{tmp_path / 'none'}: No such file or directory"),
        (tmp_path, f"{tmp_path}: Is a directory"),
        (binary, f"{binary}: not UTF-8 at byte 11"),
        (lost, f"{lost}:1: there is no directory {tmp_path}/conf.d"),
    ):
        assert main(["config", "import", str(path)]) == 1
        assert capsys.readouterr().err == f"holdfast: {text}\n"


def test_an_import_lists_what_holdfast_does_differently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mosquitto.conf"
    path.write_text(
        "queue_qos0_messages true\nallow_zero_length_clientid false\npersistence false\n"
        "memory_limit 1000000\nuser mosquitto\npid_file /run/mosquitto.pid\n"
    )
    assert main(["config", "import", str(path)]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert [note.split(":")[2] for note in notes] == ["1", "2", "3", "4", "5", "6"]
    path.write_text(
        "queue_qos0_messages false\nallow_zero_length_clientid true\npersistence true\n"
    )
    assert main(["config", "import", str(path)]) == 0
    assert capsys.readouterr().err == ""
