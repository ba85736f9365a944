"""``tugline status``: what a server has to do, and how far a task or a session is.

Here are also the options by which every command that talks to a server finds it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from tugline.client.api import Client
from tugline.errors import Missing
from tugline.protocol import Counts, NodeView, ResultView, SessionView, TaskState, TaskView

Server = Annotated[
    str | None, typer.Option(help="URL of the server (default: TUGLINE_SERVER, else --dir).")
]
Token = Annotated[str | None, typer.Option(help="Its token (default: TUGLINE_TOKEN, else --dir).")]
Folder = Annotated[
    Path | None, typer.Option("--dir", help="Folder of `tugline up` (default: tugline-data).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

T = TypeVar("T")

DEADLINE_S = 10.0
"""People are told soon that a server is not there; what waits goes on over a restart of it."""
LISTED = 20
"""Open tasks that are shown, the oldest."""


class Overview(msgspec.Struct, frozen=True):
    """A server at a glance."""

    counts: Counts
    nodes: tuple[NodeView, ...]
    open: tuple[TaskView, ...]
    """The oldest tasks that are not released."""


class Task(msgspec.Struct, frozen=True):
    """A task with its sessions."""

    task: TaskView
    sessions: tuple[SessionView, ...]


class Session(msgspec.Struct, frozen=True):
    """A session and its result, once there is one."""

    session: SessionView
    result: ResultView | None


def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[TASK|SESSION]", help="Only this one.")
    ] = None,
    *,
    server: Server = None,
    token: Token = None,
    folder: Folder = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is queued, running and done."""
    console = Console(highlight=False)

    async def main() -> None:
        async with reach(server, token, folder) as client:
            seen = await look(client, name)
            if as_json:
                typer.echo(msgspec.json.encode(seen))
                return
            if not watch:
                console.print(shown(seen))
                return
            with Live(shown(seen), console=console, auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(1.0)
                    live.update(shown(await look(client, name)), refresh=True)

    asyncio.run(main())


def reach(server: str | None, token: str | None, folder: Path | None) -> Client:
    """The client of a command."""
    return Client(server, token, folder=folder, deadline_s=DEADLINE_S)


async def look(client: Client, name: str | None) -> Overview | Task | Session:
    """What is asked for. Raises `Missing` for a name of nothing."""
    if name is None:
        open_ = await _first(client.tasks(state=TaskState.OPEN))
        return Overview(await client.status(), tuple(await client.nodes()), tuple(open_))
    try:
        view = await client.task(name)
    except Missing:
        return await _session(client, name)
    return Task(view, tuple(await _first(client.sessions(task=name), view.samples)))


async def _first(items: AsyncIterator[T], most: int = LISTED) -> list[T]:
    found = []
    async for one in items:
        found.append(one)
        if len(found) == most:
            break
    return found


async def _session(client: Client, name: str) -> Session:
    try:
        session = await client.session(name)
    except Missing as error:
        msg = f"there is neither a task nor a session {name!r} at {client.url}"
        raise Missing(msg) from error
    try:
        return Session(session, await client.result(name))
    except Missing:
        return Session(session, None)


# --------------------------------------------------------------------------- on the terminal
def shown(seen: Overview | Task | Session) -> RenderableType:
    """For people."""
    match seen:
        case Overview():
            return _overview(seen)
        case Task():
            return Group(tasks_table([seen.task]), Text(), _sessions_table(seen.sessions))
    parts: list[RenderableType] = [_sessions_table([seen.session])]
    if seen.result is not None:
        parts += [Text(), Text(_told(seen.result))]
    return Group(*parts)


def tasks_table(tasks: list[TaskView]) -> Table:
    """A line for each task."""
    table = Table("task", "state", Column("usable", justify="right"), "sessions", "age", box=None)
    for one in tasks:
        state = f"{one.state}: {one.reason}" if one.reason else str(one.state)
        usable = f"{one.usable}/{one.samples}"
        table.add_row(Text(one.id), Text(state), usable, counts(one.counts), _ago(one.created))
    return table


def counts(of: dict[str, int]) -> str:
    """Numbers by status, in words."""
    return ", ".join(f"{count} {name}" for name, count in of.items()) or "none"


def _overview(seen: Overview) -> Group:
    of = seen.counts
    held = ", model calls are held" if of.paused else ""
    room = f"{of.nodes} with {of.slots} slots"
    lines = [
        f"sessions: {counts(of.sessions)}",
        f"tasks open: {of.tasks_open}; nodes: {room}; weights: version {of.version}{held}",
    ]
    if of.dead_deliveries:
        lines.append(f"callbacks given up: {of.dead_deliveries}")
    nodes = Table("node", "state", Column("running", justify="right"), "slots", "since", box=None)
    for one in seen.nodes:
        numbers = (str(one.running), str(one.slots), _ago(one.registered))
        nodes.add_row(Text(one.name), str(one.state), *numbers)
    parts: list[RenderableType] = [Text("\n".join(lines))]
    parts += [Text(), nodes] if seen.nodes else []
    parts += [Text(), tasks_table(list(seen.open))] if seen.open else []
    return Group(*parts)


def _sessions_table(sessions: tuple[SessionView, ...] | list[SessionView]) -> Table:
    table = Table("session", "status", "attempt", "node", "changed", box=None)
    for one in sessions:
        state = f"{one.status}, stopping ({one.stopping})" if one.stopping else str(one.status)
        cells = (Text(state), str(one.attempt), Text(one.node or "-"), _ago(one.updated))
        table.add_row(Text(one.id), *cells)
    return table


def _told(result: ResultView) -> str:
    reward = "none" if result.reward is None else f"{result.reward:g}"
    tokens = f"{result.trained} of {result.sampled} sampled tokens are trained"
    lines = [
        f"reward: {reward}; {tokens}; {result.bytes} bytes",
        "seconds: " + ", ".join(f"{name} {took:.1f}" for name, took in result.seconds.items()),
    ]
    if result.failure is not None:
        lines.append(f"failed in the {result.failure.boundary}: {result.failure.message}")
    return "\n".join(lines)


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for size, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"
