"""Places that are attacked, and words to attack them with.

An attack is a Python script in a box. On `local`, which contains nothing, the same script must
succeed wherever it harms nobody: no attack fails because it was written wrongly.
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


class Said(NamedTuple):
    """What a program wrote, and how it ended."""

    text: str
    exit: Exit


@dataclass(kw_only=True)
class Arena(Driver):
    """A runtime and a folder."""

    folder: Path

    @contextlib.asynccontextmanager
    async def box(
        self, name: str = "attacker", options: dict[str, Any] | None = None, **place: Any
    ) -> AsyncIterator[Sandbox]:
        """A box, with `options` of its runtime and whatever of a `SandboxSpec` is given."""
        runtime = self.bounded(**options) if options else self.runtime
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
