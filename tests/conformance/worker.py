"""Check one case, in a process that ``unshare`` starts with a network of its own.

It reads a `Job` from stdin and writes the result of each check to ``result.json`` in its folder.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from conformance import checks, network, sessions
from conformance.session_run import Scenario, SessionRun, run_session
from tugline import log
from tugline.cli.harness_check import Case, find_faults
from tugline.errors import HarnessError
from tugline.harnesses.base import Harness
from tugline.plugins import find

_LIMIT_S = 900.0
_END_S = 15.0
_TESTS = Path(__file__).parents[1]


class Job(msgspec.Struct, frozen=True):
    """One case, and the folder of its sessions."""

    case: Case
    folder: str
    no_network: str | None = None
    """Why the worker shares the network of the machine; None if it has a namespace of its own."""
    slow: bool = False
    """Whether to run the session that takes minutes, in place of the others."""


Check = Callable[[Case, SessionRun], str | None]


class Stage(NamedTuple):
    """A session and its checks; `harnesses` are those that have it, all if empty."""

    scenario: Callable[[Case], Scenario]
    checks: Sequence[Check]
    harnesses: Sequence[str] = ()
    slow: bool = False


_STAGES = (
    Stage(sessions.plain, [checks.streaming, checks.usage_seen]),  # and the checks of the command
    Stage(sessions.faulty, [checks.retry_safe]),
    Stage(sessions.budget, [checks.budget_stop_survived]),
    Stage(sessions.team, [checks.sub_agents_linked], ["codex", "claude_code", "qwen_code"]),
    Stage(sessions.overflowing, [checks.compaction_named], ["claude_code", "qwen_code"]),
    Stage(sessions.titled, [checks.title_is_side_call], ["opencode"]),
    Stage(sessions.slow_start, [checks.slow_start_survived], slow=True),
)


def stages_of(case: Case, *, slow: bool) -> list[Stage]:
    """Return the sessions of a case; with `slow` those that take minutes."""
    return [
        stage
        for stage in _STAGES
        if stage.slow is slow and (not stage.harnesses or case.harness in stage.harnesses)
    ]


async def check(case: Case, *, slow: bool = False) -> dict[str, str]:
    """Install the harness and run its sessions; ``pass`` or ``fail: reason`` by check.

    Raises `HarnessError`.
    """
    harness: Harness = find("harness", case.harness)(**case.options)
    no_network = await asyncio.to_thread(network.unavailable)
    await harness.install()
    with tempfile.TemporaryDirectory(prefix="tugline-check-") as folder:
        return await _start(Job(case, folder, no_network, slow))


async def _start(job: Job) -> dict[str, str]:
    worker = [sys.executable, "-m", "conformance.worker"]
    argv: Sequence[str] = worker if job.no_network else [*network.UNSHARE, *worker]
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(_TESTS)},
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            _, errors = await process.communicate(msgspec.json.encode(job))
    except TimeoutError:
        errors = f"not done after {_LIMIT_S:.0f} s".encode()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # the worker ends the harness, then itself
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        data = (Path(job.folder) / "result.json").read_bytes()
        return msgspec.json.decode(data, type=dict[str, str])
    except OSError as error:
        last = " | ".join(errors.decode(errors="replace").strip().splitlines()[-3:])
        msg = f"the check itself failed: {last}"
        raise HarnessError(msg) from error


async def _run(job: Job) -> dict[str, str]:
    """Run the sessions and their checks, in the process that was started for them."""
    failures: dict[str, str | None] = {}
    own = contextlib.nullcontext([]) if job.no_network else network.set_up(Path(job.folder))
    async with own as names:
        for stage in stages_of(job.case, slow=job.slow):
            folder = Path(job.folder) / stage.scenario.__name__
            run = await run_session(job.case, stage.scenario(job.case), folder)
            failures |= {one.__name__: one(job.case, run) for one in stage.checks}
            if stage.scenario is sessions.plain:
                failures |= find_faults(job.case, run.calls, run.log, run.exit.code)
    foreign = f"asked for {', '.join(names)}" if names else None
    failures["no_foreign_host"] = job.no_network or foreign
    return {name: f"fail: {reason}" if reason else "pass" for name, reason in failures.items()}


def _main() -> None:
    log.configure(level="error")
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    result = asyncio.run(_run(job))
    (Path(job.folder) / "result.json").write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    _main()
