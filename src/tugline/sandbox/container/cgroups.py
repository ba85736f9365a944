"""What the kernel says of a container's limits: read on the host, from its control group.

Engines accept limits that they then cannot set (rootless on cgroup v1), and call a container whose
program was killed for its memory by an ordinary exit code. The files here say what is true, in
both versions of control groups.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


class Cgroup(NamedTuple):
    """The folders of one control group; None for a controller that it has none of."""

    memory: Path | None
    processes: Path | None

    @property
    def memory_limit(self) -> int | None:
        """Bytes; None without a limit."""
        return _limit(self.memory, "memory.max", "memory.limit_in_bytes")

    @property
    def process_limit(self) -> int | None:
        """None without a limit."""
        return _limit(self.processes, "pids.max")


def of(pid: int) -> Cgroup:
    """The control group that a process is in."""
    places = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            for name in names.split(",") if number != "0" else ("",):
                places[name] = _ROOT / name / path.lstrip("/")
    whole = places.get("") if (_ROOT / "cgroup.controllers").exists() else None
    return Cgroup(places.get("memory", whole), places.get("pids", whole))


def _limit(folder: Path | None, *names: str) -> int | None:
    for name in names:
        said = _read(folder, name).strip()
        if said.isdecimal():
            return int(said) if int(said) < _UNLIMITED else None
    return None


def _read(folder: Path | None, name: str) -> str:
    if folder is not None:
        with contextlib.suppress(OSError):
            return (folder / name).read_text()
    return ""
