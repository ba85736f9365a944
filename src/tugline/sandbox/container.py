"""Run agents in containers of Docker or Podman, from the task's image or Dockerfile.

One driver serves both engines. A container has a network of only forwarded ports, few of root's
capabilities, no privilege escalation, and limits of memory, processes and disk. `probe` tests which
of these the engine enforces on this machine; the others are reported as weaknesses.

Process 1 is the runner's shell, so a program starts in a few milliseconds; an exec takes 150. A
container that was killed is restarted for the next program, with all of its files. The workdir and
the home are mounted folders of this machine, so the agent's changes are read without the engine.

A container has a record, ``container.json``, from before it is created. It is removed with its
mounts when the sandbox is closed, or by `Container.reap` if this process was killed (I3). A shell
beside it (`Guard`) ends its programs with this process, whatever files they hold open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tugline import log
from tugline.aio import finish
from tugline.errors import ImageError, SandboxError
from tugline.sandbox import files
from tugline.sandbox.base import HOME, WORKDIR, Exit, SandboxSpec
from tugline.sandbox.cache import digest
from tugline.sandbox.container_engine import (
    LABEL,
    ContainerEngine,
    Docker,
    DockerError,
    EngineInfo,
    bind,
    probe,
    remove_container,
    ulimits,
)
from tugline.sandbox.container_images import ContainerImage, ImageCache
from tugline.sandbox.host import HostRuntime, IsolatedSandbox, Layout, resolve_workdir
from tugline.sandbox.limits import OOM_SCORE, ProgramLimits, cgroup_of
from tugline.sandbox.network import AllowList
from tugline.sandbox.processes import find_records
from tugline.sandbox.quotas import limit_terminals
from tugline.sandbox.runner import ARGV, CONTROL, KILLED, Runner, SandboxEnded
from tugline.schema import PositiveFloat, PositiveInt
from tugline.types import Cause, Workspace

DIRECTORY = f"{LABEL}.directory"
"""Label with the directory of a container's sandbox."""
_RECORD = "container.json"
_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE"]
_CAPABILITIES += ["SETGID", "SETUID"]
"""Capabilities needed to install packages and run tests; no raw sockets, devices or chroot."""
_TMP = PurePosixPath("/tmp")  # noqa: S108 - the container's own
_NOT_ROOT = (
    "{kind} runs as root but Tugline does not, so Tugline can neither enter a container's network"
    " nor remove files of its root user: run both as root, or use a rootless engine"
)
_log = log.get("sandbox")


