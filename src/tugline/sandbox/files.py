"""Files put into, read from and removed beneath a folder that a hostile program owns.

Every step down is taken from an open folder to a name in it and follows no link, so whatever the
agent has planted (links, pipes, devices, a folder swapped while we look) leads nowhere but below
the root, and nothing blocks (I6). A file is written beside its place and renamed into it: what
stood there is replaced, never written through, so a hard link or a pipe cannot carry a byte out.

The root itself is trusted: it is given as a path whose last part is no link, or as an open folder.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath, PurePosixPath

from tugline.errors import DiskFull, SandboxError, UsageError
from tugline.sandbox.base import MAX_READ_BYTES, Content, check_path
from tugline.sandbox.patch import FileChange

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC

Root = Path | int
"""A folder: its path, or an open descriptor, which stays open."""


def folder_of(root: PurePath, folders: Mapping[PurePosixPath, Path]) -> Path:
    """The folder on this machine that programs see at `root`. Raises `UsageError` if none is."""
    if (folder := folders.get(PurePosixPath(root))) is not None:
        return folder
    msg = f"files are put under {' or '.join(map(str, folders))}, not under {root}"
    raise UsageError(msg)


def placed(path: PurePath, folders: Mapping[PurePosixPath, Path]) -> tuple[Path, str]:
    """The folder on this machine that a box's `path` is in, and the rest of the path.

    `folders` by where programs see them; the innermost is the one that they see. Raises
    `UsageError` for a path that is in none.
    """
    for up in path.parents:
        if (folder := folders.get(PurePosixPath(up))) is not None:
            return folder, str(path.relative_to(up))
    msg = f"{path} is not below {' or '.join(map(str, folders))}"
    raise UsageError(msg)


def put(root: Root, files: Mapping[str, Content]) -> None:
    """Make each path beneath `root` what `files` says. All paths are checked before any is made.

    A file where a folder must be gives way, and the reverse. Text and bytes keep an old file's
    executable bit. New files belong to whom their folder belongs to. Raises `UsageError` for a path
    that leaves `root`, `DiskFull`, `SandboxError` when the disk refuses otherwise.
    """
    for path in files:
        check_path(path)
    for path, content in files.items():
        with faults(f"cannot write {_shown(root, path)}"):
            try:
                data = content.encode() if isinstance(content, str) else content
            except UnicodeEncodeError as error:
                msg = f"file {path!r} is not text that UTF-8 can hold: {error.reason}"
                raise UsageError(msg) from error
            _put(root, PurePosixPath(path), data)


def packed(files: Mapping[str, Content]) -> bytes:
    """A tar archive of `files`, for a box on another machine; those to be removed are not in it.

    Raises `UsageError` for a path that leaves its root.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(check_path(path))
            data = content.encode() if isinstance(content, str) else content
            change = data if isinstance(data, FileChange | None) else FileChange(data)
            if change is None:
                continue
            member.mode = 0o755 if change.executable else 0o644
            if change.link:
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(change.data)
            else:
                member.size = len(change.data)
            tar.addfile(member, io.BytesIO(change.data))
    return archive.getvalue()


