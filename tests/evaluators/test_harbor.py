"""Harbor tasks, judged by their own script: in a clean sandbox, or where the agent was.

The agent is a command that stands where a reference solution would, in real sandboxes.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from containers import DEBIAN
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
FOLDER = "/logs/verifier"
REWARDS = f"reward={FOLDER}/reward.txt; json={FOLDER}/reward.json\n"
"""Names for what a script may write."""

Judge = Callable[..., TaskValidation]


@pytest.fixture(params=RUNTIMES)
def judge(request: pytest.FixtureRequest, tmp_path: Path) -> Judge:
    """What an agent's command earns by a script, as ``judge(command, script, **options)``."""
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
def test_the_work_is_judged_by_the_script(judge: Judge, case: str) -> None:
    """Its number is the reward; what an agent leaves beside its work does not count."""
    given = EARNED[case]
    proof = judge(given.get("agent", "true"), given["script"], **given.get("options", {}))
    assert proof.reward == given["earns"], proof.reason


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 3", "no reward was written (exit 3)"),
        ("echo many > $reward", "must be a number"),
        ("echo 1e300 > $reward", "must be from 0 to 1 (reward_range)"),
        ("ln -s /etc/hostname $reward", "no reward was written"),
        ("", "there is no test.sh in"),
    ],
)
def test_a_script_without_a_readable_reward_is_no_verdict(
    judge: Judge, script: str, message: str
) -> None:
    """Nobody's work is charged with a broken task."""
    proof = judge("touch done", script)
    assert proof.failure is not None
    assert (proof.reward, proof.failure.cause) == (None, Cause.EVALUATOR)
    assert message in proof.reason


def test_work_that_breaks_the_script_earns_nothing(judge: Judge) -> None:
    """Without it the script gives a reward, so there is a verdict; a loop is a verdict, too."""
    proof = judge("rm given.txt", "set -e; cat given.txt; echo 1 > $reward")
    assert proof.failure is None
    assert (proof.reward, proof.reason) == (0.0, "no reward was written (exit 1)")
    proof = judge("true", "sleep 60", timeout_s=1.0)
    assert (proof.reward, proof.reason) == (0.0, "not done within 1 s")


@pytest.mark.podman
@pytest.mark.parametrize("in_place", [False, True], ids=["clean", "in-place"])
def test_tests_that_lie_in_an_image_are_not_the_agents(
    podman: str, tmp_path: Path, *, in_place: bool
) -> None:
    """Where a Dockerfile copies them there, the agent finds an empty folder."""
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
    looking = Solution(argv=("sh", "-c", "ls -A /tests; ! [ -e /tests/secret.txt ]"))
    proof = asyncio.run(validate_task(task, looking, tmp_path / "sandboxes", Parts()))
    assert (proof.reward, proof.reason) == (1.0, "rewarded by the task's script")


def test_the_script_has_its_environment(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of the task, and variables of the node as far as they are passed."""
    monkeypatch.setenv("NODE_KEY", "k3y")
    env = {"A": "plain", "B": "${NODE_KEY}", "C": "${OTHER_KEY:-none}"}
    script = '[ "$A$B$C" = plaink3ynone ] && echo 1 > $reward'
    assert judge("true", script, env=env, pass_env=["NODE_KEY"]).reward == 1.0


def test_work_that_stands_in_for_libraries_is_left_out(judge: Judge) -> None:
    """Unless the task says that this is what is asked for."""
    script = "ls; if [ -f json.py ]; then echo 1; else echo 0; fi > $reward"
    left_out = judge("touch json.py sitecustomize.py", script)
    assert left_out.reward == 0.0
    assert left_out.reason.endswith("(not applied: json.py, sitecustomize.py)")
    assert judge("touch json.py", script, editable=["json.py"]).reward == 1.0
    lines = "cat calendar.py | wc -l > $reward"
    there = judge("echo >> calendar.py", lines, reward_range=[0, 2])
    assert there.reward == 2.0, there.reason


@pytest.mark.parametrize("text", ['{"a": "1"}', "[]", "{}", "1e999", "null", "", "[" * 9999])
def test_what_is_no_number_is_no_reward(text: str) -> None:
    """Neither in JSON nor as text."""
    for name in ("reward.json", "reward.txt"):
        with pytest.raises(ValueError, match=rf"{name} is b.*, must "):
            parse_rewards(name, text.encode())
    with pytest.raises(ValueError, match="must have finite numbers"):
        parse_rewards("reward.txt", b"nan")
