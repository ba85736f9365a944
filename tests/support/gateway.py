"""Engines, gateway and an open session for tests, with requests as raw HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from support.engine import RENDERING, Play, create_chat_app
from support.tasks import make_task
from tugline.chat.engines.base import EngineFormat
from tugline.chat.engines.chat import TextChat, VllmChat
from tugline.chat.engines.generate import Embedded
from tugline.chat.templates.rendering import Rendering
from tugline.gateway.app import Gateway
from tugline.gateway.policy import DEFAULTS, CallSettings
from tugline.gateway.replicas import Upstream
from tugline.gateway.session import LiveSession
from tugline.gateway.terms import SessionTerms
from tugline.harnesses.base import COMPACTION_PHRASES, SIDE_PHRASES
from tugline.inference.server import create_app
from tugline.recording.file import Recording, read
from tugline.testing import ScriptedEngine
from tugline.types import Call, Limits, MalformedCalls, Mode, Policy, Sampling, Session
from tugline.web.engine_http import ModelCard
from tugline.web.serve import serve

TOOLS = [{"name": "read", "description": "Read", "input_schema": {"type": "object"}}]
ASK = [{"role": "user", "content": "Mend it."}]


@dataclass
class OpenSession:
    """One open session on a gateway, and the engines behind it."""

    engines: list[ScriptedEngine]
    upstream: Upstream
    gateway: Gateway
    url: str
    key: str
    http: aiohttp.ClientSession

    def body(self, messages: Sequence[Any] = ASK, **fields: Any) -> dict[str, Any]:
        """An Anthropic request."""
        return {
            "model": "m",
            "max_tokens": 4000,
            "messages": list(messages),
            "tools": TOOLS,
            **fields,
        }

    def post(self, body: dict[str, Any], **headers: str) -> Any:
        """Send a request to ``/v1/messages``."""
        return self.http.post(f"{self.url}/v1/messages", json=body, headers=headers)

    def post_openai(self, path: str = "chat/completions", **fields: Any) -> Any:
        """Send the same question to another API."""
        messages = {} if "input" in fields else {"messages": ASK}
        return self.http.post(f"{self.url}/v1/{path}", json={"model": "m", **messages, **fields})

    async def ask(self, messages: Sequence[Any] = ASK, **fields: Any) -> dict[str, Any]:
        """The whole reply."""
        async with self.post(self.body(messages, **fields)) as response:
            reply: dict[str, Any] = await response.json()
            return {"status": response.status, **reply}

    @property
    def calls(self) -> tuple[Call, ...]:
        """Recorded calls."""
        return self.gateway.read_calls("s1")

    async def read(self, messages: Sequence[Any] = ASK, **fields: Any) -> str:
        """The whole streamed reply."""
        async with self.post(self.body(messages, stream=True, **fields)) as response:
            text: str = await response.text()
            return text

    async def hang_up(self, *, characters: int = 1) -> str:
        """Ask for a stream, leave when some of its text came; returns the text so far."""
        response = await self.post(self.body(stream=True))
        text = ""
        while len(text_of(text)) < characters:
            text += (await response.content.readany()).decode()
        response.close()
        return text_of(text)

    @property
    def recording(self) -> Recording:
        """The session's file, read."""
        return read(self.gateway.recording_path(Session(id="s1", task="t", sample=0)))

    @property
    def live(self) -> LiveSession:
        """The gateway's own state of the session."""
        return self.gateway._sessions.find(self.key, None)

    @property
    def sampled(self) -> int:
        """Tokens that the engines sampled."""
        return sum(engine.stats().sampled_tokens for engine in self.engines)

    @property
    def running(self) -> int:
        """Requests in progress on the engines."""
        return sum(engine.stats().running for engine in self.engines)


@contextlib.asynccontextmanager
async def open_session(
    folder: Path,
    *plays: Play | str,
    window: int = 20_000,
    limits: Limits | None = None,
    sampling: Sampling | None = None,
    policy: Policy = Policy.ENFORCE,
    malformed: MalformedCalls = MalformedCalls.RAW,
    spent_status: int = 400,
    wire: EngineFormat | None = None,
    tuning: CallSettings = DEFAULTS,
    card: ModelCard | None = None,
    idle_s: float = 300.0,
    rendering: Rendering | None = RENDERING,
    on_hang: Callable[[float], None] = lambda _seconds: None,
    **options: Any,
) -> AsyncIterator[OpenSession]:
    """One engine replica per play, a gateway and one session, up while the block lasts.

    A play that is text is the address of an engine that runs already. With a `card`, no engine is
    asked for its models. `options` are other arguments of the gateway.
    """
    engines = [
        ScriptedEngine(play, vocab_size=RENDERING.tokenizer.size, max_model_len=window)
        for play in plays
        if not isinstance(play, str)
    ]
    given = {"limits": limits or Limits(), "sampling": sampling or Sampling()}
    task = make_task("t", instruction="", sampling_policy=policy, malformed=malformed, **given)
    async with contextlib.AsyncExitStack() as stack:
        urls = [play for play in plays if isinstance(play, str)]
        for engine in engines:
            app = create_app(engine, model_name="scripted")
            urls.append(await stack.enter_async_context(serve(app)))
        upstream = Upstream(urls, wire or Embedded(), card=card, idle_s=idle_s, settings=tuning)
        gateway = await stack.enter_async_context(
            Gateway(upstream, rendering, folder, settings=tuning, **options)
        )
        opened = await stack.enter_async_context(
            gateway.open(
                Session(id="s1", task="t", sample=0),
                task,
                SessionTerms(
                    spent_status=spent_status,
                    compaction_phrases=COMPACTION_PHRASES,
                    side_phrases=SIDE_PHRASES,
                ),
                on_hang=on_hang,
            )
        )
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                headers={
                    "x-api-key": opened.key,
                    "authorization": f"Bearer {opened.key}",
                    "anthropic-version": "2023-06-01",
                },
                timeout=aiohttp.ClientTimeout(total=30),
                connector=aiohttp.TCPConnector(limit=0),
            )
        )
        yield OpenSession(engines, upstream, gateway, opened.base_url, opened.key, http)


@contextlib.asynccontextmanager
async def open_session_in_mode(
    folder: Path, play: Play, mode: Mode, **options: Any
) -> AsyncIterator[OpenSession]:
    """A session on one engine in a mode; in modes other than exact, the engine renders prompts."""
    if mode is Mode.EXACT:
        async with open_session(folder, play, **options) as session:
            yield session
        return
    tokenizer = RENDERING.tokenizer
    engine = ScriptedEngine(play, vocab_size=tokenizer.size, max_model_len=20_000)
    wire = VllmChat() if mode is Mode.OBSERVED else TextChat()
    async with (
        serve(create_chat_app(engine, tokenizer)) as url,
        open_session(folder, url, wire=wire, rendering=None, **options) as session,
    ):
        yield session


def text_of(stream: str) -> str:
    """All text deltas of an Anthropic stream."""
    lines = [line for line in stream.split("\n\n")[:-1] if "\ndata:" in line]
    events = [json.loads(line.partition("\ndata:")[2]) for line in lines]
    return "".join(event.get("delta", {}).get("text", "") for event in events)
