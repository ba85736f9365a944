"""Credit: the reward of each call of a session, by one rule of its tree (numpy only).

A rule is a function of `SessionCalls` and returns a reward for each of the calls. `assign` applies
the rule of the configuration. Rewards become advantages by baselines of other sessions, see
`advantage`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tugline import plugins
from tugline.errors import CaptureError, ConfigError
from tugline.trainers.grpo.config import GrpoConfig
from tugline.types import Reward, Trajectory

Rewards = npt.NDArray[np.float64]
"""Shape ``(k,)``."""
Indices = npt.NDArray[np.int64]
"""Shape ``(k,)``."""


class SessionCalls(NamedTuple):
    """The calls of a rewarded session that have tokens in its traces, ordered by number.

    A call with tokens in several traces is listed once for each. Arrays have shape ``(k,)``.
    """

    numbers: Indices
    """Number of each call."""
    traces: Indices
    """Index of its trace in `session.traces`, which has the trace's kind (such as ``subagent`` or
    ``compaction``) and parent."""
    tokens: Indices
    """Number of its trained tokens in this trace."""
    session: Trajectory

    @classmethod
    def of(cls, session: Trajectory) -> Self:
        """List the calls of a session."""
        counts: dict[tuple[int, int], int] = {}
        for index, trace in enumerate(session.traces):
            for span in trace.spans:
                trained = int(trace.mask[span.start : span.end].sum())
                key = (span.call, index)
                counts[key] = counts.get(key, 0) + trained
        rows = [(number, index, counts[number, index]) for number, index in sorted(counts)]
        table = np.array(rows, np.int64).reshape(-1, 3)
        return cls(table[:, 0], table[:, 1], table[:, 2], session)

    @property
    def reward(self) -> Reward:
        """The verdict on the session."""
        assert self.session.reward is not None  # noqa: S101 - only rewarded sessions have credit
        return self.session.reward


Rule = Callable[[SessionCalls, GrpoConfig], Rewards]


def assign(calls: SessionCalls, config: GrpoConfig) -> Rewards:
    """Return the reward of each call by the rule that `credit` names.

    Raises `CaptureError` if the session's `Reward` does not fit its traces or calls, `ConfigError`
    for a result of the user's function that has another shape or type, or is not finite.
    """
    own = RULES.get(config.credit)
    return _call_own(calls, config) if own is None else own(calls, config)


# --------------------------------------------------------------------------- rules
def credit_session(calls: SessionCalls, config: GrpoConfig) -> Rewards:  # noqa: ARG001 - a `Rule`
    """Give every call the outcome of its session."""
    return np.full(len(calls.numbers), calls.reward.value)


def credit_trace(calls: SessionCalls, config: GrpoConfig) -> Rewards:
    """Give every call the reward of its trace; the outcome if there is no finite one."""
    outcome = credit_session(calls, config)
    per_trace = calls.reward.per_trace
    if not per_trace:
        return outcome
    if len(per_trace) != len(calls.session.traces):
        raise CaptureError(
            f"session {calls.session.session}: reward.per_trace has {len(per_trace)} numbers for "
            f"{len(calls.session.traces)} traces; it must have one for each trace of the task's "
            "builder"
        )
    own = np.array(per_trace, np.float64)[calls.traces]
    return np.where(np.isfinite(own), own, outcome)


def credit_call(calls: SessionCalls, config: GrpoConfig) -> Rewards:
    """Give every call its own reward; the outcome if the evaluator gave calls none."""
    if not calls.reward.per_call:
        return credit_session(calls, config)
    numbers, values = _read_per_call(calls)
    return np.asarray(values[np.searchsorted(numbers, calls.numbers)], np.float64)


def credit_return(calls: SessionCalls, config: GrpoConfig) -> Rewards:
    """Give every call the sum of the rewards of itself and of all later calls of the session.

    Without rewards of calls, the outcome comes with the last call. Later calls are those with a
    higher number, also in other traces: the call of a sub-agent and a summary are credited with
    what followed from them. `turn_discount` is applied once for each trained call between
    (Sutton and Barto 2018, eq. 3.8; for turns of a conversation, Kevin, arXiv 2507.11948).
    """
    turns = np.unique(calls.numbers[calls.tokens > 0])
    if not len(turns):
        return credit_session(calls, config)
    numbers = turns[-1:]
    values = np.array([calls.reward.value])
    if calls.reward.per_call:
        numbers, values = _read_per_call(calls)
    places = np.searchsorted(turns, numbers, side="right") - 1
    earned = np.zeros(len(turns))
    np.add.at(earned, places[places >= 0], values[places >= 0])
    discount = 1.0 if config.turn_discount is None else config.turn_discount
    total = 0.0
    for turn in reversed(range(len(turns))):
        total = earned[turn] + discount * total
        earned[turn] = total
    own = np.searchsorted(turns, calls.numbers, side="right").clip(1) - 1
    return np.asarray(earned[own], np.float64)


RULES: dict[str, Rule] = {
    "session": credit_session,
    "call": credit_call,
    "trace": credit_trace,
    "return": credit_return,
}


def _read_per_call(calls: SessionCalls) -> tuple[Indices, Rewards]:
    """Return the numbers of all calls in order, and their rewards. Raises `CaptureError`."""
    per_call = calls.reward.per_call
    name = f"session {calls.session.session}: reward.per_call"
    missing = sorted({*calls.numbers.tolist()} - set(per_call))
    if missing:
        raise CaptureError(
            f"{name} has {len(per_call)} values, but none for call {missing[0]}; it must have one "
            "for each recorded call"
        )
    for call, value in per_call.items():
        if not math.isfinite(value):
            raise CaptureError(f"{name}[{call}] is {value}, must be a finite number")
    numbers = np.array(sorted(per_call), np.int64)
    return numbers, np.array([per_call[int(number)] for number in numbers], np.float64)


def _call_own(calls: SessionCalls, config: GrpoConfig) -> Rewards:
    """Return the rewards by the function of the user. Raises `ConfigError`."""
    result = plugins.find("grpo.credit", config.credit)(calls, config)
    problem = check_array(result, calls.numbers.shape, "rewards")
    if problem is None and not np.isfinite(result).all():
        problem = f"rewards must be finite, not {result.tolist()}"
    if problem is not None:
        msg = f"grpo.credit {config.credit!r}: {problem} (session: {calls.session.session})"
        raise ConfigError(msg, "grpo.credit")
    return np.asarray(result, np.float64)


def check_array(result: object, shape: tuple[int, ...], name: str) -> str | None:
    """Return why `result` is no array of floats of this shape; None if it is."""
    if not isinstance(result, np.ndarray) or result.dtype.kind != "f":
        kind = result.dtype if isinstance(result, np.ndarray) else type(result).__name__
        return f"it must return an array of floats, not {kind}"
    if result.shape != shape:
        return f"the {name} must be of shape {shape}, not {result.shape}"
    return None
