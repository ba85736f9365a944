"""Check a case in a process and a network of its own."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from conformance import network
from conformance.worker import Job
from tugline.cli.harness_check import Case
from tugline.errors import HarnessError
from tugline.harnesses.base import Harness
from tugline.plugins import find

_LIMIT_S = 900.0
_END_S = 15.0
_TESTS = Path(__file__).parents[1]


async def check(case: Case, *, slow: bool = False) -> dict[str, str]:
    """Install the harness and run its sessions; what each check says. Raises `HarnessError`."""
    harness: Harness = find("harness", case.harness)(**case.options)
    no_network = await asyncio.to_thread(network.unavailable)
    await harness.install()
    with tempfile.TemporaryDirectory(prefix="tugline-check-") as folder:
        return await _work(Job(case, folder, no_network, slow))


async def _work(job: Job) -> dict[str, str]:
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
            process.send_signal(signal.SIGINT)  # it ends the harness, then itself
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
