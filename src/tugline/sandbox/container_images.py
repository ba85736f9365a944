"""A cache of images that are pulled, or built from a folder, once; bounded on disk.

A built image is named after the content of its folder: equal folders share an image in all tasks,
and a changed folder gets a new one. A session that stops waiting does not stop a pull or a build:
the next session waits for it or finds the result. Only images that were pulled or built here are
removed, the least recently used first, and none that a container uses.
"""

import asyncio
import collections
import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from tugline import log
from tugline.aio import finish
from tugline.errors import DiskFull, ImageError, SandboxError, UsageError
from tugline.sandbox.cache import cache_folder
from tugline.sandbox.container_engine import (
    CALL_S,
    LABEL,
    ContainerEngine,
    Docker,
    DockerError,
    pack,
    retry,
    translate_errors,
)
from tugline.sandbox.files import hash_file, replace_file
from tugline.sandbox.processes import SharedTasks, run_command
from tugline.types import Workspace

BUILT = "localhost/tugline/built"
_HINT = "; load it into the engine by hand, or let the engine reach a registry"
_COPY_S = 1800.0
"""Timeout for reading a folder out of an image, and for removing images."""
_ERROR_LINES = 15
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NAME = re.compile(r"\w[\w.:@-]*(/\w[\w.:@-]*)*")
"""Valid image name. It is a part of the engine's URLs, so no ``..``, ``?`` or the like."""
_GB = 1 << 30
_log = log.get("sandbox")


class ContainerImage(msgspec.Struct, frozen=True):
    """An image in the engine's storage."""

    name: str
    id: str
    workdir: PurePosixPath | None
    """Working folder of the image; None if it is the root."""
    user: str
    """User of the image's programs; empty for root."""
    size: int


@dataclass
class ImageCache:
    """Cache of the images of one engine."""

    engine: ContainerEngine
    _: KW_ONLY
    pull: bool
    """Whether missing images are pulled."""
    max_gb: float
    pull_s: float
    build_s: float

    def __post_init__(self) -> None:
        self._marks = cache_folder() / "images"
        """Folder with a file per image that was pulled or built here; mtime is the last use."""
        self._making = SharedTasks()
        self._has_path: dict[tuple[str, str], bool] = {}

    async def get(self, workspace: Workspace) -> ContainerImage:
        """Return the image of `workspace`, pulled or built if missing.

        Raises `ImageError` and `DiskFull`.
        """
        if workspace.build is not None:
            name = await asyncio.to_thread(build_name, Path(workspace.build))
        elif workspace.image is not None:
            name = workspace.image
        else:
            msg = (
                "runtime 'container': set `image` in the task's workspace or in the runtime's "
                "options"
            )
            raise UsageError(msg)
        image = await self._find(name)
        if image is None:  # made once for all waiting sessions
            await self._making.run(name, partial(self._make, name, workspace.build))
            image = await self._find(name)
        if image is None:
            raise ImageError(f"image {name!r} was removed right after it was pulled or built")
        await asyncio.to_thread(self._mark_used, name)
        return image

    async def find_paths(self, image: ContainerImage, paths: Sequence[str]) -> frozenset[str]:
        """Return the `paths` that exist in the image."""
        missing = [path for path in paths if (image.id, path) not in self._has_path]
        if missing:
            async with self.engine.client() as docker, open_archive(docker, image) as archive:
                for path in missing:
                    async with docker.session.head(archive, params={"path": path}) as response:
                        self._has_path[image.id, path] = response.status == 200
        return frozenset(path for path in paths if self._has_path[image.id, path])

    async def copy(self, image: ContainerImage, path: PurePosixPath, to: Path) -> None:
        """Copy the folder `path` of an image into the folder `to`."""
        unpack = ("tar", "-x", "-p", "--numeric-owner", "--strip-components=1", "-C", str(to))
        with tempfile.NamedTemporaryFile(dir=to.parent) as packed:
            async with (
                self.engine.client(limit_s=_COPY_S) as docker,
                open_archive(docker, image) as archive,
                docker.session.get(archive, params={"path": str(path)}) as response,
            ):
                async for chunk in response.content.iter_chunked(1 << 20):
                    await asyncio.to_thread(packed.write, chunk)
            packed.flush()
            code, _, errors = await run_command((*unpack, "-f", packed.name), timeout_s=_COPY_S)
        if code != 0:
            msg = f"{path} of image {image.name!r} cannot be copied to {to}: {errors[-400:]}"
            raise (DiskFull if "No space left" in errors else ImageError)(msg)

    async def _find(self, name: str) -> ContainerImage | None:
        async with self.engine.client() as docker:
            return await find_image(docker, name)

    async def _make(self, name: str, build: str | None) -> None:
        await (self._pull(name) if build is None else self._build(Path(build), name))
        await asyncio.to_thread(self._mark_used, name, made=True)
        await self._evict(name)

    async def _pull(self, name: str) -> None:
        if not self.pull:
            raise ImageError(f"image {name!r} is missing, and the option `pull` is 'never'")
        _log.info("pulling", image=name)
        what = f"image {name!r} cannot be pulled"
        client = self.engine.client(what, self.pull_s, option="pull_s", kind=ImageError, hint=_HINT)
        async with client as docker:
            await docker.images.pull(name)

    async def _build(self, folder: Path, name: str) -> None:
        _log.info("building", folder=str(folder), image=name)
        output: collections.deque[str] = collections.deque(maxlen=_ERROR_LINES)
        with tempfile.TemporaryFile() as context:
            await asyncio.to_thread(pack, folder, context)
            what = f"{folder / 'Dockerfile'} cannot be built"
            client = self.engine.client(what, self.build_s, option="build_s", kind=ImageError)
            try:
                async with client as docker:
                    async for event in docker.images.build(
                        fileobj=context,
                        encoding="identity",
                        tag=name,
                        labels={LABEL: "built"},
                        forcerm=True,
                        stream=True,
                    ):
                        output.extend(str(event.get("stream", "")).splitlines())
            except ImageError as error:
                lines = "\n".join(_COLOUR.sub("", line) for line in output if line.strip())
                raise ImageError(f"{error}\n{lines}".rstrip()) from error

    def _mark_used(self, name: str, *, made: bool = False) -> None:
        mark = self._marks / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.used"
        with contextlib.suppress(OSError, SandboxError):
            if made:
                mark.parent.mkdir(parents=True, exist_ok=True)
                replace_file(mark, name.encode())
            elif mark.exists():
                os.utime(mark)

    async def _evict(self, keep: str) -> None:
        """Remove images that were made here, least recently used first, until the rest fits."""
        marks = await asyncio.to_thread(self._list_marks)
        async with self.engine.client(limit_s=_COPY_S) as docker:
            images = {name: await find_image(docker, name) for _, name in marks}
            sizes = {name: image.size for name, image in images.items() if image is not None}
            for mark in (mark for mark, name in marks if name not in sizes):
                mark.unlink(missing_ok=True)
            total = sum(sizes.values())
            for mark, name in marks:
                if total <= self.max_gb * _GB:
                    return
                if name in sizes and name != keep:
                    with contextlib.suppress(DockerError):  # in use
                        await docker.images.delete(name)
                        mark.unlink(missing_ok=True)
                        total -= sizes[name]
                        _log.info("image removed", image=name, limit_gb=self.max_gb)

    def _list_marks(self) -> list[tuple[Path, str]]:
        """Return (mark file, name) of images made here, the least recently used first."""
        marks = sorted(self._marks.glob("*.used"), key=lambda mark: mark.stat().st_mtime)
        return [(mark, mark.read_text()) for mark in marks]