class Container(HostRuntime):
    """Opens containers of one engine.

    `engine` is ``podman``, ``docker`` or a ``unix://`` URL; None takes the first that answers.
    `image` is the default for workspaces without one. `memory_mb`, `processes`, `cpus` and
    `disk_mb` limit a container, `output_mb` each log. Programs run as `user`, by default the
    image's. `read_only` mounts the image read-only. `allow` lists hosts that programs may reach:
    see `AllowList`. Missing images are pulled (`pull`: ``missing`` or ``never``) within `pull_s` or
    built within `build_s`; those pulled or built here are removed beyond `images_gb`. `cache_gb`
    limits the cache of repositories and of folders copied from images.
    """

    def __init__(  # noqa: PLR0913 - options of a task's file
        self,
        *,
        engine: str | None = None,
        image: str | None = None,
        memory_mb: Annotated[int, Meta(ge=6)] = 8192,
        processes: Annotated[int, Meta(ge=2)] = 1024,
        cpus: PositiveFloat | None = None,
        disk_mb: PositiveInt = 10240,
        output_mb: PositiveInt = 64,
        user: str | None = None,
        read_only: bool = False,
        allow: Sequence[str] = (),
        pull: Literal["missing", "never"] = "missing",
        pull_s: PositiveFloat = 1800.0,
        build_s: PositiveFloat = 1800.0,
        images_gb: PositiveFloat = 100.0,
        cache_gb: PositiveFloat = 50.0,
    ) -> None:
        super().__init__(cache_gb)
        self.limits = ProgramLimits(
            memory_mb=memory_mb, processes=processes, disk_mb=disk_mb, output_mb=output_mb
        )
        self.cpus = cpus
        self.user = user
        self.read_only = read_only
        self.allow = AllowList(allow)
        self._image = image
        self.engine = ContainerEngine(engine)
        self._images = ImageCache(
            self.engine, pull=pull == "missing", max_gb=images_gb, pull_s=pull_s, build_s=build_s
        )
        self._info: EngineInfo | None = None
        self._probing = threading.Lock()

    async def _create(
        self, directory: Path, spec: SandboxSpec, stack: contextlib.AsyncExitStack
    ) -> ContainerSandbox:
        await asyncio.to_thread(self.inspect)
        image, workdir, base = await self._prepare(spec.workspace, stack)
        optional = [mount.target for mount in spec.mounts if mount.optional]
        existing = await self._images.find_paths(image, optional)
        layout = Layout(directory, spec, base, workdir, existing.__contains__)
        return ContainerSandbox(layout, self, image)

    async def _prepare(
        self, workspace: Workspace, stack: contextlib.AsyncExitStack
    ) -> tuple[ContainerImage, PurePosixPath, Path | None]:
        """Return image, workdir and its base: a repository, a folder, or the image's folder."""
        if workspace.image is None and workspace.build is None:
            workspace = msgspec.structs.replace(workspace, image=self._image)
        image = await self._images.get(workspace)
        workdir = resolve_workdir(workspace, image.workdir or WORKDIR)
        base: Path | None = await super()._prepare(workspace, stack)
        if base is not None or not await self._images.find_paths(image, [str(workdir)]):
            return image, workdir, base
        key = f"image-{digest(image.id, str(workdir), workspace.commit or '')}"
        copy = partial(self._images.copy, image, workdir)
        what = f"{workdir} of {image.name}"
        return image, workdir, await self._hold_copy(stack, key, copy, workspace.commit, what)

    def reap(self, directory: Path) -> int:
        """Remove containers and mounts that a killed process left below `directory`."""
        directory = Path.cwd() / directory
        records = find_records(directory, _RECORD, tuple[str, str])
        return sum(_reap(path, *record) for path, record in records) + super().reap(directory)

    def list_weaknesses(self) -> Sequence[str]:
        """Return the gaps of the engine's isolation. Raises `SandboxError` without an engine."""
        return self.inspect().list_weaknesses()

    def inspect(self) -> EngineInfo:
        """Probe the engine on this machine; later calls return the first result."""
        with self._probing:
            if self._info is None:
                engine = self.engine.find()
                what = f"{engine.kind} cannot run a container"
                info = self.engine.run_blocking(lambda docker: probe(docker, engine), what)
                if not info.rootless and os.geteuid() != 0:
                    raise SandboxError(_NOT_ROOT.format(kind=engine.kind))
                fields = {**msgspec.structs.asdict(info), "hardening": info.hardening is not None}
                _log.info("container engine", **fields)
                self._info = info
            return self._info


def _reap(record: Path, name: str, socket: str) -> int:
    """Remove the container of a record if name and label match; return how many were removed."""

    async def work(docker: Docker) -> int:
        labels = {"name": [name], "label": [f"{DIRECTORY}={record.parent}"]}
        containers = await docker.containers.list(all=True, filters=labels)
        for container in containers:
            await remove_container(docker, container.id)
        return len(containers)

    try:
        count = ContainerEngine(f"unix://{socket}").run_blocking(work)
    except SandboxError as error:
        _log.warning("container not reaped", container=name, error=str(error))
        return 0
    record.unlink(missing_ok=True)
    return count


