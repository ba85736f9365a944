"""Run one session of a real harness against a scripted model, and record what happened."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tugline.cli.harness_check import Case
from tugline.gateway.app import Gateway
from tugline.gateway.policy import DEFAULTS, CallSettings
from tugline.gateway.terms import SessionTerms
from tugline.harnesses.base import Harness, LaunchContext, prepare
from tugline.plugins import find
from tugline.recording import file as recordings
from tugline.sandbox.base import Exit, Sandbox, SandboxSpec
from tugline.sandbox.local import LocalRuntime
from tugline.testing import CONTEXT_WINDOW, Reply, Script, serve_scripted_model
from tugline.types import Call, Limits, PluginSpec, Session, Task
from tugline.web.http import Message, Receive, Send

_MODEL = "tugline-policy"
_SESSION = Session(id="check-0", task="check", sample=0)
_LONGEST_FILE = 8 << 20
_LEAVES_AFTER_S = 0.3


@dataclass(slots=True)
class WireRecord:
    """One request as it went over the wire."""

    at: float
    """Unix seconds when it came."""
    status: int = 0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    """Unix seconds and bytes of each part of the answer's body."""


class RecordingGateway(Gateway):
    """A gateway that records traffic, and drops the clients of the requests in `broken`."""

    def __init__(self, *parts: Any, broken: frozenset[int], **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.requests: list[WireRecord] = []
        self.broken = broken

    async def app(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass each request and answer on unchanged."""
        if scope.get("method") != "POST":  # such as Claude Code's HEAD when it starts
            await super().app(scope, receive, send)
            return
        record = WireRecord(time.time())
        lost = len(self.requests) in self.broken
        self.requests.append(record)

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            elif message.get("body"):
                record.chunks.append((time.time(), message["body"]))
            await send(message)

        await (
            self._drop_client(receive, send_recorded, scope)
            if lost
            else super().app(scope, receive, send_recorded)
        )

    async def _drop_client(self, receive: Receive, send_recorded: Send, scope: Message) -> None:
        """Disconnect as a proxy whose connection breaks; the client gets 502."""
        loop = asyncio.get_running_loop()
        lost = loop.create_future()

        async def receive_then_leave() -> Message:
            message = await receive()
            if not message.get("more_body"):
                loop.call_later(_LEAVES_AFTER_S, lost.set_result, None)
            return message

        async def discard(_: Message) -> None:
            return

        await super().app({**scope, "lost": lost}, receive_then_leave, discard)
        await send_recorded({"type": "http.response.start", "status": 502, "headers": []})
        await send_recorded({"type": "http.response.body", "body": b""})


@dataclass(frozen=True, slots=True)
class SessionRun:
    """The record of one session."""

    exit: Exit
    calls: tuple[Call, ...]
    requests: tuple[WireRecord, ...]
    log: str
    """What the program wrote to stdout and stderr."""
    output: str
    """The same, and the text of the files in its home."""
    sampled: int
    """Tokens that left the engine."""
    expected_tokens: int
    """Tokens of the answers that were requested, each counted once."""
    side_calls: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """The input of a session."""

    scripts: Mapping[str, Script]
    """The instruction is the first marker."""
    files: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[int, Reply] = field(default_factory=dict)
    broken: frozenset[int] = frozenset()
    """Numbers of the requests whose connection breaks."""
    max_turns: int | None = None
    timeout_s: float = 120.0
    tuning: CallSettings = DEFAULTS
    options: Mapping[str, object] = field(default_factory=dict)
    window: int = CONTEXT_WINDOW
    """Of the model, in tokens."""


async def run_session(case: Case, scenario: Scenario, folder: Path) -> SessionRun:
    """Run the program once in `folder`, which must be empty and stays."""
    async with (
        serve_scripted_model(scenario.scripts, scenario.faults) as served,
        LocalRuntime().open(folder, SandboxSpec(files=scenario.files)) as sandbox,
    ):
        served.engine.max_model_len = scenario.window
        served.upstream._settings = scenario.tuning
        gateway = RecordingGateway(
            *(served.upstream, served.rendering, folder / "recordings"),
            settings=scenario.tuning,
            broken=scenario.broken,
        )
        async with gateway:
            end = await _launch(case, scenario, gateway, sandbox)
        return SessionRun(
            exit=end,
            calls=recordings.read(gateway.recording_path(_SESSION)).calls,
            requests=tuple(gateway.requests),
            log="\n".join(_texts(sandbox.logs).values()),
            output="\n".join([*_texts(sandbox.logs).values(), *_texts(sandbox.home).values()]),
            sampled=served.engine.stats().sampled_tokens,
            expected_tokens=served.model.expected_tokens,
            side_calls=served.model.side_calls,
        )


async def _launch(case: Case, scenario: Scenario, gateway: Gateway, sandbox: Sandbox) -> Exit:
    options = {**case.options, **scenario.options}
    harness: Harness = find("harness", case.harness)(**options)
    await harness.install()
    task = Task(
        id=_SESSION.task,
        instruction=next(iter(scenario.scripts)),
        harness=PluginSpec(case.harness, options),
        evaluator=PluginSpec("tests"),
        runtime=PluginSpec("local"),
        files=dict(scenario.files),
        limits=Limits(max_turns=scenario.max_turns),
    )
    terms = SessionTerms(
        spent_status=harness.spent_status,
        offers_tools=harness.offers_tools,
        compaction_phrases=harness.compaction_phrases,
        side_phrases=harness.side_phrases,
        workdir=str(sandbox.workdir),
        home=str(sandbox.home),
    )
    async with gateway.open(_SESSION, task, terms) as opened:
        context = LaunchContext(
            instruction=task.instruction,
            workdir=str(sandbox.workdir),
            home=str(sandbox.home),
            base_url=opened.base_url,
            key=opened.key,
            model=_MODEL,
        )
        launch = harness.launch(context)
        await prepare(sandbox, launch)
        return await sandbox.run(launch.argv, env=launch.env, timeout_s=scenario.timeout_s)


def _texts(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8", errors="replace")
        for path in files
        if path.stat().st_size < _LONGEST_FILE
    }
