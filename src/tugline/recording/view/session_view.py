"""View model of a recorded session: its header, turns, traces and ledger.

The terminal, the HTML page and ``--json`` all show one `SessionView`, so they agree; its fields are
the documented JSON format (`docs/format.md`). Continuations are computed from the ids (I1). Every
sampled token is in its turn's ledger, and the turns' ledgers add up to the session's (I2).
"""

import codecs
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from tugline.chat.tokenizer import Tokenizer
from tugline.errors import CaptureError
from tugline.recording.file import Recording
from tugline.recording.patches import read_diff
from tugline.recording.records import Header, RecordedEvent, RecordedResult
from tugline.schema import copy_fields
from tugline.traces.base import Built, count_calls, make_builder
from tugline.traces.lineage import Continuation, trace_lineage
from tugline.types import (
    Call,
    CallOutcome,
    Finish,
    Ledger,
    Message,
    PluginSpec,
    Sampling,
    Span,
    Trace,
    TraceKind,
    VersionSpan,
)


class TurnDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of a turn; present only in the turn of ``--turn``."""

    messages: tuple[Message, ...]
    """Messages that the request added to its parent's conversation; all messages in a first or
    forked turn."""
    answer: Message | None
    """The answer that the harness received; null if it received none."""
    sampling: Sampling
    requested: Sampling
    """Sampling parameters that the harness requested."""
    offered: tuple[str, ...]
    """Names of the tools that the model could call."""


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """A model call. Times are in seconds, `at` since the session's start; null: never reached."""

    call: int
    kind: TraceKind
    thread: str | None
    parent: int | None
    continuation: Continuation
    reasons: tuple[str, ...]
    """Echo changes, or reasons why the turn forks or is broken (`tugline.traces.lineage`)."""
    prompt: int
    shared: int
    """Leading prompt ids shared with the parent's prompt and answer."""
    sampled: int
    mean_logprob: float | None
    finish: Finish
    stop: str | None
    outcome: CallOutcome
    versions: tuple[VersionSpan, ...]
    at: float
    first_token_s: float | None
    total_s: float | None
    tools: tuple[str, ...]
    """Names of the tools that the answer calls, in order."""
    images: int
    replicas: tuple[str, ...]
    constrained: bool
    """Whether a grammar or a ban constrained the answer."""
    replayed: bool
    """Whether the answer comes from another session's recording."""
    trace: int | None
    """Index of the trace with the answer; null if there is none."""
    ledger: Ledger
    detail: TurnDetail | UnsetType = UNSET


class TraceView(msgspec.Struct, frozen=True, kw_only=True):
    """A trace."""

    index: int
    kind: TraceKind
    parent: int | None
    shared: int
    """Leading ids shared with the parent."""
    thread: str | None
    exact: bool
    length: int
    trained: int
    spans: tuple[Span, ...]
    """Sampled tokens; all others are context."""
    images: tuple[str, ...]


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """View of a session."""

    recording: str
    """Path of the recording."""
    damage: str
    """Reason why the rest of the file could not be read; empty if all of it was."""
    torn_bytes: int
    """Length of a torn tail."""
    started: float
    """Start in Unix seconds; the times of turns and events are relative to it."""
    header: Header | None
    """The recorded header, without the task's files; null if the first record is lost."""
    result: RecordedResult | None
    """The recorded result; null if there is none yet."""
    diff: str
    """What the agent changed, as a unified diff, or a comment with the reason why there is none."""
    turns: tuple[TurnView, ...]
    events: tuple[RecordedEvent, ...]
    """Events other than calls, with `at` in seconds since the start."""
    builder: str
    build_error: str
    """Reason why there are no traces; empty if they were built."""
    traces: tuple[TraceView, ...]
    ledger: Ledger


class ViewedSession(NamedTuple):
    """A session's view, with the calls and traces from which it was made."""

    view: SessionView
    calls: tuple[Call, ...]
    traces: tuple[Trace, ...]


def view_session(path: Path, recording: Recording, builder: str | None = None) -> ViewedSession:
    """Make the view of a recording, with traces of `builder` (by default the task's own)."""
    header = recording.header
    spec = header.task.builder if header else PluginSpec("prefix_merging")
    if builder is not None and builder != spec.name:
        spec = PluginSpec(builder)
    calls = tuple(sorted(recording.calls, key=lambda call: call.number))
    built, build_error = _build(spec, calls)
    diff = read_diff(path, header, recording.result)
    start = header.created if header else min((c.timings.received for c in calls), default=0.0)
    if header:
        header = replace(header, task=replace(header.task, files={}))
    view = copy_fields(
        SessionView,
        recording,
        recording=str(path),
        diff=diff,
        started=start,
        header=header,
        turns=_view_turns(calls, built, start),
        events=tuple(
            replace(event, at=event.at - start)
            for event in sorted(recording.events, key=lambda event: event.at)
        ),
        builder=spec.name,
        build_error=build_error,
        traces=tuple(_view_trace(index, trace) for index, trace in enumerate(built.traces)),
        ledger=built.ledger,
    )
    return ViewedSession(view, calls, built.traces)


