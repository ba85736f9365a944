"""Check cells one after the other, each in a process and a network of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from tugline.conformance import sandbox
from tugline.conformance.cells import Case
from tugline.conformance.models import Engine, outside
from tugline.conformance.worker import Job, Result, checks_of
from tugline.errors import HarnessError, UsageError
from tugline.gateway.probe.probe import probe
from tugline.harnesses.base import Harness
from tugline.plugins import find
from tugline.types import Mode

_LIMIT_S = 900.0
_END_S = 15.0


@contextlib.asynccontextmanager
async def reached(url: str | None) -> AsyncIterator[Engine | None]:
    """A way for sandboxes to the engine at `url`. Raises `UsageError` if it tells no token ids."""
    if url is None:
        yield None
        return
    report = await probe(url)
    report.wire(Mode.OBSERVED)
    with tempfile.TemporaryDirectory(prefix="tugline-") as folder:
        engine = Engine(report, f"{folder}/engine")
        async with outside(url, engine.socket):
            yield engine


async def check(
    cell: Case, *, keep: Path | None = None, slow: bool = False, engine: Engine | None = None
) -> Result:
    """Install the harness, run its sessions and judge them; a failure is a verdict, no exception.

    Every file of the sessions stays in the folder `keep`: logs, homes, requests and answers.
    """
    harness: Harness = find("harness", cell.harness)(**cell.options)
    no_sandbox = await asyncio.to_thread(sandbox.unavailable)
    try:
        await harness.install()
        with tempfile.TemporaryDirectory(prefix="tugline-check-") as temporary:
            folder = (keep or Path(temporary)).absolute() / f"{cell.harness}-{cell.dialect}"
            await asyncio.to_thread(folder.mkdir)
            return await _work(Job(cell, str(folder), no_sandbox, slow, engine))
    except (HarnessError, UsageError) as error:
        failed = dict.fromkeys(checks_of(cell, slow=slow), f"fail: {error}")
        return Result(cell.harness, harness.version, cell.dialect, 0, 0, failed)


async def _work(job: Job) -> Result:
    worker = [sys.executable, "-m", "tugline.conformance.worker"]
    argv: Sequence[str] = worker if job.no_sandbox else [*sandbox.UNSHARE, *worker]
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            _, errors = await process.communicate(msgspec.json.encode(job))
    except TimeoutError:
        errors = f"not done after {_LIMIT_S:.0f} s".encode()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # it ends the harness, then itself
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        told = (Path(job.folder) / "result.json").read_bytes()
        return msgspec.json.decode(told, type=Result)
    except OSError as error:
        last = " | ".join(errors.decode(errors="replace").strip().splitlines()[-3:])
        msg = f"the check itself failed: {last}"
        raise HarnessError(msg) from error
