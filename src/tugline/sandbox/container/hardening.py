"""What keeps a container's programs from its keeper: the shell that runs them (`programs.runner`).

The shell is process 1 and of the same user as they are. So its memory, which holds the key to its
words, is masked in ``/proc``, and the seccomp profile that engines share is narrowed: calls that
take over, read, bound or slow another process are refused for process 1 (debuggers work on all
others), and so are those that `bubblewrap.seccomp` refuses, such as new user namespaces.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tugline.sandbox.bubblewrap.seccomp import NAMED
from tugline.sandbox.cache import cache_folder
from tugline.sandbox.files import faults

MASKED = ("/proc/1/mem", "/proc/1/task")
"""The memory, also by way of its thread. All of ``/proc/1`` is more than runc can do without."""
_USUAL = ["acpi", "asound", "interrupts", "kcore", "keys", "latency_stats", "sched_debug", "scsi"]
_USUAL += ["timer_list", "timer_stats"]
"""What Docker masks by itself, unless it is told what to mask."""
_DEVICES = ("/sys/firmware", "/sys/devices/virtual/powercap")
_PROFILES = ("/etc/containers/seccomp.json", "/usr/share/containers/seccomp.json")
_MANY = {"ioprio_set": 2, "setpriority": 3}
"""Bits of the first argument that say: not of a process but of a group's or a user's."""
_BITS = 22
"""Of the number of a process; the kernel looks at no more than 32 of what a program gives."""
_FLAGGED = {"clone": 0, "unshare": 0}
_NEWUSER = 0x10000000
_REFUSED = {"add_key", "io_uring_enter", "io_uring_register", "io_uring_setup", "keyctl"}
_REFUSED |= {"pidfd_getfd", "request_key", "userfaultfd", "clone3"}
_NO_CLONE3 = {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}
"""Its flags are out of a filter's sight; told that it does not exist, libraries use clone."""


class Hardening(msgspec.Struct, frozen=True):
    """A narrowed profile, in the form that the engine takes."""

    kind: str
    profile: bytes

    def asked(self) -> dict[str, list[str]]:
        """Parts of ``HostConfig``. Blocks."""
        if self.kind == "docker":
            usual = [*(f"/proc/{name}" for name in _USUAL), *_DEVICES]
            options = [f"seccomp={self.profile.decode()}"]
            return {"SecurityOpt": options, "MaskedPaths": [*usual, *MASKED]}
        return {"SecurityOpt": [f"mask={':'.join(MASKED)}", f"seccomp={self._kept()}"]}

    def _kept(self) -> Path:
        """The profile as a file: Podman takes no text."""
        name = hashlib.sha256(self.profile).hexdigest()[:32]
        path = cache_folder() / "seccomp" / f"{name}.json"
        if not path.exists():
            with faults(f"cannot write {path}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(f".{os.getpid()}")
                part.write_bytes(self.profile)
                part.replace(path)
        return path


def found(kind: str, security: Sequence[str]) -> Hardening | None:
    """By the profile that the engine names in `security`, or that containers have by custom."""
    named = [word for option in security for word in option.split(",")]
    paths = [word.removeprefix("profile=") for word in named if word.startswith("profile=/")]
    for path in (*paths, *_PROFILES):
        with contextlib.suppress(OSError, msgspec.DecodeError, KeyError, TypeError):
            profile = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
            if profile["defaultAction"] != "SCMP_ACT_ALLOW":
                return Hardening(kind, msgspec.json.encode(narrowed(profile)))
    return None


def holds(pid: int) -> bool:
    """Whether a process has what was asked for; which calls are refused cannot be seen."""
    with contextlib.suppress(OSError):
        mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        hidden = {line.split()[4] for line in mounts}
        return (
            hidden.issuperset(MASKED) and "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()
        )
    return False


def narrowed(profile: dict[str, Any]) -> dict[str, Any]:
    """The same without what leads to process 1."""
    return {**profile, "syscalls": [*_rules(profile["syscalls"]), _NO_CLONE3]}


def _rules(rules: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for rule in rules:
        names = [name for name in rule["names"] if name not in _REFUSED]
        narrow = {name for name in names if name in NAMED or name in _FLAGGED}
        if rule["action"] != "SCMP_ACT_ALLOW" or rule.get("args"):
            narrow = set()
        if kept := [name for name in names if name not in narrow]:
            yield {**rule, "names": kept}
        for name in sorted(narrow):
            alone = [_bits(0, _MANY[name], 0)] if name in _MANY else []
            for condition in _conditions(name):
                yield {**rule, "names": [name], "args": [*alone, condition]}


def _conditions(name: str) -> list[dict[str, Any]]:
    """One of them must hold."""
    if name in _FLAGGED:
        return [_bits(_FLAGGED[name], _NEWUSER, 0)]
    # Not 1: its lowest bit is not set, or another one is. To be unequal is to differ in 64 bits.
    number = NAMED[name]
    return [_bits(number, 1, 0), *(_bits(number, 1 << n, 1 << n) for n in range(1, _BITS))]


def _bits(argument: int, mask: int, wanted: int) -> dict[str, Any]:
    compared = {"value": mask, "valueTwo": wanted, "op": "SCMP_CMP_MASKED_EQ"}
    return {"index": argument, **compared}
