"""How much one box may take: memory, processes, processor time and files.

Memory and the number of processes are bounded for the box as a whole by control groups (version 1
or 2) where this user may make them, else for each process by rlimits, which root is not held to
for the number of processes; `unenforced` says what is left open. A group has a record beside the
box from before it is made until after it is gone, so that a later process removes it. The disk is
watched: see `share`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from tugline.errors import ConfigError, SandboxError

RECORD = ".groups"
"""Ending of the name of a group's record."""

_MB = 1 << 20
_GROUPS = Path("/sys/fs/cgroup")
_PREFIX = "tugline-"
_NICE = 5
_NEAR = 0.95
"""Of its limit: so much has a box taken that was ended for it."""
_REMOVE_S = 5.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one box, or of each of its processes."""

    memory_mb: int = 8192
    """Of all its processes, without what the kernel may drop."""
    processes: int = 1024
    """Processes and threads."""
    disk_mb: int = 10_240
    """What it writes: workspace, home and /tmp."""
    file_mb: int = 4096
    """The largest file that a process may write."""
    cpu_s: int = 7200
    """Processor time of each process."""
    open_files: int = 4096
    """Of each process."""
    output_mb: int = 64
    """The largest log."""

    def check(self, runtime: str) -> None:
        """Raises `ConfigError` for a value that is no whole number from 1."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"runtime {runtime!r}: {name} is {value!r}, must be a whole number from 1"
                raise ConfigError(msg)


class Places(msgspec.Struct, frozen=True):
    """Where groups can be made here; one folder for both in version 2."""

    memory: Path | None = None
    processes: Path | None = None

    @property
    def v2(self) -> bool:
        """Whether it is the unified hierarchy."""
        return self.memory is not None and (self.memory / "cgroup.controllers").exists()


def places() -> Places:
    """Found by making a group and removing it. Blocks."""
    with contextlib.suppress(OSError):
        own = dict(_own_groups())
        if (_GROUPS / "cgroup.controllers").exists():
            return _unified(_GROUPS / own.get("", "/").lstrip("/"))
        return Places(*(_usable(_GROUPS / name, own.get(name)) for name in ("memory", "pids")))
    return Places()


def unenforced(where: Places) -> list[str]:
    """What is not bounded on this machine, a line each."""
    lines = []
    if where.memory is None:
        lines.append("memory is bounded for each process, not for the box (no control groups here)")
    if where.processes is None:
        by_root = os.geteuid() == 0
        missing = "has no bound" if by_root else "is bounded by an rlimit, not a control group"
        lines.append(f"the number of processes {missing} (no control groups here)")
    return lines


class Kills(NamedTuple):
    """How many processes of a box the kernel has ended for want of memory."""

    own: int = 0
    """The box was at its limit."""
    others: int = 0
    """It was not: the node, or what it runs in, was short of memory."""


def kills(memory: Path | None) -> Kills:
    """What a control group of either version has counted; nothing without one."""
    if memory is None:
        return Kills()
    unified = _counts(memory / "memory.events")
    count = (unified or _counts(memory / "memory.oom_control")).get("oom_kill", 0)
    if unified:
        own = min(count, unified.get("oom", 0))
    else:  # version 1 does not say whose limit it was
        most, limit = (_number(memory / f"memory.{n}_in_bytes") for n in ("max_usage", "limit"))
        own = count if most >= _NEAR * limit else 0
    return Kills(own, count - own)


