"""``tugline top``: what a rollout server does right now, on one screen, until Ctrl-C.

Everything comes through the API, so it works from any machine with a read token. Rates are those of
the events of the last minute; of the open tasks the oldest are looked at, for what holds up a
trainer is at the front of the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tugline.cli.status import Folder, Json, Server, Token
from tugline.client.api import Client
from tugline.errors import Missing, ServerError
from tugline.protocol import Counts, Event, EventKind, NodeState, NodeView, TaskState, TaskView
from tugline.types import TERMINAL, Status

_WINDOW_S = 60.0
_EVENTS = 1000
"""What is looked back at in the beginning."""
_TASKS = 200
"""Open tasks that are looked at."""
_LINES = 12
_GONE_S = 600.0
"""How long a lost node is shown."""
_DEADLINE_S = 3.0
"""People are told soon that a server is not there."""
_AT_WORK = (Status.INIT, Status.READY, Status.RUN, Status.BUILD, Status.EVAL)
_QUEUE = re.compile(r'^tugline_queue\{tenant="(.*)"\} (\S+)$', re.MULTILINE)
_UNREAD = re.compile(r'^tugline_results_unread\{consumer="(.*)"\} (\S+)$', re.MULTILINE)


class Failed(msgspec.Struct, frozen=True):
    """A session that failed, or had to begin again."""

    session: str
    at: float
    why: str


class NodeLine(msgspec.Struct, frozen=True):
    """A node and where its sessions are."""

    node: NodeView
    stages: dict[str, int]
    lease_s: float
    """Until its lease ends; below 0 for one that is gone."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """All that is shown; ``--json`` prints it."""

    at: float
    url: str
    counts: Counts
    queue: dict[str, int]
    """Sessions in line, by tenant."""
    unread: dict[str, int]
    """Results that a consumer has not acknowledged, by its name."""
    sessions_per_minute: float
    tokens_per_second: float
    nodes: tuple[NodeLine, ...]
    stragglers: tuple[TaskView, ...]
    """Open tasks of which most samples are over, the oldest first."""
    failures: tuple[Failed, ...]
    """The newest first."""


class Watcher:
    """Looks at a server again and again, and remembers what happened within the last minute."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._events: deque[Event] = deque()
        self._failures: deque[Failed] = deque(maxlen=_LINES)
        self._position: int | None = None
        self._since = 0.0
        """From when on every event is known."""

    async def look(self) -> Overview:
        """The server as it is now. Raises `ServerError`."""
        client = self._client
        counts, nodes, numbers, stragglers = await asyncio.gather(
            client.status(), client.nodes(), self._numbers(), self._stragglers()
        )
        await self._catch_up(counts.position)
        now = time.time()
        here = (node for node in nodes if _is_shown(node, now))
        lines = await asyncio.gather(*(self._line(node) for node in here))
        done = [one for one in self._events if one.kind is EventKind.RESULT]
        span = max(1.0, min(_WINDOW_S, now - self._since))
        return Overview(
            at=now,
            url=client.url,
            counts=counts,
            queue={name: int(float(value)) for name, value in _QUEUE.findall(numbers)},
            unread={name: int(float(value)) for name, value in _UNREAD.findall(numbers)},
            sessions_per_minute=60 * len(done) / span,
            tokens_per_second=sum(int(one.detail.get("sampled", 0)) for one in done) / span,
            nodes=tuple(lines),
            stragglers=stragglers,
            failures=tuple(reversed(self._failures)),
        )

    async def _numbers(self) -> str:
        try:
            return await self._client.metrics()
        except Missing:
            return ""

    async def _catch_up(self, latest: int) -> None:
        if self._position is None:
            self._position = max(0, latest - _EVENTS)
            self._since = 0.0 if self._position == 0 else time.time()
        while self._position < latest:
            page = await self._client.happened(after=self._position, limit=_EVENTS)
            if not page:
                break
            self._since = min(self._since, page[0].created)
            self._position = page[-1].position
            self._events.extend(page)
            self._failures.extend(filter(None, map(_failed, page)))
        while self._events and self._events[0].created < time.time() - _WINDOW_S:
            self._events.popleft()

    async def _line(self, node: NodeView) -> NodeLine:
        stages: Counter[str] = Counter()
        if node.running and node.state is not NodeState.GONE:
            async for session in self._client.sessions(node=node.id):
                stages[session.status.value] += 1
        return NodeLine(node, dict(stages), node.deadline - time.time())

    async def _stragglers(self) -> tuple[TaskView, ...]:
        found, seen = [], 0
        async for task in self._client.tasks(state=TaskState.OPEN):
            if _is_straggling(task):
                found.append(task)
            seen += 1
            if seen == _TASKS:
                break
        return tuple(found[:_LINES])


