"""Graded groups of Tugline for slime: its data source, rollout function and rewards.

slime owns engines, weights and update. Sessions run on a rollout server of Tugline, which sends
model calls to slime's engines. slime imports each part by its path:

    --data-source-path tugline_slime.TuglineGroups
    --rollout-function-path tugline_slime.generate_rollout
    --custom-reward-post-process-path tugline_slime.advantages
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.types import Sample

import tugline.types as tugline
from tugline.errors import UsageError
from tugline.stream import GradedGroup, GroupStream

_STATUSES = {
    tugline.Status.COMPLETED: Sample.Status.COMPLETED,
    tugline.Status.TIMED_OUT: Sample.Status.TRUNCATED,
}
"""Statuses of slime; all others become `FAILED`."""


class TuglineGroups:
    """The stream as slime's data source; groups are acknowledged with slime's checkpoints."""

    def __init__(self, args: Namespace) -> None:
        consumer = getattr(args, "tugline_consumer", "slime")
        self._stream = GroupStream(consumer).__enter__()
        self._groups = iter(self._stream)
        self._last: GradedGroup | None = None

    def close(self) -> None:
        """Close the connection, which is otherwise closed at the end of the process."""
        self._groups.close()
        self._stream.__exit__(None, None, None)

    def take(self, count: int) -> Iterator[GradedGroup]:
        """Yield the next `count` groups with samples; wait for them."""
        while count:
            group = self._last = next(self._groups)
            if group.samples:
                count -= 1
                yield group

    def save(self, rollout_id: int) -> None:
        """Acknowledge the groups taken so far; slime calls this after writing its checkpoint."""
        if self._last is not None:
            self._stream.acknowledge(self._last)

    def load(self, rollout_id: int | None = None) -> None:
        """Do nothing: groups that are not acknowledged are sent again."""


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: TuglineGroups, *, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Return `args.rollout_batch_size` groups of `args.n_samples_per_prompt` sessions."""
    if evaluation:
        msg = "no evaluation here: leave --eval-interval out, or set --eval-function-path"
        raise UsageError(msg)
    groups = list(data_source.take(args.rollout_batch_size))
    first = rollout_id * args.rollout_batch_size
    return RolloutFnTrainOutput(
        samples=[
            make_group(group, first + number, args.n_samples_per_prompt)
            for number, group in enumerate(groups)
        ],
        metrics={"tugline/missing": sum(len(group.missing) for group in groups)},
    )


def make_group(group: GradedGroup, index: int, size: int) -> list[list[Sample]]:
    """Return the samples of each session; those of one session share its `rollout_id`."""
    sessions = {each.sample: each for each in group.trajectories}
    numbers = sorted(sessions.keys() | set(group.missing))
    if len(numbers) != size:
        msg = f"task {group.id} has {len(numbers)} samples, --n-samples-per-prompt is {size}"
        raise UsageError(msg)
    return [make_session(group, sessions.get(n), index, index * size + n) for n in numbers]


def make_session(
    group: GradedGroup, session: tugline.Trajectory | None, group_index: int, index: int
) -> list[Sample]:
    """Return a row for each trace of a session, or a row without trained tokens.

    slime needs every session of a group. One without a reward gets the mean reward of the others,
    which does not change the mean.
    """
    rewards = [one.reward.value for one in group.trajectories if one.reward is not None]
    common = {
        "group_index": group_index,
        "index": index,
        "rollout_id": index,
        "reward": sum(rewards) / len(rewards),
        "status": Sample.Status.FAILED,
    }
    if session is not None:
        common["session_id"] = session.session
        common["status"] = _STATUSES.get(session.status, Sample.Status.FAILED)
        if session.reward is not None:
            common["reward"] = session.reward.value
        traces = [one for one in group.samples if one.session == session.session]
        if traces:
            return [make_sample(trace, common) for trace in traces]
    token = int(group.samples[0].input_ids[0])
    return [
        Sample(
            tokens=[token, token],
            response_length=1,
            loss_mask=[0],
            rollout_log_probs=[0.0],
            remove_sample=True,
            metadata={"task": group.id, "advantage": 0.0},
            **common,
        )
    ]


def make_sample(trace: tugline.Sample, common: dict[str, Any]) -> Sample:
    """Return the row of a trace; the response begins with the first sampled token."""
    first = int(np.argmax(trace.versions >= 0))
    sampled = trace.versions[trace.versions >= 0]
    return Sample(
        tokens=trace.input_ids.tolist(),
        response_length=len(trace.input_ids) - first,
        loss_mask=trace.loss_mask[first:].astype(int).tolist(),
        rollout_log_probs=trace.logprobs[first:].tolist(),
        weight_versions=[str(one) for one in dict.fromkeys(sampled.tolist())],
        metadata={
            "task": trace.group,
            "advantage": float(trace.advantages[trace.loss_mask][0]),
            "source_name": trace.harness,
        },
        **common,
    )


def advantages(_args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Return the rewards, and Tugline's advantages as the rewards of the update."""
    rewards = [sample.reward for sample in samples]
    return rewards, [sample.metadata["advantage"] for sample in samples]
