"""Export sessions to an OpenTelemetry collector over HTTP. Needs the extra ``otel``.

A session is one trace: ``rollout``, its stages, and the model calls of its agent. Names follow the
GenAI conventions of OpenTelemetry, version 1.41; attributes without a convention begin with
``tugline.``. Spans contain no text of prompts or answers.

The SDK has a bounded queue and sends in its own thread: with a slow or missing collector, spans
that do not fit are dropped, and no session waits. Headers, sampling and timeouts are set by
OpenTelemetry's standard variables.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from tugline.node.telemetry import Rollout
from tugline.types import Call, CallOutcome, Status

_MAX_QUEUED = 16_384
"""Maximum spans in the queue; a session has one for each of its calls, among others."""
_CLOSE_S = 3.0

Attributes = Mapping[str, str | bool | int | float | Sequence[str] | None]


class Otlp:
    """A `Tracer` that does not set the process-wide provider, for programs that embed Tugline."""

    def __init__(self, url: str, *, node: str) -> None:
        """Export to the traces endpoint `url`, with `node` as instance id of the service."""
        self._node = node
        release = version("tugline")
        service = {
            "service.name": "tugline",
            "service.version": release,
            "service.instance.id": node,
        }
        resource = Resource.create(service).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=_MAX_QUEUED)
        )
        self._tracer = self._provider.get_tracer("tugline", release)

    def export(self, rollout: Rollout) -> None:
        """Queue the spans of a session."""
        failure = rollout.trajectory.failure
        ends = [at for _, at in rollout.stages[1:]] + [rollout.ended]
        with self._span(
            "rollout",
            (rollout.stages[0][1] if rollout.stages else rollout.ended, rollout.ended),
            {**_describe_rollout(rollout), "tugline.node": self._node},
            error=None if failure is None else failure.message,
        ) as root:
            for (status, start), end in zip(rollout.stages, ends, strict=False):
                self._export_stage(rollout, status, (start, max(start, end)), root)

    def close(self) -> None:
        """Send the queued spans for at most three seconds; drop the rest."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call] # stop its retries

    def _export_stage(
        self, rollout: Rollout, status: Status, times: tuple[float, float], root: trace.Span
    ) -> None:
        """Export a stage; RUN is named ``invoke_agent`` and has the calls as children."""
        reward = rollout.trajectory.reward
        failure = rollout.trajectory.failure
        name = status.value
        attributes = {"tugline.stage": status.value}
        calls: Sequence[Call] = ()
        if status is Status.RUN:
            agent = rollout.task.harness.name
            calls = rollout.calls
            name = f"invoke_agent {agent}"
            attributes |= {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": calls[0].engine if calls else "",
                "gen_ai.agent.name": agent,
                "gen_ai.conversation.id": rollout.session.id,
                "gen_ai.request.model": rollout.model,
            }
        failed = failure is not None and status is rollout.stages[-1][0]
        error = failure.message if failed and failure is not None else None
        with self._span(name, times, attributes, parent=root, error=error) as span:
            if status is Status.EVAL and reward is not None:
                score: dict[str, str | float] = {
                    "gen_ai.evaluation.name": rollout.task.evaluator.name,
                    "gen_ai.evaluation.score.value": reward.value,
                }
                span.add_event("gen_ai.evaluation.result", score, _ns(times[1]))
            for call in calls:
                self._export_call(call, rollout.model, span)

    def _export_call(self, call: Call, model: str, run: trace.Span) -> None:
        """Export a model call, from its arrival at the gateway to its last token."""
        times = call.timings
        end = max(times.received, times.last_token or times.sent or times.received)
        with self._span(
            f"chat {model}".rstrip(),
            (times.received, end),
            _describe_call(call, model),
            parent=run,
            kind=trace.SpanKind.CLIENT,
            error=None if call.outcome is CallOutcome.COMPLETE else call.outcome.value,
        ) as span:
            if times.first_token is not None:
                span.add_event("first token", None, _ns(times.first_token))

    @contextlib.contextmanager
    def _span(
        self,
        name: str,
        times: tuple[float, float],
        attributes: Attributes,
        *,
        parent: trace.Span = trace.INVALID_SPAN,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
        error: str | None = None,
    ) -> Iterator[trace.Span]:
        """Create a span from `times[0]` to `times[1]` (Unix seconds), without empty attributes."""
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(parent),
            kind=kind,
            attributes={k: v for k, v in attributes.items() if v is not None and v != ""},
            start_time=_ns(times[0]),
        )
        yield span
        if error is not None:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(_ns(times[1]))


def _describe_rollout(rollout: Rollout) -> Attributes:
    task = rollout.task
    session = rollout.session
    trajectory = rollout.trajectory
    ledger = trajectory.ledger
    reward = trajectory.reward
    failure = trajectory.failure
    return {
        "gen_ai.conversation.id": session.id,
        "tugline.task": task.id,
        "tugline.session": session.id,
        "tugline.sample": session.sample,
        "tugline.attempt": session.attempt,
        "tugline.epoch": session.epoch,
        "tugline.tenant": task.tenant,
        "tugline.status": trajectory.status.value,
        "tugline.reward": None if reward is None else reward.value,
        "tugline.tokens.sampled": ledger.sampled,
        "tugline.tokens.trained": ledger.trained,
        "tugline.calls": len(rollout.calls),
        "error.type": None if failure is None else failure.boundary.value,
    }


def _describe_call(call: Call, model: str) -> Attributes:
    times = call.timings
    sampling = call.sampling
    first = times.first_token
    address = urlsplit(call.replicas[-1]) if call.replicas else None
    return {
        "gen_ai.operation.name": "text_completion" if call.raw_prompt else "chat",
        "gen_ai.provider.name": call.engine,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": f"{call.session}-{call.number}",
        "gen_ai.conversation.id": call.thread or call.session,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": sampling.stop or None,
        "gen_ai.usage.input_tokens": len(call.prompt_ids),
        "gen_ai.usage.output_tokens": len(call.sampled_ids) + call.unreported_tokens,
        "gen_ai.response.finish_reasons": (call.finish.value,),
        "gen_ai.response.time_to_first_chunk": (
            None if first is None else first - (times.sent or times.received)
        ),
        "server.address": address.hostname if address else None,
        "server.port": address.port if address else None,
        "error.type": None if call.outcome is CallOutcome.COMPLETE else call.outcome.value,
        "tugline.call": call.number,
        "tugline.parent": call.parent,
        "tugline.branch": None if call.branch is None else call.branch.value,
        "tugline.kind": call.kind.value,
        "tugline.mode": call.mode.value,
        "tugline.dialect": call.dialect,
        "tugline.replayed": call.replayed or None,
        "tugline.versions": tuple(str(span.version) for span in call.versions) or None,
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
