"""Run a ``tugline`` command in a process of its own without paying for its imports each time.

A fork server has imported the commands once; each run is a fork of it with its own folder,
environment and output, so exit codes, working folders and files behave as on a command line.
``tests/cli/test_app.py`` starts the installed program itself.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tugline.cli.app import COMMANDS, main

TUGLINE = Path(sys.executable).with_name("tugline")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["__main__", "tugline.cli.app", *(f"tugline.cli.{name}" for name in COMMANDS)]
)


def run_command(
    *arguments: object,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run ``tugline`` with arguments, with `env` added to the environment, to its end.

    It runs in `cwd`, by default in an empty folder: a checkout may have runs and data of its user.
    """
    argv = [str(TUGLINE), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        out, err, empty = (Path(folder, name) for name in ("out", "err", "empty"))
        empty.mkdir()
        variables = {**os.environ, **(env or {})}
        process = _FORKS.Process(target=_run, args=(argv, cwd or empty, variables, out, err))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(argv, timeout, out.read_bytes(), err.read_bytes())
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())


def run_program(
    *argv: object, timeout: float = 110, check: bool = False, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run another program to its end."""
    text = [str(part) for part in argv]
    return subprocess.run(text, capture_output=True, text=True, timeout=timeout, check=check, **how)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that has imported nothing yet."""
    return run_program(sys.executable, "-c", code)


def _run(argv: list[str], cwd: Path, variables: dict[str, str], out: Path, err: Path) -> None:
    """Run the command in this process, with its own streams, environment and folder."""
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = argv
    main()
