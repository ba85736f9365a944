"""Images: there, pulled, or built from a folder once, whoever asks; and no more than fit.

What a folder builds is named after its content, so the same Dockerfile is the same image in every
task, and a changed one is another. A pull or a build belongs to nobody: a session that gives up
waiting does not stop it, and the next one finds it further on or done. Only what was pulled or
built here is ever removed, the longest unused first, and nothing that a container is made of.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import os
import re
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

import msgspec

from tugline import log
from tugline.errors import DiskFull, ImageError, UsageError
from tugline.sandbox.container.engine import CALL_S, Docker, DockerError, Engine, faults, stream
from tugline.sandbox.exec.processes import finish
from tugline.types import Workspace

LABEL = "tugline"
BUILT = "localhost/tugline/built"
_HINT = "; load it into the engine by hand, or let the engine reach a registry"
_COPY_S = 1800.0
"""The engine's time to hand out a folder, and to remove images."""
_WORDS = 15
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_GB = 1 << 30
_log = log.get("runtimes")


class Image(msgspec.Struct, frozen=True):
    """What is known of an image."""

    name: str
    id: str
    workdir: PurePosixPath | None
    """Its own working folder, if that is not the root."""
    user: str
    """Whom its programs run as; empty for root."""
    size: int
    checks_health: bool
    """Whether its engine is to run a program in it now and then."""


