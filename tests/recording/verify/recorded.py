"""Sessions recorded by a gateway before a scripted engine or a tiny model."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from inference.tiny_model import tiny
from support.calls import write_calls
from support.engine import RENDERING, reply_in_turn
from support.gateway import ASK, OpenSession, open_session
from tugline.inference.engine import Engine
from tugline.inference.server import create_app
from tugline.recording import file as recordings
from tugline.recording.file import Recording, write_result
from tugline.recording.verify.session import SessionReport, verify_session
from tugline.recording.verify.text import TextVerifier
from tugline.types import Call, Sampling
from tugline.web.serve import serve

LOOK = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py", "n": 1}}\n</tool_call>'
DRAWN = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=1)


def read_in(folder: Path) -> tuple[Path, Recording]:
    """Read the only recording below a folder."""
    (path,) = folder.rglob("*.rec")
    return path, recordings.read(path)


def verify(folder: Path, tokenizer: Path | None = None) -> SessionReport:
    """Verify the only recording below a folder."""
    return verify_session(*read_in(folder), TextVerifier(tokenizer))


def result(name: str, text: str) -> dict[str, Any]:
    """A tool's result as a message of Anthropic's API."""
    content = {"type": "tool_result", "tool_use_id": name, "content": text}
    return {"role": "user", "content": [content]}


async def work(folder: Path) -> None:
    """Record four calls: a tool call, its arguments reordered, an answer, an edited history."""
    async with open_session(
        folder, reply_in_turn(f"Let me look.\n{LOOK}", "It is mended.", "Again.")
    ) as session:
        reply = await session.ask()
        text, use = reply["content"]
        use["input"] = {"n": 1, "path": "a.py"}
        history = [*ASK, {"role": "assistant", "content": [text, use]}, result(use["id"], "def f")]
        reply = await session.ask(history)
        more = [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": "?"},
        ]
        await session.ask([*history, *more])
        await session.ask([{"role": "user", "content": "Mend it, please."}, *history[1:], *more])


def rewritten(path: Path, recording: Recording, change: Callable[[Call], Call]) -> None:
    """Write the recording again with changed calls."""
    path.unlink()
    write_calls(path, map(change, recording.calls), recording.header)
    if recording.result is not None:
        write_result(path, recording.result)


def changed(number: int, **fields: Any) -> Callable[[Call], Call]:
    """Change fields of one call."""
    return lambda call: replace(call, **fields) if call.number == number else call


def one_changed(
    number: int, field: str, place: int | slice, value: float
) -> Callable[[Call], Call]:
    """Change a value in an array of one call."""

    def change(call: Call) -> Call:
        array = getattr(call, field).copy()
        array[place] = value
        return replace(call, **{field: array})

    return lambda call: change(call) if call.number == number else call


class Modelled(NamedTuple):
    """A tiny model, the URL of its server, and an open session on a gateway before it."""

    engine: Engine
    url: str
    session: OpenSession

    async def talk(self, turns: int) -> None:
        """Make calls, each of which extends the one before."""
        messages = list(ASK)
        for number in range(turns):
            reply = await self.session.ask(messages, max_tokens=40)
            messages.append({"role": "assistant", "content": reply["content"] or "-"})
            messages.append({"role": "user", "content": f"And {number}?"})


@contextlib.asynccontextmanager
async def modelled(
    folder: Path, sampling: Sampling = DRAWN, window: int = 700
) -> AsyncIterator[Modelled]:
    """Open a session and start its engine for the duration of the block."""
    async with (
        Engine(tiny(), eos_ids=RENDERING.stop_ids, max_model_len=window, threads=1) as engine,
        serve(create_app(engine, model_name="m")) as url,
        open_session(folder, url, sampling=sampling) as session,
    ):
        yield Modelled(engine, url, session)
