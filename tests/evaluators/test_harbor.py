"""Harbor tasks, evaluated by their script in a clean sandbox or in that of the agent.

The agent is a command in the place of a reference solution, in real sandboxes.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.containers import DEBIAN
from tugline.datasets.base import Solution
from tugline.evaluators.harbor import parse_rewards
from tugline.plugins import find
from tugline.rollout.parts import Parts
from tugline.rollout.task_validation import TaskValidation, validate_task
from tugline.schema import read_values
from tugline.types import Cause, Limits, PluginSpec, Task, Workspace

RUNTIMES = [
    pytest.param("bubblewrap", id="bubblewrap"),
    pytest.param("container", id="container", marks=pytest.mark.podman),
]
RIGHT = "if [ -f done ]; then echo 1; else echo 0; fi > $reward"
REWARDS = "reward=/logs/verifier/reward.txt; json=/logs/verifier/reward.json\n"
"""Shell variables for the files that a script may write."""

Judge = Callable[..., TaskValidation]


@pytest.fixture(params=RUNTIMES)
def judge(request: pytest.FixtureRequest, tmp_path: Path) -> Judge:
    """``judge(command, script, **options)`` evaluates an agent's command by a script."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "calendar.py").write_text("1\n")
    runtime = PluginSpec("bubblewrap")
    workspace = Workspace(path="/app", folder=str(tmp_path / "base"))
    if request.param == "container":
        runtime = PluginSpec("container", {"engine": request.getfixturevalue("podman")})
        workspace = msgspec.structs.replace(workspace, image=DEBIAN)
    else:
        reason = find("runtime", "bubblewrap")().check_available()
        if reason is not None:
            pytest.skip(reason)

    def validate(
        command: str, script: str = RIGHT, *, allow: Sequence[str] = (), **options: Any
    ) -> TaskValidation:
        tests = tmp_path / "tests"
        shutil.rmtree(tests, ignore_errors=True)
        tests.mkdir()
        if script:
            (tests / "test.sh").write_text(REWARDS + script)
        (tests / "secret.txt").write_text("42")
        task = Task(
            id="t",
            instruction="",
            harness=PluginSpec("shell"),
            evaluator=PluginSpec("harbor", {"tests": str(tests), "timeout_s": 20.0, **options}),
            runtime=PluginSpec(runtime.name, {**runtime.options, "allow": list(allow)}),
            workspace=workspace,
            files={"given.txt": "given"},
            limits=Limits(eval_s=60.0),
        )
        solution = Solution(argv=("sh", "-c", REWARDS + command))
        return asyncio.run(validate_task(task, solution, tmp_path / "sandboxes", Parts()))

    return validate


EARNED = read_values(Path(__file__).with_name("harbor.yaml"))


@pytest.mark.parametrize("case", EARNED)
def test_the_script_gives_the_reward(
    judge: Judge, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that an agent leaves for the script do not change the reward."""
    monkeypatch.setenv("NODE_KEY", "k3y")
    given = EARNED[case]
    validation = judge(given.get("agent", "true"), given["script"], **given.get("options", {}))
    assert validation.reward == given["earns"], validation.reason


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", "no reward was written (exit 3)"),
        ("echo many > $reward", "must be a number"),
        ("echo 1e300 > $reward", "must be from 0 to 1 (reward_range)"),
        ("ln -s /etc/hostname $reward", "no reward was written"),
        ("", "there is no test.sh in"),
    ],
)
def test_a_script_without_a_valid_reward_is_an_error(
    judge: Judge, script: str, message: str
) -> None:
    """The cause of a missing or invalid reward is the evaluator."""
    validation = judge("touch done", script)
    assert validation.failure is not None
    assert (validation.reward, validation.failure.cause) == (None, Cause.EVALUATOR)
    assert message in validation.reason


def test_work_that_breaks_the_script_earns_nothing(judge: Judge) -> None:
    """Work that makes the script fail or run for too long earns 0."""
    validation = judge("rm given.txt", "set -e; cat given.txt; echo 1 > $reward")
    assert validation.failure is None
    assert (validation.reward, validation.reason) == (0.0, "no reward was written (exit 1)")
    validation = judge("true", "sleep 60", timeout_s=1.0)
    assert (validation.reward, validation.reason) == (0.0, "not finished within 1 s")


@pytest.mark.podman
@pytest.mark.parametrize("in_place", [False, True], ids=["clean", "in-place"])
def test_tests_in_an_image_are_hidden_from_the_agent(
    podman: str, tmp_path: Path, *, in_place: bool
) -> None:
    """The folder to which a Dockerfile copies the tests is empty for the agent."""
    for name, text in {
        "tests/test.sh": f"{REWARDS}echo 1 > $reward",
        "environment/Dockerfile": f"FROM {DEBIAN}\nCOPY secret.txt /tests/\nWORKDIR /app\n",
        "environment/secret.txt": "42",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    options = {"tests": str(tmp_path / "tests"), "in_place": in_place}
    task = Task(
        id="t",
        instruction="",
        harness=PluginSpec("shell"),
        evaluator=PluginSpec("harbor", options),
        runtime=PluginSpec("container", {"engine": podman}),
        workspace=Workspace(build=str(tmp_path / "environment")),
    )
    agent = Solution(argv=("sh", "-c", "ls -A /tests; ! [ -e /tests/secret.txt ]"))
    validation = asyncio.run(validate_task(task, agent, tmp_path / "sandboxes", Parts()))
    assert (validation.reward, validation.reason) == (1.0, "rewarded by the task's script")


def test_files_that_shadow_libraries_are_refused(judge: Judge) -> None:
    """The reason lists the refused files."""
    script = "ls; if [ -f json.py ]; then echo 1; else echo 0; fi > $reward"
    refused = judge("touch json.py sitecustomize.py", script)
    assert refused.reward == 0.0
    assert refused.reason.endswith("(not applied: json.py, sitecustomize.py)")


@pytest.mark.parametrize("text", ['{"a": "1"}', "[]", "{}", "1e999", "null", "", "[" * 9999])
def test_other_values_than_numbers_are_no_reward(text: str) -> None:
    """Values that are not numbers are errors in JSON and as text."""
    for name in ("reward.json", "reward.txt"):
        with pytest.raises(ValueError, match=rf"{name} is b.*, must "):
            parse_rewards(name, text.encode())
    with pytest.raises(ValueError, match="must have finite numbers"):
        parse_rewards("reward.txt", b"nan")
