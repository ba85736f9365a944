"""``tugline rejudge``: judge recorded sessions again by their stored patches.

The same command resumes. Progress goes to stderr, so stdout has only the report. The exit code is 1
if a session could not be judged because of an error.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from rich.console import Console

from tugline.aio import handle_signals
from tugline.cli.options import DEFAULT_SERVER, Count, Json, Remote
from tugline.cli.output import SessionProgress, make_table, print_report, print_text
from tugline.cli.process import keep_running
from tugline.cli.rejudge_server import RejudgeOptions, judge_on_server
from tugline.errors import UsageError
from tugline.launch.folder_lock import folder_lock
from tugline.node.housekeeping import Housekeeping
from tugline.node.settings import NodeSettings
from tugline.node.telemetry import Stats
from tugline.recording.folder import list_recordings, parse_name
from tugline.recording.trajectories import find_superseded
from tugline.recording.verdicts import VERDICTS
from tugline.rollout.rejudge import Rejudger, SessionVerdicts
from tugline.schema import decode, read_values
from tugline.trainers.evaluation import Agreement, compare_verdicts, format_estimate, is_other
from tugline.types import PluginSpec

FOLDER = "verdicts"
"""Folder of the history in that of the run, by default."""
_MAX_SHOWN = 20
"""Number of sessions of each kind that are printed."""


class ChangedReward(msgspec.Struct, frozen=True):
    """Two rewards of a session."""

    session: str
    before: float | None
    now: float | None


class RejudgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the verdicts of one call, those of earlier calls with its evaluator included."""

    sessions: int
    evaluated: int
    history: str
    """Path or URL of all verdicts."""
    changed: tuple[ChangedReward, ...]
    """Sessions whose reward differs from the recorded one."""
    flipped: tuple[ChangedReward, ...]
    """Sessions whose two verdicts of ``--twice`` differ."""
    agreement: Agreement | None
    """None if no session has both rewards."""
    refused: dict[str, str]
    """Reasons by session."""
    errors: dict[str, str]
    """Errors by session."""


def rejudge(
    run: str = "",
    /,
    *,
    evaluator: Path | None = None,
    select: list[str] | None = None,
    out: Path | None = None,
    twice: bool = False,
    use: bool = False,
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
        use: Put the (first) verdicts in force, for all consumers; only with --server or --dir.
        slots: Number of sessions that are judged at once (default: one per processor).
    """
    wanted = RejudgeOptions(
        run=run,
        select=select or (),
        evaluator=_read_evaluator(evaluator) if evaluator else None,
        rounds=2 if twice else 1,
        use=use,
    )
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if remote.server is not None or remote.folder is not None:
        if out is not None or slots is not None:
            raise UsageError("--out and --slots are for a run on this machine, without a server")
        outcomes, history = asyncio.run(_judge_remotely(remote, wanted, console))
    else:
        if use:
            raise UsageError("--use needs --server or --dir, the server whose consumers get it")
        outcomes, history = _judge_locally(wanted, out, slots, console)
    report = _summarize(outcomes, history)
    print_report(report, lambda: _show(report), as_json=as_json, failed=bool(report.errors))


async def _judge_remotely(
    remote: Remote, wanted: RejudgeOptions, console: Console
) -> tuple[list[SessionVerdicts], str]:
    """Judge on a server's nodes; return the outcomes, and where all verdicts are."""
    try:
        async with remote.connect() as client:
            outcomes = await judge_on_server(client, wanted, console)
            return outcomes, f"{client.url}/v1/sessions/SESSION/verdicts"
    except asyncio.CancelledError:
        console.print("the work continues on the server; the same command shows it")
        raise


def _judge_locally(
    wanted: RejudgeOptions, out: Path | None, slots: int | None, console: Console
) -> tuple[list[SessionVerdicts], str]:
    """Judge on this machine; return the outcomes, and where all verdicts are."""
    run = Path(wanted.run)
    if not (wanted.run and run.is_dir()):
        raise UsageError(f"{wanted.run!r} is not a folder; give the folder of a run")
    paths = _select(run, wanted.select)
    folder = out or run / FOLDER
    with folder_lock(folder, instead="choose another --out"):
        rejudger = Rejudger(run, folder, wanted.evaluator, wanted.rounds)
        outcomes = _judge_all(rejudger, paths, slots or os.cpu_count() or 1, console)
    return outcomes, str(folder / VERDICTS)


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
            progress.add(outcome.session, reward, failure)
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


# --------------------------------------------------------------------------- the report
def _summarize(outcomes: Sequence[SessionVerdicts], history: str) -> RejudgeReport:
    """Compare the first verdict of each session with the recorded one, and with the second."""
    errors = {
        each.session: entry.error for each in outcomes for entry in each.entries if entry.error
    }
    sound = [each for each in outcomes if each.entries and each.session not in errors]
    changes = [ChangedReward(each.session, each.before, each.rewards[0]) for each in sound]
    repeats = [ChangedReward(each.session, each.rewards[0], each.rewards[-1]) for each in sound]
    pairs = [
        (each.entries[0].task, change.before, change.now)
        for each, change in zip(sound, changes, strict=True)
        if change.before is not None and change.now is not None
    ]
    return RejudgeReport(
        sessions=len(outcomes),
        evaluated=len(sound),
        history=history,
        changed=tuple(each for each in changes if is_other(each.before, each.now)),
        flipped=tuple(each for each in repeats if is_other(each.before, each.now)),
        agreement=compare_verdicts(pairs) if pairs else None,
        refused={each.session: each.refused for each in outcomes if each.refused},
        errors=errors,
    )


def _show(report: RejudgeReport) -> None:
    rows = [
        (
            "sessions",
            f"{report.evaluated} of {report.sessions} judged, {len(report.refused)} refused",
        ),
        ("changed rewards", str(len(report.changed))),
        *_list_agreement(report.agreement),
    ]
    table = make_table(("", ""), rows)
    table.show_header = False
    print_text(table)
    for title, rewards in (("changed", report.changed), ("flipped by itself", report.flipped)):
        _show_some(title, [f"{r.session} {_format(r.before)} -> {_format(r.now)}" for r in rewards])
    for title, reasons in (("refused", report.refused), ("error", report.errors)):
        _show_some(title, [f"{session}: {reason}" for session, reason in reasons.items()])
    print_text(f"all verdicts are in {report.history}")


def _list_agreement(agreement: Agreement | None) -> Iterator[tuple[str, str]]:
    if agreement is None:
        return
    yield "same verdict", format_estimate(agreement.same)
    before, now = agreement.solved
    yield "solved", f"{before} before, {now} now, of {agreement.sessions}"
    yield "change of pass@1", format_estimate(agreement.difference)
    mean = agreement.reward_difference
    rewards = f"{agreement.reward[0]:.3f} before, {agreement.reward[1]:.3f} now"
    yield "mean reward", rewards
    yield "change of reward", f"{mean.value:+.3f} ({mean.low:+.3f} to {mean.high:+.3f})"


def _show_some(title: str, lines: Sequence[str]) -> None:
    for line in lines[:_MAX_SHOWN]:
        print_text(f"{title}: {line}")
    if len(lines) > _MAX_SHOWN:
        print_text(f"{title}: and {len(lines) - _MAX_SHOWN} more")


def _format(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
