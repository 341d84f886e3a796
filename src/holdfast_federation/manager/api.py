"""The REST interface. Every response of /api/v1 is the published envelope, that of a refusal
included.

The body is read whatever its content type is, because the published federator sends none. Requests
of web pages are refused, because a browser on the operator's machine reaches the loopback address.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from holdfast import __version__
from holdfast.numbers import whole_number
from holdfast.security.http.connections import note_proof
from holdfast.security.http.requests import page_refusal
from holdfast_federation.manager.access import (
    Forbidden,
    ManagerCaller,
    Role,
    Unauthorized,
    caller_of,
    require_broker,
    require_join,
    require_member,
    require_operator,
)
from holdfast_federation.manager.brokers import broker_url
from holdfast_federation.manager.graph.graph import Link, diameter, structure_of
from holdfast_federation.manager.graph.health import HealthVerdict, MemberState
from holdfast_federation.manager.manager import Manager, NoSuchMember
from holdfast_federation.manager.messages import (
    AuditView,
    Desired,
    Envelope,
    HealthView,
    JoinAnswer,
    JoinRequest,
    LinkRules,
    LinkView,
    NodeView,
    Report,
    TokenRequest,
    TokenView,
    TopologyView,
    Watched,
)
from holdfast_federation.manager.state.changes import TooMany
from holdfast_federation.manager.state.federation_state import ChangeRefused, Member, rules_of
from holdfast_federation.manager.state.store import StateStoreError

_TEMPLATE: Final = "#/components/schemas/{name}"
REFUSALS: Final = {
    400: "the request is wrong; `description` says how",
    401: "no token or certificate, or one that is not known",
    403: "a token or certificate that does not allow it, or a web page",
    404: "there is no such member",
    409: "it contradicts the state; `description` says what to do",
    413: "the body is too large",
    429: "a bound of the manager's is reached",
    503: "the state cannot be stored, or not be read; ask again later",
}


@dataclass(frozen=True)
class ManagerParameter:
    name: str
    kind: str
    """A type of a JSON schema."""
    text: str
    location: str = "query"


@dataclass(frozen=True)
class Described:
    method: str
    path: str
    summary: str
    answer: Any
    """Type of the envelope's data; None: none."""
    body: type | None = None
    parameters: tuple[ManagerParameter, ...] = ()
    refusals: tuple[int, ...] = ()
    media_type: str = ""
    """The type of an answer that may be text instead."""
    needs_token: bool = True


_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "certificate": {
        "type": "mutualTLS",
        "description": "a certificate of the authority that the manager's client_ca names",
    },
}


def schemes_of(access: str, has_token: bool) -> list[list[str]]:
    """Returns the security schemes. A caller needs all parts of any one of them."""
    match access:
        case "certificate":
            return [["certificate"]]
        case "either":
            return [["bearer"], ["certificate"]]
        case "both":
            return [["bearer", "certificate"]]
    return [["bearer"]] if has_token else []


def document(endpoints: list[Described], schemes: list[list[str]]) -> dict[str, Any]:
    """Returns the document. `schemes`: see `schemes_of`."""
    security: list[dict[str, list[str]]] = [{name: [] for name in names} for names in schemes]
    answers = [Envelope[each.answer] for each in endpoints]  # type: ignore[name-defined]
    bodies = [each.body for each in endpoints if each.body is not None]
    failure = Envelope[None]
    types = [*answers, *bodies, failure]
    schemas, components = msgspec.json.schema_components(types, ref_template=_TEMPLATE)
    schema_of = dict(zip([str(each) for each in types], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each, answer in zip(endpoints, answers, strict=True):
        operation = _operation(each, schema_of[str(answer)], schema_of[str(failure)], security)
        if each.body is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema_of[str(each.body)]}},
            }
        paths.setdefault(each.path, {})[each.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Holdfast topology manager", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {name: _SCHEMES[name] for names in schemes for name in names},
        },
    }


def _operation(
    each: Described, answer: Any, failure: Any, security: list[dict[str, list[str]]]
) -> dict[str, Any]:
    content = {} if each.answer is None else {"application/json": {"schema": answer}}
    if each.media_type:
        content[each.media_type] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "done", "content": content}}
    for code in (*each.refusals, *((401, 403) if each.needs_token else ())):
        responses[str(code)] = {
            "description": REFUSALS[code],
            "content": {"application/json": {"schema": failure}},
        }
    return {
        "summary": each.summary,
        "operationId": f"{each.method} {each.path}".lower(),
        "parameters": [
            {
                "name": parameter.name,
                "in": parameter.location,
                "required": parameter.location == "path",
                "description": parameter.text,
                "schema": {"type": parameter.kind},
            }
            for parameter in each.parameters
        ],
        "security": security if each.needs_token else [],
        "responses": dict(sorted(responses.items())),
    }


