"""``tugline submit``: submit tasks from files, all of them checked before any is sent.

Submitting is idempotent, so after an interruption the same command resumes.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import aclosing

import msgspec
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn

from tugline.cli.options import DEFAULT_SERVER, Json, Remote, make_bar, print_json
from tugline.cli.status import make_tasks_table
from tugline.cli.task import Paths, read_checked
from tugline.client.api import Client
from tugline.protocol import Accepted, Event, EventKind, TaskState, TaskView
from tugline.types import TERMINAL

_LISTED = 40
"""Tasks that are listed at the end."""


class Submitted(msgspec.Struct, frozen=True):
    """Output of ``--json``."""

    accepted: list[Accepted]
    released: list[TaskView] | None
    """With ``--wait``: their final state."""


async def submit(
    *paths: Paths, wait: bool = False, remote: Remote = DEFAULT_SERVER, as_json: Json = False
) -> None:
    """Submit tasks.

    Args:
        wait: Wait until all are released; exit 1 if any sample is missing.
    """
    tasks = read_checked(paths)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    released: list[TaskView] | None = None
    try:
        async with remote.connect() as client:
            before = (await client.status()).position
            with console.status(f"submitting {len(tasks)} tasks"):
                accepted = await client.submit(tasks)
            _print_accepted(console, accepted)
            if wait:
                released = await _follow(client, accepted, before, console)
    except asyncio.CancelledError:
        console.print("accepted tasks continue; see `tugline status` and `tugline cancel`")
        raise
    if as_json:
        print_json(Submitted(accepted, released))
    elif released is not None:
        _print_released(released)
    if any(task.missing and task.reason != "min_usable" for task in released or ()):
        sys.exit(1)


def _print_accepted(console: Console, accepted: Sequence[Accepted]) -> None:
    new = sum(each.new for each in accepted)
    sessions = sum(len(each.sessions) for each in accepted)
    known = f" (known already: {len(accepted) - new})" if new < len(accepted) else ""
    console.print(f"accepted tasks: {len(accepted)}{known}, sessions: {sessions}")


async def _follow(
    client: Client, accepted: Sequence[Accepted], before: int, console: Console
) -> list[TaskView]:
    """Show progress from events after `before` until all tasks are released; return them."""
    open_tasks = {each.task for each in accepted}
    final: set[str] = set()
    running: set[str] = set()
    for each in accepted:
        if not each.new:
            views = [view async for view in client.sessions(task=each.task)]
            final |= {view.id for view in views if view.status in TERMINAL}
            if (await client.task(each.task)).state is TaskState.RELEASED:
                open_tasks.discard(each.task)
    total = sum(len(each.sessions) for each in accepted)
    running_column = TextColumn("{task.fields[running]} running")
    with make_bar(console, running_column, TimeElapsedColumn()) as bar:
        line = bar.add_task("sessions", total=total, completed=len(final), running=0)
        async with aclosing(client.events(after=before)) as events:
            while open_tasks:
                event = await anext(events)
                if event.task in open_tasks:
                    _count(event, open_tasks, final, running)
                    bar.update(line, completed=len(final), running=len(running))
    return [await client.task(each.task) for each in accepted]


def _count(event: Event, open_tasks: set[str], final: set[str], running: set[str]) -> None:
    name = event.session or ""
    match event.kind:
        case EventKind.LEASED:
            running.add(name)
        case EventKind.REQUEUED:
            running.discard(name)
        case EventKind.RESULT:
            running.discard(name)
            final.add(name)
        case EventKind.RELEASED:
            open_tasks.discard(event.task or "")


def _print_released(released: Sequence[TaskView]) -> None:
    console = Console(highlight=False)
    console.print(make_tasks_table(list(released[:_LISTED])))
    if len(released) > _LISTED:
        console.print(f"and {len(released) - _LISTED} more")
    usable, samples = sum(task.usable for task in released), sum(task.samples for task in released)
    console.print(f"{usable} of {samples} sessions are usable")
