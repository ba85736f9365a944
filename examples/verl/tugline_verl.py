"""Sessions of Tugline as an agent loop of verl.

For each session that verl requests, its task is submitted to a rollout server of Tugline, and the
graded traces become rows of verl. verl owns engines, weights, groups and the update.
"""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from tugline import Client, TuglineError
from tugline.errors import UsageError
from tugline.exports.forms import drop_experts, drop_sets, place_experts
from tugline.stream import GradedGroup
from tugline.types import Sample, Sampling, Task, Trajectory

NO_REPLAY = (
    "set actor_rollout_ref.rollout.enable_rollout_routing_replay and the actor's "
    "router_replay.mode to R3, or in loop.yaml experts to false to train without"
)
NO_SETS = (
    "verl has no form for them; sample without top-p, top-k and min-p, or set kept to false in "
    "loop.yaml to leave such tokens untrained"
)


class Form(NamedTuple):
    """Options in ``loop.yaml`` for what decided a token besides the logits."""

    experts: bool = True
    """Whether experts are replayed; if not, rows have none."""
    kept: bool = True
    """Whether tokens that were sampled from a part of the vocabulary are refused."""
    dense_layers: Sequence[int] = ()
    """Numbers of the model's layers without a router."""
    replay: bool = False
    """Whether verl is configured to replay experts."""


class TuglineAgentLoop(AgentLoopBase):
    """Runs a session for each call of `run`; server and token are found as by `Client`."""

    def __init__(
        self,
        *args: Any,
        experts: bool = True,
        kept: bool = True,
        dense_layers: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        """The options of `Form` are from ``loop.yaml``, the rest from verl."""
        super().__init__(*args, **kwargs)
        replay = bool(self.rollout_config.enable_rollout_routing_replay)
        self._form = Form(experts, kept, tuple(dense_layers), replay)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Run the task in the row's `extra_info["task"]`, and return a row for each trace.

        A prompt that verl issues again after a restart has the same id, so its session is not run
        again. Raises the failure of a session that does not count for the policy.
        """
        task = msgspec.json.decode(kwargs["extra_info"]["task"], type=Task)
        name = f"{kwargs['uid']}-{kwargs['session_id']}"
        sampling = read_sampling(task.sampling, sampling_params)
        task = replace(task, id=name, samples=1, sampling=sampling)
        async with Client() as client:
            await client.submit(task)
            async with aclosing(client.groups(tasks=[name])) as groups:
                group = GradedGroup(await anext(groups))
        return make_outputs(group, self.tokenizer.eos_token_id, self._form)


def read_sampling(task: Sampling, given: dict[str, Any]) -> Sampling:
    """Replace the task's sampling by verl's parameters, in which a top-k of -1 means none."""
    top_k = max(given["top_k"], 0)
    return replace(task, temperature=given["temperature"], top_p=given["top_p"], top_k=top_k)


def make_outputs(group: GradedGroup, end_id: int, form: Form) -> list[AgentLoopOutput]:
    """Return a row for each trace, or a row without trained tokens that has the reward.

    Raises `TuglineError` for a session without a reward; verl then counts its prompt as failed. So
    it does for `UsageError`, which is raised for what verl does not replay.
    """
    session = next(iter(group.trajectories), None)
    if session is None or session.reward is None:
        reason = session.failure if session is not None else "it did not run"
        msg = f"session of {group.id} has no reward: {reason}"
        raise TuglineError(msg)
    rows = [make_output(session, sample, form) for sample in group.samples]
    return rows or [
        AgentLoopOutput(
            prompt_ids=[end_id],
            response_ids=[end_id],
            response_mask=[0],
            response_logprobs=[0.0],
            routed_experts=make_empty_experts(session, form),
            **describe(session, np.array([0])),
        )
    ]


def make_output(session: Trajectory, sample: Sample, form: Form) -> AgentLoopOutput:
    """Convert a trace; the response begins with the first sampled token."""
    if not form.experts or not form.replay:
        sample = drop_experts(sample, refuse=NO_REPLAY if form.experts else None)
    sample = drop_sets(sample, refuse=NO_SETS if form.kept else None)
    sampled = sample.versions >= 0
    first = int(np.argmax(sampled))
    return AgentLoopOutput(
        prompt_ids=sample.input_ids[:first].tolist(),
        response_ids=sample.input_ids[first:].tolist(),
        response_mask=sample.loss_mask[first:].astype(int).tolist(),
        response_logprobs=sample.logprobs[first:].tolist(),
        routed_experts=make_experts(sample, form),
        **describe(session, sample.versions[sampled]),
    )


def make_experts(sample: Sample, form: Form) -> np.ndarray | None:
    """Return the experts of all tokens, int16, shape ``(n, layers, top_k)``; 0 if not known.

    Raises `UsageError` if verl replays experts and the sample has none.
    """
    if sample.experts is None:
        if form.experts and form.replay:
            msg = f"session {sample.session} has no experts to replay"
            raise UsageError(msg)
        return None
    spread = place_experts(sample.experts, len(sample.input_ids), form.dense_layers)
    return spread.astype(np.int16)


def make_empty_experts(session: Trajectory, form: Form) -> np.ndarray | None:
    """Return unknown experts of two tokens, since all rows of a batch have the same fields."""
    known = [trace.experts for trace in session.traces if trace.experts is not None]
    if not known or not form.experts:
        return None
    return place_experts(known[0][:0], 2, form.dense_layers).astype(np.int16)


def describe(session: Trajectory, versions: np.ndarray) -> dict[str, Any]:
    """Return the common fields of a session's rows, and the versions of a row."""
    calls = {span.call for trace in session.traces for span in trace.spans}
    return {
        "reward_score": session.reward.value,
        "num_turns": len(calls),
        "metrics": AgentLoopMetrics(generate_sequences=session.seconds.get("run", 0.0)),
        "extra_fields": {
            "reward_extra_info": dict(session.reward.parts),
            "min_global_steps": int(versions.min()),
            "max_global_steps": int(versions.max()),
            "tugline_session": session.session,
        },
    }
