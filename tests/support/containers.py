"""A real Podman for tests: a service of its own on a private socket, and a runtime on it.

Import the fixtures into a test's module or its conftest. The images are made by `tools/podman.py`.
To try another engine that has them: ``TUGLINE_TEST_ENGINE=unix:///var/run/docker.sock``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tugline.sandbox.base import Mount
from tugline.sandbox.container import DIRECTORY, Container
from tugline.sandbox.container_engine import ContainerEngine, Docker, retry
from tugline.sandbox.container_images import find_image

BUSYBOX = "localhost/tugline/busybox:latest"
DEBIAN = "localhost/tugline/debian:12"


@pytest.fixture(scope="session")
def podman() -> Iterator[str]:
    """The URL of a Podman with the images above."""
    if other := os.environ.get("TUGLINE_TEST_ENGINE"):
        yield other
        return
    missing = _missing()
    if missing:
        may_install = os.geteuid() == 0 and shutil.which("apt-get") is not None
        (pytest.fail if may_install else pytest.skip)(missing)
    temporary = tempfile.TemporaryDirectory(prefix="tugline-podman-")
    with temporary as folder, run_podman(Path(folder)) as url:
        yield url


@contextlib.contextmanager
def run_podman(folder: Path, *before: str) -> Iterator[str]:
    """A Podman service in a folder, and its URL; `before` is put before its command line."""
    path = folder / "podman.sock"
    path.unlink(missing_ok=True)
    with (folder / "log").open("wb") as log:
        # crun refuses a mixture of cgroup versions.
        mixed = not Path("/sys/fs/cgroup/cgroup.controllers").exists()
        runtime = ("--runtime", "runc") if mixed and shutil.which("runc") else ()
        argv = (*before, "podman", *runtime, "system", "service", f"unix://{path}", "--time=0")
        begun = subprocess.Popen(argv, stdout=log, stderr=log, cwd=folder)
    try:
        until = time.monotonic() + 20
        while not path.exists() and begun.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert path.exists(), (folder / "log").read_text()
        yield f"unix://{path}"
    finally:
        begun.terminate()
        begun.wait(20)


@pytest.fixture
def container(podman: str) -> Container:
    """A runtime of containers with little memory; their image is Debian's by default."""
    return Container(engine=podman, image=DEBIAN, memory_mb=512, processes=200)


def host_programs() -> tuple[Mount, ...]:
    """Mounts of this machine's programs over those of an image without build tools."""
    return tuple(Mount(path, path) for path in ("/usr", "/etc/alternatives"))


def list_leftovers(engine: str, directory: Path) -> list[str]:
    """Containers of sandboxes below `directory`, and mounts there."""
    # Podman answers 500 while another process removes one.
    listed = ContainerEngine(engine).run_blocking(
        lambda docker: retry(partial(docker.containers.list, all=True), 0.1, 0.3, 1.0)
    )
    places = [one["Labels"].get(DIRECTORY, "") for one in listed or ()]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return [one for one in places + mounts if str(directory) in one]


def has_image(engine: str, image: str) -> bool:
    """Whether the engine has an image."""
    return (
        ContainerEngine(engine).run_blocking(lambda docker: find_image(docker, image)) is not None
    )


def remove_images(engine: str, *images: str) -> None:
    """Remove images that a test has built."""

    async def remove(docker: Docker) -> None:
        for name in images:
            if await find_image(docker, name) is not None:
                await docker.images.delete(name, force=True)

    ContainerEngine(engine).run_blocking(remove)


def _missing() -> str:
    if shutil.which("podman") is None:
        return "no podman: run tools/podman.py"
    for image in (BUSYBOX, DEBIAN):
        if subprocess.run(["podman", "image", "exists", image], check=False).returncode != 0:
            return f"podman has no image {image}: run tools/podman.py"
    return ""
