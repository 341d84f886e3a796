"""Routes HTTP requests to endpoint handlers."""

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Match, request_response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as HttpScope

from holdfast import __version__
from holdfast.api.endpoints import (
    EVENT_STREAM,
    ApiRefusal,
    Call,
    Caller,
    Endpoint,
    LogMoved,
    Parameter,
    Values,
    bad_request,
)
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

_TEMPLATE: Final = "#/components/schemas/{name}"
REFUSALS: Final = {
    400: "a parameter or the body is wrong; the text says how",
    401: "no valid credentials",
    403: "the credentials do not have the scope, or the request comes from another web page",
    404: "there is no such thing, or this node does not have it; the text says which",
    406: "this node cannot make the content type that `Accept` names",
    409: "it contradicts the present state; the text says what to do",
    410: "the records were removed by retention",
    413: "the body is too large",
    421: "this node does not store the log; the reply names the nodes that do",
    429: "too many of these; try again later, or when `Retry-After` says",
    503: "this node cannot serve it now; try again, or use another node",
}


class ReplyForm:
    """The form of replies and refusals, and the part of the OpenAPI document about them."""

    openapi_path = "/api/v1/openapi.json"
    openapi_scope = Scope.VIEWER
    refusal: Any = msgspec.defstruct("Refusal", [("error", str)])
    """The type of a refusal's content."""
    schemes: Mapping[str, Any] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": "holdfast_session"},
    }
    """The security schemes."""

    def reply(self, endpoint: Endpoint) -> Any:
        """The type of a reply's content. None: `{}`."""
        return endpoint.reply

    def security(self, scope: Scope) -> Any:
        """The credentials that a scope needs. The empty ones of health and metrics depend on
        `admin.open`."""
        if scope is Scope.OPEN:
            return []
        none: list[Any] = [{}] if scope in (Scope.HEALTH, Scope.METRICS) else []
        return [*none, {"bearer": []}, {"session": []}]

    def respond(self, call: Call, value: object) -> Response:
        """The response of a handler that returned this value."""
        encoded = b"{}" if value is None else msgspec.json.encode(value)
        return Response(encoded, media_type="application/json")

    def refuse(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
        """The response of a refusal."""
        content = msgspec.json.encode({"error": text})
        return Response(content, status, headers, media_type="application/json")


PLAIN: Final = ReplyForm()


def document(endpoints: Sequence[Endpoint], title: str, form: ReplyForm = PLAIN) -> Any:
    """The document as JSON values."""
    replies = [form.reply(each) for each in endpoints]
    types = [form.refusal, *(each for each in replies if each is not None)]
    types += [each.body for each in endpoints if each.body is not None]
    # By identity of the type: two types may be equal in name.
    unique = list({id(each): each for each in types}.values())
    schemas, components = msgspec.json.schema_components(unique, ref_template=_TEMPLATE)
    schema_of = {id(each): schema for each, schema in zip(unique, schemas, strict=True)}
    refusal = schema_of[id(form.refusal)]
    paths: Any = {}
    for each, reply in zip(endpoints, replies, strict=True):
        operation = _operation(each, schema_of.get(id(reply), {"type": "object"}), refusal, form)
        if each.body is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema_of[id(each.body)]}},
            }
        paths.setdefault(each.path, {})[each.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": form.schemes,
        },
    }


def _operation(each: Endpoint, reply: Any, refusal: Any, form: ReplyForm) -> Any:
    schema = reply if each.media_type == "application/json" else {"type": "string"}
    content = {each.media_type: {"schema": schema}}
    content |= {other: {"schema": {"type": "string"}} for other in each.other_media_types}
    responses: Any = {"200": {"description": "done", "content": content}}
    refusals = {403, *each.refusals}
    if each.parameters or each.body is not None or not each.any_parameter:
        refusals.add(400)
    if each.body is not None:
        refusals.add(413)
    if each.scope > Scope.OPEN:
        refusals.add(401)
    for status in sorted(refusals):
        responses[str(status)] = {
            "description": REFUSALS[status],
            "content": {"application/json": {"schema": refusal}},
        }
    return {
        "summary": each.summary,
        "operationId": f"{each.method} {each.path}".lower(),
        "parameters": [_parameter(parameter) for parameter in each.parameters],
        "x-scope": each.scope.name.lower(),
        "security": form.security(each.scope),
        "responses": responses,
    }


