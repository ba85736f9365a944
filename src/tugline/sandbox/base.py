"""The contract of a runtime: a place where one session's programs run and can be ended.

A runtime opens a `Sandbox`: a folder for the task, one for the agent's settings, and a way to run a
program in them. Whatever a box started is gone when the box is left, also when the waiting task is
cancelled or this process was killed and started again (`reap`). A program that fails is an `Exit`,
never an exception; exceptions (`RuntimeFault` and its kinds) say that the place itself is at
fault, which is what a retry elsewhere needs to know (I5). No program can leave its box, read
another's, or reach anything but what `reach` lets it (I6), as far as `weaknesses` does not say so.

`Sandbox.workdir` and `Sandbox.home` are paths as programs see them; whether they are also paths
of this machine is the runtime's business. Files go in and come out by `put`, `get` and `changes`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path, PurePath, PurePosixPath
from typing import Protocol, runtime_checkable

import msgspec

from tugline.errors import UsageError
from tugline.sandbox.patch import Caps, Change, Patch
from tugline.sandbox.pausable_timeout import PausableTimeout
from tugline.types import Cause, Workspace

WORKDIR = PurePosixPath("/workspace")
"""Where sandboxes put the task's files, unless its workspace says otherwise."""
HOME = PurePosixPath("/home/agent")
"""Where sandboxes put the agent's home."""
MOST = 8 << 20
"""Bytes that `Sandbox.get` returns at most."""

Content = str | bytes | Change | None
"""What a file becomes: text, bytes, a `Change` with its mode or link, or None to remove it."""


class Exit(msgspec.Struct, frozen=True):
    """How a program ended. `code` is minus the signal's number for one that was killed."""

    code: int
    timed_out: bool
    seconds: float
    cause: Cause | None = None
    """Set when a limit of the box ended it: memory or disk."""


class Mount(msgspec.Struct, frozen=True):
    """A folder of this machine that programs see at `target`, read-only.

    Without a `source` it is a new, empty, writable folder of the sandbox, read with
    `Sandbox.get`.
    """

    target: str
    source: str | None = None
    optional: bool = False
    """Mounted only where the place has nothing at `target`: a C library, say, for images without
    one. `source` may be a single file."""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a box is opened with. `files` are laid over the workspace."""

    workspace: Workspace = Workspace()
    files: Mapping[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    snapshot: Path | None = None
    """The workdir is as it was when this was taken of a box of the same workspace and files."""


class Sandbox(Protocol):
    """A place for one session."""

    @property
    def workdir(self) -> PurePath:
        """Where the task's files are and where programs start."""
        ...

    @property
    def home(self) -> PurePath:
        """The agent's home, outside `workdir` so that its settings are not part of its work."""
        ...

    @property
    def logs(self) -> Path:
        """Of this machine: ``<log_name>.log`` holds what a program wrote to stdout and stderr."""
        ...

    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """Put `files` (by relative POSIX path) under `root`, which is `workdir` or `home`.

        Nothing is followed out of `root`, whatever its programs have made of it. Raises
        `UsageError` for a path that leaves it.
        """
        ...

    async def get(self, path: PurePath, *, most: int = MOST) -> bytes | None:
        """A regular file's bytes; None if there is none, a link is in the way or it is larger.

        `path` is below `workdir`, `home` or a writable mount.
        """
        ...

    async def changes(self, caps: Caps | None = None) -> Patch:
        """What programs did to the workdir since the box was opened.

        None of them runs any more, and what `reach` opened is closed: programs that are run after
        this, by an evaluator that is in place, have no network.
        """
        ...

    async def reach(self, url: str) -> str:
        """The URL under which programs reach the one at `url`, an HTTP server of this machine.

        Nothing else of that host can be reached by it. Raises `NetworkFault`.
        """
        ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log_name: str = "agent",
    ) -> Exit:
        """Run a program to its end or to the end of its time; nothing of it is left behind.

        Its output is in the log as it comes. A `PausableTimeout` may be paused meanwhile.
        ``python3`` is a Python with pytest where the runtime has one of
        its own; `env` is added to a clean environment.
        """
        ...


@runtime_checkable
class Snapshots(Protocol):
    """A box that can be begun again from where it stands."""

    async def snapshot(self, to: Path) -> None:
        """Copy what was done to the workdir to `to`, a new folder, for `SandboxSpec.snapshot`.

        No program runs any more; home and mounts are not in it.
        """
        ...


class Runtime(Protocol):
    """Makes boxes. Making one of these looks at nothing but its options."""

    def open(
        self, directory: Path, place: SandboxSpec | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A box that keeps its files and logs under `directory`, which is made if missing.

        A runtime that cannot give what `place` asks for raises `UsageError`, naming it.
        """
        ...

    def reap(self, directory: Path) -> int:
        """End what a killed process left of boxes under `directory`; returns how many things."""
        ...

    def unavailable(self) -> str | None:
        """Why it cannot be used on this machine, with what to do; None if it can. May block."""
        ...

    def weaknesses(self) -> Sequence[str]:
        """What it does not keep apart on this machine, a line each. May block."""
        ...


async def prefetch(runtime: Runtime, workspaces: Iterable[Workspace]) -> list[str]:
    """Have images and bases before boxes ask for them; returns why, for each not to be had.

    Runtimes without a ``prefetch`` of their own keep nothing.
    """
    own: Callable[[Iterable[Workspace]], Awaitable[list[str]]] | None
    own = getattr(runtime, "prefetch", None)
    return [] if own is None else await own(workspaces)


def check_path(path: str) -> str:
    """`path` if it is relative, POSIX and stays inside its root. Raises `UsageError` if not."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
        msg = f"file path {path!r} must be relative, with '/' between parts and without '..'"
        raise UsageError(msg)
    return path
