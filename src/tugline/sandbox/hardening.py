"""Protect process 1 of a sandbox, the runner's shell, from the programs that it runs.

The shell is of the same user as the programs, so they could take it over, forge exit codes and
outlive their end. Its memory, which holds the key to its pipes, is masked in ``/proc``, and system
calls that inspect, take over, limit or slow another process are refused when they name process 1,
or a group of processes that it may be in. New user namespaces, kernel keyrings (which belong to the
user, not to the sandbox), BPF and the like are refused altogether, because kernel bugs are reached
through them. Debuggers work on every other process.

bubblewrap takes a BPF program (`bpf_filter`), Docker and Podman a narrowed profile of their own
(`ProcessHardening`), Apptainer a small profile (`ApptainerHardening`).
"""

import contextlib
import errno
import hashlib
import platform
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tugline import log
from tugline.sandbox.cache import cache_folder
from tugline.sandbox.files import replace_file, translate_errors

_NEWUSER = 0x10000000
_PRIO_MANY, _IOPRIO_MANY = 3, 2
"""Bits that say: not of a process but of a group's or a user's, which process 1 belongs to."""
_log = log.get("sandbox")

# ---------------------------------------------------------------------- BPF, for bubblewrap
_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_X32 = 0x40000000
_ARCHES: dict[str, tuple[int, int]] = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's name of the machine, and the column of the tables below."""