def _parameter(parameter: Parameter[Any]) -> Any:
    schema = dict(parameter.schema())
    if parameter.default is not None:
        schema["default"] = parameter.default
    return {
        "name": parameter.name,
        "in": "path" if parameter.in_path else "query",
        "required": parameter.required or parameter.in_path,
        "description": parameter.text,
        "schema": schema,
    }


READS_MAX: Final = 4
READ_AGAIN_S: Final = 3.0
"""A read during which the log moves begins again at most READS_MAX times, and not after this time
in seconds: a node that does not answer has taken longer."""


class AccessGate(Protocol):
    """The decision about the author of a request, and the record of what the author changed."""

    async def admit(self, request: Request, endpoint: Endpoint) -> Caller:
        """Returns the caller, who has the scope of the endpoint. Raises `ApiRefusal` (401, 403)."""

    def still_admits(self, request: Request, endpoint: Endpoint) -> bool:
        """Whether the credentials of a request in progress are still valid, with the scope."""

    async def record(self, call: Call, status: int, error: str) -> None:
        """Records the result of a change. `error` is empty if the change was carried out."""


def remote_of(request: Request) -> str:
    """The IP address of the client."""
    return request.client.host if request.client is not None else ""


def application(
    endpoints: Iterable[Endpoint],
    gate: AccessGate,
    title: str,
    pages: Iterable[BaseRoute] = (),
    form: ReplyForm = PLAIN,
) -> Starlette:
    """The application of these endpoints, and of the OpenAPI document about them. `pages`: the
    routes of public files, which are not part of the API."""
    declared = list(endpoints)
    encoded: list[bytes] = []

    async def openapi(call: Call) -> Response:
        # Made at the first request, because few processes are asked for it.
        if not encoded:
            encoded.append(json.dumps(document(declared, title, form)).encode())
        return Response(encoded[0], media_type="application/json")

    declared.append(
        Endpoint("GET", form.openapi_path, form.openapi_scope,
                 "the OpenAPI document of this port", openapi, reply=dict)
    )  # fmt: skip
    routes = _Routes()
    for each in declared:
        routes.add(each, request_response(_responder(each, gate, form)))
    return Starlette(
        routes=[routes, *pages], exception_handlers={HTTPException: partial(_no_route, form)}
    )


class _Routes(BaseRoute):
    """The routes of all endpoints, by the segments of their paths. The first declared one wins.

    Starlette's `Route` compiles a regular expression for each, which takes a fifth of the CPU of a
    start after its imports, and a request tries them one by one.
    """

    def __init__(self) -> None:
        self._by_length: dict[int, list[tuple[list[str], str, ASGIApp]]] = {}

    def add(self, endpoint: Endpoint, app: ASGIApp) -> None:
        """Raises `ValueError` for a second endpoint with the same method and path."""
        segments = endpoint.path.split("/")
        same = self._by_length.setdefault(len(segments), [])
        if any(known[:2] == (segments, endpoint.method) for known in same):
            raise ValueError(f"{endpoint.method} {endpoint.path} is declared twice")
        same.append((segments, endpoint.method, app))

    def matches(self, scope: HttpScope) -> tuple[Match, HttpScope]:
        allowed: set[str] = set()
        given = scope["path"].split("/")
        for segments, method, app in self._by_length.get(len(given), ()):
            values = _values_in(segments, given)
            if values is None:
                continue
            methods = {method, "HEAD"} if method == "GET" else {method}
            if scope["method"] in methods:
                return Match.FULL, {"endpoint": app, "path_params": values}
            allowed |= methods
        return (Match.PARTIAL, {"endpoint": _refuser(allowed)}) if allowed else (Match.NONE, {})

    async def handle(self, scope: HttpScope, receive: Receive, send: Send) -> None:
        await scope["endpoint"](scope, receive, send)


def _values_in(segments: list[str], given: list[str]) -> dict[str, str] | None:
    """The values of the parameters in a path; None: it is the path of another endpoint."""
    values: dict[str, str] = {}
    for segment, text in zip(segments, given, strict=True):
        if segment.startswith("{") and text:
            values[segment[1:-1]] = text
        elif segment != text:
            return None
    return values


