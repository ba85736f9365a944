"""A cache of folders that are made once and shared read-only by all sandboxes; bounded on disk.

An entry is immutable: a checkout of one commit, or a folder copied from an image. It is filled
beside its final path and renamed, under a file lock. A user of an entry holds a shared lock, so an
entry in use is never evicted (least recently used first); locks end with their process. A session
that stops waiting does not stop the filling: the next session waits for it or finds the result.

Files under ``<folder>``: ``<key>/`` the entry, ``<key>.json`` its description and size,
``<key>.use`` the lock of its users, ``<key>.make`` the lock for filling and removing it,
``<key>.part`` an entry that is being filled or removed.
"""

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec

from tugline import log
from tugline.errors import UsageError, WorkspaceError
from tugline.sandbox.files import remove, translate_errors
from tugline.sandbox.processes import SharedTasks
from tugline.sandbox.repos import RepoSource, source_of
from tugline.sandbox.resource_monitor import folder_bytes
from tugline.types import Workspace

Fill = Callable[[Path], Awaitable[None]]
"""Fills a new, empty folder."""

_GB = 1_000_000_000
_RESOLVED_FOR_S = 60.0
_LOCK_PAUSE_S = 0.1
_log = log.get("sandbox")


def cache_folder() -> Path:
    """Return this machine's cache folder: ``$TUGLINE_CACHE``, or ``~/.cache/tugline``."""
    path = os.environ.get("TUGLINE_CACHE")
    return Path(path).expanduser().absolute() if path else Path.home() / ".cache" / "tugline"


def digest(*parts: str) -> str:
    """Return a hash of `parts`, 24 hexadecimal digits."""
    return sha256("\0".join(parts).encode()).hexdigest()[:24]


class _CacheEntry(msgspec.Struct, frozen=True):
    description: str
    bytes: int


