"""Places that are attacked, and words to attack them with.

An attack is a Python script in a box. On `local`, which contains nothing, the same script must
succeed wherever it harms nobody: no attack fails because it was written wrongly.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tugline.plugins import find
from tugline.sandbox.base import Exit, Mount, Runtime, Sandbox, SandboxSpec
from tugline.types import Workspace

WITHIN = 20.0
IMAGE = "localhost/tugline/debian:12"


class Said(NamedTuple):
    """What a program wrote, and how it ended."""

    text: str
    exit: Exit


@dataclass
class Arena:
    """One runtime and a folder."""

    name: str
    folder: Path
    made: dict[str, Runtime] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    """What its boxes have besides, whatever else is asked for."""
    engine: str = ""
    """The URL of a Podman."""

    @property
    def contains(self) -> bool:
        """Whether it is meant to keep programs in."""
        return self.name != "local"

    @property
    def workspace(self) -> Workspace:
        """What its boxes begin with, if nothing else is asked for."""
        return Workspace(image=IMAGE) if self.name == "podman" else Workspace()

    @property
    def part(self) -> str:
        """The plug-in's name."""
        return "container" if self.name == "podman" else self.name

    @property
    def fixed(self) -> dict[str, Any]:
        """Options that it always has."""
        return {"engine": self.engine} if self.name == "podman" else {}

    def runtime(self, **options: Any) -> Runtime:
        """One with these options."""
        key = json.dumps(options, sort_keys=True)
        if key not in self.made:
            self.made[key] = find("runtime", self.part)(**self.fixed, **options)
        return self.made[key]

    @contextlib.asynccontextmanager
    async def box(
        self, name: str = "attacker", options: dict[str, Any] | None = None, **place: Any
    ) -> AsyncIterator[Sandbox]:
        """A box, with `options` of its runtime and whatever of a `SandboxSpec` is given."""
        runtime = self.runtime(**(options or {}))
        place["mounts"] = (*self.mounts, *place.get("mounts", ()))
        given = SandboxSpec(**{"workspace": self.workspace, **place})
        async with runtime.open(self.folder / name, given) as sandbox:
            yield sandbox


async def python(box: Sandbox, code: str, *given: object, timeout_s: float = WITHIN) -> Said:
    """What a script says."""
    return await said(box, "python3", "-I", "-c", code, *map(str, given), timeout_s=timeout_s)


async def shell(box: Sandbox, script: str, *given: object, timeout_s: float = WITHIN) -> Said:
    """What a shell script says."""
    return await said(box, "sh", "-c", script, "sh", *map(str, given), timeout_s=timeout_s)


async def said(box: Sandbox, *argv: str, timeout_s: float = WITHIN) -> Said:
    """What a program says."""
    name = f"said-{secrets.token_hex(4)}"
    end = await box.run(argv, env={}, timeout_s=timeout_s, log_name=name)
    return Said((box.logs / f"{name}.log").read_text(errors="replace"), end)


def token() -> str:
    """Text that is nowhere else."""
    return f"tok{secrets.token_hex(8)}"


def running(mark: str) -> list[int]:
    """Processes of this machine with `mark` in their command line, but for this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
