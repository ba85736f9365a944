"""One session of the real program: harness, gateway and engine on one machine.

Nothing here judges. A `Run` holds what is needed to do so: how the program ended, the calls
that the gateway recorded, what went over the wire and when, what the program wrote.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tugline.chat.templates.rendering import Rendering
from tugline.conformance.cells import Case
from tugline.conformance.models import Engine, scripted, served
from tugline.conformance.script import Fault, Script
from tugline.gateway.app import Gateway
from tugline.gateway.asgi import Message, Receive, Send
from tugline.gateway.replicas import Upstream
from tugline.harnesses.base import Harness, LaunchContext
from tugline.plugins import find
from tugline.recording import file as recordings
from tugline.sandbox.base import Exit, Sandbox, SandboxSpec
from tugline.sandbox.local import Local
from tugline.types import Call, Limits, PluginSpec, Session, Task

_MODEL = "tugline-policy"
_SESSION = Session(id="check-0", task="check", sample=0)
_LONGEST_FILE = 8 << 20
_LEAVES_AFTER_S = 0.3


@dataclass(slots=True)
class Seen:
    """One request as it went over the wire."""

    path: str
    at: float
    request: bytes = b""
    status: int = 0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    """Unix seconds and bytes of each part of the answer's body."""

    @property
    def response(self) -> bytes:
        """The whole body of the answer."""
        return b"".join(data for _, data in self.chunks)


class RecordingGateway(Gateway):
    """A gateway that notes what passes, and loses the clients of the requests in `broken`."""

    def __init__(self, upstream: Upstream, rendering: Rendering | None, folder: Path) -> None:
        super().__init__(upstream, rendering, folder)
        self.seen: list[Seen] = []
        self.broken: frozenset[int] = frozenset()

    async def app(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on as it comes."""
        if scope["type"] != "http":
            await super().app(scope, receive, send)
            return
        seen = Seen(scope["path"], time.time())
        lost = len(self.seen) in self.broken
        self.seen.append(seen)

        async def taking() -> Message:
            message = await receive()
            seen.request += message.get("body", b"")
            return message

        async def giving(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
            elif message.get("body"):
                seen.chunks.append((time.time(), message["body"]))
            await send(message)

        await (self._lose(taking, giving, scope) if lost else super().app(scope, taking, giving))

    async def _lose(self, taking: Receive, giving: Send, scope: Message) -> None:
        """As when the line breaks behind a proxy: nobody listens any more, the client gets 502."""
        whole = asyncio.Event()

        async def leaving() -> Message:
            if whole.is_set():
                await asyncio.sleep(_LEAVES_AFTER_S)
                return {"type": "http.disconnect"}
            message = await taking()
            if not message.get("more_body"):
                whole.set()
            return message

        async def unheard(_: Message) -> None:
            return

        await super().app(scope, leaving, unheard)
        await giving({"type": "http.response.start", "status": 502, "headers": []})
        await giving({"type": "http.response.body", "body": b""})


@dataclass(frozen=True, slots=True)
class Run:
    """What one session left."""

    exit: Exit
    calls: tuple[Call, ...]
    seen: tuple[Seen, ...]
    files: dict[str, str]
    """The workdir afterwards."""
    log: str
    """What the program wrote to stdout and stderr."""
    told: str
    """The same and the files in its home."""
    sampled: int
    """Tokens that left the engine."""
    owed: int
    """Tokens of the answers that were asked for, each counted once."""
    side_calls: int


@dataclass(frozen=True, slots=True)
class Stage:
    """What a session is given."""

    scripts: Mapping[str, Script]
    """The instruction is the first marker."""
    files: Mapping[str, str] = field(default_factory=dict)
    hitches: Mapping[int, Fault] = field(default_factory=dict)
    broken: frozenset[int] = frozenset()
    max_turns: int | None = None
    timeout_s: float = 120.0
    options: Mapping[str, object] = field(default_factory=dict)


async def rehearse(cell: Case, stage: Stage, folder: Path, engine: Engine | None = None) -> Run:
    """Run the program once in `folder`, which must be empty and stays."""
    answering = served(engine) if engine else scripted(stage.scripts, stage.hitches)
    async with answering as model, Local().open(folder, SandboxSpec(files=stage.files)) as box:
        gateway = RecordingGateway(model.upstream, model.rendering, folder / "recordings")
        gateway.broken = stage.broken
        async with gateway:
            end = await _session(cell, stage, gateway, box)
        return Run(
            exit=end,
            calls=recordings.read(gateway.recording_path(_SESSION)).calls,
            seen=tuple(gateway.seen),
            files=_texts(box.workdir),
            log="\n".join(_texts(box.logs).values()),
            told="\n".join([*_texts(box.logs).values(), *_texts(box.home).values()]),
            sampled=model.engine.stats().sampled_tokens if model.engine else 0,
            owed=model.player.owed if model.player else 0,
            side_calls=model.player.side_calls if model.player else 0,
        )


async def _session(cell: Case, stage: Stage, gateway: Gateway, box: Sandbox) -> Exit:
    options = {**cell.options, **stage.options}
    harness: Harness = find("harness", cell.harness)(**options)
    await harness.install()
    task = Task(
        id=_SESSION.task,
        instruction=next(iter(stage.scripts)),
        harness=PluginSpec(cell.harness, options),
        evaluator=PluginSpec("tests"),
        runtime=PluginSpec("local"),
        files=dict(stage.files),
        limits=Limits(max_turns=stage.max_turns),
    )
    async with gateway.open(
        _SESSION,
        task,
        spent_status=harness.spent_status,
        offers_tools=harness.offers_tools,
        workdir=str(box.workdir),
        home=str(box.home),
    ) as opened:
        seat = LaunchContext(
            instruction=task.instruction,
            workdir=str(box.workdir),
            home=str(box.home),
            base_url=opened.base_url,
            key=opened.key,
            model=_MODEL,
        )
        launch = harness.launch(seat)
        await box.put(box.home, launch.files)
        return await box.run(launch.argv, env=launch.env, timeout_s=stage.timeout_s)


def _texts(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8", errors="replace")
        for path in files
        if path.stat().st_size < _LONGEST_FILE
    }
