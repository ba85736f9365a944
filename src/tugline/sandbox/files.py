"""Read, write and remove files below a folder that a hostile program owns.

Paths are resolved one name at a time from an open folder, without following links. So nothing that
the agent creates (links, pipes, devices, a folder that is swapped meanwhile) leads out of the root
or blocks (I6). A file is written beside its destination and renamed: an old file is replaced, never
written to, so a hard link or a pipe cannot carry data out.

The root itself is trusted: a path whose last part is not a link, or an open folder.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from tugline.errors import DiskFull, SandboxError, UsageError
from tugline.patch import FileChange
from tugline.sandbox.base import MAX_READ_BYTES, Content, check_path
from tugline.sandbox.patch import read_change

ARTIFACTS = "home"
"""Destination of `collect_artifacts` in a sandbox's log folder."""
_MAX_ARTIFACT_ENTRIES = 20_000
_MAX_ARTIFACT_BYTES = 64 << 20
_MAX_ARTIFACTS_BYTES = 256 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Root = Path | int
"""A folder: its path, or an open descriptor, which is not closed."""


def write_files(root: Root, files: Mapping[str, Content]) -> None:
    """Write each path below `root`. All paths are checked before the first is written.

    A file replaces a folder of the same path, and the reverse. Text and bytes keep the executable
    bit of an old file. New files belong to the owner of their folder. Raises `UsageError` for a
    path that leaves `root`, `DiskFull`, and `SandboxError` for other errors of the disk.
    """
    for path in files:
        check_path(path)
    for path, content in files.items():
        with translate_errors(f"cannot write {path if isinstance(root, int) else root / path}"):
            try:
                data = content.encode() if isinstance(content, str) else content
            except UnicodeEncodeError as error:
                msg = f"the text of file {path!r} cannot be encoded in UTF-8: {error.reason}"
                raise UsageError(msg) from error
            _write_path(root, PurePosixPath(path), data)


