"""A real Podman for tests: a service of its own on a private socket, and a runtime on it.

Import the fixtures into a test's module or its conftest: ``from containers import *``. The images
are made by `tools/podman.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tugline.runtimes.container.engine import service
from tugline.runtimes.container.runtime import Container

__all__ = ["BUSYBOX", "DEBIAN", "container", "podman"]

BUSYBOX = "localhost/tugline/busybox:latest"
DEBIAN = "localhost/tugline/debian:12"


@pytest.fixture(scope="session")
def podman() -> Iterator[str]:
    """The URL of a Podman with the images above."""
    missing = _missing()
    if missing:
        may_install = os.geteuid() == 0 and shutil.which("apt-get") is not None
        (pytest.fail if may_install else pytest.skip)(missing)
    with tempfile.TemporaryDirectory(prefix="tugline-podman-") as folder:
        path = Path(folder) / "podman.sock"
        with (Path(folder) / "log").open("wb") as log:
            begun = subprocess.Popen((*service(path), "--time=0"), stdout=log, stderr=log)
        try:
            until = time.monotonic() + 20
            while not path.exists() and begun.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            assert path.exists(), (Path(folder) / "log").read_text()
            yield f"unix://{path}"
        finally:
            begun.terminate()
            begun.wait(20)


@pytest.fixture
def container(podman: str) -> Container:
    """Boxes that are containers of it, with little memory; the image is Debian's by default."""
    return Container(engine=podman, image=DEBIAN, memory_mb=512, processes=200)


def _missing() -> str:
    if shutil.which("podman") is None:
        return "no podman: run tools/podman.py"
    for image in (BUSYBOX, DEBIAN):
        if subprocess.run(["podman", "image", "exists", image], check=False).returncode != 0:
            return f"podman has no image {image}: run tools/podman.py"
    return ""
