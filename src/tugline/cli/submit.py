"""``tugline submit``: tasks from files to a server, all checked before any is sent.

Submitting the same tasks again changes nothing, so after an interruption the same command goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from tugline.cli.options import Folder, Json, Server, Token, connect
from tugline.cli.status import make_tasks_table
from tugline.cli.task import Paths, read_checked
from tugline.client.api import BATCH, Client
from tugline.protocol import Accepted, Event, EventKind, TaskState, TaskView
from tugline.types import TERMINAL, Task

_MANY = 5 * BATCH
"""Tasks from which on progress is shown."""
_TABLE = 40
"""Tasks that are listed in the end."""


class Submitted(msgspec.Struct, frozen=True):
    """What ``--json`` prints."""

    accepted: list[Accepted]
    released: list[TaskView] | None
    """With ``--wait``: as they ended."""


def submit(
    paths: Paths,
    *,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait until all are over, and tell how they went; exit code 1 if samples miss.",
        ),
    ] = False,
    server: Server = None,
    token: Token = None,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Submit tasks."""
    tasks = read_checked(paths)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    released: list[TaskView] | None = None

    async def main() -> list[Accepted]:
        nonlocal released
        async with connect(server, token, folder) as client:
            before = (await client.status()).position
            accepted = await _send(client, tasks, console)
            _say(console, accepted)
            if wait:
                released = await _follow(client, accepted, before, console)
            return accepted

    try:
        accepted = asyncio.run(main())
    except KeyboardInterrupt:
        console.print("what was accepted goes on; see `tugline status` and `tugline cancel`")
        raise
    if as_json:
        typer.echo(msgspec.json.encode(Submitted(accepted, released)))
    elif released is not None:
        _show(released)
    if any(task.missing and task.reason != "min_usable" for task in released or ()):
        raise typer.Exit(1)


async def _send(client: Client, tasks: Sequence[Task], console: Console) -> list[Accepted]:
    accepted: list[Accepted] = []
    with Progress(console=console, transient=True, disable=len(tasks) < _MANY) as progress:
        bar = progress.add_task("submitting", total=len(tasks))
        for start in range(0, len(tasks), BATCH):
            accepted += await client.submit(tasks[start : start + BATCH])
            progress.update(bar, completed=len(accepted))
    return accepted


def _say(console: Console, accepted: Sequence[Accepted]) -> None:
    new = sum(one.new for one in accepted)
    sessions = sum(len(one.sessions) for one in accepted)
    known = f" (known already: {len(accepted) - new})" if new < len(accepted) else ""
    console.print(f"accepted tasks: {len(accepted)}{known}, sessions: {sessions}")


async def _follow(
    client: Client, accepted: Sequence[Accepted], before: int, console: Console
) -> list[TaskView]:
    """Until all are released, as the events since `before` tell; then how they ended."""
    left = {one.task for one in accepted}
    over: set[str] = set()
    running: set[str] = set()
    for one in accepted:
        if not one.new:
            views = [view async for view in client.sessions(task=one.task)]
            over |= {view.id for view in views if view.status in TERMINAL}
            if (await client.task(one.task)).state is TaskState.RELEASED:
                left.discard(one.task)
    total = sum(len(one.sessions) for one in accepted)
    with _bar(console) as bar:
        line = bar.add_task("sessions", total=total, completed=len(over), running=0)
        async with aclosing(client.events(after=before)) as events:
            while left:
                event = await anext(events)
                if event.task in left:
                    _count(event, left, over, running)
                    bar.update(line, completed=len(over), running=len(running))
    return [await client.task(one.task) for one in accepted]


def _count(event: Event, left: set[str], over: set[str], running: set[str]) -> None:
    name = event.session or ""
    match event.kind:
        case EventKind.LEASED:
            running.add(name)
        case EventKind.REQUEUED:
            running.discard(name)
        case EventKind.RESULT:
            running.discard(name)
            over.add(name)
        case EventKind.RELEASED:
            left.discard(event.task or "")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]} running"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _show(released: Sequence[TaskView]) -> None:
    console = Console(highlight=False)
    console.print(make_tasks_table(list(released[:_TABLE])))
    if len(released) > _TABLE:
        console.print(f"and {len(released) - _TABLE} more")
    usable, samples = sum(one.usable for one in released), sum(one.samples for one in released)
    console.print(f"{usable} of {samples} sessions are usable")
