"""The REST interface. Every response of /api/v1 is the published envelope, that of a refusal
included.

The body is read whatever its content type is, because the published federator sends none. Unknown
parameters are ignored. Requests of web pages are refused, because a browser on the operator's
machine reaches the loopback address.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from holdfast.api.dispatch import ReplyForm, application, remote_of
from holdfast.api.endpoints import ApiRefusal, Call, Caller, Endpoint, Number, Text, Whole
from holdfast.security.access.scopes import Scope
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

_ID: Final = Whole("id", "of the member", in_path=True, most=NUMBER_MAX)
_SINCE: Final = Whole("since", "the revision that is known", most=NUMBER_MAX)
_NODE: Final = Whole("node", "the id of the member", most=NUMBER_MAX)
_TIMEOUT: Final = Number("timeout", "seconds", most=WATCH_S_MAX, default=WATCH_S)
_LINES: Final = Whole("lines", "how many", most=AUDIT_LINES_MAX, default=AUDIT_LINES)
_FORMAT: Final = Text("format", "the form", choices=("json", "dot"), default="json")


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


_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "certificate": {
        "type": "mutualTLS",
        "description": "a certificate of the authority that the manager's client_ca names",
    },
}


class EnvelopeForm(ReplyForm):
    """The published envelope around each reply and refusal."""

    openapi_path = "/openapi.json"
    openapi_scope = Scope.OPEN
    refusal = Envelope[None]

    def __init__(self, schemes: list[list[str]], note: Callable[[str], str]) -> None:
        """`schemes`: see `schemes_of`. `note`: returns the description of the success of a request
        with a method."""
        self._schemes = schemes
        self._note = note
        self.schemes = {name: _SCHEMES[name] for names in schemes for name in names}

    def reply(self, endpoint: Endpoint) -> Any:
        return Envelope[endpoint.reply]  # type: ignore[name-defined]

    def security(self, scope: Scope) -> Any:
        return [{name: [] for name in names} for names in self._schemes] if scope else []

    def respond(self, call: Call, value: object) -> Response:
        note = self._note(call.endpoint.method)
        return _enveloped(200, Envelope("success", 200, value, note))

    def refuse(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
        response = _enveloped(status, Envelope("error", status, None, text))
        response.headers.update(headers or {})
        if status == 401:
            response.headers["www-authenticate"] = "Bearer"
        return response


def _enveloped(code: int, envelope: Envelope[Any]) -> Response:
    return Response(msgspec.json.encode(envelope), code, media_type="application/json")


def envelope_of_refusal(text: str) -> object:
    """Returns the envelope for a request that reaches no endpoint."""
    return msgspec.to_builtins(Envelope("error", 403, None, text))


Handler = Callable[[Call, ManagerCaller], Awaitable[object]]
"""The function of an endpoint. It returns the envelope's data, or a complete response."""