def node_view(manager: Manager, member: Member, verdict: HealthVerdict) -> NodeView:
    ago_s, report = manager.reports.newest(member.id) or (None, None)
    return NodeView(
        id=member.id,
        ip=member.ip,
        uuid=member.uuid,
        certificate=member.certificate,
        epoch=member.epoch,
        advertise=member.advertise,
        labels=member.labels,
        capacity=member.capacity,
        state=verdict.states[member.id].value,
        latency_ms=manager.round_trips.of_members.get(member.id),
        neighbors=manager.state.neighbours(member.id),
        joined_at_s=member.joined_at_s,
        reported_ago_s=ago_s,
        digest=report.digest if report else "",
        interest=report.interest if report else 0,
    )


def node_views(manager: Manager) -> list[NodeView]:
    verdict = manager.verdict()
    return [node_view(manager, each, verdict) for each in manager.state.members.values()]


def topology_view(manager: Manager) -> TopologyView:
    state = manager.state
    graph = state.graph()
    found = structure_of(graph)
    return TopologyView(
        revision=state.revision,
        nodes=node_views(manager),
        links=[_link_view(manager, link) for link in sorted(state.links)],
        forbidden=sorted(state.forbidden),
        articulation_points=sorted(found.articulation_points),
        components=len(found.components),
        diameter=diameter(graph),
    )


def _link_view(manager: Manager, link: Link) -> LinkView:
    return LinkView(
        a=link[0],
        b=link[1],
        pinned=link in manager.state.pinned,
        rtt_ms=manager.round_trips.of_links.get(link),
        up=manager.reports.link_up(link),
    )


def health_view(manager: Manager) -> HealthView:
    verdict = manager.verdict()
    states = Counter(state.value for state in verdict.states.values())
    is_everybody_well = all(
        state in (MemberState.HEALTHY, MemberState.NEW) for state in verdict.states.values()
    )
    problems = list(manager.problems)
    if manager.changes.unknown_because:
        problems.append(f"the database is away: {manager.changes.unknown_because}")
    return HealthView(
        healthy=is_everybody_well and not problems,
        frozen=verdict.is_frozen,
        members=len(manager.state.members),
        states=dict(states),
        problems=problems,
        revision=manager.state.revision,
    )


def dot(manager: Manager) -> str:
    """Returns the graph for Graphviz: filled by health, bold if pinned, dotted if down."""
    verdict = manager.verdict()
    colours = {
        MemberState.HEALTHY: "palegreen",
        MemberState.NEW: "white",
        MemberState.SUSPECT: "khaki",
    }
    lines = ["graph federation {", "  node [shape=box, style=filled];"]
    for member in manager.state.members.values():
        label = _quoted(f"{member.id}\n{member.labels.get('name', member.ip)}")
        colour = colours.get(verdict.states[member.id], "salmon")
        lines.append(f"  {member.id} [label={label}, fillcolor={colour}];")
    for link in sorted(manager.state.links):
        style = "dotted" if manager.reports.link_up(link) is False else "solid"
        if link in manager.state.pinned:
            style += ",bold"
        trip_ms = manager.round_trips.of_links.get(link)
        label = "" if trip_ms is None else f'label="{trip_ms:.1f} ms", '
        lines.append(f'  {link[0]} -- {link[1]} [{label}style="{style}"];')
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


COUNTERS = {
    "joins": "Joins, rejoins included, since the start.",
    "removals": "Members removed since the start.",
    "probes_failed": "Probes of members that failed since the start.",
    "database_losses": "How often the database was lost since the start.",
}


