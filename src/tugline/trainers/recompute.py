"""Captured log probabilities recomputed by a model's own forward pass, for `tugline verify`.

The forward pass is that of training: it takes the recorded experts and kept sets. A second one
leaves the experts to the model's routers, which shows what replaying them is worth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tugline.errors import UsageError
from tugline.inference.load import load
from tugline.recording.file import Recording
from tugline.recording.verify.session import (
    SessionReport,
    VerifyCheck,
    VerifyVerdict,
    compare_logprobs,
)
from tugline.traces.base import make_builder
from tugline.trainers.grpo.batch import MicroBatch, Row
from tugline.trainers.grpo.config import UpdateConfig
from tugline.trainers.grpo.forward import PolicyModel
from tugline.trainers.grpo.packing import pack
from tugline.trainers.grpo.samples import read_spans, select_experts
from tugline.types import Call, Logprobs, PluginSpec, Sample, Trace


class Recomputed(NamedTuple):
    """Log probabilities of each call's sampled tokens, by call number; NaN where not computed."""

    logprobs: dict[int, Logprobs]
    own_experts: dict[int, Logprobs]
    """Those with the experts that the model's routers choose; empty without recorded experts."""
    experts_changed: list[float]
    """Share of tokens whose routers choose other experts than the recorded ones, by layer."""


class Recomputer:
    """A model that recomputes the trained tokens of sessions, in float32."""

    def __init__(self, folder: Path) -> None:
        """Load the model in `folder`. Raises `UsageError`."""
        if not folder.is_dir():
            raise UsageError(f"--model {folder} must be a folder with a model in the hub's format")
        model = load(folder, dtype=torch.float32)[0]
        self._policy = PolicyModel(model, UpdateConfig())

    @torch.no_grad()
    def compute(self, traces: Sequence[Trace], calls: Sequence[Call]) -> Recomputed:
        """Recompute the trained tokens of a session; experts of another model are left out."""
        routes = self._policy.routes
        shape = routes.shape if routes.routers else None
        samples = [_make_sample(select_experts(trace, shape)) for trace in traces]
        chosen = [number for number, sample in enumerate(samples) if sample.loss_mask.any()]
        rows = [Row(samples[number]) for number in chosen]
        order = {id(row.sample): number for row, number in zip(rows, chosen, strict=True)}
        result = Recomputed(_make_empty(calls), _make_empty(calls), [])
        starts = {call.number: len(call.prompt_ids) for call in calls}
        routed = any(sample.experts is not None for sample in samples)
        for micro in pack(rows, self._policy.config, self._policy.device, self._policy.costs):
            for own in (False, True) if routed else (False,):
                passed = replace(micro, experts=None) if own else micro
                values = self._policy.logprobs(passed)
                if not own:
                    routes.compare(micro.experts)
                into = result.own_experts if own else result.logprobs
                for sample, part in _split(values, micro):
                    trace = traces[order[id(sample)]]
                    _fill(into, trace, np.flatnonzero(sample.loss_mask), part, starts)
        if not routed:
            result.own_experts.clear()
            return result
        return result._replace(experts_changed=routes.take_shares(self._policy.device) or [])


def _make_sample(trace: Trace) -> Sample:
    """Return a sample of the tokens of a trace whose log probabilities can be recomputed."""
    versions, temperatures = read_spans(trace)
    mask = trace.mask & (temperatures > 0)
    return Sample(
        input_ids=trace.ids,
        loss_mask=mask,
        logprobs=trace.logprobs,
        versions=versions,
        advantages=np.zeros_like(trace.logprobs),
        temperatures=temperatures,
        group="",
        session="",
        experts=trace.experts,
        kept=trace.kept,
    )


def _make_empty(calls: Sequence[Call]) -> dict[int, Logprobs]:
    return {call.number: np.full(len(call.sampled_ids), np.nan, np.float32) for call in calls}


def _split(values: torch.Tensor, micro: MicroBatch) -> Iterator[tuple[Sample, Logprobs]]:
    parts = torch.split(values.cpu(), micro.counts)
    for row, part in zip(micro.rows, parts, strict=True):
        yield row.sample, part.numpy()


def _fill(
    into: dict[int, Logprobs],
    trace: Trace,
    positions: np.ndarray,
    values: Logprobs,
    starts: dict[int, int],
) -> None:
    """Write the values of a trace's tokens at `positions` to their calls."""
    for span in trace.spans:
        inside = (positions >= span.start) & (positions < span.end)
        into[span.call][positions[inside] - starts[span.call]] = values[inside]


def verify_with_model(
    report: SessionReport,
    recording: Recording,
    recomputer: Recomputer,
    tolerance: float,
    version: int | None = None,
) -> None:
    """Recompute the trained tokens of a session and add the check ``model`` to its report.

    `version` is that of the model's weights: calls sampled under others are not compared. None
    compares all.
    """
    if report.checks["numbers"].verdict is VerifyVerdict.FAIL:
        detail = "the recorded numbers are not valid"
        report.checks["model"] = VerifyCheck(VerifyVerdict.UNCHECKED, detail)
        return
    calls = recording.calls
    spec = recording.header.task.builder if recording.header else PluginSpec("prefix_merging")
    result = recomputer.compute(make_builder(spec).build(calls).traces, calls)
    reasons = {call.number: _name_other_version(call, version) for call in calls}
    check = compare_logprobs(report, calls, result.logprobs, reasons, tolerance)
    report.experts_changed = result.experts_changed
    distances = list[Logprobs]()
    by_number = {call.number: call for call in calls}
    for turn in report.turns:
        if turn.call not in result.own_experts or reasons[turn.call]:
            continue
        apart = np.abs(by_number[turn.call].logprobs - result.own_experts[turn.call])
        apart = apart[np.isfinite(apart)]
        if len(apart):
            distances.append(apart)
            turn.own_experts_max_dlogprob = float(apart.max())
            turn.own_experts_mean_dlogprob = float(apart.mean())
    if distances:
        apart = np.concatenate(distances)
        worst = int(np.argmax(result.experts_changed))
        detail = (
            f"{check.detail}; with the model's own experts: max {apart.max():.2g}, mean "
            f"{apart.mean():.2g}, {result.experts_changed[worst]:.1%} others in layer {worst}"
        )
        check = VerifyCheck(check.verdict, detail)
    report.checks["model"] = check


def _name_other_version(call: Call, version: int | None) -> str:
    others = sorted({span.version for span in call.versions} - {version})
    if version is None or not others:
        return ""
    names = ", ".join(map(str, others))
    return f"sampled under weights of version {names}, but the model has version {version}"
