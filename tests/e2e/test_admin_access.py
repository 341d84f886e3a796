"""Users, tokens and sessions of the admin port, with a broker as a process."""

import http.client
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.access.gate import LOGINS_RECORDED
from holdfast.api.routes.live_routes import STREAMS_MAX
from tests.e2e.brokers import SOURCE, Holdfast
from tests.support.waiting import until

WAIT_S = 20.0
PASSWORD = "a right password"


def access(*words: str, given: str = "", token: str = "") -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(SOURCE))
    environment.pop("HOLDFAST_TOKEN", None)
    if token:
        environment["HOLDFAST_TOKEN"] = token
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "access", *words],
        input=given, capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip


def made_token(data: Path, role: str, *more: str) -> str:
    done = access("token", "create", "--data", str(data), "--role", role, *more)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    token = done.stdout.strip()
    assert token.startswith("holdfast_")
    assert done.stdout == token + "\n"
    return token


class Reply:
    def __init__(self, status: int, headers: http.client.HTTPMessage, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    port: int,
    method: str,
    path: str,
    token: str = "",
    body: object = None,
    headers: dict[str, str] | None = None,
    host: str = "127.0.0.1",
) -> Reply:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    sent = dict(headers or {})
    if token:
        sent["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        reply = connection.getresponse()
        return Reply(reply.status, reply.headers, reply.read())
    finally:
        connection.close()


class Secured:
    """A broker with a token of each role, and the user ada."""

    def __init__(self, broker: Holdfast, tokens: dict[str, str]) -> None:
        self.broker = broker
        self.tokens = tokens

    def ask(self, method: str, path: str, role: str = "", body: object = None) -> Reply:
        token = self.tokens[role] if role else ""
        return ask(self.broker.admin_port, method, path, token, body)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("access")
    broker = Holdfast(directory)
    broker.start()
    # Before there is a token, a local process needs none. Until the processes have agreed on the
    # generation of the log, the reply is 503 with Retry-After.
    until(lambda: ask(broker.admin_port, "GET", "/api/v1/log").status != 503, "no log")
    assert ask(broker.admin_port, "GET", "/api/v1/log").status == 200
    tokens = {
        role: made_token(broker.data, role) for role in ("viewer", "reader", "operator", "admin")
    }
    until(lambda: ask(broker.admin_port, "GET", "/api/v1/log").status == 401, "not noticed")
    done = access(
        "user", "add", "ada", "--role", "operator", "--data", str(broker.data),
        given=PASSWORD + "\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = Secured(broker, tokens)
    until(lambda: len(made.ask("GET", "/api/v1/users", "admin").json) == 1, "no user")
    yield made
    log = broker.log_text()
    broker.kill()
    assert "Traceback" not in log, log[-6000:]
    for secret in (PASSWORD, *(token.split("_", 2)[2] for token in tokens.values())):
        assert secret not in log


def test_the_file_is_private_and_has_no_secret(secured: Secured) -> None:
    path = secured.broker.data / "access.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert json.loads(text)["format"] == 1
    assert PASSWORD not in text
    assert all(token.split("_", 2)[2] not in text for token in secured.tokens.values())


def test_roles(secured: Secured) -> None:
    assert secured.ask("GET", "/healthz").status == 200
    assert secured.ask("GET", "/metrics").status == 401
    assert secured.ask("GET", "/metrics", "viewer").status == 200
    refused = secured.ask("GET", "/api/v1/log", "viewer")
    assert refused.status == 403
    assert "needs the role reader" in refused.json["error"]
    assert secured.ask("GET", "/api/v1/log", "reader").status == 200
    assert secured.ask("POST", "/api/v1/reload", "reader").status == 403
    assert secured.ask("POST", "/api/v1/reload", "operator").status == 200
    assert secured.ask("GET", "/api/v1/users", "operator").status == 403
    assert secured.ask("GET", "/api/v1/users", "admin").json[0]["name"] == "ada"
    who = secured.ask("GET", "/api/v1/login", "reader").json
    assert who["role"] == "reader"
    assert who["name"].startswith("token ")


def test_the_reader_that_the_kernel_sends_to_needs_its_scope(secured: Secured) -> None:
    body = {"ranges": [[0, 0, 100]]}
    assert secured.ask("POST", "/api/v1/log/read", "", body).status == 401
    assert secured.ask("POST", "/api/v1/log/read", "viewer", body).status == 403
    # Of several processes, another one may store the partition.
    assert secured.ask("POST", "/api/v1/log/read", "reader", body).status in (200, 421)


def test_a_new_token_works_at_once_and_a_removed_one_ends(secured: Secured) -> None:
    data, port = secured.broker.data, secured.broker.admin_port
    for path, method, body in (
        ("/api/v1/log", "GET", None), ("/api/v1/log/read", "POST", {"ranges": []}),
    ):  # fmt: skip
        token = made_token(data, "reader", "--expires", "1h", "--note", "spark")
        until(lambda: ask(port, method, path, token, body).status == 200, path)  # noqa: B023
        id = token.split("_")[1]
        assert access("token", "remove", id, "--data", str(data)).returncode == 0
        until(lambda: ask(port, method, path, token, body).status == 401, path)  # noqa: B023


def test_tokens_over_the_api(secured: Secured) -> None:
    made = secured.ask("POST", "/api/v1/tokens", "admin", {"role": "viewer", "valid_s": 5})
    assert made.status == 200
    id, token = made.json["id"], made.json["token"]
    port = secured.broker.admin_port
    assert ask(port, "GET", "/metrics", token).status == 200
    until(lambda: ask(port, "GET", "/metrics", token).status == 401, "it does not expire")
    listed = {each["id"]: each for each in secured.ask("GET", "/api/v1/tokens", "admin").json}
    assert listed[id]["used_s"] > 0
    assert "sha256" not in listed[id]
    assert secured.ask("DELETE", f"/api/v1/tokens/{id}", "admin").status == 200
    assert secured.ask("DELETE", f"/api/v1/tokens/{id}", "admin").status == 404
    assert secured.ask("POST", "/api/v1/tokens", "admin", {"role": "king"}).status == 400
    own = secured.tokens["admin"].split("_")[1]
    refused = secured.ask("DELETE", f"/api/v1/tokens/{own}", "admin")
    assert refused.status == 409
    assert "admin" in refused.json["error"]


def test_the_command_over_the_admin_port(secured: Secured, tmp_path: Path) -> None:
    place = ["--admin", f"127.0.0.1:{secured.broker.admin_port}"]
    refused = access("token", "list", *place)
    assert refused.returncode == 1
    assert "--token-file" in refused.stderr
    file = tmp_path / "token"
    file.write_text(secured.tokens["admin"] + "\n")
    done = access("token", "create", "--role", "viewer", *place, "--token-file", str(file))
    assert done.stdout.startswith("holdfast_"), done.stderr
    listed = access("token", "list", *place, "--json", token=secured.tokens["admin"])
    assert done.stdout.split("_")[1] in {each["id"] for each in json.loads(listed.stdout)}
    empty = tmp_path / "empty"
    empty.touch()
    wrong = access("token", "list", *place, "--token-file", str(empty))
    assert wrong.returncode == 1
    assert "is empty" in wrong.stderr


def login(port: int, user: str, password: str, address: str = "127.0.0.1") -> Reply:
    body = {"user": user, "password": password}
    return ask(port, "POST", "/api/v1/login", body=body, host=address)


def test_a_session_of_a_browser(secured: Secured) -> None:
    port = secured.broker.admin_port
    until(lambda: login(port, "ada", PASSWORD).status == 200, "the user is not known")
    reply = login(port, "ada", PASSWORD)
    assert reply.json == {"name": "user ada", "role": "operator"}
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    sent = {"Cookie": cookie.partition(";")[0]}
    origin = {"Origin": f"http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}
    assert ask(port, "GET", "/api/v1/log", headers=sent).status == 200
    assert ask(port, "POST", "/api/v1/reload", headers=sent | origin).status == 200
    assert ask(port, "GET", "/api/v1/users", headers=sent).status == 403
    evil = {"Origin": "http://evil.example"}
    assert ask(port, "POST", "/api/v1/reload", headers=sent | evil).status == 403
    assert ask(port, "DELETE", "/api/v1/login", headers=sent).status == 200
    # The session has ended on the server, so a copy of the cookie is worthless.
    assert ask(port, "GET", "/api/v1/log", headers=sent).status == 401


def test_a_stream_ends_with_its_credentials(secured: Secured) -> None:
    port = secured.broker.admin_port
    events, trace = "/api/v1/events", "/api/v1/trace/live?topic=%23"
    for path in (events, trace):
        made = secured.ask("POST", "/api/v1/tokens", "admin", {"role": "reader"}).json
        stream = open_stream(port, path, {"Authorization": f"Bearer {made['token']}"})
        assert secured.ask("DELETE", f"/api/v1/tokens/{made['id']}", "admin").status == 200
        secret = {"topic": "stream/x", "payload": "after the removal", "qos": 1}
        assert secured.ask("POST", "/api/v1/publish", "operator", secret).status == 200
        assert b"after the removal" not in stream.read(), path
    sent = {"Cookie": login(port, "ada", PASSWORD).headers["set-cookie"].partition(";")[0]}
    stream = open_stream(port, events, sent)
    assert ask(port, "DELETE", "/api/v1/login", headers=sent).status == 200
    stream.read()


def test_an_idle_trace_gives_its_place_back_when_its_token_ends(secured: Secured) -> None:
    port = secured.broker.admin_port
    path = "/api/v1/trace/live?client=nobody&seconds=600"
    streams = []
    for _ in range(STREAMS_MAX):
        made = secured.ask("POST", "/api/v1/tokens", "admin", {"role": "reader"}).json
        streams.append(open_stream(port, path, {"Authorization": f"Bearer {made['token']}"}))
        assert secured.ask("DELETE", f"/api/v1/tokens/{made['id']}", "admin").status == 200
    assert secured.ask("GET", path, "reader").status == 503
    for stream in streams:
        assert stream.read().strip() == b""
    sent = {"Authorization": f"Bearer {secured.tokens['reader']}"}
    open_stream(port, path, sent)


def open_stream(port: int, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    """A stream whose first line was received. Its reads fail after WAIT_S without data."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("GET", path, headers=headers)
    stream = connection.getresponse()
    assert stream.status == 200
    assert stream.readline()
    return stream


def test_another_password_ends_the_sessions(secured: Secured) -> None:
    port = secured.broker.admin_port
    user = {"name": "eve", "role": "viewer", "password": PASSWORD}
    assert secured.ask("POST", "/api/v1/users", "admin", user).status == 200
    assert secured.ask("POST", "/api/v1/users", "admin", user).status == 409
    sent = {"Cookie": login(port, "eve", PASSWORD).headers["set-cookie"].partition(";")[0]}
    assert ask(port, "GET", "/api/v1/sessions", headers=sent).status == 200
    changed = secured.ask("PUT", "/api/v1/users/eve", "admin", {"password": "another one"})
    assert changed.status == 200
    assert ask(port, "GET", "/api/v1/sessions", headers=sent).status == 401
    sent = {"Cookie": login(port, "eve", "another one").headers["set-cookie"].partition(";")[0]}
    # The role counts as it is now.
    assert ask(port, "GET", "/api/v1/log", headers=sent).status == 403
    assert secured.ask("PUT", "/api/v1/users/eve", "admin", {"role": "reader"}).status == 200
    assert ask(port, "GET", "/api/v1/log", headers=sent).status == 200
    assert secured.ask("DELETE", "/api/v1/users/eve", "admin").status == 200
    assert ask(port, "GET", "/api/v1/log", headers=sent).status == 401
    short = {"name": "bob", "role": "viewer", "password": "short"}
    assert secured.ask("POST", "/api/v1/users", "admin", short).status == 400


def test_the_audit_has_every_change_and_no_secret(secured: Secured) -> None:
    body = {"role": "reader", "note": "for the audit"}
    made = secured.ask("POST", "/api/v1/tokens", "admin", body).json
    assert secured.ask("DELETE", f"/api/v1/tokens/{made['id']}", "admin").status == 200
    assert secured.ask("DELETE", f"/api/v1/tokens/{made['id']}", "admin").status == 404
    page = secured.ask("GET", "/api/v1/audit?limit=3", "admin").json
    missing, removed, added = page["entries"]
    own = f"token {secured.tokens['admin'].split('_')[1]}"
    assert {each["who"] for each in page["entries"]} == {own}
    assert added["remote"] == "127.0.0.1"
    assert (added["method"], added["path"]) == ("POST", "/api/v1/tokens")
    assert added["after"]["note"] == "for the audit"
    assert removed["before"]["id"] == made["id"]
    assert missing["status"] == 404
    assert "no token" in missing["error"]
    # The pages together have everything, in order.
    times = []
    path = "/api/v1/audit?limit=2"
    while True:
        page = secured.ask("GET", path, "admin").json
        times += [each["time_us"] for each in page["entries"]]
        if page["next"] is None:
            break
        path = f"/api/v1/audit?limit=2&before={page['next']}"
    assert times == sorted(times, reverse=True)
    assert len(times) >= 3
    raw = b"".join(each.read_bytes() for each in secured.broker.segments())
    assert b'"for the audit"' in raw
    assert made["token"].split("_", 2)[2].encode() not in raw


def test_the_audit_names_who_logs_in_and_what_a_reload_applies(secured: Secured) -> None:
    port = secured.broker.admin_port
    sent = {"Cookie": login(port, "ada", PASSWORD).headers["set-cookie"].partition(";")[0]}
    assert ask(port, "POST", "/api/v1/reload", headers=sent).status == 200
    assert ask(port, "DELETE", "/api/v1/login", headers=sent).status == 200
    entries = secured.ask("GET", "/api/v1/audit?limit=3", "admin").json["entries"]
    assert [each["who"] for each in entries] == ["user ada"] * 3
    assert entries[1]["after"] == {"applied": [], "needs_restart": [], "disconnected": 0}


def test_the_audit_says_what_was_done_to_whom(secured: Secured) -> None:
    ban = {"client": "pump 7", "duration_s": 60, "reason": "too loud"}
    assert secured.ask("POST", "/api/v1/ban", "operator", ban).status == 200
    assert secured.ask("DELETE", "/api/v1/ban?client=pump%207", "operator").status == 200
    path = "/api/v1/retained?filter=old%2F%23"
    assert secured.ask("DELETE", f"{path}&dry_run=true", "operator").status == 200
    assert secured.ask("DELETE", path, "operator").status == 200
    user = {"name": "tim", "role": "viewer", "password": PASSWORD}
    assert secured.ask("POST", "/api/v1/users", "admin", user).status == 200
    assert secured.ask("DELETE", "/api/v1/users/tim", "admin").status == 200
    entries = secured.ask("GET", "/api/v1/audit?limit=6", "admin").json["entries"][::-1]
    assert [(each["parameters"], each.get("dry", False)) for each in entries] == [
        ('client="pump 7" duration_s=60 reason="too loud"', False),
        ('client="pump 7"', False),
        ("filter=old/# dry_run=true", True),
        ("filter=old/#", False),
        ("name=tim role=viewer", False),
        ("name=tim", False),
    ]
    assert entries[4]["action"] == "add a user"
    lines = [each for each in secured.broker.log_text().splitlines() if " audit " in each]
    assert "filter=old/# dry_run=true" in lines[-4]
    assert "result=tried" in lines[-4]
    assert "result=done" in lines[-3]


def test_the_audit_on_the_command_line(secured: Secured) -> None:
    place = ["--admin", f"127.0.0.1:{secured.broker.admin_port}"]
    assert secured.ask("POST", "/api/v1/ban", "operator", {"client": "a\x1bb"}).status == 200
    assert secured.ask("DELETE", "/api/v1/retained?filter=x&dry_run=true", "operator").status == 200
    assert secured.ask("DELETE", "/api/v1/users/none", "admin").status == 404
    done = access("audit", "--limit", "3", *place, token=secured.tokens["admin"])
    assert done.returncode == 0, done.stderr
    head, refused, tried, banned = done.stdout.splitlines()
    assert head.split() == ["time", "who", "from", "node", "what", "result"]
    assert "  remove a user: name=none  " in refused
    assert refused.endswith("refused: there is no user 'none'")
    assert tried.endswith("tried (dry run)")
    assert "client=" in banned
    assert "\x1b" not in banned
    listed = access("audit", "--json", "--limit", "2", *place, token=secured.tokens["admin"])
    assert [each.get("status", 200) for each in json.loads(listed.stdout)] == [404, 200]
    denied = access("audit", *place, token=secured.tokens["viewer"])
    assert denied.returncode == 1
    assert "needs the role admin" in denied.stderr


def test_strangers_and_logins_do_not_fill_the_audit(secured: Secured) -> None:
    port = secured.broker.admin_port
    mark = {"name": "nobody-there"}
    assert secured.ask("DELETE", "/api/v1/users/nobody-there", "admin").status == 404
    for _ in range(5):
        assert ask(port, "DELETE", "/api/v1/login").status == 200
        assert (
            ask(port, "DELETE", "/api/v1/login", headers={"Cookie": "holdfast_session=x"}).status
            == 200
        )
    newest = secured.ask("GET", "/api/v1/audit?limit=1", "admin").json["entries"][0]
    assert newest["path"].endswith(mark["name"])
    # A viewer may change nothing, and logs in without end.
    token = {"token": secured.tokens["viewer"]}
    for _ in range(LOGINS_RECORDED + 10):
        assert ask(port, "POST", "/api/v1/login", body=token).status == 200
    page = secured.ask("GET", "/api/v1/audit?limit=500", "admin").json["entries"]
    viewer = f"token {secured.tokens['viewer'].split('_')[1]}"
    logins = [each for each in page if each["who"] == viewer]
    assert LOGINS_RECORDED <= len(logins) <= LOGINS_RECORDED + 5


def test_the_audit_outlives_a_restart(tmp_path: Path) -> None:
    broker = Holdfast(tmp_path)
    broker.start()
    assert ask(broker.admin_port, "POST", "/api/v1/reload").status == 200
    broker.kill()
    broker.start()
    entries = ask(broker.admin_port, "GET", "/api/v1/audit").json["entries"]
    broker.kill()
    assert [(each["who"], each["path"]) for each in entries] == [("local", "/api/v1/reload")]


def test_logins_are_throttled(tmp_path: Path) -> None:
    broker = Holdfast(tmp_path)
    made_token(broker.data, "admin")
    done = access("user", "add", "ada", "--role", "viewer", "--data", str(broker.data),
                  given=PASSWORD + "\n")  # fmt: skip
    assert done.returncode == 0, done.stderr
    broker.start()
    port = broker.admin_port
    assert login(port, "nobody", "wrong one").status == 401
    replies = [login(port, "ada", f"wrong {number}") for number in range(6)]
    assert replies[0].status == 401
    assert replies[-1].status == 429
    assert int(replies[-1].headers["retry-after"]) >= 1
    assert login(port, "ada", PASSWORD).status == 429
    broker.kill()
    assert broker.log_text().count("login_failed") >= 2
    assert PASSWORD not in broker.log_text()


def own_address() -> str:
    """An address of this machine that is not loopback, or ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


class Reachable(Holdfast):
    """A broker whose admin port is on all addresses."""

    def command(self) -> list[str]:
        return [
            "0.0.0.0:" + each.removeprefix("127.0.0.1:") if each.startswith("127.0.0.1:") else each
            for each in super().command()
        ]


def test_without_users_other_machines_get_health_only(tmp_path: Path) -> None:
    address = own_address()
    if not address:
        pytest.skip("this machine has no address but loopback")
    broker = Reachable(tmp_path)
    broker.start()
    port = broker.admin_port
    assert ask(port, "GET", "/healthz", host=address).status == 200
    assert ask(port, "GET", "/readyz", host=address).status == 200
    for method, path in (
        ("GET", "/metrics"), ("GET", "/api/v1/log"), ("POST", "/api/v1/reload"),
        ("POST", "/api/v1/log/read"), ("GET", "/api/v1/users"), ("POST", "/api/v1/tokens"),
    ):  # fmt: skip
        reply = ask(port, method, path, body={}, host=address)
        assert reply.status == 403, path
        assert "holdfast access token create" in reply.json["error"]
    assert ask(port, "GET", "/api/v1/log").status == 200
    token = made_token(broker.data, "admin")
    until(lambda: ask(port, "GET", "/api/v1/log").status == 401, "the token is not noticed")
    assert ask(port, "GET", "/api/v1/log", token, host=address).status == 200
    broker.kill()


def test_a_broken_file_leaves_the_users_in_force(tmp_path: Path) -> None:
    broker = Holdfast(tmp_path)
    token = made_token(broker.data, "viewer")
    broker.start()
    port = broker.admin_port
    path = broker.data / "access.json"
    until(lambda: "access_agreed" in broker.log_text(), "the file has what was agreed")
    text = path.read_text()
    for broken in ("{", '{"format": 2}', text.replace("viewer", "king"), "[" * 100_000):
        lines = broker.log_text().count("access_file_refused")
        path.write_text(broken)
        until(lambda: broker.log_text().count("access_file_refused") > lines, broken[:20])  # noqa: B023
        assert ask(port, "GET", "/metrics", token).status == 200
        assert ask(port, "GET", "/metrics").status == 401
    path.unlink()
    until(lambda: "access_file_gone" in broker.log_text(), "gone")
    assert ask(port, "GET", "/metrics").status == 401
    path.write_text("{")
    broker.kill()
    with pytest.raises(RuntimeError, match=r"access\.json"):
        broker.start()


GARBAGE = [
    "Bearer", "Bearer ", "Basic YTpi", "Bearer holdfast_", "Bearer holdfast__", "bearer x" * 1000,
    "Bearer holdfast_" + "a" * 60 + "_" + "b" * 500, "Bearer \xff\xfe", "\x00",
    "Bearer holdfast_..",
    "Bearer {id}_", "Bearer holdfast_{id}_wrong", "Bearer holdfast_{id}_{secret}x",
    "Bearer holdfast_{id}_{secret} x", "Bearer x holdfast_{id}_{secret}",
]  # fmt: skip


def test_garbage_in_credentials_gets_401(secured: Secured) -> None:
    _, id, secret = secured.tokens["admin"].split("_", 2)
    port = secured.broker.admin_port
    for text in GARBAGE:
        sent = text.replace("{id}", id).replace("{secret}", secret).encode("latin-1")
        for path, method in (("/api/v1/log", b"GET"), ("/api/v1/log/read", b"POST")):
            head = method + b" " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\n"
            for name in (b"Authorization: ", b"Cookie: holdfast_session="):
                with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                    connection.sendall(
                        head + name + sent + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                    status = connection.makefile("rb").readline().split()
                    assert status[1:2] in ([b"401"], [b"400"]), (text, path, name)
    assert secured.ask("GET", "/api/v1/log", "reader").status == 200


def test_the_address_of_a_client_is_not_its_own_claim(tmp_path: Path) -> None:
    broker = Holdfast(tmp_path)
    broker.start()
    port = broker.admin_port
    forwarded = {"X-Forwarded-For": "127.0.0.1"}
    # A proxy on this machine would open the port to the world, before there is a user.
    assert ask(port, "GET", "/api/v1/log", headers=forwarded).status == 403
    body = {"ranges": [[0, 0, 100]]}
    assert ask(port, "POST", "/api/v1/log/read", "", body, headers=forwarded).status == 403
    assert ask(port, "GET", "/healthz", headers=forwarded).status == 200
    token = made_token(broker.data, "admin")
    until(lambda: ask(port, "GET", "/api/v1/log").status == 401, "not noticed")
    claimed = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}
    assert ask(port, "POST", "/api/v1/reload", token, headers=claimed).status == 200
    newest = ask(port, "GET", "/api/v1/audit?limit=1", token).json["entries"][0]
    assert newest["remote"] == "127.0.0.1"
    broker.kill()


def test_the_address_of_a_client_behind_a_known_proxy(tmp_path: Path) -> None:
    broker = Holdfast(tmp_path, settings={"admin": {"proxies": ["127.0.0.0/8"]}})
    broker.start()
    port = broker.admin_port
    claimed = {"X-Forwarded-For": "198.51.100.1, 203.0.113.9"}
    assert ask(port, "GET", "/api/v1/log", headers=claimed).status == 403
    token = made_token(broker.data, "admin")
    until(lambda: ask(port, "GET", "/api/v1/log").status == 401, "not noticed")
    assert ask(port, "POST", "/api/v1/reload", token, headers=claimed).status == 200
    newest = ask(port, "GET", "/api/v1/audit?limit=1", token).json["entries"][0]
    # The last address is the one that the proxy itself has seen.
    assert newest["remote"] == "203.0.113.9"
    broker.kill()


def test_slow_bodies_of_strangers_do_not_keep_others_away(secured: Secured) -> None:
    port = secured.broker.admin_port
    head = (
        b"POST /api/v1/login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    try:
        for connection in slow:
            connection.sendall(head)
        assert [ask(port, "GET", "/readyz").status for _ in range(3)] == [200] * 3
    finally:
        for connection in slow:
            connection.close()


def test_bytes_that_are_no_request_get_one_json_line(secured: Secured) -> None:
    port = secured.broker.admin_port
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET /" + b"x" * 70_000):
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
            connection.sendall(sent + b"\r\n\r\n")
            received = connection.recv(4096)
        assert received.startswith(b"HTTP/1.1 400")
        assert b"\r\ncontent-type: application/json\r\n" in received
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]
    until(lambda: "http_invalid remote=" in secured.broker.log_text(), "no line")
    assert "Invalid HTTP request" not in secured.broker.log_text()
