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
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Annotated

import msgspec
import psutil
from msgspec import Meta

from tugline.errors import SandboxError, UsageError
from tugline.sandbox import files, host, limits, quotas
from tugline.sandbox.base import HOME, SandboxSpec, refuse_fields
from tugline.sandbox.cache import cache_folder
from tugline.sandbox.hardening import bpf_filter
from tugline.sandbox.network import AllowList
from tugline.sandbox.processes import ChildProcess, close_all, finish, try_command, wait_readable
from tugline.sandbox.runner import ARGV, CONTROL, Runner
from tugline.sandbox.view import VIEW, copy_etc
from tugline.schema import PositiveFloat

_SYSTEM_FOLDERS = frozenset(
    {"bin", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr"}
)
_INFO_S = 10.0
_PID = re.compile(rb'"child-pid": (\d+)')
_HINT = (
    "user namespaces may be off for this user: sysctl kernel.unprivileged_userns_clone=1, on "
    "Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in a container, run it with "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
)
_INSTEAD = "; a task runs without isolation only where it says `runtime: local`"
_OVERLAY = Path(__file__).with_name("mount_overlay.sh").read_text(encoding="utf-8")


_IDENTITY = ("--unshare-user-try", "--uid", "1000", "--gid", "1000")
_NAMESPACES = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"),
    *("--hostname", "sandbox", "--cap-drop", "ALL"),
)
LAST_ARGUMENTS = ("--chdir", "/", "--remount-ro", "/")
"""Last arguments of bwrap, which make the root read-only."""
SHARED_MB = 256
"""Size of ``/dev/shm`` in MiB."""


class _Machine(msgspec.Struct, frozen=True):
    """Settings shared by all sandboxes of a runtime on this machine."""

    first_arguments: tuple[str, ...]
    """Arguments of bwrap before the mount of ``/tmp``."""
    visible_folders: tuple[str, ...]
    """Arguments of bwrap after the mount of ``/tmp``."""
    seccomp: bytes
    """Compiled filter of system calls; empty on an unsupported processor."""
    cgroup_parent: limits.Cgroup
    namespaces: quotas.NamespacePool | None
    """None if bwrap has to create user namespaces itself, in which no quota is limited."""


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

    def reap(self, directory: Path) -> int:
        """Kill and remove what is left of sandboxes; running ones have died with their parent."""
        strays = kill_strays(Path.cwd() / directory) if sys.platform == "linux" else 0
        return strays + super().reap(directory)

    def list_weaknesses(self) -> Sequence[str]:
        """Return the limits and filters that are not in force on this machine."""
        machine = self._machine or self.inspect()
        lines = limits.list_unenforced(machine.cgroup_parent)
        lines += quotas.list_shared(namespaces=machine.namespaces is not None)
        if not machine.seccomp:
            lines.append("system calls are not filtered on this kind of processor")
        if self.allow.patterns:
            lines.append("hosts on the allow-list can be reached, and all that they forward")
        if os.geteuid() == 0:
            lines.append("root runs the sandboxes, without its rights: a normal user is safer")
        return lines

    def inspect(self) -> _Machine:
        """Try to start a sandbox."""
        if sys.platform != "linux":
            raise SandboxError(f"bubblewrap needs Linux{_INSTEAD}")
        if shutil.which("bwrap") is None:
            where = "apt install bubblewrap, dnf install bubblewrap"
            raise SandboxError(f"there is no bwrap on PATH: {where}{_INSTEAD}")
        where = f"bubblewrap cannot write to {cache_folder()}, set TUGLINE_CACHE elsewhere"
        with files.translate_errors(where):
            etc = copy_etc(cache_folder() / "etc")
        first, visible = first_arguments(etc), visible_folders(self._readable)
        argv = [*first, *visible, *LAST_ARGUMENTS, "/bin/sh", "-c", "exit 0"]
        if problem := try_command(["bwrap", *_IDENTITY, *argv]):
            raise SandboxError(f"bwrap cannot start a sandbox ({problem}); {_HINT}{_INSTEAD}")
        cgroup_parent = limits.find_cgroup_parent()
        pool = _try_namespaces(argv)
        self._machine = _Machine(tuple(first), tuple(visible), bpf_filter(), cgroup_parent, pool)
        return self._machine


class BubblewrapSandbox(host.IsolatedSandbox):
    """A bubblewrap sandbox."""

    def __init__(self, layout: host.Layout, runtime: Bubblewrap, machine: _Machine) -> None:
        super().__init__(layout, runtime.limits, runtime.allow, machine.cgroup_parent)
        self._machine = machine
        self._child: ChildProcess | None = None
        self._info = self._pidfd = -1
        """Pipe by which bwrap reports the pid of process 1, and a pidfd of that process."""
        self._namespaces: quotas.UserNamespaces | None = None

    async def _start(self, runner: Runner) -> None:
        prefix = await finish(asyncio.to_thread(self._prefix))
        if self._machine.namespaces is not None and self._namespaces is None:
            await finish(asyncio.to_thread(self._take_namespaces, self._machine.namespaces))
        self._child = self._spawn(prefix)
        try:
            await runner.wait_ready(self._child.ended)
            await self._find_first_process()
        except SandboxError as error:
            msg = f"bubblewrap started no sandbox: {self._child.read_output() or error}"
            raise SandboxError(msg) from error

    def _take_namespaces(self, pool: quotas.NamespacePool) -> None:
        with files.translate_errors("cannot create user namespaces"):
            self._namespaces = pool.take()

    def _spawn(self, prefix: Sequence[str]) -> ChildProcess:
        """Start bwrap by the command `prefix`."""
        self._info, write_info = os.pipe()
        rules = os.memfd_create("seccomp")
        try:
            os.write(rules, self._machine.seccomp)
            os.lseek(rules, 0, os.SEEK_SET)
            filter_ = ("--seccomp", str(rules)) if self._machine.seccomp else ()
            command = (*prefix, "bwrap", "--info-fd", str(write_info), *filter_)
            own = self._namespaces
            identity = _IDENTITY if own is None else _in_namespaces(own)
            argv = (*command, *identity, *self._arguments(), *ARGV)
            return ChildProcess(argv, descriptors=(write_info, rules, *(own or ())))
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
        self._child, self._info, self._pidfd = None, -1, -1

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

    def _prefix(self) -> list[str]:
        """Return the command that mounts the overlay and then starts bwrap; empty without one."""
        if self._workspace.lower is None:
            return []
        private = os.geteuid() != 0
        unshare = ["unshare", "--mount", *(["--user", "--map-root-user"] if private else [])]
        options = self._workspace.mount_options(private=private)
        return [*unshare, "/bin/sh", "-c", _OVERLAY, "sh", options, str(self._workspace.work)]

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
        super()._apply_limits(cgroup_parent)
        quotas.limit_terminals(self._pid)
        quotas.limit_queues(self._pid)

    def _clean_up(self) -> None:
        if self._machine.namespaces is not None and self._namespaces is not None:
            self._machine.namespaces.give_back(self._namespaces)
            self._namespaces = None
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


