"""Check one case, in a process that ``unshare`` starts with a network of its own.

Reads a `Job` from stdin and writes a `CheckResult` to ``result.json`` in the job's folder.
"""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from conformance import checks, network, sessions
from conformance.session_run import Scenario, SessionRun, run_session
from tugline import log
from tugline.cli.harness_check import Case, CheckResult, main_calls
from tugline.errors import TuglineError
from tugline.plugins import find
from tugline.types import Call

KNOWN_FAILURES: tuple[tuple[str, str, str, str], ...] = (
    ("mini_swe_agent", "streaming", "answer came whole", "it asks for whole answers only"),
)
"""Harness, check, pattern of the failure, and the reason in the harness. docs/harnesses.md says
the same. A failure whose text does not match is ours."""


class Job(msgspec.Struct, frozen=True):
    """One case, and where to work."""

    case: Case
    folder: str
    no_network: str | None = None
    """Why this process has the machine's own network; None if it has one of its own."""
    slow: bool = False
    """Whether to run the session that takes minutes."""
    only: str = ""
    """The one session to run; all if empty."""


class Part(NamedTuple):
    """A session and its checks; `harnesses` are those that have it, all if empty."""

    scenario: Callable[[Case], Scenario]
    checks: Mapping[str, Callable[[Case, SessionRun], str | None]]
    harnesses: tuple[str, ...] = ()
    slow: bool = False


def _by_name(
    *functions: Callable[[Case, SessionRun], str | None],
) -> dict[str, Callable[[Case, SessionRun], str | None]]:
    return {function.__name__: function for function in functions}


_WITH_AGENTS = ("codex", "claude_code", "qwen_code")
_PARTS: dict[str, Part] = {
    "plain": Part(
        sessions.plain,
        _by_name(
            checks.completes,
            checks.tool_call_executed,
            checks.streaming,
            checks.history_exact,
            checks.prefix_kept,
            checks.usage_seen,
            checks.text_shown,
        ),
    ),
    "faulty": Part(sessions.faulty, _by_name(checks.retry_safe)),
    "budget": Part(sessions.budget, _by_name(checks.budget_stop_survived)),
    "team": Part(sessions.team, _by_name(checks.sub_agents_linked), _WITH_AGENTS),
    "overflow": Part(
        sessions.overflowing, _by_name(checks.compaction_named), ("claude_code", "qwen_code")
    ),
    "title": Part(sessions.titled, _by_name(checks.title_is_side_call), ("opencode",)),
    "slow": Part(sessions.slow_start, {"slow_start_survived": checks.retry_safe}, slow=True),
}


def parts_of(case: Case, *, slow: bool, only: str = "") -> dict[str, Part]:
    """Return the sessions of a case by name; with `slow` also the one that takes minutes."""
    return {
        name: part
        for name, part in _PARTS.items()
        if (slow or not part.slow)
        and (not part.harnesses or case.harness in part.harnesses)
        and only in {"", name}
    }


def checks_of(case: Case, *, slow: bool, only: str = "") -> list[str]:
    """Return the names of the checks of a case."""
    parts = parts_of(case, slow=slow, only=only).values()
    return [*(name for part in parts for name in part.checks), "no_foreign_host"]


def label(case: Case, check: str, failure: str | None) -> str:
    """Return ``pass``, ``fail: reason``, or ``cli: reason`` for a known failure of the harness."""
    if failure is None:
        return "pass"
    for harness, name, pattern, reason in KNOWN_FAILURES:
        if (harness, name) == (case.harness, check) and re.search(pattern, failure):
            return f"cli: {reason}"
    return f"fail: {failure}"


async def check(job: Job) -> CheckResult:
    """Run the sessions and their checks."""
    folder, case = Path(job.folder), job.case
    failures: dict[str, str | None] = {}
    turns: list[Call] = []
    async with _network(job) as names:
        for name, part in parts_of(case, slow=job.slow, only=job.only).items():
            run = await _run(job, part.scenario(case), folder / name)
            for check_name, examine in part.checks.items():
                failures[check_name] = run if isinstance(run, str) else examine(case, run)
            if name == "plain" and not isinstance(run, str):
                turns = main_calls(run.calls)
    foreign = f"asked for {', '.join(names)}" if names else None
    failures["no_foreign_host"] = job.no_network or foreign
    return CheckResult(
        harness=case.harness,
        version=find("harness", case.harness)(**case.options).version,
        dialect=case.dialect,
        turns=len(turns),
        exact_turns=sum(call.branch is None for call in turns),
        checks={name: label(case, name, reason) for name, reason in failures.items()},
    )


async def _run(job: Job, scenario: Scenario, folder: Path) -> SessionRun | str:
    try:
        return await run_session(job.case, scenario, folder)
    except TuglineError as error:
        return str(error)


@contextlib.asynccontextmanager
async def _network(job: Job) -> AsyncIterator[list[str]]:
    if job.no_network is not None:
        yield []
        return
    async with network.set_up(Path(job.folder)) as names:
        yield names


def main() -> None:
    """Do the job on stdin."""
    log.configure(level="error")
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    result = asyncio.run(check(job))
    (Path(job.folder) / "result.json").write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
