"""The parts of this machine that bubblewrap sandboxes see: arguments of bwrap, copy of ``/etc``."""

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

_NAMESPACES = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"),
    *("--hostname", "sandbox", "--cap-drop", "ALL"),
)
LAST_ARGUMENTS = ("--chdir", "/", "--remount-ro", "/")
"""Last arguments of bwrap, which make the root read-only."""
SHARED_MB = 256
"""Size of ``/dev/shm`` in MiB."""


class View(msgspec.Struct, frozen=True):
    """The content of ``view.toml``, which documents it."""

    links: list[str]
    masked: list[str]
    masked_files: list[str]
    etc: list[str]
    own_etc: dict[str, str]


VIEW = msgspec.toml.decode(Path(__file__).with_name("view.toml").read_bytes(), type=View)


SYSTEM_PATHS = frozenset({"/usr", "/proc/sys", "/dev/null", *(f"/{name}" for name in VIEW.links)})
"""What bwrap mounts of every machine: not folders of a sandbox, a cache or a user."""


def copy_etc(folder: Path) -> Path:
    """Return a folder below `folder` with the sandbox's ``/etc``, created if missing. Blocks.

    One mount instead of forty makes a start 6 ms shorter. Users and hosts are the sandbox's own.
    """
    sources = [source for name in VIEW.etc if (source := Path("/etc", name)).exists()]
    stamps = [
        f"{source} {(status := source.stat()).st_mtime_ns} {status.st_size}" for source in sources
    ]
    version = "\n".join([*stamps, *map(str, VIEW.own_etc.items())])
    etc = folder / hashlib.sha256(version.encode()).hexdigest()[:16]
    if etc.is_dir():
        return etc
    part = folder / f"{etc.name}.{secrets.token_hex(4)}"
    part.mkdir(parents=True)
    for source in sources:
        target = part / source.relative_to("/etc")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
        else:
            shutil.copyfile(source, target)
    for name, text in VIEW.own_etc.items():
        (part / name).write_text(text)
    for path in part.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    part.chmod(0o755)
    with contextlib.suppress(OSError):  # another process was first
        part.rename(etc)
    shutil.rmtree(part, ignore_errors=True)
    return etc


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
