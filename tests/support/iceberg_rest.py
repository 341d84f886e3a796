"""An Iceberg REST catalog for tests: the routes that a client needs, over a catalog in SQLite.

The rules of a commit (requirements, conflicts) are pyiceberg's own. `fail_next` lets requests fail.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, TableIdentifier

STATUS = {
    NoSuchTableError: 404,
    NamespaceAlreadyExistsError: 409,
    TableAlreadyExistsError: 409,
    CommitFailedException: 409,
}


class RestCatalogServer:
    """The server, on a free port of loopback."""

    def __init__(self, folder: Path) -> None:
        uri = f"sqlite:///{folder}/rest.db"
        self.catalog = SqlCatalog("rest", uri=uri, warehouse=f"file://{folder}/warehouse")
        self.fail_next = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                code, answer = server.respond(self.command, self.path.split("?")[0], body)
                data = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_POST = do_HEAD = do_DELETE = handle_any

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.http.server_address[1]}"

    def respond(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.fail_next:
            self.fail_next -= 1
            return 503, error(503, "ServiceUnavailable", "try later")
        try:
            return self._respond(method, path.removeprefix("/v1/").split("/"), body)
        except Exception as failed:  # noqa: BLE001 - becomes the answer
            code = STATUS.get(type(failed), 500)
            return code, error(code, type(failed).__name__, str(failed))

    def _respond(self, method: str, parts: list[str], body: Any) -> tuple[int, Any]:
        catalog = self.catalog
        match method, parts:
            case "GET", ["config"]:
                return 200, {"defaults": {}, "overrides": {}}
            case "POST", ["namespaces"]:
                catalog.create_namespace(tuple(body["namespace"]))
                return 200, body
            case "HEAD", ["namespaces", namespace]:
                return (204 if catalog.namespace_exists(namespace) else 404), None
            case "POST", ["namespaces", namespace, "tables"]:
                table = catalog.create_table(
                    (namespace, body["name"]),
                    Schema.model_validate(body["schema"]),
                    body.get("location"),
                    PartitionSpec.model_validate(body["partition-spec"]),
                    properties=body.get("properties") or {},
                )
                return 200, loaded(table)
            case "HEAD", ["namespaces", namespace, "tables", name]:
                return (204 if catalog.table_exists((namespace, name)) else 404), None
            case "GET", ["namespaces", namespace, "tables", name]:
                return 200, loaded(catalog.load_table((namespace, name)))
            case "DELETE", ["namespaces", namespace, "tables", name]:
                catalog.drop_table((namespace, name))
                return 204, None
            case "POST", ["namespaces", namespace, "tables", name]:
                identifier = TableIdentifier(namespace=[namespace], name=name).model_dump()
                request = CommitTableRequest.model_validate({**body, "identifier": identifier})
                table = catalog.load_table((namespace, name))
                catalog.commit_table(table, request.requirements, request.updates)
                return 200, loaded(catalog.load_table((namespace, name)))
        return 404, error(404, "NotFound", f"{method} {'/'.join(parts)}")


def loaded(table: Any) -> dict[str, Any]:
    return {
        "metadata-location": table.metadata_location,
        "metadata": json.loads(table.metadata.model_dump_json()),
        "config": {},
    }


def error(code: int, kind: str, text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "code": code}}


@contextmanager
def rest_catalog(folder: Path) -> Iterator[RestCatalogServer]:
    server = RestCatalogServer(folder)
    thread = threading.Thread(target=server.http.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join()
        server.http.server_close()
