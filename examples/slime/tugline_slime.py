"""Graded groups of Tugline for slime: its data source, rollout function and rewards.

slime owns engines, weights and update. Sessions run on a rollout server of Tugline, which sends
model calls to slime's engines. slime imports each part by its path:

    --data-source-path tugline_slime.TuglineGroups
    --rollout-function-path tugline_slime.generate_rollout
    --custom-reward-post-process-path tugline_slime.advantages
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.types import Sample

import tugline.types as tugline
from tugline.errors import UsageError
from tugline.exports.forms import drop_experts, drop_sets, leave_untrained, place_experts
from tugline.stream import GradedGroup, GroupStream

_STATUSES = {
    tugline.Status.COMPLETED: Sample.Status.COMPLETED,
    tugline.Status.TIMED_OUT: Sample.Status.TRUNCATED,
}
"""Statuses of slime; all others become `FAILED`."""
NO_REPLAY = "start slime with --use-rollout-routing-replay, or set tugline_experts: false"
NO_SETS = (
    "--rollout-top-p must be 1 for tokens of the whole vocabulary, and below 1 for tokens of "
    "top-p, top-k and min-p; tugline_kept: false leaves the others untrained"
)


class Form(NamedTuple):
    """What rows hold of what decided a token besides the logits, by the options of slime."""

    experts: bool = True
    """Whether traces with experts are refused if slime does not replay them."""
    kept: bool = True
    """Whether tokens are refused that slime would normalise over other ids; else untrained."""
    sets: bool = False
    """Whether slime normalises over kept sets, as it does for all tokens unless its top-p is 1."""
    routers: tuple[int, int] | None = None
    """Number of layers with a router, and top-k, if experts are replayed."""
    dense_layers: tuple[int, ...] = ()
    """Numbers of the other layers."""

    @classmethod
    def read(cls, args: Namespace) -> Self:
        """Read the options; ``tugline_experts`` and ``tugline_kept`` are true if not given."""
        form = cls(
            experts=getattr(args, "tugline_experts", True),
            kept=getattr(args, "tugline_kept", True),
            sets=getattr(args, "rollout_top_p", 1.0) != 1.0,
        )
        if not form.experts or not getattr(args, "use_rollout_routing_replay", False):
            return form
        every = args.moe_layer_freq
        if isinstance(every, int):
            every = [layer % every == 0 for layer in range(args.num_layers)]
        dense = tuple(layer for layer, routed in enumerate(every) if not routed)
        routers = args.num_layers - len(dense), args.moe_router_topk
        return form._replace(routers=routers, dense_layers=dense)

    def fit(self, trace: tugline.Sample) -> tugline.Sample:
        """Return the trace as slime can train it. Raises `UsageError`."""
        if self.routers is None:
            trace = drop_experts(trace, refuse=NO_REPLAY if self.experts else None)
        elif trace.experts is None:
            msg = f"session {trace.session} has no experts to replay"
            raise UsageError(msg)
        refuse = NO_SETS if self.kept else None
        if not self.sets:
            return drop_sets(trace, refuse=refuse)
        sets = trace.kept or tugline.Kept.none(len(trace.input_ids))
        whole = sets.select(trace.loss_mask).sizes == 0
        return leave_untrained(trace, whole, refuse=refuse)

    def make_columns(
        self, length: int, first: int, trace: tugline.Sample | None = None
    ) -> dict[str, torch.Tensor]:
        """Return experts of all tokens but the last, and kept sets of those from `first` on."""
        columns = dict[str, torch.Tensor]()
        if self.routers is not None:
            known = np.zeros((0, *self.routers), np.int32) if trace is None else trace.experts
            spread = place_experts(known, length - 1, self.dense_layers, distinct=True)
            columns["rollout_routed_experts"] = torch.from_numpy(spread.astype(np.int32))
        if self.sets:
            kept = tugline.Kept.none(length)[first:]
            if trace is not None and trace.kept is not None:
                kept = trace.kept.select(trace.loss_mask)[first:]
            columns["rollout_top_p_token_ids"] = torch.from_numpy(kept.ids.astype(np.int32))
            columns["rollout_top_p_token_offsets"] = torch.from_numpy(kept.offsets)
        return columns


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
    form = Form.read(args)
    return RolloutFnTrainOutput(
        samples=[
            make_group(group, first + number, args.n_samples_per_prompt, form)
            for number, group in enumerate(groups)
        ],
        metrics={"tugline/missing": sum(len(group.missing) for group in groups)},
    )


def make_group(group: GradedGroup, index: int, size: int, form: Form) -> list[list[Sample]]:
    """Return the samples of each session; those of one session share its `rollout_id`."""
    sessions = {each.sample: each for each in group.trajectories}
    numbers = sorted(sessions.keys() | set(group.missing))
    if len(numbers) != size:
        msg = f"task {group.id} has {len(numbers)} samples, --n-samples-per-prompt is {size}"
        raise UsageError(msg)
    return [make_session(group, sessions.get(n), (index, index * size + n), form) for n in numbers]


def make_session(
    group: GradedGroup, session: tugline.Trajectory | None, position: tuple[int, int], form: Form
) -> list[Sample]:
    """Return a row for each trace of a session, or a row without trained tokens.

    slime needs every session of a group. One without a reward gets the mean reward of the others,
    which does not change the mean. `position` has the number of the group and of the session.
    """
    group_index, index = position
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
            return [make_sample(trace, common, form) for trace in traces]
    token = int(group.samples[0].input_ids[0])
    return [
        Sample(
            tokens=[token, token],
            response_length=1,
            loss_mask=[0],
            rollout_log_probs=[0.0],
            remove_sample=True,
            metadata={"task": group.id, "advantage": 0.0},
            **form.make_columns(2, 1),
            **common,
        )
    ]


def make_sample(trace: tugline.Sample, common: dict[str, Any], form: Form) -> Sample:
    """Return the row of a trace; the response begins with the first sampled token."""
    advantage = float(trace.advantages[trace.loss_mask][0])
    trace = form.fit(trace)
    first = int(np.argmax(trace.versions >= 0))
    sampled = trace.versions[trace.versions >= 0]
    return Sample(
        tokens=trace.input_ids.tolist(),
        response_length=len(trace.input_ids) - first,
        loss_mask=trace.loss_mask[first:].astype(int).tolist(),
        rollout_log_probs=trace.logprobs[first:].tolist(),
        weight_versions=[str(one) for one in dict.fromkeys(sampled.tolist())],
        metadata={"task": trace.group, "advantage": advantage, "source_name": trace.harness},
        **form.make_columns(len(trace.input_ids), first, trace),
        **common,
    )


def advantages(_args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Return the rewards, and Tugline's advantages as the rewards of the update."""
    rewards = [sample.reward for sample in samples]
    return rewards, [sample.metadata["advantage"] for sample in samples]
