"""Rollout server of this process: folder, control plane, and API on a socket.

In the folder, ``server.json`` has the server's URL and ``tokens.json`` (mode 0600) its tokens. They
are created once, so that clients and nodes continue after a restart (I6). This module does not
import gateway or engine, so a killed server restarts within a second.
"""

import asyncio
import contextlib
import ctypes
import gc
import ipaddress
import itertools
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from tugline import log
from tugline.atomic import read_or_make, write_file
from tugline.errors import TuglineError, UsageError
from tugline.launch.programs import Echo, keep_program
from tugline.launch.settings import Settings, encode_path
from tugline.rollout.parts import Parts
from tugline.sandbox.base import run_beside
from tugline.server.blobs import Blobs, open_blobs
from tugline.server.control import ControlPlane
from tugline.server.http.app import Api, serve_api
from tugline.server.http.route import Tokens
from tugline.server.metrics import ServerMetrics
from tugline.server.settings import ServerSettings
from tugline.server.store import events, nodes
from tugline.server.store.database import Database, open_database
from tugline.server.validation import check_task
from tugline.signing import key_of, new_secret
from tugline.types import Task
from tugline.web.serve import raise_file_limit

SERVER = "server.json"
TOKENS = "tokens.json"
CALLBACK_KEY = "callback.key"
"""File with the secret that signs callbacks, in the receivers' format."""
STORE = "server.db"
BLOBS = "blobs"
TOKENS_EVERY_S = 5.0
"""Seconds between two reads of ``tokens.json``."""
CLUSTER = "cluster.json"
"""File with the settings of a cluster's nodes."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = log.get("server")


@contextlib.contextmanager
def folder_lock(folder: Path, *, instead: str) -> Iterator[None]:
    """Create and lock `folder`. Raises `UsageError` with the advice `instead`."""
    lock = FileLock(folder / ".lock", mode=0o600, preserve_lock_file=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        msg = f"another process is running in {folder}; wait for it or {instead}"
        raise UsageError(msg) from error
    except OSError as error:
        raise UsageError(f"cannot write in {folder}: {error.strerror}; {instead}") from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def handle_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or Ctrl-C; cancel the current task at the second."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    again = stop if task is None else task.cancel

    def on_signal() -> None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, again)
        stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def load_tokens(folder: Path) -> Tokens:
    """Read the server's tokens; create missing ones. Raises `UsageError` for a damaged file."""
    path = folder / TOKENS
    if not path.exists():
        client, join, read = (secrets.token_urlsafe(32) for _ in range(3))
        tokens = Tokens(client, join, read)
        write_file(path, msgspec.json.format(msgspec.json.encode(tokens)), 0o600)
    return _read_tokens(path)


def _read_tokens(path: Path) -> Tokens:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Tokens)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} cannot be read: {error}; delete it to create it again"
        raise UsageError(msg) from error


async def follow_tokens(app: Api, database: Database, path: Path) -> None:
    """Apply changes of ``tokens.json`` until cancelled; ignore a missing or damaged file."""
    while True:
        await asyncio.sleep(TOKENS_EVERY_S)
        try:
            if (tokens := _read_tokens(path)) != app.tokens:
                await database.write(nodes.bind_tokens, tokens.join)
                app.tokens = tokens
                _log.warning("tokens replaced", file=str(path))
        except TuglineError as error:
            _log.error("tokens not replaced", error=str(error))


def describe_console(settings: ServerSettings, folder: Path, url: str) -> str:
    """Return the line about the console; on loopback it has a link with the read token."""
    if not is_local(settings.host):
        return f"the console is at {url}; it asks for a token of {folder / TOKENS}"
    return f"the console is at {url}/#token={load_tokens(folder).read}"


def locate_data(settings: ServerSettings, folder: Path) -> tuple[Database, Blobs]:
    """Return database, not opened, and blobs; both in `folder` unless the settings differ."""
    database = open_database(settings.store or f"sqlite:{folder / STORE}")
    return database, open_blobs(settings.blobs or str(folder / BLOBS))


def open_control_plane(settings: ServerSettings, folder: Path) -> ControlPlane:
    """Return the server without HTTP; its data is in `folder` unless the settings differ."""
    data = locate_data(settings, folder)
    text = read_or_make(folder / CALLBACK_KEY, lambda: f"{new_secret()}\n", 0o600)
    secret = key_of(text.strip())
    return ControlPlane(
        *data, folder=folder, settings=settings, check=check_runnable, secret=secret
    )


