"""Interfaces of runtimes and of sandboxes, which isolate one session each.

A `Sandbox` has a folder for the task and a home for the agent, and runs programs in them. All its
processes are gone once it is closed, also if the waiting task is cancelled; if this process was
killed, `Runtime.reap` ends what is left. A program that fails is an `Exit`, never an exception.
Exceptions (`SandboxError` and its subclasses) mean that the sandbox itself failed, so that a
session can be retried on another node (I5). No program can leave its sandbox, read another one, or
reach anything but what `Sandbox.expose` allows (I6), except as `Runtime.list_weaknesses` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path, PurePath, PurePosixPath

import msgspec

from tugline.aio import PausableTimeout
from tugline.errors import ConfigError, UsageError
from tugline.patch import FileChange, Patch
from tugline.sandbox.patch import PatchLimits
from tugline.types import Cause, Workspace

WORKDIR = PurePosixPath("/workspace")
"""Default path of the task's files in a sandbox; see `Workspace.path`."""
HOME = PurePosixPath("/home/agent")
"""Path of the agent's home in a sandbox."""
STRETCH = 4
"""Longest time of a program on overloaded processors, as a multiple of its `ProgramTimeout`."""
MAX_READ_BYTES = 8 << 20
"""Default size limit of `Sandbox.get`."""

Content = str | bytes | FileChange | None
"""New content of a file: text, bytes, a `FileChange` with mode or link, or None to remove it."""


class Exit(msgspec.Struct, frozen=True):
    """Exit status of a program, with the reason why it was ended."""

    code: int
    """Exit code; the negative signal number for a program that was killed."""
    timed_out: bool
    seconds: float
    cause: Cause | None = None
    """Set if the sandbox's memory or disk limit was exceeded."""
    output: str = ""
    """The last `OUTPUT_BYTES` of its stdout and stderr; set by `Sandbox.run`."""


class Mount(msgspec.Struct, frozen=True):
    """A folder or file of this machine, mounted read-only at `target`.

    Without a `source`, a new, empty, writable folder, which `Sandbox.get` reads.
    """

    target: str
    source: str | None = None
    optional: bool = False
    """Whether to skip the mount if `target` exists, such as an image's own C library."""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Workspace, files and mounts of a new sandbox; `files` are written over the workspace."""

    workspace: Workspace = Workspace()
    files: Mapping[str, str] = {}
    mounts: tuple[Mount, ...] = ()


OUTPUT_BYTES = 16 << 10
"""Size of `Exit.output`; the rest of a program's output is in its log."""


class Sandbox(ABC):
    """An isolated environment for one session.

    `workdir` and `home` are paths inside the sandbox and need not exist on this machine: use
    `put`, `get` and `diff` to write and read files.
    """

    workdir: PurePath
    """Folder of the task's files, in which programs start."""
    home: PurePath
    """The agent's home, outside `workdir` so that its settings are not part of its work."""
    logs: Path
    """Folder of this machine in which ``<log_name>.log`` holds a program's stdout and stderr."""

    @abstractmethod
    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """Write `files` (by relative POSIX path) under `root`, which is `workdir` or `home`.

        No link is followed out of `root`. Raises `UsageError` for a path that leaves it.
        """

    @abstractmethod
    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Return a regular file's bytes; None if it is missing, a link or too large.

        `path` is below `workdir`, `home` or a writable mount.
        """

    @abstractmethod
    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """End all programs and return their changes to the workdir since the sandbox was opened.

        Also closes exposed URLs: programs that an evaluator runs later have no network.
        """

    @abstractmethod
    async def expose(self, url: str) -> str:
        """Make the HTTP server at `url` reachable and return its URL inside the sandbox.

        Nothing else on the server's host becomes reachable. Raises `SandboxNetworkError`.
        """

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log_name: str = "agent",
    ) -> Exit:
        """Run a program until it ends or times out; return its exit with the end of its output.

        The whole output is appended to the log ``<log_name>.log`` as it arrives. `env` is added to
        a clean environment, whose HOME is `home`. ``python3`` has pytest, if the runtime provides a
        Python.
        """
        log = self.logs / f"{log_name}.log"
        start = await asyncio.to_thread(_read_size, log)
        end = await self.run_program(argv, env=env, timeout_s=timeout_s, log=log)
        output = await asyncio.to_thread(_read_end, log, start)
        return msgspec.structs.replace(end, output=output)

    @abstractmethod
    async def run_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log: Path,
    ) -> Exit:
        """Run a program for `run`: append its output to `log`, leave no process behind."""

    async def read_states(self, paths: Iterable[str]) -> dict[str, object]:
        """Return a value for each path of the workdir, which changes when its content does.

        Sandboxes whose files are on this machine also notice content that was changed back.
        """
        return {path: await self.get(self.workdir / path) for path in paths}

    def read_folder_state(self) -> object:
        """Return a value that changes when the sandbox's folders change. Blocks.

        None if nothing but the sandbox's own programs can change them.
        """
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

    def check_spec(self, spec: SandboxSpec) -> None:
        """Raise `UsageError` for a part of `spec` that no machine can provide."""
        return

    def reap(self, directory: Path) -> int:
        """Clean up what a killed process left under `directory`; return the number of items."""
        return 0

    def check_available(self) -> str | None:
        """Return why this machine cannot use it, with a remedy; None if it can. Blocks."""
        return None

    def list_weaknesses(self) -> Sequence[str]:
        """Return the gaps of its isolation on this machine, one line each. May block."""
        return ()

    async def prefetch(self, workspaces: Iterable[Workspace]) -> list[str]:
        """Fetch images and repositories ahead of use; return the errors of those that failed."""
        return []


def check_path(path: str) -> str:
    """Return `path` if it is a relative POSIX path without ``..``; else raise `UsageError`."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        msg = f"file path {path!r} must be relative, with '/' between parts and without '..'"
        raise UsageError(msg)
    return path


