"""Pinned Python packages as a program, in a virtual environment with a Python of its own.

The Python that runs Tugline is copied into the install directory with its standard library and the
shared libraries it needs, so that a sandbox or image needs none. A preset's own version is
installed from its lock file, with a checksum for every package.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys
import sysconfig
from importlib import resources
from pathlib import Path

from tugline import log
from tugline.harnesses.install import (
    Package,
    Step,
    bundle_libraries,
    install_dir,
    install_once,
    mount_c_library,
    run_installer,
)
from tugline.sandbox.base import Mount

_EXCLUDED = (
    "test", "site-packages", "dist-packages", "config-*", "idlelib", "tkinter", "_tkinter*",
)  # fmt: skip
_log = log.get("harness")


class Python(Package):
    """`module` is run by the environment's Python; `also` are further pinned requirements."""

    def __init__(
        self, harness: str, package: str, version: str, module: str, *, also: tuple[str, ...] = ()
    ) -> None:
        super().__init__(harness, package, version)
        self._module = module
        self._requirements = (f"{package}=={version}", *also)

    async def _install(self, trial: Step) -> tuple[Mount, ...]:
        async def fill(fresh: Path) -> None:
            _log.info("installing", packages=self._requirements, folder=str(self.folder))
            purpose = f"cannot install {self._requirements[0]}"
            await run_installer(purpose, sys.executable, "-m", "venv", str(fresh), cwd=fresh)
            pip = (str(fresh / "bin" / "python"), "-m", "pip", "install", "--quiet")
            options = ("--disable-pip-version-check", "--no-input", *self._list_packages(fresh))
            await run_installer(purpose, *pip, *options, cwd=fresh)
            await asyncio.to_thread(_relink, fresh, await _copy_python())

        python = self.folder / "bin" / "python"
        self._command = (str(python), "-m", self._module)
        await install_once(self.folder, fill, trial)
        # The environment may have been made by another Python than this one.
        own = await asyncio.to_thread(python.resolve)
        return (
            *(Mount(str(folder), str(folder)) for folder in (self.folder, own.parent.parent)),
            *await mount_c_library(own),
        )

    async def find_newest(self) -> str:
        """The newest version in the registry. Raises `HarnessError`."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions")
        purpose = f"pip does not know {self._package}"
        text = await run_installer(purpose, *pip, self._package, cwd=Path.cwd())
        return text.partition("(")[2].partition(")")[0]

    def _list_packages(self, fresh: Path) -> tuple[str, ...]:
        """Arguments of ``pip install``: the lock file of this version, if there is one."""
        file = resources.files("tugline.harnesses") / "locks" / f"{self._harness}.txt"
        if file.is_file() and sys.platform == "linux":
            text = file.read_text(encoding="utf-8")
            if all(f"{requirement} " in text for requirement in self._requirements):
                lock = fresh / "lock.txt"
                lock.write_text(text, encoding="utf-8")
                return ("--no-deps", "--require-hashes", "--only-binary=:all:", "-r", str(lock))
        return self._requirements


async def _copy_python() -> Path:
    """A copy of the running Python in the install directory that needs only a C library."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    origin = await asyncio.to_thread(Path(sys.executable).resolve)
    digest = hashlib.sha256(f"{origin} {sys.version}".encode()).hexdigest()[:8]
    folder = install_dir() / f"python-{'.'.join(map(str, sys.version_info[:3]))}-{digest}"

    async def fill(fresh: Path) -> None:
        copy = fresh / "bin" / f"python{version}"
        library = fresh / "lib" / f"python{version}"
        copy.parent.mkdir()
        await asyncio.to_thread(shutil.copy2, origin, copy)
        await asyncio.to_thread(
            shutil.copytree,
            sysconfig.get_path("stdlib"),
            library,
            symlinks=False,
            ignore=shutil.ignore_patterns(*_EXCLUDED),
        )
        await bundle_libraries(copy, fresh, list((library / "lib-dynload").glob("*.so")))

    await install_once(folder, fill)
    return folder / "bin" / f"python{version}"


def _relink(environment: Path, python: Path) -> None:
    """Make a virtual environment use another copy of its Python."""
    for name in ("python", "python3", python.name):
        link = environment / "bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(python)
    settings = environment / "pyvenv.cfg"
    lines = settings.read_text(encoding="utf-8").splitlines()
    others = [line for line in lines if line.partition(" ")[0] not in {"home", "executable"}]
    settings.write_text("\n".join([f"home = {python.parent}", *others, ""]), encoding="utf-8")
