"""Conversion of trajectories to samples with an advantage at each token (numpy only).

`prepare` computes the advantage of every token and updates the ledger, so that over a whole step
sampled = trained + masked + dropped (I2). Trajectories rebuilt from recordings give equal samples.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from tugline import log
from tugline.errors import CaptureError, ConfigError
from tugline.traces.base import leave_out, sum_ledgers
from tugline.trainers.grpo.advantage import CallAdvantages, grade, token_advantages, whiten
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.shaping import NO_PENALTIES, is_cut_off, mask_special
from tugline.types import (
    Experts,
    Ids,
    Kept,
    Ledger,
    Logprobs,
    Mask,
    Reason,
    Sample,
    Trace,
    Trajectory,
    shared_prefix,
)

_log = log.get("trainer")
NO_ADVANTAGES: CallAdvantages = {}


class RouterShape(NamedTuple):
    """Size of the routers of a model."""

    layers: int
    """Number of layers with a router."""
    experts: int
    top_k: int
    places: tuple[int, ...] = ()
    """Numbers of these layers among all `depth` layers of the model."""
    depth: int = 0

    def select(self, experts: Experts) -> Experts | None:
        """Return the experts of the layers with a router; None if they are not of this model.

        Engines may report all layers of the model, with zeros where there are no experts.
        """
        if experts.shape[1] == self.depth != self.layers:
            experts = experts[:, self.places]
        if experts.shape[1:] != (self.layers, self.top_k) or experts.max(initial=0) >= self.experts:
            return None
        ordered = np.sort(experts, axis=2)
        repeated = (ordered[:, :, 1:] == ordered[:, :, :-1]).any()
        return None if repeated else experts

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.experts} experts, {self.top_k} for each token"


def prepare(
    trajectories: Sequence[Trajectory],
    config: GrpoConfig,
    *,
    version: int,
    routers: RouterShape | None = None,
    penalties: Mapping[str, float] = NO_PENALTIES,
) -> tuple[list[Sample], Ledger]:
    """Return a sample for each trace with trained tokens, and the ledger of all sessions.

    Advantages are relative to the sessions of the same task. Sessions without a finite reward are
    dropped as SESSION_FAILED and count in no mean. `version` is the policy version about to be
    updated, from which staleness is measured. `routers` are those of a model that replays experts;
    without, samples have none. `penalties` are subtracted from the rewards of sessions.

    Experts that the model does not have are left out, and the tokens that need them. Raises
    `ConfigError` if experts are replayed and no session has any of this model.
    """
    if routers is not None:
        trajectories = _select_experts(trajectories, routers)
    routed = routers is not None
    masked = Counter[Reason]()
    dropped = Counter[Reason]()
    samples: list[Sample] = []
    ordered = sorted(trajectories, key=lambda each: (each.task, each.sample, each.session))
    for _, members in groupby(ordered, key=lambda trajectory: trajectory.task):
        group = list(members)
        graded, signal = grade(group, config, penalties)
        for trajectory in group:
            _check_ledger(trajectory)
            if trajectory.session not in graded:
                dropped[Reason.SESSION_FAILED] += trajectory.ledger.trained
            elif config.truncated == "mask" and is_cut_off(trajectory):
                dropped[Reason.TRUNCATED] += trajectory.ledger.trained
            elif not signal:
                dropped[Reason.NO_SIGNAL] += trajectory.ledger.trained
            else:
                advantages = graded[trajectory.session]
                made = _samples(trajectory, advantages, config, version, masked, routed=routed)
                samples += made if routed else [replace(each, experts=None) for each in made]
    if config.advantage == "reinforce_plus_plus" and samples:
        samples = _whiten(samples)
    ledger = sum_ledgers(trajectory.ledger for trajectory in trajectories)
    return samples, leave_out(ledger, masked=masked, dropped=dropped)


def _whiten(samples: Sequence[Sample]) -> list[Sample]:
    """Scale the advantages of all trained tokens, see `whiten`."""
    parts = [sample.advantages[sample.loss_mask] for sample in samples]
    whole = whiten(np.concatenate(parts).astype(np.float64)).astype(np.float32)
    ends = np.cumsum([len(part) for part in parts])[:-1]
    whitened = []
    for sample, part in zip(samples, np.split(whole, ends), strict=True):
        advantages = sample.advantages.copy()
        advantages[sample.loss_mask] = part
        whitened.append(replace(sample, advantages=advantages))
    return whitened


def list_samples(
    trajectories: Sequence[Trajectory],
    config: GrpoConfig,
    *,
    version: int,
    routers: RouterShape | None = None,
) -> list[Sample]:
    """Return the samples of all sessions with a finite reward, with advantages of 0.

    Those of `prepare` are among them. Raises `ConfigError` as `prepare` does.
    """
    if routers is not None:
        trajectories = _select_experts(trajectories, routers)
    routed = routers is not None
    samples: list[Sample] = []
    for trajectory in trajectories:
        if trajectory.reward is None or not math.isfinite(trajectory.reward.value):
            continue
        zeros = [NO_ADVANTAGES] * len(trajectory.traces)
        made = _samples(trajectory, zeros, config, version, Counter(), routed=routed)
        samples += made if routed else [replace(each, experts=None) for each in made]
    return samples


def list_tool_tokens(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples whose targets are the tokens between a trace's answers, for cross entropy.

    A token of several traces of a session is a target in the first of them only.
    """
    chosen: list[Sample] = []
    earlier: defaultdict[str, list[Ids]] = defaultdict(list)
    for sample in samples:
        ids = sample.input_ids
        others = earlier[sample.session]
        known = max((shared_prefix(ids, other) for other in others), default=0)
        others.append(ids)
        sampled = sample.versions >= 0
        between = ~sampled & (np.cumsum(sampled) > 0) & (np.cumsum(sampled) < sampled.sum())
        mask = between & (np.arange(len(ids)) >= known)
        if sample.experts is not None:
            mask &= np.arange(len(ids)) <= len(sample.experts)
        if mask.any():
            chosen.append(replace(sample, loss_mask=mask, kept=None))
    return chosen


