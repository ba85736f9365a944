"""Record sessions of a real agent with a scripted model, to be replayed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from support.calls import write_calls
from support.engine import create_chat_app
from tugline.chat.engines.chat import VllmChat
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.gateway.app import Gateway
from tugline.gateway.replicas import Upstream
from tugline.recording.file import read, write_result
from tugline.recording.tokenizer_file import save_tokenizer
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.testing import Reply, ScriptedTurn, ServedModel, make_tokenizer, serve_scripted_model
from tugline.types import Call, PluginSpec, Reward, Session, Task
from tugline.web.serve import serve

ROOT = Path(__file__).parents[2]
AGENT = PluginSpec("shell", {"command": ["python3", str(Path(__file__).with_name("agent.py"))]})
LOOP = PluginSpec("shell", {"command": ["python3", str(ROOT / "examples/agents/openai_loop.py")]})
INSTRUCTION = "Copy one.txt to second.txt."
FILES = {"one.txt": "walrus\n"}


def run(command: str) -> tuple[str, dict[str, object]]:
    """A call of the agent's shell tool."""
    return "bash", {"command": command}


TURNS = (
    ScriptedTurn("I look.", calls=(run("cat one.txt; date -Iseconds"), run("pwd"))),
    ScriptedTurn(reasoning="It is short.", calls=(run("cat one.txt > second.txt"),)),
    ScriptedTurn("Done."),
)


class Copied(Evaluator):
    """An evaluator of whether the agent copied the file."""

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Reward 1 if the agent copied the file, else 0."""
        copy = outcome.patch.files.get("second.txt")
        done = copy is not None and copy.text == FILES["one.txt"]
        return Verdict(Reward(float(done)), {})


def task(harness: PluginSpec = AGENT, **changes: Any) -> Task:
    """A task whose evaluator is `Copied`."""
    given: dict[str, Any] = {
        "evaluator": PluginSpec("replay.played:Copied"),
        "files": FILES,
        "instruction": INSTRUCTION,
        "runtime": PluginSpec("local"),  # each session's folder has another name
    }
    return Task(id="t", harness=harness, **given | changes)


@contextlib.asynccontextmanager
async def observed(turns: Sequence[ScriptedTurn]) -> AsyncIterator[ServedModel]:
    """The same model behind an engine that renders prompts itself."""
    async with (
        serve_scripted_model({INSTRUCTION: turns}, {}) as model,
        serve(create_chat_app(model.engine, make_tokenizer())) as url,
    ):
        yield ServedModel(Upstream(url, VllmChat()), None)


async def record(
    folder: Path,
    what: Task | None = None,
    turns: Sequence[ScriptedTurn] = TURNS,
    faults: dict[int, Reply] | None = None,
    model: ServedModel | None = None,
) -> Path:
    """Run one session to its end; its recording."""
    async with contextlib.AsyncExitStack() as stack:
        answering = serve_scripted_model({INSTRUCTION: turns}, faults or {})
        answers = model or await stack.enter_async_context(answering)
        gateway = Gateway(answers.upstream, answers.rendering, folder / "recordings")
        await stack.enter_async_context(gateway)
        session = Session(id="s1", task="t", sample=0)
        directory = folder / "sessions" / "s1.0"
        await roll_out(what or task(), session, gateway=gateway, directory=directory, parts=Parts())
    return folder / "recordings" / "s1.0.rec"


def tampered(
    recording: Path, folder: Path, change: Callable[[Sequence[Call]], Sequence[Call]]
) -> Path:
    """Copy a recording with other calls in it."""
    original = read(recording)
    path = folder / recording.name
    save_tokenizer(make_tokenizer(), folder)
    write_calls(path, change(original.calls), original.header)
    if original.result is not None:
        write_result(path, original.result)
    return path


def saying(call: Call, old: str, new: str) -> Call:
    """`call` with a text replaced in the messages that it adds."""
    messages = tuple(
        replace(each, content=each.content.replace(old, new)) for each in call.messages
    )
    assert messages != call.messages
    return replace(call, messages=messages)


def see_wallaby(calls: Sequence[Call]) -> list[Call]:
    """Calls in which the first command printed something else."""
    return [calls[0], saying(calls[1], "walrus", "wallaby"), *calls[2:]]
