"""Run trusted scripts on an agent's work: what `tests`, `harbor` and `swebench` share.

`open_runner` opens a fresh sandbox and applies the task's files and the filtered patch; the
evaluator's own files come last, after anything that runs the agent's code. Scripts run until a
deadline, without network unless `allow_network` was called, and leave logs outside of the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import PurePosixPath

import msgspec

from tugline.evaluators.base import SessionOutcome
from tugline.evaluators.diff import diff_work
from tugline.evaluators.filters import Rules, apply_patch, filter_patch, find_shadowing
from tugline.sandbox.base import Content, Exit, Sandbox

TAIL = 2000
"""Bytes of a log that reports show."""
_LEAST_S = 1.0


class ScriptRunner:
    """Runs scripts in `sandbox` until the deadline of an evaluation."""

    def __init__(
        self,
        sandbox: Sandbox,
        deadline: float,
        refused: Mapping[str, str] | None = None,
        diff: str = "",
    ) -> None:
        """`deadline` is a time of `time.monotonic`."""
        self.sandbox, self.deadline = sandbox, deadline
        self.refused = dict(refused or {})
        """Paths of the patch that were not applied, each with the reason."""
        self.diff = diff
        """The whole patch, if it was requested."""

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, log_name: str
    ) -> Exit:
        """Run a program for at most `timeout_s`, and until the deadline."""
        timeout_s = self.cap_timeout(timeout_s)
        return await self.sandbox.run(argv, env=env, timeout_s=timeout_s, log_name=log_name)

    def cap_timeout(self, timeout_s: float) -> float:
        """Return `timeout_s`, or the seconds until the deadline if that is nearer."""
        return min(timeout_s, max(self.deadline - time.monotonic(), _LEAST_S))

    async def read_log(self, log_name: str, *, head: int = 0, tail: int = TAIL) -> bytes:
        """Return the first `head` and the last `tail` bytes of a program's output."""
        return await asyncio.to_thread(self._read_log, log_name, head, tail)

    async def read_tail(self, log_name: str, size: int = TAIL) -> str:
        """Return the end of a program's output."""
        return (await self.read_log(log_name, tail=size)).decode(errors="replace")

    def _read_log(self, log_name: str, head: int, tail: int) -> bytes:
        with (self.sandbox.logs / f"{log_name}.log").open("rb") as log:
            size = log.seek(0, 2)
            log.seek(0)
            if size <= head + tail:
                return log.read()
            start = log.read(head)
            log.seek(size - tail)
            return start + (b"\n(cut here)\n" if head and tail else b"") + log.read(tail)


def start_deadline(outcome: SessionOutcome) -> float:
    """Return the time of `time.monotonic` at which an evaluation that begins now is over."""
    return time.monotonic() + outcome.timeout_s


@contextlib.asynccontextmanager
async def open_runner(
    outcome: SessionOutcome,
    rules: Rules,
    deadline: float,
    *,
    trusted: Mapping[str, Content] | None = None,
    with_diff: bool = False,
) -> AsyncIterator[ScriptRunner]:
    """Open a fresh sandbox with the agent's work in it.

    The caller puts `trusted`, the evaluator's own files, when all else is done.
    """
    trusted = trusted or {}
    async with outcome.open_sandbox({}) as sandbox:
        workdir = sandbox.workdir
        known = {*rules.known, *(PurePosixPath(path).parts[0] for path in outcome.task.files)}
        for path in find_shadowing(outcome.patch):
            if await sandbox.get(workdir / path) is not None:
                known.add(path)
        rules = msgspec.structs.replace(rules, trusted=tuple(trusted) or rules.trusted)
        rules = msgspec.structs.replace(rules, known=known, workdir=workdir)
        diff = await diff_work(outcome, sandbox) if with_diff else ""
        patch, refused = filter_patch(outcome.patch, rules)
        work = apply_patch(outcome.task.files, patch, trusted)
        await sandbox.put(workdir, {p: text for p, text in work.items() if p not in trusted})
        yield ScriptRunner(sandbox, deadline, refused, diff)


async def allow_network(sandbox: Sandbox) -> None:
    """Let programs reach the hosts that the runtime allows.

    A sandbox forwards those only once some address is exposed to it.
    """
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await sandbox.expose(f"http://127.0.0.1:{port}")
