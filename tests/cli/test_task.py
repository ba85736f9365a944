"""``tugline task``: what it writes is what it accepts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from commands import run_command


def task(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return run_command("task", *arguments, cwd=cwd)


def test_what_init_writes_is_a_task(tmp_path: Path) -> None:
    """It passes the check, and is not overwritten unless that is asked for."""
    assert task("init", "mine.yaml", cwd=tmp_path).returncode == 0
    done = task("check", "mine.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "well-formed tasks: 1, sessions: 1\n")
    again = task("init", "mine.yaml", cwd=tmp_path)
    assert again.returncode == 2
    assert "mine.yaml exists" in again.stderr
    other = task("init", "mine", cwd=tmp_path)
    assert (other.returncode, "must end with .yaml" in other.stderr) == (2, True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sampels: 4", "unknown key 'sampels'; did you mean 'samples'?"),
        ("samples: 0", "t.yaml: samples is 0, must be an integer >= 1"),
        ("runtime: {name: lokal}", "unknown runtime 'lokal'; did you mean 'local'?"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, line: str, expected: str) -> None:
    """What is unknown, out of range or cannot be made: exit code 2."""
    text = "id: t\ninstruction: do\nharness: {name: pi}\nevaluator: {name: tests}\n"
    (tmp_path / "t.yaml").write_text(text + line)
    done = task("check", "t.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_every_mistake_has_its_line(tmp_path: Path) -> None:
    """Those of the types first; of plug-ins and sense once the types are right."""
    text = "id: t\ninstruction: do\nharness: {name: pi}\nevaluator: {name: tests}\n"
    (tmp_path / "t.yaml").write_text(text + "sampels: 4\npriority: x\nlimits: {agent_s: 0}")
    done = task("check", "t.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "tugline: t.yaml: unknown key 'sampels'; did you mean 'samples'?",
        "tugline: t.yaml: limits.agent_s is 0, must be a number > 0",
        "tugline: t.yaml: priority is 'x', must be an integer",
    ]
    (tmp_path / "t.yaml").write_text(text.replace("do", "' '") + "tags: {a=b: c}")
    done = task("check", "t.yaml", cwd=tmp_path)
    assert done.stderr.splitlines() == [
        "tugline: task 't': instruction is ' ', must be a text that says what to do",
        "tugline: task 't': tags is 'a=b', must be a name without =",
    ]
    (tmp_path / "t.yaml").write_text(text.replace("pi", "pie") + "runtime: lokal")
    done = task("check", "t.yaml", cwd=tmp_path)
    assert [line.partition("?")[0] for line in done.stderr.splitlines()] == [
        "tugline: task 't': unknown harness 'pie'; did you mean 'pi'",
        "tugline: task 't': unknown runtime 'lokal'; did you mean 'local'",
    ]
