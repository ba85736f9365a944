"""Conversion of trajectories to samples with an advantage at each token (numpy only).

`prepare` computes the advantage of every token and updates the ledger, so that over a whole step
sampled = trained + masked + dropped (I2). Trajectories rebuilt from recordings give equal samples.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from tugline.errors import CaptureError
from tugline.traces.base import leave_out, sum_ledgers
from tugline.trainers.grpo.advantage import grade, token_advantages, turn_shares
from tugline.trainers.grpo.config import GrpoConfig
from tugline.types import Boundary, Ids, Ledger, Logprobs, Mask, Reason, Sample, Trace, Trajectory


def prepare(
    trajectories: Sequence[Trajectory], config: GrpoConfig, *, version: int
) -> tuple[list[Sample], Ledger]:
    """Return a sample for each trace with trained tokens, and the ledger of all sessions.

    Advantages are relative to the sessions of the same task. Sessions without a finite reward are
    dropped as SESSION_FAILED and count in no mean. `version` is the policy version about to be
    updated, from which staleness is measured.
    """
    masked = Counter[Reason]()
    dropped = Counter[Reason]()
    samples: list[Sample] = []
    ordered = sorted(trajectories, key=lambda each: (each.task, each.sample, each.session))
    for _, members in groupby(ordered, key=lambda trajectory: trajectory.task):
        group = list(members)
        graded, signal = grade(group, config)
        for trajectory in group:
            _check_ledger(trajectory)
            if trajectory.session not in graded:
                dropped[Reason.SESSION_FAILED] += trajectory.ledger.trained
            elif config.drop_truncated and _is_truncated(trajectory):
                dropped[Reason.TRUNCATED] += trajectory.ledger.trained
            elif not signal:
                dropped[Reason.NO_SIGNAL] += trajectory.ledger.trained
            else:
                advantages = graded[trajectory.session]
                samples += _samples(trajectory, advantages, config, version, masked)
    ledger = sum_ledgers(trajectory.ledger for trajectory in trajectories)
    return samples, leave_out(ledger, masked=masked, dropped=dropped)


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


def _is_truncated(trajectory: Trajectory) -> bool:
    """Whether the agent was stopped at a limit, or used up a budget of model calls."""
    stopped = trajectory.failure is not None and trajectory.failure.boundary is Boundary.AGENT
    return stopped or trajectory.spent is not None


def _samples(
    trajectory: Trajectory,
    advantages: Sequence[float],
    config: GrpoConfig,
    version: int,
    masked: Counter[Reason],
) -> Iterator[Sample]:
    """Yield a sample for each trace with a token to train; `advantages` has one per trace.

    Trained tokens that are masked here are counted in `masked`.
    """
    shares: Mapping[int, float] = {}
    if config.turn_discount is not None:
        spans = (span for trace in trajectory.traces for span in trace.spans)
        trained = [span.call for span in spans if span.masked is None]
        shares = turn_shares(trained, config.turn_discount)
    for trace, advantage in zip(trajectory.traces, advantages, strict=True):
        versions, temperatures = read_spans(trace)
        mask = trace.mask & (temperatures > 0)
        masked[Reason.UNREPRODUCIBLE] += trace.trained - int(mask.sum())
        if config.max_staleness is not None:
            stale = mask & (versions < version - config.max_staleness)
            mask = mask & ~stale
            masked[Reason.STALE] += int(stale.sum())
        if mask.any():
            yield Sample(
                input_ids=trace.ids,
                loss_mask=mask,
                logprobs=trace.logprobs,
                versions=versions,
                advantages=token_advantages(trace, mask, advantage, shares),
                temperatures=temperatures,
                group=trajectory.task,
                session=trajectory.session,
                engine="+".join(sorted({span.engine for span in trace.spans})),
                harness=trajectory.harness,
                reward=None if trajectory.reward is None else trajectory.reward.value,
                reward_parts={} if trajectory.reward is None else trajectory.reward.parts,
                masked=_count_masked(trace, mask),
            )


def _count_masked(trace: Trace, mask: Mask) -> dict[Reason, int]:
    """Return the number of sampled tokens outside of `mask`, by reason."""
    counts = Counter[Reason]()
    for span in trace.spans:
        left_out = int((~mask[span.start : span.end]).sum())
        if left_out:
            unreproducible = span.distribution.forward_temperature is None
            reason = Reason.UNREPRODUCIBLE if unreproducible else Reason.STALE
            counts[span.masked or reason] += left_out
    return dict(counts)


def read_spans(trace: Trace) -> tuple[Ids, Logprobs]:
    """Return the version (-1 where nothing was sampled) and temperature of each token.

    The temperature is 0 where no forward pass reproduces the logprob, 1 where nothing was sampled.
    """
    versions = np.full(len(trace.ids), -1, np.int32)
    temperatures = np.ones(len(trace.ids), np.float32)
    for span in trace.spans:
        versions[span.start : span.end] = span.version
        temperatures[span.start : span.end] = span.distribution.forward_temperature or 0
    return versions, temperatures
