"""Every route of the admin port, called from its OpenAPI document: scopes, parameters, bodies.

A route that is added later is called, too. The document must name each status that it replies with.
"""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from holdfast.security.access.scopes import ROLES, Scope
from tests.e2e import wire
from tests.e2e.brokers import Holdfast
from tests.e2e.test_admin_access import made_token
from tests.support.waiting import until

SMALLER = {"reader": "viewer", "operator": "reader", "admin": "operator"}
HEAD_BYTES = 50_000
OPEN = ("open", "health")
"""The scopes that need no credentials by default."""


class Documented:
    """A broker with a token of each role, and the document of its admin port."""

    def __init__(self, directory: Path) -> None:
        self.broker = Holdfast(directory)
        self.kind = ""
        """The content type of the last reply."""
        self.tokens = {role: made_token(self.broker.data, role) for role in ROLES}
        self.broker.start()
        with wire.Wire(self.broker.port) as client:
            client.connect("c")
            client.publish("t", b"x", qos=1)
        status, text = self.call("GET", "/api/v1/openapi.json", "viewer")
        assert status == 200
        self.document: Any = json.loads(text)

    def call(self, method: str, path: str, role: str = "", body: bytes = b"") -> tuple[int, bytes]:
        """The status of a request, and the text of a refusal or of a reply that ends."""
        connection = http.client.HTTPConnection("127.0.0.1", self.broker.admin_port, timeout=30)
        headers = {"Content-Length": str(len(body))}
        if role:
            headers["Authorization"] = f"Bearer {self.tokens[role]}"
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            kind = reply.headers.get("content-type", "")
            self.kind = kind.partition(";")[0]
            return reply.status, b"" if kind.startswith("text/event-stream") else reply.read()
        finally:
            connection.close()

    def operations(self) -> Iterator[tuple[str, str, Any]]:
        for path, methods in self.document["paths"].items():
            for method, operation in methods.items():
                yield method.upper(), path, operation

    def schema(self, found: Any) -> Any:
        name = found.get("$ref", "").rpartition("/")[2]
        return self.document["components"]["schemas"][name] if name else found


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Documented]:
    made = Documented(tmp_path_factory.mktemp("openapi"))
    yield made
    log = made.broker.log_text()
    made.broker.kill()
    assert "Traceback" not in log, log[-6000:]


def a_value(schema: Any) -> str:
    """A value that the schema allows."""
    if "enum" in schema:
        return str(schema["enum"][0])
    match schema["type"]:
        case "integer" | "number":
            return str(schema.get("minimum", 0))
        case "boolean":
            return "false"
    return "x" * max(1, schema.get("minLength", 1))


def wrong_values(schema: Any) -> list[str]:
    """Values that the schema does not allow."""
    if "enum" in schema:
        return ["none of them"]
    match schema["type"]:
        case "integer" | "number":
            return ["x", "-1" if schema["minimum"] == 0 else "0x10", str(schema["maximum"] + 1)]
        case "boolean":
            return ["yes", "1"]
    # A longer head of a request is refused before it comes to a route.
    return ["x" * (schema["maxLength"] + 1)] if schema["maxLength"] < HEAD_BYTES else []


def filled(path: str, operation: Any, changed: dict[str, str] | None = None) -> str:
    """The path with a value for each required parameter, and with the `changed` ones."""
    query = {}
    for each in operation["parameters"]:
        name, value = each["name"], a_value(each["schema"])
        if each["in"] == "path":
            path = path.replace(f"{{{name}}}", quote((changed or {}).get(name, value), safe=""))
        elif name in (changed or {}):
            query[name] = (changed or {})[name]
        elif each["required"]:
            query[name] = value
    extra = {k: v for k, v in (changed or {}).items() if k not in query and f"{{{k}}}" not in path}
    known = {each["name"] for each in operation["parameters"]}
    query |= {name: value for name, value in extra.items() if name not in known}
    return f"{path}?{urlencode(query)}" if query else path


