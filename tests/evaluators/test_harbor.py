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

from containers import DEBIAN, podman
from tugline.datasets.base import Solution
from tugline.evaluators.harbor import parse_rewards
from tugline.plugins import find
from tugline.rollout.parts import Parts
from tugline.rollout.task_validation import TaskValidation, validate_task
from tugline.types import Cause, Limits, PluginSpec, Task, Workspace

RUNTIMES = [
    pytest.param("bubblewrap", id="bubblewrap"),
    pytest.param("container", id="container", marks=pytest.mark.podman),
]
RIGHT = "if [ -f done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"

__all__ = ["podman"]

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

    def judged(
        command: str, script: str = RIGHT, *, allow: Sequence[str] = (), **options: Any
    ) -> TaskValidation:
        tests = tmp_path / "tests"
        shutil.rmtree(tests, ignore_errors=True)
        tests.mkdir()
        if script:
            (tests / "test.sh").write_text(script)
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
        solution = Solution(argv=("sh", "-c", command))
        return asyncio.run(validate_task(task, solution, tmp_path / "sandboxes", Parts()))

    return judged


def test_the_work_is_judged_by_the_script(judge: Judge) -> None:
    """Its number is the reward, for right and for wrong work."""
    assert judge("touch done").reward == 1.0
    assert judge("true").reward == 0.0
    assert (
        judge("touch done", "cat given.txt && echo 0.25 > /logs/verifier/reward.txt").reward == 0.25
    )


def test_several_rewards_are_one_number(judge: Judge) -> None:
    """`reward` counts, or the one that is named, or else their mean; of two files the smaller."""
    script = "echo 9 > /logs/verifier/reward.txt; echo '{}' > /logs/verifier/reward.json"
    assert judge("true", script.format('{"reward": 0.5, "a": 1}')).reward == 0.5
    assert judge("true", script.format('{"a": 1, "b": 0}')).reward == 0.5
    assert judge("true", script.format('{"a": 1, "b": 0}'), reward="a").reward == 1.0
    zero = script.replace("9", "0")
    assert judge("true", zero.format('{"reward": 1}')).reward == 0.0
    assert judge("true", zero.format('{"a": 1}'), reward="a").reward == 0.0


def test_a_reward_beyond_its_range_is_none(judge: Judge) -> None:
    """One session's number must not outweigh all others; a task may say that it has larger ones."""
    script = "if test -e done; then echo {}; else echo 0; fi > /logs/verifier/reward.txt"
    assert judge("touch done", script.format("5")).reward == 0.0
    assert judge("touch done", script.format("nan")).reward == 0.0
    assert judge("touch done", script.format("5"), reward_range=[-1, 10]).reward == 5.0
    broken = judge("true", "echo 1e300 > /logs/verifier/reward.txt")
    assert broken.failure is not None
    assert "must be from 0 to 1 (reward_range)" in broken.reason


def test_a_script_that_was_killed_has_no_reward(judge: Judge) -> None:
    """Whoever wrote a reward, the script did not come to its end."""
    script = "echo 1 > /logs/verifier/reward.txt; if test -e done; then kill -9 $$; fi"
    assert judge("touch done", script).reward == 0.0
    assert judge("true", script).reward == 1.0


def test_a_script_without_a_readable_reward_is_no_verdict(judge: Judge) -> None:
    """Nobody's work is charged with a broken task."""
    for script, why in (
        ("exit 3", "no reward was written (exit 3)"),
        ("echo many > /logs/verifier/reward.txt", "must be a number"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "no reward was written"),
        ("", "there is no test.sh in"),
    ):
        proof = judge("touch done", script)
        assert proof.failure is not None
        assert (proof.reward, proof.failure.cause) == (None, Cause.EVALUATOR)
        assert why in proof.reason


def test_work_that_breaks_the_script_earns_nothing(judge: Judge) -> None:
    """Without it the script gives a reward, so there is a verdict."""
    proof = judge("rm given.txt", "set -e; cat given.txt; echo 1 > /logs/verifier/reward.txt")
    assert proof.failure is None
    assert (proof.reward, proof.reason) == (0.0, "no reward was written (exit 1)")


def test_a_script_that_never_ends_is_ended(judge: Judge) -> None:
    """The agent's loop costs it the reward, and the evaluator a second."""
    proof = judge("true", "sleep 60", timeout_s=1.0)
    assert (proof.reward, proof.reason) == (0.0, "not done within 1 s")