@contextlib.asynccontextmanager
async def serve_control_plane(
    control: ControlPlane, settings: ServerSettings, folder: Path
) -> AsyncIterator[tuple[str, ServerMetrics]]:
    """Serve the API; yield its URL, which is also in `folder` for clients on this machine."""
    started = await control.database.read(events.latest)
    metrics = ServerMetrics(control.database, started)
    tokens = load_tokens(folder)
    await control.database.write(nodes.bind_tokens, tokens.join)
    app = Api(control, tokens, metrics)
    path = folder / TOKENS
    serving = serve_api(app, settings.host, settings.port, settings.tls)
    async with serving as bound, run_beside(follow_tokens(app, control.database, path)):
        url = bound.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        write_file(folder / SERVER, msgspec.json.encode({"url": url}))
        try:
            yield url, metrics
        except BaseException:  # such as an unusable engine: no stale address for clients
            (folder / SERVER).unlink(missing_ok=True)
            raise


@contextlib.asynccontextmanager
async def open_server(
    settings: ServerSettings, folder: Path, echo: Echo, *, hint: str = ""
) -> AsyncIterator[tuple[ControlPlane, ServerMetrics]]:
    """Open the server with its API, exclusively in `folder`; print its URL, followed by `hint`."""
    with folder_lock(folder, instead="choose another --dir"):
        async with (
            open_control_plane(settings, folder) as control,
            serve_control_plane(control, settings, folder) as (url, metrics),
        ):
            echo(f"the server is up at {url}{hint}")
            echo(describe_console(settings, folder, url))
            yield control, metrics


async def run_server(
    settings: Settings, folder: Path, echo: Echo, *, cluster: bool = False
) -> None:
    """Run a server for nodes on other machines, or with nodes of a Ray cluster, until a signal."""
    raise_file_limit()
    async with open_server(settings.server, folder, echo, hint="; it has no node yet"):
        freeze_gc()
        stopped = asyncio.Event()
        with handle_signals(stopped.set):
            await (_keep_cluster(settings, folder, stopped, echo) if cluster else stopped.wait())
        echo("stopping")


async def _keep_cluster(
    settings: Settings, folder: Path, stopped: asyncio.Event, echo: Echo
) -> None:
    """Keep ``tugline node --cluster ray`` running; it drains all nodes at the end.

    It is a separate process, since Ray aborts a process whose cluster is lost. Raises `UsageError`.
    """
    data = msgspec.json.encode(settings, enc_hook=encode_path)
    write_file(folder / CLUSTER, data, 0o600)
    tokens = load_tokens(folder)
    env = {"TUGLINE_JOIN_TOKEN": tokens.join, "TUGLINE_TOKEN": tokens.read}
    config = str(folder / CLUSTER)
    arguments = ("node", "--cluster", "ray", "--server", read_url(folder), "--config", config)
    await keep_program("the process that places nodes", arguments, env, stopped, echo)


def read_url(folder: Path) -> str:
    """Return the URL of the running server in `folder`, for other processes of this machine."""
    return str(msgspec.json.decode((folder / SERVER).read_bytes())["url"])


def check_runnable(task: Task) -> None:
    """Check that a task can be run. Raises `Invalid`."""
    check_task(task)
    Parts().check(task)  # not shared, so that a long-running server does not collect instances


def is_local(host: str) -> bool:
    """Whether `host` is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --------------------------------------------------------------------------- garbage collection
def freeze_gc(young: int = 20_000, middle: int = 20) -> None:
    """Exclude all existing objects from garbage collection; call once a server has started.

    Modules, templates and vocabularies are never freed, and scanning them would stop every stream
    for about 80 ms. Session state lives long and has few cycles, so it is scanned less often.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, 50)


@contextlib.asynccontextmanager
async def managed_gc(
    is_idle: Callable[[], bool], every_s: float = 10.0, full: int = 30
) -> AsyncIterator[None]:
    """Limit garbage collections to a few milliseconds during the block.

    Objects that survive two collections, such as the state of open sessions, are not scanned again,
    since they have hardly any cycles. Every `full` intervals of `every_s`, if `is_idle`, all
    objects are collected. Every interval, glibc returns free pages to the system, which it does not
    do by itself while blocks of open sessions lie between them: a third of the memory at 500
    sessions.
    """

    def exclude(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 1:
            gc.freeze()

    trim = getattr(ctypes.CDLL(None), "malloc_trim", time.sleep)  # glibc; others need no call

    async def tidy() -> None:
        for number in itertools.count():
            if number % full == 0 and is_idle():
                freeze_gc(young=300, middle=3)
            await asyncio.sleep(every_s)
            await asyncio.to_thread(trim, 0)

    gc.callbacks.append(exclude)
    try:
        async with run_beside(tidy()):
            yield
    finally:
        gc.callbacks.remove(exclude)
