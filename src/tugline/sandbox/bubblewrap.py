"""Run agents in bubblewrap sandboxes, which need no image and no daemon and start in milliseconds.

Programs see their workdir, a home and a ``/tmp`` of their own, a network that has only forwarded
ports (`network`), and of this machine only: system folders, read-only; the parts of ``/etc`` that
programs need to start, to use TLS and to know the time; a ``/proc`` without process 1 (the runner's
shell) and without the kernel's internals; a ``/dev`` of harmless devices; this Python with its
packages, at its own path and first on PATH. All namespaces are unshared.

The sandbox's files are in its directory on this machine: ``work``, or ``upper`` and ``scratch``
over a base, which is mounted in a mount namespace of the sandbox.

A sandbox dies with this process, even if it is killed (`--die-with-parent` and the runner's pipe).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Annotated

import msgspec
import psutil
from msgspec import Meta

from tugline import log
from tugline.aio import finish
from tugline.errors import SandboxError, UsageError
from tugline.sandbox import files, host, limits, quotas, stage
from tugline.sandbox.base import SandboxSpec, refuse_fields
from tugline.sandbox.bubblewrap_start import IDENTITY, Launch, prepare, try_pools
from tugline.sandbox.cache import cache_folder
from tugline.sandbox.hardening import bpf_filter
from tugline.sandbox.network import AllowList
from tugline.sandbox.processes import ChildProcess, close_all, try_command, wait_readable
from tugline.sandbox.runner import ARGV, CONTROL, Runner
from tugline.sandbox.view import LAST_ARGUMENTS, copy_etc, first_arguments, shows, visible_folders
from tugline.schema import PositiveFloat

_SYSTEM_FOLDERS = frozenset(
    {"bin", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr"}
)
_INFO_S = 10.0
_PID = re.compile(rb'"child-pid": (\d+)')
_HINT = (
    "user namespaces may be disabled for this user: sysctl kernel.unprivileged_userns_clone=1, on "
    "Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in a container, run it with "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
)
_INSTEAD = "; tasks with `runtime: local` run without isolation"


_log = log.get("sandbox")


class _Machine(msgspec.Struct, frozen=True):
    """Settings shared by all sandboxes of a runtime on this machine."""

    first_arguments: tuple[str, ...]
    """Arguments of bwrap before the mount of ``/tmp``."""
    visible_folders: tuple[str, ...]
    """Arguments of bwrap after the mount of ``/tmp``."""
    seccomp: bytes
    """Compiled filter of system calls; empty on an unsupported processor."""
    cgroup_parent: limits.Cgroup
    pools: tuple[quotas.NamespacePool, ...]
    """User namespaces, the best first; empty if bwrap has to create them, without limits."""


class Bubblewrap(host.HostRuntime):
    """Opens bubblewrap sandboxes. The default runtime of tasks.

    There is no fallback where it does not work: an agent without isolation has the rights of the
    node's user and could read its tokens. A task must request that by ``runtime: local``.

    `allow` lists hosts that programs may reach, such as ``example.org:443``; `readable` lists
    folders of this machine that programs see read-only; `cache_gb` limits the cache of workspaces.
    The other options are those of `ProgramLimits`.
    """

    def __init__(
        self,
        *,
        allow: Sequence[str] = (),
        readable: Sequence[Annotated[str, Meta(pattern="^/.")]] = (),
        cache_gb: PositiveFloat = 50.0,
        **bounds: int,
    ) -> None:
        super().__init__(cache_gb)
        self.limits = limits.check_limits("bubblewrap", **bounds)
        self.allow = AllowList(allow)
        self._readable = tuple(readable)
        self._machine: _Machine | None = None

    async def _create(
        self, directory: Path, spec: SandboxSpec, stack: contextlib.AsyncExitStack
    ) -> BubblewrapSandbox:
        workdir = _check(spec)
        machine = self._machine
        if machine is None:
            machine = await asyncio.to_thread(self.inspect)
        base = await self._prepare(spec.workspace, stack)
        layout = host.Layout(directory, spec, base, workdir, shows)
        return BubblewrapSandbox(layout, self, machine)

    def check_spec(self, spec: SandboxSpec) -> None:
        """Raise `UsageError` for fields of the workspace that this runtime does not support."""
        _check(spec)

    def reap(self, directory: Path) -> int:
        """Kill and remove what is left of sandboxes; running ones have died with their parent."""
        strays = kill_strays(Path.cwd() / directory) if sys.platform == "linux" else 0
        return strays + super().reap(directory)

    def list_weaknesses(self) -> Sequence[str]:
        """Return the limits and filters that are not in force on this machine."""
        machine = self._machine or self.inspect()
        lines = limits.list_unenforced(machine.cgroup_parent)
        best = machine.pools[0] if machine.pools else None
        own_users = best is not None and best.own_users
        lines += quotas.list_shared(namespaces=best is not None, own_users=own_users)
        if not machine.seccomp:
            lines.append("system calls are not filtered on this processor architecture")
        if self.allow.patterns:
            lines.append(
                "hosts on the allow-list can be reached, and through them any host to "
                "which they forward"
            )
        if os.geteuid() == 0 and not own_users:
            lines.append(
                "sandboxes run as root without its privileges; running Tugline as a normal "
                "user is safer"
            )
        return lines

    def inspect(self) -> _Machine:
        """Try to start a sandbox."""
        if sys.platform != "linux":
            raise SandboxError(f"bubblewrap needs Linux{_INSTEAD}")
        if shutil.which("bwrap") is None:
            where = "apt install bubblewrap, dnf install bubblewrap"
            raise SandboxError(f"bwrap is not on the PATH: {where}{_INSTEAD}")
        where = f"bubblewrap cannot write to {cache_folder()}; set TUGLINE_CACHE to another folder"
        with files.translate_errors(where):
            etc = copy_etc(cache_folder() / "etc")
        first = first_arguments(etc)
        visible = visible_folders(self._readable)
        argv = [*first, *visible, *LAST_ARGUMENTS, "/bin/sh", "-c", "exit 0"]
        if problem := try_command(["bwrap", *IDENTITY, *argv]):
            raise SandboxError(f"bwrap cannot start a sandbox ({problem}); {_HINT}{_INSTEAD}")
        cgroup_parent = limits.find_cgroup_parent()
        pools = tuple(try_pools(argv))
        self._machine = _Machine(tuple(first), tuple(visible), bpf_filter(), cgroup_parent, pools)
        return self._machine


class BubblewrapSandbox(host.IsolatedSandbox):
    """A bubblewrap sandbox."""

    def __init__(self, layout: host.Layout, runtime: Bubblewrap, machine: _Machine) -> None:
        super().__init__(layout, runtime.limits, runtime.allow, machine.cgroup_parent)
        self._machine = machine
        self._child: ChildProcess | None = None
        self._info = self._pidfd = -1
        """Pipe by which bwrap reports the pid of process 1, and a pidfd of that process."""
        self._pools = list(machine.pools)
        """The first is that of `_namespaces`."""
        self._namespaces: quotas.UserNamespaces | None = None
        self._launch = Launch((), ())

    async def _start(self, runner: Runner) -> None:
        await finish(asyncio.to_thread(self._prepare_launch))
        self._child = self._spawn(self._launch)
        self._launch.close()
        try:
            await runner.wait_ready(self._child.ended)
            await self._find_first_process()
        except SandboxError as error:
            msg = f"bubblewrap could not start a sandbox: {self._child.read_output() or error}"
            raise SandboxError(msg) from error

    def _prepare_launch(self) -> None:
        """Take user namespaces and mount what must be mounted before the start. Blocks."""
        self._launch.close()
        with files.translate_errors("cannot prepare the start of bubblewrap"):
            if self._namespaces is None and self._pools:
                self._namespaces = self._pools[0].take()
            try:
                self._launch = prepare(
                    self._namespaces,
                    self._arguments(),
                    limits.rlimit_command(self._limits, self._machine.cgroup_parent),
                    self._directory,
                    self._workspace,
                )
            except stage.CannotMapError as error:
                _warn_once(str(error))
                self._return_namespaces()
                del self._pools[0]
                self._prepare_launch()

    def _return_namespaces(self) -> None:
        if self._namespaces is not None:
            self._pools[0].give_back(self._namespaces)
            self._namespaces = None

    def _spawn(self, launch: Launch) -> ChildProcess:
        """Start bwrap."""
        self._info, write_info = os.pipe()
        rules = os.memfd_create("seccomp")
        try:
            os.write(rules, self._machine.seccomp)
            os.lseek(rules, 0, os.SEEK_SET)
            filter_ = ("--seccomp", str(rules)) if self._machine.seccomp else ()
            command = (*launch.command, "--info-fd", str(write_info), *filter_)
            descriptors = (write_info, rules, *launch.descriptors)
            return ChildProcess((*command, *launch.arguments, *ARGV), descriptors=descriptors)
        except OSError as error:
            raise SandboxError(f"bubblewrap cannot be started: {error.strerror}") from error
        finally:
            os.close(write_info)
            os.close(rules)

    async def _kill_processes(self) -> None:
        """Kill the sandbox and wait until the kernel has removed its last process.

        Raises `SandboxError` if a process hangs in the kernel.
        """
        if self._child is not None:
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                await self._find_first_process()
                if self._pidfd >= 0:
                    # bwrap waits for this process, and then ends by itself.
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                    await asyncio.wait([self._child.ended], timeout=_INFO_S)
            await self._child.end()
        close_all(self._info, self._pidfd)
        self._child = None
        self._info = -1
        self._pidfd = -1

    async def _find_first_process(self) -> None:
        """Get a handle of process 1, whose pid bwrap reports as soon as it exists.

        This is needed before killing a sandbox during its start as well: at that time process 1
        does not die with bwrap yet, and would wait for ever. Raises `TimeoutError`.
        """
        if self._pidfd >= 0 or self._child is None or self._child.ended.done():
            return
        await asyncio.wait_for(wait_readable(self._info), _INFO_S)
        if match := _PID.search(os.read(self._info, 4096)):
            self._pid = int(match[1])
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(self._pid)

    async def _locate(self, path: PurePath) -> Mapping[PurePosixPath, Path]:
        """Return the writable folders; an overlay is only visible in the started sandbox."""
        if self._workspace.lower is None or not path.is_relative_to(self.workdir):
            return self._folders
        await self._ensure_started()
        return {**self._folders, self.workdir: Path(f"/proc/{self._pid}/root{self.workdir}")}

    def _arguments(self) -> list[str]:
        tmp = PurePosixPath("/tmp")  # noqa: S108 - the sandbox's own
        arguments = [*self._machine.first_arguments]
        arguments += ["--ro-bind", str(self._directory / "control"), CONTROL]
        arguments += ["--bind", str(self._folders[tmp]), str(tmp), *self._machine.visible_folders]
        binds = {target: ("--ro-bind", source) for target, source in self._read_only.items()}
        binds |= {target: ("--bind", str(folder)) for target, folder in self._folders.items()}
        del binds[tmp]
        for target in sorted(binds, key=lambda path: len(path.parts)):  # parents before children
            arguments += [*binds[target], str(target)]
        return [*arguments, *LAST_ARGUMENTS]

    def _mount_workspace(self) -> None:
        """Do nothing: each start mounts the workspace in a new namespace."""

    def _apply_limits(self, cgroup_parent: limits.Cgroup) -> None:
        if self._namespaces is not None and self._namespaces.user:
            limits.lower_priority(self._pid)  # rlimits are set by the command that starts it
            self._own_cgroup.add(self._pid)
        else:
            super()._apply_limits(cgroup_parent)
            quotas.limit_queues(self._pid)
        quotas.limit_terminals(self._pid)

    def _clean_up(self) -> None:
        self._launch.close()
        self._return_namespaces()
        self._own_cgroup.remove()
        if not self._directory.is_dir():  # creating it failed
            return
        useless = {"control", "tmp", "scratch"}
        if self._monitor.over_limit:
            useless |= {"home", "upper"}
            useless |= {"work"} if self._workspace.lower is None else set()
        with files.translate_errors(f"cannot clear {self._directory}"):
            for name in useless:
                files.remove(self._directory, name)


@functools.cache
def _warn_once(error: str) -> None:
    _log.warning("sandboxes share a kernel user and its quotas", error=error)


def _check(spec: SandboxSpec) -> PurePosixPath:
    """Return the workdir. Raises `UsageError` for an unsupported workspace."""
    refuse_fields("bubblewrap", spec.workspace, image="container", build="container")
    workdir = host.resolve_workdir(spec.workspace)
    if len(workdir.parts) == 1 or workdir.parts[1] in _SYSTEM_FOLDERS:
        path = spec.workspace.path
        msg = f"workspace.path is {path!r}, must be absolute and outside the system directories"
        raise UsageError(msg)
    return workdir


def kill_strays(directory: Path) -> int:
    """Kill sandboxes under `directory` that a killed process was starting; return their number.

    bwrap dies with its parent, but for a moment during the start its child does not.
    """
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            folders = [stage.find_source(word) for word in words if word.endswith("/control")]
            if "--info-fd" in words and any(path.is_relative_to(directory) for path in folders):
                process.kill()
                count += 1
    return count