def get(root: Root, path: str, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
    """A regular file's bytes; None if there is none, a link is in the way or it is larger."""
    parts = PurePosixPath(check_path(path))
    with contextlib.suppress(OSError), folder(root, parts.parent) as parent:
        if not stat.S_ISREG(os.lstat(parts.name, dir_fd=parent).st_mode):
            return None  # not even opened: a device may do something then
        with os.fdopen(os.open(parts.name, _READ, dir_fd=parent), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                data = file.read(max_bytes + 1)
                return data if len(data) <= max_bytes else None
    return None


@contextlib.contextmanager
def folder(root: Root, path: PurePosixPath, *, make: bool = False) -> Iterator[int]:
    """The folder at `path` beneath `root`, open. With `make`, what is in its way is replaced."""
    here = os.dup(root) if isinstance(root, int) else os.open(root, _FOLDER)
    try:
        for name in path.parts:
            below = _step(here, name, make=make)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


@contextlib.contextmanager
def faults(what: str) -> Iterator[None]:
    """Errors of the system as ours: `DiskFull`, `UsageError` (a long name) or `SandboxError`."""
    try:
        yield
    except OSError as error:
        msg = f"{what}: {error.strerror}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFull(msg) from error
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(msg) from error
        raise SandboxError(msg) from error


def remove(root: Root, name: str) -> None:
    """Remove what is at `name` in the folder `root`, if anything; a folder with all that is in it.

    It may be deeper than any path is long, and its modes may forbid it. Raises `OSError`.
    """
    with folder(root, PurePosixPath()) as parent:
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):  # the latter for a folder, on some systems
            _empty(parent, name)
            os.rmdir(name, dir_fd=parent)


def _put(root: Root, path: PurePosixPath, data: bytes | FileChange | None) -> None:
    if data is None:
        gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with gone, folder(root, path.parent) as parent:
            remove(parent, path.name)
        return
    with folder(root, path.parent, make=True) as parent:
        new = f".{secrets.token_hex(8)}.new"
        try:
            _write(parent, new, path.name, data)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(os.lstat(path.name, dir_fd=parent).st_mode):
                    remove(parent, path.name)
            os.rename(new, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=parent)
            raise


def _write(parent: int, new: str, name: str, data: bytes | FileChange) -> None:
    change = data if isinstance(data, FileChange) else FileChange(data, _executable(parent, name))
    if change.link:
        os.symlink(change.data, os.fsencode(new), dir_fd=parent)
        _give(parent, new)
        return
    with os.fdopen(os.open(new, _NEW, 0o600, dir_fd=parent), "wb") as file:
        file.write(change.data)
        os.fchmod(file.fileno(), 0o755 if change.executable else 0o644)
    _give(parent, new)


def _executable(parent: int, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(name, dir_fd=parent).st_mode
        return stat.S_ISREG(mode) and bool(mode & stat.S_IXUSR)
    return False


def _give(parent: int, name: str) -> None:
    """To the owner of the folder that it is in, where that is another than we are."""
    owner = os.fstat(parent)
    if os.geteuid() == 0 and (owner.st_uid, owner.st_gid) != (0, 0):
        os.chown(name, owner.st_uid, owner.st_gid, dir_fd=parent, follow_symlinks=False)


def _step(here: int, name: str, *, make: bool) -> int:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return _enter(here, name)
    if not make:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    remove(here, name)
    os.mkdir(name, 0o755, dir_fd=here)
    _give(here, name)
    return _enter(here, name)


def _enter(here: int, name: str) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=here)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from error
        raise


def _empty(parent: int, name: str) -> None:
    """Remove all that is below, with two descriptors whatever the depth."""
    here, above = _opened(parent, name), [os.fstat(parent)]
    names = [name]
    try:
        while True:
            below = _clear(here)
            if below is not None:
                above.append(os.fstat(here))
                names.append(below)
                here = _moved(here, _opened(here, below))
                continue
            if len(names) == 1:
                return
            here = _moved(here, os.open("..", _FOLDER, dir_fd=here))
            if not os.path.samestat(os.fstat(here), above.pop()):
                msg = f"{names[-1]} was moved while it was removed"
                raise OSError(errno.EBUSY, msg)
            os.rmdir(names.pop(), dir_fd=here)
    finally:
        os.close(here)


def _moved(old: int, new: int) -> int:
    os.close(old)
    return new


def _clear(here: int) -> str | None:
    """Remove what is no folder, and folders that are empty; the name of one that is not."""
    with os.scandir(here) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=here)
                continue
            try:
                os.rmdir(entry.name, dir_fd=here)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
                return entry.name
    return None


def _opened(parent: int, name: str) -> int:
    """A folder that is about to be emptied; a mode that forbids it is changed."""
    if os.geteuid() != 0 and hasattr(os, "O_PATH"):
        handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            if ~os.fstat(handle).st_mode & stat.S_IRWXU:
                Path(f"/proc/self/fd/{handle}").chmod(stat.S_IRWXU)
        finally:
            os.close(handle)
    return os.open(name, _FOLDER, dir_fd=parent)


def _shown(root: Root, path: str) -> str:
    return path if isinstance(root, int) else str(root / path)