async def find_image(docker: Docker, name: str) -> ContainerImage | None:
    """Return the engine's image of that name; None if missing. Raises `ImageError`."""
    if not _NAME.fullmatch(name):
        raise ImageError(f"{name!r} is not a valid image name")
    # Podman answers 500 while its storage is written.
    details = await retry(partial(docker.images.inspect, name), 0.2, 1.0)
    if details is None:
        return None
    config: dict[str, Any] = details.get("Config") or {}
    workdir = PurePosixPath(config.get("WorkingDir") or "/")
    return ContainerImage(
        name=name,
        id=str(details["Id"]),
        workdir=workdir if workdir != PurePosixPath("/") else None,
        user=config.get("User") or "",
        size=int(details.get("Size") or 0),
    )


@contextlib.asynccontextmanager
async def open_archive(docker: Docker, image: ContainerImage) -> AsyncIterator[str]:
    """Yield a URL for reading an image's files, of a container that is created but not started."""
    with translate_errors(f"image {image.name!r} cannot be read", ImageError):
        config: dict[str, Any] = {"Image": image.id, "Entrypoint": ["/"], "Labels": {LABEL: "peek"}}
        # A cancellation must not interrupt creation and removal, which need the open client.
        making = asyncio.create_task(asyncio.wait_for(docker.containers.create(config), CALL_S))
        try:
            container = await finish(making)
            yield f"unix://localhost/{docker.api_version}/containers/{container.id}/archive"
        finally:
            if not making.cancelled() and making.exception() is None:
                removing = making.result().delete(force=True, v=True)
                await finish(asyncio.wait_for(removing, CALL_S))


def build_name(folder: Path) -> str:
    """Return the image name of a build context, a hash of its files. Blocks."""
    if not (folder / "Dockerfile").is_file():
        raise ImageError(f"workspace.build is {str(folder)!r}, must be a folder with a Dockerfile")
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        hash_file(digest, path, str(path.relative_to(folder)))
    return f"{BUILT}:{digest.hexdigest()[:32]}"