def read_file(root: Root, path: str, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
    """Return a regular file's bytes; None if it is missing, a link or too large."""
    parts = PurePosixPath(check_path(path))
    with contextlib.suppress(OSError), open_folder(root, parts.parent) as parent:
        file = read_change(parts.name, max_bytes, parent)
        return file.data if isinstance(file, FileChange) and not file.link else None
    return None


def read_states(root: Root, paths: Iterable[str]) -> dict[str, object]:
    """Return for each path a value that changes when the file does, also if it is changed back.

    It has a digest of the content (unless that is large), the mode, and the inode with its time of
    change, which no program can set. None for a missing file.
    """
    states: dict[str, object] = dict.fromkeys(paths)
    for path in states:
        parts = PurePosixPath(path)
        with contextlib.suppress(OSError), open_folder(root, parts.parent) as parent:
            now = os.lstat(parts.name, dir_fd=parent)
            file = read_change(parts.name, MAX_READ_BYTES, parent)
            digest = hashlib.sha256(file.data).digest() if isinstance(file, FileChange) else file
            states[path] = (digest, now.st_size, now.st_mode, now.st_ino, now.st_ctime_ns)
    return states


def collect_artifacts(home: Path, patterns: Sequence[str], logs: Path) -> None:
    """Copy regular files below an agent's `home` to ``<logs>/home``.

    A pattern is a relative POSIX path with ``*`` within a name and ``**`` for any folders. Files
    over 64 MiB, those beyond 256 MiB in all and those with unusable names are left out. Blocks.
    Raises the errors of `write_files`.
    """
    selected = re.compile("|".join(map(_glob_regex, patterns)) or r"(?!)")
    bytes_left = _MAX_ARTIFACTS_BYTES
    for path in _walk_files(home) if home.is_dir() else ():
        if selected.fullmatch(path) is None or not path.isprintable() or "\\" in path:
            continue
        data = read_file(home, path, min(_MAX_ARTIFACT_BYTES, bytes_left))
        if data is not None:
            (logs / ARTIFACTS).mkdir(exist_ok=True)
            write_files(logs / ARTIFACTS, {path: data})
            bytes_left -= len(data)


def _walk_files(folder: Path) -> Iterator[str]:
    seen = 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            yield os.path.relpath(os.path.join(parent, name), folder)  # noqa: PTH118 - quicker
        seen += len(folders) + len(names)
        if seen > _MAX_ARTIFACT_ENTRIES:
            return


def _glob_regex(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*)", pattern)
    wildcards = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return "".join(wildcards.get(part, re.escape(part)) for part in parts)


@contextlib.contextmanager
def open_folder(root: Root, path: PurePosixPath, *, make: bool = False) -> Iterator[int]:
    """Open the folder at `path` below `root`; with `make`, create it, replacing files."""
    folder = os.dup(root) if isinstance(root, int) else os.open(root, _FOLDER)
    try:
        for name in path.parts:
            below = _step(folder, name, make=make)
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Raise system errors as `DiskFull`, `UsageError` (a long name) or `SandboxError`."""
    try:
        yield
    except OSError as error:
        msg = f"{what}: {error.strerror}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFull(msg) from error
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(msg) from error
        raise SandboxError(msg) from error


def hash_file(digest: "hashlib._Hash", path: Path, name: str) -> None:
    """Add a file or a link to a digest: `name`, mode and content. Blocks."""
    mode = path.lstat().st_mode
    digest.update(f"{name}\0{mode:o}\0".encode(errors="surrogateescape"))
    if stat.S_ISLNK(mode):
        digest.update(os.fsencode(path.readlink()))
    elif stat.S_ISREG(mode):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())


def read_ends(path: Path, head: int, tail: int, cut: bytes = b"") -> bytes:
    """Return the first and last bytes of a trusted file, joined by `cut`, or all of it. Blocks."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= head + tail:
            return file.read()
        start = file.read(head)
        file.seek(size - tail)
        return start + cut + file.read(tail)


def replace_file(path: Path, data: bytes) -> None:
    """Write a trusted file atomically. Raises the errors of `write_files`."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    with translate_errors(f"cannot write {path}"):
        part.write_bytes(data)
        part.replace(path)


def remove(root: Root, name: str) -> None:
    """Remove `name` in the folder `root`, recursively; it may be missing.

    Works for trees deeper than the longest path and for folders without permissions. Raises
    `OSError`.
    """
    with open_folder(root, PurePosixPath()) as parent:
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):  # some systems raise the latter for a folder
            _remove_contents(parent, name)
            os.rmdir(name, dir_fd=parent)


def _write_path(root: Root, path: PurePosixPath, data: bytes | FileChange | None) -> None:
    if data is None:
        missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with missing, open_folder(root, path.parent) as parent:
            remove(parent, path.name)
        return
    if isinstance(data, FileChange) and data.folder:
        with open_folder(root, path, make=True):
            return
    with open_folder(root, path.parent, make=True) as parent:
        new = f".{secrets.token_hex(8)}.new"
        try:
            _write_new(parent, new, path.name, data)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(os.lstat(path.name, dir_fd=parent).st_mode):
                    remove(parent, path.name)
            os.rename(new, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=parent)
            raise


def _write_new(parent: int, new: str, name: str, data: bytes | FileChange) -> None:
    change = data if isinstance(data, FileChange) else FileChange(data, is_executable(name, parent))
    if change.link:
        os.symlink(change.data, os.fsencode(new), dir_fd=parent)
    else:
        with os.fdopen(os.open(new, _NEW, 0o600, dir_fd=parent), "wb") as file:
            file.write(change.data)
            os.fchmod(file.fileno(), 0o755 if change.executable else 0o644)
    _copy_owner(parent, new)


def is_executable(path: Path | str, parent: int | None = None) -> bool:
    """Return whether `path` is a file that its owner may execute; `parent` is an open folder."""
    with contextlib.suppress(OSError, ValueError):  # ValueError for a null byte
        mode = os.lstat(path, dir_fd=parent).st_mode
        return stat.S_ISREG(mode) and bool(mode & stat.S_IXUSR)
    return False


def _copy_owner(parent: int, name: str) -> None:
    """Give a file to the owner of its folder, if this process is root and the owner is not."""
    owner = os.fstat(parent)
    if os.geteuid() == 0 and (owner.st_uid, owner.st_gid) != (0, 0):
        os.chown(name, owner.st_uid, owner.st_gid, dir_fd=parent, follow_symlinks=False)


def _step(parent: int, name: str, *, make: bool) -> int:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return _enter(parent, name)
    if not make:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    remove(parent, name)
    os.mkdir(name, 0o755, dir_fd=parent)
    _copy_owner(parent, name)
    return _enter(parent, name)


def _enter(parent: int, name: str) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from error
        raise


def _remove_contents(parent: int, name: str) -> None:
    """Remove all entries of a folder, with two open descriptors at any depth."""
    folder = _open_for_removal(parent, name)
    above = [os.fstat(parent)]
    names = [name]
    try:
        while True:
            below = _remove_entries(folder)
            if below is not None:
                above.append(os.fstat(folder))
                names.append(below)
                folder = _replace_handle(folder, _open_for_removal(folder, below))
                continue
            if len(names) == 1:
                return
            folder = _replace_handle(folder, os.open("..", _FOLDER, dir_fd=folder))
            if not os.path.samestat(os.fstat(folder), above.pop()):
                raise OSError(errno.EBUSY, f"{names[-1]} was moved while it was removed")
            os.rmdir(names.pop(), dir_fd=folder)
    finally:
        os.close(folder)


def _replace_handle(old: int, new: int) -> int:
    os.close(old)
    return new


def _remove_entries(folder: int) -> str | None:
    """Remove files and empty folders; return the name of the first folder that is not empty."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
                continue
            try:
                os.rmdir(entry.name, dir_fd=folder)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
                return entry.name
    return None


def _open_for_removal(parent: int, name: str) -> int:
    """Open a folder to remove its contents; missing permissions are added."""
    if os.geteuid() != 0 and hasattr(os, "O_PATH"):
        handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            if ~os.fstat(handle).st_mode & stat.S_IRWXU:
                Path(f"/proc/self/fd/{handle}").chmod(stat.S_IRWXU)
        finally:
            os.close(handle)
    return os.open(name, _FOLDER, dir_fd=parent)
