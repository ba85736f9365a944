"""The contract of a runtime, which opens sandboxes: isolated environments for one session each.

A `Sandbox` has a folder for the task, a home for the agent, and a way to run programs in them.
Whatever it started is gone when it is closed, also when the waiting task is cancelled or this
process was killed and started again (`Runtime.reap`). A program that fails is an `Exit`, never an
exception; exceptions (`SandboxError` and its kinds) mean that the sandbox itself is at fault, which
is what a retry elsewhere needs to know (I5). No program can leave its sandbox, read another's, or
reach anything but what `Sandbox.expose` allows (I6), except as `Runtime.list_weaknesses` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import msgspec

from tugline.errors import ConfigError, UsageError
from tugline.sandbox.patch import FileChange, Patch, PatchLimits
from tugline.types import Cause, Workspace

WORKDIR = PurePosixPath("/workspace")
"""Where sandboxes put the task's files, unless its workspace says otherwise."""
HOME = PurePosixPath("/home/agent")
"""Where sandboxes put the agent's home."""
MAX_READ_BYTES = 8 << 20
"""Largest file that `Sandbox.get` returns, unless its caller asks for more."""

Content = str | bytes | FileChange | None
"""New content of a file: text, bytes, a `FileChange` with mode or link, or None to remove it."""


class Exit(msgspec.Struct, frozen=True):
    """How a program ended."""

    code: int
    """Exit status; minus the signal's number for a program that was killed."""
    timed_out: bool
    seconds: float
    cause: Cause | None = None
    """Set when a limit of the sandbox ended it: memory or disk."""
    starved: bool = False
    """Whether it timed out because other programs of the node had the processors."""


class Mount(msgspec.Struct, frozen=True):
    """A folder or file of this machine that programs see read-only at `target`.

    Without a `source` it is a new, empty, writable folder, read with `Sandbox.get`.
    """

    target: str
    source: str | None = None
    optional: bool = False
    """Mounted only where the sandbox has nothing at `target`: a C library, for images without."""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox is opened with. `files` are written over the workspace."""

    workspace: Workspace = Workspace()
    files: Mapping[str, str] = {}
    mounts: tuple[Mount, ...] = ()


class Sandbox(ABC):
    """An isolated environment for one session.

    `workdir` and `home` are paths as programs see them; whether they also exist on this machine is
    the runtime's business. Files go in by `put` and come out by `get` and `diff`.
    """

    workdir: PurePath
    """Where the task's files are and where programs start."""
    home: PurePath
    """The agent's home, outside `workdir` so that its settings are not part of its work."""
    logs: Path
    """A folder of this machine: ``<log_name>.log`` holds a program's stdout and stderr."""

    @abstractmethod
    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """Write `files` (by relative POSIX path) under `root`, which is `workdir` or `home`.

        No link is followed out of `root`. Raises `UsageError` for a path that leaves it.
        """

    @abstractmethod
    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Return a regular file's bytes; None if there is none, it is a link or too large.

        `path` is below `workdir`, `home` or a writable mount.
        """

    @abstractmethod
    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """End all programs and return what they changed in the workdir since it was opened.

        Exposed URLs are closed as well: programs that an evaluator runs later have no network.
        """

    @abstractmethod
    async def expose(self, url: str) -> str:
        """Let programs reach the HTTP server at `url` and return the URL that they use for it.

        Nothing else of its host becomes reachable. Raises `SandboxNetworkError`.
        """

    @abstractmethod
    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log_name: str = "agent",
    ) -> Exit:
        """Run a program until it ends or times out, and leave no process of it behind.

        Its output is appended to the log as it comes. `env` is added to a clean environment, whose
        HOME is `home`.
        ``python3`` is a Python with pytest where the runtime provides one.
        """

    def read_folder_state(self) -> object:
        """A value that changes when its folders do; None where only its programs can. Blocks."""
        return None


class Runtime(ABC):
    """Opens sandboxes. Creating a runtime only checks its options."""

    @abstractmethod
    def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Open a sandbox that keeps its files and logs under `directory`, created if missing.

        Raises `UsageError` for a part of `spec` that this runtime cannot provide.
        """

    def reap(self, directory: Path) -> int:
        """End what a killed process left under `directory`; return the number of things ended."""
        return 0

    def check_available(self) -> str | None:
        """Return why it cannot be used on this machine and what to do; None if it can. Blocks."""
        return None

    def list_weaknesses(self) -> Sequence[str]:
        """Return what it does not isolate on this machine, one line each. May block."""
        return ()

    async def prefetch(self, workspaces: Iterable[Workspace]) -> list[str]:
        """Fetch images and repositories ahead of use; return the errors of those that failed."""
        return []