def _try_namespaces(arguments: Sequence[str]) -> quotas.NamespacePool | None:
    """Return a pool of user namespaces if bwrap starts in them with these arguments."""
    if os.geteuid() != 0:  # an overlay is mounted in a user namespace of its own
        return None
    pool = quotas.NamespacePool()
    try:
        namespaces = pool.take()
    except OSError:
        return None
    pool.give_back(namespaces)
    if not try_command(["bwrap", *_in_namespaces(namespaces), *arguments], namespaces):
        return pool
    pool.close()
    return None


def _in_namespaces(namespaces: quotas.UserNamespaces) -> tuple[str, ...]:
    return ("--userns", str(namespaces.limited), "--userns2", str(namespaces.inner))


def _check(spec: SandboxSpec) -> PurePosixPath:
    """Return the workdir. Raises `UsageError` for an unsupported workspace."""
    refuse_fields("bubblewrap", spec.workspace, image="container", build="container")
    workdir = host.resolve_workdir(spec.workspace)
    if len(workdir.parts) == 1 or workdir.parts[1] in _SYSTEM_FOLDERS:
        path = spec.workspace.path
        msg = f"workspace.path is {path!r}, must be absolute and no folder of the system"
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
            folders = [Path(word) for word in words if word.endswith("/control")]
            if "--info-fd" in words and any(path.is_relative_to(directory) for path in folders):
                process.kill()
                count += 1
    return count


# --------------------------------------------------------------------------- arguments of bwrap
def first_arguments(etc: Path) -> list[str]:
    """Return the bwrap arguments shared by all sandboxes. `etc` is the result of `copy_etc`.

    The root stays writable until `LAST_ARGUMENTS` for the mounts between: ``/tmp``, then
    `visible_folders`.
    """
    args = [*_NAMESPACES, "--ro-bind", "/usr", "/usr", *_system_links()]
    args += ["--ro-bind", str(etc), "/etc"]
    args += ["--dev", "/dev", "--size", str(SHARED_MB << 20), "--tmpfs", "/dev/shm"]  # noqa: S108
    args += ["--remount-ro", "/dev", *_proc_arguments()]
    args += ["--setenv", "PATH", search_path(), "--setenv", "LANG", "C.UTF-8"]
    return [*args, "--setenv", "HOME", str(HOME), "--setenv", "TMPDIR", "/tmp"]  # noqa: S108


def visible_folders(readable: Sequence[str]) -> list[str]:
    """Return the mounts of folders at their own paths, also below ``/tmp`` or ``/var/tmp``."""
    visible = (*python_folders(), *readable)
    var_tmp = ["--symlink", "/tmp", "/var/tmp"]  # noqa: S108
    if any(Path(path).is_relative_to("/var/tmp") for path in visible):  # noqa: S108
        var_tmp = ["--size", str(SHARED_MB << 20), "--tmpfs", "/var/tmp"]  # noqa: S108
    return [*var_tmp, *(word for path in visible for word in ("--ro-bind", path, path))]


def python_folders() -> list[str]:
    """Return the folders that this Python is in, unless they are in ``/usr``."""
    executable = Path(sys.executable)
    folders = [sys.prefix, sys.base_prefix, str(executable.resolve().parent.parent)]
    outside = dict.fromkeys(path for path in folders if not Path(path).is_relative_to("/usr"))
    return [path for path in outside if path != "/"]


def search_path() -> str:
    """Return the PATH of programs."""
    system = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
    return os.pathsep.join([f"{sys.prefix}/bin", *system])


def shows(target: str) -> bool:
    """Return whether `target` is visible without being mounted, such as a C library."""
    return Path(target).exists() and Path(target).resolve().is_relative_to("/usr")


def _system_links() -> Iterator[str]:
    for name in VIEW.links:
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))  # noqa: PTH115
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))


def _proc_arguments() -> Iterator[str]:
    yield from ("--proc", "/proc", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
    # bwrap run by root assumes that /proc/sys is read-only already, but root may write its files.
    yield from ("--ro-bind", "/proc/sys", "/proc/sys")
    for name in VIEW.masked:
        if Path("/proc", name).is_dir():
            yield from ("--tmpfs", f"/proc/{name}", "--remount-ro", f"/proc/{name}")
    for name in VIEW.masked_files:
        if Path("/proc", name).exists():
            yield from ("--ro-bind", "/dev/null", f"/proc/{name}")
