"""One box that is a bubblewrap sandbox: its folders, its way out, its share of the disk.

See `runtime` for what holds of it. A control group is entered beside the start, because the
kernel takes its time for it, and is waited for before the first program.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath, PurePosixPath

import msgspec

from tugline.sandbox import files
from tugline.sandbox.base import (
    HOME,
    MAX_READ_BYTES,
    WORKDIR,
    Content,
    Exit,
    Mount,
    Sandbox,
    SandboxSpec,
)
from tugline.sandbox.bubblewrap import view
from tugline.sandbox.bubblewrap.command import BubblewrapCommand
from tugline.sandbox.exec import limits
from tugline.sandbox.exec.limits import Group, Limits, Places
from tugline.sandbox.exec.processes import finish
from tugline.sandbox.exec.resource_monitor import ResourceMonitor
from tugline.sandbox.exec.runner import INSIDE
from tugline.sandbox.network.port_forwards import PortForwards
from tugline.sandbox.network.proxy import AllowList
from tugline.sandbox.patch import Patch, PatchLimits
from tugline.sandbox.pausable_timeout import PausableTimeout
from tugline.sandbox.workspace.overlay import OverlayWorkspace
from tugline.types import Cause

_OVERLAY = (
    'mount -t overlay overlay -o "nosuid,nodev,$1" "$2" 2>/dev/null ||'
    ' mount -t overlay overlay -o "nosuid,nodev,${1%,volatile}" "$2" || exit 71; shift 2; exec "$@"'
)


class Ground(msgspec.Struct, frozen=True):
    """What all boxes of a runtime have in common on this machine."""

    arguments: tuple[str, ...]
    """For bwrap: what comes first."""
    shown: tuple[str, ...]
    """And what comes after ``/tmp``."""
    filter: bytes
    """Of system calls; empty where there is none."""
    places: Places


class BubblewrapSandbox(Sandbox):
    """See `tugline.sandbox.base.Sandbox`."""

    def __init__(
        self,
        directory: Path,
        spec: SandboxSpec,
        layer: OverlayWorkspace,
        bounds: Limits,
        allow: AllowList,
        ground: Ground,
    ) -> None:
        self.workdir: PurePosixPath = PurePosixPath(spec.workspace.path or WORKDIR)
        self.home: PurePosixPath = HOME
        self.logs = directory / "logs"
        self._directory = directory
        self._limits = bounds
        self._ground = ground
        self._workspace = layer
        self._group = Group(ground.places, directory)
        self._allow = allow
        self._doors = PortForwards(allow)
        self._mounts = _sources(spec.mounts, directory)
        self._sandbox: BubblewrapCommand | None = None
        self._settled: asyncio.Future[None] | None = None
        self._starts, self._runs = asyncio.Lock(), asyncio.Lock()
        self._share = ResourceMonitor(bounds.disk_mb, self._own, self._group.kills, self._kill)

    async def start(self) -> None:
        """Make its folders and its first sandbox."""
        await finish(asyncio.create_task(asyncio.to_thread(self._make)))
        await self._up()

    async def aclose(self) -> None:
        """End all of it; its folders stay, without what nobody reads any more."""
        try:
            await self._down()
        finally:
            await asyncio.to_thread(self._clear)

    async def put(self, root: PurePath, files_: Mapping[str, Content]) -> None:
        """Put files under the workdir or the home."""
        folder = files.folder_of(root, await self._seen(root))
        await asyncio.to_thread(files.put, folder, files_)

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """A regular file's bytes."""
        folder, below = files.placed(path, await self._seen(path))
        return await asyncio.to_thread(files.get, folder, below, max_bytes)

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """What was done to the workdir, after the end of the whole sandbox and of its doors."""
        async with self._runs:
            await self._down()
            self._doors = PortForwards(self._allow)
            return await asyncio.to_thread(self._workspace.diff, limits)

    async def snapshot(self, to: Path) -> None:
        """Copy what was done to the workdir, after the end of the whole sandbox."""
        async with self._runs:
            await self._down()
            await asyncio.to_thread(self._workspace.snapshot, to)

    async def expose(self, url: str) -> str:
        """The URL of a door that leads to `url`."""
        sandbox = await self._up()
        return await self._doors.open(sandbox.pid, url)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log_name: str = "agent",
    ) -> Exit:
        """Run a program in the sandbox, which is killed if that outlives its time or its share."""
        async with self._runs:
            sandbox = await self._up()
            if self._settled is not None:
                await asyncio.shield(self._settled)
            program = partial(
                sandbox.runner.run,
                argv,
                env={**self._doors.env, **env},
                cwd=self.workdir,
                timeout_s=timeout_s,
                log=self.logs / f"{log_name}.log",
            )
            end = await self._share.run(program, sandbox.pid)
            if end.cause is Cause.AGENT_MEMORY:
                await self._down()  # with what lies in /dev/shm, which would end the next one, too
            return end

    # ------------------------------------------------------------------ its sandbox
    async def _up(self) -> BubblewrapCommand:
        """The sandbox, started again if the last one was killed."""
        async with self._starts:
            if self._sandbox is not None and self._sandbox.runner.alive:
                return self._sandbox
            await self._end()
            most = self._limits.output_mb << 20
            sandbox = self._sandbox = BubblewrapCommand(self._directory / "control", most)
            preparing = asyncio.to_thread(self._prepare, sandbox)
            before = await finish(asyncio.create_task(preparing))
            await sandbox.start(before, self._arguments(), self._ground.filter)
            settling = asyncio.to_thread(self._settle, sandbox.pid)
            self._settled = asyncio.ensure_future(settling)
            await self._doors.move(sandbox.pid)
            return sandbox

    async def _down(self) -> None:
        async with self._starts:
            await self._end()

    async def _end(self) -> None:
        sandbox, settled = self._sandbox, self._settled
        self._sandbox = self._settled = None
        if settled is not None:
            # Not before: a number that is free again may be another process's.
            await asyncio.wait([settled])
            if not settled.cancelled():
                settled.exception()  # a program that would have run has raised it
        if sandbox is not None:
            await sandbox.kill()
            sandbox.close()
        await self._doors.aclose()

    def _settle(self, pid: int) -> None:
        limits.restrain(pid, self._limits, self._ground.places)
        self._group.join(pid)

    def _prepare(self, sandbox: BubblewrapCommand) -> list[str]:
        """How bwrap is started: by itself, or where the overlay has been mounted before."""
        sandbox.runner.prepare()
        if self._workspace.lower is None:
            return []
        private = os.geteuid() != 0
        space = ["unshare", "--mount", *(["--user", "--map-root-user"] if private else [])]
        options = self._workspace.prepare(private=private)
        return [*space, "/bin/sh", "-c", _OVERLAY, "sh", options, str(self._workspace.work)]

    def _arguments(self) -> list[str]:
        args = list(self._ground.arguments)
        args += ["--ro-bind", str(self._directory / "control"), INSIDE]
        args += ["--bind", str(self._directory / "tmp"), "/tmp"]  # noqa: S108
        args += self._ground.shown
        args += ["--bind", str(self._directory / "home"), str(self.home)]
        args += ["--bind", str(self._workspace.work), str(self.workdir)]
        for target, (source, writable) in self._mounts.items():
            args += ["--bind" if writable else "--ro-bind", str(source), str(target)]
        return [*args, *view.closing()]

    # ------------------------------------------------------------------ its folders
    def _make(self) -> None:
        own = [source for source, writable in self._mounts.values() if writable]
        with files.faults(f"cannot make {self._directory}"):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._directory.chmod(0o700)  # what programs are given is nobody else's business
            for folder in (self._directory / "home", self._directory / "tmp", self.logs, *own):
                folder.mkdir(parents=True, exist_ok=True)
        self._workspace.make()
        self._group.make(self._limits)

    def _clear(self) -> None:
        self._group.remove()
        useless = {"control", "tmp", "scratch"} | ({"home", "upper"} if self._share.over else set())
        if not self._directory.is_dir():  # it could not be made
            return
        with files.faults(f"cannot clear {self._directory}"):
            for name in useless:
                files.remove(self._directory, name)
            if self._share.over and self._workspace.lower is None:
                files.remove(self._directory, "work")

    async def _seen(self, path: PurePath) -> dict[PurePosixPath, Path]:
        """Where the folders that programs may write to are, as seen from this machine.

        An overlay is seen only in its sandbox, which is made if `path` is in the workdir.
        """
        work = self._workspace.work
        if self._workspace.lower is not None and path.is_relative_to(self.workdir):
            work = Path(f"/proc/{(await self._up()).pid}/root{self.workdir}")
        own = {at: source for at, (source, writable) in self._mounts.items() if writable}
        return {self.workdir: work, self.home: self._directory / "home", **own}

    def _own(self) -> list[Path]:
        own = [source for source, writable in self._mounts.values() if writable]
        return [self._directory / "home", self._directory / "tmp", self._workspace.own, *own]

    async def _kill(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.kill()


def _sources(mounts: Sequence[Mount], directory: Path) -> dict[PurePosixPath, tuple[Path, bool]]:
    """What is mounted at each target, and whether programs may write to it."""
    found: dict[PurePosixPath, tuple[Path, bool]] = {}
    for number, mount in enumerate(mounts):
        if not (mount.optional and view.shows(mount.target)):
            own = directory / "mounts" / str(number)
            source = (own, True) if mount.source is None else (Path(mount.source), False)
            found[PurePosixPath(mount.target)] = source
    return found