def refuse_fields(runtime: str, workspace: Workspace, **alternatives: str) -> None:
    """Raise `UsageError` if a field is set; each is given with a runtime that supports it."""
    for name, other in alternatives.items():
        if (value := getattr(workspace, name)) is not None:
            msg = (
                f"runtime {runtime!r} does not support workspace.{name} ({value!r}); use "
                f"runtime {other!r}"
            )
            raise UsageError(msg)


class ProgramTimeout(PausableTimeout):
    """`limit_s` seconds in which no program waits for a processor, at most `STRETCH` times as long.

    So the verdict on a program does not depend on the node's other programs, and an endless loop
    ends in any case. Runtimes that count such waits call `credit`; a wait counts for all timeouts
    of an evaluation, which are created `within` that of the whole.
    """

    def __init__(self, limit_s: float, within: ProgramTimeout | None = None) -> None:
        super().__init__(limit_s)
        self.waited_s = 0.0
        """Seconds that were not charged."""
        self.running: set[ProgramTimeout] = set() if within is None else within.running
        """All timeouts of the evaluation that are enforced now."""

    def credit(self, seconds: float) -> None:
        """Subtract `seconds` from the time charged to all timeouts of the evaluation."""
        for timeout in self.running:
            timeout.waited_s += seconds
            super(ProgramTimeout, timeout).credit(seconds)

    @contextlib.asynccontextmanager
    async def enforce(self) -> AsyncIterator[None]:
        """Raise `TimeoutError` in the block once the time is up."""
        self.running.add(self)
        try:
            async with asyncio.timeout(STRETCH * self.limit_s), super().enforce():
                yield
        finally:
            self.running.discard(self)


def _read_size(log: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return log.stat().st_size
    return 0


def _read_end(log: Path, start: int) -> str:
    """Return the last `OUTPUT_BYTES` of what was appended to a log since its size was `start`."""
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - OUTPUT_BYTES))
        return file.read().decode(errors="replace")
    return ""


_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def check_variables(env: Mapping[str, str], passed: Collection[str], option: str) -> None:
    """Raise `ConfigError` for a variable that has no default and is not in `passed`."""
    for name, value in env.items():
        for match in _VARIABLE.finditer(value):
            if match[1] not in passed and match[2] is None:
                must = f"to use the node's {match[1]!r}, list it in pass_env"
                raise ConfigError(f"{option}.{name} is {value!r}: {must}")


def expand_variables(env: Mapping[str, str], passed: Collection[str]) -> dict[str, str]:
    """Expand variables in `env`: from this process's environment if in `passed`, or by default."""

    def expand(match: re.Match[str]) -> str:
        value = os.environ.get(match[1]) if match[1] in passed else None
        return value or match[2] or ""

    return {name: _VARIABLE.sub(expand, value) for name, value in env.items()}
