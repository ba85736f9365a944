"""The rollout server of this process: its control plane, and the API on a socket.

Nothing of a gateway or an engine is imported here: a server that was killed is back in a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tugline.errors import Invalid, UnknownPlugin, UsageError
from tugline.launch.folder import announce, callback_secret, only_one, tokens
from tugline.launch.settings import ServerSettings, Settings
from tugline.launch.stopping import stopping
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
ELSEWHERE = "choose another --dir"
_DAY_S = 86_400.0

Say = Callable[[str], None]
"""Told, line by line, what there is now."""


@contextlib.asynccontextmanager
async def control_plane(settings: ServerSettings, folder: Path) -> AsyncIterator[ControlPlane]:
    """The server without HTTP, with what it keeps below `folder` unless the settings say where."""
    database = open_database(settings.store or f"sqlite:{folder / STORE}")
    async with ControlPlane(
        database,
        open_blobs(settings.blobs or str(folder / BLOBS)),
        folder=folder,
        lease_s=settings.lease_s,
        tenants=settings.tenants,
        check=check,
        secret=callback_secret(folder),
        callback_hosts=settings.callback_hosts,
        keep_events_s=settings.keep_events_days * _DAY_S,
        keep_tasks_s=(settings.keep_tasks_days or math.inf) * _DAY_S,
    ) as control:
        yield control


@contextlib.asynccontextmanager
async def api(
    control: ControlPlane, settings: ServerSettings, folder: Path
) -> AsyncIterator[tuple[str, ServerMetrics]]:
    """The control plane under an address, which clients on this machine find in `folder`."""
    metrics = ServerMetrics(control.database)
    app = Api(control, tokens(folder), metrics)
    metrics.waiting = lambda: app.state.waits.open
    async with serve_api(app, settings.host, settings.port) as url:
        announce(folder, reachable(url))
        yield reachable(url), metrics


async def serve_alone(settings: Settings, folder: Path, say: Say) -> None:
    """A server for nodes elsewhere, until a signal."""
    with only_one(folder, instead=ELSEWHERE):
        async with (
            control_plane(settings.server, folder) as control,
            api(control, settings.server, folder) as (url, _),
        ):
            say(f"the server is up at {url}; it has no node yet")
            freeze_gc()
            stopped = asyncio.Event()
            with stopping(stopped.set):
                await stopped.wait()
            say("stopping")


def check(task: Task) -> None:
    """Refuse a task that could not be run. Raises `Invalid`."""
    check_task(task)
    parts = Parts()  # of its own: a server that runs for weeks keeps none of them
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


def reachable(url: str) -> str:
    """An address that this machine can ask, where the server listens on all."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
