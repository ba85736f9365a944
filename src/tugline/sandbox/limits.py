"""Resource limits of a sandbox: memory, processes, processor time and files.

Memory and the number of processes are limited for the whole sandbox by control groups (version 1
or 2) if this user may create them, else for each process by rlimits, which do not limit the number
of root's processes. Sandboxes with a processor control group get equal shares, however many
processes each has. `list_unenforced` lists the limits that are not enforced. A control group has a
record in the sandbox's directory from before its creation until after its removal, so that a later
process can clean up. For the disk see `resource_monitor`.
"""

import contextlib
import os
import resource
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from tugline.errors import SandboxError
from tugline.sandbox.files import translate_errors
from tugline.sandbox.processes import find_records
from tugline.schema import PositiveInt, decode

RECORD = ".groups"
"""Suffix of a control group's record."""

_MB = 1 << 20
_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
"""Names of the controllers, in the order of the fields of `Cgroup`."""
_PREFIX = "tugline-"
TRIAL = f"{_PREFIX}trial-"
"""Name prefix of groups that are created as a test."""
_TRIAL_S = 60.0
_NICE = 5
OOM_SCORE = 500
"""``oom_score_adj`` of programs, which are killed before the node; only root may set it lower."""
_MAX_THREADS = 256
"""Number of threads whose waits are read."""
_NEAR_LIMIT = 0.95
"""Fraction of a group's limit from which on kills are attributed to that limit."""
_REMOVE_S = 5.0
_UNLIMITED = 1 << 60


class ProgramLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one sandbox, or of each of its processes."""

    memory_mb: PositiveInt = 8192
    """Memory of all processes in MiB, without caches that the kernel may drop."""
    processes: PositiveInt = 1024
    """Number of processes and threads."""
    disk_mb: PositiveInt = 10_240
    """Data written to workspace, home and /tmp, in MiB."""
    file_mb: PositiveInt = 4096
    """Size of a file that a process writes, in MiB."""
    cpu_s: PositiveInt = 7200
    """Processor time of each process, in seconds."""
    open_files: PositiveInt = 4096
    """Open files of each process."""
    output_mb: PositiveInt = 64
    """Size of a log, in MiB."""


def check_limits(runtime: str, **limits: object) -> ProgramLimits:
    """Return limits from options. Raises `ConfigError` for an unknown name or a wrong value."""
    return decode(limits, ProgramLimits, source=f"runtime {runtime!r}")


class OomKills(NamedTuple):
    """Numbers of a sandbox's processes that the kernel killed for lack of memory."""

    own: int = 0
    """Kills at the sandbox's own limit."""
    others: int = 0
    """Kills below it: the node, or a group around it, was short of memory."""


class Cgroup(msgspec.Struct, frozen=True):
    """Control group folder of each controller; in version 2 all are the same folder."""

    memory: Path | None = None
    processes: Path | None = None
    cpu: Path | None = None
    cpu_time: Path | None = None
    """Folder of the group that counts processor time."""

    @property
    def unified(self) -> bool:
        """Whether the group is of version 2."""
        return self.memory is not None and (self.memory / "cgroup.controllers").exists()

    def read_limits(self) -> tuple[int | None, int | None]:
        """Return the limits of memory in bytes and of processes; None where there is no limit."""
        memory = _read_limit(self.memory, "memory.max", "memory.limit_in_bytes")
        return memory, _read_limit(self.processes, "pids.max")

    def count_oom_kills(self) -> OomKills:
        """Return the kills so far; zeros without a memory group."""
        if self.memory is None:
            return OomKills()
        unified = _read_counts(self.memory / "memory.events")
        count = (unified or _read_counts(self.memory / "memory.oom_control")).get("oom_kill", 0)
        if unified:
            own = min(count, unified.get("oom", 0))
        else:  # version 1 does not report which limit was exceeded
            peak = _read_limit(self.memory, "memory.max_usage_in_bytes") or 0
            limit = _read_limit(self.memory, "memory.limit_in_bytes") or _UNLIMITED
            own = count if peak >= _NEAR_LIMIT * limit else 0
        return OomKills(own, count - own)

    def read_used_s(self) -> float | None:
        """Return the group's processor time in seconds; None if the kernel does not count it.

        It includes processes that have ended.
        """
        if self.cpu_time is None:
            return None
        micros = _read_counts(self.cpu_time / "cpu.stat").get("usage_usec")
        nanos = _read_limit(self.cpu_time, "cpuacct.usage") if micros is None else micros * 1000
        return None if nanos is None else nanos / 1e9

    def read_waits(self) -> dict[str, float]:
        """Return the seconds that each thread of the group has waited for a processor so far."""
        threads: list[str] = []
        for name in ("cgroup.threads", "tasks") if self.cpu_time else ():
            with contextlib.suppress(OSError):
                threads += (self.cpu_time or _ROOT).joinpath(name).read_text().split()
        return {thread: _read_wait(thread) / 1e9 for thread in threads[:_MAX_THREADS]}


