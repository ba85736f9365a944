from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from support.deployment import CALL, deploy, script_task
from tugline.errors import UsageError
from tugline.node.telemetry import ENDPOINTS, Rollout, Tracer, open_tracer
from tugline.recording import file as recordings
from tugline.types import Boundary, Call, Failure, Ledger, Session, Trajectory
from tugline.types import Status as Stage
from tugline.web.serve import serve

TWICE = CALL + CALL.replace("'x'", "'y'")
SESSION = Session(id="t-0", task="t", sample=0, epoch=3)


class Collector:
    """Keeps the spans that it receives."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}

    async def take(self, request: Request) -> Response:
        """The OTLP route for traces."""
        sent = ExportTraceServiceRequest.FromString(await request.body())
        for part in sent.resource_spans:
            attributes = part.resource.attributes
            self.resource |= {one.key: one.value.string_value for one in attributes}
            self.spans += [span for scope in part.scope_spans for span in scope.spans]
        return Response(media_type="application/x-protobuf")


@contextlib.asynccontextmanager
async def collect() -> AsyncIterator[tuple[Collector, str]]:
    """A real receiver on loopback, and its address."""
    taking = Collector()
    routes = [Route("/v1/traces", taking.take, methods=["POST"])]
    async with serve(Starlette(routes=routes)) as url:
        yield taking, url


def tracer_to(url: str) -> Tracer:
    """A tracer that exports to this collector."""
    return open_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": url}, node="here")


def values(span: Span) -> dict[str, Any]:
    """The attributes as plain values."""
    plain: dict[str, Any] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        if kind == "array_value":
            value = [each.string_value for each in value.values]
        plain[one.key] = value
    return plain


async def trace_session(folder: Path) -> tuple[Collector, Sequence[Call]]:
    """Run a session of two calls; what a real collector received, and the recorded calls."""
    async with collect() as (collector, url):
        tracer = tracer_to(url)
        async with deploy(folder, tracer=tracer) as deployment:
            await deployment.run(script_task("t", TWICE))
            (path,) = (folder / "recordings").glob("t-0.*.rec")
            calls = recordings.read(path).calls
        await asyncio.to_thread(tracer.close)
    return collector, calls


async def test_a_session_is_one_trace(tmp_path: Path) -> None:
    """The root has the stages as its children, in order."""
    collector, _ = await trace_session(tmp_path)
    assert collector.resource["service.name"] == "tugline"
    assert collector.resource["service.instance.id"] == "here"
    assert len({span.trace_id for span in collector.spans}) == 1
    by_name = {span.name: span for span in collector.spans}
    root = by_name["rollout"]
    stages = [span for span in collector.spans if span.parent_span_id == root.span_id]
    stages.sort(key=lambda span: span.start_time_unix_nano)
    assert [values(span)["tugline.stage"] for span in stages] == (
        ["init", "ready", "run", "build", "eval"]
    )
    assert root.parent_span_id == b""
    (evaluation,) = by_name["eval"].events
    assert evaluation.name == "gen_ai.evaluation.result"


async def test_the_root_span_describes_the_session(tmp_path: Path) -> None:
    """The root has the session's id, node, status and recorded number of tokens."""
    collector, calls = await trace_session(tmp_path)
    (attributes,) = (values(span) for span in collector.spans if span.name == "rollout")
    assert attributes["tugline.session"] == attributes["gen_ai.conversation.id"] == "t-0"
    assert attributes["tugline.node"] == "here"
    assert attributes["tugline.status"] == "completed"
    assert attributes["tugline.tokens.sampled"] == sum(len(call.sampled_ids) for call in calls)


async def test_model_calls_are_spans_of_the_run(tmp_path: Path) -> None:
    """Each call has the conventional attributes, with the recorded counts.

    The attributes are one table, so that they are checked together.
    """
    collector, calls = await trace_session(tmp_path)
    (run,) = (span for span in collector.spans if span.name == "invoke_agent shell")
    chats = [span for span in collector.spans if span.parent_span_id == run.span_id]
    assert [span.name for span in chats] == ["chat scripted"] * 2
    assert all(span.kind == Span.SPAN_KIND_CLIENT for span in chats)
    for span, call in zip(chats, calls, strict=True):
        attributes = values(span)
        assert attributes["gen_ai.operation.name"] == "chat"
        assert attributes["gen_ai.provider.name"] == "embedded"
        assert attributes["gen_ai.usage.input_tokens"] == len(call.prompt_ids)
        assert attributes["gen_ai.usage.output_tokens"] == len(call.sampled_ids) > 0
        assert attributes["gen_ai.response.finish_reasons"] == ["stop"]
        assert attributes["gen_ai.request.temperature"] == 1.0
        assert attributes["gen_ai.response.time_to_first_chunk"] >= 0
        assert run.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= run.end_time_unix_nano


def failed_rollout() -> Rollout:
    """A session whose harness is missing."""
    failure = Failure(Boundary.HARNESS, "no such program")
    ended = {"status": Stage.FAILED, "traces": (), "ledger": Ledger(), "failure": failure}
    stages = [(Stage.INIT, 10.0), (Stage.READY, 11.0), (Stage.RUN, 12.0)]
    trajectory = Trajectory(session="t-0", task="t", sample=0, **ended)
    return Rollout(
        task=script_task("t"), session=SESSION, trajectory=trajectory, stages=stages, ended=15.0
    )


async def test_an_unreachable_collector_does_not_block() -> None:
    """Exporting returns at once, closing within its bound."""
    rollout = failed_rollout()
    before = set(threading.enumerate())  # threads of other tracers
    tracer = tracer_to("http://127.0.0.1:9")
    async with asyncio.timeout(10):
        for epoch in range(200):
            session = structs.replace(SESSION, epoch=epoch)
            await asyncio.to_thread(tracer.export, structs.replace(rollout, session=session))
        await asyncio.to_thread(tracer.close)
    # No thread of the tracer tries on.
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("Otel"):
            await asyncio.to_thread(thread.join, 5.0)
            assert not thread.is_alive()


async def test_errors_are_on_the_failed_stage() -> None:
    """The failed stage and the root have the error; earlier stages have none."""
    async with collect() as (collector, url):
        tracer = tracer_to(url)
        await asyncio.to_thread(tracer.export, failed_rollout())
        await asyncio.to_thread(tracer.close)
    spans = {
        span.name: (span.start_time_unix_nano, span.end_time_unix_nano, span.status.message)
        for span in collector.spans
    }
    second = 10**9
    assert spans == {
        "rollout": (10 * second, 15 * second, "no such program"),
        "init": (10 * second, 11 * second, ""),
        "ready": (11 * second, 12 * second, ""),
        "invoke_agent shell": (12 * second, 15 * second, "no such program"),
    }
    root = next(span for span in collector.spans if span.name == "rollout")
    assert values(root)["error.type"] == "harness"


def test_tracing_is_enabled_by_the_environment() -> None:
    """Without an address nothing is imported or sent; other protocols are refused."""
    assert open_tracer({}, node="n") is None
    environ = {ENDPOINTS[0]: "http://127.0.0.1:9"}
    assert open_tracer(environ | {"OTEL_SDK_DISABLED": "true"}, node="n") is None
    with pytest.raises(UsageError, match=r"'grpc', must be http/protobuf"):
        open_tracer(environ | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, node="n")


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised only if tracing is enabled."""
    monkeypatch.delitem(sys.modules, "tugline.node.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert open_tracer({}, node="n") is None
    with pytest.raises(UsageError, match=r"pip install 'tugline\[otel\]'"):
        tracer_to("http://127.0.0.1:9")
