"""Builders: their interface, the two built-in ones, and the ledgers of their traces.

A builder is a pure function from recorded calls to traces and a ledger. Builders differ only in how
they split sequences: all train the same sampled tokens in the same contexts. `PerRequest` is the
simplest builder and the reference for `PrefixMerging`; its cost is O(turns x tokens), that of
`PrefixMerging` O(tokens) (I7).

Every sampled token is trained, masked or dropped, with a reason (I2). All counts come from the
spans of traces, so a ledger cannot disagree with its traces. The ledger of a session is the sum of
its calls' ledgers, the ledger of a step the sum of its sessions'.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from tugline import plugins
from tugline.schema import PositiveInt
from tugline.traces.lineage import Answer, Chain, build_chains
from tugline.types import (
    Call,
    Distribution,
    Experts,
    Finish,
    Ids,
    Kept,
    Ledger,
    Mode,
    PluginSpec,
    Reason,
    Span,
    Trace,
    TraceKind,
    shared_prefix,
)


class Built(NamedTuple):
    """Traces and ledger of a session."""

    traces: tuple[Trace, ...]
    ledger: Ledger
    dropped: Mapping[int, Reason] = {}
    """Reason why tokens of a call are in no trace, by call number; `Reason.OVER_LENGTH` for calls
    not listed."""


@dataclass(kw_only=True, eq=False)
class Builder(ABC):
    """Base of builders, which turn a session's calls into traces and a balanced ledger."""

    max_length: PositiveInt | None = None
    """Maximum length of a trace in tokens; longer ones are truncated at the end."""
    train_side: bool = False
    """Whether answers of side calls (titles, routers, summaries) are trained like any other."""
    train_images: bool = False
    """Whether answers with an image in their context are trained, for trainers that read images."""

    @abstractmethod
    def build(self, calls: Sequence[Call]) -> Built:
        """Build traces of `calls`, given in any order. Pure: equal calls give equal traces.

        Raises `CaptureError` on a call without ids, logprobs or versions.
        """

    def _place_answers(self, chain: Chain) -> list[Answer]:
        """Return a chain's answers, masked by the options."""
        return chain.place_answers(train_side=self.train_side, train_images=self.train_images)


def make_builder(spec: PluginSpec) -> Builder:
    """Make the builder of `spec`. Raises `UsageError` for an unknown name or option."""
    return plugins.make("builder", spec, Builder)


# --------------------------------------------------------------------------- built in
class PerRequest(Builder):
    """Builder of one trace per model call, with the prompt as context and the answer trained.

    Traces are in the order of the calls; a trace's parent is that of the previous call.
    """

    def build(self, calls: Sequence[Call]) -> Built:
        """See `Builder.build`."""
        parts: list[_Part] = []
        for chain in build_chains(calls):
            previous = chain.forked_after
            for answer in self._place_answers(chain):
                parts.append(([answer], chain.kind, previous))
                previous = answer.call.number
        parts.sort(key=lambda part: part[0][0].call.number)
        return _build(calls, parts, self.max_length)


class PrefixMerging(Builder):
    """Builder of one trace per exact chain of calls, in the order of their first calls.

    The idea is Polar's (arXiv 2605.24220): calls whose prompts each begin with the previous prompt
    and answer are one sequence. Here it is applied strictly: ids are compared, never text, and a
    call that does not match starts a trace with its whole context. The copied context of a fork is
    not trained again: it has mask False, logprob 0 and no span.
    """

    def build(self, calls: Sequence[Call]) -> Built:
        """See `Builder.build`."""
        parts = [
            (self._place_answers(chain), chain.kind, chain.forked_after)
            for chain in build_chains(calls)
        ]
        return _build(calls, parts, self.max_length)


# --------------------------------------------------------------------------- traces
_Part = tuple[Sequence[Answer], TraceKind, int | None]
"""Answers of a trace, its kind, and the number of the call that it follows."""


def _build(calls: Sequence[Call], parts: Sequence[_Part], max_length: int | None) -> Built:
    """Make a trace of each part, with all ids of its last call."""
    index = {a.call.number: i for i, (answers, *_) in enumerate(parts) for a in answers}
    traces: list[Trace] = []
    for answers, kind, previous in parts:
        last = answers[-1].call
        ids = np.concatenate([last.prompt_ids, last.sampled_ids])
        parent = None if previous is None else index.get(previous)
        traces.append(make_trace(ids, answers, kind, parent, max_length, traces))
    return Built(tuple(traces), count_session(calls, traces))


