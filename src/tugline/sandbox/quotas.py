"""Shares of the kernel's quotas that are counted for a user or the machine, not for a sandbox.

A sandbox with a user namespace may take a share of the quotas that the kernel counts in namespaces
(``/proc/sys/user``) or by rlimits, and each sandbox a share of the terminals, so that one cannot
take all. What the kernel counts for a user of this machine, it takes as a user of its own (`stage`)
where its folders allow that. Calls with a quota of the whole machine (`io_setup`) are refused: see
`syscalls.toml`. The rest cannot be divided: `list_shared`.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import secrets
import subprocess
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tugline.sandbox.processes import close_all

_SHARES = 4
"""Number of sandboxes that together can take a whole quota."""
_COUNTS = (
    *("max_inotify_instances", "max_inotify_watches"),
    *("max_fanotify_groups", "max_fanotify_marks"),
)
"""Files of ``/proc/sys/user``; not all exist in every kernel."""
_RLIMITS = (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING)
_SET = 'for each; do echo "${each#*=}" >"/proc/sys/user/${each%=*}" || exit; done'
_SET += '; exec unshare --user --map-user=1000 --map-group=1000 sh -c "echo; read -r _"'
"""Script in a new user namespace: limit its counts, create one below it, wait to be read."""
_WAIT = "echo; read -r _"
_FIRST_USER = 0x70000000
_USERS = 0x0FFE0000
"""Kernel users that no tool hands out: systemd's table of user ids calls them unused."""
_ALL_USERS = (1 << 32) - 1
_HELPER_S = 10.0
_NS_GET_PARENT = 0xB702
_FSCONFIG = 431
_FSPICK = 433
"""Numbers of system calls, on every kind of processor."""
_SET_STRING = 1
_RECONFIGURE = 7
_CURRENT_FOLDER = -100
_CLOSE_ON_EXEC = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded once: each `CDLL` is a class of its own, in cycles of references."""


class UserNamespaces(NamedTuple):
    """Descriptors of user namespaces for a sandbox."""

    limited: int
    """Has limited counts; its root is the sandbox's kernel user."""
    inner: int
    """That of the sandbox's programs, below it."""
    user: int
    """The kernel's user of the sandbox; 0 for one that is shared by all."""
    owners: int
    """Exchanges root and `user` as owners of files; -1 without a user of its own."""

    @property
    def inside(self) -> tuple[int, int]:
        """The descriptors that bwrap needs."""
        return self.limited, self.inner


class NamespacePool:
    """User namespaces for sandboxes, reused by one after the other. Methods may block.

    With `own_users`, each has a user of the kernel of its own.
    """

    def __init__(self, *, own_users: bool) -> None:
        self.own_users = own_users
        self._free: list[UserNamespaces] = []
        weakref.finalize(self, _close_all, self._free)

    def take(self) -> UserNamespaces:
        """Return namespaces that no sandbox uses, created if there are none. Raises `OSError`."""
        with contextlib.suppress(IndexError):
            return self._free.pop()
        user = _FIRST_USER + secrets.randbelow(_USERS) if self.own_users else 0
        owners = _exchange_owners(user) if user else -1
        try:
            limited, inner = _limit_counts(user)
        except OSError:
            close_all(owners)
            raise
        return UserNamespaces(limited, inner, user, owners)

    def give_back(self, namespaces: UserNamespaces) -> None:
        """Keep namespaces, whose processes have ended, for another sandbox."""
        self._free.append(namespaces)

    def close(self) -> None:
        """Close the namespaces that no sandbox uses."""
        _close_all(self._free)


def _close_all(free: list[UserNamespaces]) -> None:
    while free:
        namespaces = free.pop()
        close_all(*namespaces.inside, namespaces.owners)


def _limit_counts(user: int) -> tuple[int, int]:
    """Create a user namespace with limited counts for `user` and one below it."""
    identity = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups") if user else ()
    limits = [f"{name}={total // _SHARES}" for name in _COUNTS if (total := _read_count(name))]
    script = ("unshare", "--user", "--map-root-user", "/bin/sh", "-c", _SET, "sh", *limits)
    with _start_helper(*identity, *script) as pid:
        inner = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return fcntl.ioctl(inner, _NS_GET_PARENT), inner
        except OSError:
            os.close(inner)
            raise


