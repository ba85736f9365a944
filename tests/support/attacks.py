"""Sandboxes under attack, and helpers that run attack scripts in them.

An attack is a script in a sandbox. On `local`, which isolates nothing, the same script must succeed
wherever it does no harm, so no attack fails only because it was written wrongly.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from support.containers import DEBIAN
from support.sandbox import Driver
from tugline.sandbox.base import Exit, Sandbox, SandboxSpec

WITHIN = 20.0
IMAGE = DEBIAN


class Result(NamedTuple):
    """A program's output and its exit."""

    text: str
    exit: Exit


@dataclass(kw_only=True)
class Arena(Driver):
    """A runtime, and the folder of its sandboxes."""

    folder: Path

    @contextlib.asynccontextmanager
    async def open(
        self, name: str = "attacker", options: dict[str, Any] | None = None, **fields: Any
    ) -> AsyncIterator[Sandbox]:
        """Open a sandbox, with `options` for its runtime and `fields` of its `SandboxSpec`."""
        runtime = self.bounded(**options) if options else self.runtime
        spec = SandboxSpec(**{"workspace": self.workspace, **fields})
        async with runtime.open(self.folder / name, spec) as sandbox:
            yield sandbox


async def python(sandbox: Sandbox, code: str, *args: object, timeout_s: float = WITHIN) -> Result:
    """Run a Python script."""
    return await run(sandbox, "python3", "-I", "-c", code, *map(str, args), timeout_s=timeout_s)


async def shell(sandbox: Sandbox, script: str, *args: object, timeout_s: float = WITHIN) -> Result:
    """Run a shell script."""
    return await run(sandbox, "sh", "-c", script, "sh", *map(str, args), timeout_s=timeout_s)


async def run(sandbox: Sandbox, *argv: str, timeout_s: float = WITHIN) -> Result:
    """Run a program to its end."""
    name = f"run-{secrets.token_hex(4)}"
    end = await sandbox.run(argv, env={}, timeout_s=timeout_s, log_name=name)
    return Result((sandbox.logs / f"{name}.log").read_text(errors="replace"), end)


def token() -> str:
    """Unique text."""
    return f"tok{secrets.token_hex(8)}"
