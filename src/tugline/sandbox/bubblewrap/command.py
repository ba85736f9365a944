"""Start and kill one instance of bubblewrap, whose process 1 is known by its number here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil

from tugline.errors import SandboxError
from tugline.sandbox.exec.processes import ChildProcess, wait_readable
from tugline.sandbox.exec.runner import ARGV, Runner

_KILL_S = 60.0
_INFO_S = 10.0
_PID = re.compile(rb'"child-pid": (\d+)')


class BubblewrapCommand:
    """One instance of bwrap, which runs until it is killed."""

    def __init__(self) -> None:
        self.pid = 0
        """Process number of its process 1 on this machine."""
        self._child: ChildProcess | None = None
        self._info = self._pidfd = -1

    async def start(
        self, runner: Runner, prefix: Sequence[str], arguments: Sequence[str], seccomp: bytes
    ) -> None:
        """Start it by the command `prefix` and wait for its shell. Raises `SandboxError`."""
        self._info, write_info = os.pipe()
        rules = os.memfd_create("seccomp")
        try:
            os.write(rules, seccomp)
            os.lseek(rules, 0, os.SEEK_SET)
            filter_ = ("--seccomp", str(rules)) if seccomp else ()
            command = (*prefix, "bwrap", "--info-fd", str(write_info), *filter_, *arguments, *ARGV)
            self._child = ChildProcess(command, descriptors=(write_info, rules))
        except OSError as error:
            msg = f"bubblewrap cannot be started: {error.strerror}"
            raise SandboxError(msg) from error
        finally:
            os.close(write_info)
            os.close(rules)
        try:
            await runner.wait_ready(self._child.ended)
            await self._find_process()
        except SandboxError as error:
            msg = f"bubblewrap made no sandbox: {self._child.read_output() or error}"
            raise SandboxError(msg) from error

    async def kill(self) -> None:
        """Kill all of it; when this returns the kernel has removed the last process.

        Raises `SandboxError` if it does not: a process hangs in the kernel.
        """
        if self._child is None:
            return
        with contextlib.suppress(TimeoutError, ProcessLookupError):
            await self._find_process()
            if self._pidfd >= 0:
                # bwrap waits for this process, and then ends by itself.
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                await asyncio.wait([self._child.ended], timeout=_INFO_S)
        self._child.kill()
        _, hanging = await asyncio.wait([self._child.ended], timeout=_KILL_S)
        if hanging:
            msg = f"the sandbox of process {self._child.pid} cannot be ended"
            raise SandboxError(msg)
        self._close()

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
        for descriptor in (self._info, self._pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self._child, self._info, self._pidfd = None, -1, -1

    async def _find_process(self) -> None:
        """Get a handle of process 1, which bwrap reports as soon as there is one.

        Also of one that is killed while it is being started: without bwrap it would wait for ever,
        because it only dies with bwrap from some point on. Raises `TimeoutError`.
        """
        if self._pidfd >= 0 or self._child is None or self._child.ended.done():
            return
        await asyncio.wait_for(wait_readable(self._info), _INFO_S)
        if found := _PID.search(os.read(self._info, 4096)):
            self.pid = int(found[1])
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(self.pid)


def kill_strays(directory: Path) -> int:
    """Kill what a killed process was about to make a sandbox of under `directory`; return how many.

    bwrap dies with its parent, but there is a moment in which its child does not die with it.
    """
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            folders = [Path(word) for word in words if word.endswith("/control")]
            if "--info-fd" in words and any(one.is_relative_to(directory) for one in folders):
                process.kill()
                count += 1
    return count
