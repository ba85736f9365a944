"""``tugline rejudge``: judge recorded sessions again by their stored patches.

The same command resumes. Progress goes to stderr, so stdout has only the report. The exit code is 1
if a session could not be judged because of an error.
"""

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Column

from tugline.aio import handle_signals
from tugline.cli.options import DEFAULT_SERVER, Count, Json, Remote
from tugline.cli.output import make_table, print_report, print_text
from tugline.cli.process import keep_running
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
from tugline.recording.verdicts import VERDICTS, VerdictEntry, put_in_force
from tugline.rollout.rejudge import Rejudger, SessionVerdicts
from tugline.schema import decode, read_values
from tugline.trainers.evaluation import (
    Agreement,
    Estimate,
    compare_verdicts,
    format_estimate,
    is_other,
)
from tugline.types import PluginSpec, is_pass

FOLDER = "verdicts"
"""Folder of the history in that of the run, by default."""
_MAX_SHOWN = 20
"""Number of sessions of each kind that are printed."""


class ChangedReward(msgspec.Struct, frozen=True):
    """Two rewards of a session."""

    session: str
    before: float | None
    now: float | None


class Verifier(msgspec.Struct, frozen=True):
    """An evaluator in the history, and its first verdicts on the selected sessions."""

    name: str
    evaluated: int
    solved: int
    reward: float
    """Mean reward."""


class VerifierPair(msgspec.Struct, frozen=True):
    """Two evaluators on the sessions that both have judged."""

    first: str
    second: str
    agreement: Agreement


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
    verifiers: tuple[Verifier, ...]
    """All evaluators of the history; `recorded` is that of the rollouts."""
    pairs: tuple[VerifierPair, ...]
    put_in_force: int
    """Sessions whose verdict in force is another one now."""
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
        use: Verdicts to put in force, from which exports and trainers take rewards: those of
            this command, or again those recorded by the rollouts, which judges nothing.
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
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if remote.server is not None or remote.folder is not None:
        if out is not None or slots is not None:
            raise UsageError("--out and --slots are for a run on this machine, without a server")
        report = asyncio.run(_judge_remotely(remote, wanted, console))
    else:
        report = _judge_locally(wanted, out, slots, console)
    if isinstance(report, int):
        line = f"the recorded verdicts are in force again: {report} sessions had another"
        print_report({"put_in_force": report}, lambda: print_text(line), as_json=as_json)
        return
    print_report(report, lambda: _show(report), as_json=as_json, failed=bool(report.errors))


async def _judge_remotely(
    remote: Remote, wanted: RejudgeOptions, console: Console
) -> RejudgeReport | int:
    """Judge on a server's nodes, or return how many recorded verdicts are in force again."""
    try:
        async with remote.connect() as client:
            if wanted.use == "recorded":
                return await use_recorded(client, wanted)
            outcomes, changed = await judge_on_server(client, wanted, console)
            history = f"{client.url}/v1/sessions/SESSION/verdicts"
    except asyncio.CancelledError:
        console.print("the work continues on the server; the same command shows it")
        raise
    return _summarize(outcomes, history, (e for each in outcomes for e in each.entries), changed)


def _judge_locally(
    wanted: RejudgeOptions, out: Path | None, slots: int | None, console: Console
) -> RejudgeReport | int:
    """Judge on this machine, or return how many recorded verdicts are in force again."""
    run = Path(wanted.run)
    if not (wanted.run and run.is_dir()):
        raise UsageError(f"{wanted.run!r} is not a folder; give the folder of a run")
    paths = _select(run, wanted.select)
    if wanted.use == "recorded":
        return sum(put_in_force(path, None) for path in paths)
    folder = out or run / FOLDER
    with folder_lock(folder, instead="choose another --out"):
        rejudger = Rejudger(run, folder, wanted.evaluator, wanted.rounds, wanted.name)
        outcomes = _judge_all(rejudger, paths, slots or os.cpu_count() or 1, console)
        changed = sum(_use(run, outcomes)) if wanted.use else 0
    names = {path.relative_to(run).as_posix() for path in paths}
    entries = [each for each in rejudger.history.verdicts.values() if each.recording in names]
    return _summarize(outcomes, str(folder / VERDICTS), entries, changed)


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


def _use(run: Path, outcomes: Iterable[SessionVerdicts]) -> Iterator[bool]:
    """Put the first verdict of each session in force; yield whether another one was."""
    for outcome in outcomes:
        if outcome.entries and not outcome.entries[0].error:
            yield put_in_force(run / outcome.entries[0].recording, outcome.entries[0])


