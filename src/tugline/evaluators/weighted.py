"""Combine the rewards of several evaluators of the same session.

The parts run concurrently, within the time limit of the evaluation; parts that are `in_place` run
one after another. If a `required` part has no verdict, there is no verdict. If another part has
none, the remaining parts count, and the report has the reason.
"""

import asyncio
import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec

from tugline.aio import run_together
from tugline.errors import ConfigError, EvaluatorError, SandboxError, UnknownPlugin
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.verdict import evaluate
from tugline.plugins import make
from tugline.sandbox.base import Mount, ProgramTimeout
from tugline.types import PluginSpec, Reward, Task

_NO_LOCK = contextlib.nullcontext()


class PartOptions(msgspec.Struct, frozen=True):
    """Options of a part."""

    evaluator: PluginSpec
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    required: bool = True


@dataclass(kw_only=True, eq=False)
class WeightedEvaluator(Evaluator):
    """Combines `parts`: ``evaluator`` (name, options), ``weight`` and ``required`` by name.

    The value is the weighted mean; `mode` ``product`` or ``min`` ignores the weights. The parts of
    the reward are named ``<name>`` and ``<name>.<part>``. Rewards of calls are combined like values
    with `mode` ``mean``, else left out, which the report says.
    """

    parts: Annotated[dict[str, PartOptions], msgspec.Meta(min_length=1)]
    mode: Literal["mean", "product", "min"] = "mean"

    def __post_init__(self) -> None:
        self._parts = msgspec.convert(self.parts, dict[str, PartOptions])
        self._evaluators = {name: _make(name, part) for name, part in self._parts.items()}
        evaluators = self._evaluators.values()
        self.in_place = any(each.in_place for each in evaluators)
        needed = (each.sandboxes for each in evaluators if not each.in_place)
        self.sandboxes = max(needed, default=0)

    def mounts(self, task: Task) -> tuple[Mount, ...]:
        """Return the mounts of all parts. Raises `ConfigError` if they conflict."""
        by_target: dict[str, tuple[str, Mount]] = {}
        for name, evaluator in self._evaluators.items():
            for mount in evaluator.mounts(task):
                if self.in_place and mount.source and not evaluator.in_place:
                    raise ConfigError(
                        f"evaluator 'weighted': part {name!r} would expose its files to the "
                        "agent at "
                        f"{mount.target}, because another part is in place"
                    )
                other, first = by_target.setdefault(mount.target, (name, mount))
                if first != mount or (other != name and self.in_place):
                    raise ConfigError(
                        f"evaluator 'weighted': parts {other!r} and {name!r} both mount a folder "
                        f"at {mount.target}; use only one of them"
                    )
        return tuple(mount for _, mount in by_target.values())

    def hidden(self, task: Task) -> tuple[str, ...]:
        """Return the folders that any part hides from the agent."""
        paths = (path for own in self._evaluators.values() for path in own.hidden(task))
        return tuple(dict.fromkeys(paths))

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Combine the verdicts of all parts."""
        alone = asyncio.Lock()
        evaluations = (self._evaluate_part(name, outcome, alone) for name in self._parts)
        verdicts = dict(zip(self._parts, await run_together(*evaluations), strict=True))
        return self._combine(self._discount_models(verdicts))

    async def _evaluate_part(
        self, name: str, outcome: SessionOutcome, alone: asyncio.Lock
    ) -> Verdict | EvaluatorError:
        """Return a part's verdict, or the error if other parts can still decide.

        Raises the error of a required part, unless the part is graded by a model.
        """
        evaluator = self._evaluators[name]
        in_place = evaluator.in_place
        try:
            limit = ProgramTimeout(outcome.timeout_s, outcome.limit)
            async with limit.enforce(), alone if in_place else _NO_LOCK:
                sandbox = outcome.sandbox if in_place else None
                return await evaluate(evaluator, replace(outcome, sandbox=sandbox))
        except (EvaluatorError, SandboxError, TimeoutError) as error:
            reason = str(error) or f"time limit reached after {outcome.timeout_s:g} s"
            if not self._parts[name].required:
                return EvaluatorError(reason)
            missing = EvaluatorError(f"part {name!r}: {reason}")
            if evaluator.graded_by_model:
                return missing
            if not isinstance(error, EvaluatorError):
                raise
            raise missing from error

    def _discount_models(
        self, verdicts: Mapping[str, Verdict | EvaluatorError]
    ) -> dict[str, Verdict | EvaluatorError]:
        """Set the rewards of models to 0 if another required part is 0 or less.

        So an agent cannot gain a reward, or avoid a verdict, by influencing a model. Otherwise
        raises the `EvaluatorError` of a required model.
        """
        models = {name for name, own in self._evaluators.items() if own.graded_by_model}
        required = {name for name, part in self._parts.items() if part.required}
        others = [verdicts[name] for name in required - models]
        failed = any(isinstance(each, Verdict) and each.reward.value <= 0.0 for each in others)
        result = dict(verdicts)
        for name in models:
            verdict = verdicts[name]
            if isinstance(verdict, Verdict):
                report = {"discounted": "another required part is 0 or less", **verdict.report}
            elif name in required:
                if not failed:
                    raise verdict
                report = {"discounted": str(verdict)}
            else:
                continue
            if failed:
                result[name] = Verdict(Reward(0.0), report)
        return result

    def _combine(self, verdicts: Mapping[str, Verdict | EvaluatorError]) -> Verdict:
        report: dict[str, Any] = {}
        parts: dict[str, float] = {}
        rewards: dict[str, Reward] = {}
        for name, verdict in verdicts.items():
            if isinstance(verdict, EvaluatorError):
                report[name] = {"no_verdict": str(verdict)}
                continue
            report[name] = verdict.report
            rewards[name] = verdict.reward
            parts[name] = verdict.reward.value
            parts |= {f"{name}.{part}": value for part, value in verdict.reward.parts.items()}
        if not rewards:
            raise EvaluatorError(f"none of the parts has a verdict: {report}")
        per_call = self._combine_calls(rewards)
        if self.mode != "mean" and any(each.per_call for each in rewards.values()):
            report["per_call"] = f"left out: only mode 'mean' combines it, not {self.mode!r}"
        value = self._value({name: each.value for name, each in rewards.items()})
        return Verdict(Reward(value, parts, per_call=per_call), report)

    def _combine_calls(self, rewards: Mapping[str, Reward]) -> dict[int, float]:
        """Return the weighted mean of each call's rewards; empty without any.

        The value of a part without rewards of calls counts at the last call, where it was earned.
        """
        calls = sorted({call for reward in rewards.values() for call in reward.per_call})
        if self.mode != "mean" or not calls:
            return {}
        total = sum(self._parts[name].weight for name in rewards)
        combined = dict.fromkeys(calls, 0.0)
        for name, reward in rewards.items():
            share = self._parts[name].weight / total
            for call, value in (reward.per_call or {calls[-1]: reward.value}).items():
                combined[call] += share * value
        return combined

    def _value(self, by_name: Mapping[str, float]) -> float:
        values = list(by_name.values())
        weights = [self._parts[name].weight for name in by_name]
        if self.mode == "min":
            return min(values)
        if self.mode == "product":
            product = math.prod(map(abs, values))  # two penalties are no reward
            return -product if min(values) < 0.0 else product
        return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def _make(name: str, options: PartOptions) -> Evaluator:
    """Create the evaluator of a part. Raises `ConfigError`."""
    try:
        return make("evaluator", options.evaluator, Evaluator)
    except (ConfigError, UnknownPlugin) as error:
        raise ConfigError(f"evaluator 'weighted': parts[{name!r}]: {error}") from error