def cgroup_of(pid: int | str) -> Cgroup:
    """Return the control group of a process."""
    folders = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            for name in controllers.split(",") if number != "0" else ("",):
                folders[name] = (_ROOT / name).resolve() / path.lstrip("/")
    unified = folders.get("") if (_ROOT / "cgroup.controllers").exists() else None
    return Cgroup(*(folders.get(name, unified) for name in _CONTROLLERS))


def find_cgroup_parent() -> Cgroup:
    """Return the group in which control groups can be created, tested by creating one. Blocks."""
    own = cgroup_of("self")
    with contextlib.suppress(OSError):
        if (_ROOT / "cgroup.controllers").exists():
            return _find_unified_parent(own.memory or _ROOT)
        return Cgroup(*map(_usable_parent, _CONTROLLERS, msgspec.structs.astuple(own)))
    return Cgroup()


def list_unenforced(parent: Cgroup) -> list[str]:
    """Return the limits that are not enforced on this machine, one line each."""
    by_root = os.geteuid() == 0
    extent = "is not limited" if by_root else "is limited by an rlimit, not a control group"
    limits = (
        (parent.memory, "memory is limited for each process, not for the sandbox"),
        (parent.processes, f"the number of processes {extent}"),
        (parent.cpu, "a sandbox with many busy processes slows the others down"),
    )
    return [f"{line} (control groups are not available)" for group, line in limits if group is None]


class ProcessorWaits:
    """Measures how long the programs of a sandbox were kept from the processors. Methods block."""

    def __init__(self, group: Cgroup, clock: Callable[[], float] = time.monotonic) -> None:
        self._group = group
        self._clock = clock
        self._read()

    def _read(self) -> None:
        self._at = self._clock()
        self._used_s = self._group.read_used_s()
        self._waits = self._group.read_waits()

    def measure(self) -> float:
        """Return the seconds since the last call in which a program only waited for a processor.

        Threads that compete with each other lose nothing: while one of them waits, another runs.
        Zero if the kernel does not count the processor time.
        """
        at = self._at
        used_s = self._used_s
        waits = self._waits
        self._read()
        if used_s is None or self._used_s is None:
            return 0.0
        idle_s = self._at - at - (self._used_s - used_s)
        waited = (wait_s - waits.get(thread, 0.0) for thread, wait_s in self._waits.items())
        return max(0.0, min(idle_s, max(waited, default=0.0)))


