"""Agent programs that are not presets, in sessions where other gateways lose them.

They are installed from npm on first use. Their own settings point them at the gateway.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import NamedTuple

import msgspec
import psutil
import pytest

from conformance.programs import exact, install_from_npm
from support.engine import RENDERING, Play, reply_with
from support.gateway import OpenSession, open_session
from tugline.errors import HarnessError
from tugline.harnesses.npm import find_node
from tugline.sandbox.processes import run_command
from tugline.schema import decode, read_values
from tugline.testing import Reply
from tugline.types import Branch, Call, CallOutcome, Ids, TraceKind

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]
TASK = "Read a.txt, then say what is in it."
LAST_WORDS = "Done now."
SUMMARY = "<summary>All files were read: walruses and herons.</summary>"
SUMMARISE = ("Please provide a concise summary", "Please create a detailed summary")
"""Phrases in the compaction prompts of Continue and Copilot."""
FILES = {
    "a.txt": "walrus\n",
    "big.txt": "".join(f"line {number} of walruses and herons\n" for number in range(300)),
}
WINDOW = 131_072


class Client(msgspec.Struct, frozen=True):
    """A program, its settings, and its tool that reads a file."""

    name: str
    package: str
    program: str
    """Path of its script below ``node_modules``."""
    argv: tuple[str, ...]
    """Arguments before the task."""
    tool: str
    arguments: str
    """Arguments of the tool as JSON, with ``FILE`` for the file."""
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    """Texts of files by path in its home."""

    def call(self, file: str = "a.txt") -> str:
        """The tool call that reads `file`, as the model writes it."""
        arguments = self.arguments.replace("FILE", file)
        return f'<tool_call>\n{{"name": "{self.tool}", "arguments": {arguments}}}\n</tool_call>'

    def fill_in(self, **values: object) -> Client:
        """Replace the placeholders of its settings."""
        text = Template(msgspec.json.encode(self).decode()).substitute(values)
        return msgspec.json.decode(text, type=Client)


CLIENTS = {
    client.name: client
    for client in decode(read_values(Path(__file__).with_name("clients.yaml")), tuple[Client, ...])
}
each_client = pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)


class Run(NamedTuple):
    """How a client ended."""

    code: int
    output: str

    def __str__(self) -> str:
        return f"exit code {self.code}: {self.output[-2000:]}"


async def play(client: Client, session: OpenSession, folder: Path, window: int = WINDOW) -> Run:
    """Run the client on `TASK` in a new folder."""
    home, work = folder / "home", folder / "work"
    client = client.fill_in(url=session.url, key=session.key, home=home, window=window)
    try:
        packages = await install_from_npm(f"client-{client.name}", [client.package])
    except HarnessError as error:
        pytest.skip(f"{client.name} cannot be installed: {error}")
    files = {home / name: text for name, text in client.files.items()}
    for path, text in (files | {work / name: text for name, text in FILES.items()}).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    home.mkdir(exist_ok=True)
    node, _ = find_node()
    program = packages / "node_modules" / client.program
    env = {"HOME": str(home), "PATH": f"{node.parent}:/usr/bin:/bin", **client.env}
    argv = (str(node), str(program), *client.argv, TASK)
    code, output, errors = await run_command(argv, timeout_s=200, env=env, cwd=work)
    return Run(code, output + errors)


def model(*turns: str, refusals: Iterable[Reply] = ()) -> Play:
    """An engine that gives these answers in order, and refuses some requests after the first.

    It answers requests for a title or a summary, too.
    """
    rest, refused = list(turns), iter(refusals)

    def reply(prompt: Ids, request: str) -> Reply:
        text = RENDERING.tokenizer.decode(prompt.tolist())
        if "<tools>" not in text:
            return reply_with("A title")(prompt, request)
        if any(words in text.rpartition("<|im_start|>user\n")[2] for words in SUMMARISE):
            return reply_with(SUMMARY)(prompt, request)
        refusal = next(refused, None) if len(rest) < len(turns) else None
        return refusal or reply_with(rest.pop(0) if len(rest) > 1 else rest[0])(prompt, request)

    return reply


def main_calls(session: OpenSession) -> list[Call]:
    """The calls of the conversation that have their whole answer."""
    return [
        call
        for call in session.calls
        if call.kind is TraceKind.MAIN and call.outcome is CallOutcome.COMPLETE
    ]


@each_client
async def test_a_session_with_a_tool(tmp_path: Path, client: Client) -> None:
    """The tool runs, each turn continues the one before exactly, every token is counted once."""
    turns = (f"I look.\n{client.call()}", f"Again.\n{client.call()}", LAST_WORDS)
    async with open_session(tmp_path / "rig", model(*turns), window=400_000) as session:
        run = await play(client, session, tmp_path)
        calls, everything, sampled = main_calls(session), session.calls, session.sampled
    folders = (Path(process.info["cwd"] or "/") for process in psutil.process_iter(["cwd"]))
    assert not [cwd for cwd in folders if cwd.is_relative_to(tmp_path)], "programs left running"
    assert run.code == 0, run
    assert LAST_WORDS in run.output, run
    assert [call.branch for call in calls] == [None, None, None]
    assert exact(calls)
    assert sum(len(call.sampled_ids) for call in everything) == sampled
    assert "walrus" in calls[-1].messages[-1].content


@each_client
async def test_an_overloaded_engine_is_asked_again(tmp_path: Path, client: Client) -> None:
    """After more refusals than the gateway's own tries, the client gets the status and retries."""
    refusals = [Reply(status=503)] * 5
    play_turns = model(f"I look.\n{client.call()}", LAST_WORDS, refusals=refusals)
    async with open_session(tmp_path / "rig", play_turns, window=400_000) as session:
        run = await play(client, session, tmp_path)
        calls = main_calls(session)
    assert run.code == 0, run
    assert LAST_WORDS in run.output, run
    assert [call.branch for call in calls] == [None, None]


