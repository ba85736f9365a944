"""What the presets have in common: a package in the toolbox, and how a break of theirs looks.

A preset names its program's package, its settings and the traps of its exit code. Its program
broke when it was ended by a fault of its own or says so in its last words; one that gave up because
the model refused, as when a budget is spent, did not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from tugline.harnesses.base import Launch, LaunchContext, killed_by
from tugline.harnesses.installing import Step
from tugline.harnesses.trial import start_once
from tugline.sandbox.base import Exit, Mount

Window = Annotated[int, msgspec.Meta(ge=1)]
"""An engine's context window, in tokens."""


class Package(Protocol):
    """Something in the toolbox: `Npm` or `Python`."""

    folder: Path

    @property
    def command(self) -> tuple[str, ...]:
        """What starts it. Raises `HarnessError` before `install`."""
        ...

    @property
    def env(self) -> Mapping[str, str]:
        """What its program needs to find its own."""
        ...

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """What a sandbox must have of it."""
        ...

    async def install(self, trial: Step) -> None:
        """Install it unless it is there."""
        ...

    async def newest(self) -> str:
        """The newest version that there is."""
        ...


class Preset:
    """A harness whose program comes from a registry. Subclasses set what has no value here."""

    name: str
    version: str | None
    keeps: tuple[str, ...] = ()
    """Its own log: glob patterns below the agent's home."""
    says: tuple[tuple[str, str], ...] = ()
    """Pattern of its last words to what broke, where it ended with another code than 0."""
    codes: tuple[tuple[int, str], ...] = ()
    """Exit code to what broke."""

    package: Package

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """What a sandbox must have of its program."""
        return self.package.mounts

    async def install(self) -> None:
        """Put this version into the toolbox unless it is there; it must start."""

        async def trial(_: Path) -> None:
            await start_once(self)

        await self.package.install(trial)

    def launch(self, seat: LaunchContext) -> Launch:
        """The command for one session."""
        raise NotImplementedError

    def crashed(self, end: Exit, said: str) -> str | None:
        """Why its program broke, None if it did not."""
        if end.timed_out or end.code == 0:
            return None
        signs = (why for pattern, why in self.says if re.search(pattern, said))
        return killed_by(end) or dict(self.codes).get(end.code) or next(signs, None)


NODE_SAYS = (
    (r"Node\.js v\d+\.\d+\.\d+\s*$", "an exception that nobody caught"),
    (r"JavaScript heap out of memory", "its heap was full"),
)
"""How Node takes its leave."""
BUN_SAYS = ((r"panic\((main thread|thread \d+)\)|Bun has crashed", "it panicked"),)
"""How the native programs that are made with Bun do."""