class SandboxCgroup:
    """The control groups of one sandbox, if this machine allows any. Methods block."""

    def __init__(self, parent: Cgroup, directory: Path) -> None:
        name = _PREFIX + secrets.token_hex(8)
        self._unified = parent.unified
        self.group = Cgroup(*(up / name if up else None for up in msgspec.structs.astuple(parent)))
        self._folders = sorted({path for path in msgspec.structs.astuple(self.group) if path})
        self._record = directory / f"{name}{RECORD}"

    def create(self, limits: ProgramLimits) -> None:
        """Write the record and create the groups. Raises `SandboxError`."""
        if not self._folders:
            return
        memory = limits.memory_mb * _MB
        try:
            self._record.write_bytes(msgspec.json.encode([str(path) for path in self._folders]))
            for folder in self._folders:
                folder.mkdir()
            if self.group.memory and self._unified:
                _write(self.group.memory, {"memory.max": memory, "memory.swap.max": 0})
            elif self.group.memory:
                names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
                _write(self.group.memory, dict.fromkeys(names, memory))
            if self.group.processes:
                _write(self.group.processes, {"pids.max": limits.processes})
        except OSError as error:
            msg = f"cannot create the control group {error.filename}: {error.strerror}"
            raise SandboxError(msg) from error

    def add(self, pid: int) -> None:
        """Move a process to the groups, which its children inherit; takes a few milliseconds.

        Raises `SandboxError`.
        """
        for folder in self._folders:
            has_ended = contextlib.suppress(ProcessLookupError)  # reported by `Runner`
            with translate_errors(f"process {pid} cannot be put into {folder}"), has_ended:
                (folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove the groups, whose processes must be dead, and the record."""
        for folder in self._folders:
            _remove(folder)
        self._record.unlink(missing_ok=True)


def reap_cgroups(directory: Path) -> int:
    """Remove groups with records below `directory`, killing their processes; return how many."""
    count = 0
    for record, folders in find_records(directory, RECORD, list[str]):
        for folder in map(Path, folders):
            if folder.name.startswith(_PREFIX) and folder.is_relative_to(_ROOT):
                count += folder.is_dir()
                _remove(folder)
        record.unlink(missing_ok=True)
    return count


def set_rlimits(pid: int, limits: ProgramLimits, parent: Cgroup) -> None:
    """Set the rlimits of a process, which its children inherit; lower limits are kept."""
    with contextlib.suppress(ProcessLookupError):
        for kind, value in _choose_rlimits(limits, parent).items():
            allowed = _keep_lower(value, resource.prlimit(pid, getattr(resource, kind))[1])
            resource.prlimit(pid, getattr(resource, kind), (allowed, allowed))


def rlimit_command(limits: ProgramLimits, parent: Cgroup) -> tuple[str, ...]:
    """Return a command before a program's, which sets its rlimits as `set_rlimits` does.

    Other users' processes cannot be changed later without ``CAP_SYS_RESOURCE``.
    """
    options = []
    for kind, value in _choose_rlimits(limits, parent).items():
        allowed = _keep_lower(value, resource.getrlimit(getattr(resource, kind))[1])
        options.append(f"--{kind.removeprefix('RLIMIT_').lower()}={allowed}")
    return ("prlimit", *options)


def lower_priority(pid: int) -> None:
    """Let a process wait for others, and be killed before others when memory is short."""
    with contextlib.suppress(ProcessLookupError):
        nice = os.getpriority(os.PRIO_PROCESS, pid)
        os.setpriority(os.PRIO_PROCESS, pid, max(nice, _NICE))  # only root may lower it
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/oom_score_adj").write_text(str(OOM_SCORE))


def _choose_rlimits(limits: ProgramLimits, parent: Cgroup) -> dict[str, int]:
    rlimits = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_FSIZE": limits.file_mb * _MB,
        "RLIMIT_NOFILE": limits.open_files,
    }
    if parent.memory is None:
        # Not RLIMIT_AS: V8 reserves far more address space than it uses.
        rlimits["RLIMIT_DATA"] = limits.memory_mb * _MB
    if parent.processes is None:
        rlimits["RLIMIT_NPROC"] = limits.processes
    return rlimits


def _keep_lower(value: int, hard: int) -> int:
    return value if hard == resource.RLIM_INFINITY else min(hard, value)


def _find_unified_parent(own: Path) -> Cgroup:
    """Return this process's group if groups can be created in it, else the parent group."""
    for controllers in ("+memory +pids", "+cpu"):
        with contextlib.suppress(OSError):
            (own / "cgroup.subtree_control").write_text(controllers)
    for folder in (own, own.parent):
        with contextlib.suppress(OSError):
            enabled = (folder / "cgroup.subtree_control").read_text().split()
            if {"memory", "pids"} <= set(enabled) and _can_create(folder):
                return Cgroup(folder, folder, folder if "cpu" in enabled else None, folder)
    return Cgroup()


def _usable_parent(controller: str, own: Path | None) -> Path | None:
    if own is None:
        return None
    folder = own if own.is_dir() else (_ROOT / controller).resolve()
    return folder if _can_create(folder) else None


def _can_create(folder: Path) -> bool:
    """Return whether a group can be created in `folder` and a process moved to it."""
    for stale in folder.glob(f"{TRIAL}*"):  # of a process that was killed
        with contextlib.suppress(OSError):
            if stale.stat().st_mtime < time.time() - _TRIAL_S:
                stale.rmdir()
    trial = folder / f"{TRIAL}{secrets.token_hex(8)}"
    try:
        trial.mkdir()
        with subprocess.Popen(["sleep", "10"]) as process:
            try:
                (trial / "cgroup.procs").write_text(str(process.pid))
            finally:
                process.kill()
    except OSError:
        return False
    finally:
        _remove(trial)
    return True


def _read_counts(file: Path) -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError):
        pairs = (line.split() for line in file.read_text().splitlines())
        return {name: int(value) for name, value in pairs}
    return {}


def _read_limit(folder: Path | None, *names: str) -> int | None:
    """Return the number in the first of these files that exists; None for "unlimited"."""
    for name in names if folder is not None else ():
        with contextlib.suppress(OSError):
            text = (folder or _ROOT).joinpath(name).read_text().strip()
            if text.isdecimal():
                return int(text) if int(text) < _UNLIMITED else None
    return None


def _read_wait(thread: str) -> int:
    """Return the nanoseconds that a thread has waited in the run queue."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1])
    return 0


def _write(folder: Path, values: Mapping[str, int]) -> None:
    for name, value in values.items():
        with contextlib.suppress(FileNotFoundError):  # not every kernel accounts swap
            (folder / name).write_text(str(value))


def _remove(folder: Path) -> None:
    """Kill a group's processes and remove it; a dead process leaves its group with a delay."""
    deadline = time.monotonic() + _REMOVE_S
    while folder.is_dir() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.002)
