"""Protect process 1 of a sandbox, the runner's shell, from the programs that it runs.

The shell belongs to the same user as the programs, so they could take it over, forge exit codes and
outlive their end. Its memory, which holds the key of its pipes, is masked in ``/proc``, and system
calls that inspect, take over, limit or slow another process are refused for process 1 and for
groups that may contain it. New user namespaces, kernel keyrings (which belong to the user, not to
the sandbox), BPF and the like are always refused, because kernel bugs are exploited through them.
Debuggers work on every other process.

bubblewrap takes a BPF program (`bpf_filter`), Docker and Podman a narrowed form of their own
profile (`ProcessHardening`), Apptainer a small profile (`ApptainerHardening`).
"""

import contextlib
import errno
import hashlib
import platform
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tugline import log
from tugline.sandbox.cache import cache_folder
from tugline.sandbox.files import replace_file, translate_errors

MASKED = ("/proc/1/mem", "/proc/1/task")
"""Paths of process 1's memory and threads. runc cannot start without the rest of ``/proc/1``."""
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Socket families that programs may use; AF_VSOCK would reach the host of a virtual machine."""
_log = log.get("sandbox")


class _Calls(msgspec.Struct, frozen=True):
    """The tables of ``syscalls.toml``, which documents them."""

    refused: dict[str, tuple[int, int, str]]
    about_process: dict[str, tuple[int, int, int]]
    with_bits: dict[str, tuple[int, int, int]]
    paths: dict[str, list[str]]


_CALLS = msgspec.toml.decode(Path(__file__).with_name("syscalls.toml").read_bytes(), type=_Calls)

# ---------------------------------------------------------------------- BPF, for bubblewrap
_LOAD = 0x20
_EQUAL = 0x15
_BITS = 0x45
_RETURN = 0x06
_NUMBER = 0
_ARCH = 4
_ARGUMENTS = 16
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_X32 = 0x40000000
_ARCHES: dict[str, tuple[int, int]] = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Audit architecture of each kind of processor, and its column in the tables."""
_SOCKET = (41, 198)


