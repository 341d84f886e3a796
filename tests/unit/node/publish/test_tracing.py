"""Every message has a trace context when tracing is on, and nothing has when it is off."""

import json
from importlib.machinery import ModuleSpec

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast.config import check
from holdfast.config.schema import Config, Traces
from holdfast.io.event_loop.trace_export import OtelTracer
from holdfast.node.publish.trace_context import traceparent_of, with_traceparent
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt.properties import encode_block
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.test_rights import publication, subscribe

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = GIVEN[:-2] + "00"


class TracedBench(NodeBench):
    def __init__(self, ratio: float = 1.0) -> None:
        super().__init__()
        self.exporter = InMemorySpanExporter()
        processor = SimpleSpanProcessor(self.exporter)
        self.node.state.tracer = OtelTracer(Traces(enabled=True, ratio=ratio), "n1", processor)
        self.reader = self.connect("reader")
        subscribe(self.reader, "#")

    def spans(self) -> list[dict[str, object]]:
        return [json.loads(span.to_json()) for span in self.exporter.get_finished_spans()]


def contexts(peer: Peer) -> list[str]:
    return [traceparent_of(publish.properties) for publish in peer.publishes()]


def traced(qos: int, value: str) -> Publish:
    made = publication("t", b"x", qos)
    made.properties = encode_block({p.USER_PROPERTY: [("traceparent", value), ("a", "b")]})
    return made


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("version", [4, 5])
def test_a_message_without_a_context_gets_one(version: int, qos: int) -> None:
    bench = TracedBench()
    writer = bench.connect("writer", version)
    writer.send(publication("t/1", b"hello", qos))
    bench.settle()
    (context,) = contexts(bench.reader)
    (span,) = bench.spans()
    found = span["context"]
    assert isinstance(found, dict)
    assert context.split("-")[1] == found["trace_id"][2:]
    assert context.split("-")[2] == found["span_id"][2:]
    assert context.endswith("-01")
    attributes = span["attributes"]
    assert isinstance(attributes, dict)
    assert attributes["messaging.destination.name"] == "t/1"
    assert attributes["messaging.client.id"] == "writer"
    assert attributes["messaging.message.body.size"] == 5
    assert ("holdfast.offset" in attributes) == (qos > 0)


@pytest.mark.parametrize("qos", [0, 1])
def test_a_given_context_stays_and_is_the_parent(qos: int) -> None:
    bench = TracedBench(ratio=0.0)
    writer = bench.connect("writer")
    writer.send(traced(qos, GIVEN), traced(qos, UNSAMPLED))
    bench.settle()
    assert contexts(bench.reader) == [GIVEN, UNSAMPLED]
    (span,) = bench.spans()
    assert span["parent_id"] == "0x" + GIVEN.split("-")[2]


def test_what_is_not_sampled_has_a_context_and_no_span() -> None:
    bench = TracedBench(ratio=0.0)
    bench.connect("writer").send(publication("t", b"x", 1), publication("t", b"y", 0))
    bench.settle()
    found = contexts(bench.reader)
    assert len(set(found)) == 2
    assert all(context.endswith("-00") for context in found)
    assert bench.spans() == []


def test_an_acknowledgement_ends_the_span_and_nothing_before() -> None:
    bench = TracedBench()
    bench.auto_commit = False
    bench.connect("writer").send(publication("t", b"x", 1))
    assert bench.spans() == []
    bench.settle()
    assert len(bench.spans()) == 1


def test_nothing_is_added_when_tracing_is_off() -> None:
    bench = NodeBench()
    reader = bench.connect("reader")
    subscribe(reader, "#")
    bench.connect("writer").send(publication("t", b"x", 1))
    bench.settle()
    assert [publish.properties for publish in reader.publishes()] == [b""]


@pytest.mark.parametrize(
    "value",
    [
        GIVEN.upper(), "ff" + GIVEN[2:], GIVEN[:3] + "0" * 32 + GIVEN[35:],
        GIVEN[:36] + "0" * 16 + GIVEN[52:], "x" * 55,
    ],
)  # fmt: skip
def test_an_invalid_context_is_none(value: str) -> None:
    assert traceparent_of(with_traceparent(b"", value)) == ""


@given(st.binary(max_size=300), st.integers(0, 100))
def test_garbage_is_no_context(garbage: bytes, at: int) -> None:
    assume(b"traceparent" not in garbage)
    found = traceparent_of(garbage)
    assert found == ""
    cut = with_traceparent(garbage, GIVEN)
    assert traceparent_of(cut) == GIVEN
    assert traceparent_of(cut[: -1 - at % 55]) == ""


def test_the_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec | None:
        raise ModuleNotFoundError(name)

    config = Config(tracing=Traces(enabled=True))
    assert list(check.contradictions(config)) == []
    monkeypatch.setattr(check, "find_spec", find)
    ((key, text),) = check.contradictions(config)
    assert key == "tracing.enabled"
    assert "pip install 'holdfast[otel]'" in text