def read_group(group: Sequence[Trajectory], config: GrpoConfig) -> Iterator[Sample]:
    """Yield the samples of one task's sessions with a finite reward, for any trainer.

    No sample is left out because of its reward or age; without a signal, all advantages are 0.
    """
    graded, _ = grade(group, config)
    for trajectory in group:
        if trajectory.session in graded:
            advantages = graded[trajectory.session]
            yield from _samples(trajectory, advantages, config, 0, Counter())


def _check_ledger(trajectory: Trajectory) -> None:
    """Check a session's own ledger against its traces. Raises `CaptureError`."""
    ledger = trajectory.ledger
    in_traces = sum(trace.trained for trace in trajectory.traces)
    if not ledger.balanced or ledger.trained != in_traces:
        raise CaptureError(
            f"session {trajectory.session}: its ledger {ledger} does not agree with the "
            f"{in_traces} trained tokens in its traces"
        )


def _samples(
    trajectory: Trajectory,
    advantages: Sequence[CallAdvantages],
    config: GrpoConfig,
    version: int,
    masked: Counter[Reason],
    *,
    routed: bool = False,
) -> Iterator[Sample]:
    """Yield a sample for each trace with a token to train; `advantages` are those of its calls.

    Trained tokens that are masked here are counted in `masked`; `routed` masks those without the
    experts of their context.
    """
    cut_off = is_cut_off(trajectory)
    for trace, own in zip(trajectory.traces, advantages, strict=True):
        versions, temperatures = read_spans(trace)
        masks = mask_special(trace, config, cut_off=cut_off)
        masks[Reason.UNREPRODUCIBLE] = temperatures == 0
        if routed:
            known = 0 if trace.experts is None else len(trace.experts)
            masks[Reason.NO_ROUTES] = np.arange(len(trace.ids)) > known
        if config.max_staleness is not None:
            masks[Reason.STALE] = versions < version - config.max_staleness
        mask = trace.mask
        counts = _count_masked(trace)
        for reason, left_out in masks.items():
            count = int((mask & left_out).sum())
            mask = mask & ~left_out
            masked[reason] += count
            counts[reason] += count
        if mask.any():
            yield Sample(
                input_ids=trace.ids,
                loss_mask=mask,
                logprobs=trace.logprobs,
                versions=versions,
                advantages=token_advantages(trace, mask, own),
                temperatures=temperatures,
                group=trajectory.task,
                session=trajectory.session,
                engine="+".join(sorted({span.engine for span in trace.spans})),
                harness=trajectory.harness,
                reward=None if trajectory.reward is None else trajectory.reward.value,
                reward_parts={} if trajectory.reward is None else trajectory.reward.parts,
                experts=trace.experts,
                kept=_select_kept(trace, mask),
                masked=dict(+counts),
            )


