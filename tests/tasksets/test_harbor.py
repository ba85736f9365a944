"""Harbor folders as tasks: settings, errors and warnings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import structlog

from tugline.datasets.base import TaskTemplate
from tugline.datasets.harbor import HarborTaskSet
from tugline.errors import ConfigError
from tugline.types import PluginSpec, Task, Workspace

FILES = Path(__file__).with_name("harbor")
TOML = (FILES / "task" / "task.toml").read_text()


def write_task(folder: Path, toml: str = TOML) -> Path:
    """Write the folder of a task; returns it."""
    shutil.copytree(FILES / "task", folder)
    (folder / "task.toml").write_text(toml)
    return folder


def load(path: Path, template: dict[str, Any] | None = None, **options: Any) -> list[Task]:
    """The tasks of a folder."""
    values = {"harness": {"name": "pi"}} | (template or {})
    return list(
        HarborTaskSet(path=str(path), **options).tasks(TaskTemplate.read(values, "t", path))
    )


def read(folder: Path, template: dict[str, Any] | None = None, **options: Any) -> Task:
    """The only task of a folder."""
    (task,) = load(folder, template, **options)
    return task


def test_a_folder_becomes_a_task(tmp_path: Path) -> None:
    """Instruction, image, tests, limits, resources and tags come from the folder."""
    folder = write_task(tmp_path / "one")
    task = read(folder)
    assert (task.id, task.instruction) == ("one", "Do it.\n")
    assert task.workspace == Workspace(build=str(folder / "environment"), path="/srv")
    wanted = {"tests": str(folder / "tests"), "timeout_s": 30.0, "in_place": False}
    env = {"env": {"MODE": "quick"}, "pass_env": []}
    assert task.evaluator == PluginSpec("harbor", wanted | env)
    assert task.runtime == PluginSpec("container", {"cpus": 2, "memory_mb": 1024, "disk_mb": 512})
    assert (task.limits.agent_s, task.limits.eval_s, task.limits.init_s) == (90, 120, 600)
    assert task.tags == {"difficulty": "hard", "instance": "one"}


def test_the_template_overrides_the_folder(tmp_path: Path) -> None:
    """The template's runtime, limits and evaluator win; the tests go to its nested evaluator."""
    folder = write_task(tmp_path / "one")
    weighted = {"name": "weighted", "options": {"parts": {"a": {"evaluator": {"name": "harbor"}}}}}
    values = {"limits": {"agent_s": 5}, "runtime": {"name": "local"}, "evaluator": weighted}
    task = read(folder, values)
    assert (task.limits.agent_s, task.limits.eval_s) == (5, 120)
    assert task.runtime == PluginSpec("local")
    nested = task.evaluator.options["parts"]["a"]["evaluator"]
    assert nested["options"]["tests"] == str(folder / "tests")


def test_a_published_image_is_preferred_to_a_dockerfile(tmp_path: Path) -> None:
    """The Dockerfile is built only with the option `build`."""
    folder = write_task(tmp_path / "one", TOML + 'docker_image = "org/one:2"\n')
    assert read(folder).workspace == Workspace(image="org/one:2", path="/srv")
    assert read(folder, build=True).workspace.build == str(folder / "environment")


def test_in_place_evaluation_can_be_overridden(tmp_path: Path) -> None:
    """The author's `shared` means in place; the option `in_place` takes precedence."""
    shared = TOML.replace("[verifier]", '[verifier]\nenvironment_mode = "shared"')
    folder = write_task(tmp_path / "one", shared)
    assert read(folder).evaluator.options["in_place"] is True
    assert read(folder, in_place=False).evaluator.options["in_place"] is False


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[agent]\ntimeout_sec = 'long'", "agent.timeout_sec is 'long'"),
        ("[environment]\nmemory = 'lots'", "environment.memory is 'lots', must be a size"),
        ("[environment]\nos = 'windows'", "environment.os is 'windows', must be 'linux'"),
        ("[[steps]]\nname = 'a'", "steps has 1 steps; only tasks of one step are supported"),
        ("[verifier.environment]\ndocker_image = 'x'", "the verifier has its own image"),
        ("[verifier]\nenvironment_mode = 'x'", "environment_mode is 'x', must be shared or"),
        ("[agent", "task.toml is not valid TOML"),
    ],
    ids=["type", "size", "windows", "steps", "verifier", "mode", "toml"],
)
def test_unsupported_settings_are_errors(tmp_path: Path, toml: str, message: str) -> None:
    """The error has the file, the field and its value."""
    folder = write_task(tmp_path / "one", toml)
    with pytest.raises(ConfigError) as caught:
        read(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "environment/docker-compose.yaml",
            "is not supported; the environment must be a single image",
        ),
        ("tests/test.sh", "tests/test.sh is missing"),
        ("environment/Dockerfile", "needs environment/Dockerfile or environment.docker_image"),
        ("instruction.md", "instruction.md: No such file"),
        ("task.toml", "must be a folder of tasks, each a folder with task.toml"),
    ],
)
def test_missing_files_and_services_are_errors(tmp_path: Path, name: str, message: str) -> None:
    """Required files must be there, and a compose file is refused: there is only one sandbox."""
    path = write_task(tmp_path / "one") / name
    if path.exists():
        path.unlink()
    else:
        path.write_text("services: {}\n")
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "one")


