"""Export spans to an OpenTelemetry collector over HTTP. Needs the extra ``otel``.

The SDK's queue is bounded and emptied by a thread of its own: a slow or missing collector costs the
spans that do not fit, and no session waits for it. Headers, sampling and timeouts come from the
standard variables of OpenTelemetry.
"""

from __future__ import annotations

import threading
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from tugline.tracing.spans import Rollout, Span, make_rollout_span, make_trace_id, parse_link

_QUEUED = 16_384
"""Spans that wait to be sent; a session has one for each of its calls."""
_CLOSE_S = 3.0


class _Ids(RandomIdGenerator):
    """Random span ids; the trace id is set before each trace."""

    trace = 1

    def generate_trace_id(self) -> int:
        return self.trace


class Otlp:
    """A `Tracer` that leaves the process-wide provider to programs that embed Tugline."""

    def __init__(self, url: str, *, node: str) -> None:
        """`url` takes traces, `node` is the instance id of the service."""
        release = version("tugline")
        resource = Resource.create(
            {
                "service.name": "tugline",
                "service.version": release,
                "service.instance.id": node,
            }
        ).merge(OTELResourceDetector().detect())
        self._ids = _Ids()
        self._lock = threading.Lock()
        self._provider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=_QUEUED)
        )
        self._tracer = self._provider.get_tracer("tugline", release)

    def export(self, rollout: Rollout) -> None:
        """Queue the spans of a session."""
        link = parse_link(rollout.task)
        links = [] if link is None else [trace.Link(_context(*link))]
        with self._lock:
            self._ids.trace = make_trace_id(rollout.session)
            self._send(make_rollout_span(rollout), None, links)

    def close(self) -> None:
        """Send what is queued, for three seconds at most; the rest is dropped."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call] # stop its retries

    def _send(self, span: Span, parent: trace.Span | None, links: list[trace.Link]) -> None:
        context = None if parent is None else trace.set_span_in_context(parent)
        kind = trace.SpanKind.CLIENT if span.remote else trace.SpanKind.INTERNAL
        made = self._tracer.start_span(
            span.name,
            context or trace.set_span_in_context(trace.INVALID_SPAN),
            kind=kind,
            attributes=span.attributes,
            links=links,
            start_time=_ns(span.start),
        )
        for event in span.events:
            made.add_event(event.name, event.attributes, _ns(event.at))
        for child in span.children:
            self._send(child, made, [])
        if span.error is not None:
            made.set_status(trace.StatusCode.ERROR, span.error)
        made.end(_ns(span.end))


def _context(trace_number: int, span_number: int) -> trace.SpanContext:
    return trace.SpanContext(trace_number, span_number, is_remote=True)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
