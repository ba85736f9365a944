"""System calls that a sandboxed program has no use for but to get at its keeper, as a filter.

The shell that runs programs (`programs.runner`) is process 1 of the sandbox and of the same user as
they are, so the calls that look into, take over, bound or slow another process are refused when
they name it, or a group of processes that it may be in. New user namespaces, kernel keyrings (which
belong to the user, not to the sandbox), BPF and the like are doors into the kernel that bugs come
through. Debuggers work on every other process.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping

_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_X32 = 0x40000000
_NEWUSER = 0x10000000
_KEEPER = 1
_PRIO_MANY, _IOPRIO_MANY = 3, 2
"""Bits that say: not of a process but of a group's or a user's, which the keeper is one of."""

_ARCHES: dict[str, tuple[int, int]] = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's name of the machine, and the column of the tables below."""

_REFUSED: Mapping[str, tuple[tuple[int, int], int]] = {
    "add_key": ((248, 217), errno.ENOSYS),
    "bpf": ((321, 280), errno.EPERM),
    "clone3": ((435, 435), errno.ENOSYS),  # its flags are out of a filter's sight; clone's are not
    "io_uring_setup": ((425, 425), errno.ENOSYS),
    "keyctl": ((250, 219), errno.ENOSYS),
    "perf_event_open": ((298, 241), errno.EPERM),
    "pidfd_getfd": ((438, 438), errno.EPERM),
    "request_key": ((249, 218), errno.ENOSYS),
    "userfaultfd": ((323, 282), errno.EPERM),
}
_REFUSED_WITH: Mapping[str, tuple[tuple[int, int], int, int, int]] = {
    "clone": ((56, 220), 0, _BITS, _NEWUSER),
    "ioprio_set": ((251, 30), 1, _EQUAL, _KEEPER),
    "ioprio_set of many": ((251, 30), 0, _BITS, _IOPRIO_MANY),
    "prlimit64": ((302, 261), 0, _EQUAL, _KEEPER),
    "process_vm_readv": ((310, 270), 0, _EQUAL, _KEEPER),
    "process_vm_writev": ((311, 271), 0, _EQUAL, _KEEPER),
    "ptrace": ((101, 117), 1, _EQUAL, _KEEPER),
    "sched_setaffinity": ((203, 122), 0, _EQUAL, _KEEPER),
    "sched_setattr": ((314, 274), 0, _EQUAL, _KEEPER),
    "sched_setparam": ((142, 118), 0, _EQUAL, _KEEPER),
    "sched_setscheduler": ((144, 119), 0, _EQUAL, _KEEPER),
    "setpriority": ((141, 140), 1, _EQUAL, _KEEPER),
    "setpriority of many": ((141, 140), 0, _BITS, _PRIO_MANY),
    "unshare": ((272, 97), 0, _BITS, _NEWUSER),
}
"""Numbers, which argument, how it is compared, with what."""

NAMED: Mapping[str, int] = {
    name: argument for name, (_, argument, how, _) in _REFUSED_WITH.items() if how == _EQUAL
}
"""Calls that name a process and are refused for the keeper, and in which argument they name it."""


def seccomp(machine: str | None = None) -> bytes:
    """The filter as bubblewrap reads it; empty for a machine whose numbers are not known here."""
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
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in code)
