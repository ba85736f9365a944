"""Mount a sandbox's folders so that root's files in them belong to the sandbox's kernel user.

The kernel counts pages of pipes, descriptors in flight, locked memory and watches of epoll for each
user of this machine. So each sandbox has a user of its own there, which owns nothing: its folders
are idmapped mounts (Linux 5.12, layers of an overlay 5.19) in a mount namespace of its own. On disk
the files still belong to root, and root reads and writes them as before.
"""

import ctypes
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tugline.sandbox.overlay import mount_overlay

_STAGE = Path("/tmp")  # noqa: S108 - covered by a mount that only this namespace has
"""Where the folders are in the namespace. bwrap needs none of this machine's files there."""
_OWN = _STAGE / "own"
"""Followed by the path of the sandbox's directory on this machine: see `find_source`."""
_OPTIONS = frozenset({"--bind", "--ro-bind"})
_OPEN_TREE = 428
_MOVE_MOUNT = 429
_MOUNT_SETATTR = 442
"""Numbers of system calls, on every kind of processor."""
_CURRENT_FOLDER = -100
_EMPTY_PATH = 0x1000
_RECURSIVE = 0x8000
_CLONE = 1
_CLOSE_ON_EXEC = 0x80000
_FROM_EMPTY_PATH = 4
_IDMAP = 0x100000
_NEW_MOUNTS = 0x20000
_PRIVATE = 1 << 18 | 1 << 14
_NOSUID_NODEV = 2 | 4
_LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded once: each `CDLL` is a class of its own, in cycles of references."""


class CannotMapError(OSError):
    """The kernel, or a file system, cannot show files with other owners."""


class _Attributes(ctypes.Structure):
    """``struct mount_attr``."""

    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("namespace", ctypes.c_uint64),
    )


def choose_places(directory: Path, sources: Iterable[str]) -> dict[Path, Path]:
    """Return the places of a sandbox's `directory` and of each source that is not below it."""
    places = {directory: _OWN / directory.relative_to("/")}
    for path in map(Path, sources):
        if path not in places and not path.is_relative_to(directory):
            places[path] = _STAGE / str(len(places))
    return places


def find_source(place: str) -> Path:
    """Return the path on this machine of what is in a sandbox's directory."""
    path = Path(place)
    return Path("/") / path.relative_to(_OWN) if path.is_relative_to(_OWN) else path


def list_sources(arguments: Sequence[str]) -> list[str]:
    """Return the folders and files that these arguments of bwrap mount."""
    return [arguments[index + 1] for index, word in enumerate(arguments) if word in _OPTIONS]


def relocate(arguments: Sequence[str], places: Mapping[Path, Path]) -> list[str]:
    """Return arguments of bwrap with each mounted path replaced by its place in the namespace."""
    moved = list(arguments)
    for index, word in enumerate(arguments):
        if word in _OPTIONS:
            moved[index + 1] = str(find_place(Path(arguments[index + 1]), places))
    return moved


def find_place(path: Path, places: Mapping[Path, Path]) -> Path:
    """Return where `path` is in the namespace: below a folder of `places`, or as it is."""
    for folder in (path, *path.parents):
        if folder in places:
            return places[folder] / path.relative_to(folder)
    return path


def mount_stage(
    places: Mapping[Path, Path], owners: int, overlay: tuple[Path, str] | None = None
) -> int:
    """Mount each key of `places` at its value in a new mount namespace; return its descriptor.

    `owners` is a user namespace that maps the owners of files. `overlay` is the place and the
    options of an overlay, mounted last. Blocks. Raises `CannotMapError`.
    """

    def mount() -> int:
        _check(_LIBC.unshare(_NEW_MOUNTS), "unshare")
        _check(_LIBC.mount(b"none", b"/", None, _PRIVATE, None), "/")
        trees: dict[Path, int] = {}
        try:
            for source in places:
                trees[source] = _copy_tree(source, owners)
            stage = os.fsencode(_STAGE)
            _check(_LIBC.mount(b"stage", stage, b"tmpfs", _NOSUID_NODEV, b"mode=755"), str(_STAGE))
            for source, place in places.items():
                _attach(trees[source], place)
        finally:
            for tree in trees.values():
                os.close(tree)
        if overlay is not None and (error := mount_overlay(*overlay)):
            raise CannotMapError(
                f"an overlay over folders with mapped owners cannot be mounted: {error}"
            )
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    with ThreadPoolExecutor(1) as thread:  # leaves this process's namespace, so it must end
        return thread.submit(mount).result()


def _copy_tree(source: Path, owners: int) -> int:
    """Return a detached copy of the mount at `source`, with its owners mapped."""
    flags = _CLONE | _RECURSIVE | _CLOSE_ON_EXEC
    tree: int = _LIBC.syscall(_OPEN_TREE, _CURRENT_FOLDER, os.fsencode(source), flags)
    _check(tree, str(source))
    wanted = _Attributes(set=_IDMAP, namespace=owners)
    size = ctypes.sizeof(wanted)
    flags = _EMPTY_PATH | _RECURSIVE
    try:
        done = _LIBC.syscall(_MOUNT_SETATTR, tree, b"", flags, ctypes.byref(wanted), size)
        _check(done, str(source))
    except OSError:
        os.close(tree)
        raise
    return tree


def _attach(tree: int, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        place.mkdir()
    else:
        place.touch()
    target = os.fsencode(place)
    _check(
        _LIBC.syscall(_MOVE_MOUNT, tree, b"", _CURRENT_FOLDER, target, _FROM_EMPTY_PATH), str(place)
    )


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise CannotMapError(number, f"cannot map owners ({os.strerror(number)})", what)
