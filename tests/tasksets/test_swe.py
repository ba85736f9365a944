"""SWE rows as the public data sets have them: what becomes a task, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from swe_toy import make, tasks, written
from tugline import plugins
from tugline.datasets.base import TaskSet
from tugline.datasets.swe import END, START, SweTaskSet, list_files
from tugline.errors import ConfigError
from tugline.evaluators.swebench import SweBenchEvaluator
from tugline.types import PluginSpec

TEST_PATCH = """\
diff --git a/tests/test_a.py b/tests/test_a.py
index 1..2 100644
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1 +1,2 @@
 import a
+def test_new(): assert a.new
diff --git a/tests/data.json b/tests/data.json
new file mode 100644
index 0..1
--- /dev/null
+++ b/tests/data.json
@@ -0,0 +1 @@
+{}
diff --git a/tests/old.py b/tests/old.py
deleted file mode 100644
index 1..0
--- a/tests/old.py
+++ /dev/null
@@ -1 +0,0 @@
-x
diff --git a/tests/here.py b/tests/there.py
similarity index 100%
rename from tests/here.py
rename to tests/there.py
"""
GOLD = "diff --git a/setup.cfg b/setup.cfg\n--- a/setup.cfg\n+++ b/setup.cfg\n@@ -1 +1 @@\n-a\n+b\n"
GYM = {
    "instance_id": "getmoto__moto-5752",
    "repo": "getmoto/moto",
    "base_commit": "b2300f1eae1323e3e8bc45f97e530ce129dff12e",
    "version": "4.0",
    "problem_statement": "describe_parameters breaks",
    "hints_text": "look at ssm",
    "patch": GOLD,
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": ["tests/test_a.py::test_new"],
    "PASS_TO_PASS": [],
    "created_at": "2022-12-07",
}
BENCH = GYM | {
    "instance_id": "psf__requests-1921",
    "repo": "psf/requests",
    "FAIL_TO_PASS": '["t::a"]',
    "PASS_TO_PASS": '["t::b", "t::c"]',
    "image": "swebench/sweb.eval.x86_64.psf_1776_requests-1921:latest",
    "eval_script": f"#!/bin/bash\n: '{START}'\npytest -rA t\n: '{END}'\n",
    "log_parser": "parse_log_pytest_options",
    "eval_type": "pass_and_fail",
}
REBENCH = GYM | {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "docker_image": "swerebench/sweb.eval.x86_64.a_1776_b-1",
    "install_config": {"test_cmd": "pytest -rA --tb=no", "log_parser": "parse_log_pytest"},
}
R2E = {
    "repo_name": "orange3",
    "docker_image": "namanjain12/orange3_final:1",
    "commit_hash": "0123456789abcdef0123",
    "problem_statement": "[ISSUE]\n**Title** it breaks\n[/ISSUE]",
    "expected_output_json": json.dumps(
        {"TestA.test_one": "PASSED", "\x1b[1mTestA.test_two\x1b[0m": "PASSED", "x": "FAILED"}
    ),
}


def one(path: Path, row: object, **options: Any) -> Any:
    """The task of a row."""
    (task,) = tasks(SweTaskSet(path=written(path / "rows.jsonl", row), **options))
    return task


def test_a_row_of_swe_gym(tmp_path: Path) -> None:
    """Its image, its repository's test command, and a script that runs the right test files."""
    task = one(tmp_path, GYM)
    assert task.id == task.tags["instance"] == "getmoto__moto-5752"
    assert task.tags["repo"] == "getmoto/moto"
    image = "docker.io/xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest"
    assert (task.workspace.image, task.workspace.path) == (image, "/testbed")
    assert task.workspace.commit == GYM["base_commit"]
    assert task.runtime == PluginSpec("container")
    assert (task.limits.init_s, task.limits.eval_s) == (1200, 3660)
    assert "describe_parameters breaks" in task.instruction
    assert "/testbed" in task.instruction
    options = task.evaluator.options
    assert options["fail_to_pass"] == ["tests/test_a.py::test_new"]
    assert options["log_parser"] == "parse_log_pytest"
    script = options["eval_script"]
    ran = script.split(f": '{START}'\n")[1].split(f": '{END}'\n")[0]
    assert ran == "pytest -n0 -rA tests/test_a.py tests/there.py\n"
    back = "git checkout b2300f1eae1323e3e8bc45f97e530ce129dff12e -- "
    assert script.count(f"{back}tests/test_a.py tests/old.py tests/here.py\n") == 2
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_what_judges_is_not_the_agents(tmp_path: Path) -> None:
    """It is told of none. Names of the test patch judge, those of the reference may change."""
    task = one(tmp_path, GYM)
    assert not task.files
    assert not [one for one in ("test_new", "setup.cfg", "look at ssm") if one in task.instruction]
    options = task.evaluator.options
    names = ["test_a.py", "old.py", "here.py", "data.json", "there.py"]
    assert options["protected_files"] == [f"tests/{name}" for name in names]
    assert options["editable"] == ["setup.cfg"]
    assert SweBenchEvaluator(**options)