class TopologyCollector(Collector):
    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def collect(self) -> Iterable[Metric]:
        manager = self._manager
        state = manager.state
        verdict = manager.verdict()
        members = GaugeMetricFamily(
            "holdfast_topology_members", "Members by health.", labels=["state"]
        )
        for each in MemberState:
            members.add_metric([each.value], sum(one is each for one in verdict.states.values()))
        yield members
        found = structure_of(state.graph())
        for name, text, value in (
            ("links", "Desired links.", len(state.links)),
            ("revision", "Revision of the desired state.", state.revision),
            ("components", "Parts that no desired link joins.", len(found.components)),
            (
                "articulation_points",
                "Members that would cut others off if they failed.",
                len(found.articulation_points),
            ),
            ("frozen", "1 while too many fail at once to remove anybody.", verdict.is_frozen),
            (
                "database_away",
                "1 while the database cannot be used.",
                bool(manager.changes.unknown_because),
            ),
        ):
            yield GaugeMetricFamily(f"holdfast_topology_{name}", text, value=float(value))
        counts = {**manager.counts, "database_losses": manager.changes.losses}
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(
                f"holdfast_topology_{name}", text, value=float(counts.get(name, 0))
            )


def registry_for(manager: Manager) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TopologyCollector(manager))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """Returns the metrics in the OpenMetrics text format."""
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text


T = TypeVar("T")

BODY_BYTES_MAX: Final = 262_144
"""The most bytes of a request's body."""
NUMBER_MAX: Final = 10**18 - 1
"""The greatest number in a path or query."""
WATCH_S_MAX: Final = 60.0
"""The most seconds that a watch waits."""
WATCH_S: Final = 25.0
"""The seconds that a watch waits, unless the caller says so."""
AUDIT_LINES: Final = 100
AUDIT_LINES_MAX: Final = 1_000

_CODES: Final[dict[type[Exception], int]] = {
    ValueError: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NoSuchMember: 404,
    ChangeRefused: 409,
    TooMany: 429,
    StateStoreError: 503,
}

CERTIFICATE_NAME: Final = "certificate_name"
"""The field of a request's state with the name of the client's verified certificate."""

_ID: Final = ManagerParameter("id", "integer", "of the member", "path")

Handler = Callable[[Request, ManagerCaller], Awaitable[object]]
"""The function of an endpoint. It returns the envelope's data, or a complete response."""


class TooLarge(Exception):
    """The body has more than BODY_BYTES_MAX bytes: status 413."""


@dataclass(frozen=True)
class ManagerEndpoint:
    """An endpoint: its description and its function."""

    described: Described
    handler: Handler


