"""The REST interface of a manager on a real file: envelope, codes, tokens, bounds, OpenAPI."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from holdfast.security.access.scopes import Scope
from holdfast_federation.manager.api import BODY_BYTES_MAX, Api
from holdfast_federation.manager.manager import Manager
from holdfast_federation.manager.messages import (
    Envelope,
    HealthView,
    JoinAnswer,
    NodeView,
    TopologyView,
    Watched,
)
from holdfast_federation.manager.server import Rounds
from holdfast_federation.manager.settings import ManagerSettings
from holdfast_federation.manager.state.store import StateStore
from tests.support.topology_brokers import FakeBrokers

OPERATOR = "operator-token-of-the-test"


class Site:
    def __init__(self, file: Path, token: str) -> None:
        settings = ManagerSettings(
            token=token, core_ann_interval="2s", beacon_interval="1m30s", brokers=("a", "b")
        )
        self.brokers = FakeBrokers()
        self.manager = Manager(settings, StateStore(file), self.brokers)
        self.api = Api(self.manager)
        self.token = token
        transport = httpx.ASGITransport(self.api.application())
        self.client = httpx.AsyncClient(transport=transport, base_url="http://manager")

    async def ask(
        self, method: str, path: str, body: Any = None, token: str | None = None, **more: Any
    ) -> httpx.Response:
        given = self.token if token is None else token
        headers = {"authorization": f"Bearer {given}"} if given else {}
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
        return await self.client.request(method, path, content=content, headers=headers, **more)

    async def data(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        answer = await self.ask(method, path, body, **more)
        envelope = answer.json()
        assert answer.status_code == 200, envelope
        assert (envelope["status"], envelope["code"]) == ("success", 200)
        return envelope["data"]

    async def refusal(
        self, code: int, method: str, path: str, body: Any = None, **more: Any
    ) -> str:
        answer = await self.ask(method, path, body, **more)
        envelope = answer.json()
        assert answer.status_code == code, envelope
        assert (envelope["status"], envelope["code"], envelope["data"]) == ("error", code, None)
        assert envelope["description"]
        return str(envelope["description"])

    async def grow(self, members: int) -> list[Any]:
        return [
            await self.data(
                "POST", "/api/v1/join",
                {"ip": f"tcp://10.0.0.{number}:1883", "uuid": f"uuid-000{number}"},
            )
            for number in range(members)
        ]  # fmt: skip


def with_site(token: str = "") -> Callable[..., Callable[[Path], None]]:
    def decorate(test: Callable[[Site], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
        def run(tmp_path: Path) -> None:
            async def body() -> None:
                site = Site(tmp_path / "topology.db", token)
                try:
                    await test(site)
                finally:
                    await site.client.aclose()
                    await site.manager.stop()

            asyncio.run(body())

        return run

    return decorate


@with_site()
async def test_the_published_join_to_the_letter(site: Site) -> None:
    body = {"ip": "tcp://10.0.0.1:1883"}
    first = await site.ask("POST", "/api/v1/join", body)
    assert first.json()["data"] == {
        "id": 0, "ip": "", "neighbors": [], "redundancy": 2,
        "coreAnnInterval": 2_000_000_000, "beaconInterval": 90_000_000_000,
    }  # fmt: skip
    second = await site.ask("POST", "/api/v1/join", {"ip": "tcp://10.0.0.2:1883"})
    assert set(second.json()) == {"status", "code", "data", "description"}
    assert second.json()["status"] == "success"
    assert second.json()["data"]["neighbors"] == [{"id": 0, "ip": "tcp://10.0.0.1:1883"}]


@with_site()
async def test_a_member_with_a_uuid_learns_the_revision_and_where_to_dial(site: Site) -> None:
    await site.data(
        "POST", "/api/v1/join",
        {"ip": "tcp://a:1883", "uuid": "uuid-aaaa", "advertise": "a:7883", "labels": {"name": "A"}},
    )  # fmt: skip
    answer = await site.data("POST", "/api/v1/join", {"ip": "tcp://b", "uuid": "uuid-bbbb"})
    assert answer["neighbors"] == [{"id": 0, "ip": "tcp://a:1883", "advertise": "a:7883"}]
    assert answer["revision"] == site.manager.state.revision
    node = await site.data("GET", "/api/v1/nodes/0")
    assert (node["labels"], node["state"], node["latency_ms"]) == ({"name": "A"}, "new", 1.0)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "body"),
        (b"[]", "Expected `object`"),
        (b'{"ip": 5}', "Expected `str`"),
        (b'{"ip": ""}', "length >= 1"),
        (b'{"ip": "ftp://h"}', "unknown scheme"),
        (b'{"ip": "tcp://h:99999"}', "port"),
        (b'{"ip": "tcp://user:pw@h"}', "no user name or password"),
        (b'{"ip": "tcp://h", "uuid": "a b"}', "uuid"),
        (b'{"ip": "tcp://h", "capacity": 1}', "room for 2"),
        (b'{"ip": "tcp://h", "epoch": -1}', "epoch"),
        (b'{"ip": "tcp://h", "rtts": {"0": -1}}', "rtts"),
        (b"[" * 100_000, "body"),
        (b'{"ip": "\xff"}', "body"),
    ],
)
def test_a_join_that_is_wrong(tmp_path: Path, body: bytes, text: str) -> None:
    async def ask(site: Site) -> None:
        assert text in await site.refusal(400, "POST", "/api/v1/join", body)
        assert not site.manager.state.members

    with_site()(ask)(tmp_path)


@with_site()
async def test_a_body_without_end_is_refused(site: Site) -> None:
    await site.refusal(413, "POST", "/api/v1/join", b" " * (BODY_BYTES_MAX + 1))


@with_site()
async def test_what_is_not_there(site: Site) -> None:
    await site.grow(3)
    assert "no member 7" in await site.refusal(404, "GET", "/api/v1/nodes/7")
    await site.refusal(404, "DELETE", "/api/v1/nodes/7")
    await site.refusal(404, "POST", "/api/v1/nodes/7/report", {})
    await site.refusal(404, "GET", "/api/v1/watch?since=0&node=7")
    await site.refusal(404, "GET", "/api/v2/join")
    await site.refusal(405, "GET", "/api/v1/join")
    assert "id='x': a whole number" in await site.refusal(400, "GET", "/api/v1/nodes/x")
    await site.refusal(400, "GET", "/api/v1/nodes/" + "9" * 30)
    await site.refusal(400, "GET", "/api/v1/watch?since=-1")
    await site.refusal(400, "GET", "/api/v1/watch?since=0&timeout=nan")
    await site.refusal(400, "GET", "/api/v1/topology?format=xml")
    await site.refusal(400, "GET", "/api/v1/audit?lines=100000")


@with_site()
async def test_rules_for_links(site: Site) -> None:
    await site.grow(5)
    view = await site.data(
        "PUT", "/api/v1/links",
        {"links": [{"a": 4, "b": 3, "rule": "pin"}, {"a": 0, "b": 1, "rule": "forbid"}]},
    )  # fmt: skip
    assert view["forbidden"] == [[0, 1]]
    assert next(link for link in view["links"] if link["pinned"])["a"] == 3
    assert (0, 1) not in {(link["a"], link["b"]) for link in view["links"]}
    assert view["articulation_points"] == []
    everything = {"links": [{"a": 0, "b": each, "rule": "forbid"} for each in range(1, 5)]}
    await site.refusal(409, "PUT", "/api/v1/links", everything)
    await site.refusal(409, "PUT", "/api/v1/links", {"links": [{"a": 0, "b": 77, "rule": "pin"}]})
    await site.refusal(400, "PUT", "/api/v1/links", {"links": [{"a": 0, "b": 2, "rule": "love"}]})
    await site.refusal(400, "PUT", "/api/v1/links", {"links": []})
    freed = await site.data("PUT", "/api/v1/links", {"links": [{"a": 0, "b": 1, "rule": "none"}]})
    assert freed["forbidden"] == []
    assert (await site.data("POST", "/api/v1/rebalance"))["articulation_points"] == []


@with_site()
async def test_a_long_poll_ends_with_the_next_change(site: Site) -> None:
    await site.grow(3)
    revision = site.manager.state.revision
    idle = await site.data("GET", f"/api/v1/watch?since={revision}&timeout=0")
    assert (idle["changed"], idle["revision"], idle["neighbors"]) == (False, revision, None)
    watching = asyncio.ensure_future(
        site.data("GET", f"/api/v1/watch?since={revision}&node=0&timeout=60")
    )
    await asyncio.sleep(0)
    await site.data("DELETE", "/api/v1/nodes/1")
    seen = await watching
    assert seen["changed"]
    assert [each["id"] for each in seen["neighbors"]] == [2]


@with_site()
async def test_what_a_member_reports_is_seen(site: Site) -> None:
    await site.grow(3)
    desired = await site.data(
        "POST", "/api/v1/nodes/0/report",
        {"links": [{"peer": 1, "up": True, "rtt_ms": 7.5}, {"peer": 2, "up": False}],
         "digest": "abc", "interest": 12},
    )  # fmt: skip
    assert [each["id"] for each in desired["neighbors"]] == [1, 2]
    view = msgspec.convert(await site.data("GET", "/api/v1/topology"), TopologyView)
    by_ends = {(link.a, link.b): link for link in view.links}
    assert (by_ends[0, 1].up, by_ends[0, 1].rtt_ms) == (True, 7.5)
    assert by_ends[0, 2].up is False
    assert by_ends[1, 2].up is None
    assert (view.nodes[0].digest, view.nodes[0].interest) == ("abc", 12)
    dot = (await site.ask("GET", "/api/v1/topology?format=dot")).text
    assert "0 -- 2 [" in dot
    assert "dotted" in dot
    assert 'label="7.5 ms"' in dot


@with_site()
async def test_a_name_cannot_break_out_of_the_graph(site: Site) -> None:
    await site.data(
        "POST", "/api/v1/join", {"ip": "tcp://a", "labels": {"name": '"]; x [label="\\'}}
    )
    dot = (await site.ask("GET", "/api/v1/topology?format=dot")).text
    assert r'label="0\n\"]; x [label=\"\\"' in dot


@with_site()
async def test_metrics_and_health(site: Site) -> None:
    await site.grow(4)
    text = (await site.ask("GET", "/metrics")).text
    assert 'holdfast_topology_members{state="new"} 4.0' in text
    assert "holdfast_topology_joins_total 4.0" in text
    assert "holdfast_topology_articulation_points 0.0" in text
    health = msgspec.convert(await site.data("GET", "/api/v1/health"), HealthView)
    assert health.healthy
    await site.data("DELETE", "/api/v1/nodes/0")
    await site.data("DELETE", "/api/v1/nodes/1")
    health = msgspec.convert(await site.data("GET", "/api/v1/health"), HealthView)
    assert not health.healthy
    assert "a third makes it safe" in health.problems[0]


@with_site()
async def test_web_pages_are_turned_away(site: Site) -> None:
    answer = await site.client.post(
        "/api/v1/join", content=b'{"ip":"tcp://a"}', headers={"origin": "http://evil.example"}
    )
    assert answer.status_code == 403
    assert not site.manager.state.members
    for endpoint in site.api.endpoints:
        path = endpoint.path.replace("{id}", "0")
        for headers in (
            {"origin": "http://evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            answer = await site.client.request(endpoint.method, path, headers=headers)
            assert answer.status_code == 403, endpoint


@with_site()
async def test_garbage_is_refused_by_every_route(site: Site) -> None:
    numbers = ["9" * 5000, "-1", "1e9", "%00", "%ff", "%D9%A1", "nan", "inf"]
    names = ["since", "timeout", "limit", "lines", "from", "to", "before", "force"]
    for endpoint in site.api.endpoints:
        names += [each.name for each in endpoint.parameters]
    for endpoint in site.api.endpoints:
        for number in numbers:
            path = endpoint.path.replace("{id}", number)
            query = "&".join(f"{name}={number}" for name in sorted(set(names)))
            for body in (b"", b"[" * 100_000, b'{"ip":' + b"9" * 5000 + b"}", b"\xff"):
                answer = await site.client.request(endpoint.method, f"{path}?{query}", content=body)
                assert answer.status_code < 500, (endpoint, number[:10], body[:10])


@with_site(OPERATOR)
async def test_without_a_token_nothing_is_told(site: Site) -> None:
    for endpoint in site.api.endpoints:
        path = endpoint.path.replace("{id}", "0")
        answer = await site.ask(endpoint.method, path, {}, token="")
        assert (answer.status_code == 401) == (endpoint.scope is not Scope.OPEN), endpoint
        if endpoint.scope is not Scope.OPEN:
            assert answer.headers["www-authenticate"] == "Bearer"
            await site.refusal(401, endpoint.method, path, {}, token="wrong")


@with_site(OPERATOR)
async def test_a_join_token_is_good_for_one_join(site: Site) -> None:
    made = await site.data("POST", "/api/v1/join-tokens", {"valid_s": 60})
    token = made["token"]
    assert made["expires_at_s"] > time.time()
    body = {"ip": "tcp://a", "uuid": "uuid-aaaa"}
    await site.refusal(403, "POST", "/api/v1/rebalance", token=token)
    assert await site.data("GET", "/api/v1/nodes", token=token) == []
    both = await asyncio.gather(
        *(
            site.ask("POST", "/api/v1/join", {"ip": ip}, token=token)
            for ip in ("tcp://a", "tcp://b")
        )
    )
    assert sorted(answer.status_code for answer in both) == [200, 409]
    assert len(site.manager.state.members) == 1
    assert "has been used" in await site.refusal(401, "POST", "/api/v1/join", body, token=token)


@with_site(OPERATOR)
async def test_a_join_token_expires(site: Site) -> None:
    made = await site.data("POST", "/api/v1/join-tokens", {"valid_s": 1})
    late = made["expires_at_s"] + 1
    from holdfast_federation.manager.access import Unauthorized, caller_of

    with pytest.raises(Unauthorized, match="expired"):
        caller_of(f"Bearer {made['token']}", "", site.manager.settings, site.manager.state, late)
    await site.refusal(400, "POST", "/api/v1/join-tokens", {"valid_s": 0})


@with_site(OPERATOR)
async def test_a_member_speaks_for_itself_only(site: Site) -> None:
    first, second, _ = await site.grow(3)
    mine = first["token"]
    await site.data("GET", "/api/v1/topology", token=mine)
    await site.data("POST", "/api/v1/nodes/0/report", {}, token=mine)
    assert "member 1" in await site.refusal(403, "POST", "/api/v1/nodes/1/report", {}, token=mine)
    await site.refusal(403, "DELETE", "/api/v1/nodes/1", token=mine)
    await site.refusal(403, "PUT", "/api/v1/links",
                       {"links": [{"a": 0, "b": 1, "rule": "pin"}]}, token=mine)  # fmt: skip
    await site.refusal(403, "GET", "/api/v1/audit", token=mine)
    again = {"ip": "tcp://10.0.0.0:1883", "uuid": "uuid-0000", "epoch": 3}
    rejoined = await site.data("POST", "/api/v1/join", again, token=mine)
    assert rejoined["id"] == 0
    assert "token" not in rejoined
    await site.refusal(403, "POST", "/api/v1/join", again | {"uuid": "uuid-0001"}, token=mine)
    for address in ("tcp://10.0.0.1:1883", "MQTT://10.0.0.1"):
        stolen = again | {"ip": address}
        await site.refusal(403, "POST", "/api/v1/join", stolen, token=mine)
    await site.data("DELETE", "/api/v1/nodes/1", token=second["token"])
    await site.refusal(401, "GET", "/api/v1/nodes", token=second["token"])


@with_site(OPERATOR)
async def test_a_member_taken_for_dead_comes_back_with_its_token(site: Site) -> None:
    joined = await site.grow(4)
    mine = joined[1]["token"]
    rounds = Rounds(site.manager)
    site.brokers.round_trips["tcp://10.0.0.1:1883"] = None
    await rounds.probe_all()
    await rounds.probe_all()
    assert 1 not in site.manager.state.members
    await site.refusal(404, "POST", "/api/v1/nodes/1/report", {}, token=mine)
    await site.refusal(404, "GET", "/api/v1/watch?since=0&node=1", token=mine)
    body = {"ip": "tcp://10.0.0.1:1883", "uuid": "uuid-0001"}
    again = await site.data("POST", "/api/v1/join", body, token=mine)
    assert again["id"] == 4
    await site.refusal(401, "POST", "/api/v1/join", body, token=mine)
    await site.data("POST", "/api/v1/nodes/4/report", {}, token=again["token"])


@with_site(OPERATOR)
async def test_no_token_is_stored_or_audited(site: Site) -> None:
    made = await site.data("POST", "/api/v1/join-tokens", {})
    joined = await site.data("POST", "/api/v1/join", {"ip": "tcp://a"}, token=made["token"])
    assert joined["token"]
    lines = await site.data("GET", "/api/v1/audit")
    assert [line["action"] for line in lines] == ["join", "join-token"]
    assert lines[0]["actor"].startswith("join token ")
    kept = repr(site.manager.state) + json.dumps(lines)
    assert made["token"] not in kept
    assert joined["token"] not in kept


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return found.union(*(references(each) for each in value.values()))
    if isinstance(value, list):
        return set().union(*(references(each) for each in value))
    return set()


@with_site()
async def test_the_openapi_document_is_whole_and_true(site: Site) -> None:
    document = (await site.ask("GET", "/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    for reference in references(document):
        assert reference.rpartition("/")[2] in schemas
        assert reference.startswith("#/components/schemas/")
    operations = {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(ids) == len(set(ids))
    declared = {(each.method, each.path) for each in site.api.endpoints}
    assert set(operations) == {*declared, ("GET", "/openapi.json")}
    for (_, path), operation in operations.items():
        named = {each["name"] for each in operation["parameters"] if each["in"] == "path"}
        assert all(("{" + name + "}") in path for name in named)
        assert path.count("{") == len(named)
    join = schemas["JoinAnswer"]["properties"]
    assert join["coreAnnInterval"]["type"] == "integer"
    assert schemas["JoinRequest"]["required"] == ["ip"]


@with_site()
async def test_answers_have_the_types_that_are_documented(site: Site) -> None:
    await site.grow(3)
    for path, kind in (
        ("/api/v1/nodes", list[NodeView]),
        ("/api/v1/nodes/1", NodeView),
        ("/api/v1/topology", TopologyView),
        ("/api/v1/health", HealthView),
        ("/api/v1/watch?since=0", Watched),
    ):
        answer = await site.ask("GET", path)
        decoded = msgspec.json.decode(answer.content, type=Envelope[kind], strict=True)  # type: ignore[valid-type]
        assert decoded.data is not None
    answer = await site.ask("POST", "/api/v1/join", {"ip": "tcp://z"})
    assert msgspec.json.decode(answer.content, type=Envelope[JoinAnswer]).data is not None


# Where the manager connects, and logs in


@pytest.mark.parametrize(
    ("named", "username", "ip", "code"),
    [
        # Nobody vouches for it, and it is another machine's, or some inside address.
        ((), "", "tcp://10.0.0.9:1883", 403),
        ((), "", "tcp://127.0.0.1.example.org", 403),
        ((), "", "tcp://localhost:1883", 403),
        # The caller's own; but there it would learn the password.
        ((), "", "tcp://127.0.0.1:1883", 200),
        ((), "fed", "tcp://127.0.0.1:1883", 403),
        (("10.0.0.0/24",), "fed", "tcp://10.0.0.9:1883", 200),
        (("10.0.0.9:1883",), "fed", "tcp://10.0.0.9:1884", 403),
        (("*.example.org",), "fed", "ssl://a.example.org:8883", 200),
        (("*.example.org",), "fed", "ssl://example.org.evil.net:8883", 403),
        # A name in a network today may be elsewhere tomorrow.
        (("10.0.0.0/24",), "fed", "tcp://ten.example.org:1883", 403),
        (("[fd00::]/8",), "fed", "tcp://[fd00::1]:1883", 200),
    ],
)
def test_a_join_token_does_not_say_where_the_manager_logs_in(
    tmp_path: Path, named: tuple[str, ...], username: str, ip: str, code: int
) -> None:
    async def test() -> None:
        site = Site(tmp_path / "state.db", OPERATOR)
        settings = ManagerSettings(token=OPERATOR, brokers=named, broker_username=username)
        site.manager.settings = settings
        made = await site.data("POST", "/api/v1/join-tokens", {})
        answer = await site.ask("POST", "/api/v1/join", {"ip": ip}, token=made["token"])
        assert answer.status_code == code, answer.json()
        assert site.brokers.logged_in == ({ip} if code == 200 and username else set())
        dialled = site.brokers.dialled
        assert dialled == ([ip] if code == 200 else [])
        # The operator vouches for what he joins himself.
        body = {"ip": "tcp://10.9.9.9:1883"}
        assert (await site.data("POST", "/api/v1/join", body))["id"] >= 0
        await site.client.aclose()
        await site.manager.stop()

    asyncio.run(test())


@with_site(OPERATOR)
async def test_who_joined_unvouched_gets_no_password_later(site: Site) -> None:
    made = await site.data("POST", "/api/v1/join-tokens", {})
    body = {"ip": "tcp://127.0.0.1:1883", "uuid": "uuid-0009"}
    joined = await site.data("POST", "/api/v1/join", body, token=made["token"])
    await site.data("POST", "/api/v1/join", {"ip": "tcp://10.0.0.1:1883"})
    site.brokers.logged_in.clear()
    await Rounds(site.manager).probe_all()
    assert site.brokers.logged_in == {"tcp://10.0.0.1:1883"}
    # Nor by coming back, nor at another address.
    await site.data("POST", "/api/v1/join", body, token=joined["token"])
    elsewhere = body | {"ip": "tcp://10.0.0.77:1883"}
    await site.refusal(403, "POST", "/api/v1/join", elsewhere, token=joined["token"])
    await Rounds(site.manager).probe_all()
    assert site.brokers.logged_in == {"tcp://10.0.0.1:1883"}


@with_site()
async def test_without_a_token_only_this_machine_is_the_operator(site: Site) -> None:
    """With `allow_anonymous` others may join, at their own address."""
    transport = httpx.ASGITransport(site.api.application(), client=("192.0.2.7", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://manager") as stranger:
        for ip, code in (("tcp://10.0.0.1:1883", 403), ("tcp://192.0.2.7:1883", 200)):
            answer = await stranger.post("/api/v1/join", content=json.dumps({"ip": ip}))
            assert answer.status_code == code
    assert site.brokers.dialled == ["tcp://192.0.2.7:1883"]
    await site.data("POST", "/api/v1/join", {"ip": "tcp://10.0.0.1:1883"})