class Api:
    """The endpoints of the manager, as an ASGI application. It is also their `AccessGate`."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._registry = registry_for(manager)
        self.endpoints = self._endpoints()

    def application(self) -> Starlette:
        settings = self._manager.settings
        form = EnvelopeForm(schemes_of(settings.access, bool(settings.token)), self._note)
        return application(self.endpoints, self, "Holdfast topology manager", form=form)

    def _endpoints(self) -> list[Endpoint]:
        def at(
            method: str, path: str, handler: Handler, summary: str, reply: Any = None,
            scope: Scope = Scope.VIEWER, **more: Any,
        ) -> Endpoint:  # fmt: skip
            return Endpoint(
                method, path, scope, summary, self._refusing(handler), reply,
                body_bytes_max=BODY_BYTES_MAX, any_parameter=True, **more,
            )  # fmt: skip

        v1, everybody, operator = "/api/v1", Scope.OPEN, Scope.OPERATOR
        node = f"{v1}/nodes/{{id}}"
        return [
            at("POST", f"{v1}/join", self._join, "become a member, or come back", JoinAnswer,
               body=JoinRequest, refusals=(404, 409, 429, 503)),
            at("GET", f"{v1}/nodes", self._nodes, "all members", list[NodeView]),
            at("GET", node, self._node, "a member", NodeView, parameters=(_ID,), refusals=(404,)),
            at("DELETE", node, self._leave, "remove a member and repair", parameters=(_ID,),
               refusals=(404, 503)),
            at("POST", f"{node}/report", self._report, "how a member finds its links", Desired,
               body=Report, parameters=(_ID,), refusals=(404, 409, 503)),
            at("GET", f"{v1}/topology", self._topology, "members and desired links", TopologyView,
               other_media_types=("text/vnd.graphviz",), parameters=(_FORMAT,)),
            at("PUT", f"{v1}/links", self._rules, "pin or forbid links", TopologyView, operator,
               body=LinkRules, refusals=(409, 503)),
            at("POST", f"{v1}/rebalance", self._rebalance, "exchange dear links for cheap ones",
               TopologyView, operator, refusals=(503,)),
            at("GET", f"{v1}/watch", self._watch, "wait for the next revision", Watched,
               refusals=(404, 429, 503), parameters=(_SINCE, _NODE, _TIMEOUT)),
            at("POST", f"{v1}/join-tokens", self._token, "a token that is good for one join",
               TokenView, operator, body=TokenRequest, refusals=(429, 503)),
            at("GET", f"{v1}/audit", self._audit, "the newest changes first", list[AuditView],
               operator, refusals=(503,), parameters=(_LINES,)),
            at("GET", f"{v1}/health", self._health, "is the federation well", HealthView),
            at("GET", "/metrics", self._metrics, "for Prometheus", scope=everybody,
               media_type="application/openmetrics-text"),
            at("GET", "/healthz", self._healthz, "this process lives", scope=everybody,
               media_type="text/plain"),
        ]  # fmt: skip

    def _refusing(self, handler: Handler) -> Callable[[Call], Awaitable[object]]:
        async def handle(call: Call) -> object:
            try:
                return await handler(call, call.request.state.manager_caller)
            except tuple(_CODES) as error:
                raise _refusal(error) from None

        return handle

    def _note(self, method: str) -> str:
        lost = self._manager.changes.unknown_because
        if method == "GET":
            return f"as it was when the database was lost: {lost}" if lost else ""
        return "; ".join(self._manager.problems)

    # AccessGate

    async def admit(self, request: Request, endpoint: Endpoint) -> Caller:
        """Returns the caller of a request. Raises `ApiRefusal`."""
        try:
            caller = self._caller(request, endpoint)
            if endpoint.scope is Scope.OPERATOR:
                require_operator(caller)
        except (Unauthorized, Forbidden) as error:
            raise _refusal(error) from None
        request.state.manager_caller = caller
        return Caller(caller.name, endpoint.scope, remote_of(request))

    def still_admits(self, request: Request, endpoint: Endpoint) -> bool:
        """No response is a stream."""
        return True

    async def record(self, call: Call, status: int, error: str) -> None:
        """The audit log is a part of each change: see `changes`."""

    def _caller(self, request: Request, endpoint: Endpoint) -> ManagerCaller:
        """Returns the caller of a request. Raises Unauthorized or Forbidden."""
        headers = request.headers
        text = page_refusal(headers.getlist("origin"), headers.getlist("sec-fetch-site"))
        if text:
            raise Forbidden(text)
        if endpoint.scope is Scope.OPEN:
            return ManagerCaller(Role.JOINER, "anybody")
        caller = caller_of(
            headers.get("authorization", ""),
            getattr(request.state, CERTIFICATE_NAME, ""),
            self._manager.settings,
            self._manager.state,
            time.time(),
        )
        note_proof(request)
        return caller

    # Handlers

    async def _join(self, call: Call, caller: ManagerCaller) -> object:
        wanted = call.body(JoinRequest)

        def check() -> None:
            if caller.member is not None:
                self._manager.member(caller.member)
            require_join(caller, wanted.uuid, broker_url(wanted.ip), self._manager.state)

        check()
        return await self._manager.join(
            wanted,
            caller.name,
            is_vouched=self._require_broker(call, caller, wanted),
            join_token=caller.join_token,
            certificate="" if caller.role is Role.OPERATOR else caller.certificate,
            gives_token=caller.gives_token,
            check=check,
        )

    def _require_broker(self, call: Call, caller: ManagerCaller, wanted: JoinRequest) -> bool:
        """Returns whether the operator vouches for the address. Raises Forbidden."""
        ip = broker_url(wanted.ip)
        known = self._manager.state.by_ip(ip)
        if known is not None and caller.role is Role.MEMBER and self._is(caller, known):
            return known.is_vouched
        join_token = self._manager.state.tokens.get(caller.join_token)
        if join_token is not None and join_token.vouched_ip == ip:
            return True
        settings = self._manager.settings
        has_password = bool(settings.broker_username)
        return require_broker(caller, ip, call.caller.remote, settings.brokers, has_password)

    def _is(self, caller: ManagerCaller, member: Member) -> bool:
        try:
            require_member(caller, member)
        except Forbidden:
            return False
        return True

    async def _nodes(self, call: Call, caller: ManagerCaller) -> object:
        return node_views(self._manager)

    async def _node(self, call: Call, caller: ManagerCaller) -> object:
        member = self._manager.member(call[_ID])
        return node_view(self._manager, member, self._manager.verdict())

    async def _leave(self, call: Call, caller: ManagerCaller) -> object:
        node = call[_ID]
        self._require_member(caller, node)
        await self._manager.leave(node, caller.name)
        return None

    async def _report(self, call: Call, caller: ManagerCaller) -> object:
        node = call[_ID]
        self._require_member(caller, node)
        return await self._manager.report(node, call.body(Report))

    def _require_member(self, caller: ManagerCaller, node: int) -> None:
        """Checks that the caller is the member. A member that was removed as dead receives 404 and
        not 403, so that it joins again. Raises NoSuchMember or Forbidden."""
        require_member(caller, self._manager.member(node))

    async def _topology(self, call: Call, caller: ManagerCaller) -> object:
        if call[_FORMAT] == "dot":
            return PlainTextResponse(dot(self._manager), media_type="text/vnd.graphviz")
        return topology_view(self._manager)

    async def _rules(self, call: Call, caller: ManagerCaller) -> object:
        wanted = call.body(LinkRules)
        await self._manager.set_rules(
            rules_of([(each.a, each.b, each.rule) for each in wanted.links]), caller.name
        )
        return topology_view(self._manager)

    async def _rebalance(self, call: Call, caller: ManagerCaller) -> object:
        await self._manager.rebalance(caller.name)
        return topology_view(self._manager)

    async def _watch(self, call: Call, caller: ManagerCaller) -> object:
        manager = self._manager
        since, node = call.get(_SINCE), call.get(_NODE)
        if node is not None:
            manager.member(node)
        is_changed = await manager.changed_since(-1 if since is None else since, call[_TIMEOUT])
        if node is not None:
            manager.member(node)
        return Watched(
            revision=manager.state.revision,
            changed=is_changed,
            links=sorted(manager.state.links),
            neighbors=None if node is None else manager.neighbors(node),
        )

    async def _token(self, call: Call, caller: ManagerCaller) -> object:
        wanted = call.body(TokenRequest)
        token, expires_at_s = await self._manager.new_join_token(wanted.valid_s, caller.name)
        return TokenView(token=token, expires_at_s=expires_at_s)

    async def _audit(self, call: Call, caller: ManagerCaller) -> object:
        return await self._manager.changes.audit(call[_LINES])

    async def _health(self, call: Call, caller: ManagerCaller) -> object:
        return health_view(self._manager)

    async def _metrics(self, call: Call, caller: ManagerCaller) -> object:
        return Response(
            render(self._registry),
            media_type="application/openmetrics-text; version=1.0.0; charset=utf-8",
        )

    async def _healthz(self, call: Call, caller: ManagerCaller) -> object:
        return PlainTextResponse("ok\n")


def _refusal(error: Exception) -> ApiRefusal:
    code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
    return ApiRefusal(code, str(error))
