"""A runtime whose sandboxes are Harbor's environments, see README.md.

``runtime: {name: "harbor_runtime:HarborRuntime", options: {environment: daytona, reach: ...}}``
opens each sandbox in an environment of Harbor: Docker, Daytona, Modal, E2B, or a custom class.

Files are transferred as tar archives, and the patch is the difference of two archives. All programs
have a mark in their environment, by which they can be killed. Folders mounted by a harness or an
evaluator are copied, unless the image has them. After a crash of the node, a note on disk has what
to clean up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import secrets
import shlex
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from archive_diff import diff_archives, pack_files
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from tugline.aio import PausableTimeout, enforce_timeout
from tugline.errors import SandboxError, UsageError
from tugline.patch import Patch
from tugline.sandbox.base import (
    HOME,
    MAX_READ_BYTES,
    WORKDIR,
    Content,
    Exit,
    Runtime,
    Sandbox,
    SandboxSpec,
)
from tugline.sandbox.patch import PatchLimits
from tugline.types import Workspace

T = TypeVar("T")
NOTE = "harbor.json"
MARK = "TUGLINE_MARK"
END = """
n=0
while files=$(grep -lsF {0} /proc/[0-9]*/environ); test "$files" && test $((n = n + 1)) -lt 100; do
  for f in $files; do f=${{f%/environ}}; kill -s KILL "${{f#/proc/}}" 2>/dev/null; done
done
"""
"""Kills every program with a mark, also programs that start meanwhile."""


class Note(msgspec.Struct):
    """How an environment was made, so that it can be made again and stopped."""

    environment: str
    session: str
    directory: str
    image: str | None
    kwargs: dict[str, Any]


class HarborRuntime(Runtime):
    """Sandboxes in environments of Harbor.

    `environment` is a name of Harbor's (``docker``, ``daytona``) or ``module:Class``, and `kwargs`
    its options (``--ek`` of ``harbor run``). `image` is for tasks without an image. `reach` is the
    URL by which an environment reaches the gateway of this node; ``{port}`` is the gateway's port.
    With `only_gateway`, everything else is blocked, if Harbor can enforce that. `home` is the
    agent's home folder.
    """

    def __init__(  # noqa: PLR0913 - each is a separate setting
        self,
        *,
        environment: str = "docker",
        image: str | None = None,
        reach: str = "http://127.0.0.1:{port}",
        only_gateway: bool = False,
        home: str = str(HOME),
        cpus: float | None = None,
        memory_mb: int | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.environment, self.image, self.reach = environment, image, reach
        self.only_gateway, self.kwargs = only_gateway, kwargs or {}
        self.home = PurePosixPath(home)
        self.resources = {"cpus": cpus, "memory_mb": memory_mb}

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[HarborSandbox]:
        """Open an environment; its logs, Harbor's files and a note are on this machine."""
        spec = spec or SandboxSpec()
        workspace = spec.workspace
        if workspace.repo or workspace.commit or workspace.folder:
            msg = "runtime 'harbor_runtime' takes workspace.image, build and path only"
            raise UsageError(msg)
        environment = self._create(workspace, directory)
        try:
            what = f"environment {self.environment!r} does not start"
            await _call(what, environment.start(force_build=False))
            yield await self._prepare(environment, directory, spec)
        finally:
            await asyncio.shield(self._stop(environment, directory))

    def reap(self, directory: Path) -> int:
        """Stop the environments whose notes are below `directory`, if Harbor finds them by name."""
        notes = list(directory.rglob(NOTE))
        for path in notes:
            note = msgspec.json.decode(path.read_bytes(), type=Note)
            asyncio.run(self._stop(self._make(note, path.parent), path.parent))
        return len(notes)

    def check_available(self) -> str | None:
        """Check that Harbor has the environment and its requirements."""
        try:
            _find(self.environment).preflight(kwargs=self.kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - providers have their own errors
            return f"environment {self.environment!r} of Harbor cannot be used: {error}"
        return None

    def list_weaknesses(self) -> Sequence[str]:
        """List what the environment has to isolate."""
        network = () if self.only_gateway else ("the network is what the environment allows",)
        return (
            f"isolation is that of Harbor's environment {self.environment!r}",
            "copied folders of programs can be changed by the agent",
            *network,
        )

    def _create(self, workspace: Workspace, directory: Path) -> BaseEnvironment:
        """Make an environment; write its note before anything is started."""
        note = Note(
            environment=self.environment,
            session=f"tugline-{secrets.token_hex(6)}",
            directory=str(Path(workspace.build or directory / "harbor").absolute()),
            image=None if workspace.build else workspace.image or self.image,
            kwargs=self.kwargs,
        )
        directory.mkdir(parents=True, exist_ok=True)
        environment = self._make(note, directory)
        (directory / NOTE).write_bytes(msgspec.json.encode(note))
        return environment

    def _make(self, note: Note, directory: Path) -> BaseEnvironment:
        config, policy = EnvironmentConfig(docker_image=note.image, **self.resources), None
        if self.only_gateway:
            hosts = [urlsplit(self.reach.format(port=1)).hostname or ""]
            policy = NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=hosts)
        folder, paths = Path(note.directory), TrialPaths(directory / "harbor-trial")
        folder.mkdir(exist_ok=True)
        paths.mkdir()
        try:
            return _find(note.environment)(
                environment_dir=folder,
                environment_name="tugline",
                session_id=note.session,
                trial_paths=paths,
                task_env_config=config,
                network_policy=policy,
                **note.kwargs,
            )
        except (ImportError, ValueError, OSError, RuntimeError) as error:
            raise UsageError(f"environment {note.environment!r} of Harbor: {error}") from error

    async def _prepare(
        self, environment: BaseEnvironment, directory: Path, spec: SandboxSpec
    ) -> HarborSandbox:
        sandbox = HarborSandbox(environment, directory, self.home, self.reach)
        workspace = spec.workspace
        if workspace.path:
            sandbox.workdir = PurePosixPath(workspace.path)
        elif workspace.image or workspace.build:
            sandbox.workdir = PurePosixPath((await sandbox.check("pwd")).strip())
        await sandbox.check(f"mkdir -p {shlex.quote(str(sandbox.workdir))} {self.home}")
        for mount in spec.mounts:
            target = shlex.quote(mount.target)
            may_exist = mount.optional or mount.source == mount.target  # it may be in the image
            if may_exist and not (await sandbox.execute(f"test -e {target}")).return_code:
                continue
            await sandbox.check(f"rm -rf {target}")
            if mount.source is None:
                await sandbox.check(f"mkdir -p {target}")
            else:
                await sandbox.copy(Path(mount.source), mount.target)
        await sandbox.put(sandbox.workdir, spec.files)
        sandbox.before = await sandbox.archive()
        return sandbox

    async def _stop(self, environment: BaseEnvironment, directory: Path) -> None:
        await _call("the environment does not stop", environment.stop(delete=True))
        (directory / NOTE).unlink(missing_ok=True)


