"""Run agents in bubblewrap sandboxes: all namespaces, a few milliseconds, no image, no daemon.

Programs see the system's folders read-only (`view`), their workdir, a home and a ``/tmp`` of their
own, and a network with nothing in it but doors that were asked for (`network.doors`). Process 1 is
the runner's shell. The box's files lie in its directory on this machine: ``work``, or ``upper``
and ``scratch`` over a base that is mounted in a mount namespace of the sandbox's own, so that
nothing is mounted on this machine.

A sandbox lives as long as its box unless a program outlives its time or its share: then all of it
is killed, and the next program gets a new one with the same files. It dies with this process,
whatever kills that (`--die-with-parent`, and the runner's pipe).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path, PurePosixPath

from tugline.errors import ConfigError, SandboxError, UsageError
from tugline.sandbox.base import HOME, WORKDIR, Runtime, SandboxSpec
from tugline.sandbox.bubblewrap import view
from tugline.sandbox.bubblewrap.command import end_strays
from tugline.sandbox.bubblewrap.sandbox import BubblewrapSandbox, Ground
from tugline.sandbox.bubblewrap.seccomp import seccomp
from tugline.sandbox.cache import cache_folder
from tugline.sandbox.exec import limits
from tugline.sandbox.exec.limits import Limits
from tugline.sandbox.exec.processes import finish, records
from tugline.sandbox.network.proxy import AllowList
from tugline.sandbox.workspace.cache import WorkspaceCache
from tugline.sandbox.workspace.overlay import OverlayWorkspace
from tugline.types import Workspace

_TAKEN = frozenset(
    {"bin", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr"}
)
_PROBE_S = 20.0
_HINT = (
    "user namespaces may be off for this user: sysctl kernel.unprivileged_userns_clone=1, on "
    "Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in a container, run it with "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
)


class Bubblewrap(Runtime):
    """Boxes that are bubblewrap sandboxes.

    `allow` names hosts that programs may reach, such as ``example.org:443``; `readable` are folders
    of this machine that they see, read-only; `bases_gb` bounds the cache of workspaces. The other
    options are those of `Limits`.
    """

    def __init__(  # noqa: PLR0913 - the options of a task's runtime, by name
        self,
        *,
        memory_mb: int = 8192,
        processes: int = 1024,
        disk_mb: int = 10_240,
        file_mb: int = 4096,
        cpu_s: int = 7200,
        open_files: int = 4096,
        output_mb: int = 64,
        allow: Sequence[str] = (),
        readable: Sequence[str] = (),
        bases_gb: float = 50.0,
    ) -> None:
        self._limits = Limits(
            memory_mb=memory_mb,
            processes=processes,
            disk_mb=disk_mb,
            file_mb=file_mb,
            cpu_s=cpu_s,
            open_files=open_files,
            output_mb=output_mb,
        )
        self._limits.check("bubblewrap")
        self._allow = AllowList(allow)
        self._readable = _checked(readable)
        self._bases = WorkspaceCache(most_gb=bases_gb)
        self._ground: Ground | None = None

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[BubblewrapSandbox]:
        """A box under `directory`, whose sandbox runs when it is given."""
        spec = spec or SandboxSpec()
        _check(spec.workspace)
        ground = self._look() if self._ground else await asyncio.to_thread(self._look)
        async with self._bases.open(spec.workspace) as base:
            layer = OverlayWorkspace(
                directory := Path.cwd() / directory, base, spec.files, spec.snapshot
            )
            box = BubblewrapSandbox(directory, spec, layer, self._limits, self._allow, ground)
            try:
                await box.start()
                yield box
            finally:
                await finish(asyncio.create_task(box.aclose()))

    async def prefetch(self, workspaces: Iterable[Workspace]) -> list[str]:
        """Have repositories checked out; returns why, for each that cannot be had."""
        return await self._bases.prefetch(workspaces)

    def reap(self, directory: Path) -> int:
        """End and remove what is left of sandboxes; those that ran have died with their parent."""
        strays = end_strays(Path.cwd() / directory) if sys.platform == "linux" else 0
        return strays + sum(limits.reap(record) for record in records(directory, limits.RECORD))

    def check_available(self) -> str | None:
        """Tried by starting one."""
        if sys.platform != "linux":
            return "bubblewrap needs Linux"
        if shutil.which("bwrap") is None:
            return "there is no bwrap on PATH: apt install bubblewrap, dnf install bubblewrap"
        try:
            ground = self._look()
            done = subprocess.run(
                [
                    "bwrap",
                    *ground.arguments,
                    *ground.shown,
                    *view.closing(),
                    "/bin/sh",
                    "-c",
                    "exit 0",
                ],
                capture_output=True,
                timeout=_PROBE_S,
                check=False,
            )
        except (OSError, SandboxError, subprocess.TimeoutExpired) as error:
            return f"bwrap cannot be used here: {error}"
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            return f"bwrap cannot make a sandbox here ({said}); {_HINT}"
        return None

    def list_weaknesses(self) -> Sequence[str]:
        """Limits that nothing enforces here, and what is not filtered."""
        lines = limits.unenforced(self._look().places)
        if not self._look().filter:
            lines.append("system calls are not filtered on this kind of processor")
        if self._allow.patterns:
            lines.append("hosts of the allow-list are reached, and whatever they pass on")
        if os.geteuid() == 0:
            lines.append("sandboxes are run by root, without its rights: a normal user is safer")
        return lines

    def _look(self) -> Ground:
        """Blocks the first time."""
        if self._ground is None:
            try:
                etc = view.copied_etc(cache_folder() / "etc")
            except OSError as error:
                place = f"{cache_folder()}: {error.strerror}; set TUGLINE_CACHE elsewhere"
                msg = f"cannot write to {place}"
                raise SandboxError(msg) from error
            first, shown = view.arguments(etc), view.shown(self._readable)
            self._ground = Ground(tuple(first), tuple(shown), seccomp(), limits.places())
        return self._ground


def _check(workspace: Workspace) -> None:
    if workspace.image or workspace.build:
        name = "image" if workspace.image else "build"
        msg = f"runtime 'bubblewrap' has no container images (workspace.{name}); take 'container'"
        raise UsageError(msg)
    workdir = PurePosixPath(workspace.path or WORKDIR)
    parts = workdir.parts
    if parts[0] != "/" or len(parts) == 1 or ".." in parts or parts[1] in _TAKEN:
        msg = f"workspace.path is {workspace.path!r}, must be absolute and no folder of the system"
        raise UsageError(msg)
    if workdir in {HOME, *HOME.parents}:
        msg = f"workspace.path is {str(workdir)!r}, must be an absolute folder other than {HOME}"
        raise UsageError(msg)


def _checked(readable: Sequence[str]) -> tuple[str, ...]:
    wrong = [one for one in readable if not (isinstance(one, str) and Path(one).is_absolute())]
    if isinstance(readable, str) or wrong or "/" in readable:
        msg = f"runtime 'bubblewrap': readable is {readable!r}, must be a list of absolute paths"
        raise ConfigError(msg)
    return tuple(readable)
