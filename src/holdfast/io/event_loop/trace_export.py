"""Traces of publishes with OpenTelemetry, exported over OTLP/HTTP.

A thread of the SDK sends the spans. Its queue has a bound: spans beyond it are dropped, and no
publish ever waits for a collector.
"""

import random
from typing import Any, Final

from holdfast import __version__
from holdfast.config.schema import Traces
from holdfast.node.publish.trace_context import PublishTracer, traceparent_of, with_traceparent

QUEUE_SPANS: Final = 2048
"""The most spans that wait for the exporter."""
EXPORT_TIMEOUT_S: Final = 5
"""The time in seconds for one export, also at the end of the process."""
SAMPLED: Final = 1
"""The flag of a context whose publisher reports its spans."""


class OtelTracer(PublishTracer):
    """A tracer with the OpenTelemetry SDK, which the extra `otel` installs."""

    def __init__(self, settings: Traces, node_id: str, processor: Any = None) -> None:
        """`processor`: replaces the one that exports."""
        super().__init__()
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        names = {
            "service.name": "holdfast",
            "service.version": __version__,
            "service.instance.id": node_id,
        }
        provider = TracerProvider(resource=Resource.create(names))
        provider.add_span_processor(processor or _exporting(settings))
        self._provider = provider
        self._tracer = provider.get_tracer("holdfast")
        self._trace = trace
        self._ratio = settings.ratio

    def begin(
        self, topic: str, properties: bytes, client_id: str, qos: int, size_bytes: int
    ) -> bytes:
        """Begins the span of a message, unless it is not sampled."""
        given = traceparent_of(properties)
        if given:
            self.span = None
            if int(given[-2:], 16) & SAMPLED:
                self.span = self._start(given, topic, client_id, qos, size_bytes)
            return properties
        if random.random() < self._ratio:
            self.span = span = self._start("", topic, client_id, qos, size_bytes)
            context = span.get_span_context()
            value = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
        else:
            self.span = None
            trace_id, span_id = random.getrandbits(128) or 1, random.getrandbits(64) or 1
            value = f"00-{trace_id:032x}-{span_id:016x}-00"
        return with_traceparent(properties, value)

    def end(self, span: object, partition: int, offset: int, error: str) -> None:
        """Reports a span."""
        reported: Any = span
        if partition >= 0:
            reported.set_attribute("holdfast.partition", partition)
        if offset >= 0:
            reported.set_attribute("holdfast.offset", offset)
        if error:
            reported.set_status(self._trace.StatusCode.ERROR, error)
        reported.end()

    def close(self) -> None:
        """Exports what waits, for at most EXPORT_TIMEOUT_S."""
        self._provider.shutdown()

    def _start(self, given: str, topic: str, client_id: str, qos: int, size_bytes: int) -> Any:
        trace = self._trace
        context = None
        if given:
            _, trace_id, span_id, flags = given.split("-")
            parent = trace.SpanContext(
                int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16))
            )
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        return self._tracer.start_span(
            "publish",
            context,
            trace.SpanKind.SERVER,
            {
                "messaging.system": "mqtt",
                "messaging.operation.name": "publish",
                "messaging.destination.name": topic,
                "messaging.client.id": client_id,
                "messaging.message.body.size": size_bytes,
                "mqtt.qos": qos,
            },
        )


def _exporting(settings: Traces) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=settings.endpoint or None, timeout=EXPORT_TIMEOUT_S)
    return BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS)


def tracer_for(settings: Traces, node_id: str) -> PublishTracer | None:
    """Returns the configured tracer, or None. The configuration's check has found the packages."""
    return OtelTracer(settings, node_id) if settings.enabled else None
