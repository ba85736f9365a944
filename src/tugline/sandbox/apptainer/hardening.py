"""What keeps a container's programs from process 1, the shell that runs them: options of Apptainer.

The shell is of the same user as they are. Its memory, which holds the key to its words, is covered
in ``/proc``, and calls that take over, read, bound or slow another process are refused for it.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import msgspec

from tugline import log
from tugline.sandbox.bubblewrap.seccomp import NAMED
from tugline.sandbox.files import faults

_ARCHES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}
_ONE = {"value": 0xFFFFFFFF, "valueTwo": 1, "op": "SCMP_CMP_MASKED_EQ"}
"""The kernel looks at 32 bits of a process's number."""
_log = log.get("runtimes")


class Hardening:
    """For all boxes of a runtime: given up when Apptainer turns out to refuse it."""

    def __init__(self) -> None:
        machine = platform.machine()
        self.why = "" if machine in _ARCHES else f"no filter of system calls for {machine}"
        """Why there is none."""

    def options(self, directory: Path) -> list[str]:
        """Of ``apptainer exec``, for a box in `directory`. Blocks."""
        if self.why:
            return []
        profile, nothing = directory / "seccomp.json", directory / "nothing"
        with faults(f"cannot write to {directory}"):
            profile.write_bytes(msgspec.json.encode(_profile(platform.machine())))
            nothing.mkdir(exist_ok=True)
        covered = ["--bind", "/dev/null:/proc/1/mem", "--bind", f"{nothing}:/proc/1/task:ro"]
        return ["--security", f"seccomp:{profile}", *covered]

    def refused(self, said: str) -> bool:
        """Whether a container was not made for the guard's sake; the next has none then."""
        if "seccomp" not in said and "/proc/1/" not in said:
            return False
        if not self.why:
            self.why = said[-300:]
            _log.warning("container not guarded", error=self.why)
        return True

    def list_weaknesses(self) -> list[str]:
        """What it does not keep apart."""
        what = "a program can take over the shell that runs it, so forge its exit code"
        return [f"{what}: {' '.join(self.why.split())}"] if self.why else []


def _profile(machine: str) -> dict[str, Any]:
    refused: list[dict[str, Any]] = [{"names": ["pidfd_getfd"], "action": "SCMP_ACT_ERRNO"}]
    for name, number in NAMED.items():
        args = [{"index": number, **_ONE}]
        refused.append({"names": [name], "action": "SCMP_ACT_ERRNO", "args": args})
    allowed = {"defaultAction": "SCMP_ACT_ALLOW", "architectures": _ARCHES[machine]}
    return {**allowed, "syscalls": refused}
