"""Containers of Docker or Podman: a task brings its own machine, as an image or a Dockerfile.

One driver for both engines. Each container has no network but the doors of its box, few of root's
rights, no way to gain more, and limits of memory, processes and disk. What the engine does not
keep of that on this machine is found out by trying (`probe`) and told by `weaknesses`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from tugline import log
from tugline.errors import ConfigError, SandboxError, TuglineError, UsageError
from tugline.sandbox.base import HOME, WORKDIR, Mount, Runtime, SandboxSpec
from tugline.sandbox.cache import cache_folder
from tugline.sandbox.container.engine import CALL_S, Docker, DockerError, Engine
from tugline.sandbox.container.images import Image, Images
from tugline.sandbox.container.probe import Facts, probe
from tugline.sandbox.container.sandbox import (
    DIRECTORY,
    ContainerSandbox,
    Limits,
    Record,
    forget,
    recorded,
    remove,
)
from tugline.sandbox.exec.processes import finish
from tugline.sandbox.network.proxy import AllowList
from tugline.sandbox.workspace.cache import WorkspaceCache, digest
from tugline.sandbox.workspace.history import end_history
from tugline.sandbox.workspace.mounts import unmount_all
from tugline.sandbox.workspace.overlay import OverlayWorkspace
from tugline.types import Workspace

_NOT_ROOT = (
    "{kind} runs as root and Tugline does not, so it can neither enter a container's network nor"
    " remove what its root leaves: run both as root, or use a rootless engine"
)
_log = log.get("runtimes")


class Container(Runtime):
    """Boxes that are containers of one engine.

    `engine` is ``podman``, ``docker`` or a ``unix://`` URL; None takes what there is. `image` is
    for tasks whose workspace names none. `memory_mb`, `processes`, `cpus` and `disk_mb` bound a
    box; `output_mb` each log. `user` runs programs, None is the image's own. `read_only` makes the
    image so. `allow` are hosts that programs may reach: see `AllowList`. Images that are missing
    are pulled (`pull`: ``missing`` or ``never``) within `pull_s`, built within `build_s`, and
    removed when those made here take more than `images_gb`; `bases_gb` bounds repositories and
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
        bases_gb: float = 50.0,
    ) -> None:
        whole = {"memory_mb": (memory_mb, 6), "processes": (processes, 2)}
        whole |= {"disk_mb": (disk_mb, 1), "output_mb": (output_mb, 1)}
        for name, (value, least) in whole.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise _wrong(name, value, f"a whole number from {least}")
        times = {"cpus": 1.0 if cpus is None else cpus, "pull_s": pull_s, "build_s": build_s}
        for name, amount in (times | {"images_gb": images_gb}).items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or amount <= 0:
                raise _wrong(name, amount, "a number above 0")
        if pull not in {"missing", "never"}:
            raise _wrong(option="pull", value=pull, must="'missing' or 'never'")
        self._limits = Limits(
            memory_mb=memory_mb,
            processes=processes,
            cpus=cpus,
            disk_mb=disk_mb,
            output_mb=output_mb,
            user=user,
            read_only=read_only,
            allow=AllowList(allow),
        )
        self._image = image
        self._engine = Engine(engine)
        self._images = Images(
            self._engine,
            cache_folder() / "images",
            pull=pull == "missing",
            most_gb=images_gb,
            pull_s=pull_s,
            build_s=build_s,
        )
        self._bases = WorkspaceCache(most_gb=bases_gb)
        self._facts: Facts | None = None
        self._probing = threading.Lock()

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[ContainerSandbox]:
        """A container of the workspace's image, with its files mounted."""
        spec = spec or SandboxSpec()
        workspace = self._named(spec.workspace)
        directory = Path.cwd() / directory
        facts = await asyncio.to_thread(self.facts)
        image = await self._images.have(workspace)
        workdir = _workdir(workspace, image)
        async with self._base(workspace, image, workdir) as base:
            layer = OverlayWorkspace(directory, base, spec.files, spec.snapshot)
            await finish(asyncio.create_task(asyncio.to_thread(layer.make)))
            mounts = await self._mounts(image, spec.mounts)
            limits = msgspec.structs.replace(self._limits, guard=facts.guard)
            box = ContainerSandbox(directory, self._engine, limits, image, workdir, layer, mounts)
            try:
                await box.open()
                yield box
            finally:
                await box.close()

    async def prefetch(self, workspaces: Iterable[Workspace]) -> list[str]:
        """Have what tasks to come begin with; returns why, for each that cannot be had."""
        failed = []
        for workspace in dict.fromkeys(map(self._named, workspaces)):
            try:
                image = await self._images.have(workspace)
                async with self._base(workspace, image, _workdir(workspace, image)):
                    pass
            except TuglineError as error:
                failed.append(str(error))
        return failed

    def reap(self, directory: Path) -> int:
        """Remove containers and mounts that a killed process left below `directory`."""
        directory = Path.cwd() / directory
        count = 0
        for folder in (directory, *directory.glob("*/")):
            if (record := recorded(folder)) is not None:
                count += _reap(record, folder)
        return count + unmount_all(directory)

    def check_available(self) -> str | None:
        """Why no container can be run here."""
        try:
            self.facts()
        except SandboxError as error:
            return str(error)
        return None

    def list_weaknesses(self) -> Sequence[str]:
        """What the engine does not keep apart; nothing where there is no engine."""
        try:
            return self.facts().list_weaknesses()
        except SandboxError:
            return ()

    def facts(self) -> Facts:
        """What the engine does on this machine, found out once. Blocks. Raises `SandboxError`."""
        with self._probing:
            if self._facts is None:
                kind = self._engine.find().kind
                facts = self._engine.blocking(lambda docker: probe(docker, kind), 2 * CALL_S)
                if not facts.rootless and os.geteuid() != 0:
                    raise SandboxError(_NOT_ROOT.format(kind=kind))
                told = {**msgspec.structs.asdict(facts), "guard": facts.guard is not None}
                _log.info("container engine", **told)
                self._facts = facts
            return self._facts

    def _named(self, workspace: Workspace) -> Workspace:
        if workspace.image is None and workspace.build is None:
            return msgspec.structs.replace(workspace, image=self._image)
        return workspace

    @contextlib.asynccontextmanager
    async def _base(
        self, workspace: Workspace, image: Image, workdir: PurePosixPath
    ) -> AsyncIterator[Path | None]:
        """What the workdir holds at first: repository, folder, or what the image has there."""
        async with self._bases.open(workspace) as base:
            if base is not None or not await self._images.present(image, [str(workdir)]):
                yield base
                return
        key = f"image-{digest(image.id, str(workdir), workspace.commit or '')}"
        what = f"{workdir} of {image.name}"

        async def fill(into: Path) -> None:
            await self._images.copy(image, workdir, into)
            if workspace.commit is not None:
                await asyncio.to_thread(end_history, into, workspace.commit, what)

        async with self._bases.filled(key, fill, what) as base:
            yield base

    async def _mounts(self, image: Image, mounts: Sequence[Mount]) -> list[Mount]:
        """Those that are wanted in this image."""
        optional = tuple(mount.target for mount in mounts if mount.optional)
        there = await self._images.present(image, optional) if optional else frozenset()
        return [mount for mount in mounts if not (mount.optional and mount.target in there)]


def _workdir(workspace: Workspace, image: Image) -> PurePosixPath:
    workdir = PurePosixPath(workspace.path) if workspace.path else image.workdir or WORKDIR
    if not workdir.is_absolute() or ".." in workdir.parts or workdir in {HOME, *HOME.parents}:
        msg = f"workspace.path is {str(workdir)!r}, must be an absolute folder other than {HOME}"
        raise UsageError(msg)
    return workdir


def _reap(record: Record, folder: Path) -> int:
    """Remove the container that was recorded in `folder`, if it is the one; how many that was."""

    async def work(docker: Docker) -> int:
        try:
            found = await docker.containers.container(record.name).show()
        except DockerError as error:
            if error.status == 404:
                return 0
            raise
        if found["Config"]["Labels"].get(DIRECTORY) != str(folder):
            return 0
        await remove(docker, record.name)
        return 1

    try:
        count = Engine(f"unix://{record.socket}").blocking(work)
    except SandboxError as error:
        _log.warning("container not reaped", container=record.name, error=str(error))
        return 0
    forget(folder)
    return count


def _wrong(option: str, value: object, must: str) -> ConfigError:
    return ConfigError(f"runtime 'container': {option} is {value!r}, must be {must}")
