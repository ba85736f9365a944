"""Run agents in Apptainer containers: images without a daemon and without root, as on HPC clusters.

An image is a sandbox directory: given as one, or built once from what ``apptainer build`` takes
(``docker://...``, a ``.sif`` file) and cached. An ``apptainer exec`` runs the runner's shell as
process 1 of a container without this machine's home, ``/tmp`` and environment and, if permitted,
with its own network of only forwarded ports. The sandbox's folders are in its directory on this
machine and are bind-mounted; the image's root is writable in memory only.

`--memory` and similar options need systemd, so `limits` sets the limits of resources.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal

import psutil

from tugline.errors import DiskFull, ImageError, SandboxError, UsageError
from tugline.sandbox import host, limits, quotas
from tugline.sandbox.base import HOME, SandboxSpec
from tugline.sandbox.cache import digest
from tugline.sandbox.hardening import ApptainerHardening
from tugline.sandbox.network import AllowList
from tugline.sandbox.overlay import copy
from tugline.sandbox.processes import ChildProcess, run_command, try_command
from tugline.sandbox.runner import ARGV, CONTROL, Runner
from tugline.schema import PositiveFloat
from tugline.types import Workspace

_BUILD_S = 1800.0
_KILL_S = 5.0
_ISOLATION = ("--containall", "--no-init", "--no-privs", "--writable-tmpfs", "--no-mount", "hostfs")
_NO_NETWORK = ("--net", "--network", "none")
_INSTALL = (
    "apptainer is not on the PATH: see https://apptainer.org/docs/admin/main/installation.html "
    "(packages for RHEL, Ubuntu, openSUSE and Debian sid; most HPC clusters have it as a module)"
)


class Apptainer(host.HostRuntime):
    """Opens Apptainer containers.

    `image` is the default for workspaces without one. `network` is "none", or "host" if Apptainer
    may not create networks on this machine: programs then reach all that this machine reaches.
    `allow` lists hosts that programs may reach with "none". `cache_gb` limits the cache of images
    and workspaces. The other options are those of `ProgramLimits`.
    """

    def __init__(
        self,
        *,
        image: str | None = None,
        network: Literal["none", "host"] = "none",
        allow: Sequence[str] = (),
        cache_gb: PositiveFloat = 50.0,
        **bounds: int,
    ) -> None:
        super().__init__(cache_gb)
        self.limits = limits.check_limits("apptainer", **bounds)
        self._image = image
        self.allow = AllowList(allow) if network == "none" else None
        self.hardening = ApptainerHardening()
        self._cgroup_parent: limits.Cgroup | None = None

    async def _create(
        self, directory: Path, spec: SandboxSpec, stack: contextlib.AsyncExitStack
    ) -> ApptainerSandbox:
        if self._cgroup_parent is None:
            self._cgroup_parent = await asyncio.to_thread(self.inspect)
        image, workdir, base = await self._prepare(spec.workspace, stack)
        layout = host.Layout(directory, spec, base, workdir, partial(_image_has, image))
        return ApptainerSandbox(layout, self, image, self._cgroup_parent)

    async def _prepare(
        self, workspace: Workspace, stack: contextlib.AsyncExitStack
    ) -> tuple[Path, PurePosixPath, Path | None]:
        """Return image, workdir and its base: a repository, a folder, or the image's folder."""
        workdir = host.resolve_workdir(workspace)
        image = await self._get_image(workspace, stack)
        base: Path | None = await super()._prepare(workspace, stack)
        image_folder = image / workdir.relative_to("/")
        if base is not None or not await asyncio.to_thread(image_folder.is_dir):
            return image, workdir, base
        if workspace.commit is None:
            return image, workdir, image_folder
        key = f"apptainer-{digest(str(image), str(workdir), workspace.commit)}"
        copying = lambda into: asyncio.to_thread(copy, image_folder, into)  # noqa: E731
        what = str(image_folder)
        return image, workdir, await self._hold_copy(stack, key, copying, workspace.commit, what)

    async def _get_image(self, workspace: Workspace, stack: contextlib.AsyncExitStack) -> Path:
        """Return the image as a sandbox directory."""
        if workspace.build is not None:
            msg = (
                "runtime 'apptainer' does not support workspace.build (a Dockerfile); set "
                "workspace.image"
            )
            raise UsageError(msg)
        image = workspace.image or self._image
        if image is None:
            raise UsageError(
                "runtime 'apptainer' needs workspace.image: a sandbox directory, or what"
                " `apptainer build` takes, such as 'docker://python:3.12-slim'"
            )
        if await asyncio.to_thread(Path(image).is_dir):
            return Path.cwd() / image
        key = f"apptainer-{digest(image, await asyncio.to_thread(_modified, image))}"
        entry = self._cache.entry(key, partial(_build, image), f"image {image}")
        return await stack.enter_async_context(entry)

    def inspect(self) -> limits.Cgroup:
        """Run ``apptainer --version``; return the control group in which groups can be created."""
        if shutil.which("apptainer") is None:
            raise SandboxError(_INSTALL)
        if problem := try_command(["apptainer", "--version"]):
            raise SandboxError(f"apptainer does not work on this machine: {problem}")
        return limits.find_cgroup_parent()

    def list_weaknesses(self) -> Sequence[str]:
        """Return the missing isolation, one line each."""
        lines = limits.list_unenforced(limits.find_cgroup_parent())
        lines += self.hardening.list_weaknesses()
        lines += quotas.list_shared(namespaces=False)
        if self.allow is None:
            lines.append("the network is open (network='host')")
        return lines


