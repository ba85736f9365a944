"""Prepare ``.venv`` for `make demo` and `make test`; only what is missing is installed.

Needs only Python's standard library. The CPU build of torch is preferred, because the default build
for Linux has several GB of CUDA libraries: pip looks for it among local wheels and on PyTorch's CPU
index, and the default build is used only if both lack it. Network timeouts are short, so that an
unreachable index costs only seconds. Versions are those of ``constraints.txt``, with which the
tests ran; `make lock` updates them.
"""

from __future__ import annotations

import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCK = ROOT / "constraints.txt"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INSTALL = ("install", "--no-compile", "--timeout", "20", "--retries", "2")
"""pip would compile 26,000 modules on one core."""


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def pip(*arguments: str) -> bool:
    """Run pip in the environment with its output in the log; return whether it succeeded."""
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    with LOG.open("a", encoding="utf-8") as log:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    return done.returncode == 0


def works(*arguments: str) -> bool:
    """Whether the environment's Python runs this without an error."""
    if not PYTHON.exists():
        return False
    return subprocess.run([PYTHON, *arguments], capture_output=True, check=False).returncode == 0


def make_environment() -> None:
    """Create ``.venv`` unless a working one exists."""
    if works("-m", "pip", "--version"):
        return
    say(f"creating .venv with Python {sys.version.split()[0]}")
    venv.EnvBuilder(with_pip=True, clear=VENV.exists()).create(VENV)


def install_torch() -> None:
    """Install torch unless it is installed, preferably the CPU build."""
    if works("-c", "import torch"):
        return
    if sys.platform == "linux":
        say(f"installing torch {TORCH}, CPU build (about 200 MB)")
        build = ("--no-deps", "--extra-index-url", CPU_INDEX, f"torch=={TORCH}+cpu")
        if pip(*INSTALL, *build):
            return
        say("the CPU build is not available; installing the default one with CUDA (several GB)")
        say("for its progress see .venv/setup.log")
    say(f"installing torch {TORCH}")
    if not pip(*INSTALL, f"torch=={TORCH}"):
        give_up()


def install_tugline() -> None:
    """Install this checkout, editable, with the extras of demo and tests."""
    say("installing tugline[train,demo,dev] (about 300 MB; a minute or two)")
    lock = ("--constraint", str(LOCK))
    if not pip(*INSTALL, *lock, "--editable", f"{ROOT}[train,demo,dev]"):
        give_up()


def compile_modules() -> None:
    """Compile all modules, on all cores; some packages have files for other versions of Python."""
    command = [PYTHON, "-m", "compileall", "-qq", "-j", "0", VENV / "lib"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def give_up() -> None:
    """Exit with the end of pip's output."""
    tail = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    sys.exit("\n".join(["setup: pip failed; .venv/setup.log ends with:", *tail]))


def main() -> None:
    """Make the environment, install torch, install tugline; skip what is done."""
    if sys.version_info < (3, 11):  # noqa: UP036 - an older Python may run this file
        version = sys.version.split()[0]
        sys.exit(f"setup: this is Python {version}; name one >= 3.11: make PYTHON=python3.12 test")
    started = time.monotonic()
    make_environment()
    LOG.write_text("", encoding="utf-8")
    install_torch()
    install_tugline()
    compile_modules()
    say(f"ready after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