@each_client
async def test_a_malformed_call_does_not_end_the_session(tmp_path: Path, client: Client) -> None:
    """The client gets the call with the arguments as they were sampled, refuses it and goes on.

    The clients write other arguments into the history: none, the repaired ones, or the text.
    """
    bad = client.call().replace("}}\n</tool_call>", ', "limit": oops}}\n</tool_call>')
    turns = (f"I look.\n{client.call()}", f"Again.\n{bad}", f"Now.\n{client.call()}", LAST_WORDS)
    async with open_session(tmp_path / "rig", model(*turns), window=400_000) as session:
        run = await play(client, session, tmp_path)
        calls = main_calls(session)
    assert run.code == 0, run
    assert LAST_WORDS in run.output, run
    assert [call.branch for call in calls] == [None] * len(turns)
    assert exact(calls)


@each_client
async def test_a_busy_engine_is_asked_again(tmp_path: Path, client: Client) -> None:
    """Refusals that outlast the gateway's wait for headers still reach the client as a status."""
    refusals = [Reply(status=429, retry_after_s=1.0)] * 5
    turns = model(f"I look.\n{client.call()}", LAST_WORDS, refusals=refusals)
    async with open_session(tmp_path / "rig", turns, window=400_000) as session:
        run = await play(client, session, tmp_path)
        calls = main_calls(session)
    assert run.code == 0, run
    assert LAST_WORDS in run.output, run
    assert [call.branch for call in calls] == [None, None]


@pytest.mark.parametrize(("name", "window"), [("continue", 16_000), ("copilot", 24_000)])
async def test_a_compaction_is_followed_by_more_turns(
    tmp_path: Path, name: str, window: int
) -> None:
    """Continue's history ends in the summary; Copilot's request for a summary bans calls."""
    client = CLIENTS[name]
    turns = [f"Look {number}.\n{client.call('big.txt')}" for number in range(5)]
    async with open_session(tmp_path / "rig", model(*turns, LAST_WORDS), window=400_000) as session:
        run = await play(client, session, tmp_path, window)
        calls = session.calls
    assert run.code == 0, run
    assert LAST_WORDS in run.output, run
    assert {call.outcome for call in calls} == {CallOutcome.COMPLETE}
    assert TraceKind.COMPACTION in {call.kind for call in calls}
    assert Branch.COMPACTED in {call.branch for call in calls}