class ContainerSandbox(IsolatedSandbox):
    """A container as sandbox."""

    def __init__(self, layout: Layout, runtime: Container, image: ContainerImage) -> None:
        super().__init__(layout, runtime.limits, runtime.allow, None)
        if not runtime.read_only:
            del self._folders[_TMP]
        self._runtime = runtime
        self._image = image
        self._user = image.user if runtime.user is None else runtime.user
        self._is_root = self._user.partition(":")[0] in {"", "0", "root"}
        self._name = f"tugline-{secrets.token_hex(8)}"
        self._started = False
        self._upper: list[Path] = []
        """Folder of the container's writable layer; empty if the engine does not report one."""

    async def aclose(self) -> None:
        """Remove the container and unmount its workspace; its folders stay."""
        await self._forwards.aclose()
        try:
            if (self._directory / _RECORD).exists():
                async with self._call_engine("removed") as docker:
                    await remove_container(docker, self._name)
                (self._directory / _RECORD).unlink()
        except SandboxError as error:  # does not invalidate the result; `reap` tries again
            _log.warning("container not removed", container=self._name, error=str(error))
        finally:
            await self._guard.end()
            if self._runner is not None:
                self._runner.close()
            await asyncio.to_thread(self._clean_up)

    def _create(self) -> None:
        super()._create()
        (self._directory / "control").mkdir(exist_ok=True)  # must exist before Docker's create
        if not self._is_root:  # only the image knows the number of its user
            for folder in self._folders.values():
                folder.chmod(0o777)

    async def start(self) -> None:
        """Create the folders and the container, and start it."""
        await finish(asyncio.to_thread(self._create))
        await finish(self._create_container())
        await self._ensure_started()

    async def _create_container(self) -> None:
        async with self._call_engine("made") as docker:
            engine = await asyncio.to_thread(self._runtime.engine.find)
            record = msgspec.json.encode((self._name, engine.socket))
            await asyncio.to_thread(files.replace_file, self._directory / _RECORD, record)
            config = await asyncio.to_thread(self._config)
            await docker.containers.create(config, name=self._name)

    async def _start(self, runner: Runner) -> None:
        async with self._call_engine("started") as docker:
            container = docker.containers.container(self._name)
            self._started = True
            try:
                await container.start()
            except DockerError as error:
                if "/bin/sh" not in str(error.message):
                    raise
                msg = f"image {self._image.name!r} has no /bin/sh, which is needed to run programs"
                raise ImageError(msg) from error
            details = await container.show()
        self._pid = int(details["State"]["Pid"])
        upper = ((details.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
        self._upper = [Path(upper)] if upper else []
        self._cgroup = await asyncio.to_thread(cgroup_of, self._pid)
        await self._guard.watch(self._pid)
        await runner.wait_ready()
        await asyncio.to_thread(limit_terminals, self._pid)

    async def _kill_processes(self) -> None:
        """Kill all processes with SIGKILL; the container is kept."""
        if self._started:
            async with self._call_engine("killed") as docker:
                container = docker.containers.container(self._name)
                with contextlib.suppress(DockerError):  # it has ended already
                    await container.kill(signal="KILL")
                await container.wait()
            self._started = False
        await self._guard.end()

    async def _run_monitored(self, program: Callable[[], Awaitable[Exit]]) -> Exit:
        began = time.monotonic()
        try:
            return await super()._run_monitored(program)
        except SandboxEnded:  # its control group, with the count of kills, is gone
            async with self._call_engine("inspected") as docker:
                state = (await docker.containers.container(self._name).show())["State"]
            if not state.get("OOMKilled"):
                raise
            return Exit(KILLED, False, time.monotonic() - began, Cause.AGENT_MEMORY)

    def _writable_folders(self) -> list[Path]:
        return [*super()._writable_folders(), *self._upper]

    def _call_engine(self, done: str) -> contextlib.AbstractAsyncContextManager[Docker]:
        return self._runtime.engine.client(f"container {self._name} cannot be {done}")

    # ------------------------------------------------------------------ its configuration
    def _config(self) -> dict[str, Any]:
        return {
            "Image": self._image.id,
            "Entrypoint": list(ARGV),
            "Cmd": [],
            "User": self._user,
            "WorkingDir": str(self.workdir),
            "Env": [f"HOME={HOME}", "LANG=C.UTF-8"],
            "Labels": {LABEL: "sandbox", DIRECTORY: str(self._directory)},
            "Healthcheck": {"Test": ["NONE"]},  # disables the image's, which would run programs
            "StopSignal": "SIGKILL",
            "HostConfig": self._host_config(),
        }

    def _host_config(self) -> dict[str, Any]:
        limits = self._limits
        runtime = self._runtime
        supported = runtime.inspect().hardening
        hardening = supported.host_config() if supported else {}
        # No SELinux labels: harness and workspaces are shared and cannot be relabelled for each.
        security = ["no-new-privileges", "label=disable", *hardening.pop("SecurityOpt", ())]
        return {
            "NetworkMode": "none",
            "Mounts": self._binds(),
            "Memory": limits.memory_mb << 20,
            "MemorySwap": limits.memory_mb << 20,
            "PidsLimit": limits.processes,
            "OomScoreAdj": OOM_SCORE,
            "NanoCpus": int((runtime.cpus or 0) * 1e9),
            "Ulimits": ulimits(runtime.engine.find().process),
            "CapDrop": ["ALL"],
            "CapAdd": _CAPABILITIES if self._is_root else [],  # Podman gives them to any user
            "SecurityOpt": security,
            **hardening,
            "ReadonlyRootfs": runtime.read_only,
            "LogConfig": {"Type": "none"},
        }

    def _binds(self) -> list[dict[str, Any]]:
        control = {PurePosixPath(CONTROL): self._directory / "control"}
        sources: dict[PurePosixPath, Path | str] = {**self._folders, **control, **self._read_only}
        return [
            bind(source, target, read_only=target not in self._folders)
            for target, source in sources.items()
        ]
