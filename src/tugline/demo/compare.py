"""What each builder makes the trainer do for the same sessions, measured, not argued.

The sessions' recorded calls are built anew with every builder, and a scratch copy of the policy
takes one training step on each result. The tokens that are trained are the same, and so are the
updates; what differs is how often their context is computed (arXiv 2605.24220, section on prefix
merging).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import msgspec

from tugline.demo.metrics import BuilderCost
from tugline.plugins import find
from tugline.trainers.grpo.train import Grpo
from tugline.types import Call, Trajectory

BUILDERS = ("per_request", "prefix_merging")


def compare(
    trajectories: Sequence[Trajectory], calls: Mapping[str, Sequence[Call]], trainer: Grpo
) -> tuple[BuilderCost, ...]:
    """One training step per builder; `trainer` and its model stay as they are."""
    return tuple(_cost(name, trajectories, calls, trainer) for name in BUILDERS)


def _cost(
    name: str,
    trajectories: Sequence[Trajectory],
    calls: Mapping[str, Sequence[Call]],
    trainer: Grpo,
) -> BuilderCost:
    builder = find("builder", name)()
    rebuilt = []
    for trajectory in trajectories:
        if trajectory.session in calls:
            traces, ledger = builder.build(calls[trajectory.session])
            rebuilt.append(msgspec.structs.replace(trajectory, traces=traces, ledger=ledger))
    scratch = Grpo(copy.deepcopy(trainer.model), trainer.config)
    report = scratch.step(rebuilt, version=0)
    return BuilderCost(
        builder=name,
        sessions=len(rebuilt),
        traces=sum(len(one.traces) for one in rebuilt),
        updates=report.updates,
        tokens_trained=report.tokens_trained,
        tokens_forwarded=report.tokens_forwarded,
        seconds=report.seconds,
    )
