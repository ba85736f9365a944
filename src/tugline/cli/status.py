"""``tugline status``, ``logs``, ``results`` and ``cancel``: inspect and cancel work of a server.

With ``results --consumer`` the server stores the position, and results are acknowledged once they
are on disk (I3); with ``--out`` alone the position is that of the latest result in the folder.
"""

import asyncio
import codecs
import contextlib
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from tugline.cli.options import DEFAULT_SERVER, Count, Json, Remote, Required
from tugline.cli.output import format_counts, make_table, print_json, print_report, print_text
from tugline.client.api import Client
from tugline.client.overview import Monitor, Overview
from tugline.errors import Missing, ServerError, UsageError
from tugline.log import visible
from tugline.protocol import Cancelled, NodeState, ResultView, SessionView, TaskView
from tugline.recording.trajectories import ResultFolder
from tugline.types import STAGES, TERMINAL, Status

_LINE = re.compile(r"[^\t\n\r]+")
_NODE_STYLES = {NodeState.LIVE: "", NodeState.DRAINING: "yellow", NodeState.GONE: "dim"}


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
            return overview, render(overview)

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
    view = await _find(client, name)
    if isinstance(view, TaskView):
        sessions = [session async for session in client.sessions(task=name)]
        tables = Group(make_tasks_table([view]), "", _make_sessions_table(sessions))
        return {"task": view, "sessions": sessions}, tables
    try:
        result = await client.result(name)
    except Missing:
        return {"session": view, "result": None}, _make_sessions_table([view])
    screen = Group(_make_sessions_table([view]), "", Text(_describe_result(result)))
    return {"session": view, "result": result}, screen


async def _find(client: Client, name: str) -> TaskView | SessionView:
    """Read the task or session with this id. Raises `Missing` if there is neither."""
    with contextlib.suppress(Missing):
        return await client.task(name)
    try:
        return await client.session(name)
    except Missing as error:
        raise Missing(f"{name!r} is neither a task nor a session of {client.url}") from error


# --------------------------------------------------------------------------- on the terminal
def render(overview: Overview) -> RenderableType:
    """Render the state of a server as tables."""
    tables = [_make_summary(overview), _make_nodes_table(overview)]
    if overview.open:
        tables.append(make_tasks_table(overview.open))
    if overview.failures:
        rows = (
            (failure.session, _format_age(failure.at), " ".join(failure.reason.split())[:100])
            for failure in overview.failures
        )
        tables.append(make_table(("failed", "ago", "reason"), rows))
    return Group(*(part for table in tables for part in (table, "")))


def _make_summary(overview: Overview) -> Table:
    counts = overview.counts
    weights = f"weights {counts.version}" + (", paused" if counts.paused else "")
    rate = f"{overview.sessions_per_minute:,.1f} sessions/min"
    reward = "" if overview.reward is None else f"  mean reward {overview.reward:.3g}"
    finished = {name: n for name, n in counts.sessions.items() if Status(name) in TERMINAL}
    rows = {
        "server": f"{overview.url}  position {counts.position:,}  {weights}",
        "queued": f"{counts.sessions.get('queued', 0):,}  {format_counts(overview.queue)}",
        "running": ", ".join(f"{counts.sessions.get(stage, 0):,} {stage}" for stage in STAGES),
        "finished": format_counts(finished) or "none",
        "tasks": f"{counts.tasks_open:,} open",
        "rate": f"{rate}  {overview.tokens_per_second:,.0f} sampled tokens/s{reward}",
        "unread": format_counts(overview.unread),
        "callbacks": f"{counts.dead_deliveries:,} given up" if counts.dead_deliveries else "",
    }
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        if text:
            table.add_row(Text(name, style="bold"), Text(text))
    return table


def _make_nodes_table(overview: Overview) -> Table:
    table = Table("node", "state", "slots", "sessions", *STAGES, "lease", box=None)
    for load in overview.nodes:
        node = load.node
        lease = f"{load.lease_s:.0f} s" if node.state is not NodeState.GONE else ""
        state = f"quarantine: {node.fault}" if node.fault else node.state.value
        style = "red" if node.fault else _NODE_STYLES[node.state]
        stages = (str(load.stages.get(stage, "")) for stage in STAGES)
        cells = (str(node.slots), str(node.running), *stages, lease)
        table.add_row(Text(node.name), Text(state), *cells, style=style)
    if not overview.nodes:
        table.add_row("none: start one with `tugline node`")
    return table


def make_tasks_table(tasks: Iterable[TaskView]) -> Table:
    """Make a table with one row per task."""
    columns = ("task", "state", Column("usable", justify="right"), "sessions", "age")
    rows = (
        (
            task.id,
            f"{task.state}: {task.reason}" if task.reason else task.state,
            f"{task.usable}/{task.samples}",
            format_counts(task.counts),
            _format_age(task.created),
        )
        for task in tasks
    )
    return make_table(columns, rows)


