"""``tugline task``: check, validate, list and prefetch tasks and task sets."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from support.commands import run_command
from support.containers import podman
from support.repositories import git
from tugline.cli.task import read_checked
from tugline.errors import ConfigError
from tugline.plugins import find

__all__ = ["podman"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "harbor"
TASKS = Path(__file__).parent / "tasks"
"""A task set and tasks; FOLDER stands for their folder."""
tugline = partial(run_command, "task", timeout=110)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the task set and its tasks; they need bubblewrap."""
    reason = find("runtime", "bubblewrap")().check_available()
    if reason is not None:
        pytest.skip(reason)
    folder = shutil.copytree(TASKS, tmp_path / "tasks")
    for name in ("rows.jsonl", "task.yaml"):
        text = (folder / name).read_text().replace("FOLDER", str(folder))
        (folder / name).write_text(text)
    return folder


def test_init_writes_a_valid_task(tmp_path: Path) -> None:
    """The task is written to the given path; test_examples.py has the default path."""
    assert tugline("init", "mine.yaml", cwd=tmp_path).returncode == 0
    done = tugline("check", "mine.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "well-formed tasks: 1, sessions: 1\n")


def test_each_mistake_is_reported_on_its_own_line(tmp_path: Path) -> None:
    """Wrong types come first; unknown plug-ins and bad values once the types are right."""
    text = "id: t\ninstruction: do\nharness: {name: pi}\nevaluator: {name: tests}\n"
    (tmp_path / "t.yaml").write_text(text + "sampels: 4\npriority: x\nlimits: {agent_s: 0}")
    done = tugline("check", "t.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "tugline: t.yaml: unknown key 'sampels'; did you mean 'samples'?",
        "tugline: t.yaml: limits.agent_s is 0, must be a number > 0",
        "tugline: t.yaml: priority is 'x', must be an integer",
    ]
    (tmp_path / "t.yaml").write_text(text.replace("do", "' '") + "tags: {a=b: c}")
    done = tugline("check", "t.yaml", cwd=tmp_path)
    assert done.stderr.splitlines() == [
        "tugline: t.yaml: task 't': instruction is ' ', must be a non-empty text",
        "tugline: t.yaml: task 't': tags is 'a=b', must be a name without =",
    ]
    (tmp_path / "t.yaml").write_text(text.replace("pi", "pie") + "runtime: lokal")
    done = tugline("check", "t.yaml", cwd=tmp_path)
    assert [line.partition("?")[0] for line in done.stderr.splitlines()] == [
        "tugline: t.yaml: task 't': unknown harness 'pie'; did you mean 'pi'",
        "tugline: t.yaml: task 't': unknown runtime 'lokal'; did you mean 'local'",
    ]


def test_validation_reports_the_state_of_each_task(folder: Path) -> None:
    """Bad tasks have a reason and do not stop the others; any bad task is exit code 1."""
    out = folder / "out.jsonl"
    done = tugline("validate", folder / "set.yaml", folder / "task.yaml", "--json", "--out", out)
    lines = {line["task"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert {name: line["state"] for name, line in lines.items()} == {
        name: name for name in ("fine", "broken", "solved", "error", "unproven")
    }, done.stderr
    assert (lines["fine"]["reference"], lines["fine"]["empty"]) == (1.0, 0.0)
    assert (lines["error"]["reference"], lines["error"]["cause"]) == (None, "evaluator")
    assert lines["broken"]["reason"].startswith("reference: ")
    assert done.returncode == 1
    assert "fine: fine" in done.stderr


def test_validated_tasks_are_not_validated_again(folder: Path) -> None:
    """Only errors, missing lines, changed tasks and a cut line are validated again."""
    out = folder / "out.jsonl"
    first = tugline("validate", folder / "set.yaml", "--json", "--out", out)
    kept = out.read_text().splitlines()
    assert sorted(kept) == sorted(first.stdout.splitlines())
    out.write_text("\n".join(line for line in kept if '"broken"' not in line) + '\n{"task": "br')
    text = (folder / "set.yaml").read_text()
    (folder / "set.yaml").write_text(text + "select: {exclude: [solved]}\n")
    again = tugline("validate", folder / "set.yaml", "--out", out)
    validated = re.findall(r"^([a-z ]+): ", again.stderr, re.MULTILINE)
    assert sorted(validated) == ["broken", "error", "validated before"]
    assert "fine: 1, broken: 1, error: 1" in again.stdout
    assert len(out.read_text().splitlines()) == 5
    text = text.replace("name: pi", "name: codex") + "select: {include: [fine]}\n"
    (folder / "set.yaml").write_text(text)
    changed = tugline("validate", folder / "set.yaml", "--out", out)
    assert changed.returncode == 0
    assert changed.stderr.endswith("fine: fine\n")


def test_a_changed_solution_or_test_is_validated_again(folder: Path) -> None:
    """Neither the solution nor the text of the tests is a part of the task itself."""
    out = folder / "out.jsonl"
    with (folder / "set.yaml").open("a") as file:
        file.write("select: {include: [fine]}\n")
    validate = ("validate", folder / "set.yaml", "--out", out)
    assert tugline(*validate).returncode == 0
    assert "validated before: 1" in tugline(*validate).stderr
    rows = (folder / "rows.jsonl").read_text()
    (folder / "rows.jsonl").write_text(rows.replace('{"work": "right"}', '{"work": "bad"}', 1))
    assert "fine: broken" in tugline(*validate).stderr
    (tagged,) = read_checked([str(folder / "set.yaml")], prefix="b-", validated=out)
    assert (tagged.id, tagged.tags["validation"]) == ("b-fine", "broken")  # the last line counts
    (folder / "rows.jsonl").write_text(rows)
    (folder / "good" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    assert "fine: solved" in tugline(*validate).stderr


def test_a_set_is_listed(folder: Path) -> None:
    """A table and JSON have its tasks with their tags and the counts."""
    done = tugline("list", folder / "set.yaml")
    assert done.stdout.splitlines()[-1] == "4 tasks, 4 sessions"
    lines = tugline("list", folder / "set.yaml", "--json").stdout.splitlines()
    assert json.loads(lines[0]) == {
        "id": "fine",
        "samples": 1,
        "tags": {"taskset": "jsonl", "instance": "fine"},
    }
    folders = tugline("list", EXAMPLES / "tasks", "--json").stdout.splitlines()
    assert len(folders) == 6


def test_a_hub_dataset_is_listed(tmp_path: Path) -> None:
    """The `datasets` library reads a local folder; a split can be selected."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text('{"q": "one"}\n{"q": "two"}\n')
    (data / "test.jsonl").write_text('{"q": "three"}\n')
    text = f"""
taskset: {{name: jsonl, options: {{dataset: {data}, id: q, instruction: "Say {{q}}."}}}}
template: {{harness: {{name: pi}}, evaluator: {{name: tests}}}}
select: {{split: test}}
"""
    (tmp_path / "set.yaml").write_text(text)
    env = {"HF_HOME": str(tmp_path / "hf")}
    done = tugline("list", tmp_path / "set.yaml", "--json", env=env)
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["three"], done.stderr


@pytest.mark.podman
def test_every_example_is_solvable_and_not_solved(podman: str) -> None:
    """In containers built from their Dockerfiles the solution earns 1, and no change earns 0."""
    env = {"DOCKER_HOST": podman}
    done = tugline("validate", EXAMPLES / "tasks.yaml", "--json", env=env)
    lines = list(map(json.loads, done.stdout.splitlines()))
    assert [(line["reference"], line["empty"], line["state"]) for line in lines] == [
        (1.0, 0.0, "fine")
    ] * 6, done.stdout + done.stderr
    assert done.returncode == 0


def test_prefetch_checks_out_repositories(folder: Path) -> None:
    """Each repository is checked out once; a missing one is named and does not stop the others."""
    repo = folder / "repo"
    repo.mkdir()
    git(repo, "init", "-q")
    git(repo, "commit", "-q", "--allow-empty", "-m", "all")
    cache = {"TUGLINE_CACHE": str(folder / "cache")}
    done = tugline("prefetch", folder / "repositories.yaml", "--json", env=cache)
    report = json.loads(done.stdout)
    assert (done.returncode, report["workspaces"], len(report["failed"])) == (1, 2, 1), done.stderr
    assert "gone" in report["failed"][0]
    assert len(list((folder / "cache").rglob("git-*/.git"))) == 1


def test_a_file_of_other_lines_is_no_validation(folder: Path) -> None:
    """The error names the line; a task that the file lacks has no tag."""
    out, paths = folder / "out.jsonl", [str(folder / "task.yaml")]
    out.write_text('{"task": "another", "digest": "d", "state": "fine"}\n')
    (untagged,) = read_checked(paths, validated=out)
    assert "validation" not in untagged.tags
    out.write_text(out.read_text() + '{"id": "t"}\n')
    with pytest.raises(
        ConfigError, match="line 2 was not written by `tugline task validate --out`"
    ):
        read_checked(paths, validated=out)


def test_validation_names_what_setup_may_prepare(folder: Path) -> None:
    """A solution whose installation is outside of the workdir is broken, with the reason."""
    row = {"id": "t", "start": {"work": "x"}, "solution": {"work": "y"}}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    options = {
        "setup": "cp work ~/installed",
        "command": "grep -q y ~/installed && echo ok 1 - a; echo 1..1",
        "format": "tap",
    }
    taskset = {"path": "rows.jsonl", "id": "id", "instruction": "id", "files": "start"}
    template = {
        "harness": {"name": "pi"},
        "runtime": {"name": "bubblewrap"},
        "evaluator": {"name": "tests", "options": options},
    }
    given = {"name": "jsonl", "options": {**taskset, "solution": "solution"}}
    (folder / "set.yaml").write_text(json.dumps({"taskset": given, "template": template}))
    done = tugline("validate", folder / "set.yaml", "--json")
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line["state"] == "broken"
    assert "`setup` has the effects that it has on the task's" in line["reason"]


def test_what_does_not_work_here_is_a_note(tmp_path: Path) -> None:
    """Another machine may have it, so the task is well-formed; many tasks have one line."""
    text = "instruction: do\nevaluator: session_completed\nruntime: local\nharness: {name: shell, "
    text += "options: {command: [no-such-agent, --fast]}}\nlimits: {total_s: 60}\n"
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(f"id: {name}\n{text}")
    done = tugline("check", "a.yaml", "b.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "well-formed tasks: 2, sessions: 2\n")
    assert [line.partition(", ")[0] for line in done.stderr.splitlines()] == [
        "note on 2 of 2 tasks: harness.options.command starts 'no-such-agent'",
        "note on 2 of 2 tasks: limits.total_s is 60",
    ]


def test_a_command_of_the_shell_or_of_the_workspace_is_accepted(tmp_path: Path) -> None:
    """Only what no sandbox can have is a mistake."""
    commands = (
        "cd sub && ./run.sh",
        "PYTHONPATH=. python3 -c 'print(1)'",
        "python3 $AGENT.py",
        "python3 own.py; python3 other.py",
        "echo 'a;b' | ./filter",
    )
    for number, command in enumerate(commands):
        task = {"id": f"t{number}", "instruction": "do", "evaluator": "session_completed"}
        task |= {"files": {"own.py": ""}, "runtime": "local"}
        task["harness"] = {"name": "shell", "options": {"command": command}}
        (tmp_path / f"{number}.json").write_text(json.dumps(task))
    prepared = {"command": "./agent", "setup": "make agent"}
    task |= {"id": "setup", "harness": {"name": "shell", "options": prepared}}
    (tmp_path / "setup.json").write_text(json.dumps(task))
    done = tugline("check", ".", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
