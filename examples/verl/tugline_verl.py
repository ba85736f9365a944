"""Sessions of Tugline as an agent loop of verl.

For each session that verl requests, its task is submitted to a rollout server of Tugline, and the
graded traces become rows of verl. verl owns engines, weights, groups and the update.
"""

from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from tugline import Client, TuglineError
from tugline.stream import GradedGroup
from tugline.types import Sample, Sampling, Task, Trajectory


class TuglineAgentLoop(AgentLoopBase):
    """Runs a session for each call of `run`; server and token are found as by `Client`."""

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
        return make_outputs(group, self.tokenizer.eos_token_id)


def read_sampling(task: Sampling, given: dict[str, Any]) -> Sampling:
    """Replace the task's sampling by verl's parameters, in which a top-k of -1 means none."""
    top_k = max(given["top_k"], 0)
    return replace(task, temperature=given["temperature"], top_p=given["top_p"], top_k=top_k)


def make_outputs(group: GradedGroup, end_id: int) -> list[AgentLoopOutput]:
    """Return a row for each trace, or a row without trained tokens that has the reward.

    Raises `TuglineError` for a session without a reward; verl then counts its prompt as failed.
    """
    session = next(iter(group.trajectories), None)
    if session is None or session.reward is None:
        reason = session.failure if session is not None else "it did not run"
        msg = f"session of {group.id} has no reward: {reason}"
        raise TuglineError(msg)
    rows = [make_output(session, sample) for sample in group.samples]
    return rows or [
        AgentLoopOutput(
            prompt_ids=[end_id],
            response_ids=[end_id],
            response_mask=[0],
            response_logprobs=[0.0],
            **describe(session, np.array([0])),
        )
    ]


def make_output(session: Trajectory, sample: Sample) -> AgentLoopOutput:
    """Convert a trace; the response begins with the first sampled token."""
    sampled = sample.versions >= 0
    first = int(np.argmax(sampled))
    return AgentLoopOutput(
        prompt_ids=sample.input_ids[:first].tolist(),
        response_ids=sample.input_ids[first:].tolist(),
        response_mask=sample.loss_mask[first:].astype(int).tolist(),
        response_logprobs=sample.logprobs[first:].tolist(),
        **describe(session, sample.versions[sampled]),
    )


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
