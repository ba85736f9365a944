"""Run agents in Apptainer containers: images without a daemon and without root, as on HPC clusters.

An image is a sandbox directory: given as one, or made once of whatever ``apptainer build`` takes
(``docker://...``, a ``.sif`` file) and kept in the cache of bases. One ``apptainer exec`` runs the
shell of `runner.py` as process 1 of a container with nothing of this machine in it (no home, no
``/tmp``, no environment) and, where it may, with a network of its own that has only the doors that
were asked for. The box's folders lie in its directory on this machine and are bound in; the root is
the image's, writable in memory only.

`--memory` and the like need systemd: what one box may take is bounded as in `limits.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from tugline.errors import ConfigError, DiskFull, ImageError, SandboxError, UsageError
from tugline.sandbox.apptainer import sandbox as contained
from tugline.sandbox.apptainer.hardening import Hardening
from tugline.sandbox.apptainer.sandbox import ApptainerSandbox
from tugline.sandbox.base import HOME, WORKDIR, Runtime, SandboxSpec
from tugline.sandbox.exec import limits
from tugline.sandbox.exec.limits import Limits
from tugline.sandbox.exec.processes import Child, finish, records
from tugline.sandbox.network.proxy import AllowList
from tugline.sandbox.workspace.cache import WorkspaceCache, digest
from tugline.sandbox.workspace.history import end_history
from tugline.sandbox.workspace.mounts import copy, unmount_all
from tugline.sandbox.workspace.overlay import OverlayWorkspace
from tugline.types import Workspace

_BUILD_S = 1800.0
_PROBE_S = 20.0
_HOW = (
    "there is no apptainer on PATH: see https://apptainer.org/docs/admin/main/installation.html "
    "(packages for RHEL, Ubuntu, openSUSE and Debian sid; most HPC clusters have it as a module)"
)


class Apptainer(Runtime):
    """Boxes that are Apptainer containers.

    `image` is for workspaces without one; `network` is "none", or "host" where Apptainer may make
    no network here: programs then reach whatever this machine reaches. `allow` names hosts that may
    be reached from "none". The other options are those of `Limits`.
    """

    def __init__(
        self,
        *,
        image: str | None = None,
        network: str = "none",
        allow: Sequence[str] = (),
        bases_gb: float = 50.0,
        **bounds: int,
    ) -> None:
        if network not in {"none", "host"}:
            msg = f"runtime 'apptainer': network is {network!r}, must be 'none' or 'host'"
            raise ConfigError(msg)
        try:
            self._limits = Limits(**bounds)
        except TypeError as error:
            known = ", ".join(Limits.__struct_fields__)
            msg = f"runtime 'apptainer': {error}; limits are {known}"
            raise ConfigError(msg) from error
        self._limits.check("apptainer")
        self._image, self._network, self._allow = image, network, AllowList(allow)
        self._bases = WorkspaceCache(most_gb=bases_gb)
        self._usable, self._guard = False, Hardening()

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[ApptainerSandbox]:
        """A container of the workspace's image, with its files bound in."""
        spec = spec or SandboxSpec()
        if not self._usable and (why := await asyncio.to_thread(self.check_available)):
            raise SandboxError(why)
        self._usable = True
        workdir = _workdir(spec.workspace)
        directory = Path.cwd() / directory
        async with contextlib.AsyncExitStack() as kept:
            image = await self._have(spec.workspace, kept)
            base = await self._base(spec.workspace, image, workdir, kept)
            layer = OverlayWorkspace(directory, base, spec.files, spec.snapshot)
            where = await asyncio.to_thread(limits.places)
            mounts = [one for one in spec.mounts if not (one.optional and _has(image, one.target))]
            allow = self._allow if self._network == "none" else None
            bounds, guard = self._limits, self._guard
            box = ApptainerSandbox(
                directory, image, workdir, layer, mounts, allow, bounds, where, guard
            )
            try:
                await finish(asyncio.create_task(asyncio.to_thread(box.make)))
                await box.up()
                yield box
            finally:
                await finish(asyncio.create_task(box.aclose()))

    def reap(self, directory: Path) -> int:
        """End containers that a killed process left, and remove their mounts and groups."""
        ended = sum(contained.reap(record) for record in records(directory, contained.RECORD))
        ended += sum(limits.reap(record) for record in records(directory, limits.RECORD))
        return ended + unmount_all(Path.cwd() / directory)

    def check_available(self) -> str | None:
        """Whether there is a program that says its version."""
        if shutil.which("apptainer") is None:
            return _HOW
        try:
            done = subprocess.run(
                ["apptainer", "--version"], capture_output=True, timeout=_PROBE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"apptainer cannot be used here: {error}"
        return f"apptainer does not run here: {_end(done.stderr)}" if done.returncode else None

    def list_weaknesses(self) -> Sequence[str]:
        """What is not kept apart."""
        lines = [*limits.unenforced(limits.places()), *self._guard.list_weaknesses()]
        if self._network == "host":
            lines.append("the network is open (network='host')")
        return lines

    async def _have(self, workspace: Workspace, kept: contextlib.AsyncExitStack) -> Path:
        """The image as a sandbox directory."""
        if workspace.build is not None:
            msg = "runtime 'apptainer' builds no Dockerfile (workspace.build); give workspace.image"
            raise UsageError(msg)
        image = workspace.image or self._image
        if image is None:
            msg = (
                "runtime 'apptainer' needs workspace.image: a sandbox directory, or what"
                " `apptainer build` takes, such as 'docker://python:3.12-slim'"
            )
            raise UsageError(msg)
        if await asyncio.to_thread(Path(image).is_dir):
            return Path.cwd() / image
        stamp = await asyncio.to_thread(_stamp, image)
        key = f"apptainer-{digest(image, stamp)}"
        filled = self._bases.filled(key, partial(_build, image), f"image {image}")
        return await kept.enter_async_context(filled)

    async def _base(
        self,
        workspace: Workspace,
        image: Path,
        workdir: PurePosixPath,
        kept: contextlib.AsyncExitStack,
    ) -> Path | None:
        """What the workdir holds at first: repository, folder, or what the image has there."""
        base = await kept.enter_async_context(self._bases.open(workspace))
        inside = image / workdir.relative_to("/")
        if base is not None or not await asyncio.to_thread(inside.is_dir):
            return base
        if workspace.commit is None:
            return inside
        key = f"apptainer-{digest(str(image), str(workdir), workspace.commit)}"
        fill = partial(_copied, inside, workspace.commit)
        return await kept.enter_async_context(self._bases.filled(key, fill, str(inside)))


async def _build(image: str, into: Path) -> None:
    """Make a sandbox directory of an image."""
    argv = ["apptainer", "--silent", "build", "--force", "--sandbox", str(into), image]
    child = Child(argv)
    try:
        async with asyncio.timeout(_BUILD_S):
            code = await asyncio.shield(child.ended)
    except TimeoutError as error:
        msg = f"image {image!r} was not had within {_BUILD_S:.0f} s"
        raise ImageError(msg) from error
    finally:
        if not child.ended.done():
            os.killpg(child.pid, signal.SIGKILL)
            await asyncio.wait([child.ended])
        said = child.said()
        child.close()
    if code:
        msg = f"image {image!r} cannot be had: apptainer says: {said[-300:]}"
        raise DiskFull(msg) if "no space left" in said.lower() else ImageError(msg)


async def _copied(folder: Path, commit: str, into: Path) -> None:
    await asyncio.to_thread(copy, folder, into)
    await asyncio.to_thread(end_history, into, commit, str(folder))


def _workdir(workspace: Workspace) -> PurePosixPath:
    workdir = PurePosixPath(workspace.path or WORKDIR)
    if not workdir.is_absolute() or ".." in workdir.parts or workdir in {HOME, *HOME.parents}:
        msg = f"workspace.path is {str(workdir)!r}, must be an absolute folder other than {HOME}"
        raise UsageError(msg)
    return workdir


def _has(image: Path, target: str) -> bool:
    """Whether the image has something there; its links lead within it."""
    here = image
    for name in PurePosixPath(target).relative_to("/").parts:
        here /= name
        if here.is_symlink():
            to = PurePosixPath(here.readlink())
            here = image / to.relative_to("/") if to.is_absolute() else here.parent / to
    return here.exists()


def _stamp(image: str) -> str:
    """When a file was changed; nothing for what is fetched."""
    with contextlib.suppress(OSError):
        return str(Path(image).stat().st_mtime_ns)
    return ""


def _end(said: bytes) -> str:
    return said.decode(errors="replace").strip()[-300:]