def _count_masked(trace: Trace) -> Counter[Reason]:
    """Return the number of sampled tokens that the builder masked, by reason."""
    counts = Counter[Reason]()
    for span in trace.spans:
        if span.masked is not None:
            counts[span.masked] += span.end - span.start
    return counts


def read_spans(trace: Trace) -> tuple[Ids, Logprobs]:
    """Return the version (-1 where nothing was sampled) and temperature of each token.

    The temperature is 0 where no forward pass reproduces the logprob, 1 where nothing was sampled.
    """
    versions = np.full(len(trace.ids), -1, np.int32)
    temperatures = np.ones(len(trace.ids), np.float32)
    known = np.zeros(len(trace.ids), np.bool_)
    if trace.kept is not None:
        known = trace.kept.contains(trace.ids)
    for span in trace.spans:
        tokens = slice(span.start, span.end)
        versions[tokens] = span.version
        temperatures[tokens] = span.distribution.forward_temperature or 0
        if span.distribution.needs_kept:
            temperatures[tokens] *= known[tokens]
    return versions, temperatures


def _select_kept(trace: Trace, mask: Mask) -> Kept | None:
    """Return the sets of the tokens in `mask` whose logprobs are renormalised; None without."""
    if trace.kept is None:
        return None
    wanted = np.zeros(len(mask), np.bool_)
    for span in trace.spans:
        if span.distribution.needs_kept:
            wanted[span.start : span.end] = mask[span.start : span.end]
    selected = trace.kept.select(wanted)
    return selected if len(selected.ids) else None


def _select_experts(
    trajectories: Sequence[Trajectory], routers: RouterShape
) -> Sequence[Trajectory]:
    """Return sessions with the experts of the model's layers; see `prepare`."""
    selected = []
    needed = False
    found = False
    for trajectory in trajectories:
        chosen = tuple(select_experts(trace, routers) for trace in trajectory.traces)
        for trace, own in zip(trajectory.traces, chosen, strict=True):
            needed = needed or trace.trained > 0
            found = found or own.experts is not None
            if trace.experts is not None and own.experts is None:
                about = {"session": trajectory.session, "shape": trace.experts.shape}
                _log.warning("experts of another model", **about, model=str(routers))
        selected.append(replace(trajectory, traces=chosen))
    if needed and not found:
        msg = (
            f"replay_experts: the model has {routers}, but no session of this step has the experts "
            "that its tokens were sampled with. Start vLLM or SGLang with "
            "--enable-return-routed-experts; or set replay_experts to false to train without them"
        )
        raise ConfigError(msg, "replay_experts")
    return selected


def select_experts(trace: Trace, routers: RouterShape | None) -> Trace:
    """Return a trace with the experts of the model's layers; without any if they are of another."""
    if trace.experts is None:
        return trace
    return replace(trace, experts=None if routers is None else routers.select(trace.experts))