def _failed(event: Event) -> Failed | None:
    detail, session = event.detail, event.session or ""
    if event.kind is EventKind.REQUEUED:
        return Failed(session, event.created, f"again: {detail.get('reason', '')}")
    if event.kind is EventKind.RESULT and detail.get("status") in {"failed", "timed_out"}:
        return Failed(session, event.created, f"{detail['status']} {detail.get('boundary', '')}")
    return None


def _is_shown(node: NodeView, now: float) -> bool:
    return node.state is not NodeState.GONE or node.deadline > now - _GONE_S


def _is_straggling(task: TaskView) -> bool:
    over = sum(task.counts.get(status.value, 0) for status in TERMINAL)
    return task.samples > 1 and task.samples / 2 <= over < task.samples


# --------------------------------------------------------------------------- on the screen
def screen(seen: Overview) -> Group:
    """The whole screen."""
    return Group(_head(seen), Text(), _nodes(seen), *_lists(seen))


def _head(seen: Overview) -> Table:
    counts = seen.counts
    weights = f"weights {counts.version}" + (", paused" if counts.paused else "")
    table = Table.grid(padding=(0, 2))
    at_work = "  ".join(f"{one.value} {counts.sessions.get(one.value, 0)}" for one in _AT_WORK)
    ended = "  ".join(
        f"{one} {counts.sessions[one]}" for one in sorted(TERMINAL) if one in counts.sessions
    )
    rate = f"{seen.sessions_per_minute:,.1f} sessions/min"
    rows = [
        ("server", f"{seen.url}  position {counts.position:,}  {weights}"),
        ("queue", f"{counts.sessions.get('queued', 0):,}  {_pairs(seen.queue)}"),
        ("at work", at_work),
        ("over", ended or "nothing yet"),
        ("tasks", f"{counts.tasks_open:,} open"),
        ("rate", f"{rate}  {seen.tokens_per_second:,.0f} sampled tokens/s"),
    ]
    if seen.unread:
        rows.append(("unread", _pairs(seen.unread)))
    if counts.dead_deliveries:
        rows.append(("callbacks", f"{counts.dead_deliveries:,} given up"))
    for name, text in rows:
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _nodes(seen: Overview) -> Table:
    table = Table("node", "state", "slots", "sessions", *(one.value for one in _AT_WORK), "lease")
    for line in seen.nodes:
        node = line.node
        stages = (str(line.stages.get(one.value, "")) for one in _AT_WORK)
        lease = f"{line.lease_s:.0f} s" if node.state is not NodeState.GONE else ""
        style = {NodeState.LIVE: "", NodeState.DRAINING: "yellow"}.get(node.state, "dim")
        numbers = (str(node.slots), str(node.running), *stages, lease)
        table.add_row(Text(node.name), node.state.value, *numbers, style=style)
    if not seen.nodes:
        table.add_row("none: start one with `tugline node`")
    return table


def _lists(seen: Overview) -> Iterable[Table]:
    if seen.stragglers:
        table = Table("group", "age", "over", "still")
        for task in seen.stragglers:
            left = {name: n for name, n in task.counts.items() if Status(name) not in TERMINAL}
            over = task.samples - sum(left.values())
            age = _age(seen.at - task.created)
            table.add_row(Text(task.id), age, f"{over} of {task.samples}", _pairs(left))
        yield table
    if seen.failures:
        table = Table("failed", "ago", "why")
        for one in seen.failures:
            why = " ".join(one.why.split())[:100]
            table.add_row(Text(one.session), _age(seen.at - one.at), Text(why))
        yield table


def _pairs(values: dict[str, int]) -> str:
    return "  ".join(f"{name} {n:,}" for name, n in sorted(values.items()))


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# --------------------------------------------------------------------------- the command
def top(
    *,
    server: Server = None,
    token: Token = None,
    folder: Folder = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    as_json: Json = False,
) -> None:
    """Show queue, nodes, throughput, stragglers and failures as they change."""
    console = Console(highlight=False)
    live = console.is_terminal and not once and not as_json
    seen = None
    with contextlib.suppress(KeyboardInterrupt):  # that is how it is left
        client = Client(server, token, folder=folder, deadline_s=_DEADLINE_S)
        seen = asyncio.run(_follow(client, every if live else None, console))
    if as_json and seen is not None:
        sys.stdout.write(msgspec.json.encode(seen).decode() + "\n")
    elif seen is not None:
        console.print(screen(seen))


async def _follow(client: Client, every: float | None, console: Console) -> Overview:
    """Look once, or show it until interrupted; a server that is away is waited for."""
    async with client:
        watcher = Watcher(client)
        seen = await watcher.look()
        if every is None:
            return seen
        with Live(screen(seen), console=console, screen=True, auto_refresh=False) as view:
            while True:
                await asyncio.sleep(every)
                try:
                    seen = await watcher.look()
                    view.update(screen(seen), refresh=True)
                except ServerError as error:
                    if error.status is not None and error.status < 500:
                        raise
                    away = Text(str(error), style="red")
                    view.update(Group(away, screen(seen)), refresh=True)
