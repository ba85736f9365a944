"""Questions about a training's settings that are allowed, but seldom meant."""

import math
from collections.abc import Iterator

from tugline.trainers.config import TrainConfig

_MOST_PASSES = 20.0
"""Trainings of each task beyond which the policy may learn the tasks by heart."""
_HIGH_LR = 1e-3
_HIGH_KL = 1.0
_FEW_SAMPLES = 4
_SHORT_DECAY = 0.8
"""Share of a run's updates below which a decay ends early."""


def ask(config: TrainConfig, tasks: int) -> Iterator[str]:
    """Yield questions, each with the key, its value and what follows; `tasks` are trained on."""
    plan = config.schedule
    grpo = config.grpo
    groups = plan.steps * plan.tasks_per_step
    if groups / tasks > _MOST_PASSES:
        yield (
            f"schedule.steps is {plan.steps}, so each of {tasks} tasks is trained"
            f" {groups / tasks:.0f} times: the policy may learn them by heart"
        )
    if plan.samples < _FEW_SAMPLES:
        yield (
            f"schedule.samples is {plan.samples}: in so small groups all sessions often earn the"
            " same, and nothing is learned"
        )
    if plan.staleness >= plan.steps:
        stale = plan.staleness
        yield f"schedule.staleness is {stale}: all steps are sampled from the first weights"
    held_out = config.heldout
    if held_out is not None and held_out.every > plan.steps:
        yield (
            f"heldout.every is {held_out.every}, but there are {plan.steps} steps: the held-out"
            " tasks are run before and after the training only"
        )
    if grpo.lr >= _HIGH_LR and config.lora is None:
        yield f"grpo.lr is {grpo.lr:g}: models of more than a few million weights need 1e-7 to 1e-5"
    if grpo.kl >= _HIGH_KL:
        yield f"grpo.kl is {grpo.kl:g}: so heavy a penalty leaves the policy where it is"
    yield from _ask_about_updates(config)


def _ask_about_updates(config: TrainConfig) -> Iterator[str]:
    plan = config.schedule
    grpo = config.grpo
    sessions = plan.tasks_per_step * plan.samples
    a_step = math.ceil(sessions / grpo.sessions_per_update) * grpo.epochs
    updates = plan.steps * a_step
    if grpo.warmup_updates >= updates:
        yield (
            f"grpo.warmup_updates is {grpo.warmup_updates}, but there are at most {updates}"
            " updates: the learning rate never reaches grpo.lr"
        )
    decay = grpo.decay_updates
    if decay is not None and decay < _SHORT_DECAY * updates:
        yield (
            f"grpo.decay_updates is {decay}, but there are up to {updates} updates: from step"
            f" {decay // a_step + 1} on the learning rate is {grpo.lr * grpo.final_lr:g}"
        )
    if grpo.sessions_per_update < plan.samples:
        yield (
            f"grpo.sessions_per_update is {grpo.sessions_per_update}, less than schedule.samples:"
            " an update has a part of a group only"
        )
