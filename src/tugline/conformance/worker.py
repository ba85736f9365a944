"""Checks one cell, in a process of its own that ``unshare`` starts.

Reads a `Job` from stdin and writes a `Result` to the file that the job names.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from tugline import log
from tugline.conformance import checks, sandbox, sessions
from tugline.conformance.cells import Case, judged
from tugline.conformance.models import Engine
from tugline.conformance.rehearsal import Run, Stage, rehearse
from tugline.errors import TuglineError
from tugline.plugins import find
from tugline.types import Call


class Job(msgspec.Struct, frozen=True):
    """One cell, and where to work."""

    cell: Case
    folder: str
    no_sandbox: str | None = None
    """Why this process has the machine's own network; None in a sandbox."""
    slow: bool = False
    """Whether the minutes-long session is run as well."""
    engine: Engine | None = None
    """What answers; None for the scripted model."""


class Result(msgspec.Struct, frozen=True):
    """What is told about a cell."""

    harness: str
    version: str | None
    dialect: str
    turns: int
    exact_turns: int
    checks: dict[str, str]


class Part(NamedTuple):
    """A session and what it shows; `harnesses` are those that have it, all if empty."""

    stage: Callable[[Case], Stage]
    judges: Mapping[str, Callable[[Case, Run], str | None]]
    harnesses: tuple[str, ...] = ()
    slow: bool = False


_PARTS: dict[str, Part] = {
    "plain": Part(
        sessions.plain,
        {
            "completes": checks.completes,
            "tool_call_executed": checks.tool_call_executed,
            "streaming": checks.streaming,
            "history_exact": checks.history_exact,
            "prefix_kept": checks.prefix_kept,
            "usage_seen": checks.usage_seen,
            "text_shown": checks.text_shown,
        },
    ),
    "faulty": Part(sessions.faulty, {"retry_safe": checks.retry_safe}),
    "budget": Part(sessions.short, {"budget_stop_survived": checks.budget_stop_survived}),
    "team": Part(sessions.team, {"sub_agents_linked": checks.sub_agents_linked}, ("codex",)),
    "title": Part(
        sessions.titled, {"title_is_side_call": checks.title_is_side_call}, ("opencode",)
    ),
    "slow": Part(sessions.patient, {"slow_start_survived": checks.retry_safe}, slow=True),
}


_ANY_MODEL: dict[str, Part] = {
    "free": Part(
        sessions.free,
        {
            "completes": checks.ends,
            "streaming": checks.any_streamed,
            "history_exact": checks.continues,
            "prefix_kept": checks.prefix_kept,
            "usage_seen": checks.usage_seen,
        },
    ),
}
"""What can be said whatever the model answers."""


def parts_of(cell: Case, *, slow: bool) -> dict[str, Part]:
    """The sessions of a cell by name; with `slow` also the one that takes minutes."""
    return {
        name: part
        for name, part in _PARTS.items()
        if (slow or not part.slow) and (not part.harnesses or cell.harness in part.harnesses)
    }


def checks_of(cell: Case, *, slow: bool) -> list[str]:
    """The names of what is checked."""
    names = [name for part in parts_of(cell, slow=slow).values() for name in part.judges]
    return [*names, "no_foreign_host"]


async def check(job: Job) -> Result:
    """Run the sessions and judge them."""
    folder, cell = Path(job.folder), job.cell
    verdicts: dict[str, str | None] = {}
    calls: list[Call] = []
    async with _network(job) as names:
        for name, part in _parts(job).items():
            ran = await _rehearsed(job, part.stage(cell), folder / name)
            for check_name, judge in part.judges.items():
                verdicts[check_name] = ran if isinstance(ran, str) else judge(cell, ran)
            if name in {"plain", "free"} and not isinstance(ran, str):
                calls = checks.main_calls(ran.calls)
    foreign = f"asked for {', '.join(names)}" if names else None
    verdicts["no_foreign_host"] = job.no_sandbox or foreign
    return Result(
        harness=cell.harness,
        version=find("harness", cell.harness)(**cell.options).version,
        dialect=cell.dialect,
        turns=len(calls),
        exact_turns=sum(call.branch is None for call in calls),
        checks={name: judged(cell, name, why) for name, why in verdicts.items()},
    )


def _parts(job: Job) -> dict[str, Part]:
    return _ANY_MODEL if job.engine else parts_of(job.cell, slow=job.slow)


async def _rehearsed(job: Job, stage: Stage, folder: Path) -> Run | str:
    try:
        ran = await rehearse(job.cell, stage, folder, job.engine)
    except TuglineError as error:
        return str(error)
    await asyncio.to_thread(_keep, ran, folder)
    return ran


def _keep(ran: Run, folder: Path) -> None:
    """For whoever wants to know why: each request and its answer, and a line per call."""
    wire = folder / "wire"
    wire.mkdir()
    for number, seen in enumerate(ran.seen):
        (wire / f"{number:02}-request").write_bytes(seen.request)
        (wire / f"{number:02}-response-{seen.status}").write_bytes(seen.response)
    calls = [
        f"{call.number} parent={call.parent} branch={call.branch} kind={call.kind} "
        f"outcome={call.outcome} prompt={len(call.prompt_ids)} sampled={len(call.sampled_ids)}"
        for call in ran.calls
    ]
    paths = [f"{seen.at % 1000:.3f} {seen.status} {seen.path}" for seen in ran.seen]
    (wire / "summary").write_text("\n".join([*calls, *paths, f"{ran.exit}", ""]))


@contextlib.asynccontextmanager
async def _network(job: Job) -> AsyncIterator[list[str]]:
    if job.no_sandbox is not None:
        yield []
        return
    async with sandbox.entered(Path(job.folder)) as names:
        yield names


def main() -> None:
    """Do the job on stdin."""
    log.configure(level="error")
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    result = asyncio.run(check(job))
    (Path(job.folder) / "result.json").write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