def a_body(port: Documented, operation: Any) -> bytes:
    """A body with a value for each required field, which the route may refuse for its content."""
    if "requestBody" not in operation:
        return b""
    schema = port.schema(operation["requestBody"]["content"]["application/json"]["schema"])
    given = {}
    for name in schema.get("required", ()):
        found = port.schema(schema["properties"][name])
        kind = found.get("type", "")
        given[name] = [] if kind == "array" else {} if kind == "object" else a_value(found)
        if kind in ("integer", "number"):
            given[name] = found.get("minimum", 0)
    return json.dumps(given).encode()


def required_role(operation: Any) -> str:
    return Scope[operation["x-scope"].upper()].role


def test_every_route_is_in_the_document(port: Documented) -> None:
    paths = port.document["paths"]
    assert {"/healthz", "/metrics", "/cluster", "/api/v1/log/read", "/api/v1/users"} <= paths.keys()
    found = list(port.operations())
    assert len(found) > 25
    # Changes need at least an operator, and payloads a reader. A reader may commit how far it is.
    # Counts of records have no payload.
    paths_of_readers = ("log/read", "log/wait", "log/group", "pipeline")
    for_readers = {("post", f"/api/v1/{each}") for each in paths_of_readers}
    for method, path, operation in found:
        scope = Scope[operation["x-scope"].upper()]
        own = (method.lower(), path) in for_readers or path == "/api/v1/login"
        if method != "GET" and not own:
            assert scope >= Scope.OPERATOR, path
        if path.startswith("/api/v1/log"):
            open_paths = ("/api/v1/login", "/api/v1/log/counts")
            assert scope >= Scope.READER or path in open_paths, path


def test_none_gets_401_and_too_small_a_scope_403(port: Documented) -> None:
    for method, path, operation in port.operations():
        where, body = filled(path, operation), a_body(port, operation)
        scope = operation["x-scope"]
        status, text = port.call(method, where, "", body)
        if scope in OPEN:
            assert status != 403, where
            continue
        assert status == 401, where
        assert "error" in json.loads(text)
        smaller = SMALLER.get(required_role(operation))
        if smaller is not None:
            status, text = port.call(method, where, smaller, body)
            assert status == 403, where
            assert f"needs the role {scope}" in json.loads(text)["error"]


def test_bad_parameters_and_bodies_get_400(port: Documented) -> None:
    tried = 0
    for method, path, operation in port.operations():
        role = required_role(operation)
        if path in ("/healthz", "/readyz", "/metrics"):
            # Load balancers and scrapers may add parameters.
            assert port.call(method, f"{path}?unknown=1", role)[0] == 200
            continue
        body = a_body(port, operation)
        wrong = [{"unknown-parameter": "1"}]
        for each in operation["parameters"]:
            wrong += [{each["name"]: value} for value in wrong_values(each["schema"])]
        for changed in wrong:
            where = filled(path, operation, changed)
            status, text = port.call(method, where, role, body)
            assert status == 400, (method, where[:200], text)
            error = json.loads(text)["error"]
            assert "\n" not in error
            assert next(iter(changed)) in error
            tried += 1
        required = [each["name"] for each in operation["parameters"] if each["required"]]
        if required and "{" not in path:
            status, text = port.call(method, path, role, body)
            assert status == 400, path
            assert "is missing" in json.loads(text)["error"]
        if body:
            for garbage in (b"{", b"[]", b"\xff", b'{"a":' * 5000):
                status, text = port.call(method, filled(path, operation), role, garbage)
                assert status == 400, (path, garbage[:10])
                tried += 1
    assert tried > 60


def test_the_right_scope_is_served(port: Documented) -> None:
    """Last, because some routes carry something out. Each reply is one that the document names."""
    for method, path, operation in port.operations():
        where, body = filled(path, operation), a_body(port, operation)
        status, text = port.call(method, where, required_role(operation), body)
        assert status not in (403, 405, 500), (method, where, text)
        assert status != 401 or operation["x-scope"] == "open", where
        assert str(status) in operation["responses"], (method, where, status, text)
        assert port.kind in operation["responses"][str(status)]["content"], (method, where)
        if status == 200 and operation["parameters"] == [] and method == "GET":
            kind = operation["responses"]["200"]["content"]
            if "application/json" in kind:
                json.loads(text)
    until(lambda: port.call("GET", "/healthz")[0] == 200, "the broker has gone")
