"""Terms that are added to rewards, and the treatment of special calls (numpy only).

Special calls are malformed, truncated or repeated; the spans of traces say which are. Each kind is
trained like any other, masked, or penalised. `list_penalties` has the terms of whole sessions.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from tugline.trainers.grpo.config import GrpoConfig, Treatment
from tugline.trainers.grpo.credit import Rewards, SessionCalls
from tugline.types import Boundary, Mask, Reason, Span, Status, Trace, Trajectory, is_pass

NO_PENALTIES: Mapping[str, float] = MappingProxyType({})


# --------------------------------------------------------------------------- special calls
def is_cut_off(trajectory: Trajectory) -> bool:
    """Whether the agent was stopped at a limit, or used up a budget of model calls."""
    stopped = trajectory.failure is not None and trajectory.failure.boundary is Boundary.AGENT
    return stopped or trajectory.spent is not None


def list_treatments(span: Span, config: GrpoConfig, *, cut_off: bool) -> dict[Reason, Treatment]:
    """Return the treatment of a span for each kind of special call that it belongs to.

    All calls of a session that was cut off are truncated.
    """
    kinds: dict[Reason, tuple[bool, Treatment]] = {
        Reason.MALFORMED: (span.malformed, config.malformed),
        Reason.TRUNCATED: (span.truncated or cut_off, config.truncated),
        Reason.REPEATED: (span.repeats + 1 >= config.repeated_calls, config.repeated),
    }
    return {reason: treatment for reason, (special, treatment) in kinds.items() if special}


def mask_special(trace: Trace, config: GrpoConfig, *, cut_off: bool) -> dict[Reason, Mask]:
    """Return where tokens of special calls are masked, by reason; each array has shape ``(n,)``."""
    masks: dict[Reason, Mask] = {}
    for span in trace.spans:
        for reason, treatment in list_treatments(span, config, cut_off=cut_off).items():
            if treatment == "mask":
                mask = masks.setdefault(reason, np.zeros(len(trace.ids), np.bool_))
                mask[span.start : span.end] = True
    return masks


def penalise_calls(calls: SessionCalls, config: GrpoConfig) -> dict[Reason, Rewards]:
    """Return what is subtracted from the reward of each call, by reason; arrays as in `calls`."""
    if "penalise" not in (config.malformed, config.truncated, config.repeated):
        return {}
    row = {key: n for n, key in enumerate(zip(calls.numbers, calls.traces, strict=True))}
    penalties: dict[Reason, Rewards] = {}
    cut_off = is_cut_off(calls.session)
    for index, trace in enumerate(calls.session.traces):
        for span in trace.spans:
            for reason, treatment in list_treatments(span, config, cut_off=cut_off).items():
                if treatment == "penalise":
                    own = penalties.setdefault(reason, np.zeros(len(calls.numbers)))
                    own[row[span.call, index]] = config.call_penalty
    return penalties


# --------------------------------------------------------------------------- whole sessions
def penalise_length(sampled: int, config: GrpoConfig) -> float:
    """Return the penalty of a session's number of sampled tokens (DAPO, arXiv 2503.14476)."""
    if config.overlong_length is None:
        return 0.0
    excess = sampled - (config.overlong_length - config.overlong_buffer)
    return max(0.0, excess / config.overlong_buffer * config.overlong_penalty)


def reward_efficiency(group: Sequence[Trajectory], config: GrpoConfig) -> dict[str, float]:
    """Return what is added to the rewards of the solved sessions of a group.

    ``efficiency_weight * (1 - effort / largest effort of a solved session)``. It is never negative
    and only for solved sessions, so no unsolved session passes a solved one, and the order of
    unsolved sessions stays. A session of unknown effort gets nothing.
    """
    if config.efficiency is None:
        return {}
    solved = [each for each in group if each.reward is not None and is_pass(each.reward.value)]
    efforts = {each.session: _measure_effort(each, config) for each in solved}
    known = {session: effort for session, effort in efforts.items() if effort is not None}
    largest = max(known.values(), default=0.0)
    if largest <= 0:
        return {}
    return {
        session: config.efficiency_weight * (1 - effort / largest)
        for session, effort in known.items()
    }


def _measure_effort(trajectory: Trajectory, config: GrpoConfig) -> float | None:
    """Return the effort of a session; None if it is unknown."""
    if config.efficiency == "tokens":
        return trajectory.ledger.sampled
    if config.efficiency == "turns":
        return len({span.call for trace in trajectory.traces for span in trace.spans})
    return trajectory.seconds.get(Status.RUN.value)


def list_penalties(
    group: Sequence[Trajectory], config: GrpoConfig, divergences: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return what each term subtracts from all rewards of a session, by session and term.

    `divergences` are those of `kl_reward`. What `efficiency` adds is negative.
    """
    saved = reward_efficiency(group, config)
    return {
        each.session: {
            "kl_reward": divergences.get(each.session, 0.0),
            "overlong": penalise_length(each.ledger.sampled, config),
            "efficiency": -saved.get(each.session, 0.0),
        }
        for each in group
    }


# --------------------------------------------------------------------------- figures
def sum_terms(
    trajectories: Sequence[Trajectory], config: GrpoConfig, divergences: Mapping[str, float]
) -> dict[str, float]:
    """Return the sum of each term over the rewarded sessions of a step; 0 terms are left out.

    Penalties are negative; those of special calls are named like their kind.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    groups: dict[str, list[Trajectory]] = {}
    for each in trajectories:
        if each.reward is not None and np.isfinite(each.reward.value):
            groups.setdefault(each.task, []).append(each)
    for group in groups.values():
        penalties = list_penalties(group, config, divergences)
        for each in group:
            for name, penalty in penalties[each.session].items():
                sums[name] -= penalty
            for reason, own in penalise_calls(SessionCalls.of(each), config).items():
                sums[reason.value] -= float(own.sum())
    return {name: value for name, value in sums.items() if value}
