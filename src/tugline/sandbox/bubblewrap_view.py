"""Arguments of bwrap that decide what a program sees of this machine; nothing else is visible.

System folders are read-only; of ``/etc`` only what programs need to start, to speak TLS and to
know the time; no ``/home``, ``/root``, ``/var``, ``/run``, ``/tmp``, ``/mnt`` and ``/sys``; a
``/proc`` without process 1 (the runner's shell) and without the kernel's internals; a ``/dev`` of
harmless devices. This Python is there, with its packages, at its own path and first on PATH.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tugline.sandbox.base import HOME


class _View(msgspec.Struct, frozen=True):
    """The lists of ``view.toml``, which explains them."""

    links: list[str]
    masked: list[str]
    masked_files: list[str]
    etc: list[str]
    own_etc: dict[str, str]


_VIEW = msgspec.toml.decode(Path(__file__).with_name("view.toml").read_bytes(), type=_View)
_NAMESPACES = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"),
    *("--hostname", "sandbox", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"),
)
LAST_ARGUMENTS = ("--chdir", "/", "--remount-ro", "/")
"""They make the root read-only."""
SHARED_MB = 256
"""Size of ``/dev/shm``."""


def first_arguments(etc: Path) -> list[str]:
    """Return the namespaces and mounts that all sandboxes share. `etc` comes from `copy_etc`.

    The root stays writable until `LAST_ARGUMENTS`, for a sandbox's own mounts: its ``/tmp``, then
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
    seen = (*python_folders(), *readable)
    other = ["--symlink", "/tmp", "/var/tmp"]  # noqa: S108
    if any(Path(one).is_relative_to("/var/tmp") for one in seen):  # noqa: S108
        other = ["--size", str(SHARED_MB << 20), "--tmpfs", "/var/tmp"]  # noqa: S108
    return [*other, *(word for one in seen for word in ("--ro-bind", one, one))]


def copy_etc(folder: Path) -> Path:
    """Return a folder below `folder` with the sandbox's ``/etc``, made if it is not there.

    One mount instead of forty makes a start 6 ms shorter. Users and hosts are the sandbox's own.
    Blocks.
    """
    sources = [source for name in _VIEW.etc if (source := Path("/etc", name)).exists()]
    stamps = [
        f"{source} {(found := source.stat()).st_mtime_ns} {found.st_size}" for source in sources
    ]
    known = "\n".join([*stamps, *map(str, _VIEW.own_etc.items())])
    made = folder / hashlib.sha256(known.encode()).hexdigest()[:16]
    if made.is_dir():
        return made
    part = folder / f"{made.name}.{secrets.token_hex(4)}"
    part.mkdir(parents=True)
    for source in sources:
        target = part / source.relative_to("/etc")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
        else:
            shutil.copyfile(source, target)
    for name, text in _VIEW.own_etc.items():
        (part / name).write_text(text)
    for one in part.rglob("*"):
        if not one.is_symlink():
            one.chmod(0o755 if one.is_dir() else 0o644)
    part.chmod(0o755)
    with contextlib.suppress(OSError):  # another process was first
        part.rename(made)
    shutil.rmtree(part, ignore_errors=True)
    return made


def python_folders() -> list[str]:
    """Return the folders that this Python is in, unless they are in ``/usr``."""
    executable = Path(sys.executable)
    found = [sys.prefix, sys.base_prefix, str(executable.resolve().parent.parent)]
    outside = dict.fromkeys(one for one in found if not Path(one).is_relative_to("/usr"))
    return [one for one in outside if one != "/"]


def search_path() -> str:
    """Return the PATH of programs."""
    system = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
    return os.pathsep.join([f"{sys.prefix}/bin", *system])


def shows(target: str) -> bool:
    """Return whether `target` is visible without being mounted, such as a C library."""
    return Path(target).exists() and Path(target).resolve().is_relative_to("/usr")


def _system_links() -> Iterator[str]:
    for name in _VIEW.links:
        place = Path("/", name)
        if place.is_symlink():
            yield from ("--symlink", os.readlink(place), str(place))  # noqa: PTH115
        elif place.is_dir():
            yield from ("--ro-bind", str(place), str(place))


def _proc_arguments() -> Iterator[str]:
    yield from ("--proc", "/proc", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
    # Run by root, bwrap takes this for closed already; its files belong to root, and so to us.
    yield from ("--ro-bind", "/proc/sys", "/proc/sys")
    for name in _VIEW.masked:
        if Path("/proc", name).is_dir():
            yield from ("--tmpfs", f"/proc/{name}", "--remount-ro", f"/proc/{name}")
    for name in _VIEW.masked_files:
        if Path("/proc", name).exists():
            yield from ("--ro-bind", "/dev/null", f"/proc/{name}")