class WorkspaceCache:
    """Cache entries under `folder`; unused ones are evicted beyond `max_gb` in total."""

    def __init__(self, folder: Path | None = None, *, max_gb: float = 50.0) -> None:
        self.folder = folder or cache_folder() / "workspaces"
        """Folder of the entries."""
        self._max_bytes = max_gb * _GB
        self._making = SharedTasks()
        self._resolved: dict[tuple[str, str | None], tuple[float, str]] = {}
        """(time of the query, commit) by (repository, tag or branch)."""

    @contextlib.asynccontextmanager
    async def open(self, workspace: Workspace) -> AsyncIterator[Path | None]:
        """Open the folder of a workspace's `repo` or `folder`; None if it has neither.

        Raises `UsageError` for contradictory fields, `WorkspaceError` if making it fails.
        """
        for field, value, must in find_contradictions(workspace):
            raise UsageError(f"{field} is {value!r}, must be {must}")
        if workspace.folder is not None:
            yield await asyncio.to_thread(_existing_folder, workspace.folder)
        elif workspace.repo is None:
            yield None
        else:
            source = source_of(workspace.repo)
            commit = await self._resolve(source, workspace.commit)
            key = f"git-{digest(source.where, commit)}"
            fill = partial(self._check_out, source, commit)
            async with self.entry(key, fill, f"{source} at {commit}") as folder:
                yield folder

    @contextlib.asynccontextmanager
    async def entry(self, key: str, fill: Fill, description: str = "") -> AsyncIterator[Path]:
        """Open the entry of `key`, filled by `fill` if missing; it is not evicted in the block."""
        while (lock := self._lock_entry(key)) is None:
            await self._making.run(key, partial(self._make, key, fill, description))
        try:
            yield self.folder / key
        finally:
            os.close(lock)

    async def _resolve(self, source: RepoSource, wanted: str | None) -> str:
        """Return the full hash; a tag or branch is resolved at most once a minute."""
        when, commit = self._resolved.get((source.where, wanted), (-_RESOLVED_FOR_S, ""))
        if time.monotonic() - when > _RESOLVED_FOR_S:
            commit = await source.resolve(wanted)
            oldest = time.monotonic() - _RESOLVED_FOR_S
            self._resolved = {key: old for key, old in self._resolved.items() if old[0] > oldest}
            self._resolved[source.where, wanted] = (time.monotonic(), commit)
        return commit

    async def _check_out(self, source: RepoSource, commit: str, into: Path) -> None:
        if source.local:
            await source.check_out(Path(source.where), commit, into)
            return
        key = f"mirror-{digest(source.where)}"
        description = f"mirror of {source}"
        async with self.entry(key, source.begin_mirror, description) as mirror:
            async with self._exclusive(key):
                if await source.update_mirror(mirror, commit):
                    await asyncio.to_thread(self._describe, key, mirror, description)
            await source.check_out(mirror, commit, into)

    # ------------------------------------------------------------------ one entry
    def _lock_entry(self, key: str) -> int | None:
        """Return a shared lock on an entry, for the caller to close; None if it is missing."""
        if not (self.folder / key).is_dir():
            return None
        with translate_errors(f"cannot use {self.folder / key}"):
            lock = _open_lock(self.folder / f"{key}.use")
            fcntl.flock(lock, fcntl.LOCK_SH)  # waits for an eviction, which is short
            os.utime(lock)
        if (self.folder / key).is_dir():
            return lock
        os.close(lock)
        return None

    async def _make(self, key: str, fill: Fill, description: str) -> None:
        entry = self.folder / key
        part = self.folder / f"{key}.part"
        async with self._exclusive(key):
            if await asyncio.to_thread(entry.is_dir):
                return
            began = time.monotonic()
            with translate_errors(f"cannot make {part}"):
                await asyncio.to_thread(remove, self.folder, part.name)
                await asyncio.to_thread(part.mkdir)
            try:
                await fill(part)
                await asyncio.to_thread(self._describe, key, part, description)
                await asyncio.to_thread(part.rename, entry)
            except BaseException:
                await asyncio.shield(asyncio.to_thread(remove, self.folder, part.name))
                raise
            seconds = time.monotonic() - began
            _log.info("workspace made", key=key, what=description, seconds=seconds)
        await asyncio.to_thread(self.evict, key)

    def _describe(self, key: str, folder: Path, description: str) -> None:
        with translate_errors(f"cannot write {self.folder / key}.json"):
            entry = _CacheEntry(description, folder_bytes(folder))
            (self.folder / f"{key}.json").write_bytes(msgspec.json.encode(entry))

    @contextlib.asynccontextmanager
    async def _exclusive(self, key: str) -> AsyncIterator[None]:
        """Hold the exclusive lock for filling or changing an entry."""
        with translate_errors(
            f"cannot write to {self.folder}; set TUGLINE_CACHE to another folder"
        ):
            await asyncio.to_thread(self.folder.mkdir, parents=True, exist_ok=True)
            lock = _open_lock(self.folder / f"{key}.make")
        try:
            while not _is_free(lock):  # noqa: ASYNC110 - another process holds it
                await asyncio.sleep(_LOCK_PAUSE_S)
            yield
        finally:
            os.close(lock)

    # ------------------------------------------------------------------ all of them
    def evict(self, keep: str = "") -> None:
        """Remove the least recently used entries until the rest fits.

        Also removes partial entries that killed processes left. Blocks.
        """
        for part in self.folder.glob("*.part"):
            with contextlib.suppress(OSError), _try_lock(part.with_suffix(".make")) as free:
                if free:  # no other process works on it
                    remove(self.folder, part.name)
        entries = self._list_entries()
        total = sum(size for _, _, size in entries)
        for _, key, size in entries:
            if total <= self._max_bytes:
                break
            if key != keep and self._try_evict(key):
                total -= size
        if total > self._max_bytes:
            gb = total / _GB
            limit = self._max_bytes / _GB
            _log.warning("workspaces in use exceed their limit", gb=gb, limit_gb=limit)

    def _list_entries(self) -> list[tuple[float, str, int]]:
        """Return (time of last use, key, bytes) of each entry, the least recently used first."""
        entries = []
        for path in self.folder.glob("*.json"):
            # Another process may evict it meanwhile.
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                size = msgspec.json.decode(path.read_bytes(), type=_CacheEntry).bytes
                use = path.with_suffix(".use")
                used = use if use.exists() else path
                entries.append((used.stat().st_mtime, path.stem, size))
        return sorted(entries)

    def _try_evict(self, key: str) -> bool:
        """Remove an entry, unless it is in use or locked; return whether it was removed."""
        with _try_lock(self.folder / f"{key}.make") as free:
            if not free:
                return False
            with _try_lock(self.folder / f"{key}.use") as unused:
                if not unused:
                    return False
                remove(self.folder, f"{key}.part")
                with contextlib.suppress(FileNotFoundError):
                    (self.folder / key).rename(self.folder / f"{key}.part")
                (self.folder / f"{key}.json").unlink(missing_ok=True)
            remove(self.folder, f"{key}.part")
        _log.info("workspace evicted", key=key)
        return True


_FOLDER = "an absolute path on the node, or in a task file the path of a folder beside it"


def find_contradictions(workspace: Workspace) -> Iterator[tuple[str, str, str]]:
    """Yield (field, value, requirement) of each invalid or contradictory field."""
    fields = msgspec.structs.asdict(workspace).items()
    present: dict[str, str] = {name: value for name, value in fields if value is not None}
    sources = present.keys() & {"image", "build", "repo"}
    path = present.get("path", "/")
    wrong_path = not path.startswith("/") or ".." in path.split("/")
    rules = (
        *((name, "\0" in value, "without null bytes") for name, value in present.items()),
        ("build", "image" in present, "left out if `image` is set"),
        ("folder", "repo" in present, "left out if `repo` is set"),
        ("folder", not present.get("folder", "/").startswith("/"), _FOLDER),
        ("commit", "folder" in present, "left out if `folder` is set, which is used as it is"),
        ("commit", not sources, "left out if neither `repo` nor `image` is set"),
        ("path", wrong_path, "an absolute path without '..'"),
    )
    for name, wrong, must in rules:
        if name in present and wrong:
            yield f"workspace.{name}", present[name], must


def _existing_folder(folder: str) -> Path:
    path = Path(folder).resolve()
    if not path.is_dir():
        raise WorkspaceError(f"workspace.folder is {folder!r}, which is not a folder on this node")
    if path == Path(path.anchor):
        msg = f"workspace.folder is {folder!r}: the root of the node cannot be a workspace"
        raise UsageError(msg)
    return path


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Try to lock a file exclusively; yield whether that succeeded."""
    lock = _open_lock(path)
    try:
        yield _is_free(lock)
    finally:
        os.close(lock)


def _is_free(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