def test_a_row_of_swe_bench_brings_its_script(tmp_path: Path) -> None:
    """Script, parser and image are the row's; lists may be JSON text."""
    task = one(tmp_path, BENCH)
    options = task.evaluator.options
    assert options["eval_script"] == BENCH["eval_script"]
    assert options["log_parser"] == "parse_log_pytest_options"
    assert options["pass_to_pass"] == ["t::b", "t::c"]
    assert task.workspace.image == BENCH["image"]


def test_a_row_of_swe_rebench_says_how_it_is_tested(tmp_path: Path) -> None:
    """`install_config` has the test command, `docker_image` the image."""
    task = one(tmp_path, REBENCH)
    assert "pytest -rA --tb=no tests/test_a.py" in task.evaluator.options["eval_script"]
    assert task.workspace.image == REBENCH["docker_image"]


def test_a_row_of_r2e(tmp_path: Path) -> None:
    """Its tests lie in the image: they are hidden from the agent, and their runner judges."""
    task = one(tmp_path, R2E)
    options = task.evaluator.options
    assert task.id == "orange3__0123456789ab"
    assert task.workspace.image == "namanjain12/orange3_final:1"
    assert task.workspace.commit == "HEAD"
    assert options["fail_to_pass"] == ["TestA.test_one", "TestA.test_two"]
    assert options["hides"] == ["/r2e_tests"]
    assert "run_tests.sh" in options["protected_files"]
    assert "**Title** it breaks" in task.instruction
    assert "[ISSUE]" not in task.instruction
    assert SweBenchEvaluator(**options).hidden(task) == ("/r2e_tests",)


def test_names_of_r2e_are_read_from_pytests_summary(tmp_path: Path) -> None:
    """What its script prints has the names of its rows."""
    script = one(tmp_path, R2E).evaluator.options["eval_script"]
    command = script.split(f": '{START}'\n")[1].split("\n")[0]
    said = (
        "\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::\x1b[1mTestA::test_one[a/b c]\x1b[0m\n"
        "FAILED r2e_tests/test_1.py::test_two - assert 1 == 2\n"
    )
    argv = ("bash", "-c", command.partition("| ")[2])
    done = subprocess.run(argv, input=said, capture_output=True, text=True, check=True)
    assert done.stdout == "PASSED TestA.test_one[a/b c]\nFAILED test_two - assert 1 == 2\n"


def test_mypy_names_its_cases(tmp_path: Path) -> None:
    """Its tests are cases within data files, which pytest finds by name."""
    patch = TEST_PATCH + (
        "diff --git a/test-data/unit/check.test b/test-data/unit/check.test\n"
        "--- a/test-data/unit/check.test\n+++ b/test-data/unit/check.test\n"
        "@@ -1 +1,2 @@\n x\n+[case testNew]\n+[case testOther]\n"
    )
    row = GYM | {"repo": "python/mypy", "test_patch": patch}
    script = one(tmp_path, row).evaluator.options["eval_script"]
    assert "pytest -n0 -rA -k 'testNew or testOther'\n" in script


def test_images_may_be_named(tmp_path: Path) -> None:
    """By publisher, or by a template."""
    bench = one(tmp_path, GYM, images="swebench").workspace.image
    assert bench == "docker.io/swebench/sweb.eval.x86_64.getmoto_1776_moto-5752:latest"
    own = one(tmp_path, GYM, images="mine.example/{instance_id}:2").workspace.image
    assert own == "mine.example/getmoto__moto-5752:2"


def test_files_may_come_from_a_repository(tmp_path: Path) -> None:
    """`repos` beside the rows, or by URL, at the row's commit; no image is needed then."""
    task = one(tmp_path, GYM, repos="{repo}.git", folder="/code")
    space = task.workspace
    assert (space.image, space.repo) == (None, f"{tmp_path}/getmoto/moto.git")
    assert (space.commit, space.path) == (GYM["base_commit"], "/code")
    assert task.runtime == PluginSpec("auto")
    url = one(tmp_path, GYM, repos="https://example.org/{repo}", images="i").workspace
    assert (url.image, url.repo) == ("i", "https://example.org/getmoto/moto")


