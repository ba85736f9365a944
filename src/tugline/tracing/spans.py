"""One session as a tree of spans: ``rollout``, its stages, and the model calls of its agent.

Pure functions from what a node knows when a session is over (its stages and the recorded
calls) to plain data. Names follow the GenAI conventions of OpenTelemetry, version 1.41; attributes
without a convention begin with ``tugline.``. Spans contain no text of prompts or answers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from tugline.types import Call, CallOutcome, Session, Status, Task, Trajectory

Value = str | bool | int | float | Sequence[str]
"""Type of an attribute."""

PARENT_TAG = "traceparent"
"""Tag of a task that names the span to link to, in the form of W3C Trace Context."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
_STAGES = (Status.INIT, Status.READY, Status.RUN, Status.BUILD, Status.EVAL)


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended."""

    task: Task
    session: Session
    trajectory: Trajectory
    stages: Sequence[tuple[Status, float]]
    """Stages in their order with their start (Unix seconds)."""
    ended: float
    calls: Sequence[Call] = ()
    node: str = ""
    model: str = ""
    """Its name at the engine."""


class SpanEvent(msgspec.Struct, frozen=True):
    """A moment within a span."""

    name: str
    at: float
    attributes: Mapping[str, Value] = {}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A span with its children. Times are Unix seconds."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Value]
    events: tuple[SpanEvent, ...] = ()
    children: tuple[Span, ...] = ()
    remote: bool = False
    """Whether the work was done by another process, such as an engine."""
    error: str | None = None
    """Why it failed; None if it did not."""


def make_trace_id(session: Session) -> int:
    """The trace id of an attempt, derived from session and epoch: 128 bits, never 0."""
    digest = hashlib.sha256(f"{session.id}.{session.epoch}".encode()).digest()
    return int.from_bytes(digest[:16], "big") or 1


def parse_link(task: Task) -> tuple[int, int] | None:
    """Ids of the trace and span in the task's `PARENT_TAG`; None without a valid one."""
    found = _TRACEPARENT.fullmatch(task.tags.get(PARENT_TAG, ""))
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return None
    return int(found[1], 16), int(found[2], 16)


def make_rollout_span(rollout: Rollout) -> Span:
    """The whole session, from INIT to its trajectory."""
    task, session, trajectory = rollout.task, rollout.session, rollout.trajectory
    ledger, reward, failure = trajectory.ledger, trajectory.reward, trajectory.failure
    starts = [(status, at) for status, at in rollout.stages if status in _STAGES]
    ends = [at for _, at in starts[1:]] + [rollout.ended]
    return Span(
        name="rollout",
        start=starts[0][1] if starts else rollout.ended,
        end=rollout.ended,
        attributes=_drop_empty(
            {
                "gen_ai.conversation.id": session.id,
                "tugline.task": task.id,
                "tugline.session": session.id,
                "tugline.sample": session.sample,
                "tugline.attempt": session.attempt,
                "tugline.epoch": session.epoch,
                "tugline.tenant": task.tenant,
                "tugline.node": rollout.node,
                "tugline.status": trajectory.status.value,
                "tugline.reward": None if reward is None else reward.value,
                "tugline.tokens.sampled": ledger.sampled,
                "tugline.tokens.trained": ledger.trained,
                "tugline.calls": len(rollout.calls),
                "error.type": None if failure is None else failure.boundary.value,
            }
        ),
        children=tuple(
            _make_stage_span(rollout, status, start, max(start, end))
            for (status, start), end in zip(starts, ends, strict=False)
        ),
        error=None if failure is None else failure.message,
    )


def _make_stage_span(rollout: Rollout, status: Status, start: float, end: float) -> Span:
    """A stage; RUN has the conventional name of an agent's work, and the calls as children."""
    attributes: dict[str, Value | None] = {"tugline.stage": status.value}
    name = status.value
    events: tuple[SpanEvent, ...] = ()
    children: tuple[Span, ...] = ()
    if status is Status.RUN:
        agent = rollout.task.harness.name
        name = f"invoke_agent {agent}"
        attributes |= {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": next((call.engine for call in rollout.calls), None),
            "gen_ai.agent.name": agent,
            "gen_ai.conversation.id": rollout.session.id,
            "gen_ai.request.model": rollout.model,
        }
        children = tuple(_make_call_span(call, rollout.model) for call in rollout.calls)
    reward = rollout.trajectory.reward
    if status is Status.EVAL and reward is not None:
        score: dict[str, Value] = {
            "gen_ai.evaluation.name": rollout.task.evaluator.name,
            "gen_ai.evaluation.score.value": reward.value,
        }
        events = (SpanEvent("gen_ai.evaluation.result", end, score),)
    failure = rollout.trajectory.failure
    failed_here = failure is not None and status is rollout.stages[-1][0]
    return Span(
        name=name,
        start=start,
        end=end,
        attributes=_drop_empty(attributes),
        events=events,
        children=children,
        error=failure.message if failed_here and failure is not None else None,
    )


def _make_call_span(call: Call, model: str) -> Span:
    """A model call, from its arrival at the gateway to its last token."""
    times, sampling = call.timings, call.sampling
    first, last = times.first_token, times.last_token
    address = urlsplit(call.replicas[-1]) if call.replicas else None
    incomplete = call.outcome is not CallOutcome.COMPLETE
    return Span(
        name=f"chat {model}".rstrip(),
        start=times.received,
        end=max(times.received, last or times.sent or times.received),
        attributes=_drop_empty(
            {
                "gen_ai.operation.name": "chat",
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
                "error.type": call.outcome.value if incomplete else None,
                "tugline.call": call.number,
                "tugline.parent": call.parent,
                "tugline.branch": None if call.branch is None else call.branch.value,
                "tugline.kind": call.kind.value,
                "tugline.mode": call.mode.value,
                "tugline.dialect": call.dialect,
                "tugline.replayed": call.replayed or None,
                "tugline.versions": tuple(str(one.version) for one in call.versions) or None,
            }
        ),
        events=() if first is None else (SpanEvent("first token", first),),
        remote=True,
        error=call.outcome.value if incomplete else None,
    )


def _drop_empty(values: Mapping[str, Value | None]) -> dict[str, Value]:
    return {key: value for key, value in values.items() if value is not None and value != ""}