def _refuser(allowed: set[str]) -> ASGIApp:
    async def refuse(scope: HttpScope, receive: Receive, send: Send) -> None:
        raise HTTPException(405, headers={"Allow": ", ".join(sorted(allowed))})

    return refuse


def _responder(
    endpoint: Endpoint, gate: AccessGate, form: ReplyForm
) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        try:
            caller = await gate.admit(request, endpoint)
            values = parameters_of(request, endpoint)
            body = await _body(request, endpoint)
        except ApiRefusal as error:
            return form.refuse(error.status, str(error), error.headers)
        call = Call(request, endpoint, caller, values, body)
        if not endpoint.is_change:
            response = (await _carry_out(call, form))[0]
            if isinstance(response, StreamingResponse) and endpoint.media_type == EVENT_STREAM:
                events = response.body_iterator
                assert isinstance(events, AsyncGenerator)
                response.body_iterator = _while_admitted(events, call, gate)
            return response
        status, text = 500, "internal error"
        try:
            response, text = await _carry_out(call, form)
            status = response.status_code
        finally:
            await gate.record(call, status, text)
        return response

    return respond


async def _while_admitted(
    events: AsyncGenerator[bytes, None], call: Call, gate: AccessGate
) -> AsyncIterator[bytes]:
    """The events of a stream until the credentials end. Counter-example with a check at the start
    only: the holder of a removed token reads payloads for as long as the stream lasts."""
    async with aclosing(events):
        async for event in events:
            if not gate.still_admits(call.request, call.endpoint):
                return
            yield event


async def _carry_out(call: Call, form: ReplyForm) -> tuple[Response, str]:
    """Returns the response, and the reason of a refusal."""
    try:
        result = await _handle(call)
    except ApiRefusal as error:
        return form.refuse(error.status, str(error), error.headers), str(error)
    return (result if isinstance(result, Response) else form.respond(call, result)), ""


async def _handle(call: Call) -> object:
    """Calls the handler. A read during which the log moves begins again: a client without retries
    of its own, such as curl, would fail for each move of a partition. Raises `ApiRefusal`."""
    loop = asyncio.get_running_loop()
    begun_at = loop.time()
    for _ in range(READS_MAX):
        try:
            return await call.endpoint.handler(call)
        except LogMoved:
            if call.endpoint.is_change or loop.time() >= begun_at + READ_AGAIN_S:
                raise
    return await call.endpoint.handler(call)


async def _no_route(form: ReplyForm, request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = f"there is no {request.method} {shown(request.url.path)}: see {form.openapi_path}"
    return form.refuse(status, text, error.headers if isinstance(error, HTTPException) else None)


def parameters_of(request: Request, endpoint: Endpoint) -> Values:
    """The values of the declared parameters, by name. Raises `ApiRefusal` (400)."""
    query = request.query_params
    names = [each.name for each in endpoint.parameters if not each.in_path]
    if not endpoint.any_parameter:
        for name in query:
            if name not in names:
                there_are = ", ".join(names) or "none"
                raise bad_request(f"unknown parameter {shown(name)}: there are {there_are}")
    values: dict[str, int | float | str | bool] = {}
    for each in endpoint.parameters:
        given = [request.path_params[each.name]] if each.in_path else query.getlist(each.name)
        if len(given) > 1:
            raise bad_request(f"parameter {each.name} is given {len(given)} times")
        if given:
            values[each.name] = each.parse(given[0])
        elif each.required:
            raise bad_request(f"parameter {each.name} is missing")
        elif each.default is not None:
            values[each.name] = each.default
    return values


async def _body(request: Request, endpoint: Endpoint) -> Any:
    """The decoded body, or None if the endpoint has none. Raises `ApiRefusal` (400, 413)."""
    if endpoint.body is None:
        return None
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > endpoint.body_bytes_max:
                text = f"the body has more than {endpoint.body_bytes_max} bytes"
                raise ApiRefusal(413, text)
    except ClientDisconnect:
        raise bad_request("the body has ended early") from None
    try:
        return msgspec.json.decode(bytes(data), type=endpoint.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"body: {error}") from None
