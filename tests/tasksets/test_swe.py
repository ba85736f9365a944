"""Rows of the public SWE data sets as tasks, and errors in rows."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.swe_repository import make_repository, tasks, write_rows
from tugline import plugins
from tugline.datasets.base import TaskSet
from tugline.datasets.swe import END, START, SweTaskSet, list_files
from tugline.errors import ConfigError
from tugline.evaluators.swebench import SweBenchEvaluator
from tugline.schema import read_values
from tugline.types import PluginSpec

ROWS = read_values(Path(__file__).with_name("rows.yaml"))
GYM, BENCH, REBENCH, MYPY, R2E = (ROWS[name] for name in ("gym", "bench", "rebench", "mypy", "r2e"))
NO_COMMAND = {"test_command": "make test", "log_parser": "parse_log_pytest"}
"""Options for a data set without test commands."""


def read_task(path: Path, row: object, **options: Any) -> Any:
    """The task of a row."""
    (task,) = tasks(SweTaskSet(path=write_rows(path / "rows.jsonl", row), **options))
    return task


def test_a_row_of_swe_gym(tmp_path: Path) -> None:
    """The task has the row's image and commit, and a script that restores the test files."""
    task = read_task(tmp_path, GYM)
    assert task.id == task.tags["instance"] == "getmoto__moto-5752"
    assert task.tags["repo"] == "getmoto/moto"
    assert (task.workspace.path, task.workspace.commit) == ("/testbed", GYM["base_commit"])
    assert task.runtime == PluginSpec("container")
    assert (task.limits.init_s, task.limits.eval_s) == (1200, 3660)
    assert "describe_parameters breaks" in task.instruction
    assert "/testbed" in task.instruction
    options = task.evaluator.options
    assert options["fail_to_pass"] == ["tests/test_a.py::test_new"]
    assert options["log_parser"] == "parse_log_pytest"
    script = options["eval_script"]
    back = "git checkout b2300f1eae1323e3e8bc45f97e530ce129dff12e -- "
    assert script.count(f"{back}tests/test_a.py tests/old.py tests/here.py\n") == 2
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("row", "options", "command"),
    [
        (GYM, {}, "pytest -n0 -rA tests/test_a.py tests/there.py"),
        (REBENCH, {}, "pytest -rA --tb=no tests/test_a.py tests/there.py"),
        (MYPY, {}, "pytest -n0 -rA -k 'testNew or testOther'"),
        (GYM | {"repo": "x/y"}, NO_COMMAND, "make test tests/test_a.py tests/there.py"),
    ],
    ids=["swe-gym", "swe-rebench", "cases of mypy", "options"],
)
def test_test_commands(
    tmp_path: Path, row: dict[str, Any], options: dict[str, str], command: str
) -> None:
    """The command is that of the row, its repository or the option, with the row's tests."""
    script = read_task(tmp_path, row, **options).evaluator.options["eval_script"]
    assert script.split(f": '{START}'\n")[1].split(f": '{END}'\n")[0] == f"{command}\n"


@pytest.mark.parametrize(
    ("row", "options", "image", "repo"),
    [
        (GYM, {}, "docker.io/xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest", None),
        (BENCH, {}, "swebench/sweb.eval.x86_64.psf_1776_requests-1921:latest", None),
        (REBENCH, {}, "swerebench/sweb.eval.x86_64.a_1776_b-1", None),
        (
            GYM,
            {"images": "swebench"},
            "docker.io/swebench/sweb.eval.x86_64.getmoto_1776_moto-5752:latest",
            None,
        ),
        (GYM, {"images": "mine/{instance_id}:2"}, "mine/getmoto__moto-5752:2", None),
        (GYM, {"repos": "{repo}.git"}, None, "{folder}/getmoto/moto.git"),
        (
            GYM,
            {"repos": "https://example.org/{repo}", "images": "i"},
            "i",
            "https://example.org/getmoto/moto",
        ),
    ],
)
def test_images_and_repositories(
    tmp_path: Path,
    row: dict[str, Any],
    options: dict[str, str],
    image: str | None,
    repo: str | None,
) -> None:
    """The image is the row's, a publisher's or a custom one; with `repos` there may be none."""
    task = read_task(tmp_path, row, **options, folder="/code")
    space = task.workspace
    assert (space.image, space.repo) == (image, repo and repo.format(folder=tmp_path))
    assert (space.commit, space.path) == (GYM["base_commit"], "/code")
    assert task.runtime == PluginSpec("container" if image else "auto")


def test_tests_are_hidden_and_protected(tmp_path: Path) -> None:
    """The instruction names no tests; files of the test patch are protected, others editable."""
    task = read_task(tmp_path, GYM)
    assert not task.files
    assert not [
        text for text in ("test_new", "setup.cfg", "look at ssm") if text in task.instruction
    ]
    options = task.evaluator.options
    names = ["test_a.py", "old.py", "here.py", "data.json", "there.py"]
    assert options["protected_files"] == [f"tests/{name}" for name in names]
    assert options["editable"] == ["setup.cfg"]
    assert SweBenchEvaluator(**options)


