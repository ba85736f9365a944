"""Make ``.venv`` ready for `make demo` and `make test`; run again, it does only what is missing.

Needs nothing but Python's standard library. The CPU build of torch is preferred, because the
default build for Linux brings several GB of CUDA libraries: one pip call finds it among local
wheels or on PyTorch's CPU index. Only where neither has it is the default build taken. Every
network wait is short, so an unreachable index costs seconds. Versions are those of
``constraints.txt``, with which the tests ran; `make lock` brings it up to date.
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
PATIENCE = ("--timeout", "20", "--retries", "2")


def say(text: str) -> None:
    """One line of progress, at once."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def pip(*arguments: str) -> bool:
    """Run pip in the environment, its words going to the log; whether it succeeded."""
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
    """Create ``.venv`` unless a working one is there."""
    if works("-m", "pip", "--version"):
        return
    say(f"creating .venv with Python {sys.version.split()[0]}")
    venv.EnvBuilder(with_pip=True, clear=VENV.exists()).create(VENV)


def install_torch() -> None:
    """Put torch in place, the CPU build if it can be had; nothing where one is installed."""
    if works("-c", "import torch"):
        return
    if sys.platform == "linux":
        say(f"installing torch {TORCH}, CPU build (about 200 MB)")
        build = ("--no-deps", "--extra-index-url", CPU_INDEX, f"torch=={TORCH}+cpu")
        if pip("install", *PATIENCE, *build):
            return
        say("the CPU build cannot be had; the default one follows, with CUDA: several GB")
        say("its progress is in .venv/setup.log")
    say(f"installing torch {TORCH}")
    if not pip("install", *PATIENCE, f"torch=={TORCH}"):
        give_up()


def install_tugline() -> None:
    """Install this checkout, editable, with everything that the demo and the tests need."""
    say("installing tugline[train,demo,dev] (about 300 MB; a minute or two)")
    lock = ("--constraint", str(LOCK))
    if not pip("install", *PATIENCE, *lock, "--editable", f"{ROOT}[train,demo,dev]"):
        give_up()


def give_up() -> None:
    """End with pip's own last words."""
    tail = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    sys.exit("\n".join(["setup: pip failed; .venv/setup.log has it all, and ends with:", *tail]))


def main() -> None:
    """Environment, torch, tugline: in this order, each one skipped where it is done."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the one file that an older Python may meet
        version = sys.version.split()[0]
        sys.exit(f"setup: this is Python {version}; name one >= 3.11: make PYTHON=python3.12 test")
    started = time.monotonic()
    make_environment()
    LOG.write_text("", encoding="utf-8")
    install_torch()
    install_tugline()
    say(f"ready after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
