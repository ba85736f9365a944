"""Gateway of several processes, each with its own sessions, for machines with many processors.

The node starts, monitors and replaces the processes. They share only the disk: the URL of a session
selects its process. A call is on disk before its response ends (I3), so a process that dies loses
no call: its replacement listens at the same address and opens the sessions from their recordings,
and agents continue after a retry. Conversations stored for requests without a history
(``previous_response_id``) are lost.

Node and process exchange pickled messages over a pair of sockets and trust each other. A process
ends when the node's socket is closed, so it does not outlive a killed node.
"""

import asyncio
import contextlib
import pickle
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import uvloop

from tugline import errors, log
from tugline.aio import run_beside
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.gateway.app import Gateway
from tugline.gateway.engine import DEFAULT_TERMS, Opened, SessionState, SessionTerms, Traffic
from tugline.gateway.replicas import Upstream
from tugline.launch.engine import EngineConnection
from tugline.launch.garbage import managed_gc
from tugline.protocol import PauseMode
from tugline.recording.folder import tokenizer_name
from tugline.types import Session, Task
from tugline.web.engine_http import ModelCard
from tugline.web.serve import raise_file_limit

_CORES = 16
"""Processors per process; agents on 16 processors use about half of a process."""
_ANSWER_S = 60.0
"""Timeout, in seconds, of a process's start and of a request, including a replacement."""
_PAUSE_S = 0.5
"""Pause before a process is replaced."""
_STOP_S = 15.0
_REPORT_S = 1.0
_PROCESS = "from tugline.launch.workers import run_process; run_process()"
_log = log.get("launch.workers")