def _make_sessions_table(sessions: Sequence[SessionView]) -> Table:
    rows = (
        (
            view.id,
            f"{view.status}, stopping ({view.stopping})" if view.stopping else view.status,
            view.attempt,
            view.node or "-",
            _format_age(view.updated),
        )
        for view in sessions
    )
    return make_table(("session", "status", "attempt", "node", "changed"), rows)


def _describe_result(result: ResultView) -> str:
    reward = "none" if result.reward is None else f"{result.reward:g}"
    tokens = f"{result.trained} of {result.sampled} sampled tokens are trained"
    seconds = ", ".join(f"{name} {spent:.1f}" for name, spent in result.seconds.items())
    lines = [f"reward: {reward}; {tokens}; {result.bytes} bytes", f"seconds: {seconds}"]
    if result.failure is not None:
        lines.append(f"failed in the {result.failure.boundary}: {result.failure.message}")
    return "\n".join(lines)


def _format_age(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


# --------------------------------------------------------------------------- results
async def results(
    *,
    consumer: str | None = None,
    task: list[str] | None = None,
    out: Path | None = None,
    recordings: bool = False,
    follow: Annotated[bool, Parameter(alias="-f")] = False,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Read results in order of commit, and save them with their trajectories.

    Args:
        consumer: Read from the position of this consumer, and acknowledge results.
        task: Only results of this task; repeatable.
        out: Save to this folder: results.jsonl and trajectories/.
        recordings: Also save recordings/, for export, verify and view.
        follow: Wait for further results.
    """
    if recordings and out is None:
        raise UsageError("--recordings requires --out, the folder to save to")
    saved = ResultFolder(out) if out else None
    after = max((view.position for view in saved.views.values()), default=0) if saved else None
    count = 0
    try:
        async with remote.connect() as client:
            stream = client.results(
                consumer,
                after=after if consumer is None else None,
                tasks=task or (),
                follow=follow,
                auto_ack=consumer is not None,
            )
            async with aclosing(stream) as items:
                async for item in items:
                    if out and recordings and item.packed:
                        try:
                            await client.recording(item.view.session, out / "recordings")
                        except Missing as error:  # on another machine; the result is saved
                            print_text(str(error), stderr=True)
                    if saved:
                        await asyncio.to_thread(saved.add, item.view, item.packed)
                    if as_json:
                        print_json(item.view)
                    else:
                        print(_format_result(item.view))
                    count += 1
    finally:
        if saved:
            saved.write_index()
            print_text(f"saved in {out}: {count} new, {len(saved.views)} in total", stderr=True)
    if not count and not saved:
        print_text("no new results", stderr=True)


def _format_result(view: ResultView) -> str:
    reward = "no reward" if view.reward is None else f"reward {view.reward:g}"
    tokens = f"{view.trained} of {view.sampled} tokens trained"
    failure = f": {view.failure.boundary}, {view.failure.message}" if view.failure else ""
    return f"{view.position} {view.session} {view.status}, {reward}, {tokens}{failure}"


# --------------------------------------------------------------------------- logs and cancel
async def logs(
    session: str,
    /,
    *,
    follow: Annotated[bool, Parameter(alias="-f")] = False,
    tail: Count | None = None,
    remote: Remote = DEFAULT_SERVER,
) -> None:
    """Print the log of a session.

    Escape sequences are removed on a terminal.

    Args:
        session: Id of the session, such as fix-add-0.
        follow: Follow the log until the session ends.
        tail: Only this number of bytes at the end.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    terminal = sys.stdout.isatty()
    async with remote.connect() as client:
        async for chunk in client.log(session, tail=tail, follow=follow):
            shown = _LINE.sub(lambda line: visible(line[0]), decoder.decode(chunk))
            sys.stdout.buffer.write(shown.encode() if terminal else chunk)
            sys.stdout.buffer.flush()


async def cancel(*names: Required, remote: Remote = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Cancel tasks or sessions; results so far are kept.

    Args:
        names: Ids of tasks or sessions.
    """
    async with remote.connect() as client:
        views = {name: await _find(client, name) for name in names}  # all, before the first cancel
        cancelled = {}
        for name, view in views.items():
            kind = "task" if isinstance(view, TaskView) else "session"
            cancelled[name] = await client.cancel(**{kind: name}, by="tugline cancel")
    lines = (f"{name}: {_describe_cancelled(counts)}" for name, counts in cancelled.items())
    print_report(cancelled, lambda: print_text(*lines), as_json=as_json)


def _describe_cancelled(done: Cancelled) -> str:
    parts = {"ended": len(done.ended), "stopping": len(done.stopping), "final before": done.final}
    return format_counts(parts) or "nothing to cancel"