def _exchange_owners(user: int) -> int:
    """Create a user namespace for mounts in which files of root belong to `user`."""
    after = _ALL_USERS - user - 1
    lines = (f"0 {user} 1", f"1 1 {user - 1}", f"{user} 0 1", f"{user + 1} {user + 1} {after}")
    with _start_helper("unshare", "--user", "/bin/sh", "-c", _WAIT) as pid:
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text("\n".join(lines))
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def _start_helper(*argv: str) -> Iterator[int]:
    """Start a process that prints a line when it is in its namespace; yield its id; kill it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as helper:
        ending = threading.Timer(_HELPER_S, helper.kill)
        ending.start()
        try:
            if not (helper.stdout and helper.stdout.readline()):
                raise OSError(helper.stderr.read().decode() if helper.stderr else "")
            yield helper.pid
        finally:
            ending.cancel()
            helper.kill()


def limit_queues(pid: int) -> None:
    """Lower rlimits of process 1 of a sandbox whose user namespace counts them. Blocks."""
    with contextlib.suppress(ProcessLookupError):  # reported by `Runner`
        for kind in _RLIMITS:
            hard = resource.prlimit(pid, kind)[1]
            if hard != resource.RLIM_INFINITY:
                resource.prlimit(pid, kind, (hard // _SHARES, hard // _SHARES))


def limit_terminals(pid: int) -> bool:
    """Limit the pseudo-terminals of a sandbox; return whether it worked: only root may. Blocks."""
    try:
        pty = Path("/proc/sys/kernel/pty")
        total = int((pty / "max").read_text()) - int((pty / "reserve").read_text())
    except OSError:
        return False
    path = os.fsencode(Path(f"/proc/{pid}", "root", "dev", "pts"))
    context = _LIBC.syscall(_FSPICK, _CURRENT_FOLDER, path, _CLOSE_ON_EXEC)
    if context < 0:
        return False
    try:
        most = str(max(1, total // _SHARES)).encode()
        for name, value in {**_terminal_options(pid), b"max": most}.items():
            if _LIBC.syscall(_FSCONFIG, context, _SET_STRING, name, value, 0):
                return False
        return not _LIBC.syscall(_FSCONFIG, context, _RECONFIGURE, None, None, 0)
    finally:
        os.close(context)


def list_shared(*, namespaces: bool, own_users: bool = False) -> list[str]:
    """Return the quotas of which one sandbox can take all, one line each.

    `namespaces` is whether each sandbox has a user namespace of its own, `own_users` whether each
    has a user of the kernel of its own.
    """
    user = []
    if not own_users:
        user += ["pages of pipes (fs.pipe-user-pages-soft)"]
        user += ["descriptors in flight between sockets (RLIMIT_NOFILE)"]
        user += ["locked memory (RLIMIT_MEMLOCK)", "watches of epoll"]
    if not namespaces:
        user += ["inotify and fanotify", "POSIX queues (RLIMIT_MSGQUEUE)"]
        user += ["pending signals and timers"]
    machine = "TCP buffers (net.ipv4.tcp_mem) and open descriptors (fs.file-max)"
    lines = [f"one sandbox can exhaust quotas of the machine: {machine}"]
    if user:
        what = "one sandbox can exhaust the quotas of the user that runs all sandboxes"
        lines.insert(0, f"{what}: {', '.join(user)}")
    if os.geteuid() != 0:
        lines.append("one sandbox can exhaust the pseudo-terminals (kernel.pty.max)")
    return lines


def _terminal_options(pid: int) -> dict[bytes, bytes]:
    """Return the options of a sandbox's ``/dev/pts``, which a new option resets to defaults."""
    for line in Path(f"/proc/{pid}/mountinfo").read_bytes().splitlines():
        words = line.split()
        if words[4] == b"/dev/pts":
            pairs = (word.partition(b"=") for word in words[-1].split(b","))
            return {name: value for name, sign, value in pairs if sign}
    return {}


def _read_count(name: str) -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/sys/user", name).read_text())
    return 0
