"""The recipes for verl and Tinker with the installed packages, in environments of their own."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from msgspec.structs import replace

from engines.servers import ROOT, installed
from exports.made import export, record, two_turns
from exports.test_forms import EXPERTS, routed_turns
from support.groups import ONCE, finish, trajectory
from support.server import TOKENS, RestartableServer
from support.tasks import make_task
from trainers.sessions import sample as make_sample
from tugline.client.nodes import NodeClient
from tugline.protocol import LeaseRequest, NodeRegistration
from tugline.stream import GradedGroup, GroupStream
from tugline.types import Kept, encode

EXAMPLES = ROOT / "examples"
MODEL = ROOT / "src" / "tugline" / "demo" / "warm_start_model"
REWARDS: dict[str, float | None] = {
    "prompt0-0": 1.0,
    "prompt0-1": 0.25,
    "prompt0-2": 0.25,
    "prompt1-0": 0.5,
    "prompt1-1": 1.0,
    "prompt1-2": None,
}
"""By task, which is named after the prompt and the session that verl requests."""
PARTS = Path(__file__).parent / "parts"
pytestmark = [pytest.mark.engines, pytest.mark.nightly, pytest.mark.timeout(300)]


async def run(url: str, folder: Path, trainer: str, script: str, *arguments: str | Path) -> Any:
    """Run a script with the trainer's own Python; return the JSON that it writes to a file."""
    path = (ROOT / "src", EXAMPLES / trainer)
    process = await asyncio.create_subprocess_exec(
        installed(trainer) / "bin" / "python",
        PARTS / script,
        folder / "result.json",
        *arguments,
        env=os.environ
        | {"TUGLINE_SERVER": url, "TUGLINE_TOKEN": TOKENS.client}
        | {"PYTHONPATH": os.pathsep.join(str(one) for one in path)}
        | {"RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert await process.wait() == 0
    return json.loads((folder / "result.json").read_bytes())


def read(url: str) -> list[GradedGroup]:
    """Every group in the stream so far."""
    with GroupStream("the-test", url, TOKENS.client, follow=False) as stream:
        return list(stream)


async def test_data_of_tinker_is_the_stream(live: RestartableServer, tmp_path: Path) -> None:
    """Tinker's request has the inputs, and targets that are one token ahead of them.

    Groups without signal have no data; another temperature than 1 is refused.
    """
    await finish(live, a=[1.0, 0.0, None], b=[1.0, 1.0])
    groups = await asyncio.to_thread(read, live.url)
    sent = await run(live.url, tmp_path, "tinker", "send_tinker.py")
    assert "must be 1" in sent["refused"]
    assert "experts=False" in sent["refused"]
    for sample, datum in zip(groups[0].samples, sent["data"], strict=True):
        assert datum["input"] == sample.input_ids[:-1].tolist()
        assert datum["target_tokens"] == sample.input_ids[1:].tolist()
        assert datum["logprobs"] == sample.logprobs[1:].tolist()
        assert np.float32(datum["advantages"]).tolist() == sample.advantages[1:].tolist()
        assert any(datum["advantages"])


async def work(live: RestartableServer) -> None:
    """Act as a node whose sessions have two traces, and the reward of `REWARDS`."""
    async with NodeClient(live.url, TOKENS.join) as node:
        welcome = await node.register(NodeRegistration(name="played", slots=9, capacity=9))
        ask = LeaseRequest(capacity=9, applied=welcome.control.generation, wait_s=2.0)
        while True:
            for one in (await node.lease(welcome.node, ask)).work:
                of = one.session
                done = trajectory(of.id, of.task, of.sample, REWARDS[of.task], traces=2)
                await node.commit(of.id, of.epoch, zstandard.compress(encode(done)))


async def test_rows_of_verl_are_the_stream(live: RestartableServer, tmp_path: Path) -> None:
    """The manager and workers of verl put our traces into its queue, in a real Ray.

    The queue has the ids, mask, logprobs, reward and versions of the stream, under the keys by
    which verl compares sessions: its advantages are the rewards less the mean over sessions,
    however many rows a session has. A session without a reward fails its prompt and has no rows.

    The rows are checked together, since verl and Ray take a minute to start.
    """
    body = msgspec.json.encode(make_task("replaced", group=ONCE)).decode()
    working = asyncio.create_task(work(live))
    made = await run(live.url, tmp_path, "verl", "run_verl.py", MODEL, body, "2", "3")
    working.cancel()
    groups = await asyncio.to_thread(read, live.url)
    async with live.client() as client:
        sampling = (await client.task_body("prompt1-2")).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 1.0, 0)
    assert made["prompts"] == {"prompt0": "finished", "prompt1": "failure"}
    ours = {
        f"{group.id.replace('-', '_')}_{i}": sample
        for group in groups
        for i, sample in enumerate(group.samples)
    }
    assert len(ours) == 10
    assert sorted(ours) == [row["key"] for row in made["rows"]]
    for row in made["rows"]:
        sample = ours[row["key"]]
        ids, first = sample.input_ids.tolist(), len(row["prompts"])
        assert row["input_ids"] == row["prompts"] + row["responses"] == ids
        assert row["position_ids"] == list(range(len(ids)))
        assert sample.versions[first - 1 : first + 1].tolist() == [-1, 3]
        assert row["response_mask"] == sample.loss_mask[first:].tolist()
        assert row["rollout_log_probs"] == sample.logprobs[first:].tolist()
        assert row["rm_scores"] == [*[0] * (len(ids) - first - 1), sample.reward]
        assert (row["tag"]["min_global_steps"], row["tag"]["max_global_steps"]) == (3, 4)
        assert row["num_turns"] == 2
        assert row["extra_fields"]["reward_extra_info"] == {"tests": sample.reward}
        assert row["extra_fields"]["tugline_session"] == sample.session
        advantage = sample.reward - {"prompt0": 0.5, "prompt1": 0.75}[row["key"].partition("_")[0]]
        padding = [0] * (len(row["advantages"]) - len(ids) + first)
        expected = [*(sample.loss_mask[first:] * advantage).tolist(), *padding]
        assert row["advantages"] == pytest.approx(expected)


async def test_verl_holds_the_experts_of_a_sample(tmp_path: Path) -> None:
    """The output of verl has the experts of every trained token's context, and 0 elsewhere.

    What verl cannot replay is refused, with the option that trains without.
    """
    experts = np.arange(1, 13, dtype=np.uint8).reshape(3, 2, 2)
    session = trajectory("a-0", "a", 0, 1.0)
    routed = replace(session.traces[0], experts=experts)
    (tmp_path / "trajectory").write_bytes(encode(replace(session, traces=(routed,))))
    versions = np.int32([-1, -1, 3, 3, 3, -1])
    sample = replace(
        make_sample(range(6), [False, False, True, True, False, False], versions=versions),
        experts=experts,
        kept=Kept.of([[], [], [2, 4], [], [], []]),
    )
    (tmp_path / "sample").write_bytes(encode(sample))
    files = [tmp_path / "trajectory", tmp_path / "sample"]
    made = await run("unused", tmp_path, "verl", "make_verl.py", *files)
    held = np.array(made["experts"])
    assert (made["type"], held.shape) == ("torch.int16", (6, 3, 2))
    assert np.array_equal(held[:3, 1:], experts)
    assert not held[:, 0].any()
    assert not held[3:].any()
    assert made["mask"] == [0, 1, 0, 0]
    assert made["empty"] == np.zeros((2, 3, 2), int).tolist()
    assert made["plain"] == []
    assert "experts to false" in made["refused"][0]
    assert "kept to false" in made["refused"][1]


async def test_verl_opens_an_export_with_experts(tmp_path: Path) -> None:
    """A table has the experts of verl's own output, also padded."""
    record(tmp_path, "a", reward=1.0, calls=routed_turns())
    record(tmp_path, "b", sample=1, calls=routed_turns(), reward=0.0)
    for name, options in (("plain", {}), ("padded", {"prompt_length": 3, "response_length": 6})):
        export("verl", tmp_path, tmp_path / f"{name}.parquet", options=options)
    tables = [tmp_path / "plain.parquet", tmp_path / "padded.parquet"]
    made = await run("unused", tmp_path, "verl", "read_export.py", *tables)
    assert made["differing"] == []
    padded = np.pad(EXPERTS, ((1, 3), (0, 0), (0, 0)))
    assert made["experts"] == [padded.tolist()] * 2


async def test_verl_opens_an_export(tmp_path: Path) -> None:
    """A table has the tensors of verl's own output; padded it is a batch that verl computes on."""
    record(tmp_path, "a", reward=1.0)
    record(tmp_path, "b", sample=1, calls=two_turns(20), reward=0.0)
    for name, options in (("plain", {}), ("padded", {"prompt_length": 3, "response_length": 6})):
        export("verl", tmp_path, tmp_path / f"{name}.parquet", options=options)
    tables = [tmp_path / "plain.parquet", tmp_path / "padded.parquet"]
    made = await run("unused", tmp_path, "verl", "read_export.py", *tables)
    assert (made["rows"], made["differing"], made["positions"]) == (2, [], True)
    trained = np.array([1, 1, 0, 1, 0, 0])
    assert made["advantages"] == [(trained * 0.5).tolist(), (trained * -0.5).tolist()]
