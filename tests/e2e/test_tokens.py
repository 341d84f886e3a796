"""Clients with tokens against a real broker: rights from claims, expiry, keys from a site."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey

from holdfast.protocol.mqtt import reasons
from tests.e2e import wire
from tests.e2e.brokers import Holdfast
from tests.e2e.conftest import StartHoldfast

CLOCK_S = 20.0


def key(kid: str) -> ECKey:
    return ECKey.generate_key("P-256", {"kid": kid})


def key_set(*keys: ECKey) -> bytes:
    return json.dumps({"keys": [each.as_dict(private=False) for each in keys]}).encode()


def token(signer: ECKey, lasts_s: float = 60.0, **claims: object) -> str:
    full = {"sub": "alice", "exp": time.time() + lasts_s, **claims}
    return jwt.encode({"alg": "ES256", "kid": signer.kid}, full, signer)


def login(broker: Holdfast, password: str, client_id: str = "c") -> tuple[wire.Wire, int]:
    client = wire.Wire(broker.port)
    flags = 0x02 | 0x40 | 0x80
    body = wire.text("MQTT") + bytes([5, flags, 0, 60, 0])
    body += wire.text(client_id) + wire.text("ignored") + wire.text(password)
    client.send(wire.packet(0x10, body))
    return client, wire.read_connack(client.expect(wire.CONNACK), 5).reason


def test_a_token_gives_name_and_rights_and_ends(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    signer = key("one")
    path = tmp_path / "keys.json"
    path.write_bytes(key_set(signer))
    broker = start_holdfast({"security.jwt": {"jwks": str(path), "leeway_s": 0.0}})
    password = token(signer, 3.0, publish=["plant/%u/#"], subscribe=["plant/#"])
    client, reason = login(broker, password)
    with client:
        assert reason == 0
        assert client.publish("plant/alice/x", b"", qos=1) in (0, 0x10)
        assert client.publish("plant/bob/x", b"", qos=1) == reasons.NOT_AUTHORIZED
        left = client.expect(wire.DISCONNECT, CLOCK_S)
        assert left.reason == reasons.MAXIMUM_CONNECT_TIME
        with pytest.raises(wire.Closed):
            client.receive()
    client, reason = login(broker, token(key("one")))
    client.socket.close()
    assert reason == reasons.BAD_USER_NAME_OR_PASSWORD
    client, reason = login(broker, "a plain password")
    client.socket.close()
    assert reason == reasons.NOT_AUTHORIZED
    assert password not in broker.log_text()


class KeySite:
    """An HTTP server with a key set that can be replaced."""

    def __init__(self) -> None:
        self.data = b""
        self.status = 200
        self.requests = 0
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.requests += 1
                self.send_response(site.status)
                self.end_headers()
                self.wfile.write(site.data)

            def log_message(self, format: str, *arguments: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/keys"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def await_login(broker: Holdfast, password: str, wanted: int) -> None:
    deadline = time.monotonic() + CLOCK_S
    while True:
        client, reason = login(broker, password)
        client.socket.close()
        if reason == wanted:
            return
        assert time.monotonic() < deadline, reason
        time.sleep(0.1)


def test_keys_of_a_site_rotate_and_outlive_it(start_holdfast: StartHoldfast) -> None:
    site = KeySite()
    try:
        one, two = key("one"), key("two")
        site.data = key_set(one)
        broker = start_holdfast({"security.jwt": {"jwks": site.url, "refresh_s": 1.0}})
        await_login(broker, token(one), 0)
        site.data = key_set(two)
        await_login(broker, token(two), 0)
        await_login(broker, token(one), reasons.BAD_USER_NAME_OR_PASSWORD)
        site.status = 500
        before = site.requests
        deadline = time.monotonic() + CLOCK_S
        while site.requests == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        await_login(broker, token(two), 0)
        site.data = b"[" * 1000
        site.status = 200
        await_login(broker, token(two), 0)
    finally:
        site.close()
