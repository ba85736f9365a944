"""``tugline submit``: submit tasks from files; all are checked before any is sent.

Submission is idempotent, so the same command resumes after an interruption.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from rich.console import Console

from tugline.cli.options import DEFAULT_SERVER, Json, Remote
from tugline.cli.output import print_json, print_text
from tugline.cli.tables import make_tasks_table
from tugline.cli.task import Paths, read_checked
from tugline.client.api import Client
from tugline.client.overview import find_failure
from tugline.launch.progress import SessionProgress, WorkProgress
from tugline.protocol import Accepted, EventKind, TaskState, TaskView
from tugline.types import TERMINAL

_LISTED = 40
"""Maximum number of tasks listed at the end."""


async def submit(
    *paths: Paths,
    wait: bool = False,
    run: str | None = None,
    validated: Path | None = None,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Submit tasks.

    Args:
        wait: Wait until all tasks are released; exit 1 if any sample is missing.
        run: Prefix of each id, followed by a dash, to run the same tasks again.
        validated: File of `tugline task validate --out`, to tag tasks with their state.
    """
    tasks = read_checked(paths, prefix=f"{run}-" if run else "", validated=validated)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    released: list[TaskView] | None = None
    try:
        async with remote.connect() as client:
            before = (await client.status()).position
            with WorkProgress(console, title=f"submitting {len(tasks)} tasks"):
                accepted = await client.submit(tasks)
            known = sum(not each.new for each in accepted)
            sessions = sum(len(each.sessions) for each in accepted)
            text = f"{len(accepted)} ({known} already submitted)" if known else len(accepted)
            console.print(f"accepted tasks: {text}, sessions: {sessions}")
            if wait and not (await client.status()).nodes:
                console.print(
                    "no node is live, so the sessions wait for one: start `tugline node`, or see"
                    " `tugline doctor`"
                )
            if wait:
                progress = SessionProgress(console, sessions)
                await _follow(client, accepted, before, progress)
                released = [await client.task(each.task) for each in accepted]
                if progress.first_failure:
                    console.print(f"first failure: {progress.first_failure}")
                if not as_json:
                    _print_released(released, progress.summarize().plain)
    except asyncio.CancelledError:
        console.print("accepted tasks continue; see `tugline status` and `tugline cancel`")
        raise
    if as_json:
        print_json({"accepted": accepted, "released": released})
    if any(task.missing and task.reason != "min_usable" for task in released or ()):
        sys.exit(1)


async def _follow(
    client: Client, accepted: Sequence[Accepted], before: int, progress: SessionProgress
) -> None:
    """Show progress from events after `before` until all tasks are released."""
    waiting = {each.task for each in accepted}
    with progress.bar:
        for each in accepted:
            if each.new:
                continue
            async for view in client.sessions(task=each.task):
                if view.status in TERMINAL:
                    result = await client.result(view.id)
                    failure = f"{result.status} {result.failure.message}" if result.failure else ""
                    progress.add(view.id, result.reward, failure, new=False)
            if (await client.task(each.task)).state is TaskState.RELEASED:
                waiting.discard(each.task)
        async with aclosing(client.events(after=before)) as events:
            while waiting:
                event = await anext(events)
                if event.task in waiting and event.kind is EventKind.RESULT:
                    failed = find_failure(event)
                    reward = event.detail.get("reward")
                    earned = None if reward is None else float(reward)
                    progress.add(event.session or "", earned, failed.reason if failed else "")
                elif event.kind is EventKind.RELEASED:
                    waiting.discard(event.task or "")


def _print_released(released: Sequence[TaskView], summary: str) -> None:
    print_text(make_tasks_table(released[:_LISTED]))
    if len(released) > _LISTED:
        print_text(f"and {len(released) - _LISTED} more")
    usable = sum(task.usable for task in released)
    samples = sum(task.samples for task in released)
    print_text(f"{usable} of {samples} sessions are usable; {summary}")
