"""What answers in a session: the scripted model, or an engine outside of the sandbox.

A sandbox has no way out but one: a Unix socket in a folder that both sides see. `outside` carries
it to the engine, `served` gives it an address inside.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from tugline.chat.engines.embedded import Embedded
from tugline.chat.templates.rendering import Rendering
from tugline.conformance.script import END, Fault, Player, Script, tokenizer
from tugline.gateway.probe.diagnosis import Report
from tugline.gateway.replicas import Upstream
from tugline.inference.server import create_app
from tugline.testing.scripted_engine import ScriptedEngine
from tugline.types import Mode
from tugline.web.serve import serve

WINDOW = 131_072

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Engine(msgspec.Struct, frozen=True):
    """A running engine: what the doctor says of it, and the socket that leads there."""

    report: Report
    socket: str


@dataclass(frozen=True, slots=True)
class Model:
    """What a gateway is put in front of, and what the script knows of it."""

    upstream: Upstream
    rendering: Rendering | None
    engine: ScriptedEngine | None = None
    player: Player | None = None


@contextlib.asynccontextmanager
async def scripted(
    scripts: Mapping[str, Script], hitches: Mapping[int, Fault]
) -> AsyncIterator[Model]:
    """The scripted model, in exact mode."""
    words = tokenizer()
    player = Player(words, scripts, hitches)
    engine = ScriptedEngine(
        player.reply, vocab_size=words.size, max_model_len=WINDOW, eos_ids=[END]
    )
    rendering = Rendering(words, "qwen3", thinking_retention="all")
    async with serve(create_app(engine, model_name="scripted")) as url:
        yield Model(Upstream(url, Embedded()), rendering, engine, player)


@contextlib.asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[Model]:
    """The engine behind the socket, rendering its own prompts."""
    server = await asyncio.start_server(
        _carried(lambda: asyncio.open_unix_connection(engine.socket)), "127.0.0.1", 0
    )
    async with server:
        port = server.sockets[0].getsockname()[1]
        path = urlsplit(engine.report.url).path
        wire = engine.report.wire(Mode.OBSERVED)
        yield Model(Upstream(f"http://127.0.0.1:{port}{path}", wire), None)


@contextlib.asynccontextmanager
async def outside(url: str, socket: str) -> AsyncIterator[None]:
    """Carry what comes through `socket` to the engine at `url`."""
    address = urlsplit(url)
    secure = address.scheme == "https"
    port = address.port or (443 if secure else 80)
    server = await asyncio.start_unix_server(
        _carried(lambda: asyncio.open_connection(address.hostname, port, ssl=secure or None)),
        socket,
    )
    async with server:
        yield


def _carried(
    dial: Callable[[], Awaitable[Streams]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            there, back = await dial()
            with contextlib.closing(back):
                ways = {asyncio.create_task(_pump(reader, back))}
                ways.add(asyncio.create_task(_pump(there, writer)))
                _, rest = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in rest:
                    way.cancel()

    return carry


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
