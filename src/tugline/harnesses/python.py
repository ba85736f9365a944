"""Pinned Python packages as a program, in a virtual environment of their own."""

from __future__ import annotations

import sys
from pathlib import Path

from tugline import log
from tugline.errors import HarnessError
from tugline.harnesses.installing import folder_of, once, succeed

_log = log.get("harness")


class Python:
    """`module` is run by the environment's Python; `also` are further pinned requirements."""

    def __init__(
        self, harness: str, package: str, version: str, module: str, *, also: tuple[str, ...] = ()
    ) -> None:
        self._harness, self._module = harness, module
        self._folder = folder_of(harness, version)
        self._requirements = (f"{package}=={version}", *also)
        self._installed = False

    @property
    def command(self) -> tuple[str, ...]:
        """What starts the program. Raises `HarnessError` before `install`."""
        if not self._installed:
            msg = f"harness {self._harness!r} is not installed yet"
            raise HarnessError(msg)
        return (str(self._folder / "bin" / "python"), "-m", self._module)

    async def install(self) -> None:
        """Make the environment unless it is there."""

        async def fill(fresh: Path) -> None:
            _log.info("installing", packages=self._requirements, folder=str(self._folder))
            what = f"cannot install {self._requirements[0]}"
            await succeed(what, sys.executable, "-m", "venv", str(fresh), cwd=fresh)
            await succeed(
                what,
                *(str(fresh / "bin" / "python"), "-m", "pip", "install", "--quiet"),
                *("--disable-pip-version-check", "--no-input", *self._requirements),
                cwd=fresh,
            )

        await once(self._folder, fill)
        self._installed = True