class ApptainerSandbox(host.IsolatedSandbox):
    """An Apptainer container."""

    def __init__(
        self, layout: host.Layout, runtime: Apptainer, image: Path, cgroup_parent: limits.Cgroup
    ) -> None:
        super().__init__(layout, runtime.limits, runtime.allow, cgroup_parent)
        self._image = image
        self._hardening = runtime.hardening
        self._child: ChildProcess | None = None

    async def _start(self, runner: Runner) -> None:
        command = await asyncio.to_thread(self.command)
        child = self._child = ChildProcess(command)
        try:
            await runner.wait_ready(child.ended)
        except SandboxError as error:
            output = child.read_output()
            if "--security" in command and self._hardening.give_up(output):
                return
            msg = (
                f"apptainer could not start a container of {self._image}: {output[-300:] or error}"
            )
            raise SandboxError(msg) from error
        self._pid = await asyncio.to_thread(find_first_process, child.pid)
        await self._guard.watch(self._pid)

    async def _kill_processes(self) -> None:
        """Kill process 1 with SIGKILL, and thereby all processes in its namespace."""
        if self._child is None:
            return
        if not self._child.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid or self._child.pid, signal.SIGKILL)
            await asyncio.wait([self._child.ended], timeout=_KILL_S)
        await self._child.end()
        await self._guard.end()
        self._child = None

    def command(self) -> list[str]:
        """Return the command that starts the container. Blocks."""
        argv = ["apptainer", "--silent", "exec", *_ISOLATION]
        argv += _NO_NETWORK if self._allow is not None else ()
        argv += ["--home", f"{self._folders[HOME]}:{HOME}", "--pwd", str(self.workdir)]
        argv += ["--env", "LANG=C.UTF-8", *self._hardening.options(self._directory)]
        binds = [f"{self._directory / 'control'}:{CONTROL}:ro"]
        binds += [f"{source}:{target}:ro" for target, source in self._read_only.items()]
        binds += [
            f"{folder}:{target}" for target, folder in self._folders.items() if target != HOME
        ]
        for bind in binds:
            argv += ["--bind", bind]
        return [*argv, str(self._image), *ARGV]


def find_first_process(pid: int) -> int:
    """Return the descendant of `pid` that is process 1 of another namespace. Blocks."""
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(pid)
        for process in (started, *started.children(recursive=True)):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                numbers = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                if len(numbers.split()) > 2 and numbers.split()[-1] == "1":
                    return int(process.pid)
    raise SandboxError(f"apptainer (process {pid}) has not created a process namespace")


async def _build(image: str, into: Path) -> None:
    """Build a sandbox directory from an image."""
    argv = ["apptainer", "--silent", "build", "--force", "--sandbox", str(into), image]
    try:
        code, _, output = await run_command(argv, timeout_s=_BUILD_S)
    except TimeoutError as error:
        raise ImageError(f"image {image!r} was not built within {_BUILD_S:.0f} s") from error
    if code:
        msg = f"image {image!r} cannot be built: apptainer says: {output[-300:]}"
        raise DiskFull(msg) if "no space left" in output.lower() else ImageError(msg)


def _image_has(image: Path, target: str) -> bool:
    """Return whether a path exists in the image; links are resolved inside the image."""
    path = image
    for name in PurePosixPath(target).relative_to("/").parts:
        path /= name
        if path.is_symlink():
            link = PurePosixPath(path.readlink())
            path = image / link.relative_to("/") if link.is_absolute() else path.parent / link
    return path.exists()


def _modified(image: str) -> str:
    """Return the mtime of an image file; empty for an image that is fetched."""
    with contextlib.suppress(OSError):
        return str(Path(image).stat().st_mtime_ns)
    return ""