# --------------------------------------------------------------------------- the report
def _summarize(
    outcomes: Sequence[SessionVerdicts],
    history: str,
    entries: Iterable[VerdictEntry],
    put_in_force: int,
) -> RejudgeReport:
    """Compare the first verdict of each session with the recorded one, and with the second."""
    verdicts = _group(entries)
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
        verifiers=tuple(_count(name, rewards) for name, rewards in verdicts.items()),
        pairs=tuple(_compare(verdicts)),
        put_in_force=put_in_force,
        refused={each.session: each.refused for each in outcomes if each.refused},
        errors=errors,
    )


_Verdicts = Mapping[str, tuple[str, float]]
"""Task and reward by session."""


def _group(entries: Iterable[VerdictEntry]) -> dict[str, _Verdicts]:
    """Return the first verdicts of each evaluator by a unique name; first the recorded ones."""
    recorded: dict[str, tuple[str, float]] = {}
    groups: dict[tuple[str, str], dict[str, tuple[str, float]]] = {}
    for entry in entries:
        if entry.round == 1 and entry.reward is not None:
            key = entry.name, entry.digest if entry.name else ""
            session = f"{entry.recording} {entry.session}"
            groups.setdefault(key, {})[session] = entry.task, entry.reward.value
            if entry.before is not None:
                recorded.setdefault(session, (entry.task, entry.before))
    names = [name for name, _ in groups]
    unique = {
        (name or "each task's own") + (f" ({digest[:8]})" if names.count(name) > 1 else ""): own
        for (name, digest), own in groups.items()
    }
    return {"recorded": recorded, **unique}


def _count(name: str, verdicts: _Verdicts) -> Verifier:
    rewards = [reward for _, reward in verdicts.values()]
    return Verifier(name, len(rewards), sum(map(is_pass, rewards)), fmean(rewards or [0.0]))


def _compare(verdicts: Mapping[str, _Verdicts]) -> Iterator[VerifierPair]:
    """Compare every two evaluators on the sessions that both have judged."""
    for (first, before), (second, now) in combinations(verdicts.items(), 2):
        both = [(before[each][0], before[each][1], now[each][1]) for each in before if each in now]
        if both:
            yield VerifierPair(first, second, compare_verdicts(both))


def _show(report: RejudgeReport) -> None:
    rows = [
        (
            "sessions",
            f"{report.evaluated} of {report.sessions} judged, {len(report.refused)} refused",
        ),
        ("changed rewards", str(len(report.changed))),
        *_list_agreement(report.agreement),
    ]
    if report.put_in_force:
        rows.append(("put in force", f"{report.put_in_force} sessions"))
    table = make_table(("", ""), rows)
    table.show_header = False
    print_text(table)
    if len(report.verifiers) > 2:
        _show_verifiers(report)
    for title, rewards in (("changed", report.changed), ("flipped by itself", report.flipped)):
        _show_some(title, [f"{r.session} {_format(r.before)} -> {_format(r.now)}" for r in rewards])
    for title, reasons in (("refused", report.refused), ("error", report.errors)):
        _show_some(title, [f"{session}: {reason}" for session, reason in reasons.items()])
    print_text(f"all verdicts are in {report.history}")


def _show_verifiers(report: RejudgeReport) -> None:
    """Print the evaluators of the history, and how every two of them differ."""
    counts = [
        (v.name, str(v.evaluated), str(v.solved), f"{v.reward:.3f}") for v in report.verifiers
    ]
    print_text(make_table(("evaluator", "judged", "solved", "mean reward"), counts))
    rows = [
        (
            f"{pair.first} -> {pair.second}",
            str(pair.agreement.sessions),
            format_estimate(pair.agreement.same),
            format_estimate(pair.agreement.difference),
            _format_difference(pair.agreement.reward_difference),
        )
        for pair in report.pairs
    ]
    first = Column("evaluators", no_wrap=True)
    heads = (first, "sessions", "same verdict", "change of pass@1", "change of reward")
    print_text(make_table(heads, rows))


def _list_agreement(agreement: Agreement | None) -> Iterator[tuple[str, str]]:
    if agreement is None:
        return
    yield "same verdict", format_estimate(agreement.same)
    before, now = agreement.solved
    yield "solved", f"{before} before, {now} now, of {agreement.sessions}"
    yield "change of pass@1", format_estimate(agreement.difference)
    rewards = f"{agreement.reward[0]:.3f} before, {agreement.reward[1]:.3f} now"
    yield "mean reward", rewards
    yield "change of reward", _format_difference(agreement.reward_difference)


def _format_difference(mean: Estimate) -> str:
    return f"{mean.value:+.3f} ({mean.low:+.3f} to {mean.high:+.3f})"


def _show_some(title: str, lines: Sequence[str]) -> None:
    for line in lines[:_MAX_SHOWN]:
        print_text(f"{title}: {line}")
    if len(lines) > _MAX_SHOWN:
        print_text(f"{title}: and {len(lines) - _MAX_SHOWN} more")


def _format(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
