"""One container with one session in it.

Its first process is the shell of `runner.py`, so a program costs milliseconds instead of an exec's
hundred and fifty, and a container that had to be killed is started again for the next one, with
all of its files. The task's folder and the home are folders of this machine, mounted: what the
agent did is read from here, without asking the container.

A box leaves nothing (I3): the container is written down in ``container.json`` before it is made,
and is removed with its mounts when the box is left, or by `reap` after this process was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import msgspec

from tugline import log
from tugline.errors import ImageError, SandboxError
from tugline.sandbox import files
from tugline.sandbox.base import HOME, MAX_READ_BYTES, Content, Exit, Mount, Sandbox
from tugline.sandbox.container import cgroups
from tugline.sandbox.container.engine import CALL_S, Docker, DockerError, Engine, faults
from tugline.sandbox.container.hardening import Hardening
from tugline.sandbox.container.images import LABEL, Image
from tugline.sandbox.container.probe import ulimits
from tugline.sandbox.exec.limits import kills
from tugline.sandbox.exec.processes import finish
from tugline.sandbox.exec.resource_monitor import ResourceMonitor
from tugline.sandbox.exec.runner import ARGV, INSIDE, KILLED, Gone, Runner
from tugline.sandbox.network.port_forwards import PortForwards
from tugline.sandbox.network.proxy import AllowList
from tugline.sandbox.patch import Patch, PatchLimits
from tugline.sandbox.pausable_timeout import PausableTimeout
from tugline.sandbox.workspace.overlay import OverlayWorkspace
from tugline.types import Cause

DIRECTORY = f"{LABEL}.directory"
"""The label that names a container's session."""
_RECORD = "container.json"
_NEEDED = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE"]
_NEEDED += ["SETGID", "SETUID"]
"""What installing packages and running tests as root takes; no raw sockets, devices or chroot."""
_log = log.get("runtimes")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a box may take; see `runtime.Container` for the units."""

    memory_mb: int
    processes: int
    cpus: float | None
    disk_mb: int
    output_mb: int
    user: str | None
    read_only: bool
    allow: AllowList
    guard: Hardening | None = None
    """Set when the engine is known."""


class Record(msgspec.Struct, frozen=True):
    """A container that exists or is about to."""

    name: str
    socket: str


class ContainerSandbox(Sandbox):
    """See `tugline.sandbox.base.Sandbox`."""

    home = HOME

    def __init__(  # noqa: PLR0913, PLR0917 - what a box is made of
        self,
        directory: Path,
        engine: Engine,
        limits: Limits,
        image: Image,
        workdir: PurePosixPath,
        layer: OverlayWorkspace,
        mounts: Sequence[Mount],
    ) -> None:
        self.workdir = workdir
        self.logs = directory / "logs"
        self._directory = directory
        self._engine, self._limits, self._image, self._workspace = engine, limits, image, layer
        self._mounts = mounts
        self._name = f"tugline-{secrets.token_hex(8)}"
        self._control = directory / "control"
        self._doors = PortForwards(limits.allow)
        self._runner = self._new_runner()
        self._cgroup = cgroups.Cgroup(None, None)
        self._share = ResourceMonitor(
            limits.disk_mb, self._own, lambda: kills(self._cgroup.memory), self._kill
        )
        self._pid, self._started = 0, False
        self._starts, self._runs = asyncio.Lock(), asyncio.Lock()
        self._upper: list[Path] = []
        """Where the engine keeps what programs change of the image, if it says so."""
        own = [mount for mount in mounts if mount.source is None]
        self._folders: dict[PurePosixPath, Path] = {
            workdir: layer.work,
            HOME: directory / "home",
            **{PurePosixPath(one.target): directory / f"own-{n}" for n, one in enumerate(own)},
        }
        if limits.read_only:
            self._folders[PurePosixPath("/tmp")] = directory / "tmp"  # noqa: S108 - its own

    # ------------------------------------------------------------------ its life
    async def open(self) -> None:
        """Make its folders, make the container, start it."""
        # To their ends also when cancelled: who gives up half-way cannot know what is there.
        await finish(asyncio.create_task(asyncio.to_thread(self._make_folders)))
        await finish(asyncio.create_task(self._create()))
        await self._up()

    async def _create(self) -> None:
        async with self._calling("made") as docker:
            found = await asyncio.to_thread(self._engine.find)
            await asyncio.to_thread(self._remember, Record(self._name, found.socket))
            asked = await asyncio.to_thread(self._asked)
            await docker.containers.create(asked, name=self._name)

    async def close(self) -> None:
        """Leave nothing of it but its folders; also after an `open` that failed half-way."""
        await finish(asyncio.create_task(self._close()))

    async def _close(self) -> None:
        await self._doors.aclose()
        try:
            if (self._directory / _RECORD).exists():
                async with self._calling("removed") as docker:
                    await remove(docker, self._name)
                forget(self._directory)
        except SandboxError as error:  # says nothing of what was done in it; `reap` tries again
            _log.warning("container not removed", container=self._name, error=str(error))
        finally:
            self._runner.close()
            await asyncio.to_thread(self._workspace.unmount)

    async def _up(self) -> None:
        """Start it, for the first time or after it was killed."""
        async with self._starts:
            if not self._runner.alive:
                await self._end()
                await self._start()

    async def _start(self) -> None:
        self._runner = self._new_runner()
        await asyncio.to_thread(self._runner.prepare)
        async with self._calling("started") as docker:
            container = docker.containers.container(self._name)
            self._started = True
            try:
                await container.start()
            except DockerError as error:
                raise self._not_started(error) from error
            shown = await container.show()
        self._pid = int(shown["State"]["Pid"])
        upper = ((shown.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
        self._upper = [Path(upper)] if upper else []
        self._cgroup = await asyncio.to_thread(cgroups.of, self._pid)
        await self._runner.ready()
        await self._doors.move(self._pid)

    async def _down(self) -> None:
        """End all that is in it, and its doors."""
        async with self._starts:
            await self._end()
            await self._doors.aclose()

    async def _kill(self) -> None:
        """SIGKILL for all that is in it; the container stays."""
        async with self._starts:
            await self._end(close=False)

    async def _end(self, *, close: bool = True) -> None:
        if self._started:
            async with self._calling("killed") as docker:
                container = docker.containers.container(self._name)
                with contextlib.suppress(DockerError):  # it has ended already
                    await container.kill(signal="KILL")
                await container.wait()
            self._pid, self._started = 0, False
        if close:
            self._runner.close()

    def _new_runner(self) -> Runner:
        return Runner(self._control, self._kill, most=self._limits.output_mb << 20)

    @contextlib.asynccontextmanager
    async def _calling(self, what: str) -> AsyncIterator[Docker]:
        try:
            async with asyncio.timeout(CALL_S), self._engine.client() as docker:
                with faults(f"container {self._name} cannot be {what}"):
                    yield docker
        except TimeoutError as error:
            msg = f"container {self._name} was not {what} within {CALL_S:.0f} s"
            raise SandboxError(msg) from error

    def _not_started(self, error: DockerError) -> Exception:
        said = str(error.message)
        if "/bin/sh" in said:
            msg = f"image {self._image.name!r} has no /bin/sh, which is needed to run programs"
            return ImageError(msg)
        return error

    # ------------------------------------------------------------------ what it is made of
    def _make_folders(self) -> None:
        self._workspace.mount()
        with files.faults(f"cannot make {self._directory}"):
            self._directory.chmod(0o700)  # nobody else is to run what a container's root leaves
            self.logs.mkdir(exist_ok=True)
            self._control.mkdir(exist_ok=True)  # Docker looks for it before it is started
            for folder in self._folders.values():
                folder.mkdir(exist_ok=True)
                if not self._is_root:  # who it is only the image knows
                    folder.chmod(0o777)

    def _remember(self, record: Record) -> None:
        with files.faults(f"cannot write {self._directory / _RECORD}"):
            (self._directory / _RECORD).write_bytes(msgspec.json.encode(record))

    @property
    def _user(self) -> str:
        return self._image.user if self._limits.user is None else self._limits.user

    @property
    def _is_root(self) -> bool:
        return self._user.partition(":")[0] in {"", "0", "root"}

    def _asked(self) -> dict[str, Any]:
        """What the engine is asked for."""
        return {
            "Image": self._image.id,
            "Entrypoint": list(ARGV),
            "Cmd": [],
            "User": self._user,
            "WorkingDir": str(self.workdir),
            "Env": [f"HOME={HOME}", "LANG=C.UTF-8"],
            "Labels": {LABEL: "box", DIRECTORY: str(self._directory)},
            **({"Healthcheck": {"Test": ["NONE"]}} if self._image.checks_health else {}),
            "StopSignal": "SIGKILL",
            "HostConfig": self._host(),
        }

    def _host(self) -> dict[str, Any]:
        limits = self._limits
        guard = limits.guard.asked() if limits.guard else {}
        return {
            "NetworkMode": "none",
            "Mounts": self._binds(),
            "Memory": limits.memory_mb << 20,
            "MemorySwap": limits.memory_mb << 20,
            "PidsLimit": limits.processes,
            "NanoCpus": int((limits.cpus or 0) * 1e9),
            "Ulimits": ulimits(),
            "CapDrop": ["ALL"],
            "CapAdd": _NEEDED if self._is_root else [],  # Podman gives added ones to any user
            # The toolbox and the bases are shared by all; relabelling them for each is no option.
            "SecurityOpt": ["no-new-privileges", "label=disable", *guard.pop("SecurityOpt", ())],
            **guard,
            "ReadonlyRootfs": limits.read_only,
            "LogConfig": {"Type": "none"},
        }

    def _binds(self) -> list[dict[str, Any]]:
        read_only = {INSIDE: self._control} | {
            mount.target: Path(mount.source) for mount in self._mounts if mount.source is not None
        }
        own = {str(target): folder for target, folder in self._folders.items()}
        return [
            {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": target not in own}
            for target, source in (own | read_only).items()
        ]

    # ------------------------------------------------------------------ files
    async def put(self, root: PurePath, contents: Mapping[str, Content]) -> None:
        """Put files under the workdir or the home."""
        await asyncio.to_thread(files.put, files.folder_of(root, self._folders), contents)

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """A regular file's bytes."""
        folder, below = files.placed(path, self._folders)
        return await asyncio.to_thread(files.get, folder, below, max_bytes)

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """What was done to the workdir, after the end of all its programs and of its doors."""
        async with self._runs:
            await self._down()
            self._doors = PortForwards(self._limits.allow)
            return await asyncio.to_thread(self._workspace.diff, limits)

    async def snapshot(self, to: Path) -> None:
        """Copy what was done to the workdir, after the end of all its programs."""
        async with self._runs:
            await self._down()
            await asyncio.to_thread(self._workspace.snapshot, to)

    # ------------------------------------------------------------------ programs
    async def expose(self, url: str) -> str:
        """A socket in the container's network, relayed."""
        await self._up()
        return await self._doors.open(self._pid, url)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log_name: str = "agent",
    ) -> Exit:
        """Run a program by the container's shell, one at a time."""
        async with self._runs:
            await self._up()
            program = partial(
                self._runner.run,
                argv,
                env={**self._doors.env, **env},
                cwd=self.workdir,
                timeout_s=timeout_s,
                log=self.logs / f"{log_name}.log",
            )
            began = time.monotonic()
            try:
                end = await self._share.run(program, self._pid)
            except Gone:  # and its control group with it
                if not await self._out_of_memory():
                    raise
                end = Exit(KILLED, False, time.monotonic() - began, Cause.AGENT_MEMORY)
            if end.cause is Cause.AGENT_MEMORY:
                await self._down()  # with what lies in /dev/shm, which would end the next one, too
            return end

    def _own(self) -> list[Path]:
        """Its folders, and what it changed of its image."""
        work = self._workspace.work  # seen through the layer's own folder
        folders = (folder for folder in self._folders.values() if folder != work)
        return [self._workspace.own, *folders, *self._upper]

    async def _out_of_memory(self) -> bool:
        async with self._calling("inspected") as docker:
            state = (await docker.containers.container(self._name).show())["State"]
        return bool(state.get("OOMKilled"))


async def remove(docker: Docker, name: str) -> None:
    """Kill and remove a container; it may be gone."""
    for wait_s in (0.05, 0.2, 1.0, 3.0, None):
        try:
            return await docker.containers.container(name).delete(force=True, v=True)
        except DockerError as error:
            if error.status == 404:
                return None
            if wait_s is None:
                raise
        # Podman refuses while it is just ending, Docker while somebody else removes it.
        await asyncio.sleep(wait_s)
    return None


def recorded(directory: Path) -> Record | None:
    """The container that was written down there."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((directory / _RECORD).read_bytes(), type=Record)
    return None


def forget(directory: Path) -> None:
    """It is gone."""
    (directory / _RECORD).unlink(missing_ok=True)
