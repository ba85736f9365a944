"""Pinned Python packages as a program, in a virtual environment with a Python of its own.

The Python that runs Tugline is copied into the toolbox with its standard library and the shared
libraries that it needs, so that a sandbox or image needs none. The preset's own version is
installed by its lock file, with a checksum for every package; of others, what they ask for.
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
from tugline.errors import HarnessError
from tugline.harnesses.installing import Step, folder_of, once, succeed, toolbox
from tugline.harnesses.libraries import c_library, carry
from tugline.sandbox.base import Mount

_NOT_NEEDED = (
    "test", "site-packages", "dist-packages", "config-*", "idlelib", "tkinter", "_tkinter*",
)  # fmt: skip
_log = log.get("harness")


class Python:
    """`module` is run by the environment's Python; `also` are further pinned requirements."""

    def __init__(
        self, harness: str, package: str, version: str, module: str, *, also: tuple[str, ...] = ()
    ) -> None:
        self._harness, self._package, self._module = harness, package, module
        self.folder = folder_of(harness, version)
        self._requirements = (f"{package}=={version}", *also)
        self._mounts: tuple[Mount, ...] = ()
        self._turn = asyncio.Lock()
        self._installed = False

    @property
    def command(self) -> tuple[str, ...]:
        """What starts the program. Raises `HarnessError` before `install`."""
        if not self._installed:
            msg = f"harness {self._harness!r} is not installed yet"
            raise HarnessError(msg)
        return (str(self.folder / "bin" / "python"), "-m", self._module)

    @property
    def env(self) -> dict[str, str]:
        """Nothing."""
        return {}

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """What a sandbox must have of it, at the same path; complete after `install`."""
        return self._mounts

    async def install(self, trial: Step) -> None:
        """Make the environment unless it is there; a new one must pass `trial`."""
        async with self._turn:  # of many sessions that begin at once, one does it for all
            if not self._mounts:
                await self._install(trial)

    async def _install(self, trial: Step) -> None:

        async def fill(fresh: Path) -> None:
            _log.info("installing", packages=self._requirements, folder=str(self.folder))
            what = f"cannot install {self._requirements[0]}"
            await succeed(what, sys.executable, "-m", "venv", str(fresh), cwd=fresh)
            pip = (str(fresh / "bin" / "python"), "-m", "pip", "install", "--quiet")
            await succeed(
                what,
                *(*pip, "--disable-pip-version-check", "--no-input", *self._wanted(fresh)),
                cwd=fresh,
            )
            await asyncio.to_thread(_move_to, await _in_toolbox(), fresh)

        self._installed = True
        await once(self.folder, fill, trial)
        # Whoever made it may have had another Python than this one.
        own = await asyncio.to_thread((self.folder / "bin" / "python").resolve)
        folders = (self.folder, own.parent.parent)
        self._mounts = (
            *(Mount(str(folder), str(folder)) for folder in folders),
            *await c_library(own),
        )

    async def newest(self) -> str:
        """The newest version that the registry offers. Raises `HarnessError`."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions")
        what = f"pip does not know {self._package}"
        said = await succeed(what, *pip, self._package, cwd=Path.cwd())
        return said.partition("(")[2].partition(")")[0]

    def _wanted(self, fresh: Path) -> tuple[str, ...]:
        """What pip is told to install: the lock file of this very version, where there is one."""
        file = resources.files("tugline.harnesses") / "locks" / f"{self._harness}.txt"
        if file.is_file() and sys.platform == "linux":
            text = file.read_text(encoding="utf-8")
            if all(f"{requirement} " in text for requirement in self._requirements):
                lock = fresh / "lock.txt"
                lock.write_text(text, encoding="utf-8")
                return ("--no-deps", "--require-hashes", "--only-binary=:all:", "-r", str(lock))
        return self._requirements


async def _in_toolbox() -> Path:
    """A copy of the Python that runs this, with all it needs but a C library."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    origin = await asyncio.to_thread(Path(sys.executable).resolve)
    mark = hashlib.sha256(f"{origin} {sys.version}".encode()).hexdigest()[:8]
    folder = toolbox() / f"python-{'.'.join(map(str, sys.version_info[:3]))}-{mark}"

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
            ignore=shutil.ignore_patterns(*_NOT_NEEDED),
        )
        await carry(copy, fresh, list((library / "lib-dynload").glob("*.so")))

    await once(folder, fill)
    return folder / "bin" / f"python{version}"


def _move_to(python: Path, environment: Path) -> None:
    """Have a virtual environment run by another copy of its Python."""
    for name in ("python", "python3", python.name):
        link = environment / "bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(python)
    settings = environment / "pyvenv.cfg"
    lines = settings.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition(" ")[0] not in {"home", "executable"}]
    settings.write_text("\n".join([f"home = {python.parent}", *kept, ""]), encoding="utf-8")
