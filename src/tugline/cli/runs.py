"""``tugline runs``: the runs of a server that is given or in tugline-data, and those in runs/."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tugline.cli.options import DEFAULT_SERVER, LOOK_S, Json, Remote
from tugline.cli.output import make_table, print_report, print_text
from tugline.cli.training_run import RUNS
from tugline.client.api import Client
from tugline.errors import Missing, TuglineError, UsageError
from tugline.launch.folder_lock import folder_lock
from tugline.launch.naming import is_run, name_run
from tugline.launch.progress import format_seconds
from tugline.launch.server import locate_data
from tugline.launch.tokens import load_tokens
from tugline.protocol import RunView
from tugline.server.settings import ServerSettings
from tugline.server.store import runs as stored

_QUIET_S = 600.0
"""Seconds without a report after which a run that has not ended counts as interrupted."""


async def runs(
    name: str | None = None, /, *, remote: Remote = DEFAULT_SERVER, as_json: Json = False
) -> None:
    """List runs: trainings, evaluations, generations, rejudgings and other runs of tasks.

    Args:
        name: Name of the run to show alone, with its configuration.
    """
    folders = await asyncio.to_thread(_list_folders)
    found = [await _read_folder(path) for path in folders]
    views = [*await _read_server(remote), *(view for view in found if view is not None)]
    views.sort(key=lambda view: view.updated, reverse=True)
    if name is not None:
        views = [view for view in views if view.name == name]
        if not views:
            raise Missing(f"unknown run {name!r}; `tugline runs` lists all")
        shown = views[0]
        print_report(shown, lambda: _show(shown), as_json=as_json)
        return
    print_report(views, lambda: _list(views), as_json=as_json)


async def _read_server(remote: Remote) -> list[RunView]:
    if not remote.is_known:
        return []
    async with remote.connect(LOOK_S) as client:
        return [await client.run_view(view.name) for view in await client.runs()]


def _list_folders() -> list[Path]:
    """Return the folders of runs below the default folder."""
    return [path for path in sorted(RUNS.iterdir()) if is_run(path)] if RUNS.is_dir() else []


async def _read_folder(path: Path) -> RunView | None:
    """Read a run from its store or, while it runs, from its server; None if it has neither."""
    name = name_run(path)
    try:
        with folder_lock(path, instead="ask its server"):
            async with locate_data(ServerSettings(), path)[0] as database:
                return await database.read(stored.get, name)
    except UsageError:  # it runs
        with contextlib.suppress(TuglineError):  # it serves no console
            token = load_tokens(path).read
            async with Client(None, token, folder=path, deadline_s=LOOK_S) as client:
                return await client.run_view(name)
    except Missing:  # of a remote server, which lists it
        pass
    return None


def describe_state(view: RunView, now: float) -> str:
    """Return whether a run has ended, runs, or was interrupted, and how long ago."""
    if view.ended is not None:
        return f"ended {format_seconds(now - view.ended)} ago"
    quiet_s = now - view.updated
    state = "interrupted" if quiet_s > _QUIET_S else "running"
    return f"{state}, last report {format_seconds(quiet_s)} ago"


def _list(views: Sequence[RunView]) -> None:
    if not views:
        print_text("no runs; `tugline demo` makes one")
        return
    rows = [
        (
            view.name,
            view.kind,
            describe_state(view, time.time()),
            format_seconds((view.ended or view.updated) - view.created),
            "" if view.step is None else view.step,
            view.parent or "",
        )
        for view in views
    ]
    print_text(make_table(("run", "kind", "state", "time", "step", "parent"), rows))


def _show(view: RunView) -> None:
    _list([view])
    print_text(msgspec.json.format(msgspec.json.encode(view.configuration)).decode())
