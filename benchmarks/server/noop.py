"""Plug-ins for sessions without work of their own: no program, no files, one short model call.

Tasks name them as ``noop:Agent``, ``noop:Memory`` and ``noop:Verdicts``. Server (which validates
tasks) and node can import them because this folder is on their PYTHONPATH.
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path, PurePath

import aiohttp

from tugline.errors import SandboxError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.harnesses.base import Harness, Launch, LaunchContext
from tugline.patch import Patch
from tugline.sandbox.base import MAX_READ_BYTES, Content, Exit, Runtime, Sandbox, SandboxSpec
from tugline.sandbox.patch import PatchLimits
from tugline.types import Reward


class Agent(Harness):
    """A harness with a single model call, which the sandbox makes itself."""

    name = "noop"
    version = "1"

    def launch(self, context: LaunchContext) -> Launch:
        """Return the URL, key and name of the model as the command line."""
        return Launch(argv=(f"{context.base_url}/v1/chat/completions", context.key, context.model))


class Verdicts(Evaluator):
    """An evaluator that rewards every session."""

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Return the reward 1."""
        return Verdict(Reward(1.0), {})


class Memory(Runtime):
    """Sandboxes without processes: to run a command, this process sends a request."""

    def __init__(self) -> None:
        self._client: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[MemorySandbox]:
        """Make three empty folders, from which a session's outcome is read."""
        if self._client is None:
            self._client = aiohttp.ClientSession()  # open for the lifetime of the process
        sandbox = MemorySandbox(directory, self._client)
        for folder in (sandbox.workdir, sandbox.home, sandbox.logs):
            folder.mkdir(parents=True)
        (sandbox.logs / "agent.log").touch()
        yield sandbox

    def reap(self, directory: Path) -> int:
        """Return 0: nothing can be left behind."""
        return 0

    def check_available(self) -> str | None:
        """Return None: it is always available."""
        return None

    def list_weaknesses(self) -> Sequence[str]:
        """Return nothing: no program runs in it."""
        return ()


class MemorySandbox(Sandbox):
    """See `tugline.sandbox.base.Sandbox`."""

    def __init__(self, directory: Path, client: aiohttp.ClientSession) -> None:
        self.workdir, self.home = directory / "work", directory / "home"
        self.logs, self._client = directory / "logs", client

    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """Ignore the files."""

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Return None: there are no files."""
        return None

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Return an empty patch."""
        return Patch()

    async def expose(self, url: str) -> str:
        """Return the URL unchanged."""
        return url

    async def run_program(
        self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, log: Path
    ) -> Exit:
        """Make the model call."""
        url, key, model = argv
        body = {"model": model, "messages": [{"role": "user", "content": "Anything?"}]}
        headers = {"authorization": f"Bearer {key}"}
        async with self._client.post(url, json=body, headers=headers) as answer:
            if answer.status != 200:
                msg = f"the model call was answered with {answer.status}: {await answer.text()}"
                raise SandboxError(msg)
            await answer.read()
        return Exit(0, timed_out=False, seconds=0.0)