class Images:
    """The images of one engine."""

    def __init__(
        self,
        engine: Engine,
        cache: Path,
        *,
        pull: bool,
        most_gb: float,
        pull_s: float,
        build_s: float,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._pull_missing = pull
        self._most = int(most_gb * _GB)
        self._pull_s, self._build_s = pull_s, build_s
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._seen: dict[tuple[str, str], bool] = {}

    async def have(self, workspace: Workspace) -> Image:
        """The image of `workspace`, made if it is not there. Raises `ImageError`, `DiskFull`."""
        if workspace.build is not None:
            folder = Path(workspace.build)
            name = await asyncio.to_thread(name_of, folder)
            image = await self._found(name) or await self._made(
                name, lambda: self._build(folder, name)
            )
        elif workspace.image is not None:
            name = workspace.image
            image = await self._found(name) or await self._made(name, lambda: self._pull(name))
        else:
            msg = (
                "runtime 'container': the task's workspace has neither image nor build, and the"
                " runtime has no option image"
            )
            raise UsageError(msg)
        await asyncio.to_thread(self._touch, name)
        return image

    async def present(self, image: Image, paths: Sequence[str]) -> frozenset[str]:
        """Those of `paths` at which the image has something."""
        missing = [path for path in paths if (image.id, path) not in self._seen]
        if missing:
            async with self._engine.call() as docker, peek(docker, image) as archive:
                for path in missing:
                    async with docker.session.head(archive, params={"path": path}) as reply:
                        self._seen[image.id, path] = reply.status == 200
        return frozenset(path for path in paths if self._seen[image.id, path])

    async def copy(self, image: Image, path: PurePosixPath, to: Path) -> None:
        """Copy a folder out of an image, as it streams."""
        argv = ("tar", "-x", "-p", "--numeric-owner", "--strip-components=1", "-C", str(to))
        asked = {"path": str(path)}
        async with (
            self._engine.call(_COPY_S) as docker,
            peek(docker, image) as archive,
            docker.session.get(archive, params=asked) as reply,
        ):
            tar = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            said = await _fed(tar, reply.content.iter_chunked(1 << 20))
        if tar.returncode != 0:
            msg = f"{path} of image {image.name!r} cannot be copied to {to}: {said[-400:]}"
            raise (DiskFull if "No space left" in said else ImageError)(msg)

    async def _found(self, name: str) -> Image | None:
        async with self._engine.call() as docker:
            return await find(docker, name)

    async def _made(self, name: str, make: Callable[[], Coroutine[Any, Any, None]]) -> Image:
        """Made by whoever comes first, for all who wait."""
        job = self._jobs.get(name)
        if job is None or job.done() or job.get_loop() is not asyncio.get_running_loop():
            job = self._jobs[name] = asyncio.create_task(self._make(name, make))
            job.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(job)
        image = await self._found(name)
        if image is None:
            msg = f"image {name!r} is gone again after it was made"
            raise ImageError(msg)
        return image

    async def _make(self, name: str, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await make()
        await asyncio.to_thread(self._touch, name, made=True)
        await self._evict(name)

    async def _pull(self, name: str) -> None:
        if not self._pull_missing:
            msg = f"image {name!r} is not there, and the option pull is 'never'"
            raise ImageError(msg)
        _log.info("pulling", image=name)
        try:
            async with asyncio.timeout(self._pull_s), self._engine.client() as docker:
                with faults(f"image {name!r} cannot be pulled", ImageError, hint=_HINT):
                    named = {":", "@"} & set(name.rpartition("/")[2])
                    asked = {"fromImage": name} | ({} if named else {"tag": "latest"})
                    await _listen(stream(docker, "images/create", asked), collections.deque())
        except TimeoutError as error:
            msg = f"image {name!r} was not pulled within {self._pull_s:.0f} s (option pull_s)"
            raise ImageError(msg) from error

    async def _build(self, folder: Path, name: str) -> None:
        _log.info("building", folder=str(folder), image=name)
        labels = msgspec.json.encode({LABEL: "built"}).decode()
        asked = {"t": name, "labels": labels, "forcerm": "true"}
        said: collections.deque[str] = collections.deque(maxlen=_WORDS)
        with tempfile.TemporaryFile() as context:
            await asyncio.to_thread(_pack, folder, context)
            try:
                async with asyncio.timeout(self._build_s), self._engine.client() as docker:
                    with faults("the build failed", ImageError):
                        await _listen(stream(docker, "build", asked, context), said)
            except TimeoutError as error:
                msg = f"not within {self._build_s:.0f} s (option build_s)"
                raise ImageError(_not_built(folder, said, msg)) from error
            except ImageError as error:
                raise ImageError(_not_built(folder, said, str(error))) from error

    def _touch(self, name: str, *, made: bool = False) -> None:
        mark = self._cache / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.used"
        with contextlib.suppress(OSError):
            if made:
                mark.parent.mkdir(parents=True, exist_ok=True)
                part = mark.with_suffix(f".{os.getpid()}")
                part.write_text(name)
                part.replace(mark)
            elif mark.exists():
                os.utime(mark)

    async def _evict(self, kept: str) -> None:
        """Remove what was made here and is longest unused, until the rest fits."""
        marks = await asyncio.to_thread(self._marks)
        async with self._engine.call(_COPY_S) as docker:
            found = {name: await find(docker, name) for _, name in marks}
            sizes = {name: image.size for name, image in found.items() if image is not None}
            for mark in (mark for mark, name in marks if name not in sizes):
                mark.unlink(missing_ok=True)
            total = sum(sizes.values())
            for mark, name in marks:
                if total <= self._most:
                    return
                if name in sizes and name != kept:
                    with contextlib.suppress(DockerError):  # in use
                        await docker.images.delete(name)
                        mark.unlink(missing_ok=True)
                        total -= sizes[name]
                        _log.info("image removed", image=name, most_gb=self._most / _GB)

    def _marks(self) -> list[tuple[Path, str]]:
        """Of what was made here, the longest unused first."""
        marks = sorted(self._cache.glob("*.used"), key=lambda mark: mark.stat().st_mtime)
        return [(mark, mark.read_text()) for mark in marks]


async def find(docker: Docker, name: str) -> Image | None:
    """The image that the engine has by that name, or None."""
    try:
        found = await docker.images.inspect(name)
    except DockerError as error:
        if error.status == 404:
            return None
        raise
    said: dict[str, Any] = found.get("Config") or {}
    workdir = PurePosixPath(said.get("WorkingDir") or "/")
    return Image(
        name=name,
        id=str(found["Id"]),
        workdir=workdir if workdir != PurePosixPath("/") else None,
        user=said.get("User") or "",
        size=int(found.get("Size") or 0),
        checks_health=bool(said.get("Healthcheck")),
    )


@contextlib.asynccontextmanager
async def peek(docker: Docker, image: Image) -> AsyncIterator[str]:
    """The URL of an image's files, by a container that is made for it and never started."""
    with faults(f"image {image.name!r} cannot be looked into", ImageError):
        asked: dict[str, Any] = {"Image": image.id, "Entrypoint": ["/"], "Labels": {LABEL: "peek"}}
        # To their ends also when cancelled, while there is a client.
        making = asyncio.create_task(asyncio.wait_for(docker.containers.create(asked), CALL_S))
        try:
            container = await finish(making)
            yield f"unix://localhost/{docker.api_version}/containers/{container.id}/archive"
        finally:
            if not making.cancelled() and making.exception() is None:
                removing = making.result().delete(force=True, v=True)
                await finish(asyncio.create_task(asyncio.wait_for(removing, CALL_S)))


async def _fed(program: asyncio.subprocess.Process, data: AsyncIterator[bytes]) -> str:
    """What a program says on stderr while it is given all of `data`."""
    if program.stdin is None or program.stderr is None:
        return ""
    said = asyncio.create_task(program.stderr.read())
    try:
        with contextlib.suppress(ConnectionError):  # it has ended, and says why
            async for chunk in data:
                program.stdin.write(chunk)
                await program.stdin.drain()
        program.stdin.close()
        return (await said).decode(errors="replace").strip()
    finally:
        if program.returncode is None and not said.done():
            program.kill()
        await program.wait()


def name_of(folder: Path) -> str:
    """The name of what a build context makes: its files, their modes and links, hashed. Blocks."""
    if not (folder / "Dockerfile").is_file():
        msg = f"workspace.build is {str(folder)!r}, must be a folder with a Dockerfile"
        raise ImageError(msg)
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        digest.update(f"{path.relative_to(folder)}\0{mode:o}\0".encode(errors="surrogateescape"))
        if path.is_symlink():
            digest.update(os.fsencode(path.readlink()))
        elif path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"{BUILT}:{digest.hexdigest()[:32]}"


def _pack(folder: Path, to: IO[bytes]) -> None:
    with tarfile.open(fileobj=to, mode="w") as archive:
        archive.add(folder, ".")
    to.seek(0)


async def _listen(words: AsyncGenerator[str, None], said: collections.deque[str]) -> None:
    """Hear a request to its end, keeping its last lines in `said`."""
    async with contextlib.aclosing(words) as heard:
        async for word in heard:
            said.extend(word.splitlines())


def _not_built(folder: Path, said: collections.deque[str], why: str) -> str:
    words = "\n".join(_COLOUR.sub("", line) for line in said if line.strip())
    return f"{folder / 'Dockerfile'} cannot be built: {why}" + (f"\n{words}" if words else "")
