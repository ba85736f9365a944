"""Trained from recordings alone: what a builder makes again gives the trainer the same samples."""

from __future__ import annotations

import itertools
from pathlib import Path

from tiny import rendering
from tugline.chat.engines.generate import Embedded
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.gateway.replicas import Upstream
from tugline.inference.server import create_app
from tugline.launch.engine import EngineConnection
from tugline.launch.local import open_local
from tugline.launch.settings import Settings
from tugline.node.settings import NodeSettings
from tugline.recording.trajectories import read_folder, rebuild_all
from tugline.testing import Reply, ScriptedEngine
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.samples import prepare
from tugline.types import Ids, Ledger, Limits, PluginSpec, Reward, Sample, Task, Trajectory, encode
from tugline.web.serve import serve

RENDERING = rendering()
AGENT = """
import json, os, urllib.request as http
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
def ask(*messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    with http.urlopen(http.Request(url, body, head), timeout=20) as reply:
        return json.load(reply)["choices"][0]["message"]
first = {"role": "user", "content": "How many?"}
one = ask(first)
two = ask(first, one, {"role": "user", "content": "Are you sure?"})
ask({"role": "user", "content": "In short: how many?"}, one, {"role": "user", "content": "Sure?"})
open("answer.txt", "w").write(two["content"])
"""
CHOICES = [
    GrpoConfig(),
    GrpoConfig(reward="per_trace", advantage="rloo"),
    GrpoConfig(turn_discount=0.5, max_staleness=0),
]


class Grader(Evaluator):
    """Reward by the answer, and a number for each trace."""

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Longer is better; the first trace is judged apart."""
        value = sum(len(change.data) for change in outcome.patch.files.values() if change) / 7
        per_trace = (value / 3, *(0.1 for _ in outcome.traces[1:]))
        return Verdict(Reward(value, {"length": value}, per_trace), {"seen": True})


TURNS = itertools.count()


def counted(_prompt: Ids, _request_id: str) -> Reply:
    """Another answer, and other log probabilities, for each session and turn."""
    turn = next(TURNS)
    ids = RENDERING.tokenizer.encode("many " * (turn % 17 + 1) + "<|im_end|>")
    return Reply(ids, logprobs=[-(turn % 97 + i) / 31 for i in range(len(ids))])


async def rolled_out(folder: Path) -> list[Trajectory]:
    """Two groups of three sessions, as the node committed them; a group for each builder."""
    engine = ScriptedEngine(counted, vocab_size=RENDERING.tokenizer.size)
    (folder / "agent.py").write_text(AGENT)
    tasks = [
        Task(
            id=name,
            instruction="Count.",
            harness=PluginSpec("shell", {"command": ["python3", "-I", str(folder / "agent.py")]}),
            evaluator=PluginSpec(f"{__name__}:Grader"),
            builder=PluginSpec(name),
            samples=3,
            limits=Limits(agent_s=30),
        )
        for name in ("prefix_merging", "per_request")
    ]
    settings = Settings(node=NodeSettings(slots=2))
    async with serve(create_app(engine, model_name="m")) as url:
        reached = EngineConnection((url,), Upstream(url, Embedded()), RENDERING)
        async with open_local(settings, folder, reached) as cluster:
            return await cluster.run(tasks)


def rebuilt(folder: Path, out: Path, part: PluginSpec | None) -> list[Trajectory]:
    """The trajectories of all recordings, from files."""
    recordings = folder / "recordings"
    rebuild_all(sorted(recordings.glob("*.rec")), recordings, out, part)
    return list(read_folder(out))


def to_bytes(prepared: tuple[list[Sample], Ledger]) -> list[bytes]:
    """Every sample and the ledger."""
    samples, ledger = prepared
    return [encode(one) for one in (*samples, ledger)]


async def test_recordings_are_enough_to_train_from(tmp_path: Path) -> None:
    """Real sessions with a fork: samples from recordings and from the node are byte-equal."""
    live = await rolled_out(tmp_path)
    assert [one.failure for one in live] == [None] * 6
    assert [(one.task, len(one.traces)) for one in live] == [
        *[("prefix_merging", 2)] * 3,
        *[("per_request", 3)] * 3,
    ]
    assert len({one.reward.value for one in live if one.reward}) > 2
    again = rebuilt(tmp_path, tmp_path / "again", None)
    assert sorted(map(encode, again)) == sorted(map(encode, live))
    for config in CHOICES:
        ours, theirs = (prepare(one, config, version=0) for one in (live, again))
        assert len(ours[0]) == 3 * 2 + 3 * 3
        assert to_bytes(ours) == to_bytes(theirs)
    single = rebuilt(tmp_path, tmp_path / "single", PluginSpec("per_request"))
    assert [len(one.traces) for one in single] == [3] * 6
    assert prepare(single, CHOICES[0], version=0)[1] == prepare(live, CHOICES[0], version=0)[1]
