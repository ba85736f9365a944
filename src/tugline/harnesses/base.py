"""The contract of a harness: an agent program that runs unmodified, with our gateway as its model.

A harness knows how its program is installed on this machine and which command, environment and
settings make it work on one task through one base URL. It sees neither tokens nor rewards.
"""

import signal
from abc import ABC, abstractmethod

import msgspec

from tugline.sandbox.base import Exit, Mount

MAX_ARGUMENT = 131_000
"""Bytes. Linux starts no program with a longer argument (128 KiB, less an option's name)."""
_FATAL_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP}
)


class LaunchContext(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs for launching a harness."""

    instruction: str
    workdir: str
    home: str
    base_url: str
    """Such as ``http://127.0.0.1:40123/s/<session>``, without ``/v1``."""
    key: str
    """The session's secret; it opens this session's model calls and nothing else."""
    model: str


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A command with its environment and settings."""

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    """Path relative to the agent's home to text."""


class Harness(ABC):
    """An agent program."""

    name: str
    version: str | None = None
    """None where the program is the user's own."""
    spent_status: int = 400
    """HTTP status of a refusal once a session's budget is spent: one that makes the program stop.

    Many programs retry after most statuses; 400 is what most of them give up on at once.
    """
    offers_tools: bool = False
    """Whether every call of its task declares tools; a call without any is a side request then."""
    log_globs: tuple[str, ...] = ()
    """Its own log files: glob patterns relative to the agent's home."""
    mounts: tuple[Mount, ...] = ()
    """Folders of its program; complete after `install`."""

    async def install(self) -> None:  # noqa: B027 - by default there is nothing to install
        """Make the program available; quick if it already is. Raises `HarnessError`."""

    @abstractmethod
    def launch(self, context: LaunchContext) -> Launch:
        """The command for one session. Pure; `install` has been called before."""

    def find_crash(self, end: Exit, output: str) -> str | None:
        """Why its program crashed, from its exit and the end of its output; None if it did not.

        By default only a fatal signal is a crash. A program without any model call is a harness
        failure in any case.
        """
        return find_fatal_signal(end)


def find_fatal_signal(end: Exit) -> str | None:
    """The signal of a program error that ended the program; None for any other exit."""
    number = -end.code if end.code < 0 else end.code - 128
    if end.timed_out or number not in _FATAL_SIGNALS:
        return None
    return f"ended by {signal.Signals(number).name}"
