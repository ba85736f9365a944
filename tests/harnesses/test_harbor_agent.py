"""The agent for Harbor in `examples/harbor_agent`, with stand-ins for Harbor's types."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from support import harbor
from tugline.inference.server import create_app
from tugline.recording import file as recordings
from tugline.testing import (
    END_ID,
    Reply,
    ScriptedEngine,
    ScriptedModel,
    ScriptedTurn,
    make_tokenizer,
)
from tugline.types import Ids
from tugline.web.serve import serve

RECIPE = Path(__file__).parents[2] / "examples" / "harbor_agent"
ASKED = "Read one.txt."
SCRIPT = (
    ScriptedTurn("I look.", calls=(("Bash", {"command": "cat one.txt"}),)),
    ScriptedTurn("So."),
)


class Environment:
    """Records the variables of its commands; runs a hook of the test after a call."""

    variables: dict[str, str] = {}  # noqa: RUF012 - replaced

    def __init__(self, after_call: Any = None) -> None:
        self._after_call = after_call

    @contextlib.contextmanager
    def scoped_exec_env(self, env: dict[str, str]) -> Iterator[None]:
        """Set variables for a while."""
        self.variables = env
        yield

    async def after_call(self) -> None:
        """Run the hook."""
        if self._after_call:
            await self._after_call()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Any]:
    """A scripted engine on a socket, with the options by which an agent reaches it."""
    tokenizer = make_tokenizer()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    model = ScriptedModel(tokenizer, {ASKED: SCRIPT})

    def reply(prompt: Ids, request: str) -> Reply:
        ids = model.reply(prompt, request).ids
        return Reply(ids, [-(index % 8) / 4 for index, _ in enumerate(ids)])

    scripted = ScriptedEngine(reply, vocab_size=tokenizer.size, eos_ids=[END_ID], version=7)
    async with serve(create_app(scripted, model_name="scripted")) as url:
        files = {"tokenizer": str(tmp_path / "tokenizer.json"), "renderer": "qwen3"}
        yield SimpleNamespace(calls=scripted.calls, options={"engine": url, **files})


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe's module."""
    harbor.install(monkeypatch)
    monkeypatch.syspath_prepend(RECIPE)
    return importlib.import_module("tugline_harbor")


async def test_a_run_becomes_rollout_details(recipe: Any, engine: Any, tmp_path: Path) -> None:
    """The details have prompts and sampled tokens, with logprobs, mask and versions.

    The details are those of one run, which takes seconds.
    """
    logs, environment, context = tmp_path / "trial" / "agent", Environment(), SimpleNamespace()
    context.metadata = {"mine": 1}
    agent = recipe.ClaudeCode(logs, extra_env={"CLAUDE_CODE_MAX_RETRIES": "9"}, **engine.options)
    await agent.run(ASKED, environment, context)
    agent.populate_context_post_run(context)

    prompts = [call.prompt_ids.tolist() for call in engine.calls if call.max_tokens > 1][-2:]
    [detail] = context.rollout_details
    assert detail["prompt_token_ids"] == prompts
    first, last = detail["completion_token_ids"]
    assert prompts[1][: len(prompts[0]) + len(first)] == prompts[0] + first
    assert last[-1] == END_ID
    for name in ("loss_mask", "versions"):
        assert [len(turn) for turn in detail["extra"][name]] == [len(first), len(last)]
    assert {*detail["extra"]["loss_mask"][0], *detail["extra"]["versions"][0]} == {1, 7}
    assert detail["logprobs"][0] == [-(index % 8) / 4 for index, _ in enumerate(first)]
    assert (context.n_output_tokens, context.cost_usd, context.metadata["mine"]) == (1, None, 1)
    summary = context.metadata["tugline"]
    assert summary["sampled"] == summary["trained"] == len(first) + len(last)
    assert len(recordings.read(logs / summary["recording"]).calls) == 2
    assert len(list((logs / "tugline").glob("tokenizer-*.json"))) == 1


def test_only_the_variables_of_the_model_are_set(recipe: Any, tmp_path: Path) -> None:
    """The address as the environment reaches it, key and name are set; other variables stay."""
    own = {"CLAUDE_CODE_MAX_RETRIES": "9", "ANTHROPIC_API_KEY": "a person's"}
    agent = recipe.ClaudeCode(
        tmp_path / "trial" / "agent", own, reach="http://host.docker.internal:{port}/"
    )
    preset = recipe.Preset(context_window=4096)
    opened = recipe.Opened("http://0.0.0.0:81/s/one", "secret")
    variables = agent.make_variables(preset, opened, "http://0.0.0.0:81")
    assert variables["ANTHROPIC_BASE_URL"] == "http://host.docker.internal:81/s/one"
    assert variables["ANTHROPIC_API_KEY"] == "secret"
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"
    assert {variables[name] for name in recipe.OTHER_CREDENTIALS} == {""}
    assert not {"CLAUDE_CONFIG_DIR", "CLAUDE_CODE_MAX_RETRIES"} & variables.keys()


async def test_an_agent_that_is_stopped_keeps_what_it_sampled(
    recipe: Any, engine: Any, tmp_path: Path
) -> None:
    """When Harbor cancels an agent at its timeout, its tokens are kept and the gateway closes."""
    called = asyncio.Event()

    async def hang() -> None:
        called.set()
        await asyncio.Event().wait()

    environment, context = Environment(hang), SimpleNamespace(metadata=None)
    agent = recipe.ClaudeCode(tmp_path / "trial" / "agent", **engine.options)
    running = asyncio.create_task(agent.run(ASKED, environment, context))
    await called.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    agent.populate_context_post_run(context)
    assert len(context.rollout_details[0]["completion_token_ids"]) == 1
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(environment.variables["ANTHROPIC_BASE_URL"])


async def test_trials_of_a_job_share_a_gateway(recipe: Any, engine: Any, tmp_path: Path) -> None:
    """Trials share a port, for one firewall rule, and have a session each."""
    both = asyncio.Barrier(2)
    environments = [Environment(both.wait), Environment(both.wait)]
    agents = [recipe.ClaudeCode(tmp_path / name / "agent", **engine.options) for name in "ab"]
    await asyncio.gather(
        *(
            agent.run(ASKED, environment, None)
            for agent, environment in zip(agents, environments, strict=True)
        )
    )
    urls = [httpx.URL(each.variables["ANTHROPIC_BASE_URL"]) for each in environments]
    assert urls[0].port == urls[1].port
    assert urls[0].path != urls[1].path
    assert [agent.summary["sampled"] for agent in agents] == [agents[0].summary["trained"]] * 2