def make_trace(
    ids: Ids,
    answers: Sequence[Answer],
    kind: TraceKind,
    parent: int | None,
    max_length: int | None,
    earlier: Sequence[Trace],
) -> Trace:
    """Make a trace of `ids` with `answers` as its spans; `parent` is an index of `earlier`.

    Other ids are context: mask False, logprob 0, no span. A trace longer than `max_length` is
    truncated there, or at the end of the last answer that begins before.
    """
    if max_length is not None:
        answers = [answer for answer in answers if answer.start < max_length] or answers[:1]
        ids = ids[: min(max_length, answers[-1].start + len(answers[-1].call.sampled_ids))]
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    spans: list[Span] = []
    for answer in answers:
        call, start = answer.call, answer.start
        logprobs[start : start + len(call.logprobs)] = call.logprobs[: max(0, len(ids) - start)]
        spans += _make_spans(answer, len(ids))
    for span in spans:
        mask[span.start : span.end] = span.masked is None
    last = answers[-1]
    known = [answer.call.experts for answer in answers if answer.call.experts is not None]
    experts = max(known, key=len)[: len(ids)] if known else None
    return Trace(
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        spans=tuple(spans),
        kind=kind,
        parent=parent,
        shared=0 if parent is None else _count_shared(earlier[parent], ids, experts, last.images),
        thread=answers[0].call.thread,
        thinking_retention=last.call.thinking_retention,
        images=last.images,
        experts=experts,
        kept=_join_kept(answers, len(ids)),
    )


def _make_spans(answer: Answer, length: int) -> list[Span]:
    """Return the spans of an answer in a trace of `length` tokens, divided by version and mask."""
    call, start = answer.call, answer.start
    distribution = find_distribution(call)
    marks = (is_malformed(call), call.finish is Finish.LENGTH, answer.repeats)
    spans = []
    for version in call.versions:
        at = version.start
        inside = [each for each in call.masked if each.start < version.end and each.end > at]
        parts = list[tuple[int, Reason | None]]()
        for span in () if answer.masked else inside:
            parts += [(max(at, span.start), None), (min(span.end, version.end), span.reason)]
        for end, reason in [*parts, (version.end, answer.masked)]:
            first, last = start + at, min(start + end, length)
            if first < last:
                sampled = (version.version, reason, distribution, call.engine)
                spans.append(Span(call.number, first, last, *sampled, *marks))
            at = max(at, end)
    return spans


def _join_kept(answers: Sequence[Answer], length: int) -> Kept | None:
    """Return the set of each token of a trace; None if no token has one."""
    known = [(answer.start, answer.call.kept) for answer in answers if answer.call.kept is not None]
    if not known:
        return None
    sizes = np.zeros(length, np.int32)
    ids = list[Ids]()
    for start, kept in known:
        used = kept[: max(0, length - start)]
        sizes[start : start + len(used)] = used.sizes
        ids.append(used.ids)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    return Kept(offsets, np.concatenate(ids))


_MARKUP = ("<tool_call", "<function=", "<|tool_call", "<minimax:tool_call", "[TOOL_CALLS]", "DSML")
"""Start markers of tool calls in the templates of open models."""


def is_malformed(call: Call) -> bool:
    """Whether an answer has a malformed tool call.

    It names no offered tool, its arguments are not a JSON object, or it was left unparsed in the
    text of an answer that could have called tools.
    """
    if call.malformed is not None:
        return True
    if call.answer is None or not call.tools:
        return False
    names = {tool.name for tool in call.tools}
    return any(mark in call.answer.content for mark in _MARKUP) or any(
        tool.name not in names or not _is_object(tool.arguments) for tool in call.answer.tool_calls
    )


def _is_object(arguments: str) -> bool:
    """Whether the text of a tool call's arguments is a JSON object; an empty one is."""
    try:
        return isinstance(msgspec.json.decode(arguments or "{}"), dict)
    except (msgspec.DecodeError, ValueError, RecursionError):  # ValueError: a lone surrogate
        return False