def count_workers(wanted: int | str, processors: int) -> int:
    """Return the number of processes for ``gateway.workers``."""
    return max(1, processors // _CORES) if isinstance(wanted, str) else wanted


class Channel:
    """Message channel between a node and a process of its gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, *message: object) -> None:
        """Send a message, without waiting."""
        data = pickle.dumps(message)
        self._writer.write(len(data).to_bytes(8) + data)

    async def receive(self) -> tuple[Any, ...]:
        """Receive the next message. Raises `EOFError` when the other end is closed."""
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
    """First message to a process: its configuration, and the state of the process before."""

    upstream: Upstream
    template: tuple[Path, str, dict[str, str]] | None
    """Tokenizer, renderer and options of the rendering; None if the engine renders."""
    folder: Path
    listen: dict[str, Any]
    """Host and port to listen on."""
    logging: dict[str, Any]
    sessions: tuple[tuple[Session, Task, SessionTerms], ...] = ()
    version: int = 0
    """Version of the weights."""
    paused: PauseMode | None = None


class _Worker:
    """Process that is replaced when it ends."""

    def __init__(self, start: GatewayStart) -> None:
        self.start = start
        """State for the next process, without `sessions`."""
        self.sessions: dict[str, tuple[Session, Task, SessionTerms]] = {}
        self.on_hang: dict[str, Callable[[float], None]] = {}
        self.traffic, self.ended = Traffic(), Traffic()
        """Traffic of the current process, and of all earlier processes."""
        self.url, self.card = "", ModelCard("", 0)
        self.pid = self.load = 0
        """Process id, and number of sessions that are open or being opened."""
        self._channel: Channel | None = None
        self.ready = asyncio.Event()
        """Set while a process listens."""
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._requests = 0

    async def run(self) -> None:
        """Keep a process up until cancelled."""
        while True:
            reason = f"it did not start within {_ANSWER_S:.0f} s"
            try:
                async with self._open_process() as reading:
                    await asyncio.wait({reading}, timeout=_ANSWER_S)
                    if self.ready.is_set() or reading.done():
                        await reading
            except Exception as error:  # noqa: BLE001 - logged; the process is replaced
                reason = log.describe_error(error)
            count = len(self.sessions)
            _log.error("gateway process ended", url=self.url, sessions=count, reason=reason)
            await asyncio.sleep(_PAUSE_S)

    async def ask(self, name: str, *args: Any, deadline_s: float = _ANSWER_S, **named: Any) -> Any:
        """Call a method in the process, or in its replacement if it dies before the answer.

        Raises the errors of the method, and `TimeoutError`.
        """
        number = self._requests = self._requests + 1
        try:
            async with asyncio.timeout(deadline_s):
                while await self.ready.wait() and self._channel is not None:
                    answer = self._answers[number] = asyncio.get_running_loop().create_future()
                    self._channel.send(number, name, args, named)
                    with contextlib.suppress(EOFError):
                        return await answer
        finally:
            self._answers.pop(number, None)
        raise errors.EngineError("the gateway is closed")

    @contextlib.asynccontextmanager
    async def _open_process(self) -> AsyncIterator[asyncio.Task[None]]:
        """Start a process; yield the task that reads its messages. Both end with the block."""
        own, other = socket.socketpair()
        with other:
            command = (sys.executable, "-c", _PROCESS, str(other.fileno()))
            process = await asyncio.create_subprocess_exec(*command, pass_fds=[other.fileno()])
        channel = Channel(*await asyncio.open_connection(sock=own))
        channel.send(replace(self.start, sessions=tuple(self.sessions.values())))
        reading = log.start_task(self._read(channel), "gateway-process-messages")
        try:
            self.pid = process.pid
            yield reading
        finally:
            channel.close()
            reading.cancel()
            await asyncio.wait({reading})
            try:
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    async def _read(self, channel: Channel) -> None:
        """Handle messages until the process ends; open requests then raise `EOFError`."""
        try:
            while True:
                message = await channel.receive()
                self._handle(message)
                if message[0] == "up":
                    self._channel = channel
                    self.ready.set()
        finally:
            self.ready.clear()
            self._channel = None
            self.ended, self.traffic = Traffic.total((self.ended, self.traffic)), Traffic()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(EOFError())

    def _handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("up", url, card):
                self.url, self.card = url, card
                # Its replacement listens at the same address.
                at = self.start.listen | {"port": urlsplit(url).port}
                self.start = replace(self.start, listen=at)
            case ("traffic", traffic):
                self.traffic = traffic
            case ("hang", session, seconds) if session in self.on_hang:
                self.on_hang[session](seconds)
            case ("answer", number, value, error) if number in self._answers:
                answer = self._answers[number]
                if answer.done():
                    return
                if error is None:
                    answer.set_result(value)
                else:
                    name, text = error
                    answer.set_exception(getattr(errors, name, OSError)(text))


class Workers(Gateway):
    """Gateway of `count` processes that serve the model calls; see the module."""

    def __init__(
        self, engine: EngineConnection, folder: Path, *, host: str, port: int, count: int
    ) -> None:
        """Write recordings to `folder`. The processes listen on `port` and the following ports."""
        super().__init__(engine.upstream, engine.rendering, folder, host=host, port=port)
        self._replicas, self._count = engine.upstream, count
        self.workers: list[_Worker] = []

    async def __aenter__(self) -> Self:
        template, rendering = None, self._engine.rendering
        if rendering is not None:
            await asyncio.to_thread(self._engine.keep_tokenizer, self._folder)
            tokenizer = self._folder / tokenizer_name(self._engine.tokenizer)
            template = tokenizer, rendering.name, rendering.options
        async with contextlib.AsyncExitStack() as stack:
            for number in range(self._count):
                at = {"host": self._host, "port": self._port and self._port + number}
                start = GatewayStart(self._replicas, template, self._folder, at, log.configured)
                worker = _Worker(start)
                stack.callback(worker.ready.set)  # open requests then raise an error
                await stack.enter_async_context(run_beside(worker.run()))
                self.workers.append(worker)
            up = (worker.ready.wait() for worker in self.workers)
            try:
                await asyncio.wait_for(asyncio.gather(*up), _ANSWER_S)
            except TimeoutError as error:
                msg = f"the gateway's processes do not start at {self._host}; see the log"
                raise errors.UsageError(msg) from error
            self.url, self._engine.card = self.workers[0].url, self.workers[0].card
            self._stack = stack.pop_all()
        return self

    @property
    def traffic(self) -> Traffic:
        """See `Gateway.traffic`; the traffic of running processes is up to a second old."""
        every = [part for worker in self.workers for part in (worker.ended, worker.traffic)]
        return Traffic.total(every)

    @contextlib.asynccontextmanager
    async def open(
        self,
        session: Session,
        task: Task,
        terms: SessionTerms = DEFAULT_TERMS,
        *,
        on_hang: Callable[[float], None] = lambda _seconds: None,
    ) -> AsyncIterator[Opened]:
        """See `Gateway.open`."""
        worker = min(self.workers, key=lambda worker: worker.load)
        worker.load += 1
        try:
            opened: Opened = await worker.ask("open", session, task, terms)
            worker.sessions[session.id] = session, task, replace(terms, key=opened.key)
            worker.on_hang[session.id] = on_hang
            yield opened
        finally:  # also if `open` was cancelled
            await asyncio.shield(self._end(worker, session))

    async def _end(self, worker: _Worker, session: Session) -> None:
        try:
            state = await worker.ask("close", session.id)
        finally:
            worker.load -= 1
            opened = worker.sessions.pop(session.id, None)
            worker.on_hang.pop(session.id, None)
        if state is not None:
            self._keep_closed(session.id, state)
        elif opened is not None:
            self._keep_closed(session.id, SessionState(self.recording_path(session)))
            raise errors.CaptureError(f"session {session.id!r} could not be opened again")

    def describe(self, session: str) -> SessionState:
        """See `Gateway.describe`; for a live session only the path of its recording."""
        for worker in self.workers:
            if session in worker.sessions:
                return SessionState(self.recording_path(worker.sessions[session][0]))
        return self._closed[session]

    async def pause(self, mode: PauseMode = PauseMode.WAIT, *, within_s: float = 600.0) -> None:
        """See `Gateway.pause`."""
        limits = {"deadline_s": within_s + _ANSWER_S, "within_s": within_s}
        await self._ask_all({"paused": mode}, "pause", mode, **limits)

    async def resume(self) -> None:
        """See `Gateway.resume`."""
        await self._ask_all({"paused": None}, "resume")

    async def set_weights_version(self, version: int) -> None:
        """See `Gateway.set_weights_version`."""
        await self._ask_all({"version": version}, "set_weights_version", version)

    async def _ask_all(self, state: dict[str, Any], name: str, *args: Any, **named: Any) -> None:
        """Call a method in every process; store the state for processes that start later."""
        for worker in self.workers:
            worker.start = replace(worker.start, **state)
        await asyncio.gather(*(worker.ask(name, *args, **named) for worker in self.workers))


# --------------------------------------------------------------------------- in a process
class _Process:
    """Executor of the node's requests: methods of its own, and of the gateway."""

    def __init__(self, start: GatewayStart, channel: Channel) -> None:
        self._start, self._channel = start, channel
        self._stacks: dict[str, contextlib.AsyncExitStack] = {}
        rendering = None
        if start.template is not None:
            tokenizer, renderer, options = start.template
            rendering = Rendering(Tokenizer.load(tokenizer), renderer, **options)
        parts = start.upstream, rendering, start.folder
        self.gateway = Gateway(*parts, **start.listen, prepare=self._restore)

    async def _restore(self, gateway: Gateway) -> None:
        """Restore the state of the previous process, before the gateway listens."""
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
        state = self.gateway.describe(session)
        self.gateway.forget(session)
        return state

    async def answer(
        self, number: int, name: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        method = getattr(self if name in {"open", "close"} else self.gateway, name)
        answer = error = None
        try:
            answer = await method(*arguments, **options)
        except Exception as raised:  # noqa: BLE001 - sent to the node
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
            pass  # the node has closed its socket


def run_process() -> None:
    """Run a process of a gateway; its argument is the file descriptor of its socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the process group; the node decides
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        uvloop.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