_REFUSED: Mapping[str, tuple[tuple[int, int], int]] = {
    "add_key": ((248, 217), errno.ENOSYS),
    "bpf": ((321, 280), errno.EPERM),
    "clone3": ((435, 435), errno.ENOSYS),  # a filter cannot see its flags, but those of clone
    "io_uring_setup": ((425, 425), errno.ENOSYS),
    "keyctl": ((250, 219), errno.ENOSYS),
    "perf_event_open": ((298, 241), errno.EPERM),
    "pidfd_getfd": ((438, 438), errno.EPERM),
    "request_key": ((249, 218), errno.ENOSYS),
    "userfaultfd": ((323, 282), errno.EPERM),
}
_REFUSED_WITH: Mapping[str, tuple[tuple[int, int], int, int, int]] = {
    "clone": ((56, 220), 0, _BITS, _NEWUSER),
    "ioprio_set": ((251, 30), 1, _EQUAL, 1),
    "ioprio_set of many": ((251, 30), 0, _BITS, _IOPRIO_MANY),
    "prlimit64": ((302, 261), 0, _EQUAL, 1),
    "process_vm_readv": ((310, 270), 0, _EQUAL, 1),
    "process_vm_writev": ((311, 271), 0, _EQUAL, 1),
    "ptrace": ((101, 117), 1, _EQUAL, 1),
    "sched_setaffinity": ((203, 122), 0, _EQUAL, 1),
    "sched_setattr": ((314, 274), 0, _EQUAL, 1),
    "sched_setparam": ((142, 118), 0, _EQUAL, 1),
    "sched_setscheduler": ((144, 119), 0, _EQUAL, 1),
    "setpriority": ((141, 140), 1, _EQUAL, 1),
    "setpriority of many": ((141, 140), 0, _BITS, _PRIO_MANY),
    "unshare": ((272, 97), 0, _BITS, _NEWUSER),
}
"""Numbers, which argument, how it is compared, with what."""
_SOCKET = (41, 198)
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""What programs may open; not AF_VSOCK, which leads to the machine below a virtual one."""
_PID_ARGUMENT: Mapping[str, int] = {
    name: argument for name, (_, argument, how, _) in _REFUSED_WITH.items() if how == _EQUAL
}
"""Calls that name a process and are refused for process 1; the argument that names it."""


def bpf_filter(machine: str | None = None) -> bytes:
    """Return the filter as bubblewrap reads it; empty for an unknown kind of processor."""
    found = _ARCHES.get(machine or platform.machine())
    if found is None:
        return b""
    arch, column = found
    code = [
        *((_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)),
        *((_LOAD, 0, 0, _NUMBER), (_BITS, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)),
    ]
    for numbers, error in _REFUSED.values():
        code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO | error)]
    for numbers, argument, compare, value in _REFUSED_WITH.values():
        code += [
            (_EQUAL, 0, 4, numbers[column]),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
            (compare, 0, 1, value),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM),
            (_LOAD, 0, 0, _NUMBER),
        ]
    most = len(_FAMILIES)
    code += [
        (_EQUAL, 0, most + 3, _SOCKET[column]),
        (_LOAD, 0, 0, _ARGUMENTS),
        *((_EQUAL, most - n, 0, family) for n, family in enumerate(_FAMILIES)),
        (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
        (_LOAD, 0, 0, _NUMBER),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in code)


# ---------------------------------------------------------------------- Docker and Podman
MASKED = ("/proc/1/mem", "/proc/1/task")
"""The memory, also by way of its thread. runc cannot start without the rest of ``/proc/1``."""
_KNOBS = ("/proc/1/autogroup", "/proc/1/oom_adj", "/proc/1/oom_score_adj")
"""Its share of the processors and its turn when memory is short; not every kernel has all."""
_DOCKER_MASKED = [
    *(f"/proc/{name}" for name in ("acpi", "asound", "interrupts", "kcore", "keys")),
    *(f"/proc/{name}" for name in ("latency_stats", "sched_debug", "scsi", "timer_list")),
    *("/proc/timer_stats", "/sys/firmware", "/sys/devices/virtual/powercap"),
]
"""What Docker masks unless it is told what to mask."""
_PROFILES = ("/etc/containers/seccomp.json", "/usr/share/containers/seccomp.json")
_MANY = {"ioprio_set": _IOPRIO_MANY, "setpriority": _PRIO_MANY}
_PID_BITS = 22
"""Of the number of a process; the kernel looks at no more than 32 of what a program gives."""
_FLAGS_ARGUMENT = {"clone": 0, "unshare": 0}
_REMOVED = {"add_key", "io_uring_enter", "io_uring_register", "io_uring_setup", "keyctl"}
_REMOVED |= {"pidfd_getfd", "request_key", "userfaultfd", "clone3", "socket", "socketcall"}
_NO_CLONE3 = {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}
"""A filter cannot see its flags; when it does not exist, libraries use clone."""


class ProcessHardening(msgspec.Struct, frozen=True):
    """A narrowed seccomp profile, in the form that the engine `kind` takes."""

    kind: str
    profile: bytes

    def host_config(self) -> dict[str, list[str]]:
        """Return parts of ``HostConfig``. Blocks."""
        if self.kind == "docker":
            options = [f"seccomp={self.profile.decode()}"]
            return {"SecurityOpt": options, "MaskedPaths": [*_DOCKER_MASKED, *MASKED, *_KNOBS]}
        masked = f"mask={':'.join((*MASKED, *_KNOBS))}"
        return {"SecurityOpt": [masked, f"seccomp={self._write_profile()}"]}

    def _write_profile(self) -> Path:
        """Write the profile to a file: Podman takes no text."""
        name = hashlib.sha256(self.profile).hexdigest()[:32]
        path = cache_folder() / "seccomp" / f"{name}.json"
        if not path.exists():
            with translate_errors(f"cannot make {path.parent}"):
                path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, self.profile)
        return path


def find_hardening(kind: str, security: Sequence[str]) -> ProcessHardening | None:
    """Narrow the profile that the engine names in `security`, or the one of its packages."""
    named = [word for option in security for word in option.split(",")]
    paths = [word.removeprefix("profile=") for word in named if word.startswith("profile=/")]
    for path in (*paths, *_PROFILES):
        with contextlib.suppress(OSError, msgspec.DecodeError, KeyError, TypeError):
            profile = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
            if profile["defaultAction"] != "SCMP_ACT_ALLOW":
                return ProcessHardening(kind, msgspec.json.encode(narrow_profile(profile)))
    return None


def is_hardened(pid: int) -> bool:
    """Whether a process has its paths masked and some filter; which calls cannot be seen."""
    with contextlib.suppress(OSError):
        mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        hidden = {line.split()[4] for line in mounts}
        filtered = "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()
        return filtered and hidden.issuperset(MASKED)
    return False


def narrow_profile(profile: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's seccomp profile without the calls that lead out, or to process 1."""
    sockets = {"names": ["socket"], "action": "SCMP_ACT_ALLOW"}
    families = [
        {**sockets, "args": [{"index": 0, "value": family, "op": "SCMP_CMP_EQ"}]}
        for family in _FAMILIES
    ]
    return {**profile, "syscalls": [*_narrow_rules(profile["syscalls"]), *families, _NO_CLONE3]}


