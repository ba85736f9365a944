"""``tugline status``, ``logs`` and ``cancel``: see what a server runs, and end it."""

import asyncio
import codecs
import contextlib
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from tugline.cli.options import (
    DEFAULT_SERVER,
    Count,
    Json,
    Remote,
    Required,
    print_json,
    print_report,
)
from tugline.client.api import Client
from tugline.client.overview import Monitor, Overview
from tugline.errors import Missing, ServerError
from tugline.log import visible
from tugline.protocol import Cancelled, NodeState, ResultView, SessionView, TaskView
from tugline.types import TERMINAL, Status

_LINE = re.compile(r"[^\t\n\r]+")
_STAGES = (Status.INIT, Status.READY, Status.RUN, Status.BUILD, Status.EVAL)


class TaskStatus(msgspec.Struct, frozen=True):
    """A task with its sessions."""

    task: TaskView
    sessions: tuple[SessionView, ...]


class SessionStatus(msgspec.Struct, frozen=True):
    """A session with its result, once there is one."""

    session: SessionView
    result: ResultView | None


Seen = Overview | TaskStatus | SessionStatus


def status(
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
        name: Only this one.
        watch: On a terminal: refresh until interrupted.
        every: Seconds between refreshes.
    """
    console = Console(highlight=False)
    live = watch and console.is_terminal and not as_json

    async def main() -> None:
        async with remote.connect() as client:
            monitor = Monitor(client)

            async def read() -> Seen:
                return await (monitor.read() if name is None else _read_named(client, name))

            if live:
                await _watch(read, every, console)
                return
            seen = await read()
            print_report(seen, lambda: console.print(render(seen)), as_json=as_json)

    with contextlib.suppress(KeyboardInterrupt) if live else contextlib.nullcontext():
        asyncio.run(main())


async def _watch(read: Callable[[], Awaitable[Seen]], every: float, console: Console) -> None:
    """Show the state until interrupted; a server that does not answer is retried."""
    seen = await read()
    with Live(render(seen), console=console, screen=True, auto_refresh=False) as view:
        while True:
            await asyncio.sleep(every)
            try:
                seen = await read()
                view.update(render(seen), refresh=True)
            except ServerError as error:
                if error.status is not None and error.status < 500:
                    raise
                notice = Text(str(error), style="red")
                view.update(Group(notice, render(seen)), refresh=True)


async def _read_named(client: Client, name: str) -> TaskStatus | SessionStatus:
    """Read a task or a session. Raises `Missing` if there is none of this name."""
    try:
        task = await client.task(name)
    except Missing:
        return await _read_session(client, name)
    return TaskStatus(task, tuple([view async for view in client.sessions(task=name)]))


async def _read_session(client: Client, name: str) -> SessionStatus:
    try:
        session = await client.session(name)
    except Missing as error:
        raise Missing(f"there is neither a task nor a session {name!r} at {client.url}") from error
    try:
        return SessionStatus(session, await client.result(name))
    except Missing:
        return SessionStatus(session, None)


# --------------------------------------------------------------------------- on the terminal
def render(seen: Seen) -> RenderableType:
    """The state as tables."""
    match seen:
        case Overview():
            tables = (_summary(seen), _nodes_table(seen), *_task_tables(seen))
            return Group(*(part for table in tables for part in (table, Text())))
        case TaskStatus():
            return Group(make_tasks_table([seen.task]), Text(), _sessions_table(seen.sessions))
    parts: list[RenderableType] = [_sessions_table([seen.session])]
    if seen.result is not None:
        parts += [Text(), Text(_describe_result(seen.result))]
    return Group(*parts)


def _summary(seen: Overview) -> Table:
    counts = seen.counts
    weights = f"weights {counts.version}" + (", paused" if counts.paused else "")
    rate = f"{seen.sessions_per_minute:,.1f} sessions/min"
    reward = "" if seen.reward is None else f"  mean reward {seen.reward:.3g}"
    running = {stage.value: counts.sessions.get(stage.value, 0) for stage in _STAGES}
    finished = {name: n for name, n in counts.sessions.items() if Status(name) in TERMINAL}
    rows = {
        "server": f"{seen.url}  position {counts.position:,}  {weights}",
        "queued": f"{counts.sessions.get('queued', 0):,}  {_join(seen.queue)}",
        "running": _join(running),
        "finished": _join(finished) or "none",
        "tasks": f"{counts.tasks_open:,} open",
        "rate": f"{rate}  {seen.tokens_per_second:,.0f} sampled tokens/s{reward}",
    }
    if seen.unread:
        rows["unread"] = _join(seen.unread)
    if counts.dead_deliveries:
        rows["callbacks"] = f"{counts.dead_deliveries:,} given up"
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _nodes_table(seen: Overview) -> Table:
    stages = [stage.value for stage in _STAGES]
    table = Table("node", "state", "slots", "sessions", *stages, "lease", box=None)
    for load in seen.nodes:
        node = load.node
        lease = f"{load.lease_s:.0f} s" if node.state is not NodeState.GONE else ""
        style = {NodeState.LIVE: "", NodeState.DRAINING: "yellow"}.get(node.state, "dim")
        by_stage = (str(load.stages.get(stage, "")) for stage in stages)
        cells = (str(node.slots), str(node.running), *by_stage, lease)
        state = f"quarantine: {node.fault}" if node.fault else node.state.value
        table.add_row(Text(node.name), Text(state), *cells, style="red" if node.fault else style)
    if not seen.nodes:
        table.add_row("none: start one with `tugline node`")
    return table


def _task_tables(seen: Overview) -> Iterable[Table]:
    if seen.open:
        yield make_tasks_table(seen.open)
    if seen.stragglers:
        table = Table("straggler", "age", "finished", "remaining", box=None)
        for task in seen.stragglers:
            left = {name: n for name, n in task.counts.items() if Status(name) not in TERMINAL}
            finished = f"{task.samples - sum(left.values())} of {task.samples}"
            table.add_row(Text(task.id), _format_age(task.created), finished, _join(left))
        yield table
    if seen.failures:
        table = Table("failed", "ago", "reason", box=None)
        for failure in seen.failures:
            reason = " ".join(failure.reason.split())[:100]
            table.add_row(Text(failure.session), _format_age(failure.at), Text(reason))
        yield table


def make_tasks_table(tasks: Sequence[TaskView]) -> Table:
    """Make a table with one row per task."""
    table = Table("task", "state", Column("usable", justify="right"), "sessions", "age", box=None)
    for task in tasks:
        state = f"{task.state}: {task.reason}" if task.reason else str(task.state)
        cells = (f"{task.usable}/{task.samples}", _join(task.counts), _format_age(task.created))
        table.add_row(Text(task.id), Text(state), *cells)
    return table


def _sessions_table(sessions: Sequence[SessionView]) -> Table:
    table = Table("session", "status", "attempt", "node", "changed", box=None)
    for view in sessions:
        state = f"{view.status}, stopping ({view.stopping})" if view.stopping else str(view.status)
        cells = (Text(state), str(view.attempt), Text(view.node or "-"), _format_age(view.updated))
        table.add_row(Text(view.id), *cells)
    return table


def _describe_result(result: ResultView) -> str:
    reward = "none" if result.reward is None else f"{result.reward:g}"
    tokens = f"{result.trained} of {result.sampled} sampled tokens are trained"
    seconds = ", ".join(f"{name} {spent:.1f}" for name, spent in result.seconds.items())
    lines = [f"reward: {reward}; {tokens}; {result.bytes} bytes", f"seconds: {seconds}"]
    if result.failure is not None:
        lines.append(f"failed in the {result.failure.boundary}: {result.failure.message}")
    return "\n".join(lines)


def _join(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _format_age(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


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

    A terminal gets it without escape sequences.

    Args:
        session: Id of the session, such as fix-add-0.
        follow: Follow until the session ends.
        tail: Only so many bytes from the end.
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
        names: What to cancel.
    """
    async with remote.connect() as client:
        cancelled = {name: await _cancel(client, name) for name in names}
    if as_json:
        print_json(cancelled)
        return
    for name, counts in cancelled.items():
        parts = {
            "ended": len(counts.ended),
            "stopping": len(counts.stopping),
            "final before": counts.final,
        }
        line = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
        print(f"{name}: {line or 'nothing to cancel'}")


async def _cancel(client: Client, name: str) -> Cancelled:
    try:
        return await client.cancel(task=name, by="tugline cancel")
    except Missing:
        pass
    try:
        return await client.cancel(session=name, by="tugline cancel")
    except Missing as error:
        raise Missing(f"there is neither a task nor a session {name!r} at {client.url}") from error
