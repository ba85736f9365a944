"""Run agents in containers of Docker or Podman: a task brings its system, as image or Dockerfile.

One driver for both engines. Each container has no network but forwarded ports, few of root's
rights, no way to gain more, and limits of memory, processes and disk. What the engine does not
enforce of that on this machine is found out by trying (`probe`) and reported as weaknesses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from tugline import log
from tugline.errors import ConfigError, SandboxError
from tugline.sandbox.base import WORKDIR, Mount, SandboxSpec
from tugline.sandbox.cache import cache_folder, digest
from tugline.sandbox.container.engine import CALL_S, ContainerEngine, Docker, DockerError
from tugline.sandbox.container.images import ContainerImage, ImageCache
from tugline.sandbox.container.probe import EngineInfo, probe
from tugline.sandbox.container.sandbox import (
    DIRECTORY,
    ContainerOptions,
    ContainerRecord,
    ContainerSandbox,
    forget_record,
    read_record,
    remove_container,
)
from tugline.sandbox.exec.limits import ProgramLimits, check_whole_numbers
from tugline.sandbox.host import HostRuntime, Layout, resolve_workdir
from tugline.sandbox.network.proxy import AllowList
from tugline.sandbox.workspace.history import end_history
from tugline.sandbox.workspace.mounts import unmount_all
from tugline.sandbox.workspace.overlay import OverlayWorkspace
from tugline.types import Workspace

_NOT_ROOT = (
    "{kind} runs as root and Tugline does not, so it can neither enter a container's network nor"
    " remove what its root leaves: run both as root, or use a rootless engine"
)
_log = log.get("sandbox")


class Container(HostRuntime):
    """Opens containers of one engine.

    `engine` is ``podman``, ``docker`` or a ``unix://`` URL; None takes what there is. `image` is
    for tasks whose workspace names none. `memory_mb`, `processes`, `cpus` and `disk_mb` limit a
    container; `output_mb` each log. `user` runs programs, None is the image's own. `read_only`
    makes the image so. `allow` are hosts that programs may reach: see `AllowList`. Images that are
    missing are pulled (`pull`: ``missing`` or ``never``) within `pull_s`, built within `build_s`,
    and removed when those made here take more than `images_gb`; `cache_gb` limits repositories and
    folders out of images.
    """

    def __init__(  # noqa: PLR0913 - options of a task's file
        self,
        *,
        engine: str | None = None,
        image: str | None = None,
        memory_mb: int = 8192,
        processes: int = 1024,
        cpus: float | None = None,
        disk_mb: int = 10240,
        output_mb: int = 64,
        user: str | None = None,
        read_only: bool = False,
        allow: Sequence[str] = (),
        pull: str = "missing",
        pull_s: float = 1800.0,
        build_s: float = 1800.0,
        images_gb: float = 100.0,
        cache_gb: float = 50.0,
    ) -> None:
        super().__init__(cache_gb)
        check_whole_numbers("container", {"memory_mb": memory_mb}, minimum=6)
        check_whole_numbers("container", {"processes": processes}, minimum=2)
        check_whole_numbers("container", {"disk_mb": disk_mb, "output_mb": output_mb})
        times = {"cpus": 1.0 if cpus is None else cpus, "pull_s": pull_s, "build_s": build_s}
        for name, amount in (times | {"images_gb": images_gb}).items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or amount <= 0:
                msg = f"runtime 'container': {name} is {amount!r}, must be a number above 0"
                raise ConfigError(msg)
        if pull not in {"missing", "never"}:
            msg = f"runtime 'container': pull is {pull!r}, must be 'missing' or 'never'"
            raise ConfigError(msg)
        self._options = ContainerOptions(
            limits=ProgramLimits(
                memory_mb=memory_mb, processes=processes, disk_mb=disk_mb, output_mb=output_mb
            ),
            cpus=cpus,
            user=user,
            read_only=read_only,
            allow=AllowList(allow),
        )
        self._image = image
        self._engine = ContainerEngine(engine)
        self._images = ImageCache(
            self._engine,
            cache_folder() / "images",
            pull=pull == "missing",
            max_gb=images_gb,
            pull_s=pull_s,
            build_s=build_s,
        )
        self._info: EngineInfo | None = None
        self._probing = threading.Lock()

    async def _create(
        self, directory: Path, spec: SandboxSpec, stack: contextlib.AsyncExitStack
    ) -> ContainerSandbox:
        info = await asyncio.to_thread(self.inspect)
        image, workdir, base = await self._prepare(spec.workspace, stack)
        workspace = OverlayWorkspace(directory, base, spec.files, spec.snapshot)
        mounts = await self._needed_mounts(image, spec.mounts)
        layout = Layout(directory, workspace, workdir, mounts)
        options = msgspec.structs.replace(self._options, hardening=info.hardening)
        return ContainerSandbox(layout, options, self._engine, image)

    async def _prepare(
        self, workspace: Workspace, stack: contextlib.AsyncExitStack
    ) -> tuple[ContainerImage, PurePosixPath, Path | None]:
        """Hold the base of the workdir: a repository, a folder, or what the image has there."""
        if workspace.image is None and workspace.build is None:
            workspace = msgspec.structs.replace(workspace, image=self._image)
        image = await self._images.get(workspace)
        workdir = resolve_workdir(workspace, image.workdir or WORKDIR)
        base: Path | None = await super()._prepare(workspace, stack)
        if base is not None or not await self._images.find_paths(image, [str(workdir)]):
            return image, workdir, base
        description = f"{workdir} of {image.name}"

        async def fill(into: Path) -> None:
            await self._images.copy(image, workdir, into)
            if workspace.commit is not None:
                await asyncio.to_thread(end_history, into, workspace.commit, description)

        key = f"image-{digest(image.id, str(workdir), workspace.commit or '')}"
        entry = self._cache.entry(key, fill, description)
        return image, workdir, await stack.enter_async_context(entry)

    async def _needed_mounts(self, image: ContainerImage, mounts: Sequence[Mount]) -> list[Mount]:
        """Leave out the optional ones that the image needs not."""
        optional = tuple(mount.target for mount in mounts if mount.optional)
        there = await self._images.find_paths(image, optional) if optional else frozenset()
        return [mount for mount in mounts if not (mount.optional and mount.target in there)]

    def reap(self, directory: Path) -> int:
        """Remove containers and mounts that a killed process left below `directory`."""
        directory = Path.cwd() / directory
        count = 0
        for folder in (directory, *directory.glob("*/")):
            if (record := read_record(folder)) is not None:
                count += _reap(record, folder)
        return count + unmount_all(directory)

    def check_available(self) -> str | None:
        """Return why no container can be run here."""
        try:
            self.inspect()
        except SandboxError as error:
            return str(error)
        return None

    def list_weaknesses(self) -> Sequence[str]:
        """Return what the engine does not isolate; nothing where there is no engine."""
        try:
            return self.inspect().list_weaknesses()
        except SandboxError:
            return ()

    def inspect(self) -> EngineInfo:
        """Find out once what the engine does on this machine. Blocks. Raises `SandboxError`."""
        with self._probing:
            if self._info is None:
                kind = self._engine.find().kind
                info = self._engine.run_blocking(lambda docker: probe(docker, kind), 2 * CALL_S)
                if not info.rootless and os.geteuid() != 0:
                    raise SandboxError(_NOT_ROOT.format(kind=kind))
                fields = {**msgspec.structs.asdict(info), "hardening": info.hardening is not None}
                _log.info("container engine", **fields)
                self._info = info
            return self._info


def _reap(record: ContainerRecord, folder: Path) -> int:
    """Remove the container that was recorded in `folder`, if it is the one; return how many."""

    async def work(docker: Docker) -> int:
        try:
            found = await docker.containers.container(record.name).show()
        except DockerError as error:
            if error.status == 404:
                return 0
            raise
        if found["Config"]["Labels"].get(DIRECTORY) != str(folder):
            return 0
        await remove_container(docker, record.name)
        return 1

    try:
        count = ContainerEngine(f"unix://{record.socket}").run_blocking(work)
    except SandboxError as error:
        _log.warning("container not reaped", container=record.name, error=str(error))
        return 0
    forget_record(folder)
    return count