def test_nothing_but_the_work_counts_in_a_clean_box(judge: Judge) -> None:
    """What an agent writes outside of its folder is gone; it sees no tests there."""
    plant = "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt;"
    plant += "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; ls /tests > seen; true"
    script = "if grep -q secret seen; then echo 0.1; else echo 0.5; fi > /logs/verifier/reward.txt"
    assert judge(plant, script).reward == 0.5


@pytest.mark.podman
@pytest.mark.parametrize("in_place", [False, True], ids=["clean", "in-place"])
def test_tests_that_lie_in_an_image_are_not_the_agents(
    podman: str, tmp_path: Path, *, in_place: bool
) -> None:
    """Where a Dockerfile copies them there, the agent finds an empty folder."""
    for name, text in {
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt",
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


def test_the_tests_cannot_be_changed_by_the_work_they_run(judge: Judge) -> None:
    """They are mounted read-only."""
    script = "echo x >> /tests/secret.txt && echo 0 || echo 1 > /logs/verifier/reward.txt"
    assert judge("true", script).reward == 1.0


def test_in_place_the_outcome_may_lie_anywhere(judge: Judge) -> None:
    """A file in the agent's home counts there, and only there."""
    script = 'if [ -f "$HOME/done" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'
    assert judge('touch "$HOME/done"', script, in_place=True).reward == 1.0
    assert judge('touch "$HOME/done"', script).reward == 0.0


def test_in_place_what_was_planted_is_cleared(judge: Judge) -> None:
    """Rewards and tests that the agent left where the script's own belong do not count."""
    plant = "echo 1 > /logs/verifier/reward.json; mkdir /tests/.hidden; ls -A /tests > seen;"
    plant += "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; touch /tests/conftest.py"
    script = "cat seen; [ -e /tests/conftest.py ] || [ -e /tests/.hidden ] || grep secret seen ||"
    script += " echo 0.5 > /logs/verifier/reward.txt"
    assert judge(plant, script, in_place=True).reward == 0.5


def test_the_script_has_its_environment(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of the task, and variables of the node as far as they are passed."""
    monkeypatch.setenv("NODE_KEY", "k3y")
    env = {"A": "plain", "B": "${NODE_KEY}", "C": "${OTHER_KEY:-none}"}
    script = '[ "$A$B$C" = plaink3ynone ] && echo 1 > /logs/verifier/reward.txt'
    assert judge("true", script, env=env, pass_env=["NODE_KEY"]).reward == 1.0


def test_the_script_has_a_network_only_by_choice(judge: Judge) -> None:
    """A proxy for the hosts that the runtime allows, and otherwise nothing."""
    script = 'if [ -n "$HTTPS_PROXY" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'
    allow = ["packages.example.org:443"]
    assert judge("true", script, allow=allow).reward == 0.0
    assert judge("true", script, network=True).reward == 0.0
    assert judge("true", script, allow=allow, network=True).reward == 1.0


def test_work_that_stands_in_for_libraries_is_left_out(judge: Judge) -> None:
    """Unless the task says that this is what is asked for."""
    script = "ls; if [ -f json.py ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
    left_out = judge("touch json.py sitecustomize.py", script)
    assert left_out.reward == 0.0
    assert left_out.reason.endswith("(not applied: json.py, sitecustomize.py)")
    assert judge("touch json.py", script, editable=["json.py"]).reward == 1.0
    lines = "cat calendar.py | wc -l > /logs/verifier/reward.txt"
    there = judge("echo >> calendar.py", lines, reward_range=[0, 2])
    assert there.reward == 2.0, there.reason


@pytest.mark.parametrize("text", ["true", "0.5", '{"a": 1, "b": false}', "-3"])
def test_json_rewards_are_numbers(text: str) -> None:
    """Alone or by name."""
    assert all(
        isinstance(value, float) for value in parse_rewards("reward.json", text.encode()).values()
    )


@pytest.mark.parametrize("text", ['{"a": "1"}', "[]", "{}", "1e999", "null", "", "[" * 9999])
def test_what_is_no_number_is_no_reward(text: str) -> None:
    """Neither in JSON nor as text."""
    for name in ("reward.json", "reward.txt"):
        with pytest.raises(ValueError, match=rf"{name} is b.*, must "):
            parse_rewards(name, text.encode())
    with pytest.raises(ValueError, match="must have finite numbers"):
        parse_rewards("reward.txt", b"nan")
