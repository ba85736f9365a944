"""``tugline tasks``: what is in a set, and which of its tasks are any good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from containers import podman
from tugline.plugins import find

__all__ = ["podman"]

TUGLINE = Path(sys.executable).with_name("tugline")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "harbor"
RIGHT, WRONG = "def one():\n    return 1\n", "def one():\n    return 2\n"
TEST = "from work import one\n\n\ndef test_one():\n    assert one() == 1\n"
ROWS = [
    {"id": "fine", "start": {"work.py": WRONG}, "solution": {"work.py": RIGHT}, "tests": TEST},
    {"id": "broken", "start": {"work.py": WRONG}, "solution": {"work.py": WRONG}, "tests": TEST},
    {"id": "solved", "start": {"work.py": RIGHT}, "solution": {"work.py": RIGHT}, "tests": TEST},
    {"id": "error", "start": {"work.py": WRONG}, "solution": {"work.py": RIGHT}, "tests": "def ("},
]
SET = """
taskset:
  name: jsonl
  options: {path: rows.jsonl, id: id, instruction: id, files: start, solution: solution,
            evaluator: {files: hidden}}
template:
  harness: {name: pi}
  runtime: {name: bubblewrap}
  evaluator: {name: tests}
"""
TASK = """
id: unproven
instruction: do
harness: {name: pi}
runtime: {name: bubblewrap}
evaluator: {name: tests}
files:
  work.py: "def one(): return 2"
  test_work.py: "from work import one\\ndef test(): assert one() == 1"
"""


def tugline(
    *words: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command, to its end."""
    argv = [str(TUGLINE), *map(str, words)]
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a task-set file, its rows and a task file, for sandboxes that this machine has."""
    why = find("runtime", "bubblewrap")().unavailable()
    if why is not None:
        pytest.skip(why)
    rows = [{**row, "hidden": {"test_work.py": row["tests"]}} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "set.yaml").write_text(SET)
    (tmp_path / "task.yaml").write_text(TASK)
    return tmp_path


def test_what_is_wrong_with_a_task_is_told(folder: Path) -> None:
    """Each state has its reason, whatever is wrong with others; the exit code says that some is."""
    out = folder / "out.jsonl"
    done = tugline(
        "tasks", "validate", folder / "set.yaml", folder / "task.yaml", "--json", "--out", out
    )
    lines = {line["task"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert {name: line["state"] for name, line in lines.items()} == {
        name: name for name in ("fine", "broken", "solved", "error", "unproven")
    }, done.stderr
    assert (lines["fine"]["reference"], lines["fine"]["empty"]) == (1.0, 0.0)
    assert (lines["error"]["reference"], lines["error"]["cause"]) == (None, "evaluator")
    assert lines["broken"]["why"].startswith("reference: ")
    assert done.returncode == 1
    assert "fine: fine" in done.stderr


def test_what_was_tried_is_not_tried_again(folder: Path) -> None:
    """But for errors, a changed task, and a line that was cut short."""
    out = folder / "out.jsonl"
    first = tugline("tasks", "validate", folder / "set.yaml", "--json", "--out", out)
    kept = out.read_text().splitlines()
    assert sorted(kept) == sorted(first.stdout.splitlines())
    out.write_text("\n".join(line for line in kept if '"broken"' not in line) + '\n{"task": "br')
    (folder / "set.yaml").write_text(SET + "select: {exclude: [solved]}\n")
    again = tugline("tasks", "validate", folder / "set.yaml", "--out", out)
    tried = [line.partition(":")[0] for line in again.stderr.splitlines() if ": " in line]
    assert sorted(tried) == ["broken", "error", "tried before"]
    assert "fine: 1, broken: 1, error: 1" in again.stdout
    assert len(out.read_text().splitlines()) == 5
    fine = SET.replace("name: pi", "name: codex") + "select: {include: [fine]}\n"
    (folder / "set.yaml").write_text(fine)
    changed = tugline("tasks", "validate", folder / "set.yaml", "--out", out)
    assert (changed.returncode, changed.stderr) == (0, "fine: fine\n")


def test_a_set_is_listed(folder: Path) -> None:
    """With tags and counts, for people and for scripts."""
    done = tugline("tasks", "list", folder / "set.yaml")
    assert done.stdout.splitlines()[-1] == "4 tasks, 4 sessions"
    lines = tugline("tasks", "list", folder / "set.yaml", "--json").stdout.splitlines()
    assert json.loads(lines[0]) == {
        "id": "fine",
        "samples": 1,
        "tags": {"taskset": "jsonl", "instance": "fine"},
    }
    folders = tugline("tasks", "list", EXAMPLES / "tasks", "--json").stdout.splitlines()
    assert len(folders) == 6


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("validate", "none.yaml"), "there is no file none.yaml"),
        (("validate", EXAMPLES / "tasks.yaml", "--runtime", "lokal"), "unknown runtime 'lokal'"),
    ],
    ids=["file", "runtime"],
)
def test_a_mistake_is_one_line(words: tuple[str | Path, ...], told: str) -> None:
    """Exit code 2."""
    done = tugline("tasks", *words)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert told in done.stderr


@pytest.mark.podman
def test_every_example_can_be_earned_and_is_not_for_free(podman: str) -> None:
    """In containers built from their Dockerfiles: the oracle earns 1, nothing earns 0."""
    env = {"DOCKER_HOST": podman}
    done = tugline("tasks", "validate", EXAMPLES / "tasks.yaml", "--json", env=env)
    lines = list(map(json.loads, done.stdout.splitlines()))
    assert [(one["reference"], one["empty"], one["state"]) for one in lines] == [
        (1.0, 0.0, "fine")
    ] * 6, done.stdout + done.stderr
    assert done.returncode == 0
