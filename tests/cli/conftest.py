"""The commands as people start them, beside a server that is up."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import structlog

from commands import TUGLINE, run_command
from house import House
from served import TOKENS
from tugline import log
from tugline.cli.app import main
from tugline.client.nodes import NodeClient
from tugline.protocol import LeaseRequest, NodeRegistration, Work
from tugline.types import Task


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Shell:
    """A folder to work in, in which ``tugline up`` seems to have been started."""

    def __init__(self, folder: Path, house: House) -> None:
        self.folder, self.house = folder, house
        data = folder / "tugline-data"
        data.mkdir(parents=True)
        (data / "server.json").write_bytes(msgspec.json.encode({"url": house.url}))
        (data / "tokens.json").write_bytes(msgspec.json.encode(TOKENS))

    @contextlib.asynccontextmanager
    async def lease(
        self, *tasks: Task, slots: int = 1
    ) -> AsyncIterator[tuple[NodeClient, tuple[Work, ...]]]:
        """Submit tasks, and play a node that holds what is queued."""
        await self.house.control.submit(tasks)
        async with NodeClient(self.house.url, TOKENS.join) as node:
            welcome = await node.register(NodeRegistration(name="n", slots=slots, capacity=slots))
            applied = welcome.control.generation
            ask = LeaseRequest(capacity=slots, applied=applied, wait_s=20.0)
            yield node, (await node.lease(welcome.node, ask)).work

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        """A command that goes on."""
        return await asyncio.create_subprocess_exec(
            TUGLINE,
            *arguments,
            cwd=self.folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str) -> Done:
        """A command, to its end."""
        done = await asyncio.to_thread(run_command, *arguments, cwd=self.folder, timeout=40)
        return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run a command in `tmp_path`, in this process: another one would import torch again."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["tugline", *words])
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
        return Done(int(code or 0), printed.out, printed.err)

    return run


async def end(process: asyncio.subprocess.Process) -> Done:
    """Wait for a command to end."""
    out, err = await asyncio.wait_for(process.communicate(), 40)
    return Done(process.returncode or 0, out.decode(), err.decode())


@pytest.fixture
def shell(tmp_path: Path, house: House) -> Shell:
    """Where commands are typed."""
    return Shell(tmp_path / "work", house)
