"""Checks of this machine for ``tugline doctor``, and the command to run next."""

import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from tugline.client.overview import HealthCheck
from tugline.plugins import find
from tugline.sandbox.base import Runtime
from tugline.server.settings import ServerSettings

_GB = 1 << 30
_LEAST_MEMORY_GB = 2.0
"""Memory of the demo and of `make test`."""
_LEAST_DISK_GB = 5.0
_QUERY = "--query-gpu=name,memory.total,memory.used"
_GPU_S = 10.0
"""Seconds within which the driver must list the GPUs."""


def check_machine(folder: Path) -> list[HealthCheck]:
    """Check what runs of sessions and of training need; `folder` is where they would be."""
    return [*_check_sandbox(), *_check_resources(folder), *_check_gpus(), _check_port()]


def _check_sandbox() -> Iterator[HealthCheck]:
    runtime: Runtime = find("runtime", "auto")()
    reason = runtime.check_available()
    if reason is not None:
        what = f"{reason}; `tugline doctor --runtimes` lists the others"
        yield HealthCheck("sandbox", False, what)
        return
    weaknesses = "; ".join(runtime.list_weaknesses())
    weak = f", with weaknesses: {weaknesses}" if weaknesses else ""
    yield HealthCheck("sandbox", True, f"bubblewrap is usable{weak}")


def _check_resources(folder: Path) -> Iterator[HealthCheck]:
    user = "root: each sandbox has a kernel user of its own" if os.geteuid() == 0 else "not root"
    yield HealthCheck("user", True, user)
    memory = psutil.virtual_memory()
    free_gb = memory.available / _GB
    detail = f"{free_gb:.1f} of {memory.total / _GB:.1f} GB are available"
    yield HealthCheck("memory", free_gb >= _LEAST_MEMORY_GB, detail)
    cpus = len(os.sched_getaffinity(0))
    yield HealthCheck("processors", True, str(cpus))
    disk = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists()))
    low = disk.free < _LEAST_DISK_GB * _GB
    yield HealthCheck("disk", not low, f"{disk.free / _GB:.0f} GB are free in {folder}")


def _check_gpus() -> Iterator[HealthCheck]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield HealthCheck("GPUs", True, "none found: training and engines run on the CPU")
        return
    command = [program, _QUERY, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield HealthCheck("GPUs", False, f"nvidia-smi fails: {error}")
        return
    for line in done.stdout.splitlines():
        name, *memory = (part.strip() for part in line.split(","))
        if all(part.isdecimal() for part in memory):  # with memory shared with the host: [N/A]
            total, used = (int(part) / 1024 for part in memory)
            name += f": {used:.0f} of {total:.0f} GiB are in use"
        yield HealthCheck("GPU", True, name)


def _check_port() -> HealthCheck:
    port = ServerSettings().port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            detail = f"{port} is in use: name another one with `tugline up --port`"
            return HealthCheck("port", False, detail)
    return HealthCheck("port", True, f"{port}, the default of `tugline up`, is free")


def suggest_next(checks: list[HealthCheck]) -> str:
    """Return the command to run next on this machine."""
    if any(each.component == "sandbox" and not each.healthy for each in checks):
        return "tugline doctor --runtimes  # what is missing for each runtime"
    if importlib.util.find_spec("torch") is None:
        return "pip install 'tugline[demo]' && tugline demo  # or doctor --engine URL for your own"
    return "tugline demo  # or tugline doctor --engine URL for an engine of your own"
