"""``tugline rejudge --server``: have a server's nodes judge the sessions that they recorded."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec
from rich.console import Console

from tugline.cli.output import SessionProgress
from tugline.client.api import Client
from tugline.client.runs import BATCH
from tugline.errors import UsageError
from tugline.protocol import Rejudging, RunKind, SessionView, TaskState, VerdictView
from tugline.recording.verdicts import VerdictEntry
from tugline.rollout.rejudge import SessionVerdicts, name_user
from tugline.types import PluginSpec


class RejudgeOptions(NamedTuple):
    """What is judged, and how."""

    run: str
    """Folder of a run, or its name at a server; empty: sessions of all runs."""
    select: Sequence[str]
    evaluator: PluginSpec | None
    rounds: int
    use: bool
    """Whether the first verdicts of this evaluator are put in force."""


async def judge_on_server(
    client: Client, wanted: RejudgeOptions, console: Console
) -> list[SessionVerdicts]:
    """Judge sessions on the server's nodes; the same call continues after an interruption.

    Raises `UsageError` if no session is selected, and the errors of `Client.rejudge`.
    """
    views = await _select(client, wanted)
    name = _name_run(wanted)
    configuration = {
        "evaluator": msgspec.to_builtins(wanted.evaluator),
        "select": list(wanted.select),
        "rounds": wanted.rounds,
    }
    parent = wanted.run or None
    await client.start_run(name, RunKind.REJUDGE, configuration, parent=parent, by=name_user())
    work = await client.rejudge(
        name, [view.id for view in views], evaluator=wanted.evaluator, rounds=wanted.rounds
    )
    console.print(f"run {name}: {len(work.tasks)} sessions, {len(work.refused)} refused")
    errors = await _wait(client, work, console)
    outcomes = [await _read(client, view, work, errors) for view in views]
    if wanted.use:
        await _use(client, views, work, console)
    await client.end_run(name)
    return outcomes


async def _select(client: Client, wanted: RejudgeOptions) -> list[SessionView]:
    """Return the selected sessions. Raises `UsageError` if there is none."""
    if not (wanted.run or wanted.select):
        raise UsageError("give the name of a run of the server, or --select PATTERN")
    if wanted.run:
        await client.run_view(wanted.run)
    patterns = wanted.select or ("*",)
    views = [
        view
        async for view in client.sessions(run=wanted.run or None)
        if view.judges is None
        and any(fnmatchcase(name, p) for name in (view.id, view.task) for p in patterns)
    ]
    if not views:
        of = f"run {wanted.run}" if wanted.run else client.url
        raise UsageError(f"{of} has no session that matches {' '.join(patterns)}")
    return views


def _name_run(wanted: RejudgeOptions) -> str:
    """Return a name that is the same for the same evaluator."""
    spec = msgspec.msgpack.encode(wanted.evaluator, order="deterministic")
    parent = f"{wanted.run[:120]}." if wanted.run else ""
    return f"{parent}rejudge-{hashlib.sha256(spec).hexdigest()[:8]}"


async def _wait(client: Client, work: Rejudging, console: Console) -> Mapping[str, str]:
    """Wait until all tasks have ended; return the errors by task.

    What failed in an earlier call is tried again.
    """
    ids = [task for each in work.tasks.values() for task in each]
    for task in ids:
        view = await client.task(task)
        if view.state is TaskState.RELEASED and view.missing:
            await client.retry_task(task, by=name_user())
    errors = {}
    progress = SessionProgress(console, len(ids))
    with progress.bar:
        async with aclosing(client.released(ids)) as released:
            async for view in released:
                result = await client.result(f"{view.id}-0")
                failure = result.failure.message if result.failure else ""
                if result.reward is None:
                    errors[view.id] = failure or f"it was {result.status.value}"
                progress.add(view.judges or view.id, result.reward, failure)
    return errors


async def _read(
    client: Client, view: SessionView, work: Rejudging, errors: Mapping[str, str]
) -> SessionVerdicts:
    """Return the verdicts on a session, or why there are none."""
    if view.id in work.refused:
        return SessionVerdicts(view.id, refused=work.refused[view.id])
    history = await client.verdicts(view.id)
    first = history[0].reward
    entries = []
    for number, task in enumerate(work.tasks[view.id], 1):
        verdict = _find(history, work.digests[view.id], number)
        entry = VerdictEntry(
            recording=view.node or "",
            session=view.id,
            task=view.task,
            at=verdict.at if verdict else 0.0,
            by=verdict.by if verdict else "",
            evaluator=verdict.evaluator if verdict else "",
            digest=work.digests[view.id],
            round=number,
            patch="",
            before=first.value if first else None,
            reward=verdict.reward if verdict else None,
            report=verdict.report if verdict else {},
            error="" if verdict else errors.get(task, "its result has changed meanwhile"),
        )
        entries.append(entry)
    return SessionVerdicts(view.id, tuple(entries))


def _find(history: Sequence[VerdictView], digest: str, number: int) -> VerdictView | None:
    """Return the last verdict of an evaluator in a round."""
    found = [each for each in history if (each.digest, each.round) == (digest, number)]
    return found[-1] if found else None


async def _use(
    client: Client, views: Sequence[SessionView], work: Rejudging, console: Console
) -> None:
    """Put the verdicts of the first round in force, those of a task together."""
    groups: dict[str, dict[str, int]] = {}
    for view in views:
        if view.id in work.tasks:
            verdict = _find(await client.verdicts(view.id), work.digests[view.id], 1)
            if verdict is not None:
                groups.setdefault(view.task, {})[view.id] = verdict.number
    batch: dict[str, int] = {}
    revised = 0
    for numbers in (*groups.values(), {}):
        if batch and (not numbers or len(batch) + len(numbers) > BATCH):
            revised += sum(view.revision > 0 for view in await client.use_verdicts(batch))
            batch = {}
        batch |= numbers
    console.print(
        f"{sum(map(len, groups.values()))} verdicts are in force, {revised} rewards revised"
    )
