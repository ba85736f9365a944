"""The rollout server of this process: its folder, control plane, and the API on a socket.

In the folder, ``server.json`` has the server's URL and ``tokens.json`` (0600) its tokens, which are
created once and kept, so that clients and nodes go on over every restart (I6). Nothing of a gateway
or an engine is imported here, so a killed server is back in a second.
"""

import asyncio
import contextlib
import ipaddress
import math
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from tugline.atomic import write_file
from tugline.errors import Invalid, UnknownPlugin, UsageError
from tugline.launch.settings import ServerSettings, Settings
from tugline.rollout.parts import Parts
from tugline.server.blobs import open_blobs
from tugline.server.control import ControlPlane
from tugline.server.http.app import Api, serve_api
from tugline.server.http.route import Tokens
from tugline.server.metrics import ServerMetrics
from tugline.server.store.database import open_database
from tugline.server.validation import check_task
from tugline.signing import key_of, new_secret
from tugline.types import Task
from tugline.web.serve import freeze_gc

SERVER = "server.json"
TOKENS = "tokens.json"
CALLBACK_KEY = "callback.key"
STORE = "server.db"
BLOBS = "blobs"
OTHER_FOLDER = "choose another --dir"
_DAY_S = 86_400.0
_TOKEN_BYTES = 32
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Echo = Callable[[str], None]
"""Prints a line for people."""


@contextlib.contextmanager
def folder_lock(folder: Path, *, instead: str) -> Iterator[None]:
    """Create `folder` and keep other processes out; its `UsageError` ends with `instead`."""
    lock = FileLock(folder / ".lock", mode=0o600, preserve_lock_file=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        msg = f"another process is running in {folder}; wait for it or {instead}"
        raise UsageError(msg) from error
    except OSError as error:
        msg = f"cannot write in {folder}: {error.strerror}; {instead}"
        raise UsageError(msg) from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def handle_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or Ctrl-C; cancel the current task at the second."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    stopping = False

    def on_signal() -> None:
        nonlocal stopping
        if stopping and task is not None:
            task.cancel()
        elif not stopping:
            stopping = True
            stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def write_address(folder: Path, url: str) -> None:
    """Write the server's URL for clients on this machine."""
    write_file(folder / SERVER, msgspec.json.encode({"url": url}))


def load_tokens(folder: Path) -> Tokens:
    """The server's tokens, created if missing. Raises `UsageError` for a damaged file."""
    path = folder / TOKENS
    if not path.exists():
        tokens = Tokens(*(secrets.token_urlsafe(_TOKEN_BYTES) for _ in Tokens.__struct_fields__))
        write_file(path, msgspec.json.format(msgspec.json.encode(tokens)), 0o600)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Tokens)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} cannot be read: {error}; delete it to have it made again"
        raise UsageError(msg) from error


def load_callback_key(folder: Path) -> bytes:
    """The key that signs callbacks; its file has the secret in the form that receivers want."""
    path = folder / CALLBACK_KEY
    if not path.exists():
        write_file(path, new_secret().encode() + b"\n", 0o600)
    return key_of(path.read_text(encoding="utf-8").strip())


@contextlib.asynccontextmanager
async def open_control_plane(settings: ServerSettings, folder: Path) -> AsyncIterator[ControlPlane]:
    """The server without HTTP; its data is below `folder` unless the settings say otherwise."""
    database = open_database(settings.store or f"sqlite:{folder / STORE}")
    async with ControlPlane(
        database,
        open_blobs(settings.blobs or str(folder / BLOBS)),
        folder=folder,
        lease_s=settings.lease_s,
        tenants=settings.tenants,
        check=check_runnable,
        secret=load_callback_key(folder),
        callback_hosts=settings.callback_hosts,
        keep_events_s=settings.keep_events_days * _DAY_S,
        keep_tasks_s=(settings.keep_tasks_days or math.inf) * _DAY_S,
    ) as control:
        yield control


@contextlib.asynccontextmanager
async def serve_control_plane(
    control: ControlPlane, settings: ServerSettings, folder: Path
) -> AsyncIterator[tuple[str, ServerMetrics]]:
    """Serve the API; yields its URL, which is also in `folder` for clients on this machine."""
    metrics = ServerMetrics(control.database)
    app = Api(control, load_tokens(folder), metrics)
    async with serve_api(app, settings.host, settings.port) as url:
        write_address(folder, make_reachable(url))
        yield make_reachable(url), metrics


async def run_server(settings: Settings, folder: Path, echo: Echo) -> None:
    """Run a server for nodes elsewhere, until a signal."""
    with folder_lock(folder, instead=OTHER_FOLDER):
        async with (
            open_control_plane(settings.server, folder) as control,
            serve_control_plane(control, settings.server, folder) as (url, _),
        ):
            echo(f"the server is up at {url}; it has no node yet")
            freeze_gc()
            stopped = asyncio.Event()
            with handle_signals(stopped.set):
                await stopped.wait()
            echo("stopping")


def check_runnable(task: Task) -> None:
    """Raises `Invalid` for a task that could not be run."""
    check_task(task)
    parts = Parts()  # not shared: a server that runs for weeks keeps no instances
    for kind in ("harness", "runtime", "evaluator", "builder"):
        try:
            getattr(parts, kind)(getattr(task, kind))
        except UsageError as error:
            field = "name" if isinstance(error, UnknownPlugin) else "options"
            raise Invalid(str(error), field=f"{kind}.{field}") from error


def is_local(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_reachable(url: str) -> str:
    """Replace the address of all interfaces by that of loopback."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
