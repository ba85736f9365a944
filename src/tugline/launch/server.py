"""The rollout server of this process: its control plane, and the API on a socket.

Nothing of a gateway or an engine is imported here, so a killed server is back in a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tugline.errors import Invalid, UnknownPlugin, UsageError
from tugline.launch.process import (
    folder_lock,
    handle_signals,
    load_callback_key,
    load_tokens,
    write_address,
)
from tugline.launch.settings import ServerSettings, Settings
from tugline.rollout.parts import Parts
from tugline.server.blobs import open_blobs
from tugline.server.control import ControlPlane
from tugline.server.http.app import Api, serve_api
from tugline.server.metrics import ServerMetrics
from tugline.server.store.database import open_database
from tugline.server.validation import check_task
from tugline.types import Task
from tugline.web.serve import freeze_gc

STORE = "server.db"
BLOBS = "blobs"
OTHER_FOLDER = "choose another --dir"
_DAY_S = 86_400.0

Echo = Callable[[str], None]
"""Prints a line for people."""


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
    metrics.waiting = lambda: app.state.waits.open
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