def _build(spec: PluginSpec, calls: Sequence[Call]) -> tuple[Built, str]:
    """Build the traces; on failure, return no traces and an error text."""
    try:
        return make_builder(spec).build(calls), ""
    except CaptureError as error:
        sampled = sum(len(call.sampled_ids) + call.unreported_tokens for call in calls)
        return Built((), Ledger(sampled=sampled)), str(error)


# --------------------------------------------------------------------------- turns
def _view_turns(calls: Sequence[Call], built: Built, start: float) -> tuple[TurnView, ...]:
    known = {call.number: call for call in calls}
    ledgers = count_calls(calls, built.traces, built.dropped)
    trace_of = {span.call: i for i, trace in enumerate(built.traces) for span in trace.spans}
    turns: list[TurnView] = []
    for call in calls:
        parent = None if call.parent is None else known.get(call.parent)
        continuation, shared, reasons = trace_lineage(call, parent)
        times, answer = call.timings, call.answer
        first, last = times.first_token, times.last_token
        turn = copy_fields(
            TurnView,
            call,
            call=call.number,
            continuation=continuation,
            reasons=reasons,
            prompt=len(call.prompt_ids),
            shared=shared,
            sampled=len(call.sampled_ids) + call.unreported_tokens,
            mean_logprob=_finite_mean(call.logprobs.tolist()),
            at=times.received - start,
            first_token_s=None if first is None else first - times.received,
            total_s=None if last is None else last - times.received,
            tools=tuple(tool.name for tool in answer.tool_calls) if answer else (),
            images=sum(len(message.images) for message in call.messages),
            trace=trace_of.get(call.number),
            ledger=ledgers[call.number],
        )
        turns.append(turn)
    return tuple(turns)


def _finite_mean(values: Sequence[float]) -> float | None:
    """Return the mean; None if there are no values or it is not finite."""
    mean = math.fsum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def add_detail(turn: TurnView, call: Call) -> TurnView:
    """Return `turn` with its detail."""
    offered = tuple(tool.name for tool in call.tools)
    return replace(turn, detail=copy_fields(TurnDetail, call, offered=offered))


# --------------------------------------------------------------------------- traces
def _view_trace(index: int, trace: Trace) -> TraceView:
    trained = int(trace.mask.sum())
    return copy_fields(TraceView, trace, index=index, length=len(trace.ids), trained=trained)


def encode_json(session: ViewedSession, turn: int | None) -> bytes:
    """Encode the view: all turns, or one with its messages."""
    view = session.view
    if turn is not None:
        pairs = zip(view.turns, session.calls, strict=True)
        turns = tuple(add_detail(*pair) for pair in pairs if pair[0].call == turn)
        view = replace(view, turns=turns)
    return msgspec.json.encode(view)


def split_runs(trace: Trace) -> Iterator[tuple[int, int, Span | None]]:
    """Yield start, end and span of each run of tokens; None between spans."""
    at = 0
    for span in trace.spans:
        if at < span.start:
            yield at, span.start, None
        yield span.start, span.end, span
        at = span.end
    if at < len(trace.ids):
        yield at, len(trace.ids), None


# --------------------------------------------------------------------------- tokens as text


class TokenText:
    """Decoder of single token ids to text; without a tokenizer, an id's text is its number.

    If a character is split over several tokens, the last one has it and the others are empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

        self.spell = functools.cache(self._spell)
        """Return the bytes of a token."""

    def _spell(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return f"{token} ".encode()
        if tokenizer.token_bytes is not None:
            return tokenizer.token_bytes[token]
        # this tokenizer drops the space before the first token, so decode the second of two
        return tokenizer.decode([token, token])[len(tokenizer.decode([token])) :].encode()

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the text that each token adds; joined, the pieces are the whole text."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(self.spell(token)) for token in ids]
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces


def fold_range(size: int, head: int, tail: int) -> tuple[int, int]:
    """Return the range ``[start, end)`` of `size` items to fold; empty if folding saves little."""
    return (size, size) if size <= head + tail + 8 else (head, size - tail)