class HarborSandbox(Sandbox):
    """See `tugline.sandbox.base.Sandbox`."""

    def __init__(
        self, environment: BaseEnvironment, directory: Path, home: PurePosixPath, reach: str
    ) -> None:
        self.environment, self.reach = environment, reach
        self.workdir, self.home = WORKDIR, home
        self.logs, self.before = directory / "logs", b""
        self.logs.mkdir(exist_ok=True)
        self.mark = f"{MARK}={secrets.token_hex(16)}"

    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """Remove existing files, and unpack an archive."""
        if files:
            with tempfile.NamedTemporaryFile() as file:
                file.write(pack_files(files))
                file.flush()
                await self._unpack(str(root), file.name, f"rm -rf -- {shlex.join(files)} && ")

    async def copy(self, source: Path, target: str) -> None:
        """Copy a folder or file of this machine to `target`, with its links."""
        to = PurePosixPath(target)
        with tempfile.NamedTemporaryFile() as file:
            await asyncio.to_thread(_pack, source, to.name, file.name)
            await self._unpack(str(to.parent), file.name)

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Download a file, at most `max_bytes` of it."""
        at, copy = shlex.quote(str(path)), f"/tmp/{secrets.token_hex(8)}"  # noqa: S108 - there
        line = f"test -f {at} && test ! -L {at} && head -c {max_bytes + 1} {at} >{copy}"
        if (await self.execute(line)).return_code:
            return None
        data = await self._download(copy)
        return data if len(data) <= max_bytes else None

    async def archive(self) -> bytes:
        """Return the workdir as a tar archive."""
        copy = f"/tmp/{secrets.token_hex(8)}"  # noqa: S108 - there
        await self.check(f"tar -c -f {copy} -C {shlex.quote(str(self.workdir))} .")
        return await self._download(copy)

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Kill all programs, and compare two archives of the workdir."""
        await self._end()
        before, after = io.BytesIO(self.before), io.BytesIO(await self.archive())
        return await asyncio.to_thread(diff_archives, before, after, limits)

    async def expose(self, url: str) -> str:
        """Return the URL with its host replaced by `reach`."""
        parts = urlsplit(url)
        return self.reach.format(port=parts.port).rstrip("/") + parts.path

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log: Path,
    ) -> Exit:
        """Run a program with `exec`; its output is streamed to the log if possible."""
        began, timed_out = time.monotonic(), False
        name, _, value = self.mark.partition("=")
        variables = {"HOME": str(self.home), **env, name: value}
        with log.open("ab") as output:

            async def write(text: str, _stream: str) -> None:
                output.write(text.encode())
                output.flush()

            start, line = output.tell(), f"exec {shlex.join(argv)} </dev/null 2>&1"
            with self.environment.scoped_output_callback(write):
                executing = self.execute(line, cwd=str(self.workdir), env=variables)
                running = asyncio.ensure_future(executing)
            try:
                async with enforce_timeout(timeout_s):
                    await asyncio.wait({running})
            except TimeoutError:
                timed_out = True
            finally:
                await asyncio.shield(self._end(running))
            if running.cancelled():
                return Exit(-9, timed_out, time.monotonic() - began)
            result = running.result()
            if output.tell() == start:  # nothing was streamed
                output.write(((result.stdout or "") + (result.stderr or "")).encode())
        code = 128 - result.return_code if result.return_code > 128 else result.return_code
        return Exit(code, timed_out, time.monotonic() - began)

    async def execute(self, line: str, **options: Any) -> ExecResult:
        """Run a shell line there."""
        return await _call("no command can be run there", self.environment.exec(line, **options))

    async def check(self, line: str) -> str:
        """Run a shell line that must succeed; return its output."""
        done = await self.execute(line)
        if done.return_code:
            output = (done.stderr or done.stdout or "")[-300:]
            raise SandboxError(f"in the environment: {line[:80]}: {output}")
        return done.stdout or ""

    async def _end(self, running: asyncio.Future[Any] | None = None) -> None:
        """Kill all programs; wait up to 10 s for the running `exec` to return."""
        await self.execute(END.format(self.mark), timeout_sec=60)
        if running is not None:
            await asyncio.wait({running}, timeout=10)
            running.cancel()
            await asyncio.wait({running}, timeout=10)

    async def _unpack(self, folder: str, archive: str, before: str = "") -> None:
        at, copy = shlex.quote(folder), f"/tmp/{secrets.token_hex(8)}"  # noqa: S108 - there
        what = "files cannot be brought into the environment"
        await _call(what, self.environment.upload_file(archive, copy))
        line = f"mkdir -p {at} && cd {at} && {before}tar -x -f {copy} && rm -f {copy}"
        await self.check(line)

    async def _download(self, path: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="tugline-") as folder:
            file = Path(folder, "file")
            what = "files cannot be fetched from the environment"
            await _call(what, self.environment.download_file(path, file))
            await self.execute(f"rm -f {path}")
            return await asyncio.to_thread(file.read_bytes)


def _find(environment: str) -> type[BaseEnvironment]:
    path = environment if ":" in environment else None
    return EnvironmentFactory.get_environment_class(
        None if path else EnvironmentType(environment), path
    )


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Start an asyncio event loop for Harbor in a thread: with uvloop, Podman's pipes stay open."""
    loop = asyncio.SelectorEventLoop()
    threading.Thread(target=loop.run_forever, name="harbor", daemon=True).start()
    return loop


async def _call(what: str, work: Coroutine[Any, Any, T]) -> T:
    """Await a call of Harbor. Raises `SandboxError` for errors of Harbor and its providers."""
    try:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))
    except Exception as error:
        raise SandboxError(f"{what}: {str(error) or type(error).__name__}") from error


def _pack(source: Path, name: str, archive: str) -> None:
    with tarfile.open(archive, mode="w") as tar:
        tar.add(source, name)
