"""The contract of a runtime: a place where one session's programs run and can be ended.

A runtime opens a `Box`: two folders and a way to run a program in them. Whatever a box started is
gone when the box is left, also when the waiting task is cancelled or this process was killed and
started again (`reap`). A program that fails is an `Exit`, never an exception; exceptions
(`RuntimeFault`) say that the place itself is at fault, which is what a retry elsewhere needs to
know (I5).

`Box.workdir` and `Box.home` are paths on this machine and also the paths that the program sees;
a container keeps that true by mounting them where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec

from tugline.errors import RuntimeFault, UsageError
from tugline.runtimes.clock import Clock


class Exit(msgspec.Struct, frozen=True):
    """How a program ended. `code` is minus the signal's number for one that was killed."""

    code: int
    timed_out: bool
    seconds: float


class Box(Protocol):
    """A place for one session."""

    workdir: Path
    """Where the task's files are and where programs start."""
    home: Path
    """The agent's home folder, outside `workdir` so that its settings are not part of its work."""
    logs: Path
    """``<log_name>.log`` holds what a program wrote to stdout and stderr."""

    async def write(self, root: Path, files: Mapping[str, str]) -> None:
        """Put `files` (relative POSIX path to text) under `root`, `workdir` or `home`."""
        ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | Clock,
        log_name: str = "agent",
    ) -> Exit:
        """Run a program to its end or to the end of its time; nothing of it is left behind.

        A `Clock` is a time that may be held meanwhile: see `runtimes.clock.limit`.
        ``python3`` is a Python with pytest; `env` is added to a clean environment.
        """
        ...


class Runtime(Protocol):
    """Makes boxes."""

    def open(
        self, directory: Path, files: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[Box]:
        """A box under `directory` (made if missing) whose workdir holds `files`."""
        ...

    def reap(self, directory: Path) -> int:
        """End what a killed process left running in boxes under `directory`; returns how many."""
        ...


def check_path(path: str) -> str:
    """`path` if it is relative, POSIX and stays inside its root. Raises `UsageError` if not."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
        msg = f"file path {path!r} must be relative, with '/' between parts and without '..'"
        raise UsageError(msg)
    return path


def write_files(root: Path, files: Mapping[str, str]) -> None:
    """Write texts under `root`, byte for byte as given. All paths are checked before any is made.

    Raises `UsageError` for a path that leaves `root`, `RuntimeFault` when the disk refuses.
    """
    for path in files:
        check_path(path)
    for path, text in files.items():
        target = root / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode())
        except OSError as error:
            msg = f"cannot write {target}: {error.strerror}"
            raise RuntimeFault(msg) from error
        except UnicodeEncodeError as error:
            msg = f"file {path!r} is not text that UTF-8 can hold: {error.reason}"
            raise UsageError(msg) from error
