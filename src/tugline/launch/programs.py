"""Commands of ``tugline`` that this process starts, watches and ends."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence

from tugline.aio import finish, run_until_one_ends
from tugline.errors import UsageError
from tugline.launch.settings import Echo

DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""Prefix of the command of a program that is killed when this process ends."""
AGAIN_S = 5.0
"""Pause before a program that ended is started again, in seconds."""
_END_S = 20.0
"""Time in which a program that must end at once does so, in seconds, before it is killed."""
_USAGE = 2
"""Exit status of a program that refuses its settings."""


async def keep_program(
    name: str, arguments: Sequence[str], env: Mapping[str, str], stopped: asyncio.Event, echo: Echo
) -> None:
    """Keep a command of ``tugline`` running until `stopped`, then let it drain.

    It is started again when it ends. When cancelled, it ends at once. Raises `UsageError` if it
    refuses its settings.
    """
    prefix = DIES_WITH_PARENT if shutil.which(DIES_WITH_PARENT[0]) else ()
    command = (*prefix, sys.executable, "-m", "tugline.cli.app", *arguments)
    while not stopped.is_set():
        program = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **env}, start_new_session=True
        )
        try:
            await run_until_one_ends(program.wait(), stopped.wait())
            if stopped.is_set():
                _send(program, signal.SIGTERM)
                await program.wait()
                return
        except asyncio.CancelledError:
            await finish(_end(program))
            raise
        if program.returncode == _USAGE:
            raise UsageError(f"{name} cannot be started; the reason is in its output above")
        echo(f"{name} ended with code {program.returncode}; restarting it")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), AGAIN_S)


async def _end(program: asyncio.subprocess.Process) -> None:
    """End a program at once: the second signal is for one that would drain after the first."""
    _send(program, signal.SIGTERM)
    _send(program, signal.SIGINT)
    try:
        await asyncio.wait_for(program.wait(), _END_S)
    except TimeoutError:
        _send(program, signal.SIGKILL)
        await program.wait()


def _send(program: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        program.send_signal(number)