class Api:
    """The endpoints of the manager, as an ASGI application."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._registry = registry_for(manager)
        self.endpoints = self._endpoints()

    def application(self) -> Starlette:
        routes = [
            Route(each.described.path, self._answering(each), methods=[each.described.method])
            for each in self.endpoints
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _not_found})

    def _endpoints(self) -> list[ManagerEndpoint]:
        def at(
            method: str, path: str, handler: Handler, summary: str, answer: Any = None, **more: Any
        ) -> ManagerEndpoint:
            return ManagerEndpoint(Described(method, path, summary, answer, **more), handler)

        v1 = "/api/v1"
        node = f"{v1}/nodes/{{id}}"
        return [
            at("POST", f"{v1}/join", self._join, "become a member, or come back", JoinAnswer,
               body=JoinRequest, refusals=(400, 404, 409, 413, 429, 503)),
            at("GET", f"{v1}/nodes", self._nodes, "all members", list[NodeView]),
            at("GET", node, self._node, "a member", NodeView, parameters=(_ID,),
               refusals=(400, 404)),
            at("DELETE", node, self._leave, "remove a member and repair", parameters=(_ID,),
               refusals=(400, 404, 503)),
            at("POST", f"{node}/report", self._report, "how a member finds its links", Desired,
               body=Report, parameters=(_ID,), refusals=(400, 404, 409, 413, 503)),
            at("GET", f"{v1}/topology", self._topology, "members and desired links",
               TopologyView, media_type="text/vnd.graphviz", refusals=(400,),
               parameters=(ManagerParameter("format", "string", "json or dot"),)),
            at("PUT", f"{v1}/links", self._rules, "pin or forbid links", TopologyView,
               body=LinkRules, refusals=(400, 409, 413, 503)),
            at("POST", f"{v1}/rebalance", self._rebalance, "exchange dear links for cheap ones",
               TopologyView, refusals=(503,)),
            at("GET", f"{v1}/watch", self._watch, "wait for the next revision", Watched,
               refusals=(400, 404, 429, 503), parameters=(
                   ManagerParameter("since", "integer", "the revision that is known"),
                   ManagerParameter("node", "integer", "the id of the member"),
                   ManagerParameter("timeout", "number", f"seconds, at most {WATCH_S_MAX:g}"),
               )),
            at("POST", f"{v1}/join-tokens", self._token, "a token that is good for one join",
               TokenView, body=TokenRequest, refusals=(400, 413, 429, 503)),
            at("GET", f"{v1}/audit", self._audit, "the newest changes first", list[AuditView],
               refusals=(400, 503), parameters=(ManagerParameter("lines", "integer", "how many"),)),
            at("GET", f"{v1}/health", self._health, "is the federation well", HealthView),
            at("GET", "/metrics", self._metrics, "for Prometheus", needs_token=False,
               media_type="application/openmetrics-text"),
            at("GET", "/healthz", self._healthz, "this process lives", needs_token=False,
               media_type="text/plain"),
            at("GET", "/openapi.json", self._openapi, "this document", needs_token=False),
        ]  # fmt: skip

    def _answering(self, endpoint: ManagerEndpoint) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            try:
                caller = self._caller(request, endpoint.described)
                result = await endpoint.handler(request, caller)
            except TooLarge:
                return _refusal(413, f"the body has more than {BODY_BYTES_MAX} bytes")
            except tuple(_CODES) as error:
                code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
                return _refusal(code, str(error))
            if isinstance(result, Response):
                return result
            return _enveloped(200, Envelope("success", 200, result, self._notes(endpoint)))

        return respond

    def _notes(self, endpoint: ManagerEndpoint) -> str:
        lost = self._manager.changes.unknown_because
        if endpoint.described.method == "GET":
            return f"as it was when the database was lost: {lost}" if lost else ""
        return "; ".join(self._manager.problems)

    def _caller(self, request: Request, described: Described) -> ManagerCaller:
        """Returns the caller of a request. Raises Unauthorized or Forbidden."""
        headers = request.headers
        text = page_refusal(headers.getlist("origin"), headers.getlist("sec-fetch-site"))
        if text:
            raise Forbidden(text)
        if not described.needs_token:
            return ManagerCaller(Role.JOINER, "anybody")
        caller = caller_of(
            request.headers.get("authorization", ""),
            getattr(request.state, CERTIFICATE_NAME, ""),
            self._manager.settings,
            self._manager.state,
            time.time(),
        )
        note_proof(request)
        return caller

    async def _join(self, request: Request, caller: ManagerCaller) -> object:
        wanted = await _body(request, JoinRequest)

        def check() -> None:
            if caller.member is not None:
                self._manager.member(caller.member)
            require_join(caller, wanted.uuid, broker_url(wanted.ip), self._manager.state)

        check()
        return await self._manager.join(
            wanted,
            caller.name,
            is_vouched=self._require_broker(request, caller, wanted),
            join_token=caller.join_token,
            certificate="" if caller.role is Role.OPERATOR else caller.certificate,
            gives_token=caller.gives_token,
            check=check,
        )

    def _require_broker(self, request: Request, caller: ManagerCaller, wanted: JoinRequest) -> bool:
        """Returns whether the operator vouches for the address. Raises Forbidden."""
        ip = broker_url(wanted.ip)
        known = self._manager.state.by_ip(ip)
        if known is not None and caller.role is Role.MEMBER and self._is(caller, known):
            return known.is_vouched
        join_token = self._manager.state.tokens.get(caller.join_token)
        if join_token is not None and join_token.vouched_ip == ip:
            return True
        settings = self._manager.settings
        remote = request.client.host if request.client is not None else ""
        return require_broker(caller, ip, remote, settings.brokers, bool(settings.broker_username))

    def _is(self, caller: ManagerCaller, member: Member) -> bool:
        try:
            require_member(caller, member)
        except Forbidden:
            return False
        return True

    async def _nodes(self, request: Request, caller: ManagerCaller) -> object:
        return node_views(self._manager)

    async def _node(self, request: Request, caller: ManagerCaller) -> object:
        member = self._manager.member(_id(request))
        return node_view(self._manager, member, self._manager.verdict())

    async def _leave(self, request: Request, caller: ManagerCaller) -> object:
        node = _id(request)
        self._require_member(caller, node)
        await self._manager.leave(node, caller.name)
        return None

    async def _report(self, request: Request, caller: ManagerCaller) -> object:
        node = _id(request)
        self._require_member(caller, node)
        return await self._manager.report(node, await _body(request, Report))

    def _require_member(self, caller: ManagerCaller, node: int) -> None:
        """Checks that the caller is the member. A member that was removed as dead receives 404 and
        not 403, so that it joins again. Raises NoSuchMember or Forbidden."""
        require_member(caller, self._manager.member(node))

    async def _topology(self, request: Request, caller: ManagerCaller) -> object:
        wanted = request.query_params.get("format", "json")
        if wanted == "dot":
            return PlainTextResponse(dot(self._manager), media_type="text/vnd.graphviz")
        if wanted != "json":
            raise ValueError(f"format {wanted!r}: choose json or dot")
        return topology_view(self._manager)

    async def _rules(self, request: Request, caller: ManagerCaller) -> object:
        require_operator(caller)
        wanted = await _body(request, LinkRules)
        await self._manager.set_rules(
            rules_of([(each.a, each.b, each.rule) for each in wanted.links]), caller.name
        )
        return topology_view(self._manager)

    async def _rebalance(self, request: Request, caller: ManagerCaller) -> object:
        require_operator(caller)
        await self._manager.rebalance(caller.name)
        return topology_view(self._manager)

    async def _watch(self, request: Request, caller: ManagerCaller) -> object:
        manager = self._manager
        since = _parameter(request, "since", -1)
        timeout_s = _seconds(request, "timeout", WATCH_S)
        node = _parameter(request, "node", -1)
        if node >= 0:
            manager.member(node)
        is_changed = await manager.changed_since(since, timeout_s)
        if node >= 0:
            manager.member(node)
        return Watched(
            revision=manager.state.revision,
            changed=is_changed,
            links=sorted(manager.state.links),
            neighbors=manager.neighbors(node) if node >= 0 else None,
        )

    async def _token(self, request: Request, caller: ManagerCaller) -> object:
        require_operator(caller)
        wanted = await _body(request, TokenRequest)
        token, expires_at_s = await self._manager.new_join_token(wanted.valid_s, caller.name)
        return TokenView(token=token, expires_at_s=expires_at_s)

    async def _audit(self, request: Request, caller: ManagerCaller) -> object:
        require_operator(caller)
        lines = _parameter(request, "lines", AUDIT_LINES)
        if lines > AUDIT_LINES_MAX:
            raise ValueError(f"lines: at most {AUDIT_LINES_MAX}")
        return await self._manager.changes.audit(lines)

    async def _health(self, request: Request, caller: ManagerCaller) -> object:
        return health_view(self._manager)

    async def _metrics(self, request: Request, caller: ManagerCaller) -> object:
        return Response(
            render(self._registry),
            media_type="application/openmetrics-text; version=1.0.0; charset=utf-8",
        )

    async def _healthz(self, request: Request, caller: ManagerCaller) -> object:
        return PlainTextResponse("ok\n")

    async def _openapi(self, request: Request, caller: ManagerCaller) -> object:
        settings = self._manager.settings
        schemes = schemes_of(settings.access, bool(settings.token))
        return JSONResponse(document([each.described for each in self.endpoints], schemes))


def _enveloped(code: int, envelope: Envelope[Any]) -> Response:
    return Response(msgspec.json.encode(envelope), code, media_type="application/json")


def _refusal(code: int, text: str) -> Response:
    response = _enveloped(code, Envelope("error", code, None, text))
    if code == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


def envelope_of_refusal(text: str) -> object:
    """Returns the envelope for a request that reaches no endpoint."""
    return msgspec.to_builtins(Envelope("error", 403, None, text))


async def _not_found(request: Request, error: Exception) -> Response:
    code = error.status_code if isinstance(error, HTTPException) else 500
    return _refusal(
        code, f"{request.method} {request.url.path}: see /openapi.json for what there is"
    )


async def _body(request: Request, kind: type[T]) -> T:
    """Returns the decoded body. Raises ValueError or TooLarge."""
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > BODY_BYTES_MAX:
                raise TooLarge
    except ClientDisconnect:
        raise ValueError("the body has ended early") from None
    try:
        return msgspec.json.decode(bytes(data), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"body: {error}") from None


def _id(request: Request) -> int:
    text = request.path_params["id"]
    id = whole_number(text, NUMBER_MAX)
    if id is None:
        raise ValueError(f"{text!r} is no id of a member: those are whole numbers")
    return id


def _parameter(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    number = whole_number(text, NUMBER_MAX)
    if number is None:
        raise ValueError(f"{name}={text!r}: give a whole number")
    return number


def _seconds(request: Request, name: str, default: float) -> float:
    try:
        value = float(request.query_params.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value <= WATCH_S_MAX:
        raise ValueError(f"{name}: give seconds, from 0 to {WATCH_S_MAX:g}")
    return value
