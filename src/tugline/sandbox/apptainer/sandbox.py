"""One Apptainer container with one session in it; see `runtime` for what holds of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath, PurePosixPath

import msgspec

from tugline.errors import SandboxError
from tugline.sandbox import files
from tugline.sandbox.apptainer.hardening import Hardening
from tugline.sandbox.base import HOME, MAX_READ_BYTES, Content, Exit, Mount, Sandbox
from tugline.sandbox.exec import limits
from tugline.sandbox.exec.limits import Group, Limits, Places
from tugline.sandbox.exec.processes import Child, start_time
from tugline.sandbox.exec.resource_monitor import ResourceMonitor
from tugline.sandbox.exec.runner import ARGV, INSIDE, Runner
from tugline.sandbox.network.port_forwards import PortForwards
from tugline.sandbox.network.proxy import AllowList
from tugline.sandbox.patch import Patch, PatchLimits
from tugline.sandbox.pausable_timeout import PausableTimeout
from tugline.sandbox.workspace.overlay import OverlayWorkspace

_ALONE = ("--containall", "--no-init", "--no-privs", "--writable-tmpfs", "--no-mount", "hostfs")
_NO_NETWORK = ("--net", "--network", "none")
RECORD = ".apptainer"
"""Ending of the name of a container's record."""


class First(msgspec.Struct, frozen=True):
    """Process 1 of a container, as this machine counts."""

    pid: int
    start: int | None
    """See `processes.start_time`; a number that is used again has another one."""


