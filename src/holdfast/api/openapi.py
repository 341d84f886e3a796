"""The OpenAPI 3.1 document of a port, made from the declarations of its endpoints."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from holdfast import __version__
from holdfast.api.endpoints import Endpoint, Parameter
from holdfast.security.access.scopes import Scope

_TEMPLATE: Final = "#/components/schemas/{name}"
REFUSALS: Final = {
    400: "a parameter or the body is wrong; `error` says how",
    401: "no valid credentials",
    403: "the credentials do not have the scope, or the request comes from another web page",
    404: "there is no such thing, or this node does not have it; `error` says which",
    406: "this node cannot make the content type that `Accept` names",
    409: "it contradicts the present state; `error` says what to do",
    410: "the records were removed by retention",
    413: "the body is too large",
    421: "this node does not store the log; the reply names the nodes that do",
    429: "too many of these; `Retry-After` says when to try again",
    503: "this node cannot serve it now; try again, or use another node",
}


def document(endpoints: Sequence[Endpoint], title: str) -> Any:
    """The document as JSON values."""
    types = [each.reply for each in endpoints if each.reply is not None]
    types += [each.body for each in endpoints if each.body is not None]
    # By identity of the type: two types may be equal in name.
    unique = list({id(each): each for each in types}.values())
    schemas, components = msgspec.json.schema_components(unique, ref_template=_TEMPLATE)
    schema_of = {id(each): schema for each, schema in zip(unique, schemas, strict=True)}
    components["Refusal"] = {
        "type": "object",
        "properties": {"error": {"type": "string"}},
        "required": ["error"],
    }
    paths: Any = {}
    for each in endpoints:
        operation = _operation(each, schema_of.get(id(each.reply), {"type": "object"}))
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
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "holdfast_session"},
            },
        },
    }


def _operation(each: Endpoint, reply: Any) -> Any:
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
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}},
        }
    return {
        "summary": each.summary,
        "operationId": f"{each.method} {each.path}".lower(),
        "parameters": [_parameter(parameter) for parameter in each.parameters],
        "x-scope": each.scope.name.lower(),
        "security": _security(each.scope),
        "responses": responses,
    }


def _security(scope: Scope) -> Any:
    """The credentials that a scope needs. The empty ones of health and metrics depend on
    `admin.open`."""
    if scope is Scope.OPEN:
        return []
    none: list[Any] = [{}] if scope in (Scope.HEALTH, Scope.METRICS) else []
    return [*none, {"bearer": []}, {"session": []}]


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
