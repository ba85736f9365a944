"""Archives for sandboxes on another machine: pack files, and compare two archives.

The other machine is not trusted: nothing is unpacked, no link is followed, names that leave the
folder are left out with a note, and sizes are limited.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import PurePosixPath
from typing import IO, BinaryIO

from tugline.errors import SandboxError
from tugline.patch import FileChange, Patch
from tugline.sandbox.base import Content, check_path
from tugline.sandbox.patch import (
    IGNORED,
    ChangeCollector,
    PatchLimits,
    collect_patch,
    unusable_name,
)

_BLOCK = 1 << 20


def pack_files(files: Mapping[str, Content]) -> bytes:
    """Pack `files` into a tar archive, without removed ones.

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
            member.mode = 0o755 if change.executable or change.folder else 0o644
            if change.folder:
                member.type = tarfile.DIRTYPE
            elif change.link:
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(change.data)
            else:
                member.size = len(change.data)
            tar.addfile(member, io.BytesIO(change.data))
    return archive.getvalue()


def diff_archives(before: BinaryIO, after: BinaryIO, limits: PatchLimits | None = None) -> Patch:
    """Return the changes between two tar archives of a workdir, for remote sandboxes.

    Both must be seekable; nothing is unpacked. Raises `SandboxError` for invalid
    archives.
    """
    # Only digests of the old files are kept: it may be a whole repository.
    known = {path: _member_digest(tar, member) for tar, path, member in _read_members(before)}

    def collect(collector: ChangeCollector) -> None:
        paths = set()
        for tar, path, member in _read_members(after):
            paths.add(path)
            if known.get(path) == _member_digest(tar, member):
                continue
            collector.count()
            change = _read_member(tar, member, collector.limits.file_bytes)
            if isinstance(change, FileChange):
                collector.add(path, change)
            else:
                collector.note(path, change)
        for path in known.keys() - paths:
            collector.add_removed(path)

    return collect_patch(ChangeCollector(limits or PatchLimits(), lambda _path: None), collect)


def _read_members(archive: BinaryIO) -> Iterator[tuple[tarfile.TarFile, str, tarfile.TarInfo]]:
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for member in tar:
                path = str(PurePosixPath(member.name))
                if not member.isdir() and not set(path.split("/")) & IGNORED:
                    yield tar, path, member
    except (tarfile.TarError, OSError) as error:
        raise SandboxError(f"the archive of a workdir is no tar archive: {error}") from error


def _read_member(tar: tarfile.TarFile, member: tarfile.TarInfo, max_bytes: int) -> FileChange | str:
    if ".." in member.name.split("/") or member.name.startswith("/"):
        return "a name that leaves its folder"
    if (reason := unusable_name(member.name)) is not None:
        return reason
    if member.issym():
        return FileChange(os.fsencode(member.linkname), link=True)
    file = _open_member(tar, member)
    if file is None:
        return "not a regular file"
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        return f"larger than {max_bytes} bytes, change left out"
    return FileChange(data, executable=bool(member.mode & stat.S_IXUSR))


def _open_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes] | None:
    try:
        return tar.extractfile(member) if member.isfile() or member.islnk() else None
    except KeyError:  # a hard link whose target is not in the archive
        return None


def _member_digest(tar: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[str, bytes, bool]:
    """Return a member's kind, a digest of its content, and whether it is executable."""
    digest = sha256(os.fsencode(member.linkname) if member.issym() else b"")
    file = _open_member(tar, member)
    while file is not None and (block := file.read(_BLOCK)):
        digest.update(block)
    kind = "file" if file is not None else str(member.type)
    return kind, digest.digest(), bool(member.mode & stat.S_IXUSR)
