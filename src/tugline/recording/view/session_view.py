"""Tell a recording: who ran, turn by turn what happened, and what is trained of it.

What is said here is measured on the ids wherever it can be: a turn is exact because its prompt
begins with its parent's ids, not because a record says so (I1). Every sampled token is in its
turn's ledger, and the turns' ledgers add up to the session's (I2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from tugline.errors import CaptureError, UsageError
from tugline.plugins import find
from tugline.recording.file import Recording
from tugline.recording.records import EventKind
from tugline.recording.view.story import (
    Detail,
    How,
    SessionView,
    TimelineEvent,
    Tokens,
    TraceView,
    Turn,
)
from tugline.traces.base import Builder
from tugline.traces.ledger import per_call
from tugline.types import Call, CallOutcome, Ledger, Mode, PluginSpec, Trace, shared_prefix


class Told(NamedTuple):
    """A story, and what it was told from."""

    story: SessionView
    calls: tuple[Call, ...]
    traces: tuple[Trace, ...]


def tell(path: Path, recording: Recording, builder: str | None = None) -> Told:
    """The story of a recording, with the traces of `builder` (by default the task's own)."""
    header = recording.header
    part = header.task.builder if header else PluginSpec("prefix_merging")
    if builder is not None and builder != part.name:
        part = PluginSpec(builder)
    calls = tuple(sorted(recording.calls, key=lambda call: call.number))
    traces, ledger, unbuilt = _build(part, calls)
    start = header.created if header else min((c.timings.received for c in calls), default=0.0)
    if header:
        header = replace(header, task=replace(header.task, files={}))
    story = SessionView(
        recording=str(path),
        damage=recording.damage,
        torn_bytes=recording.torn_bytes,
        started=start,
        header=header,
        result=recording.result,
        turns=_turns(calls, traces, start),
        events=tuple(
            TimelineEvent(
                kind=event.kind, at=event.at - start, call=event.call, detail=event.detail
            )
            for event in sorted(recording.events, key=lambda event: event.at)
            if event.kind is not EventKind.RESPONSE
        ),
        builder=part.name,
        unbuilt=unbuilt,
        traces=tuple(_view(index, one) for index, one in enumerate(traces)),
        ledger=ledger,
    )
    return Told(story, calls, traces)


def _build(part: PluginSpec, calls: Sequence[Call]) -> tuple[tuple[Trace, ...], Ledger, str]:
    """Traces, ledger, and why there are none: a session that cannot be built can be looked into."""
    try:
        maker: Builder = find("builder", part.name)(**part.options)
    except TypeError as error:
        msg = f"builder {part.name!r} does not take the options {part.options}: {error}"
        raise UsageError(msg) from error
    try:
        built = maker.build(calls)
    except CaptureError as error:
        return (
            (),
            Ledger(sampled=sum(len(c.sampled_ids) + c.unreported_tokens for c in calls)),
            str(error),
        )
    return built.traces, built.ledger, ""


# --------------------------------------------------------------------------- turns
def _turns(calls: Sequence[Call], traces: Sequence[Trace], start: float) -> tuple[Turn, ...]:
    known = {call.number: call for call in calls}
    accounts = per_call(calls, traces)
    home = {span.call: index for index, one in enumerate(traces) for span in one.spans}
    return tuple(
        _turn(
            call,
            None if call.parent is None else known.get(call.parent),
            trace=home.get(call.number),
            ledger=accounts[call.number],
            start=start,
        )
        for call in calls
    )


def _turn(
    call: Call, parent: Call | None, *, trace: int | None, ledger: Ledger, start: float
) -> Turn:
    times, answer = call.timings, call.answer
    reused = _reused(call, parent) if parent is not None else 0
    how, why = _how(call, parent, reused)
    return Turn(
        call=call.number,
        kind=call.kind,
        thread=call.thread,
        parent=call.parent,
        how=how,
        why=why,
        prompt=len(call.prompt_ids),
        reused=reused,
        sampled=len(call.sampled_ids) + call.unreported_tokens,
        mean_logprob=mean(call.logprobs.tolist()),
        finish=call.finish,
        stop=call.stop,
        outcome=call.outcome,
        versions=call.versions,
        at=times.received - start,
        first_token_s=None if times.first_token is None else times.first_token - times.received,
        total_s=None if times.last_token is None else times.last_token - times.received,
        tools=tuple(tool.name for tool in answer.tool_calls) if answer else (),
        images=sum(len(message.images) for message in call.messages),
        replicas=call.replicas,
        constrained=call.constrained,
        replayed=call.replayed,
        trace=trace,
        ledger=ledger,
    )


def mean(values: Sequence[float]) -> float | None:
    """Their mean; None of none, or of what is no number."""
    found = math.fsum(values) / len(values) if values else math.nan
    return found if math.isfinite(found) else None


def _reused(call: Call, parent: Call) -> int:
    shared = shared_prefix(parent.prompt_ids, call.prompt_ids)
    if shared < len(parent.prompt_ids):
        return shared
    return shared + shared_prefix(parent.sampled_ids, call.prompt_ids[shared:])


def _how(call: Call, parent: Call | None, reused: int) -> tuple[How, tuple[str, ...]]:
    if call.mode is Mode.TEXT:
        return How.TEXT, ()
    if call.parent is None:
        return How.FIRST, (call.branch.value,) if call.branch else ()
    if call.branch is not None:
        return How.FORKED, (call.branch.value,)
    if parent is None or reused < len(parent.prompt_ids) + len(parent.sampled_ids):
        gone = parent is not None and parent.outcome is CallOutcome.CLIENT_GONE
        return How.FORKED, ("broken_off" if gone else "unrecorded",)
    return (How.HEALED if call.echo_changes else How.EXACT), tuple(
        heal.value for heal in call.echo_changes
    )


def detailed(turn: Turn, call: Call) -> Turn:
    """`turn` with what was said in it."""
    detail = Detail(
        messages=call.messages,
        answer=call.answer,
        sampling=call.sampling,
        asked=call.requested,
        offered=tuple(tool.name for tool in call.tools),
    )
    return replace(turn, detail=detail)


# --------------------------------------------------------------------------- traces
def _view(index: int, one: Trace) -> TraceView:
    return TraceView(
        index=index,
        kind=one.kind,
        parent=one.parent,
        shared=one.shared,
        thread=one.thread,
        exact=one.exact,
        length=len(one.ids),
        trained=int(one.mask.sum()),
        spans=one.spans,
        images=one.images,
    )


def with_tokens(view: TraceView, trace: Trace) -> TraceView:
    """`view` with each token of its trace."""
    calls: list[int | None] = [None] * len(trace.ids)
    versions = calls.copy()
    logprobs: list[float | None] = [None] * len(trace.ids)
    for span in trace.spans:
        size = span.end - span.start
        calls[span.start : span.end] = [span.call] * size
        versions[span.start : span.end] = [span.version] * size
        found = trace.logprobs[span.start : span.end].astype(np.float64)
        logprobs[span.start : span.end] = found.tolist()
    tokens = Tokens(
        ids=trace.ids.tolist(),
        trained=trace.mask.tolist(),
        logprobs=logprobs,
        calls=calls,
        versions=versions,
    )
    return replace(view, tokens=tokens)


def as_json(told: Told, *, turn: int | None, full: bool) -> bytes:
    """The story as JSON: of one turn with what was said in it, or of all, with tokens if `full`."""
    story = told.story
    pairs = zip(story.turns, told.calls, strict=True)
    turns = [
        detailed(one, call) if full or turn is not None else one
        for one, call in pairs
        if turn in {None, one.call}
    ]
    traces = story.traces
    if full:
        traces = tuple(map(with_tokens, traces, told.traces))
    return msgspec.json.encode(replace(story, turns=tuple(turns), traces=traces))
