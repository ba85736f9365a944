"""Check one case, in a process that ``unshare`` starts with a network of its own.

Reads a `Job` from stdin and writes what each check says to ``result.json`` in the job's folder.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from conformance import checks, network, sessions
from conformance.session_run import Scenario, SessionRun, run_session
from tugline import log
from tugline.cli.harness_check import Case


class Job(msgspec.Struct, frozen=True):
    """One case, and where to work."""

    case: Case
    folder: str
    no_network: str | None = None
    """Why this process has the machine's own network; None if it has one of its own."""
    slow: bool = False
    """Whether to run the session that takes minutes."""


Check = Callable[[Case, SessionRun], str | None]


class Part(NamedTuple):
    """A session and its checks; `harnesses` are those that have it, all if empty."""

    scenario: Callable[[Case], Scenario]
    checks: Sequence[Check]
    harnesses: Sequence[str] = ()
    slow: bool = False


_PARTS = (
    Part(sessions.plain, [checks.streaming, checks.usage_seen]),
    Part(sessions.faulty, [checks.retry_safe]),
    Part(sessions.budget, [checks.budget_stop_survived]),
    Part(sessions.team, [checks.sub_agents_linked], ["codex", "claude_code", "qwen_code"]),
    Part(sessions.overflowing, [checks.compaction_named], ["claude_code", "qwen_code"]),
    Part(sessions.titled, [checks.title_is_side_call], ["opencode"]),
    Part(sessions.slow_start, [checks.slow_start_survived], slow=True),
)


def parts_of(case: Case, *, slow: bool) -> list[Part]:
    """Return the sessions of a case; with `slow` also the one that takes minutes."""
    return [
        part
        for part in _PARTS
        if (slow or not part.slow) and (not part.harnesses or case.harness in part.harnesses)
    ]


async def check(job: Job) -> dict[str, str]:
    """Run the sessions and their checks; what each says: ``pass`` or ``fail: reason``."""
    failures: dict[str, str | None] = {}
    async with _network(job) as names:
        for part in parts_of(job.case, slow=job.slow):
            folder = Path(job.folder) / part.scenario.__name__
            run = await run_session(job.case, part.scenario(job.case), folder)
            failures |= {one.__name__: one(job.case, run) for one in part.checks}
    foreign = f"asked for {', '.join(names)}" if names else None
    failures["no_foreign_host"] = job.no_network or foreign
    return {name: f"fail: {reason}" if reason else "pass" for name, reason in failures.items()}


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
