"""The cache of workspaces: what boxes begin with, made once, shared read-only, bounded on disk.

A base is a folder that never changes after it was made: a checkout of one commit, or an image's own
working folder. It is made beside its place and renamed into it, under a lock that also holds
between processes; whoever uses one holds a shared lock on it, so what is evicted (least recently
used first) is never in use, and the locks of a killed process are gone with it. A session that
gives up waiting does not end the making: the next one finds it done.

Under ``<folder>``: ``<key>/`` the base, ``<key>.json`` what it is and its size, ``<key>.use`` and
``<key>.make`` its locks, ``<key>.part`` one that is being made, ``<key>.<hex>.part`` one that is
being removed, itself locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec

from tugline import log
from tugline.errors import ConfigError, TuglineError, UsageError, WorkspaceError
from tugline.sandbox.cache import cache_folder
from tugline.sandbox.files import faults, remove
from tugline.sandbox.workspace.repos import Source, resolve, source_of
from tugline.types import Workspace

Fill = Callable[[Path], Awaitable[None]]
"""Makes the content of a new, empty folder."""

_GB = 1_000_000_000
_FRESH_S = 60.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_GOING = re.compile(r".+\.[0-9a-f]{8}")
_log = log.get("runtimes")


class Entry(msgspec.Struct, frozen=True):
    """What is known of a base."""

    what: str
    bytes: int


class WorkspaceCache:
    """Workspaces under `folder`, together at most `most_gb` as far as they are not in use."""

    def __init__(self, folder: Path | None = None, *, most_gb: float = 50.0) -> None:
        if isinstance(most_gb, bool) or not isinstance(most_gb, (int, float)) or most_gb <= 0:
            msg = f"bases_gb is {most_gb!r}, must be a number of gigabytes above 0"
            raise ConfigError(msg)
        self._given = folder
        self._most = most_gb * _GB
        self._making: dict[str, asyncio.Task[None]] = {}
        self._answers: dict[tuple[str, str | None], tuple[float, str]] = {}
        """When a repository was asked for a tag or branch, and what it said."""

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._given or cache_folder() / "bases"

    @contextlib.asynccontextmanager
    async def open(self, workspace: Workspace) -> AsyncIterator[Path | None]:
        """The base of a workspace's `repo` or `folder`, kept until left; None if it has neither.

        Raises `WorkspaceError` where it cannot be had.
        """
        check(workspace)
        if workspace.folder is not None:
            yield await asyncio.to_thread(_in_place, workspace.folder)
        elif workspace.repo is None:
            yield None
        else:
            source = source_of(workspace.repo)
            commit = await self._commit(source, workspace.commit)
            key, what = f"git-{digest(source.where, commit)}", f"{source} at {commit}"
            async with self.filled(key, partial(self._check_out, source, commit), what) as base:
                yield base

    @contextlib.asynccontextmanager
    async def filled(self, key: str, fill: Fill, what: str = "") -> AsyncIterator[Path]:
        """The base of that key, made by `fill` if there is none, kept until left."""
        while (hold := await self._hold(key)) is None:
            await self._made(key, fill, what)
        try:
            yield self.folder / key
        finally:
            os.close(hold)

    async def prefetch(self, workspaces: Iterable[Workspace]) -> list[str]:
        """Make what is missing; returns why, for each that cannot be had."""
        failed = []
        for workspace in workspaces:
            try:
                async with self.open(workspace):
                    pass
            except TuglineError as error:
                failed.append(str(error))
        return failed

    async def _commit(self, source: Source, wanted: str | None) -> str:
        """The full hash; a branch is asked for once a minute, not for every session."""
        asked, commit = self._answers.get((source.where, wanted), (-_FRESH_S, ""))
        if time.monotonic() - asked > _FRESH_S:
            commit = await resolve(source, wanted)
            self._answers[source.where, wanted] = (time.monotonic(), commit)
        return commit

    async def _check_out(self, source: Source, commit: str, into: Path) -> None:
        if source.local:
            await source.check_out(Path(source.where), commit, into)
            return
        key = f"mirror-{digest(source.where)}"
        async with self.filled(key, source.begin_mirror, f"mirror of {source}") as mirror:
            async with self._exclusive(key):
                if await source.update_mirror(mirror, commit):
                    await asyncio.to_thread(self._note, key, mirror, f"mirror of {source}")
            await source.check_out(mirror, commit, into)

    # ------------------------------------------------------------------ one base
    async def _hold(self, key: str) -> int | None:
        """A shared lock on a base, to be closed; None if there is no such base."""
        task = asyncio.ensure_future(asyncio.to_thread(self._lock_base, key))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_let_go)
            raise

    def _lock_base(self, key: str) -> int | None:
        if not (self.folder / key).is_dir():
            return None
        with faults(f"cannot use {self.folder / key}"):
            handle = _opened(self.folder / f"{key}.use")
            fcntl.flock(handle, fcntl.LOCK_SH)  # waits for one that is evicting it, not for long
            os.utime(handle)
        if (self.folder / key).is_dir():
            return handle
        os.close(handle)
        return None

    async def _made(self, key: str, fill: Fill, what: str) -> None:
        """Wait until it is made, by whomever; being cancelled does not end the making."""
        task = self._making.get(key)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = self._making[key] = asyncio.create_task(self._make(key, fill, what))
            task.add_done_callback(lambda _: self._making.pop(key, None))
            task.add_done_callback(_look_at)
        await asyncio.shield(task)

    async def _make(self, key: str, fill: Fill, what: str) -> None:
        base, part = self.folder / key, self.folder / f"{key}.part"
        async with self._exclusive(key):
            if await asyncio.to_thread(base.is_dir):
                return
            began = time.monotonic()
            await asyncio.to_thread(self._afresh, part)
            try:
                await fill(part)
                await asyncio.to_thread(self._note, key, part, what)
                await asyncio.to_thread(part.rename, base)
            except BaseException:
                await asyncio.shield(asyncio.to_thread(remove, self.folder, part.name))
                raise
            _log.info("workspace made", base=key, what=what, seconds=time.monotonic() - began)
        await asyncio.to_thread(self.evict, key)

    def _afresh(self, part: Path) -> None:
        with faults(f"cannot make {part}"):
            remove(self.folder, part.name)
            part.mkdir()

    def _note(self, key: str, folder: Path, what: str) -> None:
        with faults(f"cannot write {self.folder / key}.json"):
            entry = Entry(what, _bytes(folder))
            (self.folder / f"{key}.json").write_bytes(msgspec.json.encode(entry))

    @contextlib.asynccontextmanager
    async def _exclusive(self, key: str) -> AsyncIterator[None]:
        """Nobody else makes or changes it."""
        with faults(f"cannot write to {self.folder}, set TUGLINE_CACHE elsewhere"):
            await asyncio.to_thread(self.folder.mkdir, parents=True, exist_ok=True)
            handle = _opened(self.folder / f"{key}.make")
        try:
            while not _locked(handle):  # noqa: ASYNC110 - another process holds it
                await asyncio.sleep(0.1)
            yield
        finally:
            os.close(handle)

    # ------------------------------------------------------------------ all of them
    def evict(self, but: str = "") -> int:
        """Remove what was used least recently until the rest fits; returns how many.

        Also what killed processes left half-made or half-removed.
        """
        for part in self.folder.glob("*.part"):
            self._sweep(part)
        kept = self._kept()
        total = sum(size for _, _, size in kept)
        count = 0
        for _, key, size in kept:
            if total <= self._most:
                break
            if key != but and self._evicted(key):
                total -= size
                count += 1
        if total > self._most:
            _log.warning("bases in use exceed their bound", gb=total / _GB, most=self._most / _GB)
        return count

    def _kept(self) -> list[tuple[float, str, int]]:
        """When each was used last, its key and its bytes; the one used longest ago first."""
        found = []
        for path in self.folder.glob("*.json"):
            # Another process may evict it meanwhile.
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                size = msgspec.json.decode(path.read_bytes(), type=Entry).bytes
                use = path.with_suffix(".use")
                used = use if use.exists() else path
                found.append((used.stat().st_mtime, path.stem, size))
        return sorted(found)

    def _evicted(self, key: str) -> bool:
        handle = _opened(self.folder / f"{key}.use")
        gone = self.folder / f"{key}.{secrets.token_hex(4)}.part"
        removing = -1
        try:
            if not _locked(handle):
                return False
            with contextlib.suppress(FileNotFoundError):
                removing = os.open(self.folder / key, _FOLDER)
                _locked(removing)  # until it is gone: see `_sweep`
                (self.folder / key).rename(gone)
            (self.folder / f"{key}.json").unlink(missing_ok=True)
            os.close(handle)
            handle = -1
            remove(self.folder, gone.name)
        finally:
            for held in (handle, removing):
                if held >= 0:
                    os.close(held)
        _log.info("workspace evicted", base=key)
        return True

    def _sweep(self, part: Path) -> None:
        """Remove what is half-made or half-removed, unless somebody is at it."""
        key = part.name.removesuffix(".part")
        with contextlib.suppress(OSError):  # gone meanwhile
            going = _GOING.fullmatch(key)
            handle = os.open(part, _FOLDER) if going else _opened(self.folder / f"{key}.make")
            try:
                if _locked(handle):
                    remove(self.folder, part.name)
            finally:
                os.close(handle)


def check(workspace: Workspace) -> None:
    """Refuse what contradicts itself. Raises `UsageError` that names the field."""
    if workspace.repo is not None and workspace.folder is not None:
        msg = "workspace: repo and folder are both given; one of them is where the files come from"
        raise UsageError(msg)
    if workspace.commit is not None and workspace.folder is not None:
        msg = f"workspace.commit is {workspace.commit!r}, but workspace.folder is used as it is"
        raise UsageError(msg)
    sources = (workspace.repo, workspace.image, workspace.build)
    if workspace.commit is not None and not any(sources):
        msg = f"workspace.commit is {workspace.commit!r}, but there is no workspace.repo"
        raise UsageError(msg)
    if workspace.folder is not None and not Path(workspace.folder).is_absolute():
        msg = f"workspace.folder is {workspace.folder!r}, must be an absolute path of the node"
        raise UsageError(msg)


def digest(*parts: str) -> str:
    """A name for what the parts say."""
    return sha256("\0".join(parts).encode()).hexdigest()[:24]


def _in_place(folder: str) -> Path:
    found = Path(folder).resolve()
    if not found.is_dir():
        msg = f"workspace.folder is {folder!r}, which is no folder on this node"
        raise WorkspaceError(msg)
    if found == Path(found.anchor):
        msg = f"workspace.folder is {folder!r}: the root of the node cannot be a workspace"
        raise UsageError(msg)
    return found


def _opened(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _let_go(task: asyncio.Future[int | None]) -> None:
    if not task.cancelled() and task.exception() is None and (handle := task.result()) is not None:
        os.close(handle)


def _look_at(task: asyncio.Task[None]) -> None:
    """Nobody may be waiting for it any more; then its failure is not worth a warning."""
    if not task.cancelled():
        task.exception()


def _bytes(folder: Path) -> int:
    """What it takes on disk."""
    total = 0
    stack = [os.fspath(folder)]
    while stack:
        with os.scandir(stack.pop()) as entries:
            for entry in entries:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    stack.append(entry.path)
    return total