def test_a_row_of_swe_bench_brings_its_script(tmp_path: Path) -> None:
    """Script and parser come from the row; lists may be JSON text."""
    options = read_task(tmp_path, BENCH).evaluator.options
    assert options["eval_script"] == BENCH["eval_script"]
    assert options["log_parser"] == "parse_log_pytest_options"
    assert options["pass_to_pass"] == ["t::b", "t::c"]


def test_a_row_of_r2e(tmp_path: Path) -> None:
    """The tests of the image are hidden from the agent."""
    task = read_task(tmp_path, R2E)
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


def test_test_names_of_r2e(tmp_path: Path) -> None:
    """The script prints test names in the form that rows have."""
    script = read_task(tmp_path, R2E).evaluator.options["eval_script"]
    command = script.split(f": '{START}'\n")[1].split("\n")[0]
    output = (
        "\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::\x1b[1mTestA::test_one[a/b c]\x1b[0m\n"
        "FAILED r2e_tests/test_1.py::test_two - assert 1 == 2\n"
    )
    argv = ("bash", "-c", command.partition("| ")[2])
    done = subprocess.run(argv, input=output, capture_output=True, text=True, check=True)
    assert done.stdout == "PASSED TestA.test_one[a/b c]\nFAILED test_two - assert 1 == 2\n"


def test_the_reference_solution(tmp_path: Path) -> None:
    """The solution applies the row's reference patch with git; a row without one has none."""
    rows = make_repository(tmp_path)
    taskset = SweTaskSet(path=str(tmp_path / "rows.jsonl"), repos="{repo}")
    solution = taskset.solution(tasks(taskset)[1])
    assert solution is not None
    assert solution.home == {"solution.patch": rows[1]["patch"]}
    assert solution.argv[-1].endswith('apply -v "$HOME/solution.patch"')
    r2e = SweTaskSet(path=write_rows(tmp_path / "r2e.jsonl", R2E))
    assert r2e.solution(tasks(r2e)[0]) is None


BAD = [
    ({"instance_id": 3}, r"rows\.jsonl, line 1: instance_id is 3, must be a string"),
    ({"base_commit": None}, r"line 1, getmoto__moto-5752: base_commit is missing"),
    ({"problem_statement": " "}, r"problem_statement is ' ', must be a string"),
    ({"FAIL_TO_PASS": []}, r"FAIL_TO_PASS is \[\], must be a list of length >= 1"),
    ({"FAIL_TO_PASS": "test_a"}, r"FAIL_TO_PASS is 'test_a', must be a list"),
    ({"PASS_TO_PASS": [1]}, r"PASS_TO_PASS\.0 is 1, must be a string"),
    ({"test_patch": "+ x"}, r"test_patch is '\+ x', must be a patch in the format of `git diff`"),
    ({"patch": 1}, r"patch is 1, must be a string"),
    ({"repo": "x/y"}, r"test_cmd is missing; set it, eval_script, or the option test_command"),
    ({"repo": "x/y", "test_cmd": "pytest"}, r"log_parser is missing; it must name a"),
    ({"install_config": "["}, r"install_config is '\[', must be an object"),
    ({"eval_type": "all"}, r"eval_type is 'all', must be one of fail_only, pass_and_fail"),
]


@pytest.mark.parametrize(
    ("wrong", "message"), BAD, ids=[next(reversed(w)) + str(n) for n, (w, _) in enumerate(BAD)]
)
def test_bad_rows_are_reported(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The error has file, line, instance, field, value and what would be right."""
    with pytest.raises(ConfigError, match=message):
        read_task(tmp_path, GYM | wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt": "{issue}"},
            r"prompt is '\{issue\}', must be a text that contains \{problem_statement\}",
        ),
        (
            {"images": "x/{id}"},
            r"images is 'x/\{id\}', must be a text that contains \{instance_id\}",
        ),
        ({"repos": "{"}, r"repos is '.*\{', must be a text that contains"),
        ({"folder": "testbed"}, r"folder is 'testbed', must be a string matching regex '\^/'"),
        ({"path": None}, "give either path or dataset"),
    ],
)
def test_bad_options_are_reported(options: dict[str, Any], message: str) -> None:
    """Options are checked before rows are read."""
    with pytest.raises(ConfigError, match=message):
        plugins.make("taskset", PluginSpec("swe", {"path": "rows.jsonl", **options}), TaskSet)


def test_setup_commands(tmp_path: Path) -> None:
    """`setup` runs before the test files are restored."""
    script = read_task(tmp_path, GYM, setup=["make"]).evaluator.options["eval_script"]
    assert "\nmake\ngit checkout" in script


def test_patches_with_quoted_names() -> None:
    """Lines of content that look like headers are content."""
    diff = (
        'diff --git "a/t \\303\\244.py" "b/t \\303\\244.py"\nnew file mode 100644\n--- /dev/null\n'
        '+++ "b/t.py"\n@@ -0,0 +1,2 @@\n+x\n+deleted file mode\n'
    )
    assert list_files(diff).before == ()
    assert list_files(diff).after == ("t \N{LATIN SMALL LETTER A WITH DIAERESIS}.py",)
    assert list_files("") == ((), ())


def test_commits_of_the_toy_are_reproducible(tmp_path: Path) -> None:
    """Hashes of the commits do not depend on the machine."""
    rows = make_repository(tmp_path)
    assert [row["base_commit"][:7] for row in rows] == ["baccd5a", "7b3020c", "99ea893", "132ac25"]
