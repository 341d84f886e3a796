"""Generates the OpenAPI document from the endpoints and the types of their bodies."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from holdfast import __version__
from holdfast.federation.manager.messages import Envelope

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
