"""Endpoints: their parameters and bodies, their refusals, and the OpenAPI document of them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest

from holdfast.api.dispatch import READS_MAX, application
from holdfast.api.endpoints import (
    ApiRefusal,
    Call,
    Endpoint,
    Flag,
    LogMoved,
    Number,
    Text,
    Whole,
)
from holdfast.security.access.scopes import Scope
from tests.support.open_gate import OpenGate

LIMIT = Whole("limit", "the most", least=1, most=10, default=5)
START = Whole("start", "the first", required=True)
WAIT_S = Number("wait_s", "seconds", most=60.0)
KIND = Text("kind", "the kind", choices=("a", "b"))
NAME = Text("name", "the name", in_path=True, most=8)
DEEP = Flag("deep", "whether all", default=False)


class Change(msgspec.Struct, forbid_unknown_fields=True):
    count: int


@dataclass(frozen=True)
class Given:
    name: str
    start: int
    limit: int
    wait_s: float | None
    kind: str | None
    deep: bool


async def show(call: Call) -> Given:
    return Given(call[NAME], call[START], call[LIMIT], call.get(WAIT_S), call.get(KIND), call[DEEP])


async def change(call: Call) -> object:
    count = call.body(Change).count
    if count > 5:
        raise ApiRefusal(409, "more than five")
    call.before, call.after = 1, count
    return None


class NotingGate(OpenGate):
    """Notes what it would record."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, object, object, int, str]] = []

    async def record(self, call: Call, status: int, error: str) -> None:
        self.noted.append((call.endpoint.path, call.before, call.after, status, error))


GATE = NotingGate()
APPLICATION = application(
    [
        Endpoint("GET", "/x/{name}", Scope.VIEWER, "show", show, Given,
                 (NAME, START, LIMIT, WAIT_S, KIND, DEEP)),
        Endpoint("POST", "/y", Scope.OPERATOR, "change", change, body=Change, body_bytes_max=100,
                 refusals=(409,)),
    ],
    GATE,
    "test",
)  # fmt: skip


class MovingLog:
    """A log that moves during the first `moves` requests."""

    def __init__(self, moves: int) -> None:
        self.moves = moves
        self.reads = 0

    async def read(self, call: Call) -> object:
        self.reads += 1
        if self.reads <= self.moves:
            raise LogMoved("it has moved")
        return {}


@pytest.mark.parametrize(("moves", "status"), [(READS_MAX, 200), (READS_MAX + 1, 503)])
def test_a_read_begins_again_when_the_log_moves(moves: int, status: int) -> None:
    log = MovingLog(moves)
    read = Endpoint("GET", "/log", Scope.VIEWER, "read", log.read, dict, refusals=(503,))

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(application([read], OpenGate(), "test"))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/log")

    answer = asyncio.run(run())
    assert (answer.status_code, log.reads) == (status, READS_MAX + 1)
    assert status == 200 or answer.headers["Retry-After"] == "1"


def test_a_change_is_carried_out_once() -> None:
    log = MovingLog(1)
    change = Endpoint("POST", "/log", Scope.OPERATOR, "change", log.read, refusals=(503,))

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(application([change], NotingGate(), "test"))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/log")

    assert asyncio.run(run()).status_code == 503
    assert log.reads == 1


def asked(ask: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]) -> tuple[int, Any]:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(APPLICATION)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await ask(client)

    response = asyncio.run(run())
    return response.status_code, json.loads(response.content)


def get(path: str) -> tuple[int, Any]:
    return asked(lambda client: client.get(path))


def post(path: str, body: bytes) -> tuple[int, Any]:
    return asked(lambda client: client.post(path, content=body))


def test_parameters_have_their_types_and_defaults() -> None:
    assert get("/x/a?start=7") == (
        200,
        {"name": "a", "start": 7, "limit": 5, "wait_s": None, "kind": None, "deep": False},
    )
    code, found = get("/x/b?start=0&limit=10&wait_s=1.5&kind=b&deep=true")
    assert code == 200
    assert found["wait_s"] == 1.5
    assert found["deep"] is True


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("", "parameter start is missing"),
        ("start=x", "start='x': a whole number from 0 to 4611686018427387904"),
        ("start=1&limit=11", "limit='11': a whole number from 1 to 10"),
        ("start=1&start=2", "parameter start is given 2 times"),
        ("start=1&wait_s=nan", "wait_s='nan': a number from 0 to 60"),
        ("start=1&wait_s=-1", "wait_s='-1': a number from 0 to 60"),
        ("start=1&kind=c", "kind='c': one of a, b"),
        ("start=1&deep=yes", "deep='yes': true or false"),
        ("start=1&lmit=2", "unknown parameter 'lmit': there are start, limit, wait_s, kind, deep"),
    ],
)
def test_a_wrong_parameter_gets_one_line(query: str, text: str) -> None:
    assert get(f"/x/a?{query}") == (400, {"error": text})


def test_a_part_of_the_path_is_checked() -> None:
    code, found = get("/x/aaaaaaaaa?start=1")
    assert code == 400
    assert found["error"] == "name='aaaaaaaaa': a text of 1 to 8 characters"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"count": "x"}', 400),
        (b'{"count": 1, "more": 2}', 400),
        (b"[" * 99, 400),
        (b" " * 101, 413),
    ],
)
def test_a_wrong_body_gets_one_line(body: bytes, code: int) -> None:
    status, found = post("/y", body)
    assert status == code
    assert "\n" not in found["error"]


def test_a_change_is_recorded_with_its_result() -> None:
    GATE.noted.clear()
    assert post("/y", b'{"count": 3}') == (200, {})
    assert post("/y", b'{"count": 6}') == (409, {"error": "more than five"})
    assert post("/y", b"{")[0] == 400
    assert GATE.noted == [
        ("/y", 1, 3, 200, ""),
        ("/y", None, None, 409, "more than five"),
    ]


def test_no_route_is_a_refusal_like_the_others() -> None:
    assert get("/z")[0] == 404
    assert "openapi.json" in get("/z")[1]["error"]
    assert get("/y")[0] == 405


def test_the_document_has_what_is_declared() -> None:
    code, found = get("/api/v1/openapi.json")
    assert code == 200
    assert found["openapi"] == "3.1.0"
    operation = found["paths"]["/x/{name}"]["get"]
    assert operation["x-scope"] == "viewer"
    by_name = {each["name"]: each for each in operation["parameters"]}
    assert by_name["name"]["in"] == "path"
    assert by_name["start"]["required"]
    assert by_name["limit"]["schema"] == {
        "type": "integer", "minimum": 1, "maximum": 10, "default": 5,
    }  # fmt: skip
    reply = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert reply == {"$ref": "#/components/schemas/Given"}
    changed = found["paths"]["/y"]["post"]
    assert changed["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/Change"
    }
    assert {"400", "401", "403", "409", "413"} <= changed["responses"].keys()


def test_a_wrong_method_learns_all_methods_of_the_path() -> None:
    async def nothing(call: Call) -> None:
        return None

    several = application(
        [
            Endpoint("GET", "/z/{name}", Scope.VIEWER, "read", nothing, parameters=(NAME,)),
            Endpoint("DELETE", "/z/{name}", Scope.ADMIN, "remove", nothing, parameters=(NAME,)),
        ],
        OpenGate(),
        "test",
    )

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(several)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request("POST", "/z/a")

    response = asyncio.run(run())
    assert response.status_code == 405
    assert response.headers["allow"] == "DELETE, GET, HEAD"
