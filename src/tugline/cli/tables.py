"""Tables of a server's state, tasks and sessions."""

import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from tugline.cli.output import format_counts, make_table
from tugline.client.overview import Overview
from tugline.launch.progress import format_seconds
from tugline.protocol import NodeState, SessionView, TaskView
from tugline.types import STAGES, TERMINAL, Status

_NODE_STYLES = {NodeState.LIVE: "", NodeState.DRAINING: "yellow", NodeState.GONE: "dim"}


def make_overview(overview: Overview) -> RenderableType:
    """Make tables of the state of a server."""
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


def make_sessions_table(sessions: Sequence[SessionView]) -> Table:
    """Make a table with one row per session."""
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


def _format_age(moment: float) -> str:
    return format_seconds(time.time() - moment)