def _narrow_rules(rules: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for rule in rules:
        names = [name for name in rule["names"] if name not in _REMOVED]
        narrowed = {name for name in names if name in _PID_ARGUMENT or name in _FLAGS_ARGUMENT}
        if rule["action"] != "SCMP_ACT_ALLOW" or rule.get("args"):
            narrowed = set()
        if unchanged := [name for name in names if name not in narrowed]:
            yield {**rule, "names": unchanged}
        for name in sorted(narrowed):
            one_process = [_masked_equal(0, _MANY[name], 0)] if name in _MANY else []
            for condition in _conditions(name):
                yield {**rule, "names": [name], "args": [*one_process, condition]}


def _conditions(name: str) -> list[dict[str, Any]]:
    """Return conditions of which one must hold for the call to be allowed."""
    if name in _FLAGS_ARGUMENT:
        return [_masked_equal(_FLAGS_ARGUMENT[name], _NEWUSER, 0)]
    # Not 1: its lowest bit is not set, or another one is. "Not equal" would compare 64 bits.
    number = _PID_ARGUMENT[name]
    others = (_masked_equal(number, 1 << n, 1 << n) for n in range(1, _PID_BITS))
    return [_masked_equal(number, 1, 0), *others]


def _masked_equal(argument: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": argument, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


# ---------------------------------------------------------------------- Apptainer
_SCMP_ARCHES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}


class ApptainerHardening:
    """Options for all sandboxes of a runtime; given up when Apptainer turns out to refuse them."""

    def __init__(self) -> None:
        machine = platform.machine()
        self.missing = "" if machine in _SCMP_ARCHES else f"no system call filter for {machine}"
        """Why there is none."""

    def options(self, directory: Path) -> list[str]:
        """Return options of ``apptainer exec`` for a sandbox in `directory`. Blocks."""
        if self.missing:
            return []
        profile, empty = directory / "seccomp.json", directory / "nothing"
        with translate_errors(f"cannot write to {directory}"):
            profile.write_bytes(msgspec.json.encode(_apptainer_profile(platform.machine())))
            empty.mkdir(exist_ok=True)
        masks = ["--bind", "/dev/null:/proc/1/mem", "--bind", f"{empty}:/proc/1/task:ro"]
        return ["--security", f"seccomp:{profile}", *masks]

    def give_up(self, output: str) -> bool:
        """Return whether a start failed because of these options; the next has none then."""
        if "seccomp" not in output and "/proc/1/" not in output:
            return False
        if not self.missing:
            self.missing = output[-300:]
            _log.warning("container not hardened", error=self.missing)
        return True

    def list_weaknesses(self) -> list[str]:
        """Return what is not isolated."""
        what = "a program can take over the shell that runs it, so forge its exit code"
        return [f"{what}: {' '.join(self.missing.split())}"] if self.missing else []


def _apptainer_profile(machine: str) -> dict[str, Any]:
    refused: list[dict[str, Any]] = [{"names": ["pidfd_getfd"], "action": "SCMP_ACT_ERRNO"}]
    for name, argument in _PID_ARGUMENT.items():
        # The kernel looks at 32 bits of a process's number.
        args = [_masked_equal(argument, 0xFFFFFFFF, 1)]
        refused.append({"names": [name], "action": "SCMP_ACT_ERRNO", "args": args})
    allowed = {"defaultAction": "SCMP_ACT_ALLOW", "architectures": _SCMP_ARCHES[machine]}
    return {**allowed, "syscalls": refused}