def find_distribution(call: Call) -> Distribution:
    """Return the distribution of the answer of `call`; None in its sampling is the default."""
    sampling = call.sampling
    default = Distribution()
    return Distribution(
        temperature=default.temperature if sampling.temperature is None else sampling.temperature,
        top_p=sampling.top_p or default.top_p,
        top_k=sampling.top_k or default.top_k,
        min_p=sampling.min_p or default.min_p,
        logprobs=call.logprob_meaning,
    )


def _count_shared(trace: Trace, ids: Ids, experts: Experts | None, images: tuple[str, ...]) -> int:
    """Return the number of leading tokens that a trace shares with `ids`, with the same experts.

    Image ids do not identify the image, so sequences with different images share no tokens.
    """
    n = min(len(trace.images), len(images))
    if trace.images[:n] != images[:n]:
        return 0
    shared = shared_prefix(trace.ids, ids)
    if trace.experts is None or experts is None:
        return shared
    same = shared_prefix(trace.experts, experts)
    return shared if same == min(len(trace.experts), len(experts)) else min(shared, same)


# --------------------------------------------------------------------------- ledgers
_NOTHING: Mapping[int, Reason] = {}


def count_calls(
    calls: Sequence[Call], traces: Iterable[Trace], dropped: Mapping[int, Reason] = _NOTHING
) -> dict[int, Ledger]:
    """Return a balanced ledger of each call's answer, by call number.

    Tokens that no span covers count as dropped for the reason in `dropped` (`Built.dropped`), by
    default `Reason.OVER_LENGTH`.
    """
    spans: dict[int, list[Span]] = {call.number: [] for call in calls}
    for trace in traces:
        for span in trace.spans:
            spans[span.call].append(span)
    ledgers: dict[int, Ledger] = {}
    for call in calls:
        counted = count_spans(spans[call.number])
        reason = dropped.get(call.number, Reason.OVER_LENGTH)
        text_only = call.stop is None or call.mode is Mode.TEXT
        lost = {
            reason: len(call.sampled_ids) - counted.sampled,
            Reason.NO_TOKEN_IDS if text_only else Reason.BEHIND_STOP: call.unreported_tokens,
        }
        ledgers[call.number] = msgspec.structs.replace(
            counted,
            sampled=len(call.sampled_ids) + call.unreported_tokens,
            dropped={reason: count for reason, count in lost.items() if count},
        )
    return ledgers


def count_spans(spans: Iterable[Span]) -> Ledger:
    """Return the ledger of a trace's sampled tokens; dropped tokens are in no trace."""
    counts: Counter[Reason | None] = Counter()
    for span in spans:
        counts[span.masked] += span.end - span.start
    masked = {reason: count for reason, count in counts.items() if reason is not None}
    return Ledger(sampled=counts.total(), trained=counts[None], masked=masked)


def sum_ledgers(ledgers: Iterable[Ledger]) -> Ledger:
    """Add up ledgers, omitting reasons without tokens; the sum balances if each ledger does."""
    sampled = trained = 0
    masked: Counter[Reason] = Counter()
    dropped: Counter[Reason] = Counter()
    for ledger in ledgers:
        sampled, trained = sampled + ledger.sampled, trained + ledger.trained
        masked.update(ledger.masked)
        dropped.update(ledger.dropped)
    return Ledger(sampled=sampled, trained=trained, masked=dict(+masked), dropped=dict(+dropped))


def leave_out(
    ledger: Ledger, *, masked: Mapping[Reason, int], dropped: Mapping[Reason, int]
) -> Ledger:
    """Move counts of trained tokens to `masked` and `dropped`, given by reason."""
    lost = sum(masked.values()) + sum(dropped.values())
    moved = Ledger(trained=-lost, masked=dict(masked), dropped=dict(dropped))
    return sum_ledgers([ledger, moved])


def count_session(
    calls: Sequence[Call], traces: Iterable[Trace], dropped: Mapping[int, Reason] = _NOTHING
) -> Ledger:
    """Return the ledger of all tokens sampled in a session."""
    return sum_ledgers(count_calls(calls, traces, dropped).values())