@pytest.mark.parametrize("name", ["docker-compose.yml", "compose.yaml", "compose.yml"])
def test_compose_files_that_harbor_does_not_read_belong_to_the_task(
    tmp_path: Path, name: str
) -> None:
    """A task to write a compose file may have one anywhere in its folder."""
    folder = write_task(tmp_path / "one")
    for inner in ("environment", "environment/app", "solution", "tests", "."):
        (folder / inner).mkdir(exist_ok=True)
        (folder / inner / name).write_text("services: {a: {}, b: {}}\n")
    (folder / "environment" / "app" / "docker-compose.yaml").write_text("services: {}\n")
    assert read(folder).id == "one"


def test_an_error_lists_all_tasks_and_what_leaves_them_out(tmp_path: Path) -> None:
    """The error ends with a `leave_out` to paste, which has the names given so far, too."""
    for name in ("a", "d"):
        write_task(tmp_path / name)
    for name in ("b", "c", "e"):
        write_task(tmp_path / name, "[[steps]]\nname = 'x'\n")
    (tmp_path / "e" / "task.toml").write_text("[agent")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    for name in ("b", "c", "e"):
        assert f"{tmp_path / name}" in str(caught.value)
    assert str(caught.value).endswith('leave_out: ["b", "c", "e"]')
    with pytest.raises(ConfigError, match=r'leave_out: \["b", "c", "e"\]') as caught:
        load(tmp_path, leave_out=["e", "b"])
    assert str(tmp_path / "b") not in str(caught.value)
    with structlog.testing.capture_logs() as logged:
        assert [task.id for task in load(tmp_path, leave_out=["b", "c", "e"])] == ["a", "d"]
    assert len(logged) == 3
    with pytest.raises(ConfigError, match="leave_out has 'f', which is not a folder"):
        load(tmp_path, leave_out=["f"])


def test_published_tasks_are_read_without_warnings(tmp_path: Path) -> None:
    """The keys that Terminal-Bench 2 writes are known, empty ones included."""
    folder = write_task(tmp_path / "one", (FILES / "published.toml").read_text())
    with structlog.testing.capture_logs() as logged:
        task = read(folder)
    assert logged == []
    assert task.workspace == Workspace(image="org/one:1")
    assert "env" not in task.evaluator.options


def test_unsupported_tasks_can_be_skipped(tmp_path: Path) -> None:
    """With `leave_out` there is a warning, and the other tasks are read."""
    write_task(tmp_path / "one")
    write_task(tmp_path / "two", "[[steps]]\nname = 'a'\n")
    with structlog.testing.capture_logs() as logged:
        assert [task.id for task in load(tmp_path, leave_out=True)] == ["one"]
    assert "steps has 1 steps" in logged[0]["reason"]


def test_ignored_settings_are_warned_about_once(tmp_path: Path) -> None:
    """Two tasks with the same key make one warning."""
    toml = TOML + "gpus = 1\nflavour = 'mint'\n"
    for name in ("one", "two"):
        write_task(tmp_path / name, toml)
    with structlog.testing.capture_logs() as logged:
        assert len(load(tmp_path)) == 2
    assert [(each["event"], each["key"]) for each in logged] == [
        ("ignored setting", "environment.gpus"),
        ("ignored setting", "environment.flavour"),
    ]


def test_variables_of_the_node_must_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A public task set cannot read the node's secrets."""
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    toml = '[solution]\nenv = { A = "${SECRET_KEY:-none}", B = "x${SECRET_KEY}" }\n'
    folder = write_task(tmp_path / "one", toml)
    task = read(folder)
    for names, env in (
        ((), {"A": "none", "B": "x"}),
        (("SECRET_KEY",), {"A": "s3cret", "B": "xs3cret"}),
    ):
        solution = HarborTaskSet(path=str(folder), pass_env=names).solution(task)
        assert solution is not None
        assert solution.env == env
