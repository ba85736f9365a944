"""``tugline submit``: submit tasks from files, all of them checked before any is sent.

Submitting is idempotent, so after an interruption the same command resumes.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import aclosing
from statistics import fmean

from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn

from tugline.cli.options import DEFAULT_SERVER, Json, Remote
from tugline.cli.output import make_bar, print_json
from tugline.cli.status import make_tasks_table
from tugline.cli.task import Paths, read_checked
from tugline.client.api import Client
from tugline.client.overview import find_failure
from tugline.protocol import Accepted, Event, EventKind, ResultView, TaskState, TaskView
from tugline.types import TERMINAL, is_pass

_LISTED = 40
"""Tasks that are listed at the end."""


async def submit(
    *paths: Paths,
    wait: bool = False,
    run: str | None = None,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Submit tasks.

    Args:
        wait: Wait until all are released; exit 1 if any sample is missing.
        run: Put this name and a dash before each id, to run the same tasks again.
    """
    tasks = read_checked(paths, prefix=f"{run}-" if run else "")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    released: list[TaskView] | None = None
    summary = ""
    try:
        async with remote.connect() as client:
            before = (await client.status()).position
            with console.status(f"submitting {len(tasks)} tasks"):
                accepted = await client.submit(tasks)
            _print_accepted(console, accepted)
            if wait:
                released, tally = await _follow(client, accepted, before, console)
                summary = tally.describe()
                if tally.failure:
                    console.print(f"first failure: {tally.failure}", markup=False)
    except asyncio.CancelledError:
        console.print("accepted tasks continue; see `tugline status` and `tugline cancel`")
        raise
    if as_json:
        print_json({"accepted": accepted, "released": released})
    elif released is not None:
        _print_released(released, summary)
    if any(task.missing and task.reason != "min_usable" for task in released or ()):
        sys.exit(1)


def _print_accepted(console: Console, accepted: Sequence[Accepted]) -> None:
    new = sum(each.new for each in accepted)
    sessions = sum(len(each.sessions) for each in accepted)
    known = f" (known already: {len(accepted) - new})" if new < len(accepted) else ""
    console.print(f"accepted tasks: {len(accepted)}{known}, sessions: {sessions}")


class _Tally:
    """Progress of the tasks submitted, counted from events."""

    def __init__(self, tasks: set[str]) -> None:
        self.open = tasks
        self.running: set[str] = set()
        self.rewards: dict[str, float | None] = {}
        """Of each session that has ended; None without a reward."""
        self.failure: str = ""
        """The first one."""

    def count(self, event: Event) -> None:
        """Count an event unless it belongs to another task."""
        name = event.session or ""
        if event.task not in self.open:
            return
        match event.kind:
            case EventKind.LEASED:
                self.running.add(name)
            case EventKind.REQUEUED:
                self.running.discard(name)
            case EventKind.RESULT:
                self.running.discard(name)
                reward = event.detail.get("reward")
                self.rewards[name] = None if reward is None else float(reward)
            case EventKind.RELEASED:
                self.open.discard(event.task)
        failed = find_failure(event)
        if failed is not None and not self.failure:
            self.failure = f"{failed.session}: {failed.reason}"

    def add_result(self, result: ResultView) -> None:
        """Count a session that had ended before."""
        self.rewards[result.session] = result.reward
        if result.failure is not None and not self.failure:
            self.failure = f"{result.session}: {result.status} {result.failure.message}"

    def describe(self) -> str:
        """Mean reward and how many passed, once there is a reward."""
        rewards = [reward for reward in self.rewards.values() if reward is not None]
        if not rewards:
            return ""
        passed = sum(is_pass(reward) for reward in rewards)
        return f", mean reward {fmean(rewards):.3g}, {passed} of {len(rewards)} passed"


async def _follow(
    client: Client, accepted: Sequence[Accepted], before: int, console: Console
) -> tuple[list[TaskView], _Tally]:
    """Show progress from events after `before` until all tasks are released."""
    tally = _Tally({each.task for each in accepted})
    for each in accepted:
        if not each.new:
            async for view in client.sessions(task=each.task):
                if view.status in TERMINAL:
                    tally.add_result(await client.result(view.id))
            if (await client.task(each.task)).state is TaskState.RELEASED:
                tally.open.discard(each.task)
    total = sum(len(each.sessions) for each in accepted)
    columns = TextColumn("{task.fields[detail]}"), TimeElapsedColumn()
    with make_bar(console, *columns) as bar:
        line = bar.add_task("sessions", total=total, detail="")
        async with aclosing(client.events(after=before)) as events:
            while tally.open:
                tally.count(await anext(events))
                detail = f"{len(tally.running)} running{tally.describe()}"
                bar.update(line, completed=len(tally.rewards), detail=detail)
    return [await client.task(each.task) for each in accepted], tally


def _print_released(released: Sequence[TaskView], summary: str) -> None:
    console = Console(highlight=False)
    console.print(make_tasks_table(list(released[:_LISTED])))
    if len(released) > _LISTED:
        console.print(f"and {len(released) - _LISTED} more")
    usable, samples = sum(task.usable for task in released), sum(task.samples for task in released)
    console.print(f"{usable} of {samples} sessions are usable{summary}")
