"""Run ``tugline`` commands, in this process or in others, beside a running server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import structlog

from support.commands import TUGLINE, run_command
from support.server import TOKENS, RestartableServer, lease_sessions
from tugline import log
from tugline.cli.app import main
from tugline.client.nodes import NodeClient
from tugline.protocol import Work
from tugline.types import Task

TESTS = Path(__file__).parents[1]
SEARCH_PATH = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
Run = Callable[..., subprocess.CompletedProcess[str]]


class Shell:
    """A working folder in which ``tugline up`` seems to have been started."""

    def __init__(self, folder: Path, live: RestartableServer) -> None:
        self.folder, self.live = folder, live
        data = folder / "tugline-data"
        data.mkdir(parents=True)
        (data / "server.json").write_bytes(msgspec.json.encode({"url": live.url}))
        (data / "tokens.json").write_bytes(msgspec.json.encode(TOKENS))

    @contextlib.asynccontextmanager
    async def lease(
        self, *tasks: Task, slots: int = 1
    ) -> AsyncIterator[tuple[NodeClient, list[Work]]]:
        """Submit tasks, then lease queued sessions as a node."""
        await self.live.control.submit(tasks)
        async with lease_sessions(self.live.url, slots, 20.0) as (node, _, *work):
            yield node, work

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        """Start a command and leave it running."""
        return await start(self.folder, TUGLINE, *arguments)

    async def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return await asyncio.to_thread(run_command, *arguments, cwd=self.folder, timeout=40)


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run a command in `tmp_path` in this process; another process would import torch again."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["tugline", *arguments])
        code = None
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        factory = structlog.get_config()["logger_factory"]
        if isinstance(factory, structlog.WriteLoggerFactory):  # a process would close it at its end
            factory._file.close()
            log.configure()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return subprocess.CompletedProcess(arguments, int(code or 0), printed.out, printed.err)

    return run


async def start(folder: Path, *argv: str | Path) -> asyncio.subprocess.Process:
    """Start a program in its own process group; it can import what the tests can."""
    return await asyncio.create_subprocess_exec(
        *argv,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SEARCH_PATH},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )


async def end(process: asyncio.subprocess.Process, code: int = 0) -> tuple[str, str]:
    """Wait for a command that must exit with `code`; its stdout and stderr."""
    out, err = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == code, err.decode()
    return out.decode(), err.decode()


async def kill_when(process: asyncio.subprocess.Process, reached: Callable[[], object]) -> None:
    """Kill a process, but not its children, as soon as `reached` is true."""
    while not reached():
        if process.returncode is not None:
            pytest.fail(f"ended before it was killed: {(await process.communicate())[1].decode()}")
        await asyncio.sleep(0.005)
    process.kill()
    await end(process, -signal.SIGKILL)


@pytest.fixture
def shell(tmp_path: Path, live: RestartableServer) -> Shell:
    """A shell beside a running server."""
    return Shell(tmp_path / "work", live)
