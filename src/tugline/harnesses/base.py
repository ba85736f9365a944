"""Interface of harnesses: agent programs that run unmodified, with Tugline's gateway as model API.

A harness installs its program on this machine and gives the command, environment and settings to
run it on one task with one base URL. It sees neither tokens nor rewards.
"""

import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from tugline.errors import HarnessError
from tugline.sandbox.base import Exit, Mount, Sandbox

MAX_ARGUMENT = 131_000
"""Maximum bytes of an argument: Linux allows 128 KiB; the rest is for an option's name."""
COMPACTION_PHRASES = (
    "CRITICAL: Respond with TEXT ONLY",
    "produce the <state_snapshot>",
    "generate the updated <state_snapshot>",
    "evaluate the <state_snapshot>",
    "history is being compacted",
    "provide a concise summary of our conversation so far",
)
"""Phrases in the compaction prompts of Claude Code, Qwen Code, Gemini CLI, Copilot and Continue."""
SIDE_PHRASES = ("Git commit messages", "summarize this partial conversation")
"""Phrases in the side calls of aider, which never declares tools."""
_SETUP_S = 300.0
_SETUP_TAIL = 400
_FATAL_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP}
)


class LaunchContext(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs for launching a harness."""

    instruction: str
    workdir: str
    home: str
    base_url: str
    """Base URL such as ``http://127.0.0.1:40123/s/<session>``, without ``/v1``."""
    key: str
    """API key that is valid only for this session's model calls."""
    model: str


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A command with its environment and settings."""

    argv: tuple[str, ...]
    setup: tuple[str, ...] = ()
    """Command that must succeed before `argv` is run, such as a login; none if empty."""
    env: dict[str, str] = {}
    """Environment variables of both commands."""
    files: dict[str, str] = {}
    """Texts of files by path relative to the agent's home."""


class Harness(ABC):
    """An agent program."""

    name: str
    version: str | None = None
    """Version of the program; None for a program of the user."""
    spent_status: int = 400
    """HTTP status of refused calls once a session's budget is spent; must make the program stop.

    Many programs retry after most statuses, but stop at once after 400.
    """
    offers_tools: bool = False
    """Whether all calls of the task's conversation declare tools; others are side requests then."""
    compaction_phrases: Sequence[str] = COMPACTION_PHRASES
    """Phrases in the program's prompts that ask for a summary of the conversation."""
    side_phrases: Sequence[str] = SIDE_PHRASES
    """Phrases in the prompts of its side requests."""
    log_globs: Sequence[str] = ()
    """Glob patterns of the program's log files, relative to the agent's home."""
    mounts: tuple[Mount, ...] = ()
    """Mounts of the program; complete after `install`."""

    async def install(self) -> None:  # noqa: B027 - by default there is nothing to install
        """Install the program unless it is installed. Raises `HarnessError`."""

    @abstractmethod
    def launch(self, context: LaunchContext) -> Launch:
        """Return the command for one session. Pure; call `install` before."""

    def find_crash(self, end: Exit, output: str) -> str | None:
        """Return why the program crashed, by its exit and last output; None if it did not.

        By default only a fatal signal is a crash. A program without any model call is a harness
        failure in any case.
        """
        return find_fatal_signal(end)


async def prepare(sandbox: Sandbox, launch: Launch) -> None:
    """Write the files of `launch` and run its setup. Raises `HarnessError` if that fails."""
    await sandbox.put(sandbox.home, launch.files)
    if not launch.setup:
        return
    end = await sandbox.run(launch.setup, env=launch.env, timeout_s=_SETUP_S, log_name="setup")
    if end.timed_out or end.code:
        ending = "ran out of time" if end.timed_out else f"ended with exit code {end.code}"
        text = " ".join(end.output[-_SETUP_TAIL:].split())
        raise HarnessError(f"the setup {shlex.join(launch.setup)!r} {ending}: {text}")


def find_fatal_signal(end: Exit) -> str | None:
    """Return the name of the fatal signal that ended a program; None for any other exit."""
    number = -end.code if end.code < 0 else end.code - 128
    if end.timed_out or number not in _FATAL_SIGNALS:
        return None
    return f"ended by {signal.Signals(number).name}"
