"""A broker sends the spans of its publishes to a collector, and its clients never wait for one."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.e2e.conftest import StartHoldfast
from tests.interop.paho_client import Paho, publish_props
from tests.support.ports import free_port

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(BaseHTTPRequestHandler):
    """An OTLP/HTTP collector."""

    topics: list[str]
    parents: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {each.key: each.value for each in span.attributes}
                    self.topics.append(values["messaging.destination.name"].string_value)
                    self.parents.append(span.parent_span_id.hex())
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """The test reads no log."""


@pytest.fixture
def collector() -> Iterator[HTTPServer]:
    Collector.topics, Collector.parents = [], []
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_arrive_at_a_collector(start_holdfast: StartHoldfast, collector: HTTPServer) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    broker = start_holdfast({"tracing": {"enabled": True, "ratio": 1.0, "endpoint": endpoint}})
    with Paho(broker.port, "reader") as reader, Paho(broker.port, "writer") as writer:
        reader.subscribe("#", 1)
        writer.publish("a", b"x", 1)
        made = dict(reader.message().properties.UserProperty)["traceparent"]
        assert made.endswith("-01")
        writer.publish("b", b"x", 1, properties=publish_props(UserProperty=("traceparent", GIVEN)))
        assert dict(reader.message().properties.UserProperty)["traceparent"] == GIVEN
    # What waits is sent at the end.
    broker.stop()
    assert sorted(Collector.topics) == ["a", "b"]
    assert sorted(Collector.parents) == ["", GIVEN.split("-")[2]]


def test_no_collector_is_no_problem(start_holdfast: StartHoldfast) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}/v1/traces"
    broker = start_holdfast({"tracing": {"enabled": True, "ratio": 1.0, "endpoint": endpoint}})
    with Paho(broker.port, "writer") as writer:
        for _ in range(200):
            writer.publish("a", b"x", 1)
    broker.stop()
