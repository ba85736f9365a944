"""``tugline rejudge``: judge recorded sessions again by their stored patches.

The same command resumes. Progress goes to stderr, so stdout has only the report. The exit code is 1
if a session could not be judged because of an error.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from rich.console import Console

from tugline.aio import handle_signals
from tugline.cli.options import DEFAULT_SERVER, Count, Json, Remote
from tugline.cli.output import print_report, print_text
from tugline.cli.process import keep_running
from tugline.cli.rejudge_report import RejudgeReport, show, summarize
from tugline.cli.rejudge_server import RejudgeOptions, judge_on_server, use_recorded
from tugline.errors import UsageError
from tugline.launch.folder_lock import folder_lock
from tugline.launch.progress import SessionProgress
from tugline.node.housekeeping import Housekeeping
from tugline.node.settings import NodeSettings
from tugline.node.telemetry import Stats
from tugline.plugins import import_beside
from tugline.recording.folder import list_recordings, parse_name
from tugline.recording.trajectories import find_superseded
from tugline.recording.verdicts import VERDICTS, put_in_force
from tugline.rollout.rejudge import Rejudger, SessionVerdicts
from tugline.schema import decode, read_values
from tugline.types import PluginSpec

FOLDER = "verdicts"
"""Folder of the history in that of the run, by default."""
_SERVER_S = 600.0
"""Seconds for which a server may be unavailable, or work on one request."""


def rejudge(
    run: str = "",
    /,
    *,
    evaluator: Path | None = None,
    select: list[str] | None = None,
    out: Path | None = None,
    twice: bool = False,
    use: Literal["new", "recorded"] | None = None,
    slots: Count | None = None,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Judge recorded sessions again by their stored patches, without an agent.

    Args:
        run: Folder of a run, or of recordings; with --server or --dir, the name of a run there.
        evaluator: YAML, TOML or JSON file with the name and the options of an evaluator (default:
            the evaluator of each task).
        select: Only sessions or tasks whose id matches this pattern, such as fix-*; repeatable.
        out: Folder of the history of verdicts (default: RUN/verdicts).
        twice: Judge everything twice, and list sessions whose two verdicts differ.
        use: Verdicts to put in force, from which exports, trainers and consumers take rewards:
            those of this command, or again those recorded by the rollouts, which judges nothing.
        slots: Number of sessions that are judged at once (default: one per processor).
    """
    if use == "recorded" and (evaluator or twice):
        raise UsageError("--use recorded judges nothing; leave out --evaluator and --twice")
    wanted = RejudgeOptions(
        run=run,
        select=select or (),
        evaluator=_read_evaluator(evaluator) if evaluator else None,
        name=evaluator.stem if evaluator else "",
        rounds=2 if twice else 1,
        use=use,
    )
    if remote.server is not None or remote.folder is not None:
        if out is not None or slots is not None:
            raise UsageError("--out and --slots are for a run on this machine, without a server")
        outcome = asyncio.run(_judge_remotely(remote, wanted))
    else:
        outcome = _judge_locally(wanted, out, slots or os.cpu_count() or 1)
    if isinstance(outcome, int):
        line = f"the recorded verdicts are in force again: {outcome} sessions had another"
        print_report({"put_in_force": outcome}, lambda: print_text(line), as_json=as_json)
        return
    print_report(outcome, lambda: show(outcome), as_json=as_json, failed=bool(outcome.errors))


async def _judge_remotely(remote: Remote, wanted: RejudgeOptions) -> RejudgeReport | int:
    """Judge on a server's nodes, or put recorded verdicts in force, whose number is returned."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        async with remote.connect(_SERVER_S) as client:
            if wanted.use == "recorded":
                return await use_recorded(client, wanted)
            return await judge_on_server(client, wanted, console)
    except asyncio.CancelledError:
        console.print("the work continues on the server; the same command shows it")
        raise


def _judge_locally(wanted: RejudgeOptions, out: Path | None, slots: int) -> RejudgeReport | int:
    """Judge on this machine, or put recorded verdicts in force, whose number is returned."""
    run = Path(wanted.run)
    if not (wanted.run and run.is_dir()):
        raise UsageError(f"{wanted.run!r} is not a folder; give the folder of a run")
    paths = _select(run, wanted.select)
    if wanted.use == "recorded":
        return sum(put_in_force(path, None) for path in paths)
    folder = out or run / FOLDER
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with folder_lock(folder, instead="choose another --out"):
        rejudger = Rejudger(run, folder, wanted.evaluator, wanted.rounds, wanted.name)
        outcomes = _judge_all(rejudger, paths, slots, console)
        changed = sum(_use(run, outcomes)) if wanted.use else 0
    names = {path.relative_to(run).as_posix() for path in paths}
    verdicts = rejudger.history.verdicts.values()
    return summarize(outcomes, str(folder / VERDICTS), verdicts, names, changed)


def _select(run: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the last recording of each selected session. Raises `UsageError` if there is none."""
    paths = list_recordings(run)
    superseded = find_superseded(paths)
    paths = [path for path in paths if path not in superseded]
    if not patterns:
        return paths
    chosen = []
    for path in paths:
        session, _ = parse_name(path)
        names = (session, session.rpartition("-")[0])
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            chosen.append(path)
    if not chosen:
        raise UsageError(f"--select {' '.join(patterns)} matches no session or task of {run}")
    return chosen


def _read_evaluator(path: Path) -> PluginSpec:
    """Read the file of an evaluator. Raises `ConfigError`."""
    import_beside(path)
    values = read_values(path)
    if isinstance(values, dict) and list(values) == ["evaluator"]:  # as in a task file
        values = values["evaluator"]
    values = {"name": values} if isinstance(values, str) else values
    return decode(values, PluginSpec, source=str(path))


def _judge_all(
    rejudger: Rejudger, paths: Sequence[Path], slots: int, console: Console
) -> list[SessionVerdicts]:
    """Judge recordings, with progress. Raises `SystemExit` if stopped."""
    progress = SessionProgress(console, len(paths))
    began = time.time()
    outcomes: list[SessionVerdicts] = []
    keeper = Housekeeping(rejudger.work, None, NodeSettings(), Stats(), lambda _name: False)

    async def main() -> None:
        this = asyncio.current_task()
        free = asyncio.Semaphore(slots)

        async def judge_one(path: Path) -> SessionVerdicts:
            async with free:
                outcome = await rejudger.judge(path)
            reward = outcome.rewards[0] if outcome.rewards else None
            failure = next((entry.error for entry in outcome.entries if entry.error), "")
            new = any(entry.at >= began for entry in outcome.entries)
            progress.add(outcome.session, reward, failure, new=new)
            return outcome

        await asyncio.to_thread(keeper.reap, rejudger.parts, ())
        with progress.bar, handle_signals(lambda: None if this is None else this.cancel()):
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(judge_one(path)) for path in paths]
        outcomes.extend(each.result() for each in running)

    try:
        keep_running(main, None)
    except SystemExit:
        console.print("stopped; the same command resumes")
        raise
    return outcomes


def _use(run: Path, outcomes: Iterable[SessionVerdicts]) -> Iterator[bool]:
    """Put the first verdict of each session in force; yield whether another one was."""
    for outcome in outcomes:
        if outcome.entries and not outcome.entries[0].error:
            yield put_in_force(run / outcome.entries[0].recording, outcome.entries[0])
