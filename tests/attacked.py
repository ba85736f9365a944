"""Sandboxes under attack, and helpers to run attacks in them.

An attack is a Python script in a sandbox. On `local`, which contains nothing, the same script must
succeed wherever that is harmless: no attack fails because of a mistake in it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from containers import DEBIAN
from sandboxes import Driver, running
from tugline.sandbox.base import Exit, Sandbox, SandboxSpec

__all__ = ["running"]

WITHIN = 20.0
IMAGE = DEBIAN


class Output(NamedTuple):
    """What a program wrote, and how it ended."""

    text: str
    exit: Exit


@dataclass(kw_only=True)
class Arena(Driver):
    """A runtime and a folder."""

    folder: Path

    @contextlib.asynccontextmanager
    async def open(
        self, name: str = "attacker", options: dict[str, Any] | None = None, **spec: Any
    ) -> AsyncIterator[Sandbox]:
        """A sandbox, with `options` of its runtime and fields of its `SandboxSpec`."""
        runtime = self.bounded(**options) if options else self.runtime
        given = SandboxSpec(**{"workspace": self.workspace, **spec})
        async with runtime.open(self.folder / name, given) as sandbox:
            yield sandbox


async def python(sandbox: Sandbox, code: str, *given: object, timeout_s: float = WITHIN) -> Output:
    """Run a Python script with arguments."""
    return await run(sandbox, "python3", "-I", "-c", code, *map(str, given), timeout_s=timeout_s)


async def shell(sandbox: Sandbox, script: str, *given: object, timeout_s: float = WITHIN) -> Output:
    """Run a shell script with arguments."""
    return await run(sandbox, "sh", "-c", script, "sh", *map(str, given), timeout_s=timeout_s)


async def run(sandbox: Sandbox, *argv: str, timeout_s: float = WITHIN) -> Output:
    """Run a program."""
    name = f"run-{secrets.token_hex(4)}"
    end = await sandbox.run(argv, env={}, timeout_s=timeout_s, log_name=name)
    return Output((sandbox.logs / f"{name}.log").read_text(errors="replace"), end)


def token() -> str:
    """Text that is nowhere else."""
    return f"tok{secrets.token_hex(8)}"
