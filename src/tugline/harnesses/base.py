"""The contract of a harness: an agent program that runs unmodified, with our gateway as its model.

A harness knows two things: how its program gets onto this machine (`install`), and what command,
environment and settings make the program work on one task through one base URL (`launch`). It
never sees tokens, rewards or the network; a new one is usually fifty lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from tugline.errors import ConfigError, HarnessError
from tugline.sandbox.base import Exit, Mount

T = TypeVar("T")

LONGEST_ARGUMENT = 131_000
"""Bytes. Linux starts no program with a longer argument (128 KiB, less an option's name)."""
_FAULTS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP}
)


class LaunchContext(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent finds in front of it."""

    instruction: str
    workdir: str
    home: str
    base_url: str
    """Such as ``http://127.0.0.1:40123/s/<session>``, without ``/v1``: see what the CLI wants."""
    key: str
    """The session's secret; opens this session's model calls and nothing else."""
    model: str


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    """Settings: path relative to the agent's home to text."""


class Harness(Protocol):
    """An agent program."""

    name: str
    version: str | None
    """None where the program is the user's own."""

    async def install(self) -> None:
        """Make the program available; quick when it is already. Raises `HarnessError`."""
        ...

    def launch(self, seat: LaunchContext) -> Launch:
        """The command for one session. Pure; `install` has been called before."""
        ...


def spent_status(harness: Harness) -> int:
    """The HTTP status on which a harness stops cleanly; its own ``spent_status``, else 400.

    Many programs try again after most statuses; 400 is what most of them give up on at once.
    """
    status: int = getattr(harness, "spent_status", 400)
    return status


def offers_tools(harness: Harness) -> bool:
    """Whether every call of a harness's task declares tools; its own ``offers_tools``, else no."""
    offers: bool = getattr(harness, "offers_tools", False)
    return offers


def mounts(harness: Harness) -> tuple[Mount, ...]:
    """Folders that its program is in; its own ``mounts``, asked for after `install`, else none."""
    found: tuple[Mount, ...] = getattr(harness, "mounts", ())
    return found


def keeps(harness: Harness) -> tuple[str, ...]:
    """Its own log: glob patterns below the agent's home; its own ``keeps``, else none."""
    found: tuple[str, ...] = getattr(harness, "keeps", ())
    return found


def crashed(harness: Harness, end: Exit, said: str) -> str | None:
    """Why its program broke, from how it ended and the end of what it wrote; None if it did not.

    Its own ``crashed(end, said)``, else: it was killed by a signal that is a fault of its own. A
    harness knows what its exit codes are worth; that no model call was made is judged elsewhere.
    """
    own: Callable[[Exit, str], str | None] | None = getattr(harness, "crashed", None)
    return own(end, said) if own is not None else killed_by(end)


def killed_by(end: Exit) -> str | None:
    """The signal that is a fault of the program itself and that it ended by; None if it did not."""
    fault = -end.code if end.code < 0 else end.code - 128
    if end.timed_out or fault not in _FAULTS:
        return None
    return f"ended by {signal.Signals(fault).name}"


def chosen(harness: str, option: str, value: str, known: Mapping[str, T]) -> T:
    """What stands for `value`. Raises `ConfigError` that lists what is known."""
    if value not in known:
        msg = f"harness {harness!r}: {option} is {value!r}, must be one of {', '.join(known)}"
        raise ConfigError(msg)
    return known[value]


def plain(instruction: str) -> str:
    """`instruction` for programs that take one with a ``/`` in front for a command of theirs."""
    return f" {instruction}" if instruction.startswith("/") else instruction


def is_long(instruction: str) -> bool:
    """Whether no program can be started with `instruction` as an argument."""
    return len(instruction.encode()) > LONGEST_ARGUMENT


def reading(file: str, *argv: str) -> tuple[str, ...]:
    """`argv` with `file` as its stdin, for programs that take the instruction there.

    An argument is limited to 128 KiB, and one that starts with a dash is taken for an option.
    """
    return ("sh", "-c", 'exec "$@" < "$0"', file, *argv)


@contextlib.asynccontextmanager
async def one_at_a_time(folder: Path) -> AsyncIterator[None]:
    """Hold the lock on `folder`, so that two processes do not install into it at once."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder.with_name(f"{folder.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        msg = f"cannot write to {folder.parent}: {error.strerror}; set TUGLINE_CACHE elsewhere"
        raise HarnessError(msg) from error
    try:
        while not _locked(descriptor):  # noqa: ASYNC110 - another process holds it
            await asyncio.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