def bpf_filter(machine: str | None = None) -> bytes:
    """Return the compiled filter for bubblewrap; empty for an unknown kind of processor."""
    known = _ARCHES.get(machine or platform.machine())
    if known is None:
        return b""
    arch, column = known
    code = [
        *((_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)),
        *((_LOAD, 0, 0, _NUMBER), (_BITS, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)),
    ]
    for *numbers, error in _CALLS.refused.values():
        refuse = (_RETURN, 0, 0, _ERRNO | getattr(errno, str(error)))
        code += [(_EQUAL, 0, 1, numbers[column]), refuse]
    conditions = [(each[column], each[2], _EQUAL, 1) for each in _CALLS.about_process.values()]
    conditions += [(each[column], 0, _BITS, each[2]) for each in _CALLS.with_bits.values()]
    for number, argument, compare, value in conditions:
        code += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
            (compare, 0, 1, value),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM),
            (_LOAD, 0, 0, _NUMBER),
        ]
    count = len(_FAMILIES)
    code += [
        (_EQUAL, 0, count + 3, _SOCKET[column]),
        (_LOAD, 0, 0, _ARGUMENTS),
        *((_EQUAL, count - n, 0, family) for n, family in enumerate(_FAMILIES)),
        (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
        (_LOAD, 0, 0, _NUMBER),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in code)


# ---------------------------------------------------------------------- Docker and Podman
_PROFILES = ("/etc/containers/seccomp.json", "/usr/share/containers/seccomp.json")
_PID_BITS = 22
"""Number of bits of a process id; the kernel reads 32 bits of the argument."""
_REMOVED = {"add_key", "io_uring_enter", "io_uring_register", "io_uring_setup", "keyctl"}
_REMOVED |= {"pidfd_getfd", "request_key", "userfaultfd", "clone3", "socket", "socketcall"}
_REMOVED |= {"io_setup"}
_MISSING = {"names": ["clone3", "io_setup"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}
"""Refuses calls with ENOSYS, for which programs have a fallback: a filter cannot read the flags of
clone3, and the quota of io_setup is the whole machine's."""


class ProcessHardening(msgspec.Struct, frozen=True):
    """A narrowed seccomp profile for an engine of `kind`, ``docker`` or ``podman``."""

    kind: str
    profile: bytes

    def host_config(self) -> dict[str, list[str]]:
        """Return the security fields of ``HostConfig``. Blocks."""
        masked = (*MASKED, *_CALLS.paths["knobs"])
        if self.kind == "docker":
            options = [f"seccomp={self.profile.decode()}"]
            return {"SecurityOpt": options, "MaskedPaths": [*_CALLS.paths["docker"], *masked]}
        return {"SecurityOpt": [f"mask={':'.join(masked)}", f"seccomp={self._write_profile()}"]}

    def _write_profile(self) -> Path:
        """Write the profile to a file, as Podman requires; return the path."""
        name = hashlib.sha256(self.profile).hexdigest()[:32]
        path = cache_folder() / "seccomp" / f"{name}.json"
        if not path.exists():
            with translate_errors(f"cannot make {path.parent}"):
                path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, self.profile)
        return path


def find_hardening(kind: str, security: Sequence[str]) -> ProcessHardening | None:
    """Narrow the profile named in `security`, or the default one of the engine's packages.

    None if no readable profile is found.
    """
    named = [word for option in security for word in option.split(",")]
    paths = [word.removeprefix("profile=") for word in named if word.startswith("profile=/")]
    for path in (*paths, *_PROFILES):
        with contextlib.suppress(OSError, msgspec.DecodeError, KeyError, TypeError):
            profile = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
            if profile["defaultAction"] != "SCMP_ACT_ALLOW":
                return ProcessHardening(kind, msgspec.json.encode(narrow_profile(profile)))
    return None


def is_hardened(pid: int) -> bool:
    """Return whether a process has the masked paths and a filter, whose content is not visible."""
    with contextlib.suppress(OSError):
        mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        hidden = {line.split()[4] for line in mounts}
        filtered = "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()
        return filtered and hidden.issuperset(MASKED)
    return False


def narrow_profile(profile: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's seccomp profile without calls that escape or affect process 1."""
    sockets = {"names": ["socket"], "action": "SCMP_ACT_ALLOW"}
    families = [
        {**sockets, "args": [{"index": 0, "value": family, "op": "SCMP_CMP_EQ"}]}
        for family in _FAMILIES
    ]
    return {**profile, "syscalls": [*_narrow_rules(profile["syscalls"]), *families, _MISSING]}


def _narrow_rules(rules: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for rule in rules:
        names = [name for name in rule["names"] if name not in _REMOVED]
        narrowed = set(names) & (_CALLS.about_process.keys() | _CALLS.with_bits.keys())
        if rule["action"] != "SCMP_ACT_ALLOW" or rule.get("args"):
            narrowed = set()
        if unchanged := [name for name in names if name not in narrowed]:
            yield {**rule, "names": unchanged}
        for name in sorted(narrowed):
            bits = _CALLS.with_bits.get(name)
            without = [_masked_equal(0, bits[2], 0)] if bits else []
            for conditions in _not_process_1(name):
                yield {**rule, "names": [name], "args": [*without, *conditions]}


def _not_process_1(name: str) -> list[list[dict[str, Any]]]:
    """Return alternative conditions, one of which must hold; an empty one means always."""
    if name not in _CALLS.about_process:
        return [[]]
    # Not 1: bit 0 is clear, or another bit is set. SCMP_CMP_NE would compare 64 bits.
    number = _CALLS.about_process[name][2]
    others = ([_masked_equal(number, 1 << n, 1 << n)] for n in range(1, _PID_BITS))
    return [[_masked_equal(number, 1, 0)], *others]


def _masked_equal(argument: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": argument, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


# ---------------------------------------------------------------------- Apptainer
_SCMP_ARCHES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}


class ApptainerHardening:
    """Security options for all sandboxes of a runtime; dropped once Apptainer refuses them."""

    def __init__(self) -> None:
        machine = platform.machine()
        self.missing = (
            "" if machine in _SCMP_ARCHES else f"there is no system call filter for {machine}"
        )
        """Reason why there is no hardening; empty if there is."""

    def options(self, directory: Path) -> list[str]:
        """Return options of ``apptainer exec`` for a sandbox in `directory`. Blocks."""
        if self.missing:
            return []
        profile = directory / "seccomp.json"
        empty = directory / "nothing"
        with translate_errors(f"cannot write to {directory}"):
            profile.write_bytes(msgspec.json.encode(_apptainer_profile(platform.machine())))
            empty.mkdir(exist_ok=True)
        masks = ["--bind", "/dev/null:/proc/1/mem", "--bind", f"{empty}:/proc/1/task:ro"]
        return ["--security", f"seccomp:{profile}", *masks]

    def give_up(self, output: str) -> bool:
        """Return whether `output` is of a start that failed due to the options; drop them if so."""
        if "seccomp" not in output and "/proc/1/" not in output:
            return False
        if not self.missing:
            self.missing = output[-300:]
            _log.warning("container not hardened", error=self.missing)
        return True

    def list_weaknesses(self) -> list[str]:
        """Return the missing isolation, if any."""
        what = "a program can take over the shell that runs it, and so forge its exit code"
        return [f"{what}: {' '.join(self.missing.split())}"] if self.missing else []


def _apptainer_profile(machine: str) -> dict[str, Any]:
    refused: list[dict[str, Any]] = [{"names": ["pidfd_getfd"], "action": "SCMP_ACT_ERRNO"}]
    for name, (_, _, argument) in _CALLS.about_process.items():
        # The kernel reads 32 bits of a process id.
        args = [_masked_equal(argument, 0xFFFFFFFF, 1)]
        refused.append({"names": [name], "action": "SCMP_ACT_ERRNO", "args": args})
    allowed = {"defaultAction": "SCMP_ACT_ALLOW", "architectures": _SCMP_ARCHES[machine]}
    return {**allowed, "syscalls": refused}