def test_the_reference_solution(tmp_path: Path) -> None:
    """A task's reference patch, applied by git; none where the row has none."""
    rows = make(tmp_path)
    taskset = SweTaskSet(path=str(tmp_path / "rows.jsonl"), repos="{repo}")
    found = tasks(taskset)
    solution = taskset.solution(found[1])
    assert solution is not None
    assert solution.home == {"solution.patch": rows[1]["patch"]}
    assert solution.argv[-1].endswith('apply -v "$HOME/solution.patch"')
    r2e = SweTaskSet(path=written(tmp_path / "r2e.jsonl", R2E))
    assert r2e.solution(tasks(r2e)[0]) is None


BAD = [
    ({"instance_id": 3}, r"rows\.jsonl, line 1: instance_id is 3, must be a string"),
    ({"base_commit": None}, r"line 1, getmoto__moto-5752: base_commit is missing"),
    ({"problem_statement": " "}, r"problem_statement is ' ', must be a string"),
    ({"FAIL_TO_PASS": []}, r"FAIL_TO_PASS is \[\], must be a list of length >= 1"),
    ({"FAIL_TO_PASS": "test_a"}, r"FAIL_TO_PASS is 'test_a', must be a list"),
    ({"PASS_TO_PASS": [1]}, r"PASS_TO_PASS\.0 is 1, must be a string"),
    ({"test_patch": "+ x"}, r"test_patch is '\+ x', must be a patch as `git diff` writes it"),
    ({"patch": 1}, r"patch is 1, must be a string"),
    ({"repo": "x/y"}, r"test_cmd is missing; give it, eval_script, or the option test_command"),
    ({"repo": "x/y", "test_cmd": "pytest"}, r"log_parser is missing; it must be the name of a"),
    ({"install_config": "["}, r"install_config is '\[', must be an object"),
    ({"eval_type": "all"}, r"eval_type is 'all', must be one of fail_only, pass_and_fail"),
]


@pytest.mark.parametrize(
    ("wrong", "message"), BAD, ids=[next(reversed(w)) + str(n) for n, (w, _) in enumerate(BAD)]
)
def test_a_bad_row_is_told_by_its_place(
    wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """File, line, instance, field, value and what would be right."""
    with pytest.raises(ConfigError, match=message):
        one(tmp_path, GYM | wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "{issue}"}, r"prompt is '\{issue\}', must be text with \{problem_statement\}"),
        ({"images": "x/{id}"}, r"images is 'x/\{id\}', must be text with \{instance_id\}"),
        ({"repos": "{"}, r"repos is '.*\{', must be text with"),
        ({"folder": "testbed"}, r"folder is 'testbed', must be a string matching regex '\^/'"),
        ({"path": None}, "give either path or dataset"),
    ],
)
def test_a_bad_option_is_told(options: dict[str, Any], message: str) -> None:
    """Before any row is read."""
    with pytest.raises(ConfigError, match=message):
        plugins.make("taskset", PluginSpec("swe", {"path": "rows.jsonl", **options}), TaskSet)


def test_what_rows_do_not_say_may_be_said_for_all(tmp_path: Path) -> None:
    """`test_command` and `log_parser` stand in for what a data set lacks."""
    task = one(
        tmp_path,
        GYM | {"repo": "x/y"},
        test_command="make test",
        log_parser="parse_log_pytest",
        setup=["make"],
    )
    script = task.evaluator.options["eval_script"]
    assert "\nmake\ngit checkout" in script
    assert "\nmake test tests/test_a.py tests/there.py\n" in script


def test_a_patch_with_strange_names() -> None:
    """Quoted names, and lines of content that look like headers."""
    diff = (
        'diff --git "a/t \\303\\244.py" "b/t \\303\\244.py"\nnew file mode 100644\n--- /dev/null\n'
        '+++ "b/t.py"\n@@ -0,0 +1,2 @@\n+x\n+deleted file mode\n'
    )
    assert list_files(diff).before == ()
    assert list_files(diff).after == ("t \N{LATIN SMALL LETTER A WITH DIAERESIS}.py",)
    assert list_files("") == ((), ())


def test_the_toy_is_the_same_everywhere(tmp_path: Path) -> None:
    """Commits of the example repository depend on nothing of the machine."""
    rows = make(tmp_path)
    assert [row["base_commit"][:7] for row in rows] == ["d91a131", "c6019f3", "871deca"]
