"""Builders: their contract, the two built-in ones, traces of placed answers, and their ledgers.

A builder is a pure function from recorded calls to traces and a ledger. Builders differ only in
how they cut sequences: each trains the same sampled tokens, each in the same context. `PerRequest`
is the simplest reading of a session, and the reference for the other; it costs O(turns x tokens),
`PrefixMerging` O(tokens) (I7).

Every sampled token ends up trained, masked or dropped, with a reason (I2). All counts come from the
spans of traces, so a ledger cannot disagree with its traces. The ledger of a session is the sum of
its calls', that of a step the sum of its sessions'.
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
from tugline.traces.lineage import Answer, build_chains
from tugline.types import (
    Call,
    Distribution,
    Ids,
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
    """The traces of a session and its ledger."""

    traces: tuple[Trace, ...]
    ledger: Ledger
    dropped: Mapping[int, Reason] = {}
    """Why tokens of a call are in no trace, by the call's number; `Reason.OVER_LENGTH` for calls
    that are not listed."""


@dataclass(kw_only=True, eq=False)
class Builder(ABC):
    """Turns the recorded calls of one session into traces and a balanced ledger."""

    max_length: PositiveInt | None = None
    """The longest trace in tokens; of a longer one the exact beginning is kept."""
    train_side: bool = False
    """Train the answers of side calls (titles, routers, summaries) like any other."""

    @abstractmethod
    def build(self, calls: Sequence[Call]) -> Built:
        """Build traces of `calls`, which may be in any order. Pure: equal calls, equal traces.

        Raises `CaptureError` on a call that lacks ids, logprobs or versions.
        """


def make_builder(spec: PluginSpec) -> Builder:
    """Make the builder that a task names. Raises `UsageError` for an unknown name or option."""
    return plugins.make("builder", spec, Builder)


# --------------------------------------------------------------------------- built in
class PerRequest(Builder):
    """One trace per model call: its prompt as context, its answer to train on.

    Traces are in the order of the calls; a trace's parent is that of the call before.
    """

    def build(self, calls: Sequence[Call]) -> Built:
        """Give every call a trace of its own."""
        parts: list[_Part] = []
        for chain in build_chains(calls):
            previous = chain.forked_after
            for answer in chain.place_answers(train_side=self.train_side):
                parts.append(([answer], chain.kind, previous))
                previous = answer.call.number
        parts.sort(key=lambda part: part[0][0].call.number)
        return _build(calls, parts, self.max_length)


class PrefixMerging(Builder):
    """One trace per exact chain of calls, in the order of their first calls.

    The idea is Polar's (arXiv 2605.24220): calls whose prompts each begin with the prompt and
    answer before are one sequence. Here it is applied strictly: ids are compared, never text, and
    a call that does not fit forks into a trace of its own with its whole context. The copied
    context of a fork is not trained a second time: it has mask False, logprob 0 and no span.
    """

    def build(self, calls: Sequence[Call]) -> Built:
        """Give every chain of calls a trace."""
        parts = [
            (chain.place_answers(train_side=self.train_side), chain.kind, chain.forked_after)
            for chain in build_chains(calls)
        ]
        return _build(calls, parts, self.max_length)


# --------------------------------------------------------------------------- a trace
_Part = tuple[Sequence[Answer], TraceKind, int | None]
"""Answers of one trace, its kind, and the number of the call that it follows."""


def _build(calls: Sequence[Call], parts: Sequence[_Part], max_length: int | None) -> Built:
    """Make a trace of each part, with all ids of its last call."""
    index = {one.call.number: i for i, (answers, *_) in enumerate(parts) for one in answers}
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
    """Make one trace of `ids` with `answers` as its spans; `parent` is an index in `earlier`.

    All other ids are context: mask False, logprob 0, no span. Of more than `max_length` tokens the
    beginning is kept, up to the last answer that begins in it.
    """
    if max_length is not None:
        answers = [one for one in answers if one.start < max_length] or answers[:1]
        ids = ids[: min(max_length, answers[-1].start + len(answers[-1].call.sampled_ids))]
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    spans: list[Span] = []
    for call, start, masked, _ in answers:
        room = max(0, len(ids) - start)
        sampled = (masked, find_distribution(call), call.engine)
        logprobs[start : start + len(call.logprobs)] = call.logprobs[:room]
        mask[start : start + len(call.sampled_ids)] = masked is None
        spans += [
            Span(call.number, start + v.start, min(start + v.end, len(ids)), v.version, *sampled)
            for v in call.versions
            if v.start < min(v.end, room)
        ]
    last = answers[-1]
    return Trace(
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        spans=tuple(spans),
        kind=kind,
        parent=parent,
        shared=0 if parent is None else count_shared_tokens(earlier[parent], ids, last.images),
        thread=answers[0].call.thread,
        thinking_retention=last.call.thinking_retention,
        images=last.images,
    )


def find_distribution(call: Call) -> Distribution:
    """Return what the answer of `call` was sampled from; None in its sampling is the default."""
    sampling, default = call.sampling, Distribution()
    return Distribution(
        temperature=default.temperature if sampling.temperature is None else sampling.temperature,
        top_p=sampling.top_p or default.top_p,
        top_k=sampling.top_k or default.top_k,
        logprobs=call.logprob_meaning,
    )


def count_shared_tokens(trace: Trace, ids: Ids, images: tuple[str, ...]) -> int:
    """Return how many leading tokens a trace has in common with `ids` and their `images`.

    An id does not say which image it stands for, so sequences with different images share none.
    """
    n = min(len(trace.images), len(images))
    return shared_prefix(trace.ids, ids) if trace.images[:n] == images[:n] else 0


# --------------------------------------------------------------------------- ledgers
_NOTHING: Mapping[int, Reason] = {}


def count_calls(
    calls: Sequence[Call], traces: Iterable[Trace], dropped: Mapping[int, Reason] = _NOTHING
) -> dict[int, Ledger]:
    """Account for the answer of each call, by the call's number; each ledger balances.

    Tokens that no span covers were dropped for the reason in `dropped` (`Built.dropped`), by
    default for exceeding the maximum length.
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
    """Account for the sampled tokens of a trace; dropped tokens are in no trace."""
    counts: Counter[Reason | None] = Counter()
    for span in spans:
        counts[span.masked] += span.end - span.start
    masked = {reason: count for reason, count in counts.items() if reason is not None}
    return Ledger(sampled=counts.total(), trained=counts[None], masked=masked)


def sum_ledgers(ledgers: Iterable[Ledger]) -> Ledger:
    """Add up ledgers, without reasons of no tokens; the sum balances if each of them does."""
    sampled = trained = 0
    masked: Counter[Reason] = Counter()
    dropped: Counter[Reason] = Counter()
    for one in ledgers:
        sampled, trained = sampled + one.sampled, trained + one.trained
        masked.update(one.masked)
        dropped.update(one.dropped)
    return Ledger(sampled=sampled, trained=trained, masked=dict(+masked), dropped=dict(+dropped))


def leave_out(
    ledger: Ledger, *, masked: Mapping[Reason, int], dropped: Mapping[Reason, int]
) -> Ledger:
    """Count trained tokens as masked or dropped instead, so many by reason."""
    lost = sum(masked.values()) + sum(dropped.values())
    moved = Ledger(trained=-lost, masked=dict(masked), dropped=dict(dropped))
    return sum_ledgers([ledger, moved])


def count_session(
    calls: Sequence[Call], traces: Iterable[Trace], dropped: Mapping[int, Reason] = _NOTHING
) -> Ledger:
    """Account for every token that was sampled in a session."""
    return sum_ledgers(count_calls(calls, traces, dropped).values())
