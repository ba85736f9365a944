"""A process of a gateway: what `tugline.launch.workers` starts, and how both talk.

Node and process exchange pickled messages over a pair of sockets; they trust each other. The
process ends when the node's end is closed, so none outlives a node that was killed.
"""

import asyncio
import contextlib
import pickle
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from tugline import errors, log
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.gateway.app import Gateway
from tugline.gateway.engine import Opened, SessionState, SessionTerms
from tugline.gateway.replicas import Upstream
from tugline.launch.server import managed_gc
from tugline.protocol import PauseMode
from tugline.types import Session, Task
from tugline.web.serve import raise_file_limit

_REPORT_S = 1.0
_log = log.get("launch.gateway_process")


class Channel:
    """Messages between a node and a process of its gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, *message: object) -> None:
        """Send a message, without waiting."""
        data = pickle.dumps(message)
        self._writer.write(len(data).to_bytes(8) + data)

    async def receive(self) -> tuple[Any, ...]:
        """The next message. Raises `EOFError` when the other end is closed."""
        try:
            length = int.from_bytes(await self._reader.readexactly(8))
            message: tuple[Any, ...] = pickle.loads(await self._reader.readexactly(length))  # noqa: S301
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error
        return message

    def close(self) -> None:
        """Close this end."""
        self._writer.close()


@dataclass(frozen=True, slots=True)
class GatewayStart:
    """First message to a process: what it serves, and the state of the one before."""

    upstream: Upstream
    template: tuple[Path, str, str] | None
    """Tokenizer, renderer and thinking retention; None where the engine renders."""
    folder: Path
    listen: dict[str, Any]
    """Host and port."""
    logging: dict[str, Any]
    sessions: tuple[tuple[Session, Task, SessionTerms], ...] = ()
    version: int = 0
    """Of the weights."""
    paused: PauseMode | None = None


class _Process:
    """Does what the node asks for: its own methods, and those of the gateway."""

    def __init__(self, start: GatewayStart, channel: Channel) -> None:
        self._start, self._channel = start, channel
        self._stacks: dict[str, contextlib.AsyncExitStack] = {}
        rendering = None
        if start.template is not None:
            tokenizer, renderer, retention = start.template
            rendering = Rendering(Tokenizer.load(tokenizer), renderer, thinking_retention=retention)
        parts = start.upstream, rendering, start.folder
        self.gateway = Gateway(*parts, **start.listen, prepare=self._restore)

    async def _restore(self, gateway: Gateway) -> None:
        """Bring the gateway to the state of the process before, before it listens."""
        await gateway.set_weights_version(self._start.version)
        if self._start.paused is not None:
            await gateway.pause(self._start.paused)
        for session, task, terms in self._start.sessions:
            try:
                await self.open(session, task, terms)
            except (errors.TuglineError, OSError) as error:
                _log.error("session not opened again", session=session.id, error=str(error))

    async def open(self, session: Session, task: Task, terms: SessionTerms) -> Opened:
        def on_hang(seconds: float) -> None:
            self._channel.send("hang", session.id, seconds)

        stack = contextlib.AsyncExitStack()
        opening = self.gateway.open(session, task, terms, on_hang=on_hang)
        opened = await stack.enter_async_context(opening)
        self._stacks[session.id] = stack
        return opened

    async def close(self, session: str) -> SessionState | None:
        if session not in self._stacks:
            return None
        await self._stacks.pop(session).aclose()
        return self.gateway.describe(session)

    async def answer(
        self, number: int, name: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        asked = getattr(self if name in {"open", "close"} else self.gateway, name)
        answer = error = None
        try:
            answer = await asked(*arguments, **options)
        except Exception as raised:  # noqa: BLE001 - the other sessions go on
            error = type(raised).__name__, str(raised)
        self._channel.send("answer", number, answer, error)

    async def report(self) -> None:
        while True:
            self._channel.send("traffic", self.gateway.traffic)
            await asyncio.sleep(_REPORT_S)


async def _serve(end: socket.socket) -> None:
    channel = Channel(*await asyncio.open_connection(sock=end))
    (start,) = await channel.receive()
    log.configure(**start.logging)
    raise_file_limit()
    process = _Process(start, channel)
    async with process.gateway as gateway, managed_gc(lambda: gateway.idle):
        channel.send("up", gateway.url, gateway.card)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(process.report())
                while True:
                    tasks.create_task(process.answer(*await channel.receive()))
        except* EOFError:
            pass  # the node has closed its end


def main() -> None:
    """Run one process; its argument is the descriptor of its end of the sockets."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of the whole group: the node says when
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        uvloop.run(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
