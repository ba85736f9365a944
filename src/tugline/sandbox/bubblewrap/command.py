"""One start of bubblewrap: process 1 in its namespaces, known by its number on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from tugline.errors import SandboxError
from tugline.sandbox.exec.output import readable
from tugline.sandbox.exec.processes import Child
from tugline.sandbox.exec.runner import ARGV, Runner

_KILL_S = 60.0
_LEARN_S = 10.0
_PID = re.compile(rb'"child-pid": (\d+)')


class BubblewrapCommand:
    """One start of bwrap: it runs until it is killed."""

    def __init__(self, control: Path, most: int) -> None:
        self.runner = Runner(control, self.kill, most=most)
        self.pid = 0
        """Of its process 1, as this machine counts."""
        self._child: Child | None = None
        self._told = self._handle = -1

    async def start(self, argv: Sequence[str], arguments: Sequence[str], filter_: bytes) -> None:
        """Start it and wait for its shell. Raises `SandboxError`."""
        self._told, tell = os.pipe()
        rules = os.memfd_create("filter")
        try:
            os.write(rules, filter_)
            os.lseek(rules, 0, os.SEEK_SET)
            refuse = ("--seccomp", str(rules)) if filter_ else ()
            command = (*argv, "bwrap", "--info-fd", str(tell), *refuse, *arguments, *ARGV)
            self._child = Child(command, descriptors=(tell, rules))
        except OSError as error:
            msg = f"bubblewrap cannot be started: {error.strerror}"
            raise SandboxError(msg) from error
        finally:
            os.close(tell)
            os.close(rules)
        try:
            await self.runner.ready(self._child.ended)
            await self._learn()
        except SandboxError as error:
            msg = f"bubblewrap made no sandbox: {self._child.said() or error}"
            raise SandboxError(msg) from error

    async def kill(self) -> None:
        """End all of it; when this returns the kernel has taken the last process away.

        Raises `SandboxError` if it does not: a process hangs in the kernel.
        """
        if self._child is None:
            return
        with contextlib.suppress(TimeoutError, ProcessLookupError):
            await self._learn()
            if self._handle >= 0:
                # The one that is waited for by bwrap, which then ends by itself.
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                await asyncio.wait([self._child.ended], timeout=_LEARN_S)
        self._child.kill()
        _, hanging = await asyncio.wait([self._child.ended], timeout=_KILL_S)
        if hanging:
            msg = f"the sandbox of process {self._child.pid} cannot be ended"
            raise SandboxError(msg)

    def close(self) -> None:
        """Let go of what was held for it; it has ended."""
        self.runner.close()
        if self._child is not None:
            self._child.close()
        for descriptor in (self._told, self._handle):
            if descriptor >= 0:
                os.close(descriptor)
        self._child, self._told, self._handle = None, -1, -1

    async def _learn(self) -> None:
        """Get hold of process 1, which bwrap tells of as soon as there is one.

        Also one that is to be killed while it is being made: without bwrap it would wait for ever,
        for it dies with that only from some point on. Raises `TimeoutError`.
        """
        if self._handle >= 0 or self._child is None or self._child.ended.done():
            return
        await asyncio.wait_for(readable(self._told), _LEARN_S)
        if found := _PID.search(os.read(self._told, 4096)):
            self.pid = int(found[1])
            with contextlib.suppress(OSError):
                self._handle = os.pidfd_open(self.pid)


def end_strays(directory: Path) -> int:
    """Kill what a killed process was about to make a sandbox of under `directory`; how many.

    bwrap dies with its parent, but there is a moment in which its child does not die with it.
    """
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(int(entry.name))
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                controls = [Path(os.fsdecode(word)) for word in words if word.endswith(b"/control")]
                if b"--info-fd" in words and any(one.is_relative_to(directory) for one in controls):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    count += 1
            finally:
                os.close(handle)
    return count
