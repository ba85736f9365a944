"""One container with one session in it.

Its process 1 is the runner's shell, so a program costs milliseconds instead of an exec's hundred
and fifty, and a container that had to be killed is started again for the next program, with all of
its files. The task's folder and the home are folders of this machine, mounted: what the agent did
is read from here, without asking the engine.

A container is written down in ``container.json`` before it is created, and is removed with its
mounts when the sandbox is closed, or by `Container.reap` after this process was killed (I3).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from tugline import log
from tugline.errors import ImageError, SandboxError
from tugline.sandbox import files
from tugline.sandbox.base import HOME, Exit
from tugline.sandbox.container.engine import (
    CALL_S,
    ContainerEngine,
    Docker,
    DockerError,
    translate_errors,
)
from tugline.sandbox.container.images import LABEL, ContainerImage
from tugline.sandbox.container.probe import ulimits
from tugline.sandbox.exec.limits import ProgramLimits, cgroup_of
from tugline.sandbox.exec.processes import finish
from tugline.sandbox.exec.runner import ARGV, CONTROL, KILLED, Runner, SandboxEnded
from tugline.sandbox.hardening import ProcessHardening
from tugline.sandbox.host import IsolatedSandbox, Layout
from tugline.sandbox.network.proxy import AllowList
from tugline.types import Cause

DIRECTORY = f"{LABEL}.directory"
"""The label that names a container's session."""
_RECORD = "container.json"
_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE"]
_CAPABILITIES += ["SETGID", "SETUID"]
"""What installing packages and running tests as root takes; no raw sockets, devices or chroot."""
_TMP = PurePosixPath("/tmp")  # noqa: S108 - the container's own
_log = log.get("sandbox")


class ContainerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a container; see `runtime.Container`."""

    limits: ProgramLimits
    cpus: float | None
    user: str | None
    read_only: bool
    allow: AllowList
    hardening: ProcessHardening | None = None
    """Set when the engine is known."""


class ContainerRecord(msgspec.Struct, frozen=True):
    """A container that exists or is about to."""

    name: str
    socket: str


class ContainerSandbox(IsolatedSandbox):
    """One container."""

    def __init__(
        self,
        layout: Layout,
        options: ContainerOptions,
        engine: ContainerEngine,
        image: ContainerImage,
    ) -> None:
        super().__init__(layout, options.limits, options.allow, None)
        if not options.read_only:
            del self._folders[_TMP]
        self._options, self._engine, self._image = options, engine, image
        self._name = f"tugline-{secrets.token_hex(8)}"
        self._started = False
        self._upper: list[Path] = []
        """Where the engine keeps what programs change of the image, if it says so."""

    async def aclose(self) -> None:
        """Remove the container and unmount its workspace; its folders stay."""
        await self._forwards.aclose()
        try:
            if read_record(self._directory) is not None:
                async with self._call_engine("removed") as docker:
                    await remove_container(docker, self._name)
                forget_record(self._directory)
        except SandboxError as error:  # says nothing of what was done in it; `reap` tries again
            _log.warning("container not removed", container=self._name, error=str(error))
        finally:
            if self._runner is not None:
                self._runner.close()
            await asyncio.to_thread(self._clean_up)

    def _create_folders(self) -> None:
        super()._create_folders()
        (self._directory / "control").mkdir(exist_ok=True)  # Docker looks for it before the start
        if not self._is_root:  # who it is only the image knows
            for folder in self._folders.values():
                folder.chmod(0o777)

    async def start(self) -> None:
        """Create its folders and the container, and start it."""
        await finish(asyncio.to_thread(self._create))
        await finish(self._create_container())
        await self._ensure_started()

    async def _create_container(self) -> None:
        async with self._call_engine("made") as docker:
            found = await asyncio.to_thread(self._engine.find)
            await asyncio.to_thread(self._write_record, found.socket)
            config = await asyncio.to_thread(self._config)
            await docker.containers.create(config, name=self._name)

    async def _start(self, runner: Runner) -> int:
        async with self._call_engine("started") as docker:
            container = docker.containers.container(self._name)
            self._started = True
            try:
                await container.start()
            except DockerError as error:
                raise self._start_error(error) from error
            shown = await container.show()
        pid = int(shown["State"]["Pid"])
        upper = ((shown.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
        self._upper = [Path(upper)] if upper else []
        self._cgroup = await asyncio.to_thread(cgroup_of, pid)
        await runner.wait_ready()
        return pid

    async def _kill_processes(self) -> None:
        """SIGKILL for all that is in it; the container stays."""
        if self._started:
            async with self._call_engine("killed") as docker:
                container = docker.containers.container(self._name)
                with contextlib.suppress(DockerError):  # it has ended already
                    await container.kill(signal="KILL")
                await container.wait()
            self._started = False

    async def _run_monitored(self, program: Callable[[], Awaitable[Exit]]) -> Exit:
        began = time.monotonic()
        try:
            return await super()._run_monitored(program)
        except SandboxEnded:  # and its control group with it
            async with self._call_engine("inspected") as docker:
                state = (await docker.containers.container(self._name).show())["State"]
            if not state.get("OOMKilled"):
                raise
            return Exit(KILLED, False, time.monotonic() - began, Cause.AGENT_MEMORY)

    def _writable_folders(self) -> list[Path]:
        return [*super()._writable_folders(), *self._upper]

    @contextlib.asynccontextmanager
    async def _call_engine(self, what: str) -> AsyncIterator[Docker]:
        try:
            async with asyncio.timeout(CALL_S), self._engine.client() as docker:
                with translate_errors(f"container {self._name} cannot be {what}"):
                    yield docker
        except TimeoutError as error:
            msg = f"container {self._name} was not {what} within {CALL_S:.0f} s"
            raise SandboxError(msg) from error

    def _start_error(self, error: DockerError) -> Exception:
        if "/bin/sh" in str(error.message):
            msg = f"image {self._image.name!r} has no /bin/sh, which is needed to run programs"
            return ImageError(msg)
        return error

    def _write_record(self, socket: str) -> None:
        path = self._directory / _RECORD
        with files.translate_errors(f"cannot write {path}"):
            path.write_bytes(msgspec.json.encode(ContainerRecord(self._name, socket)))

    # ------------------------------------------------------------------ its configuration
    @property
    def _user(self) -> str:
        return self._image.user if self._options.user is None else self._options.user

    @property
    def _is_root(self) -> bool:
        return self._user.partition(":")[0] in {"", "0", "root"}

    def _config(self) -> dict[str, Any]:
        return {
            "Image": self._image.id,
            "Entrypoint": list(ARGV),
            "Cmd": [],
            "User": self._user,
            "WorkingDir": str(self.workdir),
            "Env": [f"HOME={HOME}", "LANG=C.UTF-8"],
            "Labels": {LABEL: "sandbox", DIRECTORY: str(self._directory)},
            **({"Healthcheck": {"Test": ["NONE"]}} if self._image.checks_health else {}),
            "StopSignal": "SIGKILL",
            "HostConfig": self._host_config(),
        }

    def _host_config(self) -> dict[str, Any]:
        options, limits = self._options, self._limits
        hardening = options.hardening.host_config() if options.hardening else {}
        # The harness and the workspaces are shared by all; relabelling them for each is no option.
        security = ["no-new-privileges", "label=disable", *hardening.pop("SecurityOpt", ())]
        return {
            "NetworkMode": "none",
            "Mounts": self._binds(),
            "Memory": limits.memory_mb << 20,
            "MemorySwap": limits.memory_mb << 20,
            "PidsLimit": limits.processes,
            "NanoCpus": int((options.cpus or 0) * 1e9),
            "Ulimits": ulimits(),
            "CapDrop": ["ALL"],
            "CapAdd": _CAPABILITIES if self._is_root else [],  # Podman gives them to any user
            "SecurityOpt": security,
            **hardening,
            "ReadonlyRootfs": options.read_only,
            "LogConfig": {"Type": "none"},
        }

    def _binds(self) -> list[dict[str, Any]]:
        control = {PurePosixPath(CONTROL): self._directory / "control"}
        sources: dict[PurePosixPath, Path | str] = {**self._folders, **control, **self._read_only}
        return [
            {
                "Type": "bind",
                "Source": str(source),
                "Target": str(target),
                "ReadOnly": target not in self._folders,
            }
            for target, source in sources.items()
        ]


async def remove_container(docker: Docker, name: str) -> None:
    """Kill and remove a container, which may be missing."""
    for wait_s in (0.05, 0.2, 1.0, 3.0, None):
        try:
            return await docker.containers.container(name).delete(force=True, v=True)
        except DockerError as error:
            if error.status == 404:
                return None
            if wait_s is None:
                raise
        # Podman refuses while it is just ending, Docker while another process removes it.
        await asyncio.sleep(wait_s)
    return None


def read_record(directory: Path) -> ContainerRecord | None:
    """Return the container that was written down in a sandbox's directory."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((directory / _RECORD).read_bytes(), type=ContainerRecord)
    return None


def forget_record(directory: Path) -> None:
    """Remove the record of a container that has been removed."""
    (directory / _RECORD).unlink(missing_ok=True)