class Group:
    """The control groups of one box, where there are any. Its methods block."""

    def __init__(self, where: Places, directory: Path) -> None:
        name = _PREFIX + secrets.token_hex(8)
        self._memory = where.memory / name if where.memory else None
        self._processes = where.processes / name if where.processes else None
        self._v2 = where.v2
        self._folders = sorted({path for path in (self._memory, self._processes) if path})
        self._record = directory / f"{name}{RECORD}"

    def make(self, limits: Limits) -> None:
        """Make them, after their record. Raises `SandboxError`."""
        if not self._folders:
            return
        memory = limits.memory_mb * _MB
        try:
            self._record.write_bytes(msgspec.json.encode([str(path) for path in self._folders]))
            for folder in self._folders:
                folder.mkdir()
            if self._memory and self._v2:
                _set(self._memory, {"memory.max": memory, "memory.swap.max": 0})
            elif self._memory:
                values = {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory}
                _set(self._memory, values)
            if self._processes:
                _set(self._processes, {"pids.max": limits.processes})
        except OSError as error:
            msg = f"cannot make the control group {error.filename}: {error.strerror}"
            raise SandboxError(msg) from error

    def join(self, pid: int) -> None:
        """Put a process into them; its children will be. Takes some ms. Raises `SandboxError`."""
        for folder in self._folders:
            try:
                (folder / "cgroup.procs").write_text(str(pid))
            except ProcessLookupError:  # it has ended: whoever waits for it says so
                return
            except OSError as error:
                msg = f"process {pid} cannot be put into {folder}: {error.strerror}"
                raise SandboxError(msg) from error

    def kills(self) -> Kills:
        """Of their processes, for want of memory, so far."""
        return kills(self._memory)

    def remove(self) -> None:
        """Remove them and their record; all their processes are dead."""
        for folder in self._folders:
            _remove(folder)
        self._record.unlink(missing_ok=True)


def reap(record: Path) -> int:
    """Remove the groups that a record names, with what still runs in them; returns how many."""
    count = 0
    with contextlib.suppress(msgspec.DecodeError, FileNotFoundError):
        for text in msgspec.json.decode(record.read_bytes(), type=list[str]):
            folder = Path(text)
            if folder.name.startswith(_PREFIX) and folder.is_relative_to(_GROUPS):
                count += folder.is_dir()
                _remove(folder)
        record.unlink()
    return count


def restrain(pid: int, limits: Limits, where: Places) -> None:
    """Bound a process and all that it will start; a lower bound that is in force stays."""
    size = limits.file_mb * _MB
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_FSIZE: size,
        resource.RLIMIT_NOFILE: limits.open_files,
    }
    if where.memory is None:
        # Not the address space: V8 reserves far more of it than it will ever use.
        wanted[resource.RLIMIT_DATA] = limits.memory_mb * _MB
    if where.processes is None:
        wanted[resource.RLIMIT_NPROC] = limits.processes
    with contextlib.suppress(ProcessLookupError):
        for kind, most in wanted.items():
            hard = resource.prlimit(pid, kind)[1]
            value = most if hard == resource.RLIM_INFINITY else min(hard, most)
            resource.prlimit(pid, kind, (value, value))
        os.setpriority(os.PRIO_PROCESS, pid, _NICE)


def _own_groups() -> Iterator[tuple[str, str]]:
    """Controller (empty in version 2) and path of the groups that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _unified(own: Path) -> Places:
    """Below our own group if it may be divided, else beside it."""
    for folder in (own, own.parent):
        with contextlib.suppress(OSError):
            if folder == own:
                (own / "cgroup.subtree_control").write_text("+memory +pids")
        control = folder / "cgroup.subtree_control"
        with contextlib.suppress(OSError):
            if {"memory", "pids"} <= set(control.read_text().split()) and _tried(folder):
                return Places(folder, folder)
    return Places()


def _usable(root: Path, own: str | None) -> Path | None:
    if own is None:
        return None
    beneath = root / own.lstrip("/")
    folder = beneath if beneath.is_dir() else root
    return folder if _tried(folder) else None


def _tried(folder: Path) -> bool:
    """Whether a group can be made there and a process put into it."""
    trial = folder / f"{_PREFIX}{secrets.token_hex(8)}"
    try:
        trial.mkdir()
    except OSError:
        return False
    try:
        with subprocess.Popen(["sleep", "10"]) as bystander:
            try:
                (trial / "cgroup.procs").write_text(str(bystander.pid))
            finally:
                bystander.kill()
    except OSError:
        return False
    finally:
        _remove(trial)
    return True


def _counts(file: Path) -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError):
        pairs = (line.split() for line in file.read_text().splitlines())
        return {name: int(value) for name, value in pairs}
    return {}


def _number(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return 0


def _set(folder: Path, values: Mapping[str, int]) -> None:
    for name, value in values.items():
        with contextlib.suppress(FileNotFoundError):  # swap is not counted everywhere
            (folder / name).write_text(str(value))


def _remove(folder: Path) -> None:
    """Dead processes leave their group a little later than they die."""
    deadline = time.monotonic() + _REMOVE_S
    while folder.is_dir() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.002)
