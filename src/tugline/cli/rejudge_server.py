"""``tugline rejudge --server``: have a server's nodes judge the sessions that they recorded."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace
from rich.console import Console

from tugline.cli.rejudge_report import RejudgeReport, summarize
from tugline.client.api import Client
from tugline.client.runs import BATCH
from tugline.errors import UsageError
from tugline.launch.progress import SessionProgress
from tugline.protocol import Rejudging, RunKind, SessionView, TaskState, VerdictView
from tugline.recording.verdicts import VerdictEntry
from tugline.rollout.rejudge import SessionVerdicts, name_user
from tugline.types import TERMINAL, PluginSpec


class RejudgeOptions(NamedTuple):
    """What is judged, and how."""

    run: str
    """Folder of a run, or its name at a server; empty: sessions of all runs."""
    select: Sequence[str]
    evaluator: PluginSpec | None
    name: str
    """Name of the evaluator's file; empty for the evaluator of each task."""
    rounds: int
    use: Literal["new", "recorded"] | None
    """Verdicts that are put in force."""


async def judge_on_server(
    client: Client, wanted: RejudgeOptions, console: Console
) -> RejudgeReport:
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
    histories = {view.id: await client.verdicts(view.id) for view in views if view.id in work.tasks}
    changed = 0
    if wanted.use:
        numbers = {
            session: verdict.number
            for session, history in histories.items()
            if (verdict := _find(history, work.digests[session], 1)) is not None
        }
        changed = await _put_in_force(client, views, numbers)
    await client.end_run(name)
    outcomes = [_read(view, work, histories.get(view.id, ()), errors) for view in views]
    entries = [
        make_entry(view.id, view.task, each, own.value if own else None)
        for view in views
        if view.id in histories
        for own in (histories[view.id][0].reward,)
        for each in histories[view.id][1:]
    ]
    where = f"{client.url}/v1/sessions/SESSION/verdicts"
    return summarize(outcomes, where, entries, set(histories), changed)


async def use_recorded(client: Client, wanted: RejudgeOptions) -> int:
    """Put the verdicts of the sessions' own evaluations in force; return how many had another."""
    views = await _select(client, wanted)
    judged = {}
    for view in views:
        if view.status in TERMINAL:
            history = await client.verdicts(view.id)
            if not history[0].in_force:
                judged[view.id] = 1
    return await _put_in_force(client, views, judged)


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
                progress.add(view.id, result.reward, failure)
    return errors


def _read(
    view: SessionView, work: Rejudging, history: Sequence[VerdictView], errors: Mapping[str, str]
) -> SessionVerdicts:
    """Return the verdicts on a session, or why there are none."""
    if view.id in work.refused:
        return SessionVerdicts(view.id, refused=work.refused[view.id])
    entries = []
    for number, task in enumerate(work.tasks[view.id], 1):
        verdict = _find(history, work.digests[view.id], number)
        first = history[0].reward if history else None
        entry = make_entry(view.id, view.task, verdict, first.value if first else None)
        if verdict is None:
            error = errors.get(task, "its result has changed meanwhile")
            entry = replace(entry, round=number, error=error)
        entries.append(entry)
    return SessionVerdicts(view.id, tuple(entries))


def make_entry(
    session: str, task: str, verdict: VerdictView | None, before: float | None = None
) -> VerdictEntry:
    """Return a verdict as in a history on this machine; None: an entry without a verdict."""
    return VerdictEntry(
        recording=session,
        session=session,
        task=task,
        at=verdict.at if verdict else 0.0,
        by=verdict.by if verdict else "",
        evaluator=verdict.evaluator if verdict else "",
        name=verdict.evaluator if verdict else "",
        digest=verdict.digest if verdict else "",
        round=verdict.round if verdict else 1,
        patch="",
        before=before,
        reward=verdict.reward if verdict else None,
        report=verdict.report if verdict else {},
    )


def _find(history: Sequence[VerdictView], digest: str, number: int) -> VerdictView | None:
    """Return the last verdict of an evaluator in a round."""
    found = [each for each in history if (each.digest, each.round) == (digest, number)]
    return found[-1] if found else None


async def _put_in_force(
    client: Client, views: Sequence[SessionView], numbers: Mapping[str, int]
) -> int:
    """Put verdicts in force, those of a task together; return how many sessions had another."""
    groups: dict[str, dict[str, int]] = {}
    for view in views:
        if view.id in numbers:
            groups.setdefault(view.task, {})[view.id] = numbers[view.id]
    batch: dict[str, int] = {}
    changed = 0
    for group in (*groups.values(), {}):
        if batch and (not group or len(batch) + len(group) > BATCH):
            for session, number in batch.items():
                now = [each.number for each in await client.verdicts(session) if each.in_force]
                changed += now != [number]
            await client.use_verdicts(batch)
            batch = {}
        batch |= group
    return changed
