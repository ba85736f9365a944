"""``tugline status``: the state of a server, or of one task or session."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tugline.cli.options import DEFAULT_SERVER, Json, Remote, find_by_id
from tugline.cli.output import print_report, print_text
from tugline.cli.tables import make_overview, make_sessions_table, make_tasks_table
from tugline.client.api import Client
from tugline.client.overview import Monitor
from tugline.errors import Missing, ServerError
from tugline.protocol import ResultView, TaskView


async def status(
    name: str | None = None,
    /,
    *,
    remote: Remote = DEFAULT_SERVER,
    watch: bool = False,
    every: Annotated[float, Parameter(validator=Number(gte=0.2))] = 2.0,
    as_json: Json = False,
) -> None:
    """Show what is queued, running and done.

    Args:
        name: Id of a task or session to show alone.
        watch: On a terminal: refresh until interrupted.
        every: Seconds between refreshes.
    """
    console = Console(highlight=False)
    async with remote.connect() as client:
        monitor = Monitor(client)

        async def read() -> tuple[object, RenderableType]:
            if name is not None:
                return await _read_named(client, name)
            overview = await monitor.read()
            return overview, make_overview(overview)

        if watch and console.is_terminal and not as_json:
            with contextlib.suppress(asyncio.CancelledError):  # by an interrupt
                await _watch(read, every, console)
            return
        report, screen = await read()
        print_report(report, lambda: print_text(screen), as_json=as_json)


async def _watch(
    read: Callable[[], Awaitable[tuple[object, RenderableType]]], every: float, console: Console
) -> None:
    """Show the state until interrupted; retry if the server does not answer."""
    _, screen = await read()
    with Live(screen, console=console, screen=True, auto_refresh=False) as view:
        while True:
            await asyncio.sleep(every)
            try:
                _, screen = await read()
                view.update(screen, refresh=True)
            except ServerError as error:
                if error.status is not None and error.status < 500:
                    raise
                view.update(Group(Text(str(error), style="red"), screen), refresh=True)


async def _read_named(client: Client, name: str) -> tuple[object, RenderableType]:
    """Return the report and screen of a task with its sessions, or of a session with its result."""
    view = await find_by_id(client, name)
    if isinstance(view, TaskView):
        sessions = [session async for session in client.sessions(task=name)]
        tables = Group(make_tasks_table([view]), "", make_sessions_table(sessions))
        return {"task": view, "sessions": sessions}, tables
    try:
        result = await client.result(name)
    except Missing:
        return {"session": view, "result": None}, make_sessions_table([view])
    screen = Group(make_sessions_table([view]), "", Text(_describe_result(result)))
    return {"session": view, "result": result}, screen


def _describe_result(result: ResultView) -> str:
    reward = "none" if result.reward is None else f"{result.reward:g}"
    tokens = f"{result.trained} of {result.sampled} sampled tokens are trainable"
    seconds = ", ".join(f"{name} {spent:.1f}" for name, spent in result.seconds.items())
    lines = [f"reward: {reward}; {tokens}; {result.bytes} bytes", f"seconds: {seconds}"]
    if result.failure is not None:
        lines.append(f"failed in the {result.failure.boundary}: {result.failure.message}")
    return "\n".join(lines)
