"""Sessions of a real agent, recorded with a scripted model, for replays to be held against."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from calls import write_calls
from chat_engine import create_chat_app
from tugline.chat.engines.chat import VllmChat
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.gateway.app import Gateway
from tugline.gateway.replicas import Upstream
from tugline.recording.file import Recording, Writer, read
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
    """A judge that needs no program: whether the agent made the copy."""

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """1 if it did."""
        copy = outcome.patch.files.get("second.txt")
        done = copy is not None and copy.text == FILES["one.txt"]
        return Verdict(Reward(float(done)), {})


def task(harness: PluginSpec = AGENT, **changes: Any) -> Task:
    """A task that its own test judges."""
    given: dict[str, Any] = {
        "evaluator": PluginSpec("replay.played:Copied"),
        "files": FILES,
        "instruction": INSTRUCTION,
        "runtime": PluginSpec("local"),  # where a session's folder has a name of its own
    }
    return Task(id="t", harness=harness, **given | changes)


@contextlib.asynccontextmanager
async def observed(turns: Sequence[ScriptedTurn]) -> AsyncIterator[ServedModel]:
    """The same model behind an engine that renders by itself."""
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
    """Run one session to its end and give its recording."""
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
    """A copy of a recording with other calls in it."""
    found: Recording = read(recording)
    assert found.header is not None
    path = folder / recording.name
    save_tokenizer(make_tokenizer(), folder)
    write_calls(path, change(found.calls), found.header)
    if found.result is not None:
        with Writer(path) as writer:
            writer.append_record(found.result)
    return path


def saying(call: Call, old: str, new: str) -> Call:
    """`call` with another text in what was added to the conversation."""
    messages = tuple(
        msgspec.structs.replace(one, content=one.content.replace(old, new)) for one in call.messages
    )
    assert messages != call.messages
    return msgspec.structs.replace(call, messages=messages)


def see_wallaby(calls: Sequence[Call]) -> list[Call]:
    """As if the first command had printed something else."""
    return [calls[0], saying(calls[1], "walrus", "wallaby"), *calls[2:]]
