"""The replies of an HTTP service for identity: what each means, and garbage."""

import asyncio
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.security.identity.http_check import encode_request, parse_reply
from holdfast.security.identity.http_service import HttpService
from holdfast.security.identity.identity import (
    NOT_AUTHORIZED,
    Answer,
    ClientIdentity,
    LoginRefusal,
    LoginRequest,
)

REQUEST = LoginRequest("c1", "alice", b"\xffsecret", "", "10.0.0.7:5000", "l")


def read(status: int = 200, **members: object) -> Answer:
    return parse_reply(json.dumps(members).encode(), status, REQUEST, 1000.0)


def test_a_request_has_the_client() -> None:
    assert json.loads(encode_request(REQUEST)) == {
        "client_id": "c1",
        "username": "alice",
        "password": "\ufffdsecret",
        "certificate_name": "",
        "address": "10.0.0.7",
        "listener": "l",
    }


def test_an_accepted_client() -> None:
    assert read(result="allow") == ClientIdentity("alice", "http")
    assert read(result="allow", username="") == ClientIdentity(None, "http")
    answer = read(result="allow", username="bob", publish=["%u/%c/#"], lasts_s=60, new=1)
    assert isinstance(answer, ClientIdentity)
    assert (answer.username, answer.expires_s) == ("bob", 1060.0)
    assert answer.rules is not None
    assert answer.rules.can_write("bob/c1/x")
    assert not answer.rules.can_read("bob/c1/x")


def test_a_refused_client() -> None:
    for answer in (read(401), read(403), read(result="deny")):
        assert isinstance(answer, LoginRefusal)
        assert answer.reason == NOT_AUTHORIZED
    denied = read(result="deny", reason="not today" * 100)
    assert isinstance(denied, LoginRefusal)
    assert denied.text.startswith("not today")
    assert len(denied.text) == 200
    assert read(result="ignore") is None


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b"{}"),
        (204, b""),
        (302, b'{"result": "allow"}'),
        (200, b""),
        (200, b"allow"),
        (200, b"[" * 10_000),
        (200, b'{"result": "yes"}'),
        (200, b'{"result": "allow", "publish": "a"}'),
        (200, b'{"result": "allow", "publish": ["a/#/b"]}'),
        (200, b'{"result": "allow", "lasts_s": -1}'),
        (200, b'{"result": "allow", "lasts_s": 1e300}'),
        (200, b'{"result": "allow", "username": "a\\u0000"}'),
    ],
)
def test_odd_replies_never_accept(status: int, body: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse_reply(body, status, REQUEST, 1000.0)


MEMBERS = st.sampled_from(["result", "username", "publish", "subscribe", "lasts_s", "reason"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=4) | st.sampled_from(["deny"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MEMBERS, inner, max_size=6),
    max_leaves=10,
)


@given(status=st.sampled_from([200, 200, 401, 500]), body=st.binary(max_size=40) | VALUES)
def test_garbage_accepts_nobody(status: int, body: object) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with suppress(ValueError, RecursionError):
        answer = parse_reply(data, status, REQUEST, 1000.0)
        assert answer is None or isinstance(answer, LoginRefusal)


def test_a_surplus_reply_answers_no_other_question() -> None:
    """A service replies twice to the first question. Without a check the second client receives
    that surplus reply."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                question = await reader.readexactly(length)
                allow = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nallow"
                deny = allow.replace(b"allow", b"denys")
                writer.write(allow + allow if question == b"first" else deny)
        writer.close()

    async def run() -> list[bytes]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        service = HttpService({}, 5.0, 1)
        await service.start()
        try:
            # The others wait for the one connection while the first question is under way.
            asked = [service.post(url, each) for each in (b"first", b"second", b"third")]
            return [body for _, body in await asyncio.gather(*asked)]
        finally:
            await service.close()
            server.close()

    assert asyncio.run(run()) == [b"allow", b"denys", b"denys"]
    # The connection of the good replies is kept.
    assert connections == 2