class ApptainerSandbox(Sandbox):
    """See `tugline.sandbox.base.Sandbox`."""

    home = HOME

    def __init__(  # noqa: PLR0913, PLR0917 - what a box is made of
        self,
        directory: Path,
        image: Path,
        workdir: PurePosixPath,
        layer: OverlayWorkspace,
        mounts: Sequence[Mount],
        allow: AllowList | None,
        bounds: Limits,
        where: Places,
        guard: Hardening,
    ) -> None:
        self.workdir, self.logs = workdir, directory / "logs"
        self._directory, self._image, self._workspace = directory, image, layer
        self._limits, self._where, self._guard = bounds, where, guard
        self._allow = allow
        """None where the network is this machine's."""
        self._doors = PortForwards(allow)
        self._group = Group(where, directory)
        self._share = ResourceMonitor(bounds.disk_mb, self._own, self._group.kills, self._kill)
        self._shared = {PurePosixPath(one.target): one.source for one in mounts if one.source}
        own = [one.target for one in mounts if one.source is None]
        self._folders: dict[PurePosixPath, Path] = {
            HOME: directory / "home",
            PurePosixPath("/tmp"): directory / "tmp",  # noqa: S108 - its own
            workdir: layer.work,
            **{PurePosixPath(one): directory / f"own-{n}" for n, one in enumerate(own)},
        }
        self._runner: Runner | None = None
        self._child: Child | None = None
        self._pid = 0

    def make(self) -> None:
        """Make its folders."""
        self._workspace.make()
        self._workspace.mount()
        with files.faults(f"cannot make {self._directory}"):
            for folder in (self.logs, *self._folders.values()):
                folder.mkdir(parents=True, exist_ok=True)
        self._group.make(self._limits)

    async def up(self) -> Runner:
        """The shell of a container, started again if the last one was killed."""
        if self._runner is not None and self._runner.alive:
            return self._runner
        await self._down()
        most = self._limits.output_mb << 20
        runner = self._runner = Runner(self._directory / "control", self._kill, most=most)
        await asyncio.to_thread(runner.prepare)
        command = await asyncio.to_thread(self.command)
        child = self._child = Child(command)
        try:
            await runner.ready(child.ended)
        except SandboxError as error:
            said = child.said()
            await self._down()
            if "--security" in command and self._guard.refused(said):
                return await self.up()
            msg = f"apptainer made no container of {self._image}: {said[-300:] or error}"
            raise SandboxError(msg) from error
        self._pid = await asyncio.to_thread(first_process, child.pid)
        await asyncio.to_thread(self._settle)
        await self._doors.move(self._pid)
        return runner

    def command(self) -> list[str]:
        """How the container is started."""
        argv = ["apptainer", "--silent", "exec", *_ALONE]
        argv += _NO_NETWORK if self._allow is not None else ()
        argv += ["--home", f"{self._folders[HOME]}:{HOME}", "--pwd", str(self.workdir)]
        argv += ["--env", "LANG=C.UTF-8", *self._guard.options(self._directory)]
        bound = {INSIDE: f"{self._directory / 'control'}:{INSIDE}:ro"}
        bound |= {str(to): f"{source}:{to}:ro" for to, source in self._shared.items()}
        bound |= {str(to): f"{source}:{to}" for to, source in self._folders.items() if to != HOME}
        for bind in bound.values():
            argv += ["--bind", bind]
        return [*argv, str(self._image), *ARGV]

    def _settle(self) -> None:
        """Write down what must not outlive us, before any program runs; set its limits."""
        first = First(self._pid, start_time(self._pid))
        with files.faults(f"cannot write to {self._directory}"):
            (self._directory / f"first{RECORD}").write_bytes(msgspec.json.encode(first))
        limits.restrain(self._pid, self._limits, self._where)
        self._group.join(self._pid)

    async def aclose(self) -> None:
        """End all of it; its folders stay."""
        await self._down()
        await asyncio.to_thread(self._workspace.unmount)
        await asyncio.to_thread(self._group.remove)

    async def put(self, root: PurePath, contents: Mapping[str, Content]) -> None:
        """Put files under the workdir or the home."""
        await asyncio.to_thread(files.put, files.folder_of(root, self._folders), contents)

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """A regular file's bytes."""
        folder, below = files.placed(path, self._folders)
        return await asyncio.to_thread(files.get, folder, below, max_bytes)

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """What was done to the workdir, after the end of the whole container and its doors."""
        await self._down()
        self._doors = PortForwards(self._allow)
        return await asyncio.to_thread(self._workspace.diff, limits)

    async def snapshot(self, to: Path) -> None:
        """Copy what was done to the workdir, after the end of the whole container."""
        await self._down()
        await asyncio.to_thread(self._workspace.snapshot, to)

    async def expose(self, url: str) -> str:
        """The URL of a door that leads to `url`; the same where the network is this machine's."""
        await self.up()
        return url if self._allow is None else await self._doors.open(self._pid, url)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log_name: str = "agent",
    ) -> Exit:
        """Run a program by the container's shell."""
        runner = await self.up()
        program = partial(
            runner.run,
            argv,
            env={**self._doors.env, **env},
            cwd=self.workdir,
            timeout_s=timeout_s,
            log=self.logs / f"{log_name}.log",
        )
        return await self._share.run(program, self._pid)

    def _own(self) -> list[Path]:
        work = self._workspace.work  # seen through the layer's own folder
        return [self._workspace.own, *(one for one in self._folders.values() if one != work)]

    async def _kill(self) -> None:
        """SIGKILL for process 1, and with it for all in its namespace."""
        if self._child is None or self._child.ended.done():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid or self._child.pid, signal.SIGKILL)
        done, _ = await asyncio.wait([self._child.ended], timeout=5.0)
        if not done:
            self._child.kill()
            await asyncio.wait([self._child.ended])

    async def _down(self) -> None:
        await self._kill()
        await self._doors.aclose()
        if self._runner is not None:
            self._runner.close()
        if self._child is not None:
            self._child.close()
            (self._directory / f"first{RECORD}").unlink(missing_ok=True)
        self._runner, self._child, self._pid = None, None, 0


def reap(record: Path) -> int:
    """End the container that a killed process left; returns how many that were."""
    count = 0
    with contextlib.suppress(OSError, msgspec.DecodeError):
        first = msgspec.json.decode(record.read_bytes(), type=First)
        if first.start is not None and start_time(first.pid) == first.start:
            os.kill(first.pid, signal.SIGKILL)
            count = 1
    record.unlink(missing_ok=True)
    return count


def first_process(pid: int) -> int:
    """The descendant of `pid` that is process 1 of another namespace; blocks."""
    stack = [pid]
    while stack:
        here = stack.pop()
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{here}/status").read_text()
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            if len(numbers.split()) > 2 and numbers.split()[-1] == "1":
                return here
            for task in Path(f"/proc/{here}/task").iterdir():
                stack += map(int, (task / "children").read_text().split())
    msg = f"apptainer (process {pid}) has made no process namespace"
    raise SandboxError(msg)