def check_path(path: str) -> str:
    """Return `path` if it is relative, POSIX and stays in its root. Raises `UsageError` if not."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
        msg = f"file path {path!r} must be relative, with '/' between parts and without '..'"
        raise UsageError(msg)
    return path


def refuse_fields(runtime: str, workspace: Workspace, **elsewhere: str) -> None:
    """Raise `UsageError` for one of these fields; each has the runtime that takes it."""
    for name, other in elsewhere.items():
        if (value := getattr(workspace, name)) is not None:
            msg = f"runtime {runtime!r} cannot give workspace.{name} ({value!r}); take {other!r}"
            raise UsageError(msg)


class PausableTimeout:
    """`limit_s` seconds that pass only while the timeout is not paused."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._elapsed = 0.0
        self._running_since: float | None = None
        """When it last began to run; None before its first use and while it is paused."""
        self._paused = False
        self._timeouts: set[asyncio.Timeout] = set()

    @property
    def elapsed(self) -> float:
        """Seconds that have been charged."""
        since = self._running_since
        return self._elapsed + (time.monotonic() - since if since is not None else 0.0)

    def pause(self) -> None:
        """Stop charging time; pausing twice changes nothing."""
        self._elapsed = self.elapsed
        self._running_since = None
        self._paused = True
        self._reschedule(None)

    def resume(self) -> None:
        """Charge time again."""
        self._paused = False
        if self._timeouts:
            self._start()

    def credit(self, seconds: float) -> None:
        """Give back time that was charged."""
        self._elapsed -= seconds
        if self._running_since is not None:
            self._start()

    @contextlib.asynccontextmanager
    async def enforce(self) -> AsyncIterator[None]:
        """Raise `TimeoutError` in the block once the time is over. Runs from its first use on."""
        async with asyncio.timeout(None) as timeout:
            self._timeouts.add(timeout)
            try:
                if not self._paused:
                    self._start()
                yield
            finally:
                self._timeouts.discard(timeout)

    def _start(self) -> None:
        if self._running_since is None:
            self._running_since = time.monotonic()
        self._reschedule(asyncio.get_running_loop().time() + self.limit_s - self.elapsed)

    def _reschedule(self, when: float | None) -> None:
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(when)


def enforce_timeout(
    timeout: float | PausableTimeout,
) -> contextlib.AbstractAsyncContextManager[object]:
    """Raise `TimeoutError` in the block after so many seconds, or when the timeout expires."""
    return timeout.enforce() if isinstance(timeout, PausableTimeout) else asyncio.timeout(timeout)


@contextlib.asynccontextmanager
async def run_beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` while the block lasts, then cancel it and wait for its end."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def check_variables(env: Mapping[str, str], passed: Collection[str], option: str) -> None:
    """Raise `ConfigError` for a variable without default that `passed` does not have."""
    for name, value in env.items():
        for match in _VARIABLE.finditer(value):
            if match[1] not in passed and match[2] is None:
                must = f"list {match[1]!r} in pass_env to fill it in from the node"
                raise ConfigError(f"{option}.{name} is {value!r}: {must}")


def expand_variables(env: Mapping[str, str], passed: Collection[str]) -> dict[str, str]:
    """Return `env` with values of the variables that `passed` has, else their defaults."""

    def expand(match: re.Match[str]) -> str:
        value = os.environ.get(match[1]) if match[1] in passed else None
        return value or match[2] or ""

    return {name: _VARIABLE.sub(expand, value) for name, value in env.items()}
