"""One start of bubblewrap: process 1 in its namespaces, known by its number on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tugline.errors import RuntimeFault
from tugline.runtimes.processes import Child
from tugline.runtimes.runner import ARGV, Runner

_KILL_S = 60.0


class _Info(msgspec.Struct, frozen=True, rename={"pid": "child-pid"}):
    """What bwrap says on ``--info-fd``."""

    pid: int


class Sandbox:
    """One start of bwrap: it runs until it is killed."""

    def __init__(self, control: Path, most: int) -> None:
        self.runner = Runner(control, self.kill, most=most)
        self.pid = 0
        """Of its process 1, as this machine counts."""
        self._child: Child | None = None
        self._handle = -1

    async def start(self, argv: Sequence[str], arguments: Sequence[str], filter_: bytes) -> None:
        """Start it and wait for its shell. Raises `RuntimeFault`."""
        told, tell = os.pipe()
        rules = os.memfd_create("filter")
        os.write(rules, filter_)
        os.lseek(rules, 0, os.SEEK_SET)
        try:
            refuse = ("--seccomp", str(rules)) if filter_ else ()
            command = (*argv, "bwrap", "--info-fd", str(tell), *refuse, *arguments, *ARGV)
            self._child = Child(command, descriptors=(tell, rules))
            os.close(tell)
            tell = -1
            await self.runner.ready(self._child.ended)
            self.pid = msgspec.json.decode(os.read(told, 4096), type=_Info).pid
            self._handle = os.pidfd_open(self.pid)
        except (OSError, RuntimeFault, msgspec.DecodeError) as error:
            said = self._child.said() if self._child else ""
            await self.kill()
            msg = f"bubblewrap made no sandbox: {said or error}"
            raise RuntimeFault(msg) from error
        finally:
            for descriptor in (told, tell, rules):
                if descriptor >= 0:
                    os.close(descriptor)

    async def kill(self) -> None:
        """End all of it; when this returns the kernel has taken the last process away.

        Raises `RuntimeFault` if it does not: a process hangs in the kernel.
        """
        if self._child is None:
            return
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        else:
            self._child.kill()
        _, hanging = await asyncio.wait([self._child.ended], timeout=_KILL_S)
        if hanging:
            msg = f"the sandbox of process {self._child.pid} cannot be ended"
            raise RuntimeFault(msg)

    def close(self) -> None:
        """Let go of what was held for it; it has ended."""
        self.runner.close()
        if self._child is not None:
            self._child.close()
        if self._handle >= 0:
            os.close(self._handle)
        self._child, self._handle = None, -1
