"""The recipes for verl and Tinker with the installed packages, in environments of their own."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.servers import ROOT, installed
from exports.made import export, record, two_turns
from graded import ONCE, finish
from house import House
from served import TOKENS
from tiny import rendering
from tugline.chat.engines.generate import Embedded
from tugline.client.api import Client
from tugline.evaluators.base import SessionOutcome
from tugline.gateway.replicas import Upstream
from tugline.inference.server import create_app
from tugline.launch.engine import EngineConnection
from tugline.launch.local import open_local
from tugline.launch.settings import Settings
from tugline.node.settings import NodeSettings
from tugline.server.http.app import Api, serve_api
from tugline.stream import GradedGroup, GroupStream
from tugline.testing import Reply, ScriptedEngine
from tugline.types import Ids, PluginSpec, Task
from tugline.web.serve import serve

EXAMPLES = ROOT / "examples"
MODEL = ROOT / "src" / "tugline" / "demo" / "warm_start_model"
RENDERING = rendering()
END = RENDERING.tokenizer.encode("<|im_end|>")
AGENT = """
import json, os, urllib.request
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for calls in (2, 1):
    messages = [{"role": "user", "content": f"{calls}: " + os.environ["TUGLINE_INSTRUCTION"]}]
    for _ in range(calls):
        body = json.dumps({"model": "m", "messages": messages}).encode()
        request = urllib.request.Request(url, body, headers | {"content-type": "application/json"})
        answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": "Go on."}]
"""
"""An agent of two conversations, so of two traces."""
REWARDS: dict[str, float | None] = {
    "prompt0-0": 1.0,
    "prompt0-1": 0.25,
    "prompt0-2": 0.25,
    "prompt1-0": 0.5,
    "prompt1-1": 1.0,
    "prompt1-2": None,
}
"""By task: the prompt and the session that verl asks for."""
PARTS = Path(__file__).parent / "parts"
pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


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
    """Every group that is there now."""
    with GroupStream("the-test", url, TOKENS.client, follow=False) as stream:
        return list(stream)


async def test_data_of_tinker_is_the_stream(house: House, tmp_path: Path) -> None:
    """Read back from the bytes of its request: inputs, and what is one token ahead of them.

    Groups without signal have no data; another temperature than 1 is refused.
    """
    await finish(house, a=[1.0, 0.0, None], b=[1.0, 1.0])
    groups = await asyncio.to_thread(read, house.url)
    sent = await run(house.url, tmp_path, "tinker", "send_tinker.py")
    assert "must be 1" in sent["refused"]
    for sample, datum in zip(groups[0].samples, sent["data"], strict=True):
        assert datum["input"] == sample.input_ids[:-1].tolist()
        assert datum["target_tokens"] == sample.input_ids[1:].tolist()
        assert datum["logprobs"] == sample.logprobs[1:].tolist()
        assert np.float32(datum["advantages"]).tolist() == sample.advantages[1:].tolist()
        assert any(datum["advantages"])


def reply(prompt: Ids, request: str) -> Reply:
    """Answer with the number of tokens, at logprobs that are its place in the answer."""
    answer = [*RENDERING.tokenizer.encode(f"{len(prompt)} {request[-1]}"), *END]
    return Reply(answer, logprobs=[-(n + 1) / 8 for n in range(len(answer))])


def grade(outcome: SessionOutcome) -> dict[str, float]:
    """Earn what the task's id says. Raises `ValueError` for the one that has no reward."""
    value = REWARDS[outcome.task.id]
    if value is None:
        raise ValueError
    return {"value": value, "calls": len(outcome.calls)}


@contextlib.asynccontextmanager
async def running_sessions(folder: Path) -> AsyncIterator[str]:
    """Yield the URL of a server with a node, in front of an engine without a model."""
    engine = ScriptedEngine(reply, vocab_size=RENDERING.tokenizer.size, eos_ids=END, version=5)
    settings = Settings(node=NodeSettings(name="n", slots=2))
    async with serve(create_app(engine, model_name="m")) as url:
        connection = EngineConnection((url,), Upstream(url, Embedded()), RENDERING)
        async with (
            open_local(settings, folder, connection) as local,
            serve_api(Api(local.control, TOKENS)) as served,
        ):
            yield served


async def test_rows_of_verl_are_the_stream(tmp_path: Path) -> None:
    """The manager and workers of verl put our traces into its queue, in a real Ray.

    It has the ids, mask, logprobs, reward and versions of the stream, under the keys by which verl
    compares sessions: its advantages are the rewards less the mean over sessions, however many
    rows one has. A session without a reward fails its prompt and has no rows.
    """
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run").mkdir()
    evaluator = PluginSpec("function", {"target": "engines.test_trainers:grade"})
    shell = PluginSpec("shell", {"command": f"{sys.executable} {tmp_path / 'agent.py'}"})
    asked = Task(id="replaced", instruction="Do.", harness=shell, evaluator=evaluator, group=ONCE)
    body = msgspec.json.encode(asked).decode()
    async with running_sessions(tmp_path / "run") as url:
        made = await run(url, tmp_path, "verl", "run_verl.py", MODEL, body, "2", "3")
        groups = await asyncio.to_thread(read, url)
        async with Client(url, TOKENS.client) as client:
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
        assert sample.versions[first - 1 : first + 1].tolist() == [-1, 5]
        assert row["response_mask"] == sample.loss_mask[first:].tolist()
        assert row["rollout_log_probs"] == sample.logprobs[first:].tolist()
        assert row["rm_scores"] == [*[0] * (len(ids) - first - 1), sample.reward]
        assert (row["tag"]["min_global_steps"], row["tag"]["max_global_steps"]) == (5, 5)
        assert row["num_turns"] == row["extra_fields"]["reward_extra_info"]["calls"] == 3
        assert row["extra_fields"]["tugline_session"] == sample.session
        worth = sample.reward - {"prompt0": 0.5, "prompt1": 0.75}[row["key"].partition("_")[0]]
        padding = [0] * (len(row["advantages"]) - len(ids) + first)
        expected = [*(sample.loss_mask[first:] * worth).tolist(), *padding]
        assert row["advantages"] == pytest.approx(expected)


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
