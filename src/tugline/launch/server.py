"""Rollout server of this process: folder, control plane, and API on a socket.

In the folder, ``server.json`` has the server's URL and ``tokens.json`` its tokens (`tokens`). This
module does not import gateway or engine, so a killed server restarts within a second.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from tugline.aio import handle_signals, run_beside
from tugline.atomic import read_or_make, write_file
from tugline.errors import Invalid
from tugline.launch.cluster import keep_cluster
from tugline.launch.folder_lock import folder_lock
from tugline.launch.garbage import freeze_gc
from tugline.launch.settings import Echo, Settings
from tugline.launch.tokens import TOKENS, describe_console, follow_tokens, load_tokens
from tugline.rollout.parts import Parts
from tugline.rollout.rejudge import refuse_evaluator
from tugline.rollout.task_validation import fingerprint_evaluator
from tugline.server.blobs import Blobs, open_blobs
from tugline.server.control import ControlPlane
from tugline.server.http.app import Api, serve_api
from tugline.server.metrics import ServerMetrics
from tugline.server.settings import ServerSettings
from tugline.server.store import events, nodes
from tugline.server.store.database import Database, open_database
from tugline.server.validation import check_task
from tugline.signing import key_of, new_secret
from tugline.types import Task
from tugline.web.serve import raise_file_limit

SERVER = "server.json"
CALLBACK_KEY = "callback.key"
"""File with the secret that signs callbacks, in the receivers' format."""
STORE = "server.db"
BLOBS = "blobs"


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
        *data,
        folder=folder,
        settings=settings,
        check=check_runnable,
        fingerprint=fingerprint_evaluator,
        secret=secret,
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
    settings: ServerSettings, folder: Path, echo: Echo, *, hint: str = "", page: str = ""
) -> AsyncIterator[tuple[ControlPlane, ServerMetrics]]:
    """Open the server with its API, exclusively in `folder`; print its URL, followed by `hint`.

    The link to the console opens `page`.
    """
    with folder_lock(folder, instead="choose another --dir"):
        async with (
            open_control_plane(settings, folder) as control,
            serve_control_plane(control, settings, folder) as (url, metrics),
        ):
            echo(f"the server is up at {url}{hint}")
            echo(describe_console(settings, folder, url, page))
            yield control, metrics


async def run_server(
    settings: Settings, folder: Path, echo: Echo, *, cluster: bool = False, page: str | None = None
) -> None:
    """Run a server for nodes on other machines, or with nodes of a Ray cluster, until a signal.

    With `page`, it only serves its console, whose link opens this page, and expects no nodes.
    """
    raise_file_limit()
    hint = "; no node has joined yet" if page is None else ""
    async with open_server(settings.server, folder, echo, hint=hint, page=page or ""):
        freeze_gc()
        if not cluster and page is None:
            echo(
                f"join a node: TUGLINE_JOIN_TOKEN=... tugline node --server {read_url(folder)}"
                f" --engine URL, with `join` of {folder / TOKENS} as the token"
            )
        stopped = asyncio.Event()
        with handle_signals(stopped.set):
            if cluster:
                await keep_cluster(settings, folder, read_url(folder), stopped, echo)
            else:
                await stopped.wait()
        echo("stopping")


def read_url(folder: Path) -> str:
    """Return the URL of the running server in `folder`, for other processes of this machine."""
    return str(msgspec.json.decode((folder / SERVER).read_bytes())["url"])


def check_runnable(task: Task) -> None:
    """Check that a task can be run. Raises `Invalid`."""
    check_task(task)
    parts = Parts()  # not shared, so that a long-running server does not collect instances
    parts.check(task)
    if task.judges is None:
        return
    if reason := refuse_evaluator(task.evaluator, parts.evaluator(task.evaluator)):
        raise Invalid(reason, field="evaluator")
